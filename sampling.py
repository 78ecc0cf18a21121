"""Sampled text: temperature and top-p, and which nodes of a tree are accepted.

    accept = Sampler(temperature=0.8, top_p=0.95, seed=0)
    path, tokens = accept(tree, logits)  # a verify.Acceptance

Sampled text is exact: each text is as likely as by the target without a draft. At an accepted row,
let R be the target's distribution of the next token, and x the token of the row's first child:

1  the child is accepted with probability R(x), so that x is the next token with probability R(x);
   its own children are then tried in the same way
2  otherwise R(x) becomes 0 and R is normalised: R is now the distribution given that x is not next
3  the next child is tried with this R; after the last child, the bonus token is drawn from R

The text is exact as long as the tree does not depend on the random numbers that accept it.

Shapes: N tree rows, n rows of logits, V vocabulary.
"""

import math
from random import Random

import torch
from torch import Tensor

from draft_tree import Tree

FIXED_POINT_ONE = 2**40  # probability 1 as an integer


class Sampler:
    """The Acceptance of sampled text. One sampler serves one text."""

    def __init__(self, temperature: float, top_p: float = 1.0, seed: int = 0):
        """
        Args:
            temperature: divides the logits.
            top_p: tokens are drawn from the smallest set of likeliest tokens whose probabilities
                sum to top_p or more.
            seed: of the random numbers. With the same method on the same machine, the same seed
                gives the same text.

        Raises ValueError for a number out of range.
        """
        require_positive("temperature", temperature)
        require_positive("top_p", top_p, 1)
        self.temperature = temperature
        self.top_p = top_p
        self.random = Random(int(seed))

    def __call__(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        """Return the accepted rows and the token after each."""
        probs = probabilities(logits, self.temperature, self.top_p)
        path = [0]
        residual = probs[0]  # not normalised: R(x) = residual[x] / residual.sum()
        for row in range(1, len(tree)):
            if tree.parents[row] != path[-1]:
                continue
            token = tree.tokens[row]
            p, total = torch.stack((residual[token], residual.sum())).tolist()  # one device read
            if self.random.random() * total >= p:  # rejected, with probability 1 - R(token)
                residual[token] = 0
            else:
                path.append(row)
                residual = probs[row]
        return path, [*path_tokens(tree, path), self.draw(residual)]

    def draw(self, probs: Tensor) -> int:
        """Draw a token from probabilities [V] that need not sum to 1."""
        ends = probs.double().cumsum(dim=0)  # token i has the interval [ends[i - 1], ends[i])
        point = self.random.random() * ends[-1]
        # right=True: the first end above the point. A token of probability 0 has the same end as
        # the one before it, so it is never found
        return int(torch.searchsorted(ends, point, right=True))


def require_positive(name: str, value: float, high: float = math.inf) -> None:
    """Raise ValueError unless a number is finite, above 0 and at most `high`."""
    if not 0 < value <= high or value == math.inf:
        limit = f" and at most {high}" if high < math.inf else " and finite"
        raise ValueError(f"{name} is {value}, it must be above 0{limit}")


def path_tokens(tree: Tree, path: list[int]) -> list[int]:
    """Return the tokens of a path, without the root's."""
    return [tree.tokens[row] for row in path[1:]]


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits [n, V] divided by a temperature, up to a constant in each row."""
    if temperature == 1:
        return logits
    temperature = max(temperature, 1e-38)  # less is 0 in float32, and 0 / 0 is nan
    # Shifted to at most 0, so a tiny temperature gives -inf and not inf, whose softmax is nan
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)


def probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the distributions [n, V] of logits [n, V] at a temperature, 0 outside the top-p set;
    not normalised."""
    probs = torch.softmax(tempered(logits, temperature), dim=-1)
    if top_p == 1:
        return probs
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = sorted_probs * is_in_top_p(sorted_probs, top_p)
    return torch.zeros_like(probs).scatter_(-1, order, kept)


def is_in_top_p(sorted_probs: Tensor, top_p: float) -> Tensor:
    """Return which of the probabilities [n, m], highest first, are in the top-p set: those for
    which the ones before have not reached top_p. The first one always is."""
    # Integers add up to one sum in any order, while CUDA's float sums differ from run to run
    parts = (sorted_probs * FIXED_POINT_ONE).long()
    before = parts.cumsum(dim=-1) - parts  # the probability before each token
    return before < max(round(top_p * FIXED_POINT_ONE), 1)
