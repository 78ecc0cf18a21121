"""Test of the repetition penalty: the text has the distribution of the penalised target."""

import pytest

from dynatree_lab.enumeration import distribution_difference
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.sampler import Sampling
from penalty import RepetitionPenalty


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, 0.8)])
def test_it_is_exact(sampling: Sampling) -> None:
    process = RepetitionPenalty(1.5)
    assert distribution_difference(DySpec(N=4), sampling, process=process) < 1e-6
