"""Claim: what the documents say is there is there, and the code of docs/method.md does as it says.

python -m pytest tests/test_docs.py
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import guide
import pytest
from conftest import TINY
from pytest import MonkeyPatch
from tokenizers import Tokenizer

from benchmark.tables import PRESETS, TABLES
from methods import DRAFTING, METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The code blocks in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def load(name: str, source: str, folder: Path, monkeypatch: MonkeyPatch) -> ModuleType:
    """A module of this source, importable as `name` for as long as the test runs."""
    file = folder / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def follow_the_page(rule: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> ModuleType:
    """Add the page's methods as it says, with this source of wide's rule: its test of wide."""
    pages = guide.files() | {"methods/wide.py": rule}
    for name in ("wide", "block"):
        load(f"methods.{name}", pages[f"methods/{name}.py"], tmp_path, monkeypatch)
    changed = load("changed_registry", guide.registry(), tmp_path, monkeypatch).DRAFTING
    for name in ("wide", "block"):
        monkeypatch.setitem(DRAFTING, name, changed[name])
        monkeypatch.setitem(METHODS, name, changed[name])
    assert changed == DRAFTING
    return load("test_wide", pages["tests/test_wide.py"], tmp_path, monkeypatch)


def test_exact_text_does_not_prove_the_tree(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The page says so of one error; the oracle finds it and the text does not."""
    rule = guide.files()["methods/wide.py"]
    wrong = rule.replace("level.logprobs", "level.path_logprobs")
    assert wrong != rule
    page = follow_the_page(wrong, tmp_path, monkeypatch)
    page.test_the_text_is_the_targets()
    with pytest.raises(AssertionError):
        page.test_the_tree_is_the_one_defined()


def test_the_suite_holds_with_the_pages_methods(tmp_path: Path) -> None:
    """Copied to the letter, by every test that is about them; .ci/run runs the whole suite so.
    Lists of methods kept by hand, in tests that nobody had named, failed here."""
    copy = tmp_path / "copy"
    guide.make_copy(copy)
    files = sorted((copy / "tests").glob("test_*.py"))
    tests = [str(file) for file in files if knows_methods(file)]
    options = ["-n", "1", "-q", "-x", "-p", "guide", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def knows_methods(file: Path) -> bool:
    """Whether a test goes by the registry."""
    return bool(re.search(r"METHODS|random_settings|Block", file.read_text(encoding="utf-8")))


def names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return []


def defined(file: Path) -> set[str]:
    """The names at the top of a file, and `Class.name` of those in its classes."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        found.update(names(node))
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                found.update(f"{node.name}.{name}" for name in names(inner))
    return found


def test_names_in_the_papers_tables_exist() -> None:
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    mentioned = re.findall(r"`([\w.]+)` in ([\w/]+\.py)", rows)
    missing = [(name, file) for name, file in mentioned if name not in defined(ROOT / file)]
    assert not missing and len(mentioned) > 20
    assert all((ROOT / file).exists() for file in re.findall(r"[\w/]+\.py", rows))


def test_tables_named_in_the_documents_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        names = re.findall(r"--table ([\w-]+)", page.read_text(encoding="utf-8"))
        assert set(names) <= set(TABLES | PRESETS), page.name
    paper = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert all(f"--table {name}`" in paper for name in PRESETS)


def test_the_readmes_file_tree_is_the_projects() -> None:
    """Everything it names exists, and no file or room at the top is left out."""
    section = README[README.index("## Reading order") :]
    named = re.findall(r"^([\w./]+)  ", "\n".join(blocks(section, "")[:2]), re.MULTILINE)
    missing = [name for name in named if not (ROOT / name).exists()]
    files = [file.name for file in ROOT.glob("*.py")]
    rooms = [f"{file.parent.name}/" for file in ROOT.glob("*/__init__.py")]
    assert not missing and len(named) > 10
    assert set(files + rooms) <= set(named)


def test_the_readme_keeps_what_is_read_by_machine() -> None:
    """.ci/run runs three of its lines, bench.py fills what stands between two."""
    lines = README.splitlines()
    install = "pip install -r requirements.txt && "
    first_command = lines.index(install + 'python dynatree.py --prompt "The ship sailed at dawn"')
    assert first_command < 25
    assert lines[first_command + 1] == install + "python -m pytest"
    assert sum(line.startswith(install) for line in lines) == 2
    assert sum(line.startswith("pip install seaborn") for line in lines) == 1
    start = lines.index("<!-- results: made by bench.py --docs -->")
    assert start < lines.index("<!-- end of results -->")


@pytest.mark.parametrize("model", ["target", "draft"])
def test_other_tools_read_the_tiny_models_as_we_do(model: str) -> None:
    """Without these files transformers pads with an id beyond the embedding."""
    folder = TINY / model
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert generation["eos_token_id"] == generation["pad_token_id"] == config["eos_token_id"]
    for name in ("bos_token", "eos_token", "pad_token"):
        assert tokenizer.token_to_id(tokenizer_config[name]) == config["eos_token_id"]


def test_links_lead_somewhere() -> None:
    """Every relative link of a page, from where the page lies."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert len(pages) == 8
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
