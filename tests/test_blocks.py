"""Tests of the count of non-empty blocks of tree masks."""

import random

import numpy
import pytest
from conftest import TINY

from benchmark import blocks
from benchmark.blocks import (
    PUBLISHED,
    count_blocks,
    depth_first,
    main,
    masks_by_order,
    random_parents,
)
from verify import ancestor_mask

#      0
#    1   2
#   3 4  5
#        6
PARENTS = [-1, 0, 0, 1, 1, 2, 5]


def test_orders_of_a_small_tree() -> None:
    """Check both depth-first orders. Below the root the subtrees have equal sizes, so they keep
    their order."""
    assert depth_first(PARENTS, is_by_size=False) == [0, 1, 3, 4, 2, 5, 6]
    assert depth_first(PARENTS, is_by_size=True) == [0, 1, 3, 4, 2, 5, 6]
    larger = [*PARENTS, 6]
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
    masks = masks_by_order(list(range(-1, n - 1)), range(n))
    assert [count_blocks(mask, 32, 0) for mask in masks] == [36] * 4


@pytest.mark.parametrize("n", PUBLISHED)
def test_random_trees_have_the_papers_counts(n: int) -> None:
    """Compare with table 5, whose random trees are not described."""
    rng = random.Random(0)
    trees = [masks_by_order(random_parents(n, rng), range(n)) for _ in range(8)]
    counts = [[count_blocks(mask, 32, 0) for mask in masks] for masks in trees]
    grown, _, reordered, _ = numpy.mean(counts, axis=0)
    before, after = map(float, PUBLISHED[n].split(" / "))
    assert grown == pytest.approx(before, rel=0.02)
    assert reordered == pytest.approx(after, rel=0.08)


def test_the_command_prints_both_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "PUBLISHED", {256: PUBLISHED[256]})
    monkeypatch.setattr(blocks, "REAL_ROWS", (64,))
    monkeypatch.setattr(blocks, "MAX_DEPTH", 3)
    monkeypatch.setattr(blocks, "N_TOKENS", 8)
    assert main(["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]) == 0
    printed = capsys.readouterr().out
    assert "36 / 22.5" in printed and max(map(len, printed.splitlines())) <= 80
    assert len([line for line in printed.splitlines() if line.startswith("64 ")]) == 8
    assert main(["--device", "moon"]) == 2
