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
import torch.nn.functional as F
from torch import Tensor

from draft_tree import Tree
from engine.sampling import Sampler
from engine.scores import Scores


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


def accept(tree: Tree, scores: Scores, sampler: Sampler | None) -> tuple[list[int], list[int]]:
    """What a step commits: the accepted rows, root first, and the id that the target puts after
    each, the bonus token last.

    scores: of the tree's rows. Raises NonFiniteLogits if the root's are not finite, so that an
    error takes back nothing that was right; a path ends before any other row whose logits are not.
    """
    best, predictions = scores.best()  # [N] each
    if sampler is None:
        path, tokens = accept_greedy(tree, predictions)
    else:
        path, tokens = accept_sampled(tree, scores.logits, sampler)
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


def accept_sampled(tree: Tree, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
    """Accept a path so that the text is distributed as the target's own samples would be.

    logits: [N, V]. Returns the accepted rows, root first, and the token that follows each of them,
    the bonus token last.

    At each node the children are tried in order. A rejected child leaves the residual, the target's
    distribution less what the rejection has accounted for; the bonus token is drawn from what is
    left after the last one. Leviathan et al. 2023, section 2; DySpec, Algorithm 3, whose coin
    N(0, 1) is a misprint.
    """
    families = list_families(tree)
    chances, residuals = try_families(tree, families, logits, sampler)
    path = [0]
    child = first_accepted(families.get(0, []), chances, sampler)
    while child is not None:
        path.append(child)
        child = first_accepted(families.get(child, []), chances, sampler)
    last = path[-1]
    if last in families:
        place = list(families).index(last)
        residual = residuals[len(families[last]) - 1][place : place + 1]  # [1, V]
    else:
        residual = sampler.warp(logits[last : last + 1])
    bonus = int(sampler.draw(residual, 1))
    return path, [*tree.tokens[path[1:]].tolist(), bonus]


def list_families(tree: Tree) -> dict[int, list[int]]:
    """The children of each row that has any, in order; the largest families first."""
    families: dict[int, list[int]] = {}
    for child, parent in enumerate(tree.parents.tolist()[1:], start=1):
        families.setdefault(parent, []).append(child)
    return dict(sorted(families.items(), key=lambda family: -len(family[1])))


def first_accepted(children: list[int], chances: dict[int, float], sampler: Sampler) -> int | None:
    """The first child whose coin says yes."""
    for child in children:
        if sampler.coin() < chances[child]:
            return child
    return None


def try_families(
    tree: Tree, families: dict[int, list[int]], logits: Tensor, sampler: Sampler
) -> tuple[dict[int, float], list[Tensor]]:
    """Each child's chance, by row, if its elder siblings are rejected; and by rank the residuals
    [families that have one of this rank, V] if it is rejected too.

    No coin enters here, so the whole tree is tried at once, eldest children first, and read once.
    """
    if not families:
        return {}, []
    drawn = drawn_rows(tree)
    rows, slots, tokens, is_drawn = lay_out(tree, families, drawn, logits.device)
    residual = sampler.warp(logits.index_select(0, rows))  # [P, V], of P families
    draft_probs = None
    if tree.draft_probs is not None:
        n_unknown = residual.shape[1] - tree.draft_probs.shape[1]  # ids that the draft has not
        draft_probs = F.pad(tree.draft_probs.index_select(0, slots), (0, n_unknown))  # [P, V]
    order = []
    chances = []
    residuals = []
    for rank in range(tokens.shape[1]):
        members = [children[rank] for children in families.values() if len(children) > rank]
        n = len(members)  # the first n families have one
        token = tokens[:n, rank : rank + 1]  # [n, 1]
        residual = residual[:n]
        drawn_from = None
        if any(drawn[child] for child in members):
            drawn_from = draft_probs = draft_probs[:n]
            draft_probs = without(token, draft_probs)
            if not all(drawn[child] for child in members):
                others = one_hot(token, residual.shape[1])
                drawn_from = torch.where(is_drawn[:n, rank : rank + 1], drawn_from, others)
        chance, residual = try_children(token, residual, drawn_from)
        order += members
        chances.append(chance)
        residuals.append(residual)
    return dict(zip(order, torch.cat(chances).tolist(), strict=True)), residuals


def lay_out(
    tree: Tree, families: dict[int, list[int]], drawn: list[bool], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of P families with C children or fewer: the parents' rows and draft slots [P] int64, the
    children's tokens [P, C], and whether they were drawn [P, C] bool; by one copy."""
    n_most = len(next(iter(families.values())))
    tokens = tree.tokens.tolist()
    slots = tree.draft_slots.tolist()
    lines = []
    for row, children in families.items():
        padding = [0] * (n_most - len(children))
        ids = [tokens[child] for child in children] + padding
        are_drawn = [drawn[child] for child in children] + padding
        lines.append([row, max(slots[row], 0)] + ids + are_drawn)
    table = torch.tensor(lines).to(device, non_blocking=True)
    return table[:, 0], table[:, 1], table[:, 2 : 2 + n_most], table[:, 2 + n_most :].bool()


def drawn_rows(tree: Tree) -> list[bool]:
    """Which nodes were drawn from the draft's distribution, not chosen by their rank."""
    if tree.draft_probs is None:
        return [False] * len(tree)
    if tree.is_retrieved is None:
        return [True] * len(tree)
    return (~tree.is_retrieved).tolist()


def one_hot(token: Tensor, n_ids: int) -> Tensor:
    """A distribution [n, V] of probability 1 on each token [n, 1]."""
    probs = torch.zeros(len(token), n_ids, device=token.device)
    return probs.scatter_(1, token, 1.0)


def without(token: Tensor, draft_probs: Tensor) -> Tensor:
    """What the next sibling was drawn from, [n, V]: what the draw of a token [n, 1] has left."""
    rest = draft_probs.scatter(1, token, 0.0)
    return rest / rest.sum(dim=1, keepdim=True)


def try_children(
    token: Tensor, residual: Tensor, drawn_from: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One child of each of n parents: its chance of acceptance [n], and what a rejection leaves of
    the target's distribution [n, V].

    token: [n, 1]. residual, drawn_from: [n, V]; None for children that were not drawn, which is as
    if each had been drawn from a distribution of probability 1 on itself.
    """
    chance = residual.gather(1, token)
    if drawn_from is None:
        rest = residual.scatter(1, token, 0.0)
    else:
        chance = chance / drawn_from.gather(1, token)
        rest = (residual - drawn_from).clamp_(min=0.0)
    mass = rest.sum(dim=1, keepdim=True)
    # If nothing else is possible, only rounding keeps the ratio from 1
    chance = chance.masked_fill(mass == 0, 1.0)
    return chance.squeeze(1), rest / mass
