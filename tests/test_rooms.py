"""Who may import whom: a file imports its own room or lower ranks, and no imports make a circle."""

import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT, source_files

CORE = [{"gpt_neox", "draft_tree"}, {"verify"}, {"sampling"}, {"dynatree"}]  # whole by themselves
ROOMS = [{"methods"}, {"engine"}, {"cli"}, {"benchmark"}, {"bench"}, {"tools"}]
RANKS = CORE + ROOMS
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}


def modules() -> dict[str, Path]:
    """The project's files by the names that imports give them."""
    found = {}
    for file in source_files():
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[0] in RANK:
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported(file: Path) -> set[str]:
    """What a file imports, wherever in it the import stands, but for annotations alone."""
    found, tree = set(), ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_imports_point_down_and_make_no_circle() -> None:
    """The rooms stand on the five files, which import none of them; dynatree's last lines, which
    hand over to the command line, are the only ones that point up. Methods know no engine."""
    files = modules()
    below = {name: imported(file) & set(files) for name, file in files.items()}
    below["dynatree"] = {name for name in below["dynatree"] if not name.startswith("cli")}
    assert "draft_tree" in below["dynatree"] and "gpt_neox" in below["engine.model"]
    list(TopologicalSorter(below).static_order())  # raises CycleError
    for name, others in below.items():
        room = name.split(".")[0]
        for other in {other.split(".")[0] for other in others} - {room}:
            assert RANK[other] < RANK[room], f"{name} imports {other}"
            assert room != "methods" or other != "engine", f"{name}: {other}"


def test_each_room_says_what_is_in_it() -> None:
    """Its __init__ names every file, but for methods that somebody adds, and none that has gone."""
    rooms = [file.parent for file in ROOT.glob("*/__init__.py")]
    assert {"engine", "methods", "cli", "benchmark", "tools"} <= {room.name for room in rooms}
    for room in rooms:
        doc = importlib.import_module(room.name).__doc__
        said = set(re.findall(r"^(\w+)  +\S", doc, re.MULTILINE))
        files = {file.stem for file in room.glob("*.py")} - {"__init__"}
        assert said == files or (said < files and room.name == "methods"), room.name


def test_a_virtual_environment_in_the_clone_is_not_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs were taken for the project's own."""
    package = ".venv/lib/python3.11/site-packages/other"
    for name in ("bench.py", "cli/__init__.py", "venv/x.py", f"{package}/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr("conftest.ROOT", tmp_path)
    assert source_files() == [tmp_path / "bench.py", tmp_path / "cli" / "__init__.py"]
