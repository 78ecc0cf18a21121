"""Counted chances: they follow what guesses were worth, and leave the text the target's."""

import math
import random
from collections.abc import Callable

import numpy
import pytest
import torch
from conftest import make_tree
from law import difference_by_generate

from draft_tree import Candidates
from dynatree import generate
from gpt_neox import Config, GPTNeoX
from methods import METHODS
from methods.chances import Counted
from sampling import Sampling

SMALL = {
    "dynatree": dict(B_min=1, B_mid=1, B_max=2, tau_h=0.9, tau_l=0.6, rho_stop=0.2, tau=0.3),
    "dyspec": dict(N=4, D_max=3),
    "fixed": dict(D=3, B=2, tau=0.2),
    "confident": dict(K=3, p_min=0.4),
    "opttree": dict(N=4, D_max=3),
    "deagle": dict(k=2, N_max=4, D_max=3),
}

COSTS = "0.01:0.1:0.01:0.1"


def ranked(*p: float) -> Candidates:
    """Candidates of one row, of these probabilities."""
    with numpy.errstate(divide="ignore"):
        logprobs = numpy.log(numpy.array([p], numpy.float32))
    return Candidates(numpy.arange(len(p))[None], logprobs)


def drawn(*p: float) -> Candidates:
    return ranked(*p)._replace(drawn_from=numpy.ones((1, 9)))  # of which none is looked at


def chances_of(counted: Counted, candidates: Candidates) -> list[float]:
    return numpy.exp(counted.look(candidates))[0].tolist()


def teach(counted: Counted, candidates: Candidates, is_right: list[bool], n: int = 1) -> None:
    """n trees of a root with these children, of which the first right one is accepted."""
    tree = make_tree([99, *range(len(is_right))], [-1, *([0] * len(is_right))])
    tree.draft_slots[0] = 0
    if candidates.drawn_from is not None:
        tree.drawn_from = list(candidates.drawn_from)
    path = [0, 1 + is_right.index(True)] if any(is_right) else [0]
    for _ in range(n):
        counted.begin()
        counted.look(candidates)
        counted.learn(tree, path)


@pytest.mark.parametrize("candidates", [ranked, drawn], ids=["ranked", "drawn"])
@pytest.mark.parametrize("p", [0.9995, 0.9])
def test_one_surprise_does_not_undo_what_was_seen(
    p: float, candidates: Callable[..., Candidates]
) -> None:
    """After 30 right guesses at .9995, a single wrong one left .55 of it and the least slope."""
    counted, asked = Counted(), candidates(p, (1 - p) / 2)
    teach(counted, asked, [True, False], n=30)
    before = chances_of(counted, asked)[0]
    teach(counted, asked, [False, False])
    after = chances_of(counted, asked)[0]
    assert math.log(after / (1 - after)) > math.log(before / (1 - before)) - 2.1
    assert counted.weights[1] > 0.3


def test_at_first_the_draft_is_believed() -> None:
    """Of ranked candidates as far as another one is as likely."""
    assert chances_of(Counted(), drawn(0.3, 0.05)) == pytest.approx([0.3, 0.05], abs=1e-6)
    assert chances_of(Counted(), ranked(0.5, 0.5)) == pytest.approx([0.5, 0.5], abs=1e-6)
    assert chances_of(Counted(), ranked(0.9, 0.1)) == pytest.approx([0.9, 0.1], abs=1e-6)
    assert chances_of(Counted(), ranked(0.5, *[0.025] * 20))[0] > 0.5


def test_they_follow_what_was_right_and_fade() -> None:
    """Guesses of 0.3 that are right nine times in ten are worth that much, likelier ones more."""
    for kind in (ranked, drawn):
        counted, rng = Counted(), random.Random(0)
        guess = kind(0.3, 0.1, 0.1)
        first = chances_of(counted, guess)[0]
        for _ in range(300):
            teach(counted, guess, [rng.random() < 0.9, False, False])
        assert 0.7 < chances_of(counted, guess)[0] < 0.98
        assert chances_of(counted, kind(0.6, 0.1, 0.1))[0] > 0.9
        for _ in range(5000):
            counted.learn(make_tree([99], [-1]), [0])
        assert chances_of(counted, guess)[0] == pytest.approx(first, abs=0.01)


def test_their_order_is_the_drafts() -> None:
    """Whatever was learned: a likelier guess is never worth less, beside the same others."""
    counted = Counted()
    teach(counted, ranked(0.6, 0.2, 0.1), [False, False, True], n=300)
    found = chances_of(counted, ranked(0.5, 0.3, 0.1, 0.05))
    assert found == sorted(found, reverse=True)


def test_what_is_impossible_stays_so_and_what_overflowed_is_seen() -> None:
    for kind in (ranked, drawn):
        found = Counted().look(kind(0.5, 0.0))[0]
        assert found[0] < 0 and found[1] == -math.inf
    assert numpy.isnan(Counted().look(ranked(math.nan, math.nan))).all()


def test_a_drawn_child_that_was_not_tried_tells_nothing() -> None:
    """As those behind an accepted one; of ranked ones each tells whether it was right."""
    for kind, n_told in ((ranked, 3), (drawn, 2)):
        counted, told = Counted(), []
        counted.take = lambda x, is_right, told=told: told.append(is_right)
        teach(counted, kind(0.4, 0.3, 0.2), [False, True, False])
        assert told == [False, True, False][:n_told]


def random_model(seed: int, n_ids: int) -> GPTNeoX:
    """Of one layer of two heads, and weights large enough that some texts are likelier."""
    torch.manual_seed(seed)
    model = GPTNeoX(Config(n_ids, 8, 1, 2, 16, 16, 1.0, 10000.0))
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model.double().requires_grad_(False)


# The first tree may be three levels deep; of three ids more may be drawn than one and what is left
WAYS = [("counted", 2, 5), ("counted", 3, 3), ("believed", 3, 3)]


@pytest.mark.parametrize("stop", ["own", COSTS], ids=["own", "cost"])
@pytest.mark.parametrize(("chances", "n_ids", "n_tokens"), WAYS)
@pytest.mark.parametrize("method", SMALL)
def test_the_law_is_the_targets(
    method: str, chances: str, n_ids: int, n_tokens: int, stop: str
) -> None:
    """Through generate, over trees of models and what earlier ones have taught. Costs at which some
    rows and levels pay, and others do not."""
    settings = METHODS[method](chances=chances, stop=stop, **SMALL[method])
    pair = random_model(3, n_ids), random_model(4, n_ids)
    assert difference_by_generate(*pair, settings, n_tokens, Sampling(0.8)) < 1e-6


@pytest.mark.parametrize("method", SMALL)
def test_with_stop_by_cost_what_is_dear_is_left_out(method: str) -> None:
    """Rows, levels, and the draft itself; what costs nothing is drafted and verified as without."""
    pair = random_model(3, 9), random_model(3, 9)

    def rows(**more: str) -> list[int]:
        settings = METHODS[method](**SMALL[method], **more)
        steps = list(generate(*pair, [0], settings, 60))[1:]
        return [sum(step.n_drafted for step in steps), sum(len(s.draft_rows) for s in steps)]

    own = rows()
    free = rows(stop="1e-9:1e-9:1e-9:1e-9")
    few_rows = rows(stop="1e-9:0.3:1e-9:1e-9")
    few_levels = rows(stop="1e-9:1e-9:1e-9:0.9")
    assert free == own
    assert few_rows[0] < own[0] or method == "confident"
    assert few_levels[1] < own[1]
    drafting = rows(stop="90:1e-9:90:1e-9")
    assert drafting == [0, 0]
