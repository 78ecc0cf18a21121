"""Verification: the inputs of the target's pass over a tree, and the walk that accepts a path.

In the example of draft_tree.py the target's best tokens are: after "the" comes "cat", after "the
cat" comes "ran", after "the cat ran" comes "away":

    row    0    1    2    3    4    5
    best  cat  ran  ...  ...  away ...
    accept_greedy -> rows [0, 1, 4], tokens [cat, ran, away]; "away" is the bonus token

Shapes: N tree rows, V vocabulary. Paper: DynaTree v2, sections 3.4 and 3.5.
"""

from collections.abc import Callable, Sequence

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from draft_tree import Tree

# accept(tree, logits [N, V] of the target) -> the accepted rows of the tree, the root first, and
# the token that follows each of them; the last of these is the bonus token
Acceptance = Callable[[Tree, Tensor], tuple[list[int], list[int]]]


def tree_inputs(tree: Tree, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [N], positions [N] and mask [N, N] of the target's pass over a tree, which
    follows `length` committed tokens. All are on the host.

    A row attends to its ancestors and itself. Its position is `length` plus its depth, so siblings
    have one position. With this mask and position, a row's logits equal those of decoding its path
    token by token, up to rounding.
    """
    tokens, positions = numpy.array(tree.tokens), numpy.array(tree.depths) + length
    mask = ancestor_mask(tree.parents)
    return torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(mask)


def ancestor_mask(parents: Sequence[int]) -> ndarray:
    """Return the bool mask [N, N] with which a row attends to its ancestors and itself."""
    mask = numpy.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents[1:], start=1):
        mask[row] |= mask[parent]  # the parent's row is complete, because it comes earlier
    return mask


def walk(tree: Tree, choose: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Walk from the root to the child that holds the target's next token, as far as there is one.
    Return the rows of this path and the token after each of them, the bonus token last.

    choose: returns the target's next token after a row. It is called once per row of the path.
    """
    path, tokens = [0], [choose(0)]
    for row in range(1, len(tree)):  # a parent comes before its children, so one scan is enough
        if tree.parents[row] == path[-1] and tree.tokens[row] == tokens[-1]:
            path.append(row)
            tokens.append(choose(row))
    return path, tokens


def accept_greedy(tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
    """Accept the nodes that hold the target's best tokens (an Acceptance)."""
    best = logits.argmax(dim=-1).tolist()
    return walk(tree, best.__getitem__)


def cut(tokens: list[int], eos_ids: set[int], limit: int) -> list[int]:
    """Return the first `limit` tokens, up to the first EOS token, which is kept."""
    tokens = tokens[:limit]
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
