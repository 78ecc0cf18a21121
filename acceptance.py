"""Accepting sampled text: which drafted tokens are kept, so that each text is as likely as from the
target alone. Three ways, each a function of tree, logits and sampler; a run chooses by name.

token      from the root down, child by child (Leviathan et al. 2023; DySpec, Algorithm 3)
block      a chain as a whole, from its end (Block Verification, Sun et al. 2024)
traversal  the same of a tree, from its leaves (Traversal Verification, Weng et al. 2025)

By token, what is below a rejected token is lost. From the end it is not: a likely token makes up
for an unlikely one before it. Of two ids A and B, if the target gives 1/3 and 2/3 everywhere and
the draft 2/3 and 1/3, the chain A, B is drafted with chance 2/9 and written with chance 2/9:

    token      A is kept with chance (1/3) / (2/3) = 1/2; if so, B with chance 1
    block      weight of A: 1/2; of A, B: min(1/2 x (2/3) / (1/3), 1) = 1, so both are kept always

and over all chains 11/9 drafted tokens are kept for 10/9.

Why the law holds. A row has a weight w, its chance to be kept, and a residual R, what the target
says after it. A child x, drawn from d, has the weight min(w R(x) / d(x), 1), so that kept children
account for min(w R, d) of w R. The rest, max(w R - d, 0), of mass S, is left to the S + 1 - w cases
in which the child is rejected: then the row's weight is S / (S + 1 - w), its residual the rest / S,
and the next child is drawn from what the draw of x has left of d. So a row is kept, and goes on, as
if it had no such child. Hence the row that was drawn last, a leaf and its parent's youngest child,
may be taken away, and the law of the text is the same; then the one before, until the root is
alone. That asks no more of a tree than that no row depends on draws after its own. By token is the
same, but that a child's coin settles its weight, to 1 or 0, before what is below it is looked at.

A child that was not drawn, ranked or retrieved, is drawn from a distribution of probability 1 on
itself. A rejected one is then in no residual, so a path ends just where the text leaves the tree:
where no child is drawn, all three keep as many tokens, and `token` is the least work.

Shapes: N tree rows, g drafted tokens of a chain, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_tree import Acceptance, Rule, Tree
from engine.sampling import Sampler


def accept_by_token(tree: Tree, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
    """Accept a path from the root down; logits: [N, V].

    Returns, as all three do, the accepted rows, root first, and the token that follows each of
    them, the bonus token last. At each row the children are tried in order; the bonus is drawn from
    what they leave. DySpec's coin N(0, 1) is a misprint.
    """
    target_probs = sampler.warp(logits)  # [N, V]
    path = [0]
    residual = target_probs[0]
    draft_probs = draft_probs_of(tree, 0, residual)  # [V], what the next child was drawn from
    for row in range(1, len(tree)):  # a node's children stand after it, in their order
        if tree.parents[row] != path[-1]:
            continue
        drawn_from = None if tree.are_retrieved[row] else draft_probs
        chance, rest, mass = try_child(tree.tokens[row], residual, drawn_from)
        if toss(sampler, row, chance, mass):
            path.append(row)
            residual = target_probs[row]
            draft_probs = draft_probs_of(tree, row, residual)
        else:
            residual = rest / mass
            if drawn_from is not None:
                draft_probs = without(tree.tokens[row], drawn_from)
    return path, tokens_of(tree, path, residual, sampler)


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
            chance, rest, mass = try_child(token, residual, drawn_from, weight)
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


def draft_probs_of(tree: Tree, row: int, like: Tensor) -> Tensor | None:
    """What a row's children were drawn from, [V], 0 for ids that the draft has not; None if it has
    no drawn ones."""
    slot = tree.draft_slots[row]
    if slot < 0 or not tree.drawn_from:
        return None
    probs = tree.drawn_from[slot]
    n_unknown = like.shape[-1] - len(probs)
    return F.pad(probs, (0, n_unknown)) if n_unknown else probs


def child_drawn_from(tree: Tree, row: int, like: Tensor) -> Tensor:
    """What the only child of the row before this one was drawn from, [V]."""
    probs = None if tree.are_retrieved[row] else draft_probs_of(tree, row - 1, like)
    if probs is None:
        probs = torch.zeros_like(like[0])
        probs[tree.tokens[row]] = 1.0
    return probs


def try_child(
    token: int, residual: Tensor, drawn_from: Tensor | None, weight: float = 1.0
) -> tuple[float, Tensor, float]:
    """A child's chance of acceptance; what a rejection leaves of the target's distribution [V], and
    how much that is. One read.

    drawn_from: [V]; None for a child that was not drawn, which is as if it had been drawn from a
    distribution of probability 1 on itself. weight: of the row above.
    """
    rest = residual * weight
    if drawn_from is None:
        chance = rest[token].clone()
        rest[token].zero_()
    else:
        chance = rest[token] / drawn_from[token]
        rest.sub_(drawn_from).clamp_(min=0.0)
    chance, mass = torch.stack((chance, rest.sum())).tolist()
    # If nothing else is possible, only rounding keeps the ratio from 1
    return min(chance, 1.0) if mass or weight < 1 else 1.0, rest, mass


def weight_left(weight: float, mass: float) -> float:
    """The weight of a row whose child has been rejected, and has left so much mass."""
    left = mass + (1 - weight)
    return mass / left if left else 1.0  # if nothing is left, only rounding has rejected the child


def without(token: int, draft_probs: Tensor) -> Tensor:
    """What the next sibling was drawn from: what the draw of a token has left."""
    rest = draft_probs.clone()
    rest[token].zero_()
    return rest / rest.sum()


def toss(sampler: Sampler, row: int, chance: float, left: float) -> bool:
    """Whether a row's coin keeps it; who watches is told."""
    coin = sampler.coin()
    sampler.tell(row, chance, coin, left)
    return coin < chance


def tokens_of(tree: Tree, path: list[int], residual: Tensor, sampler: Sampler) -> list[int]:
    """A path's tokens and the bonus, drawn from the residual [V]."""
    bonus = int(sampler.draw(residual.unsqueeze(0), 1)[0])
    return [tree.tokens[row] for row in path[1:]] + [bonus]
