"""Tests of sampled text: its draws, its seeds and the top-p set."""

import math
from collections import Counter
from random import Random

import pytest
import torch
from small import noisy_pair
from torch import Tensor

from draft_tree import Autoregressive, DynaTree, Settings
from dynatree import ModelDrafter, generate
from sampling import Sampler, distance_to_interval, probabilities
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
    sampler.random.random = lambda: 0.0
    assert sampler.draw(probs) == 1


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


CHAIN = DynaTree(B_mid=1, adapt_breadth=False)
TREES = [DynaTree(tau=0.0, N_max=9), CHAIN, DynaTree(D_max=2, D0=2)]


@pytest.mark.parametrize("settings", TREES)
def test_with_one_seed_every_tree_writes_the_text_of_ar(settings: DynaTree) -> None:
    """Check that random number i draws token i: also after accepted rows, at the end of a text, and
    for a tiny temperature, whose text is greedy."""
    target, draft = noisy_pair(3)
    n_accepted = 0

    def text(settings: Settings, accept: Acceptance) -> list[int]:
        nonlocal n_accepted
        drafter, rule = ModelDrafter(draft), settings.make_rule()
        steps = list(generate(target, drafter, [3, 1, 4], rule, 24, accept=accept))
        n_accepted += sum(len(step.path) - 1 for step in steps)
        return [token for step in steps for token in step.tokens]

    texts = [text(Autoregressive(), Sampler(1.0, 0.9, seed)) for seed in range(6)]
    assert [text(settings, Sampler(1.0, 0.9, seed)) for seed in range(6)] == texts
    assert len({*map(tuple, texts)}) == 6 and n_accepted > 20
    assert text(settings, Sampler(1e-6)) == text(settings, accept_greedy)


def test_a_random_number_lies_in_the_interval_of_its_token() -> None:
    """Check the distance of each number from the interval of the token that it draws, and from that
    of another token."""
    probs, sampler, numbers = torch.tensor([0.2, 0.0, 0.5, 0.3]), Sampler(1.0, seed=3), Random(3)
    for _ in range(50):
        token, number = sampler.draw(probs), numbers.random()
        assert distance_to_interval(2 * probs, token, number) == 0
    assert distance_to_interval(2 * probs, 2, 0.15) == pytest.approx(0.05)
    assert distance_to_interval(2 * probs, 2, 0.95) == pytest.approx(0.25)
    assert distance_to_interval(2 * probs, 1, 0.3) == pytest.approx(0.1)


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
