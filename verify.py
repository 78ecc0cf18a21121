"""Verifying a tree: what the target's pass over it is given, and which path it accepts.

Functions of trees, logits and a sampler: no model, no cache, no tokenizer. In the example of
draft_tree.py the target says: after "the" comes "cat", after "the cat" comes "ran", after "the cat
ran" comes "away":

    best[row] = cat  ran  ...  ...  away  ...
    accept_greedy(tree, best) -> rows [0, 1, 4], tokens [cat, ran, away]; "away" is the bonus

Shapes: N tree rows, S cache slots, V vocabulary. Paper: DynaTree v2, sections 3.4 and 3.5.
"""

import math
from collections.abc import Sequence

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from draft_tree import Acceptance, Settings, Tree
from engine.sampling import Sampler
from engine.scores import Scores


class NonFiniteLogits(Exception):
    """The target produced infinite or undefined logits, so it has no next token."""


def tree_pass(tree: Tree, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a pass over the tree is given, above `length` committed tokens: tokens [N], positions
    [N] and the mask [N, N] bool, None for a lone root; on the host.

    Node i is written to slot length + i, sees all that is committed, its ancestors and itself, and
    stands at its distance from the start of the text. Not at its row: siblings stand at the same
    position, and a rotary embedding at any other one gives other logits than decoding the path
    token by token (the paper's own code has this wrong).
    """
    n = len(tree)
    tokens = torch.from_numpy(numpy.array(tree.tokens))
    positions = torch.from_numpy(numpy.array(tree.depths) + length)
    if n == 1:
        return tokens, positions, None
    mask = numpy.eye(n, dtype=bool)
    for row in range(1, n):
        mask[row] |= mask[tree.parents[row]]  # a parent comes first, so its row is whole
    return tokens, positions, torch.from_numpy(mask)


def accept(
    tree: Tree, scores: Scores, sampler: Sampler | None, acceptance: Acceptance, settings: Settings
) -> tuple[list[int], list[int]]:
    """What a step commits: the accepted rows, root first, and the id that the target puts after
    each, the bonus token last.

    scores: of the tree's rows. acceptance: of sampled text; greedily no other is possible. Raises
    NonFiniteLogits if the root's are not finite, so that an error takes back nothing that was
    right; a path ends before any other row whose logits are not.
    """
    if sampler is None:
        path, tokens = accept_greedy(tree, scores.best.tolist())
    else:
        path, tokens = acceptance(tree, scores.logits, sampler, settings)
    highest = scores.highest.tolist()  # a row that holds inf or nan has it here
    n_finite = 0
    while n_finite < len(path) and math.isfinite(highest[path[n_finite]]):
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


def accept_greedy(tree: Tree, best: list[int]) -> tuple[list[int], list[int]]:
    """The longest path that the target agrees with, and what it says after each of its rows.

    best: [N], the target's argmax after each node. Returns rows, root first, and as many tokens,
    the bonus token last. A node agrees if its token is the best at its parent; siblings carry
    distinct tokens, so the agreeing path is unique.
    """
    path = [0]
    for row in range(1, len(tree)):  # a parent precedes its children, so one walk finds the path
        last = path[-1]
        if tree.parents[row] == last and tree.tokens[row] == best[last]:
            path.append(row)
    return path, [best[row] for row in path]


def accept_sampled(
    tree: Tree, logits: Tensor, sampler: Sampler, settings: Settings
) -> tuple[list[int], list[int]]:
    """Accept a path so that the text is distributed as the target's own samples would be.

    logits: [N, V]. Returns the accepted rows, root first, and the token that follows each of them,
    the bonus token last.

    At each node the children are tried in order. A rejected child leaves the residual, the target's
    distribution less what the rejection has accounted for; the bonus token is drawn from what is
    left after the last one. Leviathan et al. 2023, section 2; DySpec, Algorithm 3, whose coin
    N(0, 1) is a misprint.
    """
    # On a GPU launches take the time, so all rows are warped at once; else those that are reached
    probs = sampler.warp(logits) if logits.device.type == "cuda" else None  # [N, V]

    def target_probs(row: int) -> Tensor:
        return sampler.warp(logits[row : row + 1])[0] if probs is None else probs[row]

    path = [0]
    residual = target_probs(0)  # [V]
    draft_probs = draft_probs_of(tree, 0, residual)  # [V], what the next child was drawn from
    for row in range(1, len(tree)):  # a node's children stand after it, in their order
        if tree.parents[row] != path[-1]:
            continue
        token = tree.tokens[row]
        is_drawn = draft_probs is not None and not tree.are_retrieved[row]
        chance, rest, mass = try_child(token, residual, draft_probs if is_drawn else None)
        coin = sampler.coin()
        sampler.tell(row, chance, coin, left=mass)
        if coin < chance:
            path.append(row)
            residual = target_probs(row)
            draft_probs = draft_probs_of(tree, row, residual)
        else:
            residual = rest / mass
            if is_drawn:
                draft_probs = without(token, draft_probs)
    bonus = int(sampler.draw(residual.unsqueeze(0), 1))
    return path, [tree.tokens[row] for row in path[1:]] + [bonus]


def draft_probs_of(tree: Tree, row: int, like: Tensor) -> Tensor | None:
    """What a row's children were drawn from, [V], 0 for ids that the draft has not; None if it has
    no drawn ones."""
    slot = tree.draft_slots[row]
    if slot < 0 or not tree.drawn_from:
        return None
    probs = tree.drawn_from[slot]
    n_unknown = len(like) - len(probs)
    return F.pad(probs, (0, n_unknown)) if n_unknown else probs


def try_child(
    token: int, residual: Tensor, drawn_from: Tensor | None
) -> tuple[float, Tensor, float]:
    """A child's chance of acceptance; what a rejection leaves of the target's distribution [V], and
    how much that is. One read.

    drawn_from: [V]; None for a child that was not drawn, which is as if it had been drawn from a
    distribution of probability 1 on itself.
    """
    chance = residual[token]
    if drawn_from is None:
        rest = residual.clone()
        rest[token].zero_()
    else:
        chance = chance / drawn_from[token]
        rest = (residual - drawn_from).clamp_(min=0.0)
    chance, mass = torch.stack((chance, rest.sum())).tolist()
    # If nothing else is possible, only rounding keeps the ratio from 1
    return chance if mass else 1.0, rest, mass


def without(token: int, draft_probs: Tensor) -> Tensor:
    """What the next sibling was drawn from: what the draw of a token has left."""
    rest = draft_probs.clone()
    rest[token].zero_()
    return rest / rest.sum()
