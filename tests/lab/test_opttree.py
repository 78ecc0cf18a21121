"""Tests of opttree against the paper's algorithm taken literally, and of its threshold delta."""

import math
from collections import Counter

import pytest
import torch
from growing import grow
from trees import ROOT, FakeDraft, HalfHalfDraft, Path, assert_well_formed, paths

from dynatree_lab.methods.opttree import OptTree

DEPTH = 6


def literal_tree(draft: FakeDraft, settings: OptTree) -> tuple[list[Path], int]:
    """Run the paper's algorithm literally, and return the tree's paths and the layers drafted.

    A layer is the n likeliest children of the layer before. E(A) is the sum of p(u) over the n
    likeliest nodes of all layers. Drafting stops when a layer adds delta or less to it.
    """
    n = settings.N - 1
    root = (ROOT,)
    layer = {root: 0.0}  # path -> log p
    drafted: dict[Path, float] = {}
    expected = 0.0  # E(A)
    n_layers = 0
    while n_layers < settings.D_max:
        children: dict[Path, float] = {}
        for path, logprob in layer.items():
            best = torch.log_softmax(draft.logits(path), -1).sort(descending=True)
            for token, value in zip(best.indices[:n].tolist(), best.values.tolist(), strict=False):
                children[path + (token,)] = logprob + value
        kept = sorted(children, key=children.get, reverse=True)[:n]
        layer = {path: children[path] for path in kept}
        drafted |= layer
        n_layers += 1
        likeliest = sorted(drafted, key=drafted.get, reverse=True)[:n]
        now = sum(math.exp(drafted[path]) for path in likeliest)
        if now - expected <= settings.delta:
            break
        expected = now
    return [root] + likeliest, n_layers


@pytest.mark.parametrize("delta", [0.0, 0.05, 0.2, 0.4, 0.7])
@pytest.mark.parametrize("n_rows", [2, 3, 8, 24])
def test_the_tree_is_the_papers(n_rows: int, delta: float) -> None:
    n_layers: Counter[int] = Counter()
    for seed in range(12):
        draft = FakeDraft(seed)
        settings = OptTree(N=n_rows, D_max=DEPTH, delta=delta)
        tree = grow(settings.make_rule(), ROOT, draft, 127)
        expected, n = literal_tree(draft, settings)
        assert sorted(paths(tree)) == sorted(expected)
        assert draft.n_calls == n
        assert_well_formed(tree)
        n_layers[n] += 1
    assert len(n_layers) > 1 or n_rows == 2, f"the cases have become too tame: {n_layers}"


def test_it_stops_by_what_the_last_level_added() -> None:
    """Check how many levels are drafted for eight nodes in a uniform binary tree. The levels add
    two nodes of p = 0.5, four of 0.25 and two of 0.125, so their gains are 1, 1, 0.25 and 0."""
    n_drafted = []
    for delta in (0.0, 0.2, 0.25, 0.99, 1.0):
        draft = HalfHalfDraft(0)
        grow(OptTree(N=9, delta=delta).make_rule(), ROOT, draft, 127)
        n_drafted.append(draft.n_calls)
    assert n_drafted == [4, 4, 3, 3, 1]
