"""Tests of what the rules of all methods share; tests/test_draft_tree.py has DynaTree's own."""

import math
from dataclasses import replace

import pytest
import torch
from growing import DrawnFakeDraft, grow
from test_draft_tree import assert_same, random_case, run_algorithm_1
from trees import ROOT, FakeDraft, HalfHalfDraft, paths

from draft_tree import Gates, Level
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.drafting import DRAFTING
from dynatree_lab.methods.rules import MethodRule
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Chain, ConfidentChain, Fixed


def test_fixed_and_chain_are_algorithm_1_without_its_adaptive_parts() -> None:
    """Check fixed, with B children for every node above depth D, and the draft's greedy chain."""
    for seed in range(150):
        s, draft, max_depth = random_case(seed)
        static = replace(s, adapt_breadth=False, adapt_depth=False, prune=True)
        fixed = Fixed(D=s.D0, B=s.B_mid, tau=s.tau, N_max=s.N_max)
        expected = run_algorithm_1(static, draft, max_depth)
        assert_same(grow(fixed.make_rule(), ROOT, draft, max_depth), expected)
        single = replace(static, B_min=1, B_mid=1, prune=False, N_max=128)
        expected = run_algorithm_1(single, draft, max_depth)
        assert_same(grow(Chain(K=s.D0).make_rule(), ROOT, draft, max_depth), expected)


@pytest.mark.parametrize(("p_min", "n_rows"), [(0.5, 1 + 6), (0.51, 1 + 1)])
def test_at_its_threshold_a_token_is_confident(p_min: float, n_rows: int) -> None:
    rule = ConfidentChain(K=6, p_min=p_min).make_rule()
    assert len(grow(rule, ROOT, HalfHalfDraft(0), 127)) == n_rows


def test_of_what_is_drafted_the_best_are_kept() -> None:
    best = grow(MethodRule(3, 3, max_rows=40, max_verified=8), ROOT, FakeDraft(2), 9)
    every = grow(MethodRule(3, 3, max_rows=40), ROOT, FakeDraft(2), 9)
    likeliest = torch.tensor(every.path_logprobs).topk(8).indices.tolist()
    assert paths(best) == [paths(every)[row] for row in sorted(likeliest)] != paths(every)[:8]
    slots = dict(zip(paths(every), every.draft_slots, strict=True))
    assert best.draft_slots == [slots[path] for path in paths(best)]


@pytest.mark.parametrize("is_drawn", [False, True], ids=["top k", "drawn"])
def test_confidence_is_0_where_the_draft_overflowed(is_drawn: bool) -> None:
    """Check top-k and drawn candidates. It was once NaN, which a rule could not round up."""
    found = []

    class ConfidenceRecorder(MethodRule):
        def add_gates(self, level: Level) -> Gates:
            found.append(level.confidence)
            return {}

    sampler = Sampling(1.0).sampler(torch.device("cpu")) if is_drawn else None
    broken = FakeDraft(1).logits((ROOT,)).fill_(math.nan)
    for changed in ({}, {(ROOT,): broken}):
        grow(ConfidenceRecorder(2, 1, 3), ROOT, DrawnFakeDraft(1, sampler, changed), 1)
    assert 0 < found[0] <= 1 and found[1] == 0


@pytest.mark.parametrize("base", [*DRAFTING, "graft"])
def test_a_tree_remembers_nothing_of_the_one_before(base: str) -> None:
    """Check that a draft gives the same tree again after the tree of another draft."""
    rule = METHODS[base]().make_rule()
    first, other, again = (paths(grow(rule, ROOT, FakeDraft(seed), 127)) for seed in (1, 2, 1))
    assert other != first == again
