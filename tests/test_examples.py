"""Tests that every example in a module's docstring runs as printed.

An example is a paragraph that is indented by four spaces. ruff removes the indent if nothing else
follows the first paragraph. So a paragraph that does not end in a full stop, colon or comma is an
example too, unless it is a list. A paragraph with two spaces between words is a table or a drawing.

Lines that begin with python or torchrun are command lines, which get further options to be quick.
All others are Python. They can use the names of their module, `common` and `NAMES_BY_FILE`.

    python -m pytest tests/test_examples.py
"""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, override, pretend_capture, source_files, top_k
from safetensors.torch import load_file
from test_hub import SINGLE, Hub, golden_files, hub  # noqa: F401
from test_prompts import bucket  # noqa: F401

from benchmark import prompts
from benchmark.cases import Case
from benchmark.options import build_parser as bench_parser
from benchmark.report import text_frame
from benchmark.results import load
from benchmark.step_times import StepTimes
from cli.errors import Parser
from cli.main import build_parser
from cli.models import Request, load_pair
from cli.trace import Trace
from draft_tree import Candidates, DynaTree
from dynatree import ModelDrafter
from engine.checkpoint import read_config
from engine.eagle_head import load_head
from engine.generate import generate
from engine.generation_config import GenerationConfig
from engine.model import FastGPTNeoX
from gpt_neox import GPTNeoX, rotary_table
from methods.compose import generate as compose_generate
from methods.dyspec import DySpec
from methods.sequoia import parse_rank_probs
from methods.static import Chain, Fixed
from verify import tree_inputs

Names = dict[str, object]


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


def name_of(file: str) -> str:
    """Return the module name of a file."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


FILES = [str(file.relative_to(ROOT)) for file in source_files() if examples(file)]
FILES.remove("tools/gpu_first_pass.py")  # needs a GPU


def test_no_example_is_missed() -> None:
    """Check that no paragraph that is not taken for an example is valid Python."""
    n_others = 0
    for file in source_files():
        for paragraph in paragraphs(file):
            if not is_example(paragraph):
                n_others += 1
                with pytest.raises(SyntaxError):
                    ast.parse(dedent(paragraph))
    assert n_others > 100 and len(FILES) > 60


@pytest.fixture(scope="module")
def common() -> Names:
    """Return the names that examples use: the embedded models, one generation and its parts."""
    pair = load_pair(TINY / "target", TINY / "draft", device="cpu")
    ids = pair.tokenizer.encode("The ship sailed at dawn").ids
    request = Request(pair, ids, GenerationConfig(DynaTree()), 20)
    trace = Trace(pair.tokenizer, DynaTree())
    steps = []
    for step in request.decode(observer=trace):
        trace.add(step)
        steps.append(step)
    step = steps[1]
    tree = step.tree
    tokens, positions, mask = tree_inputs(tree, len(ids))
    kv, rotary = pair.target.new_memory(1280)
    names = locals()
    of_target = {name: getattr(pair.target, name) for name in ("config", "device")}
    heads = {name: torch.randn(4, n, 16) for name, n in (("q", len(tree)), ("k", 256), ("v", 256))}
    return (
        names
        | of_target
        | heads
        | {
            "target": pair.target,
            "draft": pair.draft,
            "model": pair.target,
            "tokenizer": pair.tokenizer,
            "vocab_size": pair.target.config.vocab_size,
            "cache": pair.target.new_cache(200),
            "x": torch.randn(len(tree), pair.target.config.hidden_size),
            "logits": torch.randn(len(tree), pair.target.config.vocab_size),
            "prompt": ids,
            "prompt_ids": ids,
            "path": step.path,
            "length": len(ids),
            "start": len(ids),
            "n_slots": 256,
            "rule": Fixed().make_rule(),
            "source": TINY / "draft",
            "tensors": load_file(TINY / "draft" / "model.safetensors"),
        }
    )


def draft_randomly(tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
    return top_k(torch.randn(len(tokens), 9), k)


ROWS = torch.arange(6).reshape(2, 3)  # two sequences


def load_reference_pair() -> Names:
    models = {role: GPTNeoX.from_pretrained(TINY / role) for role in ("target", "draft")}
    return models | {"DySpec": DySpec}


def empty_model() -> Names:
    with torch.device("meta"):
        return {"model": FastGPTNeoX(read_config(TINY / "draft"))}


# The names that only one module's examples use, by file
NAMES_BY_FILE: dict[str, Callable[[], Names]] = {
    "draft_tree.py": lambda: {"root_token": 7, "drafter": SimpleNamespace(draft=draft_randomly)},
    "benchmark/cases.py": lambda: {"build_parser": bench_parser},
    "benchmark/columns.py": lambda: {"texts": text_frame(load("results/main_cpu.jsonl"))},
    "benchmark/counts.py": lambda: {
        "config": GenerationConfig(DynaTree()),
        "step_times": StepTimes(7, [1, 2], [1.0, 2.0], [1.0, 2.0], 0, 0, 1.0),
    },
    "benchmark/figures.py": lambda: {"load": load},
    "benchmark/machine.py": lambda: {"models": {"target": "a", "draft": "b"}},
    "benchmark/memory.py": lambda: {
        "case": Case("dynatree", "builtin", 7, 20, 0.0),
        "args": bench_parser().parse_args(["--threads", "1"]),
    },
    "benchmark/prepare.py": lambda: {"build_parser": bench_parser},
    "benchmark/report.py": lambda: {"load": load},
    "cli/errors.py": lambda: {
        "execute": lambda args: 0,
        "parser": Parser(prog="x"),
        "arguments": [],
    },
    "cli/options.py": lambda: {"parser": build_parser()},
    "cli/page.py": lambda: {"about": {"settings": {"method": "dynatree"}}},
    "cli/trace.py": lambda: {
        "generate": generate,
        "settings": DynaTree(),
        "GenerationConfig": GenerationConfig,
    },
    "engine/checkpoint.py": lambda: {"read_config": read_config},
    "engine/generate.py": lambda: {"DynaTree": DynaTree},
    "engine/layers.py": empty_model,
    "engine/masks.py": lambda: {"q": torch.randn(4, 3, 16), "kv": torch.randn(2, 4, 64, 16)},
    "engine/memory.py": lambda: {"n_bytes": 1000},
    "engine/strict.py": lambda: {"GenerationConfig": GenerationConfig, "DynaTree": DynaTree},
    "engine/scores.py": lambda: {"hidden": torch.zeros(3, 8)},
    "engine/linear.py": lambda: {
        "weight": torch.randn(5, 8),
        "bias": torch.zeros(5),
        "x": torch.randn(3, 8),
    },
    "engine/generation_config.py": lambda: {"DynaTree": DynaTree},
    "methods/calibration.py": lambda: {"drafter": ModelDrafter(load_reference_pair()["draft"])},
    "methods/compose.py": load_reference_pair,
    "methods/eagle.py": lambda: (
        {"generate": compose_generate, "Chain": Chain} | {"Path": Path, "load_head": load_head}
    ),
    "tools/batches.py": lambda: (
        {"model": load_reference_pair()["target"], "rows": ROWS} | {"rotary_table": rotary_table}
    ),
    "tools/own_text.py": lambda: {"target": load_reference_pair()["target"], "prompts": ROWS},
    "methods/settings.py": lambda: {
        "dataclass": dataclass,
        "parse_rank_probs": parse_rank_probs,
    },
}
NETWORK = {
    "engine/checkpoint.py": "hub",
    "benchmark/prompts.py": "hub",
    "benchmark/pg19.py": "bucket",
}
EXTRA_PACKAGES = {"benchmark/figures.py": "seaborn", "benchmark/plot.py": "seaborn"}
QUICK_OPTIONS = {  # they override those of the examples
    "dynatree.py": "--max-new-tokens 8 --threads 1",
    "bench.py": "--n-prompts 1 --prompt-tokens 12 --max-new-tokens 6 --repeats 1 --columns exact",
    "tools/distil.py": "--steps 2 --batch 2 --context 16 --device cpu",
    "tools/enlarge.py": "--hidden 640 --layers 6 --vocab 4200",
}
QUICK_CONSTANTS = {  # of modules whose command has no options for its size
    "benchmark/blocks.py": {"REAL_ROWS": (64,), "MAX_DEPTH": 3, "N_TOKENS": 8, "N_RANDOM": 1},
}


def publish(at: Hub, folder: Path) -> None:
    """Serve the files that examples fetch."""
    at.add("EleutherAI/pythia-70m", golden_files(SINGLE), "step3000")
    file = folder / prompts.WIKITEXT_ZIP
    with zipfile.ZipFile(file, "w") as archive:
        for name in (prompts.WIKITEXT_FILE, prompts.SCRIPT_FILE):
            archive.writestr(name, prompts.BUILTIN[0])
    files = {prompts.WIKITEXT_ZIP: file.read_bytes()}
    at.add(prompts.WIKITEXT_REPOSITORY, files, kind="datasets")


class FakeTransformer:
    """A stand-in for a model of transformers, which generates one token."""

    def to(self, device: torch.device) -> "FakeTransformer":
        return self

    def eval(self) -> "FakeTransformer":
        return self

    def generate(self, ids: torch.Tensor, streamer: object, **options: object) -> None:
        streamer.put(ids[0])
        streamer.put(ids[0, :1])


def make_fake(*arguments: object, **options: object) -> FakeTransformer:
    return FakeTransformer()


TRANSFORMERS = SimpleNamespace(
    AutoModelForCausalLM=SimpleNamespace(from_pretrained=make_fake),
    GenerationConfig=make_fake,
    logging=SimpleNamespace(set_verbosity_error=make_fake, disable_progress_bar=make_fake),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with the files that examples read, and return it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmark.options.ROOT", tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(TINY)
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "main_cpu.jsonl", "results")
    (tmp_path / "results" / "run_gpu").mkdir()
    Path("results/run_gpu/versions.json").write_text("{}")
    shutil.copytree(TINY / "draft", "my-target")
    Path("corpus.txt").write_text("\n\n".join(prompts.BUILTIN * 2))
    Path("model.safetensors.index.json").write_text('{"weight_map": {}}')
    return tmp_path


def run_command(line: str) -> None:
    """Run an example's command line, in this process if it is a python command."""
    command, program, *words = shlex.split(line, comments=True)
    if command == "torchrun":
        assert program == "--nproc-per-node"
        count, program, *words = words
        words = override(words, *QUICK_OPTIONS.get(program, "").split())
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count, program]
        subprocess.run([*run, *words], cwd=ROOT, check=True)
        return
    if program == "-m":
        program, *words = words
    words = [word for pattern in words for word in glob(pattern) or [pattern]]  # as a shell does
    module = "cli.main" if program == "dynatree.py" else name_of(program)
    arguments = override(words, *QUICK_OPTIONS.get(program, "").split())
    assert importlib.import_module(module).main(arguments) == 0


def is_command(example: str) -> bool:
    return bool(re.match("(#.*\n)?(python|torchrun) ", example))


def run_python(file: str, given: Names) -> None:
    """Run the Python examples of a module. given: names that they use, besides the module's."""
    names = given | vars(importlib.import_module(name_of(file))) | {"__name__": file}
    for example in examples(ROOT / file):
        if not is_command(example):
            exec(compile(example, file, "exec"), names)


@pytest.mark.parametrize("file", FILES)
def test_examples_run(
    file: str,
    common: Names,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if file in EXTRA_PACKAGES:
        pytest.importorskip(EXTRA_PACKAGES[file])
    if file in NETWORK:
        served = request.getfixturevalue(NETWORK[file])
        if isinstance(served, Hub):
            publish(served, folder)
    for name, value in QUICK_CONSTANTS.get(file, {}).items():
        monkeypatch.setattr(f"{name_of(file)}.{name}", value)
    monkeypatch.setitem(sys.modules, "transformers", TRANSFORMERS)
    pretend_capture(monkeypatch)
    run_python(file, common | NAMES_BY_FILE.get(file, dict)())
    for example in filter(is_command, examples(ROOT / file)):
        for line in example.splitlines():
            if not line.startswith("#"):
                run_command(line)
