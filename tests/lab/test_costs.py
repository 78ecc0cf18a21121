"""Tests of the cost model, which is fitted to times of iterations, and of the decision to draft."""

import random

import numpy
import pytest

from dynatree_lab.methods.costs import LEVEL, ROW, CostTracker, RecentMean, cost_counts


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
def test_one_iteration_tells_what_a_row_and_a_level_cost(row: float, level: float) -> None:
    """Check prices, in units of a pass, of a target that is far slower than the draft, and of a
    small one. The prompt's pass tells the price of a row, and a drafted level its own."""
    tracker = CostTracker()
    tracker.observe_prompt(101, 3000 * (1 + 100 * row))
    tracker.record(1, 1, 0, 0.0, 3000.0)
    tracker.record(2, 3, 2, 3000 * 2 * level, 3000 * (1 + 2 * row))
    tracker.begin_tree()
    step, prices = tracker.prices[0], tracker.prices
    assert prices[ROW] / step == pytest.approx(row, rel=0.2)
    assert prices[LEVEL] / step == pytest.approx(level, rel=0.2)


def test_a_mean_starts_at_its_initial_values_and_follows_the_last_ten() -> None:
    mean = RecentMean(3.0, cost_counts(11, 2))
    mean.update(1, cost_counts(21, 4))
    assert (mean.tokens, *mean.counts) == (2.0, *cost_counts(16, 3))
    for _ in range(60):
        mean.update(5, cost_counts(9, 0))
    assert mean.tokens == pytest.approx(5, rel=0.01)
    assert mean.counts == pytest.approx(cost_counts(9, 0), abs=0.02)


def test_a_price_is_the_tokens_that_the_time_would_have_given() -> None:
    """Check that twice the tokens in the same time double the price of a row, and what pays."""
    tracker = CostTracker((1e-9, 0.1, 1e-9, 0.5))
    assert tracker.prices[ROW] == pytest.approx(0.1)
    assert tracker.rows_pay(numpy.log([0.11, 0.09])).tolist() == [True, False]
    assert tracker.level_pays(0.51) and not tracker.level_pays(0.49)
    for _ in range(200):
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
