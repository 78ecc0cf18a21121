"""Tests that trees of up to 1,024 rows give the target's own text, as small trees do.

test_exactness.py has small random trees. Here each method gets settings that give large ones.

    python -m pytest tests/test_large_trees.py
"""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import (
    LARGE_SETTINGS,
    append,
    fix_shapes,
    generate,
    make_head,
    make_tree,
    noisy_pair,
    path_to,
    pretend_capture,
    random_config,
    random_model,
    random_tensors,
    run_tree,
)
from test_exactness import generate_greedy, generate_streaming
from test_tensor_parallel import with_ranks, write_small_checkpoint
from torch import Tensor

from cli.metrics import token_ids
from draft_tree import MAX_ROWS, Tree
from engine.cache import FastCache
from engine.cuda_graphs import FixedPasses, make_shape, pack_mask
from engine.generate import Step
from engine.generation_config import GenerationConfig
from engine.model import FastGPTNeoX
from engine.passes import ROW_COUNTS, SLOT_STEP, SMALL_PASS, PassConfig, Window
from engine.scores import Ranking
from engine.strict import MAX_STRICT_ROWS
from gpt_neox import GPTNeoX
from methods.dyspec import DySpec
from methods.sampler import MAX_CDF_DRAWS, DrawingSampler, Sampling
from verify import tree_inputs

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
N_TOKENS = 160  # so that the chains of 150 tokens are large too
# The target draws its likeliest token, so the text is the greedy one whatever the draft draws
ALMOST_GREEDY = Sampling(1e-7, seed=1, draft_temperature=1.0)
MODES = {
    "plain": {},
    "fast": {},
    "fixed": {},
    "rebuild": {"commit": "rebuild"},
    "drawn": {"sampling": ALMOST_GREEDY},
    "plain drawn": {"sampling": ALMOST_GREEDY},
    "window": {"window": Window(MAX_ROWS, sinks=2)},
}


@cache
def pair(kind: type[GPTNeoX]) -> tuple[GPTNeoX, GPTNeoX]:
    return noisy_pair(seed=5, kind=kind, max_position_embeddings=2000)


@cache
def greedy_text() -> list[int]:
    return generate_greedy(pair(FastGPTNeoX)[0], PROMPT, N_TOKENS)


def n_tokens(method: str) -> int:
    return N_TOKENS if method in ("linear", "confident", "lookup") else 32


def widest(steps: list[Step]) -> int:
    """Return the rows of the largest tree."""
    return max(len(step.tree) for step in steps[1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", LARGE_SETTINGS)
def test_a_large_tree_writes_ars_text(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare token for token. `ar` has no tree: its passes are padded to many rows. Check that
    large passes of fixed shapes are captured."""
    pretend_capture(monkeypatch)
    target, draft = pair(GPTNeoX if mode.startswith("plain") else FastGPTNeoX)
    if mode == "fixed":
        target, draft = noisy_pair(seed=5, max_position_embeddings=2000)
        fix_shapes(target, draft)
    settings, n, options = LARGE_SETTINGS[method], n_tokens(method), MODES[mode]
    steps = list(generate(target, draft, PROMPT, settings, n, **options))
    assert token_ids(steps) == greedy_text()[:n]
    assert widest(steps) > SMALL_PASS or method == "ar"
    if mode == "fixed":
        (passes,) = target.reusable
        assert max(shape.n_rows for shape in passes.captured) > SMALL_PASS


@pytest.mark.parametrize("method", ["fixed", "dyspec", "recycle"])
def test_a_large_tree_over_a_window_that_drops(method: str) -> None:
    target, draft = pair(FastGPTNeoX)
    rng = random.Random(0)
    window = Window(LARGE_SETTINGS[method].make_rule().max_verified, sinks=2)
    prompt = [rng.randrange(90) for _ in range(window.max_length - 5)]
    text, _ = generate_streaming(target, prompt, window, 32)
    steps = list(generate(target, draft, prompt, LARGE_SETTINGS[method], 32, window=window))
    assert token_ids(steps) == text and widest(steps) > SMALL_PASS


def write_large(target: FastGPTNeoX, folder: Path) -> list[list[int]]:
    draft = FastGPTNeoX.from_pretrained(folder)
    texts = []
    for method in ("fixed", "dyspec", "sequoia"):
        steps = list(generate(target, draft, PROMPT, LARGE_SETTINGS[method], 20))
        assert widest(steps) > SMALL_PASS
        texts.append(token_ids(steps))
    return texts


def test_large_trees_on_two_ranks(tmp_path: Path) -> None:
    """Check trees whose masks do not fit into one broadcast."""
    expected = write_large(FastGPTNeoX.from_pretrained(write_small_checkpoint(tmp_path)), tmp_path)
    assert with_ranks(2, tmp_path, write_large) == expected


def random_large_tree(n: int, seed: int) -> Tree:
    """Return a random tree of n rows in breadth-first order."""
    rng = random.Random(seed)
    parents = sorted(rng.randrange(max(1, row // 2)) for row in range(1, n))
    return make_tree([rng.randrange(90) for _ in range(n)], [-1, *parents])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 130, 1000, MAX_ROWS])
def test_each_row_attends_to_its_path(n: int) -> None:
    chain = make_tree([0] * n, list(range(-1, n - 1)))
    for tree in (random_large_tree(n, seed=n), chain):
        tokens, positions, mask = tree_inputs(tree, length=3)
        assert tokens.tolist() == tree.tokens
        for row in range(n):
            path = path_to(tree, row)
            assert mask[row].nonzero().flatten().tolist() == path
            assert positions[row] == 3 + len(path) - 1


@pytest.mark.parametrize("n_rows", [129, 192, 193, 700, 1024])
def test_a_row_of_a_large_tree_is_its_own_path(n_rows: int) -> None:
    """Compare the logits of some rows with those of their tokens in a plain sequence."""
    model = random_model(3, max_position_embeddings=2000)
    tree = random_large_tree(n_rows, seed=n_rows)
    for is_shaped in (False, True):
        model.has_fixed_shapes = is_shaped
        cache = model.new_cache(2000, PassConfig(n_rows, n_scratch=n_rows))
        model.prefill(PROMPT, cache)
        logits = run_tree(model, cache, tree).clone()
        for row in (0, 1, n_rows // 2, n_rows - 1):
            cache.rewind(len(PROMPT))
            tokens = [tree.tokens[each] for each in path_to(tree, row)]
            expected = append(model, tokens, cache)[-1]
            torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_shaped", [False, True])
def test_an_eagle_head_drafts_levels_of_many_rows(
    is_shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a level of 599 rows. The head's buffer of states once had room for 512."""
    pretend_capture(monkeypatch)
    target = random_model(5, max_position_embeddings=2000, vocab_size=1000)
    tensors = random_tensors(random_config(max_position_embeddings=2000, vocab_size=1000), 5)
    head = make_head(tensors, seed=1, max_position_embeddings=2000, vocab_size=1000)
    if is_shaped:
        fix_shapes(target, head)
    expected = generate_greedy(target, PROMPT, 12)
    steps = list(generate(target, head, PROMPT, DySpec(N=600, D_max=2), 12))
    assert token_ids(steps) == expected
    assert max(n for step in steps for n in step.draft_rows) == 599


def test_passes_run_outside_inference_mode_after_a_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a model whose memory was made inside inference mode and is used again outside."""
    pretend_capture(monkeypatch)
    target, draft = noisy_pair(seed=5)
    fix_shapes(target, draft)
    list(generate(target, draft, PROMPT, LARGE_SETTINGS["dyspec"], 8))
    cache = target.new_cache(30, PassConfig(ranking=Ranking(3)))
    target.prefill(PROMPT, cache)
    append(target, [5], cache)
    assert cache.scores.top_ids(3).shape == (1, 3)


def unpack(packed: Tensor, n_columns: int) -> Tensor:
    bits = [(packed >> bit) & 1 for bit in range(8)]
    return torch.stack(bits, dim=2).flatten(1)[:, :n_columns].bool()


@pytest.mark.parametrize("n_scratch", [5, 6, 7, 128])
def test_a_mask_in_bits(n_scratch: int) -> None:
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = torch.from_numpy(pack_mask(mask, 4, n_scratch))
    found = unpack(packed, n_scratch + 2)
    assert found.shape == (4, n_scratch + 2)
    assert found[:3, 0].all() and found[:3, 1:6].equal(mask) and not found[:3, 6:].any()
    assert found[3, :-1].all() and not found[3, -1], "padding"


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_upload_keeps_nothing_of_the_one_before_it(is_strict: bool) -> None:
    """Compare the inputs of a pass of 3 rows, padded to 4, after one of 4 rows and at first."""
    kv, rotary = random_model(1).new_memory(SLOT_STEP)
    shape = make_shape(4, SLOT_STEP, PassConfig(is_strict=is_strict))
    uploaded = []
    for row_counts in ((4, 3), (3,)):
        passes = FixedPasses(kv, rotary, SMALL_PASS, 96)
        for n in row_counts:
            rows, mask = torch.arange(n) + 5, torch.ones(n, n, dtype=torch.bool).tril_()
            passes.upload(shape, rows, rows, mask, 5, 5)
        uploaded.append(passes.buffer[: shape.n_bytes])
    assert uploaded[0].equal(uploaded[1])


def open_shaped(model: FastGPTNeoX, n_rows: int, capacity: int = 400) -> FastCache:
    cache = model.new_cache(capacity, PassConfig(n_rows, n_scratch=max(n_rows, SMALL_PASS)))
    model.prefill(PROMPT, cache)
    cache.capture(len(PROMPT))
    return cache


def test_memory_is_for_the_rows_that_are_asked() -> None:
    """Check the rows of logits and the slots of small and large passes. A small pass can use the
    memory of a large one, but not the reverse, even if there are enough slots."""
    model = random_model(3, max_position_embeddings=64)
    fix_shapes(model)
    passes: list[FixedPasses] = []
    for n_rows, capacity in ((7, 600), (300, 100), (64, 100)):
        with model.new_cache(capacity, PassConfig(n_rows)) as cache:
            passes.append(cache.passes)
    assert [len(each.logits) for each in passes] == [SMALL_PASS, 384, 384]
    assert [each.kv.shape[3] for each in passes] == [768, 512, 512]
    assert passes[1] is passes[2]


def test_a_large_pass_is_captured_when_it_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_capture(monkeypatch)
    model, plain = (random_model(3, max_position_embeddings=400) for _ in range(2))
    fix_shapes(model)
    cache, plain_cache = open_shaped(model, 300, 900), open_shaped(plain, 300, 900)
    captured = cache.passes.captured
    assert {shape.n_rows for shape in captured} == {n for n in ROW_COUNTS if n <= SMALL_PASS}
    n_captured = []
    for n_rows in (300, 200, 300, 290, 3):
        tree = random_large_tree(n_rows, seed=n_rows)
        expected = run_tree(plain, plain_cache, tree)
        torch.testing.assert_close(run_tree(model, cache, tree), expected, rtol=1e-4, atol=1e-4)
        n_captured.append(len(captured))
    first, *others = n_captured
    assert others == [first + 1] * 4


@pytest.mark.parametrize("method", ["dyspec N=129", "ar rows=192", "beam N_max=256"])
def test_strict_passes_of_many_rows_are_refused(method: str) -> None:
    GenerationConfig.parse(*method.split())
    GenerationConfig.parse("dyspec", f"N={MAX_STRICT_ROWS}", "strict")
    with pytest.raises(ValueError, match=f"it must have at most {MAX_STRICT_ROWS}; use a smaller"):
        GenerationConfig.parse(*method.split(), "strict")


def test_many_draws_come_from_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the first draws have their probabilities also if there are many."""
    monkeypatch.delattr(DrawingSampler, "draw_by_inverse_cdf")
    sampler = Sampling(1.0).sampler(torch.device("cpu"))
    n_draws, k = 20_000, MAX_CDF_DRAWS + 1
    probs = torch.full((n_draws, 100), 0.5 / 98)
    probs[:, :2] = torch.tensor([0.4, 0.1])
    ids, drawn_probs = sampler.draw_several(probs, k)
    assert ids.shape == (n_draws, k) and drawn_probs.equal(probs.gather(1, ids))
    assert all(len(set(row)) == k for row in ids[:100].tolist())
    for token, p in ((0, 0.4), (1, 0.1), (50, 0.5 / 98)):
        share = (ids[:, 0] == token).double().mean().item()
        assert abs(share - p) < 5 * (p * (1 - p) / n_draws) ** 0.5
