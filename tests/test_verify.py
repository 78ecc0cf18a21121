"""Claim: the target sees each node as if its path stood alone, and the accepted path is greedy's.

The trees are random and built by hand here, so nothing depends on how drafting grows them.

    python -m pytest tests/test_verify.py
"""

import random
from collections import Counter

import pytest
import torch

from draft_tree import Tree
from verify import accept_greedy, tree_mask, tree_positions


def path_to(row: int, parents: list[int]) -> list[int]:
    """Rows from the root to `row`, by walking up."""
    return [*path_to(parents[row], parents), row] if row >= 0 else []


def make_tree(tokens: list[int], parents: list[int]) -> Tree:
    """A tree from its two defining columns; verifying reads no probability and no draft slot."""
    paths = [path_to(row, parents) for row in range(len(tokens))]
    depths = [len(path) - 1 for path in paths]
    return Tree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        logprobs=torch.zeros(len(tokens)),
        ancestors=torch.tensor([[row in path for row in range(len(tokens))] for path in paths]),
        draft_slots=torch.full((len(tokens),), -1),
        depth=max(depths),
    )


def random_tree(rng: random.Random) -> Tree:
    """1 to 24 rows, breadth-first; few distinct tokens, so cousins often carry the same one."""
    tokens, parents = [rng.randrange(6)], [-1]
    for row in range(1, rng.randint(1, 24)):
        parents.append(rng.randint(max(parents[-1], row - 4, 0), row - 1))
        siblings = [tokens[i] for i in range(1, row) if parents[i] == parents[row]]
        tokens.append(rng.choice([token for token in range(6) if token not in siblings]))
    return make_tree(tokens, parents)


def children_of(tree: Tree, row: int) -> list[int]:
    return [i for i, parent in enumerate(tree.parents.tolist()) if parent == row]


def random_predictions(tree: Tree, rng: random.Random) -> torch.Tensor:
    """Mostly a child's token, or no random path would be long; sometimes -1, no prediction."""
    predictions = []
    for row in range(len(tree)):
        tokens = tree.tokens[children_of(tree, row)].tolist()
        likely = rng.choice(tokens or [0])
        predictions.append(likely if rng.random() < 0.6 else rng.randint(-1, 6))
    return torch.tensor(predictions)


def walk(tree: Tree, predictions: torch.Tensor) -> list[int]:
    """From the root, step to the child that carries the predicted token while there is one."""
    path, agreeing = [0], [0]
    while agreeing:
        wanted = predictions[path[-1]]
        agreeing = [i for i in children_of(tree, path[-1]) if tree.tokens[i] == wanted]
        path += agreeing
    return path


def test_accept_greedy_is_the_walk_from_the_root() -> None:
    rng, lengths, n_second = random.Random(0), Counter(), 0
    for _ in range(300):
        tree = random_tree(rng)
        predictions = random_predictions(tree, rng)
        path, tokens = accept_greedy(tree, predictions)
        assert path == walk(tree, predictions) and tokens == predictions[path].tolist()
        assert path == sorted(set(path))  # the cache moves rows in order, so they must rise
        lengths[min(len(path) - 1, 3)] += 1
        n_second += any(children_of(tree, int(tree.parents[i]))[0] != i for i in path[1:])
    assert min(lengths[n] for n in range(4)) >= 20 and n_second >= 20, (lengths, n_second)


THE, CAT, DOG, SAT, RAN, AWAY = range(6)


def example() -> Tree:
    """The six rows of draft_tree.py's docstring."""
    return make_tree([THE, CAT, DOG, SAT, RAN, RAN], [-1, 0, 0, 1, 1, 2])


def test_the_example_of_the_docstring() -> None:
    predictions = torch.tensor([CAT, RAN, RAN, AWAY, AWAY, AWAY])
    path, tokens = accept_greedy(example(), predictions)
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
    assert accept_greedy(example(), torch.tensor(predictions))[0] == path


@pytest.mark.parametrize("last", [-1, THE, CAT, AWAY])
def test_the_root_needs_no_prediction(last: int) -> None:
    """The root's parent is -1, which as an index is the last row: that one must not judge it."""
    predictions = torch.tensor([CAT, RAN, RAN, AWAY, AWAY, last])
    assert accept_greedy(example(), predictions)[0] == [0, 1, 4]
    assert accept_greedy(make_tree([THE], [-1]), torch.tensor([last])) == ([0], [last])


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
    mask = tree_mask(example().ancestors, 2)
    assert mask.tolist() == [[mark == "#" for mark in row.replace(" ", "")] for row in drawn]
    assert tree_positions(example().depths, 2).tolist() == [2, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_node_sees_the_prefix_and_its_own_path(length: int) -> None:
    """Its position is what it would have if only its path had been written."""
    rng = random.Random(length)
    for _ in range(50):
        tree = random_tree(rng)
        mask = tree_mask(tree.ancestors, length)
        positions = tree_positions(tree.depths, length)
        assert mask.shape == (len(tree), length + len(tree)) and mask.dtype == torch.bool
        assert positions.shape == (len(tree),) and positions.dtype == torch.int64
        for row in range(len(tree)):
            path = path_to(row, tree.parents.tolist())
            seen = [*range(length), *(length + i for i in path)]
            assert mask[row].nonzero()[:, 0].tolist() == seen
            assert positions[row] == len(seen) - 1
