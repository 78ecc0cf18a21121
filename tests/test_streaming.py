"""Streaming: the rolling cache, and the tree over it equal to ar over it."""

import random

import pytest
import torch
from conftest import (
    TINY,
    assert_close,
    pretend_capture,
    random_config,
    random_model,
    random_settings,
    random_tensors,
    run,
)
from test_exactness import DRAFTS, VOCAB, build, check, make_draft, varied_targets
from tokenizers import Tokenizer
from torch import Tensor

from cli.metrics import token_ids
from draft_tree import DynaTree, Settings
from dynatree import Drafter, generate
from engine.passes import Use
from engine.scores import Ranking
from engine.stopwatch import Stopwatch
from engine.streaming import Window
from gpt_neox import GPTNeoX, KVCache
from methods import METHODS
from methods.retrieval import Graft, Recycle
from methods.static import Alone, Chain

N = 10  # dropped


def random_tokens(seed: int) -> Tensor:
    return torch.randint(96, (30,), generator=torch.Generator().manual_seed(seed))


def test_dropping_moves_what_follows() -> None:
    """Sinks stay; in the first layer, which sees no context, the rest is a fresh prefill."""
    kinds = ({}, {"is_parallel": False}, {"rotary_fraction": 1.0})
    for seed, changes in enumerate(kinds):
        model = random_model(seed, **changes)
        tokens = random_tokens(seed).tolist()
        cache = model.new_cache(30)
        fresh = model.new_cache(30)
        with torch.inference_mode():
            model.prefill(tokens, cache)
            model.forget(cache, 4, N)
            model.prefill(tokens[:4] + tokens[4 + N :], fresh)
        assert cache.length == 30 - N
        assert_close(cache.kv[:, 0, :, :20], fresh.kv[:, 0, :, :20])


def test_what_nobody_saw_is_dropped_without_a_trace() -> None:
    """In every layer the cache is a fresh prefill of the others, at their new positions."""
    model = random_model(3)
    tokens = random_tokens(3)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    mask[N:, :N] = False  # nobody but they themselves saw the first N
    cache = model.new_cache(30)
    fresh = model.new_cache(30)
    with torch.inference_mode():
        model.forward(tokens, torch.arange(30), cache, mask)
        cache.advance(30)
        for _ in range(2):  # in two moves, as a token goes that lives through two drops
            model.forget(cache, 0, N // 2)
        model.prefill(tokens[N:].tolist(), fresh)
        assert_close(cache.kv[:, :, :, :20], fresh.kv[:, :, :, :20])
        following = torch.tensor([5])
        ours = model.forward(following, torch.tensor([20]), cache).logits
        theirs = model.forward(following, torch.tensor([20]), fresh).logits
    assert_close(ours, theirs)


def slow_stream(target: GPTNeoX, prompt: list[int], window: Window, n: int) -> list[int]:
    """The definition: one token at a time, a drop whenever the cache is full."""
    slack = max(window.size // 4, 1)
    full = window.sinks + window.size + slack
    cache = target.new_cache(window.full)
    unread = list(prompt)
    text: list[int] = []
    with torch.inference_mode():
        while len(text) < n:
            token = torch.tensor(unread[:1])
            logits = target.forward(token, torch.tensor([cache.length]), cache).logits
            cache.advance(1)
            if cache.length == full:
                target.forget(cache, window.sinks, slack)
            del unread[0]
            if not unread:
                following = int(logits.argmax())
                text.append(following)
                unread.append(following)
    return text


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_ar_over_the_same_window(method: str) -> None:
    """Random pairs, settings, windows and prompts, the latter up to several times the window."""
    n_drops = 0
    for case in range(8):
        rng = random.Random(f"streaming {method} {case}")
        tensors, changes = varied_targets()[case % 8]
        target = build(tensors, **changes)
        draft = make_draft(DRAFTS[case % len(DRAFTS)], tensors, changes, case)
        settings = random_settings(method, rng)
        size = max(settings.rule().max_rows, rng.choice([1, 5, 16, 24]))
        window = Window(size, rng.choice([0, 1, 4]))
        length = rng.choice([1, 7, 40, 90])
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        options = {"window": window, "commit": rng.choice(["keep", "keep", "rebuild"])}
        steps = list(generate(target, draft, prompt, settings, 60, **options))
        expected = slow_stream(target, prompt, window, 60)
        check(target, prompt, steps, expected)
        n_drops += (len(prompt) + 59 - window.sinks - size) // window.slack
    assert n_drops > 20


def test_a_drop_that_does_not_turn_the_keys_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the definition above then gives another text."""
    tensors, changes = varied_targets()[0]
    target = build(tensors, **changes)
    window = Window(12, 2)
    expected = slow_stream(target, [3, 1, 4], window, 60)

    def forget(self: GPTNeoX, cache: KVCache, start: int, n: int) -> None:
        kept = cache.kv[:, :, :, start + n : cache.length].clone()
        cache.rewind(cache.length - n)
        cache.kv[:, :, :, start : cache.length] = kept

    monkeypatch.setattr(GPTNeoX, "forget", forget)
    steps = generate(target, None, [3, 1, 4], Alone(), 60, window=window)
    assert token_ids(steps) != expected


def test_the_embedded_pair_over_a_window() -> None:
    target = GPTNeoX.from_pretrained(TINY / "target")
    draft = GPTNeoX.from_pretrained(TINY / "draft")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    prompt = tokenizer.encode("The harbour lay quiet under the morning fog, and").ids

    def text(settings: Settings, window: Window) -> list[int]:
        return token_ids(generate(target, draft, prompt, settings, 160, window=window))

    window = Window(64, 4)
    expected = text(Alone(), window)
    assert expected != text(Alone(), Window(256, 4))  # some drops have told
    for settings in (Chain(), DynaTree(), Recycle(), Graft()):
        assert text(settings, window) == expected


def test_a_window_longer_than_the_text_changes_nothing() -> None:
    target = random_model(7)
    draft = random_model(8)
    whole = token_ids(generate(target, draft, [3, 1, 4], DynaTree(), 40))
    same = generate(target, draft, [3, 1, 4], DynaTree(), 40, window=Window(64, 4))
    assert token_ids(same) == whole


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of one size, whatever the limit; the list of visible ids never longer than them."""
    target = random_model(7)
    draft = random_model(8)
    window = Window(64, 4)
    capacities = []
    lengths = []
    new_cache = GPTNeoX.new_cache
    begin = Drafter.begin

    def spied_cache(self: GPTNeoX, capacity: int, use: Use) -> KVCache:
        capacities.append(capacity)
        return new_cache(self, capacity, use)

    def spied_begin(self: Drafter, visible: list[int]) -> None:
        lengths.append(len(visible))
        begin(self, visible)

    monkeypatch.setattr(GPTNeoX, "new_cache", spied_cache)
    monkeypatch.setattr(Drafter, "begin", spied_begin)
    for limit in (100, 400):
        steps = generate(target, draft, [3, 1, 4] * 50, Chain(K=3), limit, window=window)
        assert len(token_ids(steps)) == limit
    assert capacities == [84 + 4, 84 + 4] * 2
    assert max(lengths) <= 84
    assert len(lengths) > 120


def test_a_draft_that_lags_behind_keeps_the_sinks() -> None:
    config = random_config()
    draft = GPTNeoX.from_tensors(config, random_tensors(config, 1))
    visible = list(range(20))
    window = Window(12, 2)
    use = Use(ranking=Ranking(96, are_logprobs=True))
    drafter = Drafter(draft, draft.new_cache(40, use), Chain().rule(), None, Stopwatch())
    with torch.inference_mode():
        draft.prefill(visible[:4], drafter.cache)
        drafter.drop(window)
        assert drafter.cache.length == 2
        del visible[2:5]
        drafter.begin(visible)
        candidates = drafter.run(visible[-1:], None)
    expected = torch.log_softmax(run(draft, visible)[-1], dim=-1)
    assert candidates.tokens[0].tolist() == expected.argsort(descending=True).tolist()
    assert_close(torch.from_numpy(candidates.logprobs[0]), expected.sort(descending=True).values)


@pytest.mark.parametrize("method", ["ar", "dynatree", "graft"])
def test_captured_passes_stream_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every length that a rolling cache comes to, after each drop too, has been captured."""
    pretend_capture(monkeypatch)
    prompt = [i % 90 for i in range(300)]
    texts = []
    for is_shaped in (False, True):
        target = random_model(7, max_positions=700)
        draft = random_model(8, max_positions=700)
        for model in (target, draft):
            model.pool.is_shaped = is_shaped
            model.pool.has_graphs = is_shaped
        steps = generate(target, draft, prompt, METHODS[method](), 250, window=Window(200, 4))
        texts.append(token_ids(steps))
    assert texts[0] == texts[1]
    assert target.pool.n_graphs > 0
