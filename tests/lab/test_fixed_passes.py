"""Tests of passes of fixed shapes, which CUDA graphs replay, and of passes of up to 1,024 rows."""

import random

import numpy
import pytest
import torch
from fast import append, fix_shapes, generate, noisy_pair, pretend_capture, random_model
from small import run_tree
from trees import make_tree

from draft_tree import Tree
from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.cuda_graphs import make_shape
from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.masks import PLAIN, Masks
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import ROW_COUNTS, SLOT_STEP, SMALL_PASS, PassConfig
from dynatree_lab.engine.scores import Ranking
from dynatree_lab.engine.strict import STRICT
from dynatree_lab.methods.static import Chain

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


def random_large_tree(n: int, seed: int) -> Tree:
    """Return a random tree of n rows in breadth-first order."""
    rng = random.Random(seed)
    parents = sorted(rng.randrange(max(1, row // 2)) for row in range(1, n))
    return make_tree([rng.randrange(90) for _ in range(n)], [-1, *parents])


def test_passes_run_outside_inference_mode_after_a_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a model whose memory was made inside inference mode and is used again outside."""
    pretend_capture(monkeypatch)
    target, draft = noisy_pair(seed=5)
    fix_shapes(target, draft)
    list(generate(target, draft, PROMPT, Chain(K=3), 8))
    cache = target.new_cache(30, PassConfig(ranking=Ranking(3)))
    target.prefill(PROMPT, cache)
    append(target, [5], cache)
    assert cache.scores.top_ids(3).shape == (1, 3)


def test_a_mask_in_bits() -> None:
    """Check three rows and one of padding, which attends to all but the other slots."""
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    rows = torch.arange(3)
    packed = PLAIN.pack(PassInputs(rows, rows, mask, start=9, n_last=3), 4, n_scratch=6)
    bits = numpy.unpackbits(packed, axis=1, bitorder="little").astype(bool)
    assert bits[:3, 0].all() and not bits[:3, 6:].any()
    assert bits[:3, 1:6].tolist() == mask.tolist()
    assert bits[3].tolist() == [True] * 7 + [False]


@pytest.mark.parametrize("masks", [PLAIN, STRICT])
def test_an_upload_keeps_nothing_of_the_one_before_it(masks: Masks) -> None:
    """Compare the inputs of a pass of 3 rows, padded to 4, after one of 4 rows and at first."""
    model = random_model(1, max_position_embeddings=20)
    fix_shapes(model)
    shape = make_shape(4, SLOT_STEP, PassConfig(masks=masks))
    uploaded = []
    for row_counts in ((4, 3), (3,)):
        cache = model.new_cache(20)
        cache.advance(5)
        for n in row_counts:
            rows = torch.arange(n) + 5
            cache.upload(shape, cache.place(rows, rows, None, n_last=n))
        uploaded.append(cache.buffer[: shape.n_bytes])
    assert uploaded[0].equal(uploaded[1])


def open_shaped(model: FastGPTNeoX, n_rows: int, capacity: int = 400) -> FastCache:
    cache = model.new_cache(capacity, PassConfig(n_rows, n_scratch=max(n_rows, SMALL_PASS)))
    model.prefill(PROMPT, cache)
    model.capture(cache, len(PROMPT))
    return cache


def test_memory_is_for_the_rows_that_are_asked() -> None:
    """Check the rows of logits and the slots of small and large passes. A small pass can use the
    memory of a large one, but not the reverse, even if there are enough slots."""
    model = random_model(3, max_position_embeddings=64)
    fix_shapes(model)
    caches: list[FastCache] = []
    for n_rows, capacity in ((7, 600), (300, 100), (64, 100)):
        caches.append(model.new_cache(capacity, PassConfig(n_rows)))
        model.release(caches[-1])
    assert [len(each.logits) for each in caches] == [SMALL_PASS, 384, 384]
    assert [each.kv.shape[3] for each in caches] == [768, 512, 512]
    assert caches[1] is caches[2]


def test_a_large_pass_is_captured_when_it_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_capture(monkeypatch)
    model, plain = (random_model(3, max_position_embeddings=400) for _ in range(2))
    fix_shapes(model)
    cache, plain_cache = open_shaped(model, 300, 900), open_shaped(plain, 300, 900)
    captured = cache.captured
    assert {shape.n_rows for shape in captured} == {n for n in ROW_COUNTS if n <= SMALL_PASS}
    n_captured = []
    for n_rows in (300, 200, 300, 290, 3):
        tree = random_large_tree(n_rows, seed=n_rows)
        expected = run_tree(plain, plain_cache, tree)
        torch.testing.assert_close(run_tree(model, cache, tree), expected, rtol=1e-4, atol=1e-4)
        n_captured.append(len(captured))
    first, *others = n_captured
    assert others == [first + 1] * 4
