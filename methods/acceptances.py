"""Three acceptances of sampled text whose candidates may be drawn, and which one a method gets.

token      from the root down, child by child
block      a chain as a whole, from its end (Block Verification, Sun et al. 2024)
traversal  the same for a tree, from its leaves (Traversal Verification, Weng et al. 2025)

Token. At an accepted row, let R be the target's distribution of the next token, and x a child that
was drawn from d (Leviathan et al. 2023; DySpec, Algorithm 3, whose N(0, 1) is a misprint):

1  x is drawn and accepted with probability d(x) min(R(x) / d(x), 1) = min(R, d)(x)
2  otherwise R becomes max(R - d, 0), normalised: what min(R, d) has left of R
3  so to accept x, or to go on with what is left, is to draw from R

The next child was drawn from what the draw of x has left of d. A child that was not drawn counts as
drawn from a distribution of probability 1 on itself, which is the core's acceptance (sampling.py).

Block and traversal. By token, what is below a rejected token is lost. From the end it is not: a
likely token makes up for an unlikely one before it. Of two ids A and B, if the target gives 1/3 and
2/3 everywhere and the draft 2/3 and 1/3, the chain A, B is drafted with probability 2/9 and written
with probability 2/9:

    token      A is accepted with probability (1/3) / (2/3) = 1/2; if so, B with probability 1
    block      weight of A: 1/2; of A, B: min(1/2 x (2/3) / (1/3), 1) = 1, so both are accepted

and over all chains 11/9 drafted tokens are accepted instead of 10/9.

They are exact, because each row has a weight w, the probability that it is accepted, which no
random number has settled yet (by token it is 1 or 0 before a child is tried). Then:

1  a child x, drawn from d, has the weight min(w R(x) / d(x), 1): accepted, it accounts for
   min(w R, d)
2  the rest, max(w R - d, 0), of mass S, is left to the S + 1 - w cases in which it is not accepted
3  so the row goes on with the weight S / (S + 1 - w) and R = the rest / S, as without the child

So the row that was drawn last, a leaf and its parent's last child, can be removed, and the
distribution of the text is the same; then the row before it, until the root is alone.

A rejected child that was not drawn is in no residual, so a path ends just where the text leaves the
tree. Where no child is drawn, all three accept as many tokens, and `token` is the least work.

Shapes: N tree rows, g drafted tokens of a chain, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_tree import Tree
from dynatree import Drafter
from methods.drawn import DrawnDrafter
from methods.rules import MethodRule, are_retrieved
from methods.sampler import DrawingSampler
from verify import finite_rows

# accept(tree, target_probs [N, V], sampler, draft_probs) -> the accepted rows, the root first, and
# the token after each of them, the bonus token last. draft_probs: [V] by draft slot, what the
# children of a row were drawn from; empty if no candidate was drawn
DrawnAcceptance = Callable[
    [Tree, Tensor, DrawingSampler, list[Tensor]], tuple[list[int], list[int]]
]


class Accept:
    """The verify.Acceptance of sampled text: one of this file's, with what it needs."""

    def __init__(
        self,
        accept: DrawnAcceptance,
        sampler: DrawingSampler,
        drafter: Drafter | None,
        finite_rows: Callable[[Tensor], list[bool]] = finite_rows,
    ):
        """finite_rows: verify.finite_rows, or a faster function that does the same."""
        self.accept, self.sampler, self.drafter = accept, sampler, drafter
        self.finite_rows = finite_rows

    def __call__(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        is_finite = self.finite_rows(logits)
        if not all(is_finite):  # the path is cut before such a row, so any numbers will do there
            logits = logits.clone()
            logits[[row for row, finite in enumerate(is_finite) if not finite]] = 0.0
        draft_probs = self.drafter.probs if isinstance(self.drafter, DrawnDrafter) else []
        target_probs = self.sampler.target_distribution(logits)
        path, tokens = self.accept(tree, target_probs, self.sampler, draft_probs)
        n = next((n for n, row in enumerate(path) if not is_finite[row]), len(path))
        return path[:n], tokens[:n]


def accept_by_token(
    tree: Tree, target_probs: Tensor, sampler: DrawingSampler, draft_probs: list[Tensor]
) -> tuple[list[int], list[int]]:
    """Accept from the root down, child by child in their order (a DrawnAcceptance)."""
    retrieved = are_retrieved(tree)
    path = [0]
    residual = target_probs[0]  # R
    drawn_from = drawn_from_below(tree, 0, residual, draft_probs)  # d, of the next drawn child
    for row in range(1, len(tree)):
        if tree.parents[row] != path[-1]:
            continue
        token, proposal = tree.tokens[row], None if retrieved[row] else drawn_from
        ratio, rest, mass = try_child(token, residual, proposal)
        # If nothing else is possible, only rounding keeps the ratio from 1
        probability = min(ratio, 1.0) if mass else 1.0
        if sampler.accepts(row, probability, mass):
            path.append(row)
            residual = target_probs[row]
            drawn_from = drawn_from_below(tree, row, residual, draft_probs)
        else:
            residual = rest / mass
            if proposal is not None:
                drawn_from = remove_token(token, proposal)
    return path, path_tokens(tree, path, residual, sampler)


def accept_by_block(
    tree: Tree, target_probs: Tensor, sampler: DrawingSampler, draft_probs: list[Tensor]
) -> tuple[list[int], list[int]]:
    """Accept the longest part of a chain, tried from its end (a DrawnAcceptance).

    With the same random numbers it accepts what accept_by_traversal does. That one reads from the
    device once for each row that is tried; this one reads twice. Both read once more for the bonus
    token.
    """
    g = len(tree) - 1
    if g == 0:
        return [0], path_tokens(tree, [0], target_probs[0], sampler)
    rows = [child_drawn_from(tree, row, target_probs[0], draft_probs) for row in range(1, g + 1)]
    drawn_from = torch.stack(rows)  # [g, V]
    drafted = torch.tensor(tree.tokens[1:], device=target_probs.device).unsqueeze(1)  # [g, 1]
    ratios = target_probs[:-1].gather(1, drafted) / drawn_from.gather(1, drafted)
    weights = [1.0]  # of each row
    for ratio in ratios.squeeze(1).tolist():
        if weights[-1]:  # what is below a row without weight is not tried
            weights.append(min(weights[-1] * ratio, 1.0))
    n = last = len(weights) - 1
    carried = target_probs[:last] * target_probs.new_tensor(weights[:last]).unsqueeze(1)
    rests = (carried - drawn_from[:last]).clamp_(min=0.0)  # [last, V], after each row before it
    masses = rests.sum(dim=1).tolist()
    probability = weights[last]
    while n and not sampler.accepts(n, probability, masses[n - 1]):
        n -= 1
        probability = weight_left(weights[n], masses[n])
    path = list(range(n + 1))
    residual = rests[n] / masses[n] if n < last and masses[n] else target_probs[n]
    return path, path_tokens(tree, path, residual, sampler)


def accept_by_traversal(
    tree: Tree, target_probs: Tensor, sampler: DrawingSampler, draft_probs: list[Tensor]
) -> tuple[list[int], list[int]]:
    """Accept the first row that passes, children before their parent, earlier siblings first (a
    DrawnAcceptance).

    The paper leaves two things open: which rows there are may depend on earlier draws, and children
    may be top-k or retrieved ones. The head of this file says why that is exact.
    """
    retrieved = are_retrieved(tree)
    families: list[list[int]] = [[] for _ in range(len(tree))]
    for row in range(1, len(tree)):
        families[tree.parents[row]].append(row)

    def visit(row: int, weight: float, left: float) -> tuple[list[int], Tensor] | None:
        """Return the accepted path from a row on and the residual for the bonus token; None if the
        row is rejected. left: mass of the residual after the row above, if this one is rejected.
        """
        residual = target_probs[row]
        drawn_from = drawn_from_below(tree, row, residual, draft_probs)
        for child in families[row]:
            if not weight:
                break
            token = tree.tokens[child]
            proposal = None if retrieved[child] else drawn_from
            ratio, rest, mass = try_child(token, residual * weight, proposal)
            # If nothing else is possible, only rounding keeps the ratio from 1
            probability = min(ratio, 1.0) if mass or weight < 1 else 1.0
            found = visit(child, probability, mass)
            if found:
                return [row, *found[0]], found[1]
            weight, residual = weight_left(weight, mass), rest / mass
            if proposal is not None:
                drawn_from = remove_token(token, proposal)
        is_accepted = row == 0 or sampler.accepts(row, weight, left)
        return ([row], residual) if is_accepted else None

    path, residual = visit(0, 1.0, 0.0)
    return path, path_tokens(tree, path, residual, sampler)


ACCEPTANCES = {"token": accept_by_token, "block": accept_by_block, "traversal": accept_by_traversal}

# The acceptance that a method gets if none is chosen, by what its trees are. Of drawn trees of one
# shape, traversal accepts a tenth more tokens (measured); of those that the draft shapes it accepts
# no more, and reads more often
DEFAULTS = {
    "top-k": "token",
    "drawn chain": "block",
    "drawn tree of one shape": "traversal",
    "drawn tree": "token",
}


def default_of(rule: MethodRule) -> str:
    """Return the name of the acceptance that a rule gets if none is chosen."""
    kind = "top-k"
    if rule.draws_candidates:
        shape = "" if rule.depends_on_probs else " of one shape"
        kind = "drawn chain" if rule.is_chain else f"drawn tree{shape}"
    return DEFAULTS[kind]


def choose_acceptance(rule: MethodRule, name: str | None) -> DrawnAcceptance:
    """Return the acceptance of this name; None: the rule's own one, or the default of its trees.

    Raises ValueError for an unknown name, for block of trees that are no chains, and for a rule
    that has its own acceptance.
    """
    if name is None:
        return rule.acceptance or ACCEPTANCES[default_of(rule)]
    if name not in ACCEPTANCES:
        raise ValueError(f"no acceptance is called {name!r}; there are {', '.join(ACCEPTANCES)}")
    if rule.acceptance:
        raise ValueError(f"{name} has no effect: the method has an acceptance of its own")
    if name == "block" and not rule.is_chain:
        raise ValueError("block is for chains, and the method makes trees; traversal is for both")
    return ACCEPTANCES[name]


def drawn_from_below(
    tree: Tree, row: int, like: Tensor, draft_probs: list[Tensor]
) -> Tensor | None:
    """Return what a row's children were drawn from, [V] like the target's distribution; None if
    none of them was drawn."""
    slot = tree.draft_slots[row]
    if slot < 0 or not draft_probs:
        return None
    n_unknown = len(like) - len(draft_probs[slot])  # ids that only the target has
    return F.pad(draft_probs[slot], (0, n_unknown)) if n_unknown else draft_probs[slot]


def child_drawn_from(tree: Tree, row: int, like: Tensor, draft_probs: list[Tensor]) -> Tensor:
    """Return what a row of a chain was drawn from, [V]; all on its token if it was not drawn."""
    probs = None
    if not are_retrieved(tree)[row]:
        probs = drawn_from_below(tree, row - 1, like, draft_probs)
    if probs is None:
        probs = torch.zeros_like(like)
        probs[tree.tokens[row]] = 1.0
    return probs


def try_child(
    token: int, residual: Tensor, drawn_from: Tensor | None
) -> tuple[float, Tensor, float]:
    """Return R(x) / d(x) of a child; what its rejection leaves of R [V], not normalised; and the
    mass of that. One copy to the host.

    Args:
        residual: R, [V].
        drawn_from: d, [V]; None for a child that was not drawn.
    """
    if drawn_from is None:
        ratio = residual[token]
        rest = residual.clone()
        rest[token].zero_()
    else:
        ratio = residual[token] / drawn_from[token]
        rest = (residual - drawn_from).clamp_(min=0.0)
    ratio, mass = torch.stack((ratio, rest.sum())).tolist()
    return ratio, rest, mass


def remove_token(token: int, probs: Tensor) -> Tensor:
    """Return what the next sibling is drawn from, [V]: probs without a token, normalised."""
    rest = probs.clone()
    rest[token].zero_()
    return rest / rest.sum()


def path_tokens(
    tree: Tree, path: list[int], residual: Tensor, sampler: DrawingSampler
) -> list[int]:
    """Return the tokens of a path and the bonus token, drawn from the residual [V]."""
    return [tree.tokens[row] for row in path[1:]] + [sampler.draw(residual)]


def weight_left(weight: float, mass: float) -> float:
    """Return the weight of a row after its child was rejected and has left so much mass."""
    left = mass + (1 - weight)
    return mass / left if left else 1.0  # if nothing is left, only rounding has rejected the child
