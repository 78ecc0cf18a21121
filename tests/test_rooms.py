"""Who may import whom: a file imports its own room or lower ranks, nothing else."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
RANKS = [{"engine"}, {"gpt_neox", "draft_tree"}, {"verify", "methods", "parallel"}]
RANKS += [{"dynatree"}, {"cli"}, {"benchmark"}, {"bench"}, {"tools"}]


def rank(room: str) -> int | None:
    """None for what is not ours."""
    return next((i for i, rooms in enumerate(RANKS) if room in rooms), None)


def imported(file: Path) -> set[str]:
    """The rooms a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found


def test_imports_point_down() -> None:
    """dynatree's last lines, which hand over to the command line, are the only ones that do not;
    methods never import the model, though it ranks below them."""
    files = [file for file in ROOT.rglob("*.py") if file.relative_to(ROOT).parts[0] != "tests"]
    wrong = []
    for file in files:
        room = file.relative_to(ROOT).with_suffix("").parts[0]
        for other in imported(file):
            is_ours = rank(other) is not None and other != room
            if is_ours and (rank(other) >= rank(room) or (room, other) == ("methods", "gpt_neox")):
                wrong.append((file.name, other))
    assert wrong == [("dynatree.py", "cli")] and len(files) > 30


def modules() -> dict[str, Path]:
    """The project's files by the names that imports give them."""
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "tests":
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported_modules(file: Path, known: set[str]) -> set[str]:
    """Of the project's, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def test_imports_make_no_circle() -> None:
    """But for dynatree's last lines, which import the command line."""
    files = modules()
    below = {name: imported_modules(file, set(files)) for name, file in files.items()}
    assert below["dynatree"] >= {"cli.main", "draft_tree"}
    below["dynatree"] -= {"cli.main", "cli.start"}
    list(TopologicalSorter(below).static_order())  # raises CycleError


def test_the_top_level_is_the_algorithm() -> None:
    five = {"gpt_neox.py", "draft_tree.py", "verify.py", "dynatree.py", "bench.py"}
    assert {file.name for file in ROOT.glob("*.py")} == five
