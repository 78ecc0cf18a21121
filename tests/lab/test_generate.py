"""Tests of the engine's loop: what every loop must do, rebuilt caches, memory, and steps."""

from collections.abc import Iterator

import pytest
from fast import fix_shapes, generate, noisy_pair, pretend_capture, random_model
from small import broken_at
from test_dynatree import (
    CHAIN,
    COMMITS,
    FULL,
    OVERFLOWING,
    PROMPT,
    WIDE,
    check_generations_share_nothing,
    checked_steps,
    record_caches,
    token_ids,
)

from draft_tree import Autoregressive, DynaTree, Rule, Settings
from dynatree_lab.engine import memory
from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.generation.step import Step
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Chain, PaddedAutoregressive, SpecInfer
from gpt_neox import GPTNeoX, NonFiniteLogits
from sampling import Sampler
from verify import Acceptance, accept_greedy


def write(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    settings: Settings,
    limit: int,
    prompt: list[int] = PROMPT,
) -> Iterator[Step]:
    return generate(target, draft, prompt, settings, limit)


@pytest.mark.parametrize(("settings", "limit", "lengths"), COMMITS)
def test_what_an_iteration_commits(settings: Settings, limit: int, lengths: list[int]) -> None:
    model = random_model(7)
    assert [len(step.tokens) for step in write(model, model, settings, limit)] == [1, *lengths]


@pytest.mark.parametrize("commit", ["keep", "rebuild"])
@pytest.mark.parametrize("settings", [CHAIN, WIDE, DynaTree(D0=4, B_mid=3, **FULL)])
def test_each_token_and_both_caches_after_every_commit(
    settings: Settings, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also what a step says of the caches. commit="rebuild" runs the accepted rows again."""
    models, caches = noisy_pair(3), record_caches(FastGPTNeoX, monkeypatch)
    steps = generate(*models, PROMPT, settings, 30, commit=commit)
    n_committed = len(PROMPT)
    for step in checked_steps(steps, models, caches):
        assert step.cache_lengths == (caches[0].length, caches[1].length)
        if step.draft_rows:
            n_run = sum(step.tree.draft_slots[row] >= 0 for row in step.path)
            assert step.cache_lengths[1] == n_committed - 1 + n_run
        n_committed += len(step.tokens)


def test_an_unknown_commit_is_an_error() -> None:
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


@pytest.mark.parametrize("accept", [None, accept_greedy, Sampler(1e-6)])
def test_tokens_before_a_non_finite_row_are_kept(accept: Acceptance | None) -> None:
    """Check an accepted path that runs into the overflow: its tokens before that are emitted. The
    core's acceptances know of no overflow."""
    target = random_model(7, kind=FastGPTNeoX)
    text = token_ids(write(target, None, Autoregressive(), 20))
    at = next(i for i in range(3, 20) if text[i] not in text[:i] + PROMPT)
    long_chain = DynaTree(D0=19, D_max=19, B_mid=1, **FULL)
    for settings in (Autoregressive(), long_chain, DynaTree(tau=0.0)):
        got: list[int] = []
        with pytest.raises(NonFiniteLogits, match="bfloat16"):
            broken = broken_at(text[at], FastGPTNeoX)
            for step in generate(broken, target, PROMPT, settings, 20, accept=accept):
                got += step.tokens
        assert got == text[: at + 1]


@pytest.mark.parametrize("prompt", OVERFLOWING)
def test_an_overflow_in_the_prompt_is_an_error(
    prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("dynatree_lab.engine.cache", "dynatree_lab.generation.run", "gpt_neox"):
        monkeypatch.setattr(f"{module}.PREFILL_CHUNK", 2)
    for kind in (GPTNeoX, FastGPTNeoX):
        with pytest.raises(NonFiniteLogits):
            next(write(broken_at(9, kind), None, Autoregressive(), 5, prompt))


@pytest.mark.parametrize("method", METHODS)
def test_a_non_finite_draft_changes_no_text(method: str) -> None:
    """Check a draft that overflows in the middle of the text or in all of it. Greedy ids must be
    the target's, and sampled text must reach its full length."""
    target = random_model(7)
    text = token_ids(write(target, None, PaddedAutoregressive(), 20))
    for token in (text[4], PROMPT[0]):
        draft, settings = broken_at(token, FastGPTNeoX), METHODS[method]()
        assert token_ids(generate(target, draft, PROMPT, settings, 20)) == text
        steps = generate(target, draft, PROMPT, settings, 20, sampling=Sampling(1.0, 0.9))
        assert len(token_ids(steps)) == 20


# Rules and steps.


@pytest.mark.parametrize("is_shaped", [False, True])
def test_generations_share_nothing(is_shaped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also captured passes."""
    pretend_capture(monkeypatch)
    models = noisy_pair()
    if is_shaped:
        fix_shapes(*models)
    check_generations_share_nothing(write, models)


def test_the_parts_of_a_step_are_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that only these calls move: 1 ms for the rule, 2 for a commit, 4 for a pass of
    the draft, 8 for one of the target. The draft's commit is other work."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def take(ms: float, owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: object, **options: object) -> object:
            clock[0] += ms / 1e3
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    target, draft = noisy_pair()
    take(1, Rule, "adapt")
    take(2, FastCache, "commit")
    take(4, draft, "forward")
    take(8, target, "forward")
    for step in [*generate(target, draft, PROMPT, Chain(K=3), 20)][1:]:
        is_drafted = len(step.draft_rows) > 0
        parts = step.draft_ms, step.verify_ms, step.other_ms
        assert parts == pytest.approx((4 * len(step.draft_rows), 8 + 2, 1 + 2 * is_drafted))


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
