"""Claim: the draft's precision is its own; it can cost acceptance, and it never changes the text.

Also: which device and precision are taken where none is named, and what is said of a draft that
overflows in its own.
"""

import functools
import io
import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, pretend_one_gpu, random_config, random_settings, random_tensors
from safetensors.torch import load_file, save_file

import bench
from benchmark.peers import Peers
from benchmark.report import machine_text
from benchmark.results import Results
from cli.errors import UsageError
from cli.main import main
from cli.metrics import token_ids
from cli.models import (
    Pair,
    announcement,
    choose_device,
    choose_draft_dtype,
    choose_dtype,
    default_models,
    load_pair,
)
from dynatree import generate
from engine.checkpoint import DTYPES
from gpt_neox import GPTNeoX
from methods import METHODS
from methods.static import Alone

PROMPT = "The ship sailed at dawn"
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
DRAFTING = [name for name, settings in METHODS.items() if settings().rule().max_depth]
Captured = pytest.CaptureFixture[str]


def test_the_default_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(None) == CPU and choose_dtype(None, CPU) == torch.float32
    assert [Path(name).resolve().parent for name in default_models(CPU)] == [TINY.resolve()] * 2
    pretend_one_gpu(monkeypatch)
    assert choose_device(None) == CUDA and choose_dtype(None, CUDA) == torch.float16
    assert default_models(CUDA) == ("EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m")
    assert choose_device("cpu") == CPU


OLD = (7, 5)  # the last compute capability that has no bfloat16
NEW = (8, 0)


@pytest.mark.parametrize(
    ("capability", "device", "target", "draft"),
    [
        (NEW, CUDA, "float16", "bfloat16"),
        (NEW, CUDA, "bfloat16", "bfloat16"),
        (NEW, CUDA, "float32", "float32"),
        (OLD, CUDA, "float16", "float16"),
        (OLD, CUDA, "float32", "float32"),
        (NEW, CPU, "float16", "float16"),
        (NEW, CPU, "bfloat16", "bfloat16"),
        (NEW, CPU, "float32", "float32"),
    ],
)
def test_the_drafts_own_dtype_by_default(
    capability: tuple[int, int],
    device: torch.device,
    target: str,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pythia-70M, the default draft, is known to overflow in the default target's float16."""
    pretend_one_gpu(monkeypatch, capability)
    assert choose_draft_dtype(None, DTYPES[target], device) == DTYPES[draft]
    for named in ("float32", "float16"):
        assert choose_draft_dtype(named, DTYPES[target], device) == DTYPES[named]


def test_both_dtypes_are_announced_and_reported(capsys: Captured) -> None:
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "9", "--json"]
    settings = []
    for options in ([], ["--draft-dtype", "bfloat16"], ["--method", "ar"]):
        assert main(arguments + options) == 0
        captured = capsys.readouterr()
        settings.append(json.loads(captured.out)["settings"])
        if "bfloat16" in options:
            assert captured.err.splitlines()[0].endswith("; cpu, float32, draft bfloat16")
        else:
            assert captured.err.splitlines()[0].endswith("; cpu, float32")
    assert [found["dtype"] for found in settings] == ["float32"] * 3
    assert [found["draft_dtype"] for found in settings] == ["float32", "bfloat16", None]
    on_gpu = {"target": "T", "draft": "D", "device": "cuda:0"}
    on_gpu |= {"dtype": "float16", "draft_dtype": "bfloat16"}
    assert announcement(on_gpu) == "target T, draft D; cuda:0, float16, draft bfloat16"


def test_a_dtype_of_a_draft_that_is_not_needed_is_said(capsys: Captured) -> None:
    arguments = ["--prompt", "a", "--max-new-tokens", "2", "--method", "ar"]
    assert main(arguments + ["--draft-dtype", "bfloat16"]) == 0
    assert "--method ar needs no draft" in capsys.readouterr().err


# The text is the target's.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", DRAFTING)
def test_greedy_text_of_random_pairs(method: str, dtype: torch.dtype) -> None:
    """A target in float32, and itself with some noise as the draft, in half precision."""
    rng = random.Random(f"{method} {dtype}")
    n_accepted = 0
    for seed in range(8):
        config = random_config(is_parallel=seed % 3 > 0)
        tensors = random_tensors(config, seed)
        noise = random_tensors(config, seed + 100)
        halves = {}
        for name, tensor in tensors.items():
            halves[name] = (tensor + 0.05 * noise[name]).to(dtype)
        target = GPTNeoX.from_tensors(config, tensors)
        draft = GPTNeoX.from_tensors(config, halves)
        prompt = [rng.randrange(config.vocab_size) for _ in range(rng.choice([1, 4, 19]))]
        settings = random_settings(method, rng)
        expected = token_ids(generate(target, None, prompt, Alone(), 30))
        steps = list(generate(target, draft, prompt, settings, 30))
        assert token_ids(steps) == expected, settings
        assert draft.dtype == dtype and target.dtype == torch.float32
        n_accepted += sum(len(step.path) - 1 for step in steps[1:])
    assert n_accepted, "no draft was of any use"


@functools.cache
def embedded_pair(dtype: str) -> tuple[Pair, list[int], list[int]]:
    """The embedded pair, its draft in this type; a prompt, and ar's ids after it."""
    pair = load_pair(TARGET, DRAFT, CPU, torch.float32, DTYPES[dtype])
    prompt = pair.tokenizer.encode(PROMPT).ids
    return pair, prompt, token_ids(generate(pair.target, None, prompt, Alone(), 40))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("method", DRAFTING)
def test_greedy_text_of_the_embedded_pair(method: str, dtype: str) -> None:
    pair, prompt, expected = embedded_pair(dtype)
    steps = list(generate(pair.target, pair.draft, prompt, METHODS[method](), 40))
    assert pair.target.dtype == torch.float32 and pair.draft.dtype == DTYPES[dtype]
    assert token_ids(steps) == expected
    assert len(steps) < 40, "something that it drafted was accepted"


# A draft that overflows.


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded draft, its first layer's values 2 to the 17th times as large and divided again.

    Exactly the same function in float32, and in bfloat16 no worse; in float16 the values overflow.
    """
    folder = tmp_path_factory.mktemp("models") / "draft"
    shutil.copytree(DRAFT, folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor.float()
    n_heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    attention = "gpt_neox.layers.0.attention"
    for part in ("weight", "bias"):
        qkv = tensors[f"{attention}.query_key_value.{part}"].unflatten(0, (n_heads, 3, -1))
        qkv[:, 2] *= 2.0**17
    tensors[f"{attention}.dense.weight"] /= 2.0**17
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def options(draft: str, dtype: str) -> list[str]:
    models = ["--target", TARGET, "--draft", draft, "--draft-dtype", dtype]
    return ["--prompt", PROMPT, "--max-new-tokens", "20"] + models


def test_an_overflow_is_said_at_once(
    overflowing: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, before the text that was written without a draft, and on a line of its own."""
    assert main(options(DRAFT, "float32")) == 0
    text = capsys.readouterr().out
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(options(overflowing, "float16")) == 0
    lines = terminal.getvalue().splitlines()
    (note,) = [line for line in lines if "not finite" in line]
    assert note.startswith("note: the draft's logits are not finite in float16; until they are, ")
    assert note.endswith("; try --draft-dtype float32")
    before, after = terminal.getvalue().split(f"\n{note}\n")
    first = before.splitlines()[-1]  # what the first step wrote: prefill's token
    assert first and text.startswith(first)
    assert after.startswith(text.removeprefix(first)) and len(after) > len(text)


def test_the_same_draft_is_of_use_in_another_dtype(overflowing: str, capsys: Captured) -> None:
    reports = {}
    for dtype in ("float32", "bfloat16", "float16"):
        assert main(options(overflowing, dtype) + ["--json"]) == 0
        captured = capsys.readouterr()
        reports[dtype] = json.loads(captured.out)
        assert captured.err.count("not finite") == (dtype == "float16")
    assert reports["float16"]["metrics"]["draft_nodes"] == 0
    assert reports["bfloat16"]["metrics"]["tokens_per_iter"] > 1.5
    texts = {report["text"] for report in reports.values()}
    assert len(texts) == 1


# The benchmark.


def test_the_benchmark_has_a_draft_dtype(
    overflowing: str, capsys: Captured, tmp_path: Path
) -> None:
    """It is in the results file, a table goes on with it, and an overflow is said once."""
    file = tmp_path / "r.json"
    few = ["--n-prompts", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--columns", "exact"]
    models = ["--target", TARGET, "--draft", overflowing, "--draft-dtype", "float16"]
    few += ["--methods", "linear,fixed", "--output", str(file)]
    assert bench.main(few + models) == 0
    captured = capsys.readouterr()
    assert captured.err.count("the draft's logits are not finite in float16") == 1
    assert "float32 (draft float16) on " in " ".join(captured.out.split())
    results = Results.load(file)
    assert results.options.draft_dtype == "float16"
    assert (results.machine["dtype"], results.machine["draft_dtype"]) == ("float32", "float16")
    n_records = len(results.records)
    results.records.pop()
    results.save(file)
    assert bench.main(["--resume", str(file)]) == 0
    assert len(Results.load(file).records) == n_records
    assert "draft float16" in capsys.readouterr().err
    content = json.loads(file.read_text())
    content["machine"]["draft_dtype"] = "float32"
    file.write_text(json.dumps(content))
    assert bench.main(["--resume", str(file)]) == 2
    assert "draft_dtype was float32" in capsys.readouterr().err


def test_the_peers_load_each_model_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for transformers, whose models are what they were loaded with."""

    class Loaded(SimpleNamespace):
        @classmethod
        def from_pretrained(cls, folder: str, dtype: torch.dtype) -> "Loaded":
            return cls(folder=folder, dtype=dtype, generation_config=SimpleNamespace(num_beams=4))

        def to(self, device: torch.device) -> "Loaded":
            return self

        def eval(self) -> "Loaded":
            return self

    nothing = SimpleNamespace(set_verbosity_error=list, disable_progress_bar=list)
    stand_in = SimpleNamespace(AutoModelForCausalLM=Loaded, logging=nothing)
    stand_in.GenerationConfig = SimpleNamespace
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    peers = Peers(load_pair(TARGET, DRAFT, CPU, torch.float32, torch.bfloat16))
    assert (peers.target.folder, peers.target.dtype) == (TARGET, torch.float32)
    assert (peers.draft.folder, peers.draft.dtype) == (DRAFT, torch.bfloat16)
    for model in (peers.target, peers.draft):  # and nothing of how its folder would generate
        assert model.generation_config == SimpleNamespace(eos_token_id=None, pad_token_id=0)


def test_a_folder_that_the_peers_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read more files than we do: a generation_config.json that is a list was status 70."""

    class Refusing(SimpleNamespace):
        @classmethod
        def from_pretrained(cls, folder: str, dtype: torch.dtype) -> None:
            raise TypeError("'list' object is not a mapping")

    nothing = SimpleNamespace(set_verbosity_error=list, disable_progress_bar=list)
    stand_in = SimpleNamespace(AutoModelForCausalLM=Refusing, logging=nothing)
    stand_in.GenerationConfig = SimpleNamespace
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    with pytest.raises(UsageError, match=f"transformers cannot load {TARGET}: 'list' object is"):
        Peers(load_pair(TARGET, DRAFT, CPU, torch.float32))


def test_older_results_files_name_one_dtype() -> None:
    machine = {"dtype": "float16", "processor": "P", "threads": 2, "torch": "2.13"}
    machine |= {"python": "3.11", "commit": "abc"}
    assert machine_text(machine).startswith("float16 on P, ")
    assert machine_text(machine | {"draft_dtype": "float16"}).startswith("float16 on P, ")
