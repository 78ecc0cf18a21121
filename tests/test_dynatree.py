"""Tests of the decoding loop: commit lengths, both caches, the limit, non-finite logits, steps."""

import itertools

import pytest
from conftest import (
    assert_close,
    fix_shapes,
    generate,
    noisy_pair,
    prefilled,
    pretend_capture,
    random_config,
    random_model,
    random_tensors,
    run,
)

import gpt_neox
from draft_tree import DynaTree, Settings
from dynatree_lab.engine import memory
from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Chain, Fixed, PaddedAutoregressive, SpecInfer
from dynatree_lab.metrics import token_ids
from gpt_neox import GPTNeoX, KVCache
from verify import NonFiniteLogits

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("settings", "limit", "lengths"),
    [
        (Chain(K=4), 16, [5, 5, 5]),  # K accepted and the bonus
        (Fixed(D=3, B=2, tau=0.0), 15, [4, 4, 4, 2]),  # cut only by the limit
        (Fixed(N_max=1), 6, [1] * 5),  # a budget counts rows, root included
        (Chain(K=4), 1, []),  # no iteration
    ],
)
def test_what_an_iteration_commits(settings: Settings, limit: int, lengths: list[int]) -> None:
    """Check a draft that is always right."""
    model = random_model(7)
    steps = list(generate(model, model, PROMPT, settings, limit))
    assert [len(step.tokens) for step in steps] == [1, *lengths]


RULES = [Chain(K=4), Fixed(D=4, B=3, tau=0.0), DynaTree(tau=0.001)]
LOOPS = [(GPTNeoX, "keep"), (FastGPTNeoX, "keep"), (FastGPTNeoX, "rebuild")]


@pytest.mark.parametrize(("kind", "commit"), LOOPS)
@pytest.mark.parametrize("settings", RULES)
def test_each_token_and_both_caches_after_every_commit(
    settings: Settings, kind: type[GPTNeoX], commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare each token with one pass over the whole sequence, and slots [0, length) of both
    caches with a prefill of the committed tokens.

    The target's cache has all of them, the draft's may have fewer. This finds errors of mask,
    positions, commit and catch-up. commit="rebuild" runs the accepted rows again.
    """
    models, text, paths = noisy_pair(3, kind=kind), list(PROMPT), []
    made: list[KVCache] = []
    new_cache = kind.new_cache

    def record_cache(*arguments: object) -> KVCache:
        made.append(new_cache(*arguments))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(kind, "new_cache", record_cache)
        steps = generate(*models, PROMPT, settings, 30, commit=commit)
        first = next(steps)
    caches = made[:2]  # the target's and the draft's
    for step in itertools.chain([first], steps):
        n_before = len(text)
        for token in step.tokens:
            assert token == int(run(models[0], text)[-1].argmax())
            text.append(token)
        for model, cache in zip(models, caches, strict=True):
            n = cache.length
            fresh = prefilled(model, text[: max(n, 1)], 64)
            assert_close(cache.kv[..., :n, :], fresh.kv[..., :n, :])
        assert step.cache_lengths == (caches[0].length, caches[1].length)
        assert step.cache_lengths[0] == len(text) - 1
        if step.draft_rows:
            n_run = sum(step.tree.draft_slots[row] >= 0 for row in step.path)
            assert step.cache_lengths[1] == n_before - 1 + n_run
            paths.append(step.path)
    assert len(text) == 35 and max(map(len, paths)) > 3
    assert any(path != list(range(len(path))) for path in paths) or isinstance(settings, Chain)


def test_an_unknown_commit_is_an_error() -> None:
    """Check the engine's own check; test_core.py tests the core's."""
    with pytest.raises(ValueError, match="commit is never, it must be one of keep, rebuild"):
        next(generate(random_model(0), None, [1], PaddedAutoregressive(), 5, commit="never"))


def test_two_caches_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the memory for both caches is required at the start. Each alone would fit, so the
    error would come only when they are filled."""
    target = random_model(7)
    needed = target.cache_bytes(len(PROMPT) + 50 + 5)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed + needed // 2)
    assert len(token_ids(generate(target, None, PROMPT, PaddedAutoregressive(), 50))) == 50
    with pytest.raises(OutOfMemory, match="caches of 60 and 60 tokens"):
        next(generate(target, target, PROMPT, Chain(K=4), 50))


# Logits that are not finite.


def broken_at(token: int, kind: type[GPTNeoX] = FastGPTNeoX) -> GPTNeoX:
    """Return random_model(7), changed so that it overflows where it reads this token."""
    tensors = random_tensors(random_config(), 7)
    tensors["gpt_neox.embed_in.weight"][token] = float("nan")
    return kind.from_tensors(random_config(), tensors)


def text_of_seven() -> tuple[FastGPTNeoX, list[int]]:
    target = random_model(7)
    return target, token_ids(generate(target, None, PROMPT, PaddedAutoregressive(), 20))


def test_tokens_before_a_non_finite_row_are_kept() -> None:
    """Check an accepted path that runs into the overflow: its tokens before that are emitted."""
    target, text = text_of_seven()
    at = next(i for i in range(3, 20) if text[i] not in text[:i] + PROMPT)
    for settings in (PaddedAutoregressive(), Chain(K=19), Fixed(tau=0.0)):
        got: list[int] = []
        with pytest.raises(NonFiniteLogits, match="bfloat16"):
            for step in generate(broken_at(text[at]), target, PROMPT, settings, 20):
                got += step.tokens
        assert got == text[: at + 1]


@pytest.mark.parametrize("kind", [GPTNeoX, FastGPTNeoX])
def test_an_overflow_in_the_prompt_is_an_error_too(
    kind: type[GPTNeoX], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an overflow at any token. Prefill computes logits only for the last one, but that one
    attends to all others."""
    monkeypatch.setattr(gpt_neox, "PREFILL_CHUNK", 2)
    for prompt in ([9, 1, 2, 3, 4], [1, 2, 3, 9, 4], [1, 2, 3, 4, 9]):
        with pytest.raises(NonFiniteLogits):
            next(generate(broken_at(9, kind), None, prompt, PaddedAutoregressive(), 5))


@pytest.mark.parametrize("method", METHODS)
def test_a_non_finite_draft_changes_no_text(method: str) -> None:
    """Check a draft that overflows in the middle of the text or in all of it. Greedy ids must be
    the target's, and sampled text must reach its full length."""
    target, text = text_of_seven()
    for token in (text[4], PROMPT[0]):
        draft, settings = broken_at(token), METHODS[method]()
        assert token_ids(generate(target, draft, PROMPT, settings, 20)) == text
        steps = generate(target, draft, PROMPT, settings, 20, sampling=Sampling(1.0, 0.9))
        assert len(token_ids(steps)) == 20


# Rules and steps.


@pytest.mark.parametrize("is_shaped", [False, True])
def test_generations_share_nothing(is_shaped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleave two generations step by step, also with captured passes. In the paper's code
    history leaks from prompt to prompt, so its results depend on their order."""
    pretend_capture(monkeypatch)
    settings, models = DynaTree(W=2, tau=0.001, rho_stop=0.002), noisy_pair()
    if is_shaped:
        fix_shapes(*models)
    alone = [
        [(step.tokens, step.tree) for step in generate(*models, prompt, settings, 40)]
        for prompt in (PROMPT, PROMPT[:2])
    ]
    both = [generate(*models, prompt, settings, 40) for prompt in (PROMPT, PROMPT[:2])]
    for found in itertools.zip_longest(*both):
        for expected, step in zip(alone, found, strict=True):
            assert step is None or (step.tokens, step.tree) == expected.pop(0)


def test_a_step_has_the_targets_predictions() -> None:
    """Check the target's best id after each row, and the number of rows of each draft pass."""
    first, *steps = generate(random_model(0), random_model(1), [3, 1, 4], SpecInfer("2:2"), 20)
    assert (first.tree.tokens, first.path, first.draft_rows) == ([4], [0], [])
    assert steps[0].draft_rows == [4, 2]  # the prompt and the root, then two nodes
    for step in steps:
        after_path = [step.predictions[row] for row in step.path]
        assert after_path[: len(step.tokens)] == step.tokens
        assert len(step.predictions) == len(step.tree) == step.n_drafted + 1
        assert len(step.draft_rows) == max(step.tree.depths)
