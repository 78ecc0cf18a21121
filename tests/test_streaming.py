"""Streaming: the rolling cache, and the tree over it equal to ar over it."""

import random

import pytest
import torch
from conftest import (
    assert_close,
    prefilled,
    random_config,
    random_model,
    random_settings,
    random_tensors,
    run,
)
from test_exactness import DRAFTS, VOCAB, build, check, make_draft, varied_targets

from cli.metrics import token_ids
from dynatree import Drafter, generate
from engine.passes import Use
from engine.scores import Ranking
from engine.stopwatch import Stopwatch
from engine.streaming import Window
from gpt_neox import GPTNeoX, KVCache
from methods import METHODS
from methods.static import Chain


@torch.inference_mode()
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("changes", [{}, {"is_parallel": False}, {"rotary_fraction": 1.0}], ids=str)
def test_what_nobody_saw_is_dropped_without_a_trace(sinks: int, changes: dict[str, object]) -> None:
    """What is left is a fresh prefill of the others, at their new positions: in every layer, or if
    there are sinks, which they had seen from afar, in the first."""
    model = random_model(3, **changes)
    tokens = torch.randint(96, (30,), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    mask[sinks + 10 :, sinks : sinks + 10] = False  # nobody but they themselves saw these ten
    cache = model.new_cache(30)
    model.forward(tokens, torch.arange(30), cache, mask)
    cache.advance(30)
    for _ in range(2):  # in two moves, as a token goes that lives through two drops
        model.forget(cache, sinks, 5)
    fresh = prefilled(model, tokens[:sinks].tolist() + tokens[sinks + 10 :].tolist(), 30)
    layers = slice(1 if sinks else None)
    assert cache.length == 20
    assert_close(cache.kv[:, layers, :, :20], fresh.kv[:, layers, :, :20])
    if not sinks:
        assert_close(model.append([5], cache).logits, model.append([5], fresh).logits)


@torch.inference_mode()
def slow_stream(target: GPTNeoX, prompt: list[int], window: Window, n: int) -> list[int]:
    """The definition: one token at a time, a drop whenever the cache is full."""
    slack = max(window.size // 4, 1)
    full = window.sinks + window.size + slack
    cache = target.new_cache(full)
    unread = list(prompt)
    text: list[int] = []
    while len(text) < n:
        logits = target.append(unread[:1], cache).logits
        if cache.length == full:
            target.forget(cache, window.sinks, slack)
        del unread[0]
        if not unread:
            text.append(int(logits.argmax()))
            unread = text[-1:]
    return text


@pytest.mark.parametrize(("size", "sinks"), [(0, 0), (-1, 4), (64, -1)])
def test_a_window_of_nothing(size: int, sinks: int) -> None:
    with pytest.raises(ValueError, match=f"{size} tokens, {sinks} sinks"):
        Window(size, sinks)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_ar_over_the_same_window(method: str) -> None:
    """Random pairs, settings, windows and prompts, the latter up to several times the window."""
    n_drops = 0
    for case in range(5):
        rng = random.Random(f"streaming {method} {case}")
        tensors, changes = varied_targets()[case % 8]
        target = build(tensors, **changes)
        draft = make_draft(DRAFTS[case % len(DRAFTS)], tensors, changes, case)
        settings = random_settings(method, rng)
        size = max(settings.rule().max_rows, rng.choice([1, 5, 16, 24]))
        window = Window(size, rng.choice([0, 1, 4]))
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 7, 40, 90]))]
        options = {"window": window, "commit": rng.choice(["keep", "keep", "rebuild"])}
        steps = list(generate(target, draft, prompt, settings, 50, **options))
        check(target, prompt, steps, slow_stream(target, prompt, window, 50))
        assert max(max(step.cached) for step in steps) <= window.full
        n_drops += (len(prompt) + 49 - window.sinks - size) // window.slack
    assert n_drops > 10


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of one size, whatever the prompt and the limit."""
    target, draft = random_model(7), random_model(8)
    capacities = []
    new_cache = GPTNeoX.new_cache

    def noted(self: GPTNeoX, capacity: int, use: Use) -> KVCache:
        capacities.append(capacity)
        return new_cache(self, capacity, use)

    monkeypatch.setattr(GPTNeoX, "new_cache", noted)
    for limit in (100, 300):
        steps = generate(target, draft, [3] * limit, Chain(K=3), limit, window=Window(64, 4))
        assert len(token_ids(steps)) == limit
    assert capacities == [64 + 4 + 64 // 4 + 4] * 4  # and the rows of a tree


def test_a_draft_that_lags_behind_keeps_the_sinks() -> None:
    config = random_config()
    draft = GPTNeoX.from_tensors(config, random_tensors(config, 1))
    visible = list(range(20))
    use = Use(ranking=Ranking(96, are_logprobs=True))
    drafter = Drafter(draft, draft.new_cache(40, use), Chain().rule(), None, Stopwatch())
    with torch.inference_mode():
        draft.prefill(visible[:4], drafter.cache)
        drafter.drop(Window(12, 2))
        assert drafter.cache.length == 2
        del visible[2:5]
        drafter.begin(visible)
        candidates = drafter.run(visible[-1:], None)
    expected = torch.log_softmax(run(draft, visible)[-1], dim=-1)
    assert candidates.tokens[0].tolist() == expected.argsort(descending=True).tolist()
    assert_close(torch.from_numpy(candidates.logprobs[0]), expected.sort(descending=True).values)
