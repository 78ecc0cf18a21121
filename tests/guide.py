"""A copy of the project with the methods of docs/method.md in it, to the letter.

python tests/guide.py FOLDER && cd FOLDER && python -m pytest  # but for the copying of the copy
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "method.md"
REGISTRY = Path("methods") / "drafting.py"


def files() -> dict[str, str]:
    """The files that the page has, whole, by the name that it gives them."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"`(\w+/\w+\.py)`:\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return dict(found)


def registry() -> str:
    """methods/drafting.py with the lines that the page adds to it."""
    text = PAGE.read_text(encoding="utf-8")
    source = (ROOT / REGISTRY).read_text(encoding="utf-8")
    for diff in re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        source = patched(source, diff)
    return source


def patched(source: str, diff: str) -> str:
    """The source with every added line of the diff behind the line that the diff shows before; who
    has followed the page has it already."""
    before = ""
    for line in diff.splitlines():
        if line.startswith("+") and f"\n{line[1:]}\n" not in source:
            assert source.count(f"\n{before}\n") == 1, before
            source = source.replace(f"\n{before}\n", f"\n{before}\n{line[1:]}\n")
        before = line[1:]
    return source


def make_copy(folder: Path) -> None:
    """The project with what the page adds, in a folder that is not there yet."""
    left_out = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", ".venv", "venv", "env")
    shutil.copytree(ROOT, folder, ignore=left_out)
    (folder / REGISTRY).write_text(registry(), encoding="utf-8")
    for name, source in files().items():
        place = folder / name
        assert not place.exists() or place.read_text(encoding="utf-8") == source, name
        place.parent.mkdir(exist_ok=True)
        place.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    make_copy(Path(sys.argv[1]))
