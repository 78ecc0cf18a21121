"""Calibration: the probability that a candidate is accepted, learned online from this text.

Rules use the draft's probability p as the probability that a candidate is accepted. It is not.
Greedy text takes the target's best token, however likely it is; a drawn child is accepted with
probability min(1, q / p), which has little to do with p. But the order of the two is the same. So
the acceptance probability is a rising function of p, and its two parameters are learned from the
candidates that were tried:

    chance   1 / (1 + exp(-(a + b x)))
    top k    x is the log-odds of p^2, normalised over the row: a likely token beside another one is
             accepted less often than beside none. At first a = 0, b = 1/2, which is p or more
    drawn    x is the log-odds of p alone, because other draws must not decide. At first a = 0,
             b = 1, which is p

Each tried candidate moves a and b by a step of Newton's method, the influence of old ones fades,
and every text starts anew. There is no step between a draw and what it decides: a tree uses what
earlier trees have taught. Two parameters are learned faster than a count for each range of p and
rank: over the 100 tokens of a text such counts gave half of the gain.

    drafter = CalibratedDrafter(drafter, is_drawn=False)  # wraps any drafter

Shapes: n rows of a level, k candidates per row.
"""

import math

import numpy
from numpy import ndarray

from draft_tree import Candidates, Tree
from dynatree import Drafter
from methods.rules import are_retrieved

FIRST_RANKED, FIRST_DRAWN = (0.0, 0.5), (0.0, 1.0)  # a and b
SURE = (1.0, 0.0, 4.0)  # weight of the first values: the higher, the slower they change
LEAST_SLOPE = 0.05  # of b: a likelier candidate never has a lower probability of acceptance
LONGEST = 2.0  # step of Newton's method, in log-odds
FADING = 0.002  # of what was seen before an iteration
LEAST = 1e-6  # that p, and what is not p, is taken for: their logarithms are wanted


class CalibratedDrafter(Drafter):
    """A drafter whose candidates get their acceptance probability for the draft's probability."""

    def __init__(self, drafter: Drafter, is_drawn: bool) -> None:
        self.drafter, self.is_drawn = drafter, is_drawn
        self.draft_logprobs: list[ndarray] = []  # of each level of a tree, as the draft has them
        self.weights: tuple[float, float] | None = None  # a and b; None: nothing was drafted yet
        self.first: tuple[float, float] | None = None  # what they were then
        self.seen = SURE  # how much of 1, x and x^2: the second derivative of the guesses' loss
        self.tokens: list[list[int]] = []  # of the candidates below each draft slot of a tree
        self.inputs: list[list[float]] = []  # x of each

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.drafter.start(prompt, capacity, vocab_size)

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        if parents is None:
            self.tokens, self.inputs, self.draft_logprobs = [], [], []
        candidates = self.drafter.draft(tokens, parents, k)
        self.draft_logprobs.append(candidates.logprobs)
        return Candidates(candidates.tokens, self.look(candidates))

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        self.drafter.commit(tree, path, tokens)
        self.learn(tree, path)

    def look(self, candidates: Candidates) -> ndarray:
        """Return log-probabilities [n, k] that the candidates are accepted, given their paths."""
        is_drawn = self.is_drawn
        if self.weights is None:
            self.weights = self.first = FIRST_DRAWN if is_drawn else FIRST_RANKED
        x = log_odds(numpy.exp(candidates.logprobs)) if is_drawn else sharpened(candidates.logprobs)
        self.tokens += candidates.tokens.tolist()
        self.inputs += x.tolist()
        return self.log_chances(x, candidates.logprobs)

    def calibrate_drawn(self, logprobs: ndarray) -> ndarray:
        """Return the same for tokens that could be drawn, by the draft's log-probabilities."""
        return self.log_chances(log_odds(numpy.exp(logprobs)), logprobs)

    def log_chances(self, x: ndarray, logprobs: ndarray) -> ndarray:
        """Return log-probabilities of acceptance for inputs x; logprobs where these are not finite,
        which says that a token is impossible or that the draft overflowed."""
        a, b = self.weights
        found = -numpy.log1p(numpy.exp(-(a + b * x)))
        return numpy.where(logprobs > -numpy.inf, found, logprobs).astype(numpy.float32)

    def learn(self, tree: Tree, path: list[int]) -> None:
        """Learn from a verified tree: from the children of its path. Of drawn children only those
        count that were tried, which are the accepted one and its earlier siblings."""
        if self.weights is None:
            return
        self.weights = faded(self.weights, self.first)
        self.seen = faded(self.seen, SURE)
        retrieved = are_retrieved(tree)
        is_decided = set()  # rows whose child is accepted, if children are drawn
        for row, parent in enumerate(tree.parents):
            slot = tree.draft_slots[parent]
            if row == 0 or parent not in path or slot < 0 or parent in is_decided:
                continue
            if retrieved[row]:
                continue
            is_right = row in path
            place = self.tokens[slot].index(tree.tokens[row])
            self.take(self.inputs[slot][place], is_right)
            if is_right and self.is_drawn:
                is_decided.add(parent)

    def take(self, x: float, is_right: bool) -> None:
        """Take in one candidate by a damped step of Newton's method, in plain numbers, because a
        tree has a dozen of them. However sure the model was, its log-odds at x move by at most
        LONGEST."""
        a, b = self.weights
        chance = 1 / (1 + math.exp(-(a + b * x)))
        n_seen = chance * (1 - chance)
        ones, xs, squares = self.seen
        ones, xs, squares = ones + n_seen, xs + n_seen * x, squares + n_seen * x * x
        self.seen = ones, xs, squares
        step = (is_right - chance) / (ones * squares - xs * xs)
        step_a, step_b = step * (squares - xs * x), step * (ones * x - xs)
        length = max(abs(step_a + step_b * x) / LONGEST, 1.0)
        self.weights = a + step_a / length, max(b + step_b / length, LEAST_SLOPE)


def faded(now: tuple[float, ...], first: tuple[float, ...]) -> tuple[float, ...]:
    """Return the numbers, each moved a little towards its first value."""
    return tuple(a + FADING * (b - a) for a, b in zip(now, first, strict=True))


def log_odds(p: ndarray) -> ndarray:
    """log(p / (1 - p)), finite."""
    p = numpy.minimum(numpy.maximum(p.astype(numpy.float64), LEAST), 1 - LEAST)
    return numpy.log(p / (1 - p))


def sharpened(logprobs: ndarray) -> ndarray:
    """Log-odds [n, k] of the square of ranked p, normalised over the row. Of what is not among the
    k, each is taken to be as likely as the last of them."""
    p = numpy.exp(logprobs.astype(numpy.float64))
    squares = p * p
    rest = numpy.maximum(1 - p.sum(axis=1, keepdims=True), 0)
    all_of_row = squares.sum(axis=1, keepdims=True) + rest * p[:, -1:]
    return log_odds(squares / numpy.maximum(all_of_row, LEAST**2))
