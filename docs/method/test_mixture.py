"""Tests of the mixture: its caches, and sampled text, whose candidates are drawn."""

from fast import generate
from small import noisy_pair

from dynatree_lab.enumeration import distribution_difference, tiny_model
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.sampler import Sampling
from gpt_neox import GPTNeoX
from mixture import Mixture


def test_two_equal_drafts_are_one() -> None:
    target, draft = noisy_pair(kind=GPTNeoX)
    drafts = draft, Mixture(draft, draft)
    texts = [list(generate(target, each, [3, 14, 15], DySpec(N=8), 40)) for each in drafts]
    trees, mixed = ([step.tree.tokens for step in steps] for steps in texts)
    assert trees == mixed


def test_sampled_text_is_exact() -> None:
    target, *drafts = (tiny_model(seed, 3) for seed in (3, 4, 5))
    models = target, Mixture(*drafts)
    assert distribution_difference(DySpec(N=4), Sampling(1.0), models=models) < 1e-6
