"""Tiny random GPT-NeoX models and their checkpoints, all seeded, and passes over them."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_tree import Tree
from gpt_neox import Config, GPTNeoX, KVCache
from verify import tree_inputs

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny"
GOLDEN = sorted(file.parent for file in (ROOT / "tests" / "golden").glob("*/config.json"))
Captured = pytest.CaptureFixture[str]


def random_config(**changes: object) -> Config:
    """Return a config of two layers, each with two heads of 16. `changes` override its fields."""
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
    """Return weights so large that attention matters and greedy text varies."""
    with torch.device("meta"):
        weights = dict(GPTNeoX(config).named_parameters())
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.1 * noise
        elif "embed" in name:
            tensors[name] = noise
        else:
            tensors[name] = noise * (1.5 * weight.shape[-1] ** -0.5)
    return tensors


def random_model(
    seed: int,
    dtype: torch.dtype = torch.float32,
    kind: type[GPTNeoX] = GPTNeoX,
    **changes: object,
) -> GPTNeoX:
    config = random_config(**changes)
    tensors = {name: t.to(dtype) for name, t in random_tensors(config, seed).items()}
    return kind.from_tensors(config, tensors)


def noisy_pair(
    seed: int = 5,
    noise: float = 0.06,
    dtype: torch.dtype = torch.float32,
    kind: type[GPTNeoX] = GPTNeoX,
    **changes: object,
) -> tuple[GPTNeoX, GPTNeoX]:
    """Return a target and, as its draft, a noisy copy: it is often accepted and often rejected."""
    config = random_config(**changes)
    tensors, other = random_tensors(config, seed), random_tensors(config, seed + 1)
    noisy = {name: (t + noise * other[name]).to(dtype) for name, t in tensors.items()}
    target = random_model(seed, dtype, kind, **changes)
    return target, kind.from_tensors(config, noisy)


def broken_at(token: int, kind: type[GPTNeoX] = GPTNeoX) -> GPTNeoX:
    """Return random_model(7), changed so that it overflows where it reads this token."""
    tensors = random_tensors(random_config(), 7)
    tensors["gpt_neox.embed_in.weight"][token] = float("nan")
    return kind.from_tensors(random_config(), tensors)


def published_json(config: Config) -> dict[str, object]:
    """Return the content of config.json for a model of this config."""
    raw = asdict(config)
    return {"model_type": "gpt_neox", "eos_token_id": list(raw.pop("eos_ids"))} | raw


def write_checkpoint(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint without a tokenizer to a folder, and return the folder."""
    (folder / "config.json").write_text(json.dumps(published_json(config)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def run(model: GPTNeoX, tokens: list[int]) -> Tensor:
    """Return the logits [n, V] of one causal pass over a fresh cache. This is the oracle."""
    positions = torch.arange(len(tokens))
    cache = model.new_cache(len(tokens))
    return model.forward(torch.tensor(tokens), positions, cache)


def prefilled(model: GPTNeoX, tokens: list[int], capacity: int, *options: object) -> KVCache:
    """Return a cache that has run these tokens. options: further ones of a fork's new_cache."""
    cache = model.new_cache(capacity, *options)
    model.prefill(tokens, cache)
    return cache


def run_tree(model: GPTNeoX, cache: KVCache, tree: Tree) -> Tensor:
    """Return the logits [N, V] of a tree's rows, by one pass as in the decoding loop."""
    tokens, positions, mask = tree_inputs(tree, cache.length)
    return model.forward(tokens, positions, cache, mask).clone()


def error_line(capsys: Captured, main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Return the error line of a command. Fails unless it prints one line and exits with 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.count("error: ") == 1, captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("error: "), captured.err
    return line
