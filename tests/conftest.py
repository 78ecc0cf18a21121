"""Tiny random GPT-NeoX models for the tests; everything is seeded."""

import random
import sys
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from draft_tree import MAX_ROWS, Candidates, Rule, Settings
from engine import cuda_graphs
from engine.checkpoint import Config
from engine.cuda_graphs import Captured
from gpt_neox import GPTNeoX, published_shapes
from methods import METHODS

if "pretend_cuda" not in sys.modules:
    collect_ignore = ["pretend_cuda"]  # tests on a pretended device: python tests/pretend_cuda

TINY = Path(__file__).parent.parent / "models" / "tiny"


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
    """Let a replay run the pass anew: everything about a graph but CUDA itself."""

    def record(run: Callable[[], Tensor | None], *_: object) -> Captured:
        result = run()
        return Captured(PretendedGraph(run, result), result)

    monkeypatch.setattr(cuda_graphs, "record", record)


@dataclass(frozen=True)
class PretendedGraph:
    """What has been captured, and the tensor that it writes to."""

    run: Callable[[], Tensor | None]
    result: Tensor | None

    def replay(self) -> None:
        result = self.run()
        if result is not None:
            self.result.copy_(result)

    def pool(self) -> None:
        """There is none."""


class Remembering:
    """Settings that keep every rule they hand out."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rules: list[Rule] = []

    def rule(self) -> Rule:
        rule = self.settings.rule()
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
    if "options" in field.metadata:
        return rng.choice(field.metadata["options"])
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


def ranked(logits: Tensor) -> Candidates:
    """All ids below rows of logits [n, V], the likeliest first."""
    logprobs, ids = torch.log_softmax(logits, dim=-1).sort(descending=True, stable=True)
    return Candidates(ids.numpy(), logprobs.numpy())


def random_config(**changes: object) -> Config:
    """A model of two layers and two heads of 16; `changes` override fields of Config."""
    config = Config(
        vocab_size=96,
        hidden_size=32,
        n_layers=2,
        n_heads=2,
        intermediate_size=64,
        max_positions=128,
        rotary_fraction=0.5,
        rotary_base=10000.0,
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


def random_model(seed: int, **changes: object) -> GPTNeoX:
    config = random_config(**changes)
    return GPTNeoX.from_tensors(config, random_tensors(config, seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def run(model: GPTNeoX, tokens: list[int]) -> Tensor:
    """The oracle: the whole text in one causal pass over a fresh cache, logits [n, V]."""
    positions = torch.arange(len(tokens))
    cache = model.new_cache(len(tokens))
    return model.forward(torch.tensor(tokens), positions, cache).logits
