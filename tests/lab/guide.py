"""Copies the project to a folder and adds the files of docs/method.md, printed there or linked.

python tests/lab/guide.py FOLDER && cd FOLDER && python -m pytest
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "method.md"
LINKED = ROOT / "docs" / "method"
REGISTRY = Path("dynatree_lab") / "methods" / "drafting.py"


def read_files() -> dict[str, str]:
    """Return the source of each file that the page prints in full or links, by the path that it
    tells the reader to give it."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    files = dict(found)
    for file in LINKED.glob("*.py"):
        folder = "tests/lab/" if file.name.startswith("test_") else ""
        files[folder + file.name] = file.read_text(encoding="utf-8")
    return files


def patched_registry() -> str:
    """Return the source of drafting.py with the lines that the page adds to it."""
    text = PAGE.read_text(encoding="utf-8")
    source = (ROOT / REGISTRY).read_text(encoding="utf-8")
    for diff in re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        source = apply_diff(source, diff)
    return source


def apply_diff(source: str, diff: str) -> str:
    """Return the source with each added line of a diff inserted after the line that precedes it in
    the diff. A line that the source has already is not added again."""
    before = ""
    for line in diff.splitlines():
        if line.startswith("+") and f"\n{line[1:]}\n" not in source:
            assert source.count(f"\n{before}\n") == 1, before
            source = source.replace(f"\n{before}\n", f"\n{before}\n{line[1:]}\n")
        before = line[1:]
    return source


def make_copy(folder: Path) -> None:
    """Copy the project, with the page's additions, to a folder that does not exist yet."""
    names = (".git", ".*_cache", "__pycache__", ".venv", "venv", "env", "enlarged", "*.egg-info")
    left_out = shutil.ignore_patterns(*names)
    shutil.copytree(ROOT, folder, ignore=left_out)
    (folder / REGISTRY).write_text(patched_registry(), encoding="utf-8")
    for name, source in read_files().items():
        place = folder / name
        assert not place.exists() or place.read_text(encoding="utf-8") == source, name
        place.parent.mkdir(exist_ok=True)
        place.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    make_copy(Path(sys.argv[1]))
