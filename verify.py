"""Verifying a tree: which slots each node may see, and which path the target accepts.

Pure functions of tensors: no model, no cache, no tokenizer. In the example of draft_tree.py the
target says: after "the" comes "cat", after "the cat" comes "ran", after "the cat ran" comes "away":

    predictions[row] = cat  ran  ...  ...  away  ...
    accept_greedy(tree, predictions) -> rows [0, 1, 4]; commit the, cat, ran; the bonus is "away"

Shapes: N tree rows, S cache slots. Paper: DynaTree v2, sections 3.4 and 3.5.
"""

import torch
from torch import Tensor

from draft_tree import Tree


def tree_mask(tree: Tree, length: int) -> Tensor:
    """The tree attention mask A [N, length + N] bool: the whole prefix, then own ancestors."""
    prefix = tree.ancestors.new_ones(len(tree), length)
    return torch.cat([prefix, tree.ancestors], dim=1)


def tree_positions(tree: Tree, length: int) -> Tensor:
    """Each node's position [N] int64, its distance from the start of the text.

    Not its row: siblings stand at the same position, and a rotary embedding at any other one
    gives other logits than decoding the path token by token (the paper's own code has this wrong).
    """
    return tree.depths + length


def accept_greedy(tree: Tree, predictions: Tensor) -> Tensor:
    """The rows of the longest path that the target agrees with, root first: [1 + accepted] int64.

    predictions: [N] int64, the target's argmax after each node. A node agrees if its token is the
    prediction at its parent; siblings carry distinct tokens, so the agreeing path is unique. The
    prediction at the path's last row is the bonus token.
    """
    if len(tree) == 1:  # ar, at every token: the rest would cost it more than its bookkeeping
        return torch.zeros_like(tree.tokens)
    disagrees = tree.tokens[1:] != predictions.take(tree.parents[1:])  # the root needs no proof
    off_path = (tree.ancestors[:, 1:] & disagrees).any(dim=1)  # [N], itself or an ancestor
    deepest = tree.depths.masked_fill(off_path, -1).argmax()
    return tree.ancestors[deepest].nonzero().squeeze(1)  # breadth-first order is path order
