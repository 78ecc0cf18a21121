"""Tests of the count of non-empty blocks of tree masks."""

import random

import numpy
import pytest
from conftest import TINY

from benchmark.blocks import (
    count_blocks,
    counts_by_order,
    depth_first,
    random_parents,
    random_table,
    tree_table,
)
from cli.models import load_pair
from verify import ancestor_mask


def test_orders_of_a_small_tree() -> None:
    """Check both depth-first orders. Below the root the subtrees have equal sizes at first, so they
    keep their order."""
    #    0
    #  1   2
    # 3 4  5
    #      6
    parents = [-1, 0, 0, 1, 1, 2, 5]
    assert depth_first(parents, is_by_size=True) == [0, 1, 3, 4, 2, 5, 6]
    larger = [*parents, 6]
    assert depth_first(larger, is_by_size=False) == [0, 1, 3, 4, 2, 5, 6, 7]
    assert depth_first(larger, is_by_size=True) == [0, 2, 5, 6, 7, 1, 3, 4]


@pytest.mark.parametrize(("n", "size", "n_prefix"), [(1, 4, 0), (7, 3, 0), (30, 4, 5), (64, 8, 16)])
def test_a_block_counts_if_a_row_attends_to_a_slot_in_it(n: int, size: int, n_prefix: int) -> None:
    mask = ancestor_mask(random_parents(n, random.Random(n)))
    found = set()
    for row in range(n):
        slots = [*range(n_prefix), *(n_prefix + numpy.flatnonzero(mask[row]))]
        found |= {(row // size, slot // size) for slot in slots}
    assert count_blocks(mask, size, n_prefix) == len(found)


def test_a_chain_fills_the_lower_triangle_in_every_order() -> None:
    n = 256
    assert counts_by_order(list(range(-1, n - 1)), range(n)) == [36] * 4


def test_random_trees_have_the_papers_counts() -> None:
    """Compare with table 5, whose random trees are not described."""
    for _, row in random_table().iterrows():
        before, after = map(float, row["paper"].split(" / "))
        assert row["grown"] == pytest.approx(before, rel=0.02)
        assert row["depth-first"] == pytest.approx(after, rel=0.08)


def test_earlier_slots_add_blocks_to_the_trees_of_a_text() -> None:
    """Check that 2,000 slots add some 62 blocks to each of two blocks of rows."""
    pair = load_pair(str(TINY / "target"), str(TINY / "draft"))
    table = tree_table(pair, n_rows=64, n_prompts=1, new_tokens=24, max_depth=8)
    assert list(table.index) == [0, 100, 500, 2000] and (table > 0).all(axis=None)
    assert (table.loc[2000] > table.loc[0] + 100).all()
