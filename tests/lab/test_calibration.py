"""Tests that calibration learns the acceptance rate, and that sampled text stays exact."""

import math
import random

import numpy
import pytest
import torch
from every_text import Enumeration, draft
from fast import generate
from trees import make_tree

from draft_tree import Candidates, Tree
from dynatree import Drafter
from dynatree_lab.enumeration import distribution_difference, tiny_model
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.calibration import CalibratedDrafter
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Fixed

SMALL = {
    "dynatree": dict(B_min=1, B_mid=1, B_max=2, tau_h=0.9, tau_l=0.6, rho_stop=0.2, tau=0.3),
    "dyspec": dict(N=4, D_max=3),
    "fixed": dict(D=2, B=2, tau=0.2),
    "confident": dict(K=3, p_min=0.4),
    "opttree": dict(N=4, D_max=3),
    "deagle": dict(k=2, N_max=4, D_max=3),
}


class ScriptedDrafter(Drafter):
    """A drafter that always proposes the candidates in `proposed`."""

    proposed: Candidates

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        return self.proposed

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        """Do nothing, because there is no cache."""


def make_drafter(is_drawn: bool) -> CalibratedDrafter:
    return CalibratedDrafter(ScriptedDrafter(), is_drawn)


BOTH = pytest.mark.parametrize("is_drawn", [False, True], ids=["top-k", "drawn"])


def calibrated_probs(drafter: CalibratedDrafter, *p: float) -> list[float]:
    """Return the calibrated probabilities of a root's candidates, given the draft's (p)."""
    with numpy.errstate(divide="ignore"):
        logprobs = numpy.log(numpy.array([p], numpy.float32))
    drafter.drafter.proposed = Candidates(numpy.arange(len(p))[None], logprobs)
    return numpy.exp(drafter.draft(Tree.from_root(99), [0], len(p)).logprobs)[0].tolist()


def teach(
    drafter: CalibratedDrafter, p: tuple[float, ...], is_right: list[bool], n: int = 1
) -> None:
    """Verify n trees, each a root with these children, and accept the first child that is right."""
    tree = make_tree([99, *range(len(is_right))], [-1, *([0] * len(is_right))])
    tree.draft_slots[0] = 0
    path = [0, 1 + is_right.index(True)] if any(is_right) else [0]
    for _ in range(n):
        calibrated_probs(drafter, *p)
        drafter.commit(tree, path, [0] * len(path))


def test_the_initial_probability_is_the_drafts() -> None:
    """Check the initial values: for drawn candidates exactly p. For the top k p or more, and only
    p if another candidate is as likely."""
    assert calibrated_probs(make_drafter(True), 0.3, 0.05) == pytest.approx([0.3, 0.05], abs=1e-6)
    assert calibrated_probs(make_drafter(False), 0.5, 0.5) == pytest.approx([0.5, 0.5], abs=1e-6)
    assert calibrated_probs(make_drafter(False), 0.9, 0.1) == pytest.approx([0.9, 0.1], abs=1e-6)
    assert calibrated_probs(make_drafter(False), 0.5, *[0.025] * 20)[0] > 0.5


@BOTH
def test_it_follows_the_acceptance_rate_and_fades(is_drawn: bool) -> None:
    """Check that p = 0.3 is calibrated to 0.9 if nine in ten are right, and a higher p to more."""
    drafter, rng = make_drafter(is_drawn), random.Random(0)
    draft_p = 0.3, 0.1, 0.1
    first = calibrated_probs(drafter, *draft_p)[0]
    for _ in range(300):
        teach(drafter, draft_p, [rng.random() < 0.9, False, False])
    assert 0.7 < calibrated_probs(drafter, *draft_p)[0] < 0.98
    assert calibrated_probs(drafter, 0.6, 0.1, 0.1)[0] > 0.9
    for _ in range(5000):
        drafter.learn(make_tree([99], [-1]), [0])
    assert calibrated_probs(drafter, *draft_p)[0] == pytest.approx(first, abs=0.01)


@BOTH
@pytest.mark.parametrize("p", [0.9995, 0.9, 0.5])
def test_one_surprise_does_not_undo_what_was_learned(p: float, is_drawn: bool) -> None:
    """Check that one wrong candidate changes the log-odds by 2 at most. After 30 right ones at
    0.9995 it once reduced the probability to 0.55, and the slope to its minimum."""
    drafter = make_drafter(is_drawn)
    teach(drafter, (p, (1 - p) / 2), [True, False], n=30)
    before = calibrated_probs(drafter, p, (1 - p) / 2)[0]
    teach(drafter, (p, (1 - p) / 2), [False, False])
    after = calibrated_probs(drafter, p, (1 - p) / 2)[0]
    assert math.log(after / (1 - after)) > math.log(before / (1 - before)) - 2.1
    assert drafter.weights[1] > 0.3


def test_the_order_is_the_drafts() -> None:
    """Check that candidates of one row stay in the draft's order, even after contrary outcomes."""
    drafter = make_drafter(False)
    teach(drafter, (0.6, 0.2, 0.1), [False, False, True], n=300)
    found = calibrated_probs(drafter, 0.5, 0.3, 0.1, 0.05)
    assert found == sorted(found, reverse=True)


@BOTH
def test_impossible_stays_impossible_and_an_overflow_stays_nan(is_drawn: bool) -> None:
    found = calibrated_probs(make_drafter(is_drawn), 0.5, 0.0)
    assert 0 < found[0] < 1 and found[1] == 0
    assert numpy.isnan(calibrated_probs(make_drafter(False), math.nan, math.nan)).all()


@pytest.mark.parametrize(("is_drawn", "n_learned"), [(False, 3), (True, 2)])
def test_a_drawn_child_that_was_not_tried_is_not_learned(is_drawn: bool, n_learned: int) -> None:
    """Check that siblings after an accepted drawn child do not count; of the top k all count."""
    drafter, learned = make_drafter(is_drawn), []
    drafter.newton_step = lambda x, is_accepted: learned.append(is_accepted)
    teach(drafter, (0.4, 0.3, 0.2), [False, True, False])
    assert learned == [False, True, False][:n_learned]


@BOTH
def test_a_node_below_a_rejected_one_is_not_learned(is_drawn: bool) -> None:
    drafter, learned = make_drafter(is_drawn), []
    drafter.newton_step = lambda x, is_accepted: learned.append(is_accepted)
    calibrated_probs(drafter, 0.4)
    tree = make_tree([99, 0, 0], [-1, 0, 1])
    drafter.draft(tree, [1], 1)  # token 0 is the root's only child, and has one itself
    tree.draft_slots[:2] = 0, 1
    drafter.commit(tree, [0], [5])
    assert learned == [False]


def test_a_row_below_a_second_child_is_reached_only_if_the_first_one_is_rejected() -> None:
    """Check values, which are acceptance probabilities before the draw, if every candidate is
    accepted with probability 1/2: the two children of the root, then two of each."""
    table = torch.zeros(2, 2)
    method = Method(Fixed(D=2, B=2, tau=1e-9), calibrate=True)
    parts = Enumeration(method, table, table).compose(Sampling(1.0).sampler(torch.device("cpu")))
    tree = draft(parts, 0, 2, 2)
    expected = [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8]
    assert numpy.exp(tree.values).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("method", SMALL)
def test_the_distribution_is_the_targets(method: str) -> None:
    """Enumerate all sampled texts of `generate`, with learning from tree to tree. At these costs
    some rows and levels pay, and others do not. Of four tokens, the second tree may still have a
    level."""
    options = {"calibrate": True, "costs": "0.01:0.1:0.01:0.1"}
    pair, settings = (tiny_model(3, 2), tiny_model(4, 2)), METHODS[method](**SMALL[method])
    assert distribution_difference(settings, Sampling(0.8), 4, models=pair, **options) < 1e-6


@pytest.mark.parametrize("method", SMALL)
def test_cost_gates_leave_out_what_does_not_pay(method: str) -> None:
    """Check that high costs of rows, levels or drafting reduce them, and that free ones change
    nothing."""
    pair = tiny_model(3, 9), tiny_model(3, 9)

    def rows(**more: str) -> list[int]:
        steps = list(generate(*pair, [0], METHODS[method](**SMALL[method]), 60, **more))[1:]
        n_run = sum(slot >= 0 for step in steps for slot in step.tree.draft_slots)
        return [sum(len(step.tree) - 1 for step in steps), n_run]

    own = rows()
    free = rows(costs="1e-9:1e-9:1e-9:1e-9")
    few_rows = rows(costs="1e-9:0.3:1e-9:1e-9")
    few_levels = rows(costs="1e-9:1e-9:1e-9:0.9")
    assert free == own
    assert few_rows[0] < own[0] or method == "confident"
    assert few_levels[1] < own[1]
    drafting = rows(costs="90:1e-9:90:1e-9")
    assert drafting == [0, 0]
