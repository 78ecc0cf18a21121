"""Tests of the draft temperature: how it changes the trees.

A tree of top-k candidates is the tree of the draft's logits divided by the temperature.
test_exactness.py tests that greedy text does not change.
"""

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fast import Stub, generate
from growing import random_settings
from test_core import with_fixed_costs
from torch import Tensor

from draft_tree import Settings, Tree
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.drafting import DRAFTING
from dynatree_lab.methods.drawn import DrawnDrafter
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.sampler import Sampling

N_IDS = 40
TEMPERATURES = (0.3, 0.6, 2.5)
WITH_DRAFT = [*DRAFTING, "graft", "auto"]
PLAIN = Sampling(draft_temperature=1.0)


@functools.cache
def table(seed: int) -> Tensor:
    """Return logits [V, V] of the next token after each token; some rows are peaked."""
    generator = torch.Generator().manual_seed(seed)
    scale = 4 * torch.rand(N_IDS, 1, generator=generator)
    return scale * torch.randn(N_IDS, N_IDS, generator=generator)


def trees(settings: Settings, sampling: Sampling, divisor: float = 1.0) -> list[Tree]:
    """Return the trees of a text. The draft is a noisy target, with logits divided by `divisor`."""
    target = Stub(lambda tokens, positions: table(0)[tokens], N_IDS)
    noisy = (table(0) + 0.3 * table(1)) / divisor
    draft = Stub(lambda tokens, positions: noisy[tokens], N_IDS)
    steps: list[Step] = list(generate(target, draft, [3, 1], settings, 40, sampling=sampling))
    return [step.tree for step in steps[1:]]


def assert_same(ours: list[Tree], theirs: list[Tree]) -> None:
    assert [(t.tokens, t.parents) for t in ours] == [(t.tokens, t.parents) for t in theirs]
    for one, other in zip(ours, theirs, strict=True):
        expected = pytest.approx(other.path_logprobs, abs=1e-4)
        assert one.path_logprobs == expected


@pytest.mark.parametrize("method", WITH_DRAFT)
def test_a_top_k_tree_is_that_of_the_divided_logits(method: str) -> None:
    """Compare nodes and probabilities. If the shape does not depend on probabilities, a temperature
    changes no node, so the command line refuses it."""
    seen: Counter[str] = Counter()
    for number in range(6):
        rng = random.Random(number)
        settings = with_fixed_costs(random_settings(method, rng) if number else METHODS[method]())
        temperature = TEMPERATURES[number % 3]
        ours = trees(settings, Sampling(0.0, draft_temperature=temperature))
        assert_same(ours, trees(settings, PLAIN, divisor=temperature))
        is_other = [t.tokens for t in ours] != [t.tokens for t in trees(settings, PLAIN)]
        seen["another shape"] += is_other
        assert Method(settings).has_temperature(draws=False) or not is_other, settings
    is_fixed = method in ("linear", "specinfer", "sequoia")
    assert (seen["another shape"] == 0) == is_fixed


def test_sampled_text_of_a_top_k_method_has_a_draft_temperature() -> None:
    """Check that it changes the trees, and not how the text is sampled."""
    cold = Sampling(0.8, seed=2, draft_temperature=0.4)
    plain = replace(cold, draft_temperature=1.0)
    assert_same(trees(METHODS["opttree"](), cold), trees(METHODS["opttree"](), plain, divisor=0.4))


DEFAULTS = [  # words, temperature of the text, of the draft's probabilities
    ("dynatree", 0.0, 0.5),
    ("deagle", 0.0, 0.5),
    ("deagle", 0.6, 0.8),
    ("confident", 0.0, 1.0),
    ("graft", 0.0, 1.0),
    ("auto costs=0.3:0.04:0.2:0.4", 0.0, 0.5),
    ("dynatree", 0.8, 0.8),  # drawn candidates have the text's
    ("confident", 0.6, 0.6),
]


@pytest.mark.parametrize(("words", "temperature", "expected"), DEFAULTS)
def test_the_default_depends_on_method_and_text(
    words: str, temperature: float, expected: float
) -> None:
    """Check the resolved number of a page, the trees, and that a given temperature replaces it."""
    config = GenerationConfig.parse(*words.split(), temperature=temperature)
    assert config.method.draft_temperature(config.sampling) == expected
    given = replace(config.sampling, draft_temperature=expected)
    assert_same(trees(config.settings, config.sampling), trees(config.settings, given))
    other = replace(given, draft_temperature=0.3)
    assert config.method.draft_temperature(other) == 0.3


def test_candidates_of_greedy_text_are_drawn_at_the_draft_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the distribution that the drafter keeps for each row's slot (DySpec, 5.1)."""
    kept: list[list[Tensor]] = []
    commit = DrawnDrafter.commit

    def keep(self: DrawnDrafter, *verified: object) -> None:
        kept.append(self.sampler.draft_probs)
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
