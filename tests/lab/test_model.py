"""Tests of the fast model: what every model must do, padded passes, and ranking."""

import math
from pathlib import Path

import numpy
import pytest
import torch
from fast import append, fix_shapes, pretend_capture, random_model
from pytest import MonkeyPatch
from small import (
    GOLDEN,
    assert_close,
    prefilled,
    random_config,
    random_tensors,
    run,
    run_tree,
)
from test_gpt_neox import (
    CHUNKS,
    PREFIX,
    SETTINGS,
    TREE,
    Changes,
    check_cached_equals_whole,
    check_full_cache,
    check_golden_logits,
    check_no_setting_is_ignored,
)
from trees import make_tree, path_to

from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.engine.scores import RankedScores, Ranking, Scores, rank_logits
from dynatree_lab.methods.sampler import SMALL_K
from gpt_neox import EMBEDDING, GPTNeoX
from verify import tree_inputs

ROOT_ONLY = make_tree([7], [-1])


# What every model must do: tests/test_gpt_neox.py says it.


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_golden_logits(folder: Path) -> None:
    check_golden_logits(FastGPTNeoX, folder)


@pytest.mark.parametrize(("chunk", "changes"), CHUNKS)
def test_cached_equals_whole(chunk: int, changes: Changes, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("dynatree_lab.engine.cache.PREFILL_CHUNK", chunk)
    check_cached_equals_whole(random_model(1, **changes))


def test_a_full_cache_is_an_error_before_it_happens() -> None:
    """Check that it is no OutOfMemory, whose advice would not help."""
    check_full_cache(random_model(8))
    with pytest.raises(IndexError, match="the cache has 12 slots, 13 are needed"):
        prefilled(random_model(8), PREFIX, 12).advance(3)


OVERFLOWS = [(1, [0, 2, 5]), (2, [0, 1, 4]), (6, [0, 2, 5])]  # a row, and a path without it


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("bad_row", "path"), OVERFLOWS)
def test_a_row_that_overflows_stays_alone(value: float, bad_row: int, path: list[int]) -> None:
    """Check that other rows stay finite, although a masked slot enters attention as 0 x value.

    0 x NaN is NaN. So one draft token that overflows could turn the whole pass into NaN, and later
    passes as well, if their masked slots include its slot.
    """
    tensors = random_tensors(random_config(), 9)
    tensors[EMBEDDING][90] = value
    model = FastGPTNeoX.from_tensors(random_config(), tensors)
    cache = prefilled(model, PREFIX, 20)
    clean_logits = run_tree(model, cache, TREE)
    tokens = list(TREE.tokens)
    tokens[bad_row] = 90
    logits = run_tree(model, cache, make_tree(tokens, TREE.parents))
    assert not logits[bad_row].isfinite().any()
    for row in range(len(TREE)):
        if bad_row not in path_to(TREE, row):
            assert_close(logits[row], clean_logits[row])
    cache.commit(path)
    mask = torch.ones(1, 1, dtype=torch.bool)
    after = model.forward(torch.tensor([3]), torch.tensor([cache.length]), cache, mask)
    text = PREFIX + [TREE.tokens[row] for row in path] + [3]
    assert_close(after[0], run(model, text)[-1])


@pytest.mark.parametrize("part", [1, 2], ids=["keys", "values"])
def test_a_key_or_value_that_overflows_alone_is_not_silent(part: int) -> None:
    """Check that the logits are not finite either. The cache must not hold infinity, but it once
    held 0 instead: the text was wrong, with no hint that float16 was the cause."""
    tensors = random_tensors(random_config(), 0)
    qkv = tensors["gpt_neox.layers.0.attention.query_key_value.weight"]
    qkv.view(2, 3, 16, 32)[:, part] *= 3e4
    model = FastGPTNeoX.from_tensors(random_config(), {n: t.half() for n, t in tensors.items()})
    ids = torch.arange(12)
    assert not model.forward(ids, ids, model.new_cache(12)).isfinite().all()
    assert model.prefill(ids.tolist(), model.new_cache(12)).isnan().all()


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_no_setting_is_ignored(changes: Changes) -> None:
    check_no_setting_is_ignored(FastGPTNeoX, changes)


def test_a_model_of_random_weights_makes_a_cache() -> None:
    assert FastGPTNeoX(random_config()).new_cache(5).capacity == 5


def test_hidden_states_of_a_tree() -> None:
    """Compare the states of masked rows, which the base class gives too, with the reference's."""
    tokens, positions, mask = tree_inputs(TREE, len(PREFIX))
    states = []
    for kind in (GPTNeoX, FastGPTNeoX):
        model = random_model(6, kind=kind)
        cache = prefilled(model, PREFIX, 20)
        states.append(model.hidden(tokens, positions, cache, mask))
        assert_close(model.logits(states[-1]), run_tree(model, cache, TREE))
    assert_close(*states)


# Padded passes: those of one row on a CPU in half precision, and all on CUDA. The tests of
# pretend_cuda compare their replays with the CPU.


@pytest.mark.parametrize("n_prefix", [10, 246, 253])
def test_padding_changes_no_logits_and_no_kept_slot(n_prefix: int) -> None:
    """Compare padded passes with others. Rows are padded to 2 or 8, slots to 256 or 512; padding
    rows may be beyond those slots. A short pass once attended to the last slots of an earlier long
    one."""
    prefix = [i % 90 for i in range(n_prefix)]
    plain, two_rows, fixed = (random_model(6, max_position_embeddings=300) for _ in range(3))
    two_rows.min_rows = 2
    fix_shapes(fixed)
    for model in (two_rows, fixed):
        cache, plain_cache = (prefilled(m, prefix, n_prefix + 20) for m in (model, plain))
        for tree, length in (
            (TREE, n_prefix),
            (ROOT_ONLY, n_prefix),
            (TREE, n_prefix),
            (ROOT_ONLY, 4),
        ):
            cache.rewind(length)
            plain_cache.rewind(length)
            assert_close(run_tree(model, cache, tree), run_tree(plain, plain_cache, tree))
            n = length + len(tree)
            assert_close(cache.kv[:, :, :, :n], plain_cache.kv[:, :, :, :n])


def test_the_head_runs_no_fewer_rows_than_a_pass() -> None:
    """Check the last logits of passes that are padded to 4 rows or have more, and the head's rows.
    In half precision its product of one row would take longer."""
    model, plain, rows = random_model(6), random_model(6), []
    model.min_rows = 4
    model.embed_out.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    for n in (1, 3, 4, 6):
        ids = torch.arange(n)
        found = model.forward(ids, ids, model.new_cache(n), n_last=1)
        assert_close(found, run(plain, ids.tolist())[-1:])
    assert rows == [4] * 4


@pytest.mark.parametrize("capacity", [1, 2, 129, 255, 257])
def test_a_padded_pass_stays_inside_the_cache(capacity: int) -> None:
    """Run a wide and a narrow pass at the end of caches of several lengths."""
    for is_shaped, n in ((True, min(capacity, 65)), (True, 1), (False, 1)):
        model = random_model(6)
        model.has_fixed_shapes, model.min_rows = is_shaped, 4
        cache = model.new_cache(capacity)
        cache.advance(capacity - n)
        assert append(model, [3] * n, cache).isfinite().all()
        assert cache.length == capacity and cache.kv.nbytes == model.cache_bytes(capacity)


def test_the_memory_of_a_closed_cache_is_used_again(
    monkeypatch: MonkeyPatch,
) -> None:
    """Check that nothing is captured twice, and that a capture does not change the cache."""
    pretend_capture(monkeypatch)
    model = random_model(6, max_position_embeddings=20)
    fix_shapes(model)
    expected = run_tree(random_model(6), prefilled(random_model(6), PREFIX, 20), TREE)
    small, large = (model.new_cache(n, PassConfig(7, ranking=Ranking(3))) for n in (100, 600))
    n_graphs = []
    for cache in (small, large):
        model.release(cache)
    for _ in range(2):
        cache = prefilled(model, PREFIX, 500, PassConfig(7, ranking=Ranking(3)))
        assert cache is large
        model.capture(cache, 10)
        n_graphs.append(model.n_graphs)
        assert_close(run_tree(model, cache, TREE), expected)
        model.release(cache)
    assert n_graphs[0] == n_graphs[1] > 0
    tokens = [i % 90 for i in range(120)]  # past the positions that the model was trained for
    again = model.prefill(tokens, model.new_cache(120))[0]
    assert_close(again, run(random_model(6, max_position_embeddings=120), tokens)[-1])


# The results of a pass that the host reads.


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize(("are_logprobs", "temperature"), [(False, 1.0), (True, 1.0), (True, 0.5)])
@pytest.mark.parametrize("k", [0, 1, 3, SMALL_K, SMALL_K + 1, 40])
def test_results_of_each_row_for_the_host(
    k: int, are_logprobs: bool, temperature: float, is_on_device: bool
) -> None:
    """Compare the best id (the first of equals) and the candidates with a sort. There are no more
    candidates than ids. The logits must not change, because sampling uses them. A device ranks by
    other code."""
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(k))
    logits[1:3] = logits[1:3].round()  # so that some are equal
    logits[3, 7], logits[4, 9] = torch.nan, torch.inf
    logits[5, 3], logits[6] = -torch.inf, -torch.inf  # a forbidden token, and nothing else
    before = logits.clone()
    ranking = Ranking(k, are_logprobs, temperature=temperature)
    hidden = torch.zeros(len(logits), 1)
    scores = Scores(hidden, logits)
    if is_on_device:
        scores = RankedScores(hidden, logits, rank_logits(logits, ranking), ranking)
    best, highest = scores.argmax(), scores.highest[0]
    if are_logprobs:
        ids, found, _ = scores.top_candidates(ranking)
    else:
        ids = scores.top_ids(k)
        found = numpy.take_along_axis(logits.numpy(), ids, axis=1)
    assert scores.logits is logits
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    assert scores.finite_rows() == [True, True, True, False, False, True, False]
    shift = logits.amax(dim=-1, keepdim=True) if temperature != 1 else 0.0
    values = torch.log_softmax((logits - shift) / temperature, dim=-1) if are_logprobs else logits
    for row in (0, 1, 2, 5):
        ranked = sorted(range(30), key=lambda i, row=row: -float(logits[row, i]))
        assert best[row] == ranked[0]
        assert are_logprobs or highest[row] == float(logits[row, ranked[0]])
        assert found[row].tolist() == values[row, ranked[:k]].tolist()
        candidates = ids[row].tolist()
        assert found[row].tolist() == values[row, candidates].tolist()
        assert len(set(candidates)) == min(k, 30)
        assert k > SMALL_K or candidates == ranked[:k]
