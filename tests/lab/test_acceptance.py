"""Tests of acceptance by token and by traversal: lengths, trials, overflows, and how a run chooses.

Their distributions are tested in test_sampling.py.

    python -m pytest tests/lab/test_acceptance.py
"""

import math

import pytest
import torch
from every_text import CPU, PLAIN, Enumeration, draft
from fast import generate, random_model
from test_generate import PROMPT
from test_sampler import N_IDS, OTHER, TARGET
from trees import make_tree

from draft_tree import Settings, Tree
from dynatree_lab.generation.compose import Parts
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.acceptances import (
    ACCEPTANCES,
    accept_by_token,
    accept_by_traversal,
    choose_acceptance,
)
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.retrieval import Graft, Recycle
from dynatree_lab.methods.rules import facts_of
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Chain, SpecInfer


def test_a_chain_is_worth_more_than_its_tokens() -> None:
    """Check the example in the docstring of dynatree_lab/methods/acceptances.py."""
    target = torch.tensor([[1 / 3, 2 / 3]] * 2).double().log()
    texts = Enumeration(Chain(K=2), target, target.flip(1))
    found = [texts.mean_length(3, accept) for accept in ACCEPTANCES.values()]
    assert found == pytest.approx([10 / 9, 11 / 9])


def make_drafted_tree(settings: Settings, seed: int) -> tuple[Parts, Tree]:
    """Return a method's parts over the two tables, and a tree that it has drafted below token 0."""
    sampler = Sampling(1.0, seed=seed).sampler(CPU)
    parts = Enumeration(settings, TARGET.float(), OTHER.float()).compose(sampler)
    return parts, draft(parts, 0, 3, N_IDS)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_every_trial_is_reported(acceptance: str) -> None:
    """Check that each row is tried once, and which trials succeed: by token, those of all accepted
    rows; otherwise, only that of the last accepted row."""
    trials: list[tuple[int, float, float, float]] = []
    n_accepted = n_rejected = 0
    for seed in range(30):
        parts, tree = make_drafted_tree(SpecInfer("2:2"), seed)
        parts.accept.accept = ACCEPTANCES[acceptance]
        parts.accept.on_trial = lambda *trial: trials.append(trial)
        path, _ = parts.accept(tree, TARGET.float()[tree.tokens])
        accepted = [row for row, probability, number, _ in trials if number < probability]
        assert accepted == (path[1:] if acceptance == "token" else path[1:][-1:])
        assert all(0 <= number < 1 and 0 <= left <= 1 + 1e-6 for _, _, number, left in trials)
        tried = [row for row, *_ in trials]
        assert len(set(tried)) == len(tried)
        n_accepted += len(accepted)
        n_rejected += len(tried) - len(accepted)
        trials.clear()
    assert n_accepted > 10 and n_rejected > 10


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_path_ends_where_the_target_overflows(acceptance: str, value: float) -> None:
    """Check that the path ends before row 1. Its token may be the bonus token, as at a leaf."""
    tree = make_tree([0, 1, 2], [-1, 0, 1])
    logits = TARGET[:3].float()
    logits[1, 3] = value
    p = float(PLAIN.sampler(CPU).target_distribution(logits[:1])[0, 1])
    n_reached = 0
    for seed in range(500):
        sampler = Sampling(1.0, seed=seed).sampler(CPU)
        sampler.accept = ACCEPTANCES[acceptance]
        path, tokens = sampler(tree, logits)
        assert path == [0] and len(tokens) == 1
        n_reached += tokens == [1]
    assert abs(n_reached - 500 * p) < 5 * math.sqrt(500 * p * (1 - p))


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_a_forbidden_token_is_no_overflow(acceptance: str) -> None:
    """Check logits of -inf, as logits processors write them. A row that forbids every token ends
    the path, and as the root it is an error of its own."""
    accept = PLAIN.sampler(CPU)
    accept.accept = ACCEPTANCES[acceptance]
    tree = make_tree([1, 2, 3], [-1, 0, 1])
    logits = torch.full((3, 5), -torch.inf)
    logits[[0, 1, 2], [2, 3, 4]] = 7.0
    assert accept(tree, logits) == ([0, 1, 2], [2, 3, 4])
    logits[2] = -torch.inf
    assert accept(tree, logits) == ([0, 1], [2, 3])
    logits[0] = -torch.inf
    with pytest.raises(ValueError, match="-inf for every token, so none can follow"):
        accept(tree, logits)


# The choice of a run.


def test_the_default_depends_on_the_kind_of_tree() -> None:
    """Check also two methods that their settings make a chain."""
    methods = {name: Method(kind()) for name, kind in METHODS.items()}
    methods = {name: each for name, each in methods.items() if not each.facts.acceptance}
    chosen = {
        name: choose_acceptance(method.facts, None, method.can_draw)
        for name, method in methods.items()
    }
    by_traversal = {"linear", "confident", "specinfer", "sequoia", "auto"}
    assert {name for name, by in chosen.items() if by is accept_by_traversal} == by_traversal
    by_token = {"dynatree", "fixed", "dyspec", "graft"}
    assert {name for name, by in chosen.items() if by is accept_by_token} == by_token
    assert {chosen[name] for name in methods.keys() - by_traversal - by_token} == {None}
    dynatree = METHODS["dynatree"](B_min=1, B_mid=1, B_max=1)
    for settings in (dynatree, Graft("linear", graft=False, checkpoints="off")):
        facts = facts_of(settings.make_rule())
        assert choose_acceptance(facts, None, is_drawn=True) is accept_by_traversal
        _, tree = make_drafted_tree(settings, 0)
        assert len(tree) > 2 and tree.parents == list(range(-1, len(tree) - 1))


def test_an_invalid_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="acceptance is 'block', it must be token or traversal"):
        choose_acceptance(facts_of(Chain().make_rule()), "block", is_drawn=True)
    own = Chain().make_rule()
    own.acceptance = accept_by_token
    assert choose_acceptance(facts_of(own), None, is_drawn=True) is accept_by_token
    with pytest.raises(ValueError, match="token has no effect: the method has its own acceptance"):
        choose_acceptance(facts_of(own), "token", is_drawn=True)
    with pytest.raises(ValueError, match="token has no effect: the method's candidates are not dr"):
        choose_acceptance(facts_of(Recycle().make_rule()), "token", is_drawn=False)
    with pytest.raises(ValueError, match="token is for sampled text"):
        next(generate(*[random_model(0)] * 2, PROMPT, Chain(), 5, acceptance="token"))
