"""Tests of the model: golden logits, cached passes, trees, and overflows.

The golden files were computed by an independent implementation. All other tests compare the model
with itself, run so that it cannot have the bug in question: the whole sequence over a fresh cache.
The functions check_* state what every gpt_neox.Model must do; a fork's tests may call them.
"""

import math
import random
from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file
from small import (
    GOLDEN,
    assert_close,
    prefilled,
    random_config,
    random_model,
    random_tensors,
    run,
    run_tree,
)
from trees import make_tree, path_to, random_tree

from gpt_neox import EMBEDDING, GPTNeoX, NonFiniteLogits, finite

Changes = dict[str, object]  # fields of Config that differ from small.random_config's
SEQUENTIAL: Changes = {"use_parallel_residual": False}
FULL_ROTARY: Changes = {
    "hidden_act": "gelu_new",
    "rotary_pct": 1.0,
    "rotary_emb_base": 500.0,
    "num_attention_heads": 4,
}
CHUNKS: list[tuple[int, Changes]] = [(1, {}), (7, SEQUENTIAL), (20, FULL_ROTARY)]
PREFIX = list(range(40, 50))
# Siblings at every level, and a path, 0 2 5 6, whose rows are neither a slice nor evenly spaced.
TREE = make_tree([7, 30, 31, 32, 33, 34, 35], [-1, 0, 0, 1, 1, 2, 5])


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_golden_logits(folder: Path) -> None:
    check_golden_logits(GPTNeoX, folder)


def check_golden_logits(kind: type[GPTNeoX], folder: Path) -> None:
    """Check rotary layout, per-head order of qkv, GELU and kind of residual, which must be as
    published. One pass over a tree must give each node the logits of its own path."""
    model, data = kind.from_pretrained(folder), load_file(folder / "golden.safetensors")
    prompt = data["input_ids"].tolist()
    assert_close(run(model, prompt), data["logits"])
    tree = make_tree(data["tree_tokens"].tolist(), data["tree_parents"].tolist())
    assert_close(run_tree(model, prefilled(model, prompt, 60), tree), data["tree_logits"])


@pytest.mark.parametrize(("chunk", "changes"), CHUNKS)
def test_cached_equals_whole(chunk: int, changes: Changes, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_neox.PREFILL_CHUNK", chunk)
    check_cached_equals_whole(random_model(1, **changes))


def check_cached_equals_whole(model: GPTNeoX) -> None:
    """Check that logits and cache do not depend on how a sequence is divided into passes."""
    tokens = random.Random(0).sample(range(96), 20)
    cache, whole = model.new_cache(24), model.new_cache(24)
    expected = model.forward(torch.tensor(tokens), torch.arange(20), whole).clone()
    assert_close(model.prefill(tokens, cache)[0], expected[-1])
    assert cache.length == 20
    assert_close(cache.kv[:, :, :, :20], whole.kv[:, :, :, :20])
    cache.rewind(0)
    for row, token in enumerate(tokens):
        assert_close(model.prefill([token], cache)[0], expected[row])


@pytest.mark.parametrize("changes", [{}, SEQUENTIAL, FULL_ROTARY])
def test_a_node_has_the_logits_of_its_own_path(changes: Changes) -> None:
    model, rng = random_model(2, **changes), random.Random(0)
    cache = prefilled(model, PREFIX, 40)
    for _ in range(5):
        tree = random_tree(rng, 24)
        logits = run_tree(model, cache, tree)
        for row in range(len(tree)):
            path = [tree.tokens[above] for above in path_to(tree, row)]
            assert_close(logits[row], run(model, PREFIX + path)[-1])


def test_a_full_cache_is_an_error_before_it_happens() -> None:
    check_full_cache(random_model(8))


def check_full_cache(model: GPTNeoX) -> None:
    """Check that the error names both numbers, and that the cache stays as it is."""
    cache = prefilled(model, PREFIX, 12)
    before, rows = cache.kv.clone(), torch.arange(3)
    for overflow in (
        lambda: model.forward(rows, rows, cache),
        lambda: model.prefill([1] * 3, cache),
    ):
        with pytest.raises(IndexError, match="the cache has 12 slots, 13 are needed"):
            overflow()
    assert cache.length == 10 and torch.equal(cache.kv, before)


def test_a_row_that_overflows_is_an_error() -> None:
    """Check a weight that is not finite, keys or values that overflow alone, and logits of one row,
    as after an overflow in the last layer's MLP."""
    for part in (None, 1, 2):  # keys, values
        tensors = random_tensors(random_config(), 0)
        if part:
            qkv = tensors["gpt_neox.layers.0.attention.query_key_value.weight"]
            qkv.view(2, 3, 16, 32)[:, part] *= 3e4
        else:
            tensors[EMBEDDING][5] = math.nan
        model = GPTNeoX.from_tensors(random_config(), {n: t.half() for n, t in tensors.items()})
        ids = torch.arange(12)
        with pytest.raises(NonFiniteLogits, match="nan.*use bfloat16 or float32"):
            model.forward(ids, ids, model.new_cache(12))
        with pytest.raises(NonFiniteLogits):
            model.prefill(ids.tolist(), model.new_cache(12))
    for logits in ([[0.0, math.inf], [0.0, 0.0]], [[0.0, 0.0], [math.nan, 0.0]]):
        with pytest.raises(NonFiniteLogits):
            finite(torch.tensor(logits))


SETTINGS = [SEQUENTIAL, {"layer_norm_eps": 0.5}, {"rotary_emb_base": 100.0}, {"rotary_pct": 0.25}]
SETTINGS += [{"hidden_act": "gelu_fast"}]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_no_setting_is_ignored(changes: Changes) -> None:
    check_no_setting_is_ignored(GPTNeoX, changes)


def check_no_setting_is_ignored(kind: type[GPTNeoX], changes: Changes) -> None:
    """Check settings that no two golden files vary. gelu_fast is another name of gelu_new."""
    logits = run(random_model(16, kind=kind, **changes), PREFIX)
    assert (logits - run(random_model(16, kind=kind), PREFIX)).abs().max() > 1e-3
    if "hidden_act" in changes:
        newer = random_model(16, kind=kind, hidden_act="gelu_new")
        assert torch.equal(logits, run(newer, PREFIX))
