"""Tests of sequoia: its shape against the paper's recursion, and its trees against the shape."""

import math

import pytest
import torch
from growing import grow
from torch import Tensor
from trees import ROOT, VOCAB, FakeDraft, Path, assert_well_formed, paths

from dynatree_lab.methods.sequoia import RankProbs, Sequoia, SequoiaRule, TreeShape, plan_shape

FALLING = (0.7, 0.12, 0.04, 0.02)
RISING = (0.1, 0.5, 0.2)  # rank 1 is likelier than rank 0, but needs it as its earlier sibling
ZEROS = (0.4, 0.0, 0.3)
RANK_PROBS = [FALLING, RISING, ZEROS, (0.9,), (0.0,), (0.5, 0.5)]


def papers_length(n_rows: int, max_depth: int, rank_probs: RankProbs) -> float:
    """Return the expected tokens of the best tree, by the recursion of section 4.1.

    T[n][d][b] is the best of n rows, the root included, on at most d levels, if the root has b
    children. The last child gets some of the rows, and the tree without that child the others.
    """
    n_levels = max_depth + 1
    n_ranks = len(rank_probs)
    t = [[[-math.inf] * (n_ranks + 1) for _ in range(n_levels + 1)] for _ in range(n_rows + 1)]
    for depth in range(1, n_levels + 1):
        t[1][depth][0] = 1.0
    for n in range(2, n_rows + 1):
        for depth in range(2, n_levels + 1):
            for b in range(1, n_ranks + 1):
                for last in range(1, n):
                    others = t[n - last][depth][b - 1]
                    value = others + rank_probs[b - 1] * max(t[last][depth - 1])
                    t[n][depth][b] = max(t[n][depth][b], value)
    return max(max(t[n][n_levels]) for n in range(1, n_rows + 1))


def measure(shape: TreeShape, rank_probs: RankProbs) -> tuple[float, int]:
    """Return the expected tokens of an iteration and the depth of a shape. The expected tokens are
    the sum of the nodes' acceptance probabilities."""
    reached, depths = {0: 1.0}, {0: 0}
    for node, family in enumerate(shape):
        for p, child in zip(rank_probs, family, strict=False):
            reached[child] = reached[node] * p
            depths[child] = depths[node] + 1
    return sum(reached.values()), max(depths.values())


@pytest.mark.parametrize("rank_probs", RANK_PROBS)
@pytest.mark.parametrize("max_depth", [1, 2, 3, 7])
def test_the_shape_is_the_papers_optimum(max_depth: int, rank_probs: RankProbs) -> None:
    for n_rows in (1, 2, 3, 4, 7, 12, 20):
        best = papers_length(n_rows, max_depth, rank_probs)
        shape = plan_shape(n_rows - 1, max_depth, rank_probs)
        length, depth = measure(shape, rank_probs)
        assert length == pytest.approx(best, abs=1e-9)
        assert len(shape) <= n_rows and depth <= max_depth
        assert max(len(family) for family in shape) <= len(rank_probs)
        children = [child for family in shape for child in family]
        assert children == list(range(1, len(shape))), "breadth-first, each once"
        if rank_probs == FALLING:
            assert len(shape) == min(n_rows, sum(4**depth for depth in range(max_depth + 1)))


class Choosy(FakeDraft):
    """A FakeDraft with only one, two or no possible tokens after some paths."""

    def logits(self, path: Path) -> Tensor:
        logits = super().logits(path)
        n_possible = (VOCAB, 1, VOCAB, 2, 0)[sum(path[1:]) % 5]
        if len(path) == 1:
            n_possible = 3
        impossible = logits.argsort(descending=True)[n_possible:]
        return logits.index_fill(0, impossible, -math.inf)


def shaped_tree(draft: FakeDraft, shape: TreeShape) -> list[Path]:
    """Return the paths of a tree that is built node by node: the likeliest tokens, one for each
    child in the shape."""
    queue = [((ROOT,), 0)]
    for path, node in queue:  # the loop appends to it
        best = torch.log_softmax(draft.logits(path), -1).sort(descending=True)
        for rank, child in enumerate(shape[node]):
            if best.values[rank] > -math.inf:
                queue.append((path + (int(best.indices[rank]),), child))
    return [path for path, _ in queue]


@pytest.mark.parametrize("kind", [FakeDraft, Choosy])
@pytest.mark.parametrize("rank_probs", [FALLING, RISING, (0.5, 0.5)])
def test_the_tree_has_that_shape(kind: type[FakeDraft], rank_probs: RankProbs) -> None:
    """Compare node by node, also with too few possible tokens: some nodes of the shape then have no
    row."""
    shape = plan_shape(23, 5, rank_probs)
    n_rows = set()
    for seed in range(30):
        draft = kind(seed)
        tree = grow(SequoiaRule(shape, 5), ROOT, draft, 127)
        assert paths(tree) == shaped_tree(draft, shape)
        assert_well_formed(tree)
        n_rows.add(len(tree))
    assert (n_rows == {24}) == (kind is FakeDraft)


def test_settings_make_the_rule() -> None:
    """Check p = 0.6, 0.3 with two levels. The nodes add 0.6, 0.36, 0.3, 0.18 and 0.18 expected
    tokens."""
    shape = Sequoia(N=6, D_max=2, p="0.6:3e-1").make_rule().shape
    assert shape == [[1, 2], [3, 4], [5], [], [], []]
    assert len(grow(Sequoia(N=1).make_rule(), ROOT, FakeDraft(0), 127)) == 1
    assert len(grow(Sequoia(p="0.0").make_rule(), ROOT, FakeDraft(0), 127)) == 1
