"""The model's claims: right numbers, a cache that never lies, and errors that name the cause.

The golden files were computed by an independent implementation. All else compares the model with
itself, run in a way that leaves no room for the bug in question: whole text, fresh cache.
"""

import gc
import math
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
from conftest import (
    assert_close,
    pretend_capture,
    random_config,
    random_model,
    random_tensors,
    run,
)
from pytest import MonkeyPatch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gpt_neox
from dynatree import capture, generate
from engine.checkpoint import EMBED_IN
from engine.cuda_graphs import Shape
from engine.memory import OutOfMemory
from engine.passes import Use
from engine.scores import FEW, Ranking, scores_of
from gpt_neox import GPTNeoX, KVCache
from methods.static import Alone

Golden = tuple[GPTNeoX, dict[str, Tensor]]
Overflow = Callable[[GPTNeoX, KVCache], object]


class Tree(NamedTuple):
    tokens: list[int]
    parents: list[int]  # breadth-first rows; the root's is -1


GOLDEN = sorted(p for p in (Path(__file__).parent / "golden").iterdir() if p.is_dir())
SEQUENTIAL = {"is_parallel": False}
FULL_ROTARY = {"activation": "gelu_new", "rotary_fraction": 1.0, "rotary_base": 500.0, "n_heads": 4}
PREFIX = list(range(40, 50))
# Siblings at every level, and a path, 0 2 5 6, whose rows are neither a slice nor evenly spaced.
TREE = Tree([7, 30, 31, 32, 33, 34, 35], [-1, 0, 0, 1, 1, 2, 5])


def prefilled(model: GPTNeoX, tokens: list[int], capacity: int) -> KVCache:
    cache = model.new_cache(capacity)
    model.prefill(tokens, cache)
    return cache


def tree_paths(tree: Tree) -> list[list[int]]:
    """For each node the rows from the root to it."""
    paths: list[list[int]] = []
    for row, parent in enumerate(tree.parents):
        if parent < 0:
            paths.append([row])
        else:
            paths.append(paths[parent] + [row])
    return paths


def run_tree(model: GPTNeoX, cache: KVCache, tree: Tree, positions: Tensor | None = None) -> Tensor:
    """One pass over a tree: each node sees the prefix and its ancestors and stands at its depth."""
    paths = tree_paths(tree)
    mask = torch.ones(len(paths), cache.length + len(paths), dtype=torch.bool)
    mask[:, cache.length :] = False
    for row, path in enumerate(paths):
        mask[row, torch.tensor(path) + cache.length] = True
    if positions is None:
        positions = torch.tensor([cache.length + len(path) - 1 for path in paths])
    return model.forward(torch.tensor(tree.tokens), positions, cache, mask).logits


def random_tree(seed: int) -> Tree:
    """4 to 14 nodes, the root with at least two children."""
    rng = random.Random(seed)
    parents = [-1, 0, 0]
    for row in range(3, rng.randint(4, 14)):
        parents.append(rng.randint(parents[-1], min(parents[-1] + 2, row - 1)))
    return Tree(rng.sample(range(96), len(parents)), parents)


def path_text(tree: Tree, path: list[int]) -> list[int]:
    """What a node's path spells, after the prefix."""
    return PREFIX + [tree.tokens[row] for row in path]


@pytest.fixture(scope="module", params=GOLDEN, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest) -> Golden:
    return GPTNeoX.from_pretrained(request.param), load_file(request.param / "golden.safetensors")


def test_golden_logits(golden: Golden) -> None:
    """Rotary layout, the per-head order of qkv, GELU and residual kind are all as published."""
    model, data = golden
    assert_close(run(model, data["input_ids"].tolist()), data["logits"])


def test_golden_tree(golden: Golden) -> None:
    """One pass over the whole tree gives each node the logits of its own path."""
    model, data = golden
    cache = prefilled(model, data["input_ids"].tolist(), 60)
    tree = Tree(data["tree_tokens"].tolist(), data["tree_parents"].tolist())
    assert_close(run_tree(model, cache, tree), data["tree_logits"])


def test_golden_greedy_text(golden: Golden) -> None:
    """48 cached steps drift nowhere: the text is the independent implementation's."""
    model, data = golden
    cache = model.new_cache(88)
    ids = [int(model.prefill(data["input_ids"].tolist(), cache).logits.argmax())]
    while len(ids) < 48:
        at = torch.tensor([cache.length])
        ids.append(int(model.forward(torch.tensor(ids[-1:]), at, cache).logits.argmax()))
        cache.advance(1)
    assert ids == data["greedy_ids"].tolist()


@pytest.mark.parametrize("changes", [{}, SEQUENTIAL, FULL_ROTARY], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_cached_equals_whole(
    chunk: int, changes: dict[str, object], monkeypatch: MonkeyPatch
) -> None:
    """Where a text was cut into passes is invisible in its logits and in the cache it leaves."""
    model = random_model(1, **changes)
    tokens = random.Random(0).sample(range(96), 20)
    whole = prefilled(model, tokens, 24)
    cache = model.new_cache(24)
    expected = run(model, tokens)
    monkeypatch.setattr(gpt_neox, "PREFILL_CHUNK", chunk)
    assert_close(model.prefill(tokens, cache).logits[0], expected[-1])
    assert cache.length == 20
    assert_close(cache.kv[:, :, :, :20], whole.kv[:, :, :, :20])
    cache.rewind(0)
    for row, token in enumerate(tokens):
        assert_close(model.prefill([token], cache).logits[0], expected[row])


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("n_unused", [0, 6])
def test_explicit_causal_mask_equals_none(n: int, n_unused: int) -> None:
    """S may reach beyond the written slots; leftovers of rejected rows there must not be seen."""
    model = random_model(2)
    tokens = torch.arange(n)
    positions = torch.arange(10, 10 + n)
    cache = prefilled(model, PREFIX, 20)
    expected = model.forward(tokens, positions, cache).logits
    model.forward(torch.arange(50, 60), torch.arange(10, 20), cache)
    mask = torch.ones(n, 10 + n + n_unused, dtype=torch.bool).tril(10)
    assert_close(model.forward(tokens, positions, cache, mask).logits, expected)
    assert cache.length == 10


@pytest.mark.parametrize("n_last", [1, 3, 5])
def test_the_last_scores_are_the_last_of_all(n_last: int) -> None:
    tokens = torch.arange(5)
    for model in (random_model(3), fixed_model(3)):
        cache = model.new_cache(5)
        last = model.forward(tokens, tokens, cache, n_last=n_last).logits.clone()
        assert_close(last, model.forward(tokens, tokens, cache).logits[-n_last:])


def test_start_writes_there_and_nowhere_else() -> None:
    """The draft's levels stand above one another in scratch, so slot and position differ."""
    model = random_model(4)
    tokens = torch.arange(3)
    positions = torch.arange(10, 13)
    cache = prefilled(model, PREFIX, 20)
    before = cache.kv.clone()
    mask = torch.ones(3, 17, dtype=torch.bool).tril(14)
    mask[:, 10:14] = False
    there = model.forward(tokens, positions, cache, mask, start=14).logits
    same = (cache.kv == before).flatten(0, 2).all(dim=2)  # [2LH, capacity]
    assert torch.equal(same.any(dim=0), same.all(dim=0)), "every layer, head and half alike"
    assert (~same[0]).nonzero()[:, 0].tolist() == [14, 15, 16] and cache.length == 10
    assert_close(there, model.forward(tokens, positions, cache).logits)


@pytest.mark.parametrize("changes", [{}, SEQUENTIAL], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_tree_node_equals_its_own_path(seed: int, changes: dict[str, object]) -> None:
    """What makes a tree lossless: no sibling shows in a node's logits."""
    model = random_model(seed, **changes)
    tree = random_tree(seed)
    tree_logits = run_tree(model, prefilled(model, PREFIX, 40), tree)
    for row, path in enumerate(tree_paths(tree)):
        assert_close(tree_logits[row], run(model, path_text(tree, path))[-1])


@pytest.mark.parametrize("changes", [{}, SEQUENTIAL], ids=str)
def test_positions_are_depths_not_rows(changes: dict[str, object]) -> None:
    """The bug of the paper's own code: it passed no position ids.

    The model then numbered the tree's rows breadth-first, so every node after the first sibling was
    verified at a position it never has in the text, and the accepted text was not the target's own.
    """
    model = random_model(5, **changes)
    cache = prefilled(model, PREFIX, 20)
    by_depth = run_tree(model, cache, TREE)
    by_row = run_tree(model, cache, TREE, positions=torch.arange(10, 17))
    error = (by_row - by_depth).abs().amax(dim=1)  # [N]
    assert error[:2].max() < 1e-4, "rows 0 and 1 stand at their depth either way"
    assert error[2:].min() > 0.05


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2], [0, 1, 4], [0, 2, 5, 6]], ids=str)
@pytest.mark.parametrize("changes", [{}, SEQUENTIAL], ids=str)
def test_commit_equals_fresh_prefill(path: list[int], changes: dict[str, object]) -> None:
    """The kept rows are the text's own, so an accepted path never has to be run again.

    Paths of first children are in place already. On 0 2 5 6 slot 12 is source and destination, so
    every row has to be read before any is written.
    """
    model = random_model(6, **changes)
    cache = prefilled(model, PREFIX, 20)
    run_tree(model, cache, TREE)
    cache.commit(path)
    fresh = prefilled(model, path_text(TREE, path), 20)
    assert cache.length == fresh.length == 10 + len(path)
    assert_close(cache.kv[:, :, :, : cache.length], fresh.kv[:, :, :, : cache.length])


def test_rewind_then_continue_equals_never_having_gone() -> None:
    model = random_model(7)
    cache = prefilled(model, PREFIX + [1, 2, 3, 4, 5], 20)
    cache.rewind(10)
    assert_close(model.prefill([6, 7], cache).logits[0], run(model, PREFIX + [6, 7])[-1])
    assert_close(cache.kv[:, :, :, :12], prefilled(model, PREFIX + [6, 7], 12).kv)


ROWS = torch.arange(3)  # tokens and positions alike
OVERFLOWS = {  # one slot more than a cache of 12 has after a prefix of 10
    "advance": lambda model, cache: cache.advance(3),
    "commit": lambda model, cache: cache.commit([0, 2, 3]),
    "forward": lambda model, cache: model.forward(ROWS, ROWS, cache),
    "start": lambda model, cache: model.forward(ROWS[:2], ROWS[:2], cache, start=11),
    "prefill": lambda model, cache: model.prefill([1, 2, 3], cache),
}


@pytest.mark.parametrize("overflow", OVERFLOWS.values(), ids=OVERFLOWS)
def test_overflow_is_an_error_before_it_happens(overflow: Overflow) -> None:
    model = random_model(8)
    cache = prefilled(model, PREFIX, 12)
    before = cache.kv.clone()
    with pytest.raises(OutOfMemory, match=r"\b12\b.*\b13\b"):
        overflow(model, cache)
    assert cache.length == 10 and torch.equal(cache.kv, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bad_row, path", [(1, [0, 2, 5]), (2, [0, 1, 4]), (6, [0, 2, 5])])
def test_non_finite_row_stays_alone(value: float, bad_row: int, path: list[int]) -> None:
    """A masked slot still enters attention as 0 x value, and 0 x NaN is NaN.

    So one overflowed draft token would turn the whole pass into NaN, and every later pass whose
    masked slots reach the ones it left behind.
    """
    tensors = random_tensors(random_config(), 9)
    tensors[EMBED_IN][90] = value
    model = GPTNeoX.from_tensors(random_config(), tensors)
    cache = prefilled(model, PREFIX, 20)
    clean = prefilled(model, PREFIX, 20)
    tokens = list(TREE.tokens)
    tokens[bad_row] = 90
    logits = run_tree(model, cache, Tree(tokens, TREE.parents))
    clean_logits = run_tree(model, clean, TREE)
    assert not logits[bad_row].isfinite().any()
    for row, seen in enumerate(tree_paths(TREE)):
        if bad_row not in seen:
            assert_close(logits[row], clean_logits[row])
    cache.commit(path)
    mask = torch.ones(1, 20, dtype=torch.bool).tril(cache.length)
    after = model.forward(torch.tensor([3]), torch.tensor([cache.length]), cache, mask).logits
    assert_close(after[0], run(model, path_text(TREE, path) + [3])[-1])


SETTINGS = [SEQUENTIAL, {"norm_eps": 0.5}, {"rotary_base": 100.0}, {"rotary_fraction": 0.25}]


@pytest.mark.parametrize("changes", SETTINGS + [{"activation": "gelu_fast"}], ids=str)
def test_no_setting_is_ignored(changes: dict[str, object]) -> None:
    """All golden files share one norm_eps, and none has gelu_new, another name of gelu_fast."""
    logits = run(random_model(16, **changes), PREFIX)
    assert (logits - run(random_model(16), PREFIX)).abs().max() > 1e-3
    if "activation" in changes:
        assert torch.equal(logits, run(random_model(16, activation="gelu_new"), PREFIX))


def test_positions_past_the_trained_range() -> None:
    """A cache has turns for all its slots; the numbers are those of a longer model."""
    short = random_model(17, max_positions=8)
    long = random_model(17, max_positions=64)
    tokens = list(range(30))
    assert_close(short.prefill(tokens, short.new_cache(30)).logits[0], run(long, tokens)[-1])


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_half_precision_is_close(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    """At scale 1000 a LayerNorm with float16 statistics would overflow: 1000 squared is inf."""
    tensors = random_tensors(random_config(), 18)
    tensors[EMBED_IN] *= scale
    model = GPTNeoX.from_tensors(
        random_config(), {name: t.to(dtype) for name, t in tensors.items()}
    )
    logits = run(model, PREFIX)
    expected = run(GPTNeoX.from_tensors(random_config(), tensors), PREFIX)
    assert logits.dtype == torch.float32 and model.new_cache(1).kv.dtype == dtype
    assert (logits - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("part", [1, 2], ids=["keys", "values"])
def test_a_key_or_value_that_overflows_alone_is_not_silent(part: int) -> None:
    """The cache may hold nothing infinite, but once stored such keys and values as 0 and went on:
    finite logits, wrong text, and no hint that float16 was the cause."""
    tensors = random_tensors(random_config(), 0)
    qkv = tensors["gpt_neox.layers.0.attention.query_key_value.weight"]
    qkv.view(2, 3, 16, 32)[:, part] *= 3e4
    model = GPTNeoX.from_tensors(random_config(), {name: t.half() for name, t in tensors.items()})
    ids = torch.arange(12)
    assert not model.forward(ids, ids, model.new_cache(12)).logits.isfinite().all()
    assert model.prefill(ids.tolist(), model.new_cache(12)).logits.isnan().all()


@pytest.mark.parametrize("capacity", [1, 2, 129, 255, 257])
def test_a_padded_pass_stays_inside_the_cache(capacity: int) -> None:
    """The widest of every length, at the end of the cache."""
    model = fixed_model(6)
    cache = model.new_cache(capacity)
    cache.advance(capacity - min(capacity, 65))
    n = capacity - cache.length
    before = cache.kv.shape
    model.append([3] * n, cache)
    assert cache.length == capacity and cache.kv.shape == before
    assert cache.kv.nbytes == model.pool.bytes(capacity)


def fixed_model(seed: int, **changes: object) -> GPTNeoX:
    """As on CUDA, but for the graphs."""
    model = random_model(seed, **changes)
    model.pool.is_shaped = True
    return model


@pytest.mark.parametrize("n_prefix", [10, 246, 253], ids="prefix{}".format)
@pytest.mark.parametrize("changes", [{}, SEQUENTIAL], ids=str)
def test_padding_changes_no_logits_and_no_kept_slot(
    n_prefix: int, changes: dict[str, object]
) -> None:
    """Rows to two or to eight, slots to 256 or 512; rows added may even lie beyond those slots."""
    changes = changes | {"max_positions": 300}
    prefix = [i % 90 for i in range(n_prefix)]
    plain = random_model(6, **changes)
    two_rows = random_model(6, **changes)
    two_rows.pool.min_rows = 2
    fixed = fixed_model(6, **changes)
    plain_cache = prefilled(plain, prefix, n_prefix + 20)
    for model in (two_rows, fixed):
        cache = prefilled(model, prefix, n_prefix + 20)
        for tree in (TREE, Tree([7], [-1])):
            expected = run_tree(plain, plain_cache, tree)
            assert_close(run_tree(model, cache, tree), expected)
            n = n_prefix + len(tree.tokens)
            assert_close(cache.kv[:, :, :, :n], plain_cache.kv[:, :, :, :n])


def test_a_pass_does_not_see_what_the_one_before_it_saw() -> None:
    """The mask is one buffer: a short pass after a long one once saw the long one's last slots."""
    model = fixed_model(6)
    cache = prefilled(model, PREFIX, 40)
    run_tree(model, cache, TREE)
    cache.rewind(4)
    plain = random_model(6)
    expected = run_tree(plain, prefilled(plain, PREFIX[:4], 40), Tree([7], [-1]))
    assert_close(run_tree(model, cache, Tree([7], [-1])), expected)


class Recorder(TorchDispatchMode):
    """Every operation, with the shapes of its tensors and the values of all else."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
        kwargs = kwargs or {}
        self.seen.append((str(func), shown(args), shown(list(kwargs.items()))))
        return func(*args, **kwargs)


def shown(value: object) -> object:
    """A tensor's shape and place in its memory; of a list every element; else the value itself."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset()
    if isinstance(value, list | tuple):
        return [shown(element) for element in value]
    return value


def test_a_padded_pass_can_be_replayed(monkeypatch: MonkeyPatch) -> None:
    """The same operations on the same memory, whatever the text's length and the tree, and nothing
    read back: what a graph has captured for one iteration is right for the next."""
    model = fixed_model(6)
    cache = prefilled(model, PREFIX, 40)
    operations: list[list[tuple]] = []  # of each pass
    addresses: list[list[int]] = []
    passes = cache.passes
    real = passes.run_pass

    def recorded(shape: Shape) -> None:
        with Recorder() as recorder:
            real(shape)
        operations.append(recorder.seen)
        memory = (*shape.inputs(passes.buffer), passes.kv, passes.turns, passes.logits)
        addresses.append([tensor.data_ptr() for tensor in memory])

    monkeypatch.setattr(passes, "run_pass", recorded)
    run_tree(model, cache, TREE)
    cache.advance(3)
    run_tree(model, cache, Tree([9, 8, 7, 6, 5], [-1, 0, 1, 1, 2]))
    assert operations[0] == operations[1] and len(operations[0]) > 50
    assert addresses[0] == addresses[1]
    for operation in operations[0]:
        name = operation[0]
        assert "nonzero" not in name and "_local_scalar" not in name


def test_a_cache_of_a_generation_is_of_use_outside_it() -> None:
    """Made in inference mode, it could not be written to outside."""
    model = fixed_model(6)
    with torch.inference_mode():
        cache = model.new_cache(20)
    model.pool.take_back(cache.storage)
    again = prefilled(model, PREFIX, 20)
    assert again.storage is cache.storage and run_tree(model, again, TREE).isfinite().all()


def test_a_cache_lent_again_for_more_tokens_has_positions_for_them() -> None:
    """The rotary table was once as long as the tokens asked for, not as the slots."""
    model = fixed_model(6, max_positions=20)
    model.pool.take_back(model.new_cache(30).storage)
    tokens = [i % 90 for i in range(120)]
    logits = model.prefill(tokens, model.new_cache(120)).logits[0]
    assert_close(logits, run(random_model(6, max_positions=120), tokens)[-1])


def test_captured_passes_are_replayed_again_by_the_next_cache(monkeypatch: MonkeyPatch) -> None:
    """A cache that was given back serves whoever asks for no more; nothing is captured twice, and
    capturing leaves what the cache holds alone."""
    pretend_capture(monkeypatch)
    model = fixed_model(6)
    plain = random_model(6)
    expected = run_tree(plain, prefilled(plain, PREFIX, 20), TREE)
    model.pool.has_graphs = True
    cache = model.new_cache(600, Use(n_rows=20, ranking=Ranking(3)))
    model.prefill(PREFIX, cache)
    capture(model, cache, 10)
    shapes = []
    for slots in (768, 512, 256):
        for rows in (32, 16, 8, 4, 2, 1):
            shapes.append([Shape(rows, slots, False)])
    passes = cache.passes
    ranked = [shape for step, *shape in passes.captured if step == "rank"]
    assert [shape for step, *shape in passes.captured if step == "run_pass"] == shapes
    assert ranked == [[rows, sys.maxsize, Ranking(3)] for rows in (32, 16, 8, 4, 2, 1)]
    assert_close(run_tree(model, cache, TREE), expected)
    model.pool.take_back(cache.storage)
    again = model.new_cache(500, Use(n_rows=7, ranking=Ranking(3)))
    assert again.storage is cache.storage and again.length == 0 and not again.passes.is_replaying
    captured = dict(again.passes.captured)
    model.prefill(PREFIX, again)
    capture(model, again, 10)
    assert again.passes.captured == captured  # the same, none made anew
    assert model.pool.n_graphs == 18 + 6 and again.passes.is_replaying
    assert_close(run_tree(model, again, TREE), expected)
    assert model.new_cache(100).storage is not again.storage
    model.pool.take_back(again.storage)
    larger = model.new_cache(1000)
    assert larger.storage is not cache.storage and not model.pool.idle


def test_capture_begins_where_the_text_is(monkeypatch: MonkeyPatch) -> None:
    """Also of passes over fewer slots than the text has: none of them is ever run there."""
    pretend_capture(monkeypatch)
    model = fixed_model(6, max_positions=600)
    model.pool.has_graphs = True
    for use in (Use(4), Use(4, is_strict=True)):
        cache = prefilled(model, [i % 90 for i in range(260)], 300)
        cache.use = use
        capture(model, cache, 240)
        assert run_tree(model, cache, Tree([7], [-1])).isfinite().all()


def test_a_text_that_ends_with_its_first_token_captures_nothing(monkeypatch: MonkeyPatch) -> None:
    """And any other is captured for once that token is out."""
    pretend_capture(monkeypatch)
    model = fixed_model(6)
    model.pool.has_graphs = True
    assert len(list(generate(model, None, PREFIX, Alone(), 1))) == 1
    assert model.pool.n_graphs == 0
    steps = generate(model, None, PREFIX, Alone(), 3)
    next(steps)
    assert model.pool.n_graphs == 0
    next(steps)
    assert model.pool.n_graphs == 2, "the pass of one row, and what ranks it"


@pytest.mark.parametrize("are_logprobs", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3, FEW, FEW + 1, 40])
def test_what_the_host_is_told_of_each_row(k: int, are_logprobs: bool) -> None:
    """Against a sort: the best id, of equals the first, and candidates, no more than there are ids;
    the logits stay as they are, for whoever samples."""
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(k))
    logits[1:3] = logits[1:3].round()  # with equals
    logits[3, 7], logits[4, 9] = torch.nan, torch.inf
    before = logits.clone()
    scores = scores_of(logits, Ranking(k, are_logprobs))
    assert scores.logits is logits
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert math.isnan(scores.highest[3]) and not math.isfinite(scores.highest[4])
    assert scores.best.dtype == scores.candidates.dtype == numpy.int64
    values = torch.log_softmax(logits, dim=-1) if are_logprobs else logits
    for row in (0, 1, 2, 5):
        ranked = sorted(range(30), key=lambda i, row=row: -float(logits[row, i]))
        assert scores.best[row] == ranked[0]
        assert are_logprobs or scores.highest[row] == float(logits[row, ranked[0]])
        assert scores.values[row].tolist() == values[row, ranked[:k]].tolist()
        candidates = scores.candidates[row].tolist()
        assert scores.values[row].tolist() == values[row, candidates].tolist()
        assert len(set(candidates)) == min(k, 30)
        assert k > FEW or candidates == ranked[:k]


def test_nothing_is_read_of_what_nobody_asks_for() -> None:
    logits = torch.zeros(2, 3)
    scores = scores_of(logits, Ranking(3, is_read=False))
    assert scores.logits is logits and scores[1:] == (None,) * 4


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("is_shaped", [False, True], ids=["tight", "fixed"])
def test_a_prompt_is_read_with_what_follows_each_token(
    k: int, is_shaped: bool, monkeypatch: MonkeyPatch
) -> None:
    """Chunk by chunk: the ids as a list, and the k likeliest ids after each of them."""
    monkeypatch.setattr(gpt_neox, "PREFILL_CHUNK", 4)
    model = random_model(6)
    expected = run(model, PREFIX).topk(k).indices.tolist()
    model.pool.is_shaped = is_shaped
    read: list[tuple[int, list[int]]] = []

    def note(ids: list[int], candidates: numpy.ndarray) -> None:
        assert type(ids) is list and len(ids) <= 4
        read.extend(zip(ids, candidates.tolist(), strict=True))

    model.prefill(PREFIX, model.new_cache(20, Use(ranking=Ranking(k))), note)
    assert read == list(zip(PREFIX, expected, strict=True))


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_model_that_is_dropped_is_gone(is_on_gpu: bool, monkeypatch: MonkeyPatch) -> None:
    """Its weights may be all the memory there is. It lived until Python looked for cycles, which
    its pool, and on a GPU what was captured, made of it."""
    if is_on_gpu:
        pretend_capture(monkeypatch)
    model = random_model(seed=0)
    model.pool.is_shaped = model.pool.has_graphs = is_on_gpu
    gc.disable()
    try:
        list(generate(model, None, [1, 2, 3], Alone(), 8))
        assert not is_on_gpu or model.pool.n_graphs
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_the_one_of_several_kept_caches_that_fits_is_lent() -> None:
    """Looked for as equal tensors, the second was not to be found."""
    model = fixed_model(6)
    small = model.new_cache(100)
    large = model.new_cache(400)
    model.pool.take_back(small.storage)
    model.pool.take_back(large.storage)
    assert model.new_cache(400).storage is large.storage


VIEWS = {
    "view",
    "transpose",
    "permute",
    "slice",
    "select",
    "unbind",
    "expand",
    "t",
    "split_with_sizes",
}
VIEWS |= {"unsqueeze", "as_strided", "alias", "detach", "empty", "new_empty", "empty_like"}


def count_kernels(n_layers: int) -> int:
    """Launched by a pass of 4 rows over 256 slots, in float16."""
    config = random_config(n_layers=n_layers)
    halves = {name: t.half() for name, t in random_tensors(config, 6).items()}
    model = GPTNeoX.from_tensors(config, halves)
    model.pool.is_shaped = True
    cache = prefilled(model, PREFIX, 20)
    with Recorder() as recorder:
        cache.passes.run_pass(Shape(4, 256, False))
    count = 0
    for operation in recorder.seen:
        name = operation[0].split(".")[1]
        if name not in VIEWS:
            count += 1
    return count


def test_a_layer_launches_few_kernels(monkeypatch: MonkeyPatch) -> None:
    """A small model's pass takes as long as its kernels are many. As on CUDA, matrices as they are,
    but a norm, a product and a copy of GELU's more: two norms, three products and the sum, five for
    rotary and cache, attention, GELU, and the copies that put both side by side."""
    monkeypatch.setattr("engine.products.is_exact_in_half", lambda weight: False)
    of_two_layers = count_kernels(2)
    per_layer = count_kernels(3) - of_two_layers
    assert per_layer <= 15 and of_two_layers - 2 * per_layer <= 17


def test_the_smallest_model_that_can_be() -> None:
    """Its one pair of rotary dimensions is in order as it is; putting it in order failed."""
    model = random_model(0, vocab_size=3, hidden_size=2, n_heads=1, rotary_fraction=1.0)
    together = run(model, [1, 2, 0])
    cache = prefilled(model, [1, 2], capacity=3)
    assert_close(model.append([0], cache).logits, together[2:])
