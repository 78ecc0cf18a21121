"""Calibration: it follows which candidates were accepted, and leaves the text the target's."""

import math
import random

import numpy
import pytest
from conftest import make_tree
from law import difference_by_generate, tiny_model

from draft_tree import Candidates, Tree
from dynatree import Drafter
from methods import METHODS
from methods.calibration import CalibratedDrafter
from methods.compose import generate
from methods.sampler import Sampling

SMALL = {
    "dynatree": dict(B_min=1, B_mid=1, B_max=2, tau_h=0.9, tau_l=0.6, rho_stop=0.2, tau=0.3),
    "dyspec": dict(N=4, D_max=3),
    "fixed": dict(D=3, B=2, tau=0.2),
    "confident": dict(K=3, p_min=0.4),
    "opttree": dict(N=4, D_max=3),
    "deagle": dict(k=2, N_max=4, D_max=3),
}

COSTS = "0.01:0.1:0.01:0.1"


class Told(Drafter):
    """A drafter that proposes what it is told to."""

    proposed: Candidates

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        return self.proposed

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        """It has no cache."""


def calibrated(is_drawn: bool) -> CalibratedDrafter:
    return CalibratedDrafter(Told(), is_drawn)


BOTH = pytest.mark.parametrize("is_drawn", [False, True], ids=["top-k", "drawn"])


def look(drafter: CalibratedDrafter, *p: float) -> list[float]:
    """The calibrated probabilities of candidates below a root to which the draft gives these."""
    with numpy.errstate(divide="ignore"):
        logprobs = numpy.log(numpy.array([p], numpy.float32))
    drafter.drafter.proposed = Candidates(numpy.arange(len(p))[None], logprobs)
    return numpy.exp(drafter.draft([99], None, len(p)).logprobs)[0].tolist()


def teach(
    drafter: CalibratedDrafter, p: tuple[float, ...], is_right: list[bool], n: int = 1
) -> None:
    """n trees of a root with these children, of which the first right one is accepted."""
    tree = make_tree([99, *range(len(is_right))], [-1, *([0] * len(is_right))])
    tree.draft_slots[0] = 0
    path = [0, 1 + is_right.index(True)] if any(is_right) else [0]
    for _ in range(n):
        look(drafter, *p)
        drafter.commit(tree, path, [0] * len(path))


def test_at_first_the_draft_is_believed() -> None:
    """Of the top k as far as another one is as likely."""
    assert look(calibrated(True), 0.3, 0.05) == pytest.approx([0.3, 0.05], abs=1e-6)
    assert look(calibrated(False), 0.5, 0.5) == pytest.approx([0.5, 0.5], abs=1e-6)
    assert look(calibrated(False), 0.9, 0.1) == pytest.approx([0.9, 0.1], abs=1e-6)
    assert look(calibrated(False), 0.5, *[0.025] * 20)[0] > 0.5


@BOTH
def test_it_follows_what_was_right_and_fades(is_drawn: bool) -> None:
    """Candidates of 0.3 that are right nine times in ten are worth that, likelier ones more."""
    drafter, rng = calibrated(is_drawn), random.Random(0)
    guess = 0.3, 0.1, 0.1
    first = look(drafter, *guess)[0]
    for _ in range(300):
        teach(drafter, guess, [rng.random() < 0.9, False, False])
    assert 0.7 < look(drafter, *guess)[0] < 0.98
    assert look(drafter, 0.6, 0.1, 0.1)[0] > 0.9
    for _ in range(5000):
        drafter.learn(make_tree([99], [-1]), [0])
    assert look(drafter, *guess)[0] == pytest.approx(first, abs=0.01)


@BOTH
@pytest.mark.parametrize("p", [0.9995, 0.9, 0.5])
def test_one_surprise_does_not_undo_what_was_seen(p: float, is_drawn: bool) -> None:
    """After 30 right candidates at .9995, a single wrong one left .55 of it and the least slope."""
    drafter = calibrated(is_drawn)
    teach(drafter, (p, (1 - p) / 2), [True, False], n=30)
    before = look(drafter, p, (1 - p) / 2)[0]
    teach(drafter, (p, (1 - p) / 2), [False, False])
    after = look(drafter, p, (1 - p) / 2)[0]
    assert math.log(after / (1 - after)) > math.log(before / (1 - before)) - 2.1
    assert drafter.weights[1] > 0.3


def test_the_order_is_the_drafts() -> None:
    """Whatever was learned: a likelier candidate is never worth less, beside the same others."""
    drafter = calibrated(False)
    teach(drafter, (0.6, 0.2, 0.1), [False, False, True], n=300)
    found = look(drafter, 0.5, 0.3, 0.1, 0.05)
    assert found == sorted(found, reverse=True)


@BOTH
def test_what_is_impossible_stays_so_and_what_overflowed_is_seen(is_drawn: bool) -> None:
    found = look(calibrated(is_drawn), 0.5, 0.0)
    assert 0 < found[0] < 1 and found[1] == 0
    assert numpy.isnan(look(calibrated(False), math.nan, math.nan)).all()


@pytest.mark.parametrize(("is_drawn", "n_told"), [(False, 3), (True, 2)])
def test_a_drawn_child_that_was_not_tried_tells_nothing(is_drawn: bool, n_told: int) -> None:
    """As those behind an accepted one; of the top k each tells whether it was right."""
    drafter, told = calibrated(is_drawn), []
    drafter.take = lambda x, is_right: told.append(is_right)
    teach(drafter, (0.4, 0.3, 0.2), [False, True, False])
    assert told == [False, True, False][:n_told]


# The first tree may be three levels deep; of three ids more may be drawn than one and what is left
CASES = [(True, 2, 5), (True, 3, 3), (False, 3, 3)]


@pytest.mark.parametrize("costs", ["off", COSTS], ids=["off", "given"])
@pytest.mark.parametrize(("calibrate", "n_ids", "n_tokens"), CASES)
@pytest.mark.parametrize("method", SMALL)
def test_the_law_is_the_targets(
    method: str, calibrate: bool, n_ids: int, n_tokens: int, costs: str
) -> None:
    """Through generate, over trees of models and what earlier ones have taught. Costs at which some
    rows and levels pay, and others do not."""
    settings = METHODS[method](calibrate=calibrate, costs=costs, **SMALL[method])
    pair = tiny_model(3, n_ids), tiny_model(4, n_ids)
    assert difference_by_generate(*pair, settings, n_tokens, Sampling(0.8)) < 1e-6


@pytest.mark.parametrize("method", SMALL)
def test_with_stop_by_cost_what_is_dear_is_left_out(method: str) -> None:
    """Rows, levels, and the draft itself; what costs nothing is drafted and verified as without."""
    pair = tiny_model(3, 9), tiny_model(3, 9)

    def rows(**more: str) -> list[int]:
        settings = METHODS[method](**SMALL[method], **more)
        steps = list(generate(*pair, [0], settings, 60))[1:]
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
