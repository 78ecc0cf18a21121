"""Tests of the rolling cache of a window. test_exactness.py compares texts over it with ar's."""

import pytest
import torch
from fast import append, generate, random_model
from small import assert_close, prefilled, random_config, random_tensors
from test_exactness import generate_streaming
from trees import make_tree

from draft_tree import Tree
from dynatree import ModelDrafter
from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import PassConfig, Window
from dynatree_lab.engine.scores import Ranking
from dynatree_lab.generation.run import FastRun
from dynatree_lab.methods.static import Chain, PaddedAutoregressive
from dynatree_lab.metrics import token_ids


@torch.inference_mode()
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(
    "changes", [{}, {"use_parallel_residual": False}, {"rotary_pct": 1.0}], ids=str
)
def test_dropped_slots_leave_no_trace(sinks: int, changes: dict[str, object]) -> None:
    """Compare all layers with a fresh prefill of the other tokens at their new positions.

    With sinks, compare only the first layer. Later ones differ, because the tokens attended to the
    sinks over a larger distance.
    """
    model = random_model(3, **changes)
    tokens = torch.randint(96, (30,), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    mask[sinks + 10 :, sinks : sinks + 10] = False  # only these ten attend to each other
    cache = model.new_cache(30)
    model.forward(tokens, torch.arange(30), cache, mask)
    cache.advance(30)
    for _ in range(2):  # in two drops, so that the later tokens move twice
        cache.remove_slots(sinks, 5)
    fresh = prefilled(model, tokens[:sinks].tolist() + tokens[sinks + 10 :].tolist(), 30)
    layers = slice(1 if sinks else None)
    assert cache.length == 20
    assert_close(cache.kv[:, layers, :, :20], fresh.kv[:, layers, :, :20])
    if not sinks:
        assert_close(append(model, [5], cache), append(model, [5], fresh))


@pytest.mark.parametrize(("size", "sinks"), [(0, 0), (-1, 4), (64, -1)])
def test_a_window_of_nothing(size: int, sinks: int) -> None:
    with pytest.raises(ValueError, match=f"size {size} and sinks {sinks}, they must be"):
        Window(size, sinks)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_smallest_windows(size: int) -> None:
    """Compare the text of ar with an oracle that drops one token at a time."""
    model, window = random_model(7), Window(size, 2)
    with torch.inference_mode():
        expected, _ = generate_streaming(model, [3, 1, 4], window, 12)
    found = generate(model, None, [3, 1, 4], PaddedAutoregressive(), 12, window=window)
    assert token_ids(found) == expected


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that caches have one size for every prompt and limit."""
    target, draft = random_model(7), random_model(8)
    capacities = []
    new_cache = FastGPTNeoX.new_cache

    def record_capacity(self: FastGPTNeoX, capacity: int, config: PassConfig) -> FastCache:
        capacities.append(capacity)
        return new_cache(self, capacity, config)

    monkeypatch.setattr(FastGPTNeoX, "new_cache", record_capacity)
    for limit in (80, 160):
        steps = generate(target, draft, [3] * limit, Chain(K=3), limit, window=Window(64, 4))
        assert len(token_ids(steps)) == limit
    assert capacities == [64 + 4 + 64 // 4 + 4] * 4  # and the rows of a tree


def test_a_tree_ends_where_the_window_drops_tokens() -> None:
    """Check that a tree has as many levels as tokens may be committed, less the bonus token's."""
    model, window = random_model(7), Window(12, 2)
    steps = list(generate(model, model, [3, 1, 4], Chain(K=30), 30, window=window))
    lengths = [step.cache_lengths[0] for step in steps]
    depths = [max(step.tree.depths) for step in steps[1:-1]]
    assert depths == [window.max_length - length - 1 for length in lengths[:-2]]
    assert len(set(depths)) > 1


@pytest.mark.parametrize("n_uncached", [3, 30, 200])
def test_a_draft_that_lags_behind_keeps_what_its_window_keeps(n_uncached: int) -> None:
    """Compare a draft that has caught up with one that ran token by token."""
    config = random_config()
    draft = FastGPTNeoX.from_tensors(config, random_tensors(config, 1))
    ranking = Ranking(96, are_logprobs=True)
    pass_config = PassConfig(ranking=ranking, window=Window(12, 2), is_draft=True)
    drafter = ModelDrafter(FastRun(draft, 240, 4, pass_config))
    text = torch.randint(96, (n_uncached + 9,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        drafter.start(text[:9], 240, 96)
        tree = Tree.from_root(text[8])
        drafter.draft(tree, [0], 96)
        tree.draft_slots = [0]
        drafter.commit(tree, [0], text[9:])
        candidates = drafter.draft(Tree.from_root(text[-1]), [0], 96)
        _, expected = generate_streaming(draft, text, Window(12, 2), 0)
    assert candidates.tokens[0].tolist() == expected.argsort(descending=True).tolist()


def test_levels_of_a_tree_drop_nothing() -> None:
    """Check that a draft's window drops tokens only when they are committed, and not while a tree
    grows to its end: later levels would have other positions. Once they had."""
    window = Window(12, 2)
    run = FastRun(random_model(1), 240, 8, PassConfig(window=window, is_draft=True))
    drafter = ModelDrafter(run)
    with torch.inference_mode():
        drafter.start(list(range(window.max_length - 3)), 240, 96)
        tree = make_tree([window.max_length - 4, 5, 6, 7], [-1, 0, 0, 0])
        drafter.draft(tree, [0], 3)
        tree.draft_slots[0] = 0
        drafter.draft(tree, [1, 2, 3], 3)
    assert run.cache.n_dropped == 0 and run.cache.length == window.max_length
