"""Tests that everything the documents name exists. .ci/run runs the code of docs/method.md.

python -m pytest tests/lab/test_docs.py
"""

import re
from pathlib import Path

from small import ROOT

from dynatree_lab.benchmark.cases import PRESETS, TABLES
from dynatree_lab.benchmark.results import load

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "tour.ipynb"]


def is_defined(name: str, file: Path) -> bool:
    """Whether a file defines a function, class or value of this name, or `name` of Class.name."""
    name = name.split(".")[-1]
    pattern = rf"^\s*(?:(?:def|class) {name}\b|{name}(?:: .+)? =|{name}: )"
    return bool(re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE))


def test_names_in_the_papers_tables_exist() -> None:
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    mentioned = re.findall(r"`([\w.]+)` in ([\w/]+\.py)", rows)
    missing = [(name, file) for name, file in mentioned if not is_defined(name, ROOT / file)]
    assert not missing and len(mentioned) > 20
    assert all((ROOT / file).exists() for file in re.findall(r"[\w/]+\.py", rows))


def test_tables_named_in_the_documents_exist() -> None:
    for page in PAGES:
        names = re.findall(r"--table ([\w-]+)", page.read_text(encoding="utf-8"))
        assert set(names) <= set(TABLES | PRESETS), page.name
    paper = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert all(f"--table {name}`" in paper for name in PRESETS)


def test_a_results_file_is_cited_with_its_own_commit() -> None:
    """Compare with the commit in the file. The page once named another commit."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    cited = re.findall(r"\((results/\w+\.jsonl): [^)]*commit (\w+)\)", text)
    for file, commit in cited:
        assert load(ROOT / file).head["machine"]["commit"].startswith(commit), file
    assert len(cited) > 3


def test_the_readmes_file_tree_is_the_projects() -> None:
    """Check that all named files exist and that no file or package at the top is missing."""
    section = README[README.index("## The six files") :]
    named = re.findall(r"^([\w./]+)  ", section, re.MULTILINE)
    within = re.findall(r"^  (\w+/)  ", section, re.MULTILINE)
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in within if not (ROOT / "dynatree_lab" / name).exists()]
    files = [file.name for file in ROOT.glob("*.py")]
    packages = [f"{file.parent.name}/" for file in ROOT.glob("*/__init__.py")]
    assert not missing and len(named) > 10
    assert set(files + packages) <= set(named)


def test_links_lead_somewhere() -> None:
    """Check every relative link of a page, from the page's folder."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
