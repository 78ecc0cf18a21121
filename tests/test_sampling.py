"""Tests of sampled text: its draws, its seeds and the top-p set."""

import math
from collections import Counter

import pytest
import torch
from small import noisy_pair
from torch import Tensor

from draft_tree import DynaTree
from dynatree import ModelDrafter, generate
from sampling import Sampler, probabilities
from verify import Acceptance, accept_greedy


def warped(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the probabilities [n, V] of logits [n, V], by the definition of the top-p set: the
    likeliest ids, up to the one with which their sum reaches top_p."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    for row in probs:
        total = 0.0
        for i in row.argsort(descending=True, stable=True).tolist():
            p, row[i] = float(row[i]), row[i] * (total < top_p)
            total += p
    return probs / probs.sum(dim=-1, keepdim=True)


def test_draws_follow_probabilities_that_need_not_sum_to_one() -> None:
    sampler = Sampler(1.0, seed=1)
    probs = torch.tensor([0.0, 0.1, 0.0, 0.3, 0.2, 0.0])
    counts = Counter(sampler.draw(probs) for _ in range(6000))
    assert set(counts) == {1, 3, 4}
    for token, n in counts.items():
        p = float(probs[token] / 0.6)
        assert abs(n - 6000 * p) < 5 * math.sqrt(6000 * p * (1 - p))


WARPS = [(1.0, 1.0), (0.7, 0.83), (1.6, 0.5), (1.0, 0.999), (1.0, 1e-9), (1e-4, 1.0)]


@pytest.mark.parametrize(("temperature", "top_p"), WARPS)
def test_temperature_and_top_p_are_as_defined(temperature: float, top_p: float) -> None:
    """Check also equally likely ids, and many ids of small probabilities."""
    generator = torch.Generator().manual_seed(2)
    few, many = (torch.randn(6, n, generator=generator) * 2 for n in (40, 3000))
    few[0, :9] = few[0].max()
    for logits in (few, many):
        found = probabilities(logits, temperature, top_p)
        expected = warped(logits, temperature, top_p)
        assert torch.equal(found > 0, expected.float() > 0)
        torch.testing.assert_close(found / found.sum(dim=-1, keepdim=True), expected.float())


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1e-30, 1.0), (2e-38, 1.0), (1e-300, 1.0), (1.0, 1e-30)]
)
def test_the_coldest_text_is_the_likeliest(temperature: float, top_p: float) -> None:
    """Check settings so small that a quotient by them, or their own rounding, is inf or 0."""
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.7, 0.1, 0.1, 0.1]]).log() + 9
    found = probabilities(logits, temperature, top_p)
    assert (found > 0).tolist() == [[False, True, False, False], [True, False, False, False]]


def test_the_same_seed_gives_the_same_text() -> None:
    """Compare texts by seed, and a tiny temperature with greedy."""
    target, draft = noisy_pair(3)

    def text(accept: Acceptance) -> list[int]:
        drafter, rule = ModelDrafter(draft), DynaTree().make_rule()
        steps = generate(target, drafter, [3, 1, 4], rule, 12, accept=accept)
        return [token for step in steps for token in step.tokens]

    one, again, other = (text(Sampler(1.0, 0.9, seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert text(Sampler(1e-6)) == text(accept_greedy)


INVALID = [
    ({"temperature": -1.0}, "temperature is -1.0, it must be above 0 and finite"),
    ({"temperature": math.inf}, "temperature is inf, it must be above 0 and finite"),
    ({"temperature": math.nan}, "temperature is nan, it must be above 0 and finite"),
    ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5, it must be above 0 and at most 1"),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0, it must be above 0 and at most 1"),
]


@pytest.mark.parametrize(("values", "message"), INVALID)
def test_settings_are_checked(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**values)
