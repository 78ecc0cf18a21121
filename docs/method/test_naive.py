"""Tests of naive: its distribution, and how much it accepts."""

import pytest
import torch
from every_text import Enumeration, target_distribution

from dynatree_lab.enumeration import difference
from dynatree_lab.methods.acceptances import accept_by_token
from dynatree_lab.methods.naive import Naive

NAIVE = Naive(D=2, B=2, tau=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_exact_and_accepts_less_than_token(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target, draft = 1.5 * torch.randn(2, 3, 3, generator=generator).double()  # [V, V] each
    texts = Enumeration(NAIVE, target, draft)
    assert difference(texts.distribution(3), target_distribution(target, 3)) < 1e-7
    assert texts.mean_length(3) < texts.mean_length(3, accept_by_token)
