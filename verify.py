"""Verifying a tree: which slots each node may see, and which path the target accepts.

Pure functions of tensors: no model, no cache, no tokenizer. In the example of draft_tree.py the
target says: after "the" comes "cat", after "the cat" comes "ran", after "the cat ran" comes "away":

    predictions[row] = cat  ran  ...  ...  away  ...
    accept_greedy(tree, predictions) -> rows [0, 1, 4], tokens [cat, ran, away]; "away" is the bonus

Shapes: N tree rows, S cache slots. Paper: DynaTree v2, sections 3.4 and 3.5.
"""

import torch
from torch import Tensor

from draft_tree import Tree
from engine.sampling import Sampler


def tree_mask(ancestors: Tensor, length: int) -> Tensor:
    """The tree attention mask A [N, length + N] bool: the whole prefix, then own ancestors."""
    prefix = ancestors.new_ones(len(ancestors), length)
    return torch.cat([prefix, ancestors], dim=1)


def tree_positions(depths: Tensor, length: int) -> Tensor:
    """Each node's position [N] int64, its distance from the start of the text.

    Not its row: siblings stand at the same position, and a rotary embedding at any other one
    gives other logits than decoding the path token by token (the paper's own code has this wrong).
    """
    return depths + length


def accept_greedy(tree: Tree, predictions: Tensor) -> tuple[list[int], list[int]]:
    """The longest path that the target agrees with, and what it says after each of its rows.

    predictions: [N] int64 on the host, the target's argmax after each node. Returns rows, root
    first, and as many tokens, the bonus token last. A node agrees if its token is the prediction at
    its parent; siblings carry distinct tokens, so the agreeing path is unique.
    """
    columns = torch.stack((tree.tokens, tree.parents, predictions))
    tokens, parents, predicted = columns.tolist()  # a walk costs less than a pass
    rows = {place: row for row, place in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    while (row := rows.get((path[-1], predicted[path[-1]]))) is not None:
        path.append(row)
    return path, [predicted[row] for row in path]


def accept_sampled(
    tree: Tree, target_probs: Tensor, sampler: Sampler
) -> tuple[list[int], list[int]]:
    """Accept a path so that the text is distributed as the target's own samples would be.

    target_probs: [N, V] float32, warped. Returns the accepted rows, root first, and the token that
    follows each of them, the bonus token last.

    At each node the children are tried in order. A rejected child leaves the residual, the target's
    distribution less what the rejection has accounted for; the bonus token is drawn from what is
    left after the last one. Leviathan et al. 2023, section 2; DySpec, Algorithm 3, whose coin
    N(0, 1) is a misprint.
    """
    tokens, slots = tree.tokens.tolist(), tree.draft_slots.tolist()
    no_row = torch.zeros_like(tree.tokens)
    is_retrieved = (no_row if tree.is_retrieved is None else tree.is_retrieved).tolist()
    children: list[list[int]] = [[] for _ in tokens]
    for row, parent in enumerate(tree.parents.tolist()[1:], start=1):
        children[parent].append(row)
    path = [0]
    while True:
        row = path[-1]
        residual, draft_probs = target_probs[row], None  # [V]
        if slots[row] >= 0 and tree.draft_probs is not None:
            draft_probs = tree.draft_probs[slots[row]]
        for child in children[row]:  # the drawn ones first
            drawn_from = None if is_retrieved[child] else draft_probs
            is_accepted, residual, left = try_child(
                tokens[child], residual, drawn_from, sampler.coin()
            )
            draft_probs = draft_probs if is_retrieved[child] else left
            if is_accepted:
                path.append(child)
                break
        else:
            bonus = int(sampler.draw(residual[None], 1))
            return path, [*(tokens[row] for row in path[1:]), bonus]


def try_child(
    token: int, residual: Tensor, draft_probs: Tensor | None, coin: float
) -> tuple[bool, Tensor, Tensor | None]:
    """Whether one child is accepted, and what a rejection leaves of both distributions.

    residual: [V], of the target. draft_probs: [V or fewer], what the child was drawn from; None for
    a child that the draft's ranking chose.
    """
    # A child that was not drawn is drawn from a one-hot distribution: probability 1 on itself.
    drawn_with = 1.0 if draft_probs is None else draft_probs[token]
    if coin < residual[token] / drawn_with:
        return True, residual, draft_probs
    rest = residual.clone()
    if draft_probs is None:
        rest[token] = 0.0
    else:
        rest[: len(draft_probs)] -= draft_probs
        rest.clamp_(min=0.0)
        # The next sibling was drawn from what this one left, so its chance is relative to that.
        draft_probs = draft_probs.index_fill(0, torch.tensor(token, device=rest.device), 0.0)
        draft_probs /= draft_probs.sum()
    mass = rest.sum()
    if mass == 0:  # nothing else is possible: only rounding kept the ratio from 1
        return True, residual, draft_probs
    return False, rest / mass, draft_probs
