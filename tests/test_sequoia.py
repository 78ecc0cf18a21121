"""sequoia: the best shape, against the paper's own recursion; the tree of that shape."""

import math

import pytest
import torch
from conftest import grow
from test_draft_tree import ROOT, VOCAB, FakeDraft, Path, assert_well_formed, paths
from torch import Tensor

from methods.sequoia import Chances, Sequoia, SequoiaRule, Shape, plan

FALLING = (0.7, 0.12, 0.04, 0.02)
RISING = (0.1, 0.5, 0.2)  # a rank may be worth less than the next, which needs it all the same
ZEROS = (0.4, 0.0, 0.3)
CHANCES = [FALLING, RISING, ZEROS, (0.9,), (0.0,), (0.5, 0.5)]


def papers_length(n_rows: int, max_depth: int, chances: Chances) -> float:
    """Section 4.1 taken literally: T[n][d][b], the expected tokens of a tree of n rows, the root
    among them, d levels of rows at most, whose root has b children. Its last child gets some rows,
    the tree with one child less the others."""
    n_levels = max_depth + 1
    n_ranks = len(chances)
    t = [[[-math.inf] * (n_ranks + 1) for _ in range(n_levels + 1)] for _ in range(n_rows + 1)]
    for depth in range(1, n_levels + 1):
        t[1][depth][0] = 1.0
    for n in range(2, n_rows + 1):
        for depth in range(2, n_levels + 1):
            for b in range(1, n_ranks + 1):
                for last in range(1, n):
                    others = t[n - last][depth][b - 1]
                    value = others + chances[b - 1] * max(t[last][depth - 1])
                    t[n][depth][b] = max(t[n][depth][b], value)
    return max(max(t[n][n_levels]) for n in range(1, n_rows + 1))


def measure(shape: Shape, chances: Chances) -> tuple[float, int]:
    """The expected tokens of an iteration, every chance to be accepted added up, and the depth."""
    reached, depths = {0: 1.0}, {0: 0}
    for node, family in enumerate(shape):
        for p, child in zip(chances, family, strict=False):
            reached[child] = reached[node] * p
            depths[child] = depths[node] + 1
    return sum(reached.values()), max(depths.values())


@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize("max_depth", [1, 2, 3, 7])
def test_the_shape_is_the_papers_optimum(max_depth: int, chances: Chances) -> None:
    for n_rows in (1, 2, 3, 4, 7, 12, 20):
        best = papers_length(n_rows, max_depth, chances)
        shape = plan(n_rows - 1, max_depth, chances)
        length, depth = measure(shape, chances)
        assert length == pytest.approx(best, abs=1e-9)
        assert len(shape) <= n_rows and depth <= max_depth
        assert max(len(family) for family in shape) <= len(chances)
        children = [child for family in shape for child in family]
        assert children == list(range(1, len(shape))), "breadth-first, each once"
        if chances == FALLING:
            assert len(shape) == min(n_rows, sum(4**depth for depth in range(max_depth + 1)))


class Choosy(FakeDraft):
    """A FakeDraft that gives some of the paths only one or two tokens, and one of them none."""

    def logits(self, path: Path) -> Tensor:
        logits = super().logits(path)
        n_possible = (VOCAB, 1, VOCAB, 2, 0)[sum(path[1:]) % 5]
        if len(path) == 1:
            n_possible = 3
        impossible = logits.argsort(descending=True)[n_possible:]
        return logits.index_fill(0, impossible, -math.inf)


def shaped_tree(draft: FakeDraft, shape: Shape) -> list[Path]:
    """Node by node: the likeliest tokens, one for each child that the shape has here."""
    queue = [((ROOT,), 0)]
    for path, node in queue:  # which grows meanwhile
        best = torch.log_softmax(draft.logits(path), -1).sort(descending=True)
        for rank, child in enumerate(shape[node]):
            if best.values[rank] > -math.inf:
                queue.append((path + (int(best.indices[rank]),), child))
    return [path for path, _ in queue]


@pytest.mark.parametrize("kind", [FakeDraft, Choosy])
@pytest.mark.parametrize("chances", [FALLING, RISING, (0.5, 0.5)])
def test_the_tree_has_that_shape(kind: type[FakeDraft], chances: Chances) -> None:
    """Node by node, also where tokens lack: the rows that the draft runs then have a gap."""
    shape = plan(23, 5, chances)
    n_rows = set()
    for seed in range(30):
        draft = kind(seed)
        tree = grow(SequoiaRule(shape, 5), ROOT, draft, 127)
        assert paths(tree) == shaped_tree(draft, shape)
        assert_well_formed(tree)
        n_rows.add(len(tree))
    assert (n_rows == {24}) == (kind is FakeDraft)


def test_settings_make_the_rule() -> None:
    """Of p .6, .3 at depth 2: the nodes are worth .6, .36, .3, and .18 twice."""
    assert Sequoia(N=6, D_max=2, p="0.6:3e-1").make_rule().shape == [
        [1, 2],
        [3, 4],
        [5],
        [],
        [],
        [],
    ]
    assert len(grow(Sequoia(N=1).make_rule(), ROOT, FakeDraft(0), 127)) == 1
    assert len(grow(Sequoia(p="0.0").make_rule(), ROOT, FakeDraft(0), 127)) == 1
