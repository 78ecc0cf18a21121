"""Tests of the decoding loop: exactness, both caches, the limit, overflows, and what it shares.

A wrong tree still gives the right text. So the tests of exactness find errors of cache, positions,
mask and acceptance, and none of a rule, which test_draft_tree.py has.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy
import pytest
import torch
from pairs import DRAFTS, VOCAB, build_model, generate_greedy, make_draft, target_weights
from pytest import MonkeyPatch
from small import TINY, assert_close, broken_at, noisy_pair, prefilled, random_model, run
from trees import path_to, random_settings

from bench import PROMPTS
from draft_tree import Autoregressive, Candidates, DynaTree, DynaTreeRule, Gates, Level, Tree
from dynatree import Drafter, ModelDrafter, Step, draft_temperature, generate, load_tokenizer
from gpt_neox import GPTNeoX, KVCache, NonFiniteLogits
from verify import Acceptance, accept_greedy, cut

PROMPT = [3, 1, 4, 1, 5]
FULL = {"adapt_breadth": False, "adapt_depth": False, "history": False, "prune": False}
CHAIN = DynaTree(D0=4, B_mid=1, **FULL)  # linear speculation
WIDE = DynaTree(tau=0.001, rho_stop=0.002)


def write(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    settings: DynaTree | Autoregressive,
    limit: int,
    eos_ids: Sequence[int] = (),
    accept: Acceptance = accept_greedy,
    prompt: list[int] = PROMPT,
) -> Iterator[Step]:
    """Generate a text, by a new drafter and rule, and yield its steps."""
    drafter, rule = ModelDrafter(draft) if draft else None, settings.make_rule()
    return generate(target, drafter, prompt, rule, limit, eos_ids=eos_ids, accept=accept)


def token_ids(steps: Iterator[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 1e-30])
def test_a_draft_temperature_keeps_the_order_of_candidates(temperature: float) -> None:
    """Check that all ids share the probability, not only the candidates."""
    logits = 3 * torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    found = ModelDrafter(noisy_pair()[1], temperature).choose(logits, 5)
    plain = ModelDrafter(noisy_pair()[1]).choose(logits, 5)
    assert found.tokens.tolist() == plain.tokens.tolist()
    every = torch.softmax((logits - logits.amax(1, True)).double() / temperature, dim=1)
    expected = every.gather(1, torch.from_numpy(found.tokens)).numpy()
    numpy.testing.assert_allclose(numpy.exp(found.logprobs), expected, atol=1e-6)


def test_a_draft_temperature_is_checked() -> None:
    with pytest.raises(ValueError, match="draft_temperature is 0.0, it must be above 0"):
        ModelDrafter(noisy_pair()[1], 0.0)


@torch.inference_mode()
def test_the_default_confidence_is_near_the_accepted_share() -> None:
    """Compare the mean probability of the draft's best token after each position of ar's texts with
    how often it is the target's. It takes 3 s: the texts are the embedded pair's."""
    target, draft = (GPTNeoX.from_pretrained(TINY / name) for name in ("target", "draft"))
    tokenizer = load_tokenizer(TINY / "target")
    confidence: dict[float, list[float]] = {1.0: [], draft_temperature(0.0): []}
    accepted: list[bool] = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        text = token_ids(write(target, None, Autoregressive(), 64, prompt=ids))
        logits = run(draft, ids + text[:-1])[len(ids) - 1 :]  # [64, V], before each token of text
        for temperature, found in confidence.items():
            drafter = ModelDrafter(draft, temperature)
            candidates = drafter.choose(logits, 1)
            found += numpy.exp(candidates.logprobs[:, 0]).tolist()
        accepted += (candidates.tokens[:, 0] == text).tolist()
    plain, scaled = (numpy.mean(found) for found in confidence.values())
    assert abs(scaled - numpy.mean(accepted)) < abs(plain - numpy.mean(accepted)) / 2


def test_every_tree_writes_ars_text() -> None:
    """Compare token for token, over random settings and drafts from equal to adverse, and count the
    events that the cases should cover. The draft's vocabulary may be smaller or larger."""
    seen: Counter[str] = Counter()
    for number in range(40):
        rng = random.Random(number)
        tensors, changes = target_weights(number)
        target = build_model(tensors, **changes)
        draft = make_draft(DRAFTS[number % len(DRAFTS)], tensors, changes, number)
        settings = random_settings(DynaTree, rng)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 4, 19]))]
        limit = rng.choice([32, 32, *range(1, 21)])
        text = generate_greedy(target, prompt, limit)
        eos_ids = rng.sample(text, 1) if number % 3 == 0 else []
        steps = list(write(target, draft, settings, limit, eos_ids, prompt=prompt))
        assert token_ids(steps) == cut(text, eos_ids, limit), settings
        left = limit - 1
        for step in steps[1:]:
            assert max(step.tree.depths) < max(left, 1), "deeper than the text may still be"
            left -= len(step.tokens)
            seen["moved row"] += step.path != list(range(len(step.path)))
            is_eos = step.tokens[-1] in eos_ids
            seen["eos in path"] += is_eos and len(step.tokens) < len(step.path)
            seen["eos as bonus"] += is_eos and len(step.tokens) == len(step.path)
        seen["past positions"] += len(prompt) + limit > target.config.max_position_embeddings
    assert len(seen) == 4 and min(seen.values()) > 0, seen


COMMITS = [  # settings, the limit, the tokens of each iteration if the draft is always right
    (CHAIN, 16, [5, 5, 5]),  # four accepted and the bonus
    (DynaTree(D0=3, **FULL), 15, [4, 4, 4, 2]),  # cut only by the limit
    (DynaTree(N_max=1), 6, [1] * 5),  # a budget counts rows, root included
    (CHAIN, 1, []),  # no iteration
    (Autoregressive(), 4, [1, 1, 1]),
]


@pytest.mark.parametrize(("settings", "limit", "lengths"), COMMITS)
def test_what_an_iteration_commits(
    settings: DynaTree | Autoregressive, limit: int, lengths: list[int]
) -> None:
    model = random_model(7)
    steps = list(write(model, model, settings, limit))
    assert [len(step.tokens) for step in steps] == [1, *lengths]


@pytest.mark.parametrize("settings", [CHAIN, WIDE, DynaTree(D0=4, B_mid=3, **FULL)])
def test_each_token_and_both_caches_after_every_commit(
    settings: DynaTree, monkeypatch: MonkeyPatch
) -> None:
    models, caches = noisy_pair(3), record_caches(GPTNeoX, monkeypatch)
    steps = write(*models, settings, 30)
    paths = [step.path for step in checked_steps(steps, models, caches)]
    assert max(map(len, paths)) > 3
    assert any(path != list(range(len(path))) for path in paths) == (settings != CHAIN)


def record_caches(kind: type[GPTNeoX], monkeypatch: MonkeyPatch) -> list[KVCache]:
    """Return a list that gets every new cache of these models: the target's, then the draft's."""
    made: list[KVCache] = []
    new_cache = kind.new_cache

    def record(*arguments: object) -> KVCache:
        made.append(new_cache(*arguments))
        return made[-1]

    monkeypatch.setattr(kind, "new_cache", record)
    return made


def checked_steps(
    steps: Iterator[Step], models: Sequence[GPTNeoX], made: list[KVCache]
) -> Iterator[Step]:
    """Yield the steps of a text after PROMPT. Compare each token with one pass over the whole
    sequence, and slots [0, length) of both caches with a prefill of the committed tokens.

    The target's cache has all of them, the draft's may have fewer. This finds errors of mask,
    positions, commit and catch-up.
    """
    text = list(PROMPT)
    for step in steps:
        caches = made[:2]  # the oracles' come later
        for token in step.tokens:
            assert token == int(run(models[0], text)[-1].argmax())
            text.append(token)
        assert caches[0].length == len(text) - 1
        for model, cache in zip(models, caches, strict=True):
            n = cache.length
            fresh = prefilled(model, text[: max(n, 1)], 64)
            assert_close(cache.kv[..., :n, :], fresh.kv[..., :n, :])
        yield step


def test_a_level_has_the_candidates_of_its_own_paths() -> None:
    """Compare all log-probabilities of every level with a pass over the path of each row."""
    target, draft = noisy_pair(3)
    text, n_rows = list(PROMPT), []

    class Checked(ModelDrafter):
        def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
            found = super().draft(tree, rows, k)
            for row, end in enumerate(rows):
                path = text + [tree.tokens[above] for above in path_to(tree, end)[1:]]
                expected = torch.log_softmax(run(draft, path)[-1], dim=-1)
                ids, logprobs = (torch.from_numpy(part[row]) for part in found[:2])
                assert_close(logprobs, expected[ids])
                assert_close(logprobs, expected.sort(descending=True).values[:k])
            n_rows.append(len(rows))
            return found

    for step in generate(target, Checked(draft), PROMPT, WIDE.make_rule(), 20):
        text += step.tokens
    assert max(n_rows) > 3


# Logits that are not finite.


def test_tokens_before_an_overflow_are_kept() -> None:
    """Check the text before the pass that overflows, which a rejected row may cause, too."""
    target = random_model(7)
    text = token_ids(write(target, None, Autoregressive(), 20))
    at = next(i for i in range(3, 20) if text[i] not in text[:i] + PROMPT)
    for settings in (Autoregressive(), DynaTree(tau=0.0)):
        got: list[int] = []
        with pytest.raises(NonFiniteLogits, match="bfloat16"):
            for step in write(broken_at(text[at]), target, settings, 20):
                got += step.tokens
        assert got == text[: len(got)]


OVERFLOWING = [[9, 1, 2, 3, 4], [1, 2, 3, 9, 4], [1, 2, 3, 4, 9]]  # prompts for broken_at(9)


@pytest.mark.parametrize("prompt", OVERFLOWING)
def test_an_overflow_in_the_prompt_is_an_error(prompt: list[int], monkeypatch: MonkeyPatch) -> None:
    """Check an overflow at any token. Prefill computes logits only for the last one, but that one
    attends to all others."""
    monkeypatch.setattr("gpt_neox.PREFILL_CHUNK", 2)
    with pytest.raises(NonFiniteLogits):
        next(write(broken_at(9), None, Autoregressive(), 5, prompt=prompt))


def test_an_overflow_of_the_draft_is_an_error() -> None:
    with pytest.raises(NonFiniteLogits):
        list(write(random_model(7), broken_at(PROMPT[0]), WIDE, 20))


# Rules, drafters and arguments.


def test_generations_share_nothing() -> None:
    check_generations_share_nothing(write, noisy_pair())


def check_generations_share_nothing(
    write: Callable[..., Iterator[Step]], models: Sequence[GPTNeoX]
) -> None:
    """Interleave two generations step by step. In the paper's code history leaks from prompt to
    prompt, so its results depend on their order."""
    settings, prompts = DynaTree(W=2, tau=0.001, rho_stop=0.002), (PROMPT, PROMPT[:2])
    alone, both = (
        [write(*models, settings, 40, prompt=prompt) for prompt in prompts] for _ in range(2)
    )
    expected = [[(step.tokens, step.tree) for step in steps] for steps in alone]
    for found in itertools.zip_longest(*both):
        for own, step in zip(expected, found, strict=True):
            assert step is None or (step.tokens, step.tree) == own.pop(0)


def test_a_caller_may_change_the_lists_of_a_step() -> None:
    """Empty the lists of each step. The loop once read them after the step."""
    target, draft = noisy_pair(3)
    text = [1]
    for step in write(target, draft, DynaTree(), 30, prompt=[1]):
        text += step.tokens
        step.tokens.clear()
        step.path.clear()
    best = run(target, text[:-1]).argmax(dim=-1)
    assert text[1:] == best.tolist() and len(text) == 31


class Copier(Drafter):
    """A drafter without a model, as of a fork: it proposes the tokens that it has been given."""

    def __init__(self, text: list[int]):
        self.text = text
        self.committed: list[int] = []

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        following = self.text[len(self.committed) + tree.depths[rows[0]]]
        ids = torch.tensor([[following]]).repeat(len(rows), 1).numpy()
        return Candidates(ids, numpy.zeros(ids.shape, numpy.float32))

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        assert len(tokens) == len(path)
        self.committed += tokens


class TwoLevels(DynaTreeRule):
    """A rule of a fork: a variant of DynaTree that expands only the root and its children."""

    def expand_gates(self, level: Level) -> Gates:
        return {"two": level.row_depth < 1}


def test_a_drafter_and_a_rule_may_be_of_ones_own() -> None:
    target = random_model(7)
    text = token_ids(write(target, None, Autoregressive(), 20))
    drafter = Copier([*text, 0, 0, 0])
    steps = list(generate(target, drafter, PROMPT, TwoLevels(DynaTree()), 20))
    assert token_ids(steps) == text == drafter.committed[:20]
    assert [len(step.tokens) for step in steps] == [1, *[3] * 6, 1]


WRONG = [  # arguments, the error
    ({"prompt": []}, "prompt must have at least one id, and all from 0 to 95"),
    ({"prompt": [0, 96]}, "all from 0 to 95"),
    ({"prompt": [0, -1]}, "all from 0 to 95"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0, it must be at least 1"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_arguments_are_checked(changes: dict[str, object], message: str) -> None:
    given = {"prompt": [1], "rule": DynaTree().make_rule(), "max_new_tokens": 5} | changes
    target, draft = noisy_pair(3)
    with pytest.raises(ValueError, match=re.escape(message)):
        next(generate(target, ModelDrafter(draft), **given))


def test_a_rule_serves_one_text() -> None:
    """Refuse a used rule: its history would leak to the next prompt, as in the paper's code."""
    target, draft = noisy_pair(3)
    rule = DynaTree().make_rule()
    list(generate(target, ModelDrafter(draft), [1], rule, 5))
    with pytest.raises(ValueError, match="DynaTreeRule has served another text; make a new rule"):
        next(generate(target, ModelDrafter(draft), [1], rule, 5))


def test_a_rule_that_drafts_needs_a_drafter() -> None:
    with pytest.raises(NotImplementedError, match="Drafter has no draft"):
        list(write(random_model(7), None, DynaTree(), 5))
