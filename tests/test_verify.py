"""Tests of the inputs of verification and of greedy acceptance.

The trees are random or built by hand, so nothing depends on drafting.

    python -m pytest tests/test_verify.py
"""

import random
from collections import Counter

import pytest
import torch
from trees import make_tree, path_to, random_tree

from draft_tree import MAX_ROWS, Tree
from verify import accept_greedy, cut, tree_inputs


def children_of(tree: Tree, row: int) -> list[int]:
    return [child for child, parent in enumerate(tree.parents) if parent == row]


def walk(tree: Tree, best: list[int]) -> list[int]:
    """Return the path from the root through children that have the predicted token."""
    path = []
    following = [0]
    while following:
        path += following
        children = children_of(tree, path[-1])
        following = [child for child in children if tree.tokens[child] == best[path[-1]]]
    return path


def test_accept_greedy_is_the_walk_from_the_root() -> None:
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for _ in range(300):
        tree = random_tree(rng, rng.randint(1, 24), n_ids=8)
        best = []  # often a child's token, so that there are long paths
        for row in range(len(tree)):
            tokens = [tree.tokens[child] for child in children_of(tree, row)]
            best.append(rng.choice(tokens or [0]) if rng.random() < 0.6 else rng.randint(0, 8))
        path, tokens = accept_greedy(tree, torch.eye(9)[best])
        assert path == walk(tree, best) == sorted(set(path))  # the cache moves rows in order
        assert tokens == [best[row] for row in path]
        seen[f"{min(len(path) - 1, 3)} accepted"] += 1
        seen["second child"] += any(tree.parents[row] == tree.parents[row - 1] for row in path[1:])
    assert len(seen) == 5 and min(seen.values()) >= 20, seen


@pytest.mark.parametrize(
    ("tokens", "eos_ids", "limit", "expected"),
    [
        ([1, 2, 3], [], 5, [1, 2, 3]),
        ([1, 2, 3], [], 2, [1, 2]),
        ([1, 2, 3], [2], 5, [1, 2]),
        ([1, 2, 2, 3], [2, 1], 5, [1]),
        ([1, 2, 3], [3], 2, [1, 2]),
        ([9], [9], 1, [9]),
    ],
)
def test_never_a_token_past_eos_and_never_more_than_asked(
    tokens: list[int], eos_ids: list[int], limit: int, expected: list[int]
) -> None:
    assert cut(tokens, set(eos_ids), limit) == expected


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_node_attends_to_its_own_path(length: int) -> None:
    """Check mask and positions. A node's position is that of a sequence which ends with it."""
    rng = random.Random(length)
    chain = make_tree([0] * 130, list(range(-1, 129)))
    small = (random_tree(rng, rng.randint(1, 24)) for _ in range(50))
    for tree in (*small, random_tree(rng, MAX_ROWS), chain):
        tokens, positions, mask = tree_inputs(tree, length)
        assert tokens.tolist() == tree.tokens
        assert mask.shape == (len(tree), len(tree))
        for row in range(len(tree)):
            path = path_to(tree, row)
            assert mask[row].nonzero().flatten().tolist() == path
            assert positions[row] == length + len(path) - 1
