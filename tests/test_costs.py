"""What an iteration costs, found from the times of iterations; what is worth its time."""

import random

import pytest

from methods.costs import ROW, Account, Costs, Worth, work_of


@pytest.mark.parametrize(("tree", "row"), [(2.0, 0.1), (-1.0, 1.0)])
def test_costs_are_found_from_the_times_of_iterations(tree: float, row: float) -> None:
    """In another unit than guessed, a hiccup now and then; also where a second row takes no longer
    than one, and each further one a fifth of a step."""

    def true_ms(n_rows: int, n_levels: int) -> float:
        """A step 5, a tree, each row below the root, a drafting 2, each level 1."""
        verified = 5 + tree * (n_rows > 1) + row * (n_rows - 1)
        return verified + 2 * (n_levels > 0) + n_levels

    costs = Costs((0.2, 0.04, 0.2, 0.4))
    assert costs.predict(work_of(11, 0)) == pytest.approx(1.6)
    rng = random.Random(0)
    for i in range(600):
        n_rows, n_levels = rng.choice([1, 2, 6, 21]), rng.choice([0, 0, 1, 4])
        ms = true_ms(n_rows, n_levels) * rng.uniform(0.95, 1.05)
        if i % 50 == 49:
            ms *= 20
        costs.fit(work_of(n_rows, n_levels), ms)
    for n_rows, n_levels in ((1, 0), (2, 0), (9, 0), (21, 0), (9, 3)):
        predicted = costs.predict(work_of(n_rows, n_levels))
        assert predicted == pytest.approx(true_ms(n_rows, n_levels), rel=0.15)


def test_worth_starts_as_the_guess_and_follows_the_last_ten() -> None:
    worth = Worth(3.0, work_of(11, 2))
    worth.take(1, work_of(21, 4))
    assert (worth.tokens, *worth.work) == (2.0, *work_of(16, 3))
    for _ in range(60):
        worth.take(5, work_of(9, 0))
    assert worth.tokens == pytest.approx(5, rel=0.01)
    assert worth.work == pytest.approx(work_of(9, 0), abs=0.02)


def test_a_price_is_the_tokens_that_the_time_would_have_given() -> None:
    """Twice the tokens in the same time, and each cost is worth twice as many."""
    account = Account((1e-9, 0.1, 1e-9, 0.5))
    assert account.prices[ROW] == pytest.approx(0.1)
    for _ in range(200):
        account.take(n_tokens=2, n_rows=1, n_levels=0, ms=99.0)
    account.open()
    assert account.prices[ROW] == pytest.approx(0.2, rel=1e-3)
    assert account.worth(2.0, n_rows=1) == pytest.approx(0.0, abs=1e-3)


def test_a_draft_that_does_not_pay_is_probed_for_one_percent_of_the_time() -> None:
    account = Account((0.3, 0.04, 0.2, 0.4))
    n_probes = 0
    for _ in range(1000):
        account.open()
        drafts = account.may_draft(otherwise=account.worth(1.0, n_rows=1))
        account.take(n_tokens=1, n_rows=5 if drafts else 1, n_levels=2 if drafts else 0, ms=1.0)
        n_probes += account.is_probe
    assert 2 <= n_probes and account.probed_ms <= 0.01 * account.total_ms + 5
