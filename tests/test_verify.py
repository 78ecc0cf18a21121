"""Claim: the target sees each node as if its path stood alone, and the accepted path is greedy's.

The trees are random and built by hand here, so nothing depends on how drafting grows them.

    python -m pytest tests/test_verify.py
"""

import random
from collections import Counter

import pytest
import torch

from draft_tree import Tree
from verify import accept_greedy, tree_pass


def path_to(row: int, parents: list[int]) -> list[int]:
    """Rows from the root to `row`, by walking up."""
    path = []
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    return path


def make_tree(tokens: list[int], parents: list[int]) -> Tree:
    """A tree from its two defining columns; verifying reads no probability and no draft slot."""
    n = len(tokens)
    depths = [len(path_to(row, parents)) - 1 for row in range(n)]
    return Tree(tokens, parents, depths, [0.0] * n, [-1] * n, [False] * n)


def random_tree(rng: random.Random) -> Tree:
    """1 to 24 rows, breadth-first; few distinct tokens, so cousins often carry the same one."""
    tokens = [rng.randrange(6)]
    parents = [-1]
    for row in range(1, rng.randint(1, 24)):
        parent = rng.randint(max(parents[-1], row - 4, 0), row - 1)
        siblings = [tokens[i] for i in range(1, row) if parents[i] == parent]
        free = [token for token in range(6) if token not in siblings]
        parents.append(parent)
        tokens.append(rng.choice(free))
    return make_tree(tokens, parents)


def children_of(tree: Tree, row: int) -> list[int]:
    return [child for child, parent in enumerate(tree.parents) if parent == row]


def random_predictions(tree: Tree, rng: random.Random) -> list[int]:
    """Mostly a child's token, or no random path would be long; sometimes -1, no prediction."""
    predictions = []
    for row in range(len(tree)):
        tokens = [tree.tokens[child] for child in children_of(tree, row)]
        likely = rng.choice(tokens or [0])
        predictions.append(likely if rng.random() < 0.6 else rng.randint(-1, 6))
    return predictions


def agreeing_children(tree: Tree, row: int, prediction: int) -> list[int]:
    """A row's children that carry the predicted token: one or none, as siblings are distinct."""
    return [child for child in children_of(tree, row) if tree.tokens[child] == prediction]


def walk(tree: Tree, predictions: list[int]) -> list[int]:
    """From the root, step to the child that carries the predicted token while there is one."""
    path = []
    following = [0]
    while following:
        path += following
        last = path[-1]
        following = agreeing_children(tree, last, predictions[last])
    return path


def is_first_child(tree: Tree, row: int) -> bool:
    return row == children_of(tree, tree.parents[row])[0]


def test_accept_greedy_is_the_walk_from_the_root() -> None:
    rng = random.Random(0)
    lengths: Counter[int] = Counter()  # of accepted paths, from 3 on as one
    n_second = 0  # paths through a child that is not its parent's first
    for _ in range(300):
        tree = random_tree(rng)
        predictions = random_predictions(tree, rng)
        path, tokens = accept_greedy(tree, predictions)
        assert path == walk(tree, predictions)
        assert tokens == [predictions[row] for row in path]
        assert path == sorted(set(path))  # the cache moves rows in order, so they must rise
        lengths[min(len(path) - 1, 3)] += 1
        n_second += not all(is_first_child(tree, row) for row in path[1:])
    for length in range(4):
        assert lengths[length] >= 20, f"the cases have become too tame: {lengths}"
    assert n_second >= 20, f"the cases have become too tame: {n_second}"


THE, CAT, DOG, SAT, RAN, AWAY = range(6)


def example() -> Tree:
    """The six rows of draft_tree.py's docstring."""
    return make_tree([THE, CAT, DOG, SAT, RAN, RAN], [-1, 0, 0, 1, 1, 2])


def test_the_example_of_the_docstring() -> None:
    path, tokens = accept_greedy(example(), [CAT, RAN, RAN, AWAY, AWAY, AWAY])
    assert path == [0, 1, 4]
    assert tokens == [CAT, RAN, AWAY]  # committed next: two guesses, the bonus


@pytest.mark.parametrize(
    ("predictions", "path"),
    [
        ([DOG, RAN, RAN, AWAY, AWAY, AWAY], [0, 2, 5]),
        ([DOG, RAN, SAT, AWAY, AWAY, AWAY], [0, 2]),  # "cat ran" agrees below a wrong "cat"
        ([AWAY, RAN, RAN, AWAY, AWAY, AWAY], [0]),
        ([CAT, -1, RAN, AWAY, AWAY, AWAY], [0, 1]),
        ([-1, RAN, RAN, AWAY, AWAY, AWAY], [0]),
        ([-1, -1, -1, -1, -1, -1], [0]),
    ],
)
def test_a_path_ends_where_the_target_disagrees(predictions: list[int], path: list[int]) -> None:
    """A prediction that is no token at all ends the path there."""
    accepted, _ = accept_greedy(example(), predictions)
    assert accepted == path


@pytest.mark.parametrize("last", [-1, THE, CAT, AWAY])
def test_the_root_needs_no_prediction(last: int) -> None:
    """The root's parent is -1, which as an index is the last row: that one must not judge it."""
    path, _ = accept_greedy(example(), [CAT, RAN, RAN, AWAY, AWAY, last])
    assert path == [0, 1, 4]
    assert accept_greedy(make_tree([THE], [-1]), [last]) == ([0], [last])


def test_the_mask_of_the_example() -> None:
    """Two committed tokens before the root; a column per cache slot."""
    drawn = [
        "## #.....",  # the
        "## ##....",  # cat
        "## #.#...",  # dog
        "## ##.#..",  # cat sat
        "## ##..#.",  # cat ran
        "## #.#..#",  # dog ran
    ]
    tokens, positions, mask = tree_pass(example(), 2)
    expected = []
    for row in drawn:
        marks = row.replace(" ", "")
        expected.append([mark == "#" for mark in marks])
    assert mask.tolist() == expected
    assert tokens.tolist() == [THE, CAT, DOG, SAT, RAN, RAN]
    assert positions.tolist() == [2, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_node_sees_the_prefix_and_its_own_path(length: int) -> None:
    """Its position is what it would have if only its path had been written."""
    rng = random.Random(length)
    for _ in range(50):
        tree = random_tree(rng)
        n = len(tree)
        tokens, positions, mask = tree_pass(tree, length)
        assert tokens.tolist() == tree.tokens
        assert positions.shape == (n,)
        assert tokens.dtype == positions.dtype == torch.int64
        if mask is None:
            assert n == 1, "a root alone needs none"
            mask = torch.ones(1, length + 1, dtype=torch.bool)
        assert mask.shape == (n, length + n)
        assert mask.dtype == torch.bool
        prefix = list(range(length))
        for row in range(n):
            path = path_to(row, tree.parents)
            seen = prefix + [length + i for i in path]
            assert mask[row].nonzero().flatten().tolist() == seen
            assert positions[row] == len(seen) - 1
