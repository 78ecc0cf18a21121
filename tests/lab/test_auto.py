"""Tests of auto: its n-grams and their acceptance counts, and the choices it makes by cost."""

import math

import numpy
import pytest
import torch
from fast import generate, noisy_pair
from growing import grow
from small import random_config, random_tensors
from test_exactness import make_draft
from test_retrieval import assert_in_order
from trees import FakeDraft, path_to, paths, top_k

from draft_tree import Candidates, Tree
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.auto import INITIAL_RATES, Auto, AutoRule, NGramAcceptance
from dynatree_lab.methods.rules import are_retrieved

N_IDS = 32
FREE = "1e-9:1e-4:1e-9:1e-9"
USUAL = "0.3:0.04:0.2:0.4"


def test_counts_move_from_the_prior_to_the_measured_rate_and_back() -> None:
    acceptance = NGramAcceptance([0.5, 0.2])
    assert acceptance.rates[0] == 0.5
    for _ in range(300):
        acceptance.update([(0, True), (0, True), (0, False)])
    assert 0.6 < acceptance.rates[0] < 2 / 3 and acceptance.rates[1] == pytest.approx(0.2)
    for _ in range(2000):
        acceptance.update([])
    assert acceptance.rates[0] == pytest.approx(0.5)


def test_a_rate_falls_with_those_of_other_bins() -> None:
    """Work out by hand: four candidates of rate 0.5 are rejected, where 2 were expected. So the
    factor falls to 2 / (2 + 2). It does not rise above 1."""
    acceptance = NGramAcceptance([0.5, 0.2])
    acceptance.update([(0, False)] * 4)
    assert acceptance.rates == pytest.approx([8 * 0.25 / 12, 0.1])
    acceptance = NGramAcceptance([0.5, 0.2])
    acceptance.update([(0, True)] * 4)
    assert acceptance.rates == pytest.approx([8 / 12, 0.2])


def make_taught_rule(settings: Auto, best: dict[int, list[int]]) -> AutoRule:
    """Return a rule that has observed the target's best successors of these tokens."""
    rule = settings.make_rule()
    rule.start([])
    for token, successors in best.items():
        rule.recent = ()  # so that each context is one token
        rule.observe_target([token], numpy.array([successors]))
    rule.recent = ()
    return rule


BEST = {1: [2, 3, 4, 5], 2: [6, 7, 8, 9], 3: [10, 11, 12, 13], 6: [1, 14, 15, 16]}


def expected_probabilities(price: float) -> dict[tuple[int, ...], float]:
    """Return the acceptance probability of each path from token 1 by BEST that pays the price.

    It is the product of the acceptance probabilities along the path.
    """
    found = {}
    waiting = [((1,), 1.0)]
    while waiting:
        path, probability = waiting.pop()
        if probability < price:
            continue
        found[path] = probability
        for rank, token in enumerate(BEST.get(path[-1], [])):
            waiting.append(((*path, token), probability * INITIAL_RATES[0][rank]))
    return found


def test_the_ngrams_are_unrolled_best_first_and_each_node_pays() -> None:
    """Compare the nodes with a literal enumeration; N limits them to the likeliest."""
    settings = Auto(D_max=0, costs="1e-9:0.02:0.2:0.4")
    tree = grow(make_taught_rule(settings, BEST), 1, None, 99)
    expected = expected_probabilities(0.02)
    probabilities = [math.exp(logprob) for logprob in tree.path_logprobs]
    assert dict(zip(paths(tree), probabilities, strict=True)) == pytest.approx(expected)
    assert len(expected) > 6
    assert are_retrieved(tree) == [False] + [True] * (len(tree) - 1)
    assert max(tree.depths) > 1
    assert max(grow(make_taught_rule(settings, BEST), 1, None, 1).depths) == 1
    assert len(grow(make_taught_rule(settings, BEST), 20, None, 99)) == 1, "20 was never observed"
    small = grow(make_taught_rule(Auto(D_max=0, N=4, costs=FREE), BEST), 1, None, 99)
    probabilities = [math.exp(logprob) for logprob in small.path_logprobs]
    best = sorted(expected.values(), reverse=True)[:4]
    assert sorted(probabilities, reverse=True) == pytest.approx(best)


def test_rows_are_indexed_by_context_and_counted_by_source() -> None:
    """Check that each row is indexed by the tokens up to it, and that only retrieved rows whose
    parent was accepted are counted. No row is both drafted and retrieved."""
    for seed in range(20):
        rule = make_taught_rule(
            Auto(N=30, D_max=2, costs=FREE), dict.fromkeys(range(N_IDS), [0, 1, 2, 3])
        )
        rule.tracker.drafted.tokens = 1e6  # so that it drafts
        tree = grow(rule, 7, FakeDraft(seed), 99)
        assert_in_order(tree)
        assert len(set(paths(tree))) == 30 and any(slot > 0 for slot in tree.draft_slots)
        slots = zip(tree.draft_slots, are_retrieved(tree), strict=True)
        assert {slot for slot, is_retrieved in slots if is_retrieved} == {-1}
        path = path_to(tree, len(tree) - 1)
        rule.observe_target(tree.tokens, numpy.array([[row] * 4 for row in range(len(tree))]))
        rule.adapt(tree, path)
        contexts = [found[-3:] for found in paths(tree)]
        for row, context in enumerate(contexts):
            if len(context) == 3 and contexts.count(context) == 1:
                assert rule.ngrams.find_longest(context) == (3, [row] * 4)
        assert rule.recent == contexts[path[-1]]
        tried = [row for row in range(1, len(tree)) if tree.parents[row] in path]
        rows = [row for row in tried if are_retrieved(tree)[row]]
        assert sum(rule.ngram_acceptance.tries) == len(rows)
        assert sum(rule.ngram_acceptance.hits) == len(set(rows) & set(path))


def count_drafting(steps: list[Step]) -> int:
    """Return the number of iterations whose tree was drafted."""
    return sum(max(step.tree.draft_slots) >= 0 for step in steps[1:])


def test_when_nothing_pays_it_is_ar() -> None:
    target, draft = noisy_pair(3, 0.0)
    expensive = Auto(costs="50:0.04:50:0.4")
    steps = list(generate(target, draft, [3, 1, 4], expensive, 100))
    assert all(len(step.tree) == 1 for step in steps[1:])
    assert count_drafting(steps) == 0  # a single probe would take more than 1 % of the time


def test_a_perfect_cheap_draft_is_used_and_a_useless_one_is_dropped() -> None:
    cheap = Auto(costs="0.3:0.04:0.05:0.05")
    target, perfect = noisy_pair(3, 0.0)
    steps = list(generate(target, perfect, [3, 1, 4], cheap, 100))
    assert count_drafting(steps) >= 4 and len(steps) < 40
    adversary = make_draft("adversary", random_tensors(random_config(), 3), {}, 3)
    steps = list(generate(target, adversary, [3, 1, 4], Auto(costs=USUAL), 200))
    assert 0 < count_drafting(steps) < len(steps) / 8


def draft_overflow(tree: Tree, rows: list[int], k: int) -> Candidates:
    """Return the candidates of a draft whose logits are all nan."""
    return top_k(torch.full((len(rows), N_IDS), math.nan), k)


def test_the_drafts_run_of_the_root_is_kept_if_nothing_was_drafted() -> None:
    """Check that the root's draft slot survives in a tree of n-grams only. Without it, the draft
    would run the root twice."""
    rule = make_taught_rule(Auto(costs=FREE), BEST)
    rule.tracker.drafted.tokens = 1e6  # so that it drafts
    tree = grow(rule, 1, draft_overflow, 99)
    assert len(rule.levels) == 1 and len(tree) > 1
    assert tree.draft_slots == [0] + [-1] * (len(tree) - 1)
