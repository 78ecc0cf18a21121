"""Two more acceptances of sampled text, and which one a run goes by.

token      from the root down, child by child (sampling.py)
block      a chain as a whole, from its end (Block Verification, Sun et al. 2024)
traversal  the same of a tree, from its leaves (Traversal Verification, Weng et al. 2025)

By token, what is below a rejected token is lost. From the end it is not: a likely token makes up
for an unlikely one before it. Of two ids A and B, if the target gives 1/3 and 2/3 everywhere and
the draft 2/3 and 1/3, the chain A, B is drafted with chance 2/9 and written with chance 2/9:

    token      A is kept with chance (1/3) / (2/3) = 1/2; if so, B with chance 1
    block      weight of A: 1/2; of A, B: min(1/2 x (2/3) / (1/3), 1) = 1, so both are kept always

and over all chains 11/9 drafted tokens are kept for 10/9.

Why the law holds: to the three lines of sampling.py add that a row has a weight w, its chance to be
kept, which no coin has settled yet (by token it is 1 or 0 before a child is tried). Then:

1  a child x, drawn from d, has the weight min(w R(x) / d(x), 1): kept, it accounts for min(w R, d)
2  the rest, max(w R - d, 0), of mass S, is left to the S + 1 - w cases in which it is not kept
3  so the row goes on with the weight S / (S + 1 - w) and R = the rest / S, as without it

Hence the row that was drawn last, a leaf and its parent's youngest child, may be taken away, and
the law of the text is the same; then the one before, until the root is alone.

A rejected child that was not drawn is in no residual, so a path ends just where the text leaves the
tree: where no child is drawn, all three keep as many tokens, and `token` is the least work.

Shapes: N tree rows, g drafted tokens of a chain, V vocabulary.
"""

import torch
from torch import Tensor

from draft_tree import Rule, Tree
from sampling import (
    Acceptance,
    Sampler,
    accept_by_token,
    draft_probs_of,
    tokens_of,
    toss,
    try_child,
    without,
)


def accept_by_block(tree: Tree, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
    """Accept the longest part of a chain that a coin keeps, tried from the end.

    Coin for coin it accepts what accept_by_traversal does, but that one reads once for each row
    tried; here it is twice, and as there once more for the bonus.
    """
    g = len(tree) - 1
    target_probs = sampler.warp(logits)  # [g + 1, V]
    if g == 0:
        return [0], tokens_of(tree, [0], target_probs[0], sampler)
    parts = [child_drawn_from(tree, row, target_probs) for row in range(1, g + 1)]
    draft_probs = torch.stack(parts)  # [g, V]
    drafted = torch.tensor(tree.tokens[1:], device=logits.device).unsqueeze(1)  # [g, 1]
    ratios = target_probs[:-1].gather(1, drafted) / draft_probs.gather(1, drafted)
    weights = [1.0]  # of each row
    for ratio in ratios.squeeze(1).tolist():
        if weights[-1]:  # what is below a row without weight is not tried
            weights.append(min(weights[-1] * ratio, 1.0))
    n = last = len(weights) - 1
    carried = target_probs[:last] * target_probs.new_tensor(weights[:last]).unsqueeze(1)
    rests = (carried - draft_probs[:last]).clamp_(min=0.0)  # [last, V], after each row before it
    masses = rests.sum(dim=1).tolist()
    chance = weights[last]
    while n and not toss(sampler, n, chance, masses[n - 1]):
        n -= 1
        chance = weight_left(weights[n], masses[n])
    path = list(range(n + 1))
    residual = rests[n] / masses[n] if n < last and masses[n] else target_probs[n]
    return path, tokens_of(tree, path, residual, sampler)


def accept_by_traversal(
    tree: Tree, logits: Tensor, sampler: Sampler
) -> tuple[list[int], list[int]]:
    """Accept the first row that a coin keeps, children before their parent, elder ones first.

    Where the paper leaves it open: which rows there are may depend on earlier draws, and children
    may be ranked or retrieved (this file's beginning says why).
    """
    target_probs = sampler.warp(logits)  # [N, V]
    families: list[list[int]] = [[] for _ in range(len(tree))]
    for row in range(1, len(tree)):
        families[tree.parents[row]].append(row)

    def visit(row: int, weight: float, left: float) -> tuple[list[int], Tensor] | None:
        """The path from a row on that is kept, and what the bonus is drawn from; None if the row is
        not. left: of the target's distribution after the row above, if this one is not kept."""
        residual = target_probs[row]
        draft_probs = draft_probs_of(tree, row, residual)
        for child in families[row]:
            if not weight:
                break
            token = tree.tokens[child]
            drawn_from = None if tree.are_retrieved[child] else draft_probs
            ratio, rest, mass = try_child(token, residual * weight, drawn_from)
            # If nothing else is possible, only rounding keeps the ratio from 1
            chance = min(ratio, 1.0) if mass or weight < 1 else 1.0
            found = visit(child, chance, mass)
            if found:
                return [row, *found[0]], found[1]
            weight, residual = weight_left(weight, mass), rest / mass
            if drawn_from is not None:
                draft_probs = without(token, drawn_from)
        is_kept = row == 0 or toss(sampler, row, weight, left)
        return ([row], residual) if is_kept else None

    path, residual = visit(0, 1.0, 0.0)
    return path, tokens_of(tree, path, residual, sampler)


ACCEPTANCES = {"token": accept_by_token, "block": accept_by_block, "traversal": accept_by_traversal}

# What a run goes by that does not choose, by what its rule's trees are. Of drawn trees of one shape
# traversal keeps a tenth more (measured); of those that the draft shapes no more, for more reads
DEFAULTS = {
    "ranked": "token",
    "drawn chain": "block",
    "drawn tree of one shape": "traversal",
    "drawn tree": "token",
}


def default_of(rule: Rule) -> str:
    """The name of the acceptance of a rule that brings none of its own, if the run chooses none."""
    kind = "ranked"
    if rule.is_drawing:
        shape = "" if rule.goes_by_probs else " of one shape"
        kind = "drawn chain" if rule.is_chain else f"drawn tree{shape}"
    return DEFAULTS[kind]


def choose_acceptance(rule: Rule, name: str | None) -> Acceptance:
    """The acceptance of this name; None: the rule's own, or by the kind of its trees. Raises
    ValueError if the rule's trees are no chains, or it has one of its own."""
    if name is None:
        return rule.acceptance or ACCEPTANCES[default_of(rule)]
    if name not in ACCEPTANCES:
        raise ValueError(f"no acceptance is called {name!r}; there are {', '.join(ACCEPTANCES)}")
    if rule.acceptance:
        raise ValueError(f"{name}: the method brings an acceptance of its own")
    if name == "block" and not rule.is_chain:
        raise ValueError("block is for chains, and the method makes trees; traversal is for both")
    return ACCEPTANCES[name]


def child_drawn_from(tree: Tree, row: int, like: Tensor) -> Tensor:
    """What the only child of the row before this one was drawn from, [V]."""
    probs = None if tree.are_retrieved[row] else draft_probs_of(tree, row - 1, like)
    if probs is None:
        probs = torch.zeros_like(like[0])
        probs[tree.tokens[row]] = 1.0
    return probs


def weight_left(weight: float, mass: float) -> float:
    """The weight of a row whose child has been rejected, and has left so much mass."""
    left = mass + (1 - weight)
    return mass / left if left else 1.0  # if nothing is left, only rounding has rejected the child
