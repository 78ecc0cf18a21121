"""Sampled text: temperature and top-p, and which nodes of a tree are accepted.

    accept = Sampler(temperature=0.8, top_p=0.95, seed=0)
    path, tokens = accept(tree, logits)  # a verify.Acceptance

Sampled text is exact: each text is as likely as by the target without a draft. The walk through the
tree is that of greedy text (verify.walk), with a drawn token in place of the best one. A child with
token x is so accepted with the target's probability of x. Token i of a text is drawn with random
number i, whatever the trees are. So with one seed, every method writes the text of ar, up to
rounding.

The text is exact as long as the tree does not depend on the random numbers that accept it.

Shapes: N tree rows, n rows of logits, V vocabulary.
"""

import math
from random import Random

import torch
from torch import Tensor

from draft_tree import Tree
from verify import walk

FIXED_POINT_ONE = 2**40  # probability 1 as an integer


class Sampler:
    """The Acceptance of sampled text. One sampler serves one text."""

    def __init__(self, temperature: float, top_p: float = 1.0, seed: int = 0):
        """
        Args:
            temperature: divides the logits.
            top_p: tokens are drawn from the smallest set of likeliest tokens whose probabilities
                sum to top_p or more.
            seed: of the random numbers.

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
        return walk(tree, lambda row: self.draw(probs[row]))

    def draw(self, probs: Tensor) -> int:
        """Draw a token from probabilities [V] that need not sum to 1."""
        ends = probs.double().cumsum(dim=0)  # token i has the interval [ends[i - 1], ends[i])
        point = self.random.random() * ends[-1]
        # right=True: the first end above the point. A token of probability 0 has the same end as
        # the one before it, so it is never found
        return int(torch.searchsorted(ends, point, right=True))


def distance_to_interval(probs: Tensor, token: int, number: float) -> float:
    """Return how far a random number from [0, 1) is outside the interval that Sampler.draw gives to
    a token; 0 within it. probs: [V], need not sum to 1."""
    ends = probs.double().cumsum(dim=0)
    start, end = ((ends[token] - probs[token]) / ends[-1], ends[token] / ends[-1])
    return max(float(start) - number, number - float(end), 0.0)


def require_positive(name: str, value: float, high: float = math.inf) -> None:
    """Raise ValueError unless a number is finite, above 0 and at most `high`."""
    if not 0 < value <= high or value == math.inf:
        limit = f" and at most {high}" if high < math.inf else " and finite"
        raise ValueError(f"{name} is {value}, it must be above 0{limit}")


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
