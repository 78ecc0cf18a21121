"""Tests of the examples in docstrings and documents.

An example is a paragraph of a module's docstring that is indented by four spaces. ruff removes the
indent if nothing else follows the first paragraph. So a paragraph that does not end in a full stop,
colon or comma is an example too, unless it is a list. A paragraph with two spaces between words is
a table or a drawing.

Command lines are parsed by their program. Python runs if all its names are known (`known_names`,
and those of modules). If not, and for the packages in SLOW, its calls are compared with signatures.

    python -m pytest tests/lab/test_examples.py
"""

import argparse
import ast
import builtins
import importlib
import inspect
import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from small import ROOT, TINY
from test_imports import source_files

from draft_tree import DynaTree
from dynatree import ModelDrafter
from dynatree_lab.benchmark.cases import PRESETS, TABLES
from dynatree_lab.cli.options import choose_config
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.pair import load_pair
from dynatree_lab.request import Request

Names = dict[str, object]
COMMAND = re.compile(
    r"(?:(?:python|torchrun --nproc-per-node \d) (?:-m )?(?=dynatree|bench|tools)|(?=dynatree-))"
    r"([\w./-]+) ?(.*)"
)
PROGRAMS = {
    "dynatree.py": "dynatree",
    "dynatree_lab": "dynatree_lab.cli.main",
    "dynatree-lab": "dynatree_lab.cli.main",
    "dynatree_lab.benchmark": "dynatree_lab.benchmark.measure",
    "dynatree-bench": "dynatree_lab.benchmark.measure",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = ("dynatree_lab/benchmark/", "dynatree_lab/training/", "dynatree_lab/cli/start.py", "tools/")
FIGURES = "dynatree_lab/benchmark/figures.py"  # needs seaborn, which is optional
# docs/method.md adds wide and the file of --load
NOT_OURS = ("pytest", "pretend_cuda", "wide", "--load")


def paragraphs(file: Path) -> list[str]:
    """Return the paragraphs of a module's docstring except the first."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False) or ""
    return [paragraph.strip("\n") for paragraph in doc.split("\n\n")[1:]]


def is_example(paragraph: str) -> bool:
    if re.search(r"\S  +[^ #]", paragraph) or paragraph.startswith("- "):
        return False
    return paragraph.startswith("    ") or paragraph[-1] not in ".:,"


def examples(file: Path) -> list[str]:
    return [dedent(paragraph) for paragraph in filter(is_example, paragraphs(file))]


def commands(text: str) -> list[tuple[str, str]]:
    """Return the program and the options of each line that is a command of this project."""
    ours = [line for line in text.splitlines() if not any(word in line for word in NOT_OURS)]
    return [found.groups() for found in map(COMMAND.match, ours) if found]


def is_command(example: str) -> bool:
    return bool(re.search("^(python|torchrun|dynatree-bench) ", example, re.MULTILINE))


def module_of(file: str) -> str:
    """Return the name of the module of a file or program."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


FILES = [str(file.relative_to(ROOT)) for file in source_files()]
EXAMPLES = {file: examples(ROOT / file) for file in FILES}
PYTHON = {
    file: "\n".join(example for example in found if not is_command(example))
    for file, found in EXAMPLES.items()
}
PYTHON = {file: example for file, example in PYTHON.items() if example}
TEXTS = [example for found in EXAMPLES.values() for example in found]
TEXTS += [page.read_text(encoding="utf-8") for page in PAGES]
COMMANDS = [command for text in TEXTS for command in commands(text)]


class Parsed(BaseException):
    """Ends a program after its options are parsed."""


def test_commands_are_as_their_programs_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check options, methods with their settings, and names of tables."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: object) -> argparse.Namespace:
        raise Parsed(parse(parser, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for program, options in COMMANDS:
        module = PROGRAMS.get(program) or module_of(program)
        with pytest.raises((Parsed, SystemExit)) as ended:
            importlib.import_module(module).main(shlex.split(options, comments=True))
        (args,) = ended.value.args
        if isinstance(ended.value, SystemExit):
            assert args == 0  # of --list-methods
        elif module == "dynatree_lab.cli.main":
            choose_config(args)
        elif module == "dynatree_lab.benchmark.measure":
            assert args.table is None or args.table in TABLES | PRESETS
            for words in args.methods or ["ar"]:
                GenerationConfig.parse(*words.split())


@pytest.fixture(scope="module")
def known_names() -> Names:
    """Return names that examples may use: the embedded models, one generation and its parts."""
    pair = load_pair(TINY / "target", TINY / "draft", device="cpu")
    target, draft, tokenizer = pair.target, pair.draft, pair.tokenizer
    prompt = tokenizer.encode("The ship sailed at dawn").ids
    settings = DynaTree()
    request = Request(pair, prompt, GenerationConfig(settings), 20, is_recorded=True)
    steps = list(request.decode())
    step, device = steps[1], torch.device("cpu")
    tree, path = step.tree, step.path
    drafter = ModelDrafter(draft)
    logits = torch.randn(len(tree), target.config.vocab_size)
    return locals()


def public_names(files: list[str]) -> Names:
    """Return all names of these modules, without those of modules."""
    modules = [vars(importlib.import_module(module_of(file))) for file in files]
    found = {name: value for names in modules for name, value in names.items()}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def names_read(tree: ast.AST) -> set[str]:
    """Return the names that an example reads but does not bind."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    bound |= {each.name for node in ast.walk(tree) for each in getattr(node, "names", ())}
    return {name.id for name in names} - bound - set(dir(builtins))


def check_calls(tree: ast.AST, names: Names) -> None:
    """Check that each function which is called by its name exists and takes the arguments."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "id", None) in names_read(tree)]
    for call in calls:
        if not any(isinstance(argument, ast.Starred) for argument in call.args):
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(names[call.func.id]).bind(*call.args, **keywords)


@pytest.mark.parametrize("file", PYTHON)
def test_python_works_as_printed(
    file: str, known_names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file == FIGURES:
        pytest.importorskip("seaborn")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    others = [other for other in FILES if other != FIGURES]
    beside = [other for other in others if Path(other).parent == Path(file).parent]
    names = public_names(others) | known_names | public_names([*beside, file])
    tree = ast.parse(PYTHON[file])
    if names_read(tree) <= names.keys() and not file.startswith(SLOW):
        exec(compile(tree, file, "exec"), names)
    else:
        check_calls(tree, names)
