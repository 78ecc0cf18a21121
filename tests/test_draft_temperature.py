"""A draft temperature of its own: what it changes of the trees. That it changes no greedy text:
test_exactness.py.

Ranked, a tree is the one that the draft's logits divided by it would give.
"""

import functools
import random
from collections import Counter

import pytest
import torch
from conftest import Stub, generate, random_settings
from test_core import without_clock
from torch import Tensor

from cli.options import has_temperature
from draft_tree import Settings, Tree
from engine.generate import Step
from methods import METHODS
from methods.drafting import DRAFTING
from methods.drawn import DrawnDrafter
from methods.rules import make_rule
from methods.sampler import GREEDY, Sampling

N_IDS = 40
HEATS = (0.3, 0.6, 2.5)
WITH_DRAFT = [*DRAFTING, "graft", "auto"]


@functools.cache
def table(seed: int) -> Tensor:
    """Logits [V, V] of the next token after each token, peaked after some."""
    generator = torch.Generator().manual_seed(seed)
    heat = 4 * torch.rand(N_IDS, 1, generator=generator)
    return heat * torch.randn(N_IDS, N_IDS, generator=generator)


def trees(settings: Settings, sampling: Sampling, divisor: float = 1.0) -> list[Tree]:
    """Of a text by a draft that is nearly the target, its logits divided by so much."""
    target = Stub(lambda tokens, positions: table(0)[tokens], N_IDS)
    near = (table(0) + 0.3 * table(1)) / divisor
    draft = Stub(lambda tokens, positions: near[tokens], N_IDS)
    steps: list[Step] = list(generate(target, draft, [3, 1], settings, 40, sampling=sampling))
    return [step.tree for step in steps[1:]]


def assert_same(ours: list[Tree], theirs: list[Tree]) -> None:
    assert [(t.tokens, t.parents) for t in ours] == [(t.tokens, t.parents) for t in theirs]
    for one, other in zip(ours, theirs, strict=True):
        expected = pytest.approx(other.path_logprobs, abs=1e-4)
        assert one.path_logprobs == expected


@pytest.mark.parametrize("method", WITH_DRAFT)
def test_a_ranked_tree_is_that_of_the_divided_logits(method: str) -> None:
    """Node for node, with its probabilities. Where the shape does not go by these, no node is
    another at any temperature, which is why the command line refuses one there."""
    seen: Counter[str] = Counter()
    for number in range(9):
        rng = random.Random(number)
        settings = without_clock(random_settings(method, rng) if number else METHODS[method]())
        heat = HEATS[number % 3]
        ours = trees(settings, Sampling(0.0, draft_temperature=heat))
        assert_same(ours, trees(settings, GREEDY, divisor=heat))
        is_other = [t.tokens for t in ours] != [t.tokens for t in trees(settings, GREEDY)]
        seen["another shape"] += is_other
        assert has_temperature(make_rule(settings), draws=False) or not is_other, settings
    is_fixed = method in ("linear", "specinfer", "sequoia")
    assert (seen["another shape"] == 0) == is_fixed


def test_sampled_text_by_a_ranking_method_has_one_too() -> None:
    """Its trees are those of the divided logits, its text is sampled as without."""
    cold, plain = Sampling(0.8, seed=2, draft_temperature=0.4), Sampling(0.8, seed=2)
    assert_same(trees(METHODS["opttree"](), cold), trees(METHODS["opttree"](), plain, divisor=0.4))


def test_candidates_of_greedy_text_are_drawn_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what the drafter keeps for each row's slot (DySpec, 5.1)."""
    kept: list[list[Tensor]] = []
    commit = DrawnDrafter.commit

    def keep(self: DrawnDrafter, *verified: object) -> None:
        kept.append(self.probs)
        commit(self, *verified)

    monkeypatch.setattr(DrawnDrafter, "commit", keep)
    sampling = Sampling(0.0, draft_temperature=0.6, draws_greedy=True)
    found = trees(METHODS["dyspec"](N=12), sampling)
    for tree, probs in zip(found, kept[1:], strict=True):
        for token, slot in zip(tree.tokens, tree.draft_slots, strict=True):
            if slot >= 0:
                expected = torch.softmax((table(0) + 0.3 * table(1))[token] / 0.6, dim=-1)
                torch.testing.assert_close(probs[slot], expected)
    assert any(len(tree) == 12 for tree in found)
