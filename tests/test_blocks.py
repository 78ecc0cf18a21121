"""Tests of the count of non-empty blocks of tree masks."""

import random

import numpy
import pytest

from dynatree_lab.benchmark.blocks import (
    count_blocks,
    counts_by_order,
    depth_first,
    random_parents,
    random_table,
)
from verify import ancestor_mask


@pytest.mark.parametrize(("n", "size"), [(1, 4), (7, 3), (30, 4), (64, 8)])
def test_a_block_counts_if_a_row_attends_to_a_row_in_it(n: int, size: int) -> None:
    mask = ancestor_mask(random_parents(n, random.Random(n)))
    found = {(row // size, other // size) for row, other in numpy.argwhere(mask)}
    assert count_blocks(mask, size) == len(found)


def test_orders_of_the_rows() -> None:
    """Check depth-first order, and a chain, which fills the lower triangle in every order."""
    assert depth_first([-1, 0, 0, 1, 1, 2, 5]) == [0, 1, 3, 4, 2, 5, 6]
    assert counts_by_order(list(range(-1, 255))) == [36] * 3


def test_random_trees_have_the_papers_counts() -> None:
    """Compare with table 5, whose random trees are not described."""
    for _, row in random_table(n_trees=3).iterrows():
        before, after = map(float, row["paper"].split(" / "))
        assert row["grown"] == pytest.approx(before, rel=0.02)
        assert row["depth-first"] == pytest.approx(after, rel=0.08)
