"""Tests of the cost model, which is fitted to times of iterations, and of the decision to draft."""

import random
from dataclasses import fields
from types import SimpleNamespace

import numpy
import pytest

from draft_tree import Level, Tree
from dynatree_lab.methods.auto import Auto
from dynatree_lab.methods.cost_gates import CostGates
from dynatree_lab.methods.costs import LEVEL, ROW, CostTracker, RecentMean, cost_counts
from dynatree_lab.methods.rules import DrawnLevel
from dynatree_lab.methods.static import Chain, Fixed


@pytest.mark.parametrize(("tree", "row"), [(2.0, 0.1), (-1.0, 1.0)])
def test_costs_are_found_from_the_times_of_iterations(tree: float, row: float) -> None:
    """Check predictions after a fit to noisy times with outliers, in another unit than the initial
    costs. In the second case a second row takes no time, and each further row a fifth of a step.
    """

    def true_ms(n_rows: int, n_levels: int) -> tuple[float, float]:
        """Return 2 ms to draft and 1 per level; 5 to verify, plus the tree and its further rows."""
        verified = 5 + tree * (n_rows > 1) + row * (n_rows - 1)
        return 2.0 * (n_levels > 0) + n_levels, verified

    tracker = CostTracker()
    assert tracker.predict(cost_counts(11, 2)) == pytest.approx(2.8)
    rng = random.Random(0)
    for i in range(600):
        n_rows, n_levels = rng.choice([1, 2, 6, 21]), rng.choice([0, 0, 1, 4])
        factor = rng.uniform(0.95, 1.05) * (20 if i % 50 == 49 else 1)
        draft_ms, other_ms = true_ms(n_rows, n_levels)
        tracker.record(1, n_rows, n_levels, draft_ms * factor, other_ms * factor)
    for n_rows, n_levels in ((1, 0), (2, 0), (9, 0), (21, 0), (9, 3)):
        predicted = tracker.predict(cost_counts(n_rows, n_levels))
        assert predicted == pytest.approx(sum(true_ms(n_rows, n_levels)), rel=0.15)


@pytest.mark.parametrize(("row", "level"), [(0.005, 0.001), (0.1, 0.4)])
def test_two_drafts_tell_what_a_row_and_a_level_cost(row: float, level: float) -> None:
    """Check prices, in units of a pass, of a target that is far slower than the draft, and of a
    small one. The prompt's pass tells the price of a row, and a drafted level its own. The first
    draft also runs the prompt, for as long as 20 levels."""
    tracker = CostTracker()
    tracker.observe_prompt(101, 3000 * (1 + 100 * row))
    tracker.record(1, 1, 0, 0.0, 3000.0)
    for n_levels in (22, 2):
        tracker.record(2, 3, 2, 3000 * n_levels * level, 3000 * (1 + 2 * row))
    tracker.begin_tree()
    step, prices = tracker.prices[0], tracker.prices
    assert prices[ROW] / step == pytest.approx(row, rel=0.2)
    assert prices[LEVEL] / step == pytest.approx(level, rel=0.2)


def test_prices_by_a_given_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with numbers worked out by hand: after a prompt of two chunks, 101 ids in 300 ms, a
    first pass of 100 ms. So a further row takes (300 - 100) / 100 = 2 ms. The others keep their
    initial costs in units of the pass: a tree 10 ms, drafting 10 ms, a level 30 ms."""
    seconds = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: seconds[0])
    monkeypatch.setattr("dynatree_lab.methods.costs.time", clock)
    rule = Auto().make_rule()
    seconds[0] = 9.0  # between the rule's making and the text
    rule.start([])
    for tokens in (range(60), range(60, 101)):
        seconds[0] += 0.15
        rule.observe_target(list(tokens), numpy.zeros((len(tokens), 4), dtype=int))
    seconds[0] += 1.0
    rule.begin_tree(500, 9)
    tree = rule.finish_tree(Tree.from_root(500))
    seconds[0] += 0.1
    rule.observe_target([500], numpy.zeros((1, 4), dtype=int))
    rule.adapt(tree, [0])
    rule.tracker.begin_tree()
    assert rule.tracker.prices == pytest.approx([1, 0.1, 0.02, 0.1, 0.3])


def test_the_time_of_drafting_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that of 3 ms before the draft, 4 for it and 5 after it, 8 are not drafting's."""
    seconds = [7.0]
    clock = SimpleNamespace(perf_counter=lambda: seconds[0])
    monkeypatch.setattr("dynatree_lab.methods.costs.time", clock)
    tracker, recorded = CostTracker(), []
    tracker.record = lambda *given: recorded.append(given)
    tracker.begin_tree()
    seconds[0] += 0.003
    tracker.should_draft(0.0)
    seconds[0] += 0.004
    tracker.end_draft()
    seconds[0] += 0.005
    tracker.end_tree(2, 3, 1)
    assert recorded == [(2, 3, 1, pytest.approx(4), pytest.approx(8))]


def test_a_drawn_chain_goes_on_while_its_own_row_pays() -> None:
    """Check a level of price 0.3 whose drawn row is likely or not to be accepted. A tree with
    siblings must not look at it, so it goes on in both cases."""
    for kind, found in ((Chain(), [True, False]), (Fixed(), [True, True])):
        gates = CostGates(kind.make_rule(), (1e-9, 1e-9, 1e-9, 0.3))
        goes_on = []
        for prob in (0.9, 0.1):
            gates.begin_tree(0, 9)
            logprobs = numpy.log([[prob]], dtype=numpy.float32)
            level = Level(0, numpy.array([[1]]), logprobs, logprobs)
            parts = [getattr(level, f.name) for f in fields(Level)]
            drawn = DrawnLevel(*parts, drawn_values=0 * logprobs, find_confidence=None)
            gates.add_gates(drawn)
            goes_on.append(gates.expand_gates(drawn)["c_level"])
        assert goes_on == found


def test_the_first_draft_only_lowers_the_costs_of_drafting() -> None:
    """Check a first draft that takes 14 times as long as expected, because it runs the prompt, and
    one that takes a tenth of the time."""
    for draft_ms, expected in ((980.0, [10, 30]), (7.0, [1, 3])):
        tracker = CostTracker()
        tracker.record(1, 1, 0, draft_ms=0.0, other_ms=100.0)
        tracker.record(2, 3, 2, draft_ms=draft_ms, other_ms=130.0)
        assert tracker.drafting.costs == pytest.approx(expected)


def test_costs_by_hand() -> None:
    """Check a prompt that was kept, so its pass tells nothing, and a second row that takes less
    time than none. The pass of two rows is expected to take 120 ms, so 20 ms count as 60. Of the
    60 ms too many, the costs take shares of 200, 900 and 100 of 1200 + 24^2, by their variances
    after the first pass. The tree's cost would be -20.4 ms, below minus a row's."""
    tracker = CostTracker()
    tracker.observe_prompt(101, 90.0)
    tracker.record(1, 1, 0, draft_ms=0.0, other_ms=100.0)
    assert tracker.verifying.costs == pytest.approx([100, 10, 10])
    assert tracker.drafting.costs == pytest.approx([10, 30])
    tracker.record(2, 2, 0, draft_ms=0.0, other_ms=20.0)
    step, row = 100 - 60 * 200 / 1776, 10 - 60 * 100 / 1776
    assert tracker.verifying.costs == pytest.approx([step, -row, row])
    tracker.begin_tree()
    assert tracker.prices[ROW] == pytest.approx(4 / 3 * row / step)  # means of 1, 1 and 2 tokens


def test_what_a_level_adds_by_hand() -> None:
    """Check a level that adds (0.6 - 2 * 0.1) / 0.8 = 0.5 per unit, after 0.7; one that adds more
    than the limit; one whose rows cost more than they add; and one without parents."""
    tracker = CostTracker((0.1, 0.1, 0.1, 1.0))
    gain = 0.7
    for level, found in (((0.8, 0.6, 2), 0.5), ((1.0, 3.0, 4), 0.98), ((1.0, 0.2, 4), 0.0)):
        tracker.record_level(*level)
        gain += 0.1 * (found - gain)
        assert tracker.level_gain == pytest.approx(gain)
    tracker.record_level(0.0, 0.5, 2)
    assert tracker.level_gain == pytest.approx(gain)


def test_a_probe_is_paid_for() -> None:
    """Work out by hand: 3.3 tokens for 1 + 0.1 + 8 * 0.1 + 0.1 + 3 * 1 = 5 passes lose 1.7, which
    is 1 % of 170 passes."""
    tracker = CostTracker((0.1, 0.1, 0.1, 1.0))
    for n_passes, is_due in ((169, False), (2, True)):
        for _ in range(n_passes):
            tracker.record(1, 1, 0, draft_ms=0.0, other_ms=1.0)
        assert tracker.should_draft(0.0) == tracker.is_probe == is_due
    tracker.record(3.3, 9, 3, draft_ms=0.0, other_ms=1.0)
    assert tracker.probe_ms == pytest.approx(1.7)
    assert not tracker.should_draft(0.0)


def test_a_mean_starts_at_its_initial_values_and_follows_the_last_thirty() -> None:
    mean = RecentMean(3.0, cost_counts(11, 2))
    mean.update(1, cost_counts(21, 4))
    assert (mean.tokens, *mean.counts) == (2.0, *cost_counts(16, 3))
    for _ in range(200):
        mean.update(5, cost_counts(9, 0))
    assert mean.tokens == pytest.approx(5, rel=0.01)
    assert mean.counts == pytest.approx(cost_counts(9, 0), abs=0.02)


def test_a_price_is_the_tokens_that_the_time_would_have_given() -> None:
    """Check that twice the tokens in the same time double the price of a row, and what pays."""
    tracker = CostTracker((1e-9, 0.1, 1e-9, 0.5))
    assert tracker.prices[ROW] == pytest.approx(0.1)
    assert tracker.rows_pay(numpy.log([0.11, 0.09])).tolist() == [True, False]
    assert tracker.level_pays(0.51) and not tracker.level_pays(0.49)
    for _ in range(400):
        tracker.record(n_tokens=2, n_rows=1, n_levels=0, draft_ms=0.0, other_ms=99.0)
    tracker.begin_tree()
    assert tracker.prices[ROW] == pytest.approx(0.2, rel=1e-3)
    assert tracker.net_gain(2.0, n_rows=1) == pytest.approx(0.0, abs=1e-3)


def test_a_draft_that_does_not_pay_is_probed_for_one_percent_of_the_time() -> None:
    tracker = CostTracker((0.3, 0.04, 0.2, 0.4))
    n_probes = 0
    for _ in range(1000):
        tracker.begin_tree()
        drafts = tracker.should_draft(net_gain_without=tracker.net_gain(1.0, n_rows=1))
        tracker.record(1, 5 if drafts else 1, 2 if drafts else 0, draft_ms=0.0, other_ms=1.0)
        n_probes += tracker.is_probe
    assert 2 <= n_probes and tracker.probe_ms <= 0.01 * tracker.total_ms + 5
