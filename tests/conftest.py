"""Tiny random GPT-NeoX models for the tests; everything is seeded."""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import Field, asdict, fields, replace
from pathlib import Path

import pytest
import tape
import torch
from safetensors.torch import save_file
from torch import Tensor

import draft_tree
import engine.generate
from draft_tree import MAX_ROWS, Candidates, Rule, Settings, Tree
from engine import cuda_graphs
from engine.checkpoint import INDEX, SINGLE, published_shapes
from engine.generate import Step
from engine.generation_config import GenerationConfig
from engine.model import FastCache, FastGPTNeoX
from engine.passes import PassConfig
from gpt_neox import Config, GPTNeoX, KVCache, rotate
from methods import METHODS
from methods.drawn import DrawnRule
from methods.rules import breadth_first
from verify import tree_inputs

if "pretend_cuda" not in sys.modules:
    collect_ignore = ["pretend_cuda"]  # tests on a pretended device: python tests/pretend_cuda

# Of the workers and programs that tests start: they share the cores, and a thread that spins while
# it waits for another keeps that one from running
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"
GOLDEN = sorted(file.parent for file in (ROOT / "tests" / "golden").glob("*/config.json"))
Captured = pytest.CaptureFixture[str]


def source_files() -> list[Path]:
    """Return the project's Python files without its tests: those at the top and in its rooms. Those
    of a virtual environment beside them are left out."""
    rooms = [file.parent for file in ROOT.glob("*/__init__.py")]
    return [file for folder in (ROOT, *sorted(rooms)) for file in sorted(folder.glob("*.py"))]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Products this small only wait for a second thread, for 30 ms each on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is seen, whatever the machine has, but by tests marked cuda.

    Where one is, no device named means cuda and Pythia, which would be fetched from the hub. The
    variable is for the processes that a test starts: they choose for themselves.
    """
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def pretend_one_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """A GPU for what asks of it and computes nothing on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended GPU")


def pretend_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record and replay passes of fixed shapes as CUDA graphs do."""
    monkeypatch.setattr(cuda_graphs, "record", tape.record)


class Remembering:
    """Settings that keep every rule they hand out."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rules: list[Rule] = []

    def make_rule(self) -> Rule:
        rule = self.settings.make_rule()
        self.rules.append(rule)
        return rule


def random_settings(method: str, rng: random.Random) -> Settings:
    """Small settings of every shape, switched-off parts included; KeyError if there is no such
    method. They are drawn from the ranges, options and examples that the fields themselves name, so
    a new method is covered by its line in the registry."""
    kind = METHODS[method]
    for _ in range(1000):
        values = {field.name: random_value(field, rng) for field in fields(kind)}
        try:
            return kind(**values)
        except ValueError as error:  # as two thresholds out of order: draw again
            refused = error
    raise refused


def random_value(field: Field, rng: random.Random) -> object:
    """One setting, often at an end of its range."""
    if "parse" in field.metadata:
        return rng.choice(field.metadata["examples"])
    low = field.metadata["low"]
    high = field.metadata["high"]
    if field.type is bool:
        return rng.random() < 0.8
    if field.type is float:
        value = rng.choice([low, field.default, 10 ** rng.uniform(-3, 0)])
        return min(max(value, low), high)
    if high == MAX_ROWS:  # rows of a tree
        n_rows = rng.choice([1, 2, 3, 5, 8, 13, 32, 64])
        return max(n_rows, low)
    return rng.randint(low, min(low + 5, high))


def top_k(logits: Tensor, k: int) -> Candidates:
    """Return the k likeliest ids below rows of logits [n, V]."""
    logprobs, ids = torch.log_softmax(logits, dim=-1).sort(descending=True, stable=True)
    return Candidates(ids.numpy()[:, :k], logprobs.numpy()[:, :k])


def grow(
    rule: Rule, root: int, draft: Callable[..., Candidates], max_depth: int, vocab_size: int = 1000
) -> Tree:
    """draft_tree.grow. A draft that has a sampler draws, so its rule is shown drawn levels."""
    if getattr(draft, "sampler", None):
        rule = DrawnRule(rule, draft, None)
    return draft_tree.grow(rule, root, draft, max_depth, vocab_size)


def random_config(**changes: object) -> Config:
    """A model of two layers and two heads of 16; `changes` override fields of Config."""
    config = Config(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        rotary_pct=0.5,
        rotary_emb_base=10000.0,
        eos_ids=(),
    )
    return replace(config, **changes)


def random_tensors(config: Config, seed: int) -> dict[str, Tensor]:
    """Weights large enough for attention to matter and for greedy text to vary."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in published_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.1 * noise
        elif "embed" in name:
            tensors[name] = noise
        else:
            tensors[name] = noise * (1.5 * shape[-1] ** -0.5)
    return tensors


def random_model(
    seed: int,
    dtype: torch.dtype = torch.float32,
    kind: type[GPTNeoX] = FastGPTNeoX,
    **changes: object,
) -> GPTNeoX:
    config = random_config(**changes)
    tensors = {name: t.to(dtype) for name, t in random_tensors(config, seed).items()}
    return kind.from_tensors(config, tensors)


def noisy_pair(
    seed: int = 5,
    noise: float = 0.06,
    dtype: torch.dtype = torch.float32,
    kind: type[GPTNeoX] = FastGPTNeoX,
    **changes: object,
) -> tuple[GPTNeoX, GPTNeoX]:
    """A target, and as its draft the same with noise: often accepted, and often rejected."""
    config = random_config(**changes)
    tensors, other = random_tensors(config, seed), random_tensors(config, seed + 1)
    near = {name: (t + noise * other[name]).to(dtype) for name, t in tensors.items()}
    target = random_model(seed, dtype, kind, **changes)
    return target, kind.from_tensors(config, near)


class Stub(GPTNeoX):
    """A plain model that knows nothing but a row's own token and position."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor], vocab_size: int):
        """logits: of tokens [n] and positions [n], [n, V]."""
        super().__init__(random_config(vocab_size=vocab_size, num_hidden_layers=1))
        self.logits_of = logits

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.logits_of(tokens, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


WHERE = ("eos_ids", "inspect", "watcher")


def generate(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    prompt: list[int],
    settings: Settings,
    max_new_tokens: int,
    **how: object,
) -> Iterator[Step]:
    """Run engine.generate.generate with a GenerationConfig of these fields."""
    rest = {name: how.pop(name) for name in WHERE if name in how}
    config = GenerationConfig(settings, **how)
    return engine.generate.generate(target, draft, prompt, config, max_new_tokens, **rest)


def fix_shapes(*models: FastGPTNeoX) -> None:
    """Passes of few fixed shapes, as on CUDA; replayed after `pretend_capture`."""
    for model in models:
        model.has_fixed_shapes = True


def published_json(config: Config) -> dict[str, object]:
    """What config.json says of such a model."""
    raw = asdict(config)
    return {"model_type": "gpt_neox", "eos_token_id": list(raw.pop("eos_ids"))} | raw


def write_checkpoint(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    """A folder as published ones are, but for a tokenizer."""
    (folder / "config.json").write_text(json.dumps(published_json(config)))
    save_file(tensors, folder / SINGLE)
    return folder


def write_shards(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    """The same in three files and their index, every layer spread over all of them."""
    write_checkpoint(folder, config, {})
    (folder / SINGLE).unlink()
    weight_map = {}
    for i in range(3):
        names = list(tensors)[i::3]
        save_file({name: tensors[name] for name in names}, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{i}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def error_line(capsys: Captured, main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """The message of a command that must fail as every mistake does: one line, and status 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.count("error: ") == 1, captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("error: "), captured.err
    return line


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def run(model: FastGPTNeoX, tokens: list[int]) -> Tensor:
    """The oracle: the whole text in one causal pass over a fresh cache, logits [n, V]."""
    positions = torch.arange(len(tokens))
    cache = model.new_cache(len(tokens))
    return model.forward(torch.tensor(tokens), positions, cache)


def prefilled(model: GPTNeoX, tokens: list[int], capacity: int, *config: PassConfig) -> KVCache:
    cache = model.new_cache(capacity, *config)
    model.prefill(tokens, cache)
    return cache


def append(model: GPTNeoX, tokens: list[int], cache: KVCache) -> Tensor:
    """Append a few tokens to the cache in one pass; returns the logits [1, V] after the last."""
    positions = torch.arange(cache.length, cache.length + len(tokens))
    logits = model.forward(torch.tensor(tokens), positions, cache)
    cache.commit(range(len(tokens)))
    return logits[-1:]


def forget(model: GPTNeoX, cache: KVCache, start: int, n: int) -> None:
    """FastCache.forget, also for the plain model, whose rotary pairs are ordered as published."""
    if isinstance(model, FastGPTNeoX):
        cache.forget(start, n)
        return
    kept = cache.kv[:, :, :, start + n : cache.length].clone()
    kept[0] = rotate(kept[0], cache.rotary[n : n + 1].conj())
    cache.rewind(cache.length - n)
    cache.kv[:, :, :, start : cache.length] = kept


def make_tree(tokens: list[int], parents: list[int]) -> Tree:
    """A tree by its two defining columns; what verifies one reads no other but the depths."""
    tree = Tree.from_root(tokens[0])
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        tree.add(token, parent, 0.0)
    return tree


def random_tree(rng: random.Random, n_rows: int, n_ids: int = 90, deepest: int = 15) -> Tree:
    """In breadth-first order; some have long chains, some large families."""
    tree = Tree.from_root(rng.randrange(n_ids))
    is_bushy = rng.random() < 0.5
    while len(tree) < n_rows:
        row = rng.randrange(len(tree)) if is_bushy or rng.random() < 0.3 else len(tree) - 1
        siblings = [tree.tokens[i] for i, above in enumerate(tree.parents) if above == row]
        token = rng.randrange(n_ids)
        if tree.depths[row] < deepest and token not in siblings:
            tree.add(token, row, 0.0)
    return breadth_first(tree)


def path_to(tree: Tree, row: int) -> list[int]:
    """Rows from the root to this one."""
    path = [row]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    return path


def run_tree(model: FastGPTNeoX, cache: FastCache, tree: Tree) -> Tensor:
    """The logits [N, V] of a tree's rows, as the loop asks for them."""
    tokens, positions, mask = tree_inputs(tree, cache.length)
    return model.forward(tokens, positions, cache, mask).clone()
