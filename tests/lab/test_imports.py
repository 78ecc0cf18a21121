"""Tests that a file imports only its own package and lower layers, without import cycles."""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from small import ROOT

LAB = "dynatree_lab"
# The ground floor, which imports no package
CORE = [{"gpt_neox", "draft_tree"}, {"verify"}, {"sampling"}, {"dynatree"}, {"bench"}]
PACKAGES = [{"methods"}, {"engine"}, {"replay"}, {"generation"}, {LAB}, {"cli"}]
PACKAGES += [{"training", "benchmark"}]
ALL = [*CORE, *PACKAGES, {"tools"}]
LAYER = {name: layer for layer, names in enumerate(ALL) for name in names}


def source_files() -> list[Path]:
    """Return the project's Python files at the top, in tools/ and in its packages, but no tests."""
    lab = ROOT / "dynatree_lab"
    packages = sorted(file.parent for file in lab.glob("*/__init__.py"))
    folders = [ROOT, ROOT / "tools", lab, *packages]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return [file for file in files if file.name != "__main__.py"]  # an import would run it


def project_modules() -> dict[str, Path]:
    """Return the project's files by module name."""
    found = {}
    for file in source_files():
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def package_of(module: str) -> str:
    """Return the name in LAYER that a module belongs to; dynatree_lab for that package's own files,
    which are in none of its folders."""
    first, *rest = module.split(".")
    return rest[0] if first == LAB and (ROOT / LAB / rest[0]).is_dir() else first


def find_imports(file: Path) -> set[str]:
    """Return the modules that a file imports anywhere, except for annotations only."""
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


def test_imports_point_down_without_cycles() -> None:
    """Check that the six files import no package, and that methods do not import engine."""
    files = project_modules()
    del files[LAB]  # names its modules in strings
    below = {name: find_imports(file) & set(files) for name, file in files.items()}
    assert "draft_tree" in below["dynatree"] and "gpt_neox" in below["dynatree_lab.engine.model"]
    list(TopologicalSorter(below).static_order())  # raises CycleError
    for name, others in below.items():
        package = package_of(name)
        for other in set(map(package_of, others)) - {package}:
            assert LAYER[other] < LAYER[package], f"{name} imports {other}"
            assert package != "methods" or other != "engine", f"{name}: {other}"


def test_texts_from_python_import_nothing_of_the_command_line(tmp_path: Path) -> None:
    """Check every public name but `run`, and a text with its page, in a new process."""
    code = "import sys, dynatree_lab as lab\n"
    code += "[getattr(lab, name) for name in dir(lab) if name != 'run']\n"
    code += "result = lab.write_text(lab.load_pair(), 'The ship', max_new_tokens=2)\n"
    code += "lab.save_page(result, sys.argv[1])\n"
    code += "print([name for name in sys.modules if name.startswith('dynatree_lab.cli')])"
    command = [sys.executable, "-c", code, tmp_path / "run.html"]
    assert subprocess.check_output(command, cwd=ROOT, text=True) == "[]\n"


def test_each_package_lists_its_files() -> None:
    """Check that each __init__ names every file, and no removed one. Methods that a user adds need
    not be named."""
    packages = [file.parent for file in source_files() if file.name == "__init__.py"]
    assert {package.name for package in packages} > {LAB, "engine", "methods", "cli", "tools"}
    for package in packages:
        doc = importlib.import_module(".".join(package.relative_to(ROOT).parts)).__doc__
        said = set(re.findall(r"^(\w+)  +\S", doc, re.MULTILINE))
        files = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__"}
        if package.name == LAB:
            files |= {each.name for each in package.iterdir() if each.is_dir()} - {"__pycache__"}
        assert said == files or (said < files and package.name == "methods"), package.name
