"""Verifying a tree: what the target's pass over it is given, and which path it accepts.

Functions of trees, scores and a sampler: no model, no cache, no tokenizer. For sampled text see
sampling.py. In the example of draft_tree.py the target says: after "the" comes "cat", after "the
cat" comes "ran", after "the cat ran" comes "away":

    best[row] = cat  ran  ...  ...  away  ...

    accept_greedy(tree, best)  # rows [0, 1, 4], tokens [cat, ran, away]; "away" is the bonus

Shapes: N tree rows, S cache slots, V vocabulary. Paper: DynaTree v2, sections 3.4 and 3.5.
"""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from draft_tree import Tree
from gpt_neox import Scores
from sampling import Acceptance, Sampler


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


class NonFiniteLogits(Exception):
    """The target produced infinite or undefined logits, so it has no next token."""


def accept(
    tree: Tree, scores: Scores, sampler: Sampler, acceptance: Acceptance
) -> tuple[list[int], list[int]]:
    """What a step commits: the accepted rows, root first, and the id that the target puts after
    each, the bonus token last.

    scores: of the tree's rows. acceptance: of sampled text; greedily only one is possible. Raises
    NonFiniteLogits if the root's are not finite, so that an error takes back nothing that was
    right; a path ends before any other row whose logits are not.
    """
    is_finite = scores.finite()  # [N]
    if sampler.settings.is_greedy:
        path, tokens = accept_greedy(tree, scores.argmax())
    else:
        logits = scores.logits
        if not is_finite.all():  # what is below such a row is cut off: any numbers will do there
            logits = logits.clone()
            logits[torch.from_numpy(~is_finite).to(logits.device)] = 0.0
        path, tokens = acceptance(tree, logits, sampler)
    n_finite = 0
    while n_finite < len(path) and is_finite[path[n_finite]]:
        n_finite += 1
    if not n_finite:
        raise NonFiniteLogits(
            "the target's logits are not finite: some product overflows in this dtype (small "
            "Pythia models do in float16); try --dtype bfloat16 or float32"
        )
    return path[:n_finite], tokens[:n_finite]


def cut(tokens: list[int], eos_ids: Sequence[int], limit: int) -> list[int]:
    """Newly committed ids up to the limit and up to the first EOS, which is kept."""
    tokens = tokens[:limit]
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
