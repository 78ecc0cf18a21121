"""Verifying a tree: which slots each node may see, and which path the target accepts.

Functions of tensors, and for sampled text of a sampler: no model, no cache, no tokenizer. In the
example of draft_tree.py the target says: after "the" comes "cat", after "the cat" comes "ran",
after "the cat ran" comes "away":

    predictions[row] = cat  ran  ...  ...  away  ...
    accept_greedy(tree, predictions) -> rows [0, 1, 4], tokens [cat, ran, away]; "away" is the bonus

Shapes: N tree rows, S cache slots, V vocabulary. Paper: DynaTree v2, sections 3.4 and 3.5.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draft_tree import Tree, to_host
from engine.sampling import Sampler


class NonFiniteLogits(Exception):
    """The target produced infinite or undefined logits, so it has no next token."""


def tree_mask(ancestors: Tensor, length: int) -> Tensor:
    """The tree attention mask A [N, length + N] bool: the whole prefix, then own ancestors.

    Node i is written to slot length + i, so column length + j is node j.
    """
    prefix = ancestors.new_ones(len(ancestors), length)
    return torch.cat([prefix, ancestors], dim=1)


def tree_positions(depths: Tensor, length: int) -> Tensor:
    """Each node's position [N] int64, its distance from the start of the text.

    Not its row: siblings stand at the same position, and a rotary embedding at any other one
    gives other logits than decoding the path token by token (the paper's own code has this wrong).
    """
    return depths + length


def accept(tree: Tree, logits: Tensor, sampler: Sampler | None) -> tuple[list[int], list[int]]:
    """What a step commits: the accepted rows, root first, and the id that the target puts after
    each, the bonus token last.

    logits: [N, V] of the tree's rows. Raises NonFiniteLogits if the root's are not finite, so that
    an error takes back nothing that was right; a path ends before any other row whose logits are
    not.
    """
    best, predictions = to_host(*logits.max(dim=-1))  # [N] each, by one read
    if sampler is None:
        path, tokens = accept_greedy(tree, predictions)
    else:
        path, tokens = accept_sampled(tree, sampler.warp(logits), sampler)
    best = best.tolist()  # a row that holds inf or nan has it here
    n_finite = 0
    while n_finite < len(path) and math.isfinite(best[path[n_finite]]):
        n_finite += 1
    if not n_finite:
        raise NonFiniteLogits(
            "the target's logits are not finite: some product overflows in this dtype (small "
            "Pythia models do in float16); try --dtype bfloat16"
        )
    return path[:n_finite], tokens[:n_finite]


def cut(tokens: list[int], eos_ids: Sequence[int], limit: int) -> list[int]:
    """Newly committed ids up to the limit and up to the first EOS, which is kept."""
    tokens = tokens[:limit]
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens


def accept_greedy(tree: Tree, predictions: Tensor) -> tuple[list[int], list[int]]:
    """The longest path that the target agrees with, and what it says after each of its rows.

    predictions: [N] int64 on the host, the target's argmax after each node. Returns rows, root
    first, and as many tokens, the bonus token last. A node agrees if its token is the prediction at
    its parent; siblings carry distinct tokens, so the agreeing path is unique.
    """
    tokens = tree.tokens.tolist()
    parents = tree.parents.tolist()
    predicted = predictions.tolist()
    path = [0]
    for row in range(1, len(tokens)):  # a parent precedes its children, so one walk finds the path
        last = path[-1]
        if parents[row] == last and tokens[row] == predicted[last]:
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
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for row, parent in enumerate(tree.parents.tolist()[1:], start=1):
        children[parent].append(row)
    path = [0]
    tokens = []
    while True:
        child, residual = accept_child(tree, children[path[-1]], path[-1], target_probs, sampler)
        if child is None:
            bonus = int(sampler.draw(residual[None], 1))
            return path, [*tokens, bonus]
        path.append(child)
        tokens.append(int(tree.tokens[child]))


def accept_child(
    tree: Tree, children: list[int], row: int, target_probs: Tensor, sampler: Sampler
) -> tuple[int | None, Tensor]:
    """The first of a row's children that is accepted, if any, and the residual [V] it leaves."""
    residual = target_probs[row]  # [V]
    draft_probs = None
    slot = int(tree.draft_slots[row])
    if slot >= 0 and tree.draft_probs is not None:
        draft_probs = tree.draft_probs[slot]  # [V or fewer], what children were drawn from
    for child in children:  # the drawn ones first
        token = int(tree.tokens[child])
        if tree.is_retrieved is not None and tree.is_retrieved[child]:
            is_accepted, residual, _ = try_child(token, residual, None, sampler.coin())
        else:
            is_accepted, residual, draft_probs = try_child(
                token, residual, draft_probs, sampler.coin()
            )
        if is_accepted:
            return child, residual
    return None, residual


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
