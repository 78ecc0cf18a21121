"""Two acceptances of sampled text whose candidates are drawn, and which one a method gets.

token      tries rows from the root down, child by child
traversal  verifies a tree from its leaves (Traversal Verification, Weng et al. 2025); a chain as
           Block Verification does (Sun et al. 2024)

Token. At an accepted row, let R be the target's distribution of the next token, and x a child that
was drawn from d (Leviathan et al. 2023; DySpec, Algorithm 3, whose N(0, 1) is a misprint):

1  x is drawn and accepted with probability d(x) min(R(x) / d(x), 1) = min(R, d)(x)
2  otherwise R becomes max(R - d, 0), normalised: the part of R outside min(R, d)
3  so accepting x, or else drawing from the new R, amounts to a draw from R

The next child was drawn from d without x, normalised. A retrieved child among drawn ones was not
drawn. It counts as drawn from a distribution with probability 1 on its token.

Traversal. Acceptance by token loses everything below a rejected token. Acceptance from the end does
not: a likely token makes up for an unlikely one before it. For example, let there be two ids, A and
B. At every position the target gives them 1/3 and 2/3, the draft 2/3 and 1/3. Both models then
generate the chain A, B with probability 2/9:

    token      A is accepted with probability (1/3) / (2/3) = 1/2; if so, B with probability 1
    traversal  weight of A: 1/2; of A, B: min(1/2 x (2/3) / (1/3), 1) = 1, so both are accepted

Averaged over all chains of two, traversal accepts 11/9 drafted tokens, token 10/9.

It is exact. Each row has a weight w, the probability that it will be accepted. No random number has
decided that yet. (In acceptance by token, w is 1 or 0 before a child is tried.) Then:

1  a child x, drawn from d, has the weight min(w R(x) / d(x), 1): its acceptance accounts for
   min(w R, d)
2  the rest, max(w R - d, 0), of mass S, belongs to the cases in which the child is not accepted;
   their probability is S + 1 - w
3  so without the child the row has the weight S / (S + 1 - w) and R = the rest / S

So the row that was drawn last, a leaf and its parent's last child, can be removed without changing
the distribution of the text. The same holds for the row before it, and so on up to the root.

If no child of a tree is drawn, neither is needed: verify.walk, with drawn tokens, has the same
distribution, and draws token i of a text with random number i, as ar does (sampling.py).

Shapes: N tree rows, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_tree import Tree
from dynatree_lab.methods.rules import Facts, are_retrieved
from dynatree_lab.methods.sampler import DrawingSampler

# accept(tree, target_probs [N, V], sampler, draft_probs) -> the accepted rows, the root first, and
# the token after each of them, the bonus token last. draft_probs: by draft slot, the distribution
# [V] from which the children of a row were drawn; empty if no candidate was drawn
DrawnAcceptance = Callable[
    [Tree, Tensor, DrawingSampler, list[Tensor]], tuple[list[int], list[int]]
]


def accept_by_token(
    tree: Tree, target_probs: Tensor, sampler: DrawingSampler, draft_probs: list[Tensor]
) -> tuple[list[int], list[int]]:
    """Accept from the root down, child by child in row order (a DrawnAcceptance)."""
    retrieved = are_retrieved(tree)
    path = [0]
    residual = target_probs[0]  # R
    child_probs = draft_probs_below(tree, 0, residual, draft_probs)  # d of the next drawn child
    for row in range(1, len(tree)):
        if tree.parents[row] != path[-1]:
            continue
        token, d = tree.tokens[row], None if retrieved[row] else child_probs
        ratio, rest, mass = try_child(token, residual, d)
        # If nothing else is possible, only rounding keeps the ratio from 1
        probability = min(ratio, 1.0) if mass else 1.0
        if sampler.accepts(row, probability, mass):
            path.append(row)
            residual = target_probs[row]
            child_probs = draft_probs_below(tree, row, residual, draft_probs)
        else:
            residual = rest / mass
            if d is not None:
                child_probs = remove_token(token, d)
    return path, [*path_tokens(tree, path), sampler.draw(residual)]


def accept_by_traversal(
    tree: Tree, target_probs: Tensor, sampler: DrawingSampler, draft_probs: list[Tensor]
) -> tuple[list[int], list[int]]:
    """Accept the path to the first row that passes: children are tried before their parent, earlier
    siblings first (a DrawnAcceptance).

    The paper does not cover two cases: the tree's shape may depend on earlier draws, and children
    may be top-k or retrieved ones. The module docstring says why both are exact.
    """
    retrieved = are_retrieved(tree)
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for row in range(1, len(tree)):
        children[tree.parents[row]].append(row)

    def visit(row: int, weight: float, mass_without: float) -> tuple[list[int], Tensor] | None:
        """Return the accepted path from a row down and the residual for the bonus token; None if
        the row is rejected. mass_without: of its parent's residual if it is rejected.
        """
        residual = target_probs[row]
        child_probs = draft_probs_below(tree, row, residual, draft_probs)
        for child in children[row]:
            if not weight:
                break
            token, d = tree.tokens[child], None if retrieved[child] else child_probs
            ratio, rest, mass = try_child(token, residual * weight, d)
            # If nothing else is possible, only rounding keeps the ratio from 1
            probability = min(ratio, 1.0) if mass or weight < 1 else 1.0
            found = visit(child, probability, mass)
            if found:
                return [row, *found[0]], found[1]
            weight, residual = remaining_weight(weight, mass), rest / mass
            if d is not None:
                child_probs = remove_token(token, d)
        is_accepted = row == 0 or sampler.accepts(row, weight, mass_without)
        return ([row], residual) if is_accepted else None

    path, residual = visit(0, 1.0, 0.0)
    return path, [*path_tokens(tree, path), sampler.draw(residual)]


ACCEPTANCES = {"token": accept_by_token, "traversal": accept_by_traversal}


def default_acceptance(facts: Facts) -> str:
    """Return the name of the acceptance that drawn candidates get if none is chosen.

    If all drawn trees have one shape, as chains do, traversal accepts a tenth more tokens than
    token (measured). If the draft decides the shape, it accepts no more, and it reads from the
    device more often.
    """
    has_one_shape = facts.is_chain or not facts.depends_on_probs
    return "traversal" if has_one_shape else "token"


def choose_acceptance(facts: Facts, name: str | None, is_drawn: bool) -> DrawnAcceptance | None:
    """Return the acceptance of this name; for None the rule's own one, or the default of its trees.
    None is the walk of sampling.py, for candidates that are not drawn.

    Raises ValueError for an unknown name, and if another acceptance is fixed.
    """
    if name is not None and name not in ACCEPTANCES:
        raise ValueError(f"acceptance is {name!r}, it must be {' or '.join(ACCEPTANCES)}")
    if name and facts.acceptance:
        raise ValueError(f"{name} has no effect: the method has its own acceptance")
    if name and not is_drawn:
        raise ValueError(f"{name} has no effect: the method's candidates are not drawn")
    if facts.acceptance or not is_drawn:
        return facts.acceptance
    return ACCEPTANCES[name or default_acceptance(facts)]


def path_tokens(tree: Tree, path: list[int]) -> list[int]:
    """Return the tokens of a path, without the root's."""
    return [tree.tokens[row] for row in path[1:]]


def draft_probs_below(
    tree: Tree, row: int, like: Tensor, draft_probs: list[Tensor]
) -> Tensor | None:
    """Return the distribution [V] from which a row's children were drawn, padded to the target's
    ids; None if no child was drawn."""
    slot = tree.draft_slots[row]
    if slot < 0 or not draft_probs:
        return None
    n_more = len(like) - len(draft_probs[slot])  # ids that only the target has
    return F.pad(draft_probs[slot], (0, n_more)) if n_more else draft_probs[slot]


def try_child(token: int, residual: Tensor, d: Tensor | None) -> tuple[float, Tensor, float]:
    """Return R(x) / d(x) of a child; the residual [V] after its rejection, not normalised; and the
    mass of that residual. Makes one copy to the host.

    Args:
        residual: R, [V].
        d: [V]; None for a child that was not drawn.
    """
    if d is None:
        ratio = residual[token]
        rest = residual.clone()
        rest[token].zero_()
    else:
        ratio = residual[token] / d[token]
        rest = (residual - d).clamp_(min=0.0)
    ratio, mass = torch.stack((ratio, rest.sum())).tolist()
    return ratio, rest, mass


def remove_token(token: int, probs: Tensor) -> Tensor:
    """Return the distribution [V] of the next sibling: probs without a token, normalised."""
    rest = probs.clone()
    rest[token].zero_()
    return rest / rest.sum()


def remaining_weight(weight: float, mass: float) -> float:
    """Return the weight of a row after one of its children was rejected, leaving `mass`."""
    p_rejected = mass + (1 - weight)
    return mass / p_rejected if p_rejected else 1.0  # at 0, only rounding has rejected the child
