"""Count of the blocks of tree masks that are not empty, by the order of the rows (DySpec, app. C).

An attention kernel computes a mask block by block, and it could skip a block in which no row
attends to any slot. The attention of this project computes all blocks: the paper finds no gain end
to end. `python tests/lab/test_blocks.py` prints the counts next to the paper's table 5.

grown          the order in which the rows were added: in dyspec by value
breadth-first  the order of this project's trees
depth-first    the order to which the paper changes
"""

import random
from collections.abc import Sequence

import numpy
import pandas as pd
import pytest
from numpy import ndarray

from verify import ancestor_mask

ORDERS = ("grown", "breadth-first", "depth-first")
# The paper's table 5: random trees, no prefix, blocks of 32; before and after its change of order
PUBLISHED = {256: "36 / 22.5", 512: "135.5 / 52.8", 1024: "490.2 / 119.3", 2048: "1654.5 / 278.7"}


def random_parents(n: int, rng: random.Random) -> list[int]:
    """Return the parents of a random tree [N]. Each earlier row is equally likely as a parent."""
    return [-1] + [rng.randrange(row) for row in range(1, n)]


def breadth_first(parents: Sequence[int]) -> list[int]:
    """Return the rows in breadth-first order. Parents come before their children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return sorted(range(len(parents)), key=depths.__getitem__)


def depth_first(parents: Sequence[int]) -> list[int]:
    """Return the rows in depth-first order. Parents come before their children."""
    children: list[list[int]] = [[] for _ in parents]
    for row in range(len(parents) - 1, 0, -1):
        children[parents[row]].append(row)  # the last sibling first, as a stack needs them
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack += children[order[-1]]
    return order


def count_blocks(mask: ndarray, size: int = 32) -> int:
    """Return how many blocks of size x size are not empty in a mask [N, N]."""
    n = len(mask)
    n_blocks = -(-n // size)
    padded = numpy.zeros((n_blocks * size, n_blocks * size), dtype=bool)
    padded[:n, :n] = mask
    return int(padded.reshape(n_blocks, size, n_blocks, size).any(axis=(1, 3)).sum())


def counts_by_order(parents: Sequence[int]) -> list[int]:
    """Return the number of blocks of a tree, whose rows are as grown, in each of ORDERS."""
    mask = ancestor_mask(parents)
    orders = [range(len(parents)), breadth_first(parents), depth_first(parents)]
    return [count_blocks(mask[numpy.ix_(rows, rows)]) for rows in orders]


def random_table(n_trees: int = 8) -> pd.DataFrame:
    """Return the mean counts of random trees of several sizes, next to the paper's."""
    rng, found = random.Random(0), {}
    for n in PUBLISHED:
        trees = [counts_by_order(random_parents(n, rng)) for _ in range(n_trees)]
        found[n] = numpy.mean(trees, axis=0)
    return pd.DataFrame(found, index=ORDERS).T.assign(paper=PUBLISHED.values())


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


if __name__ == "__main__":
    print(random_table())
