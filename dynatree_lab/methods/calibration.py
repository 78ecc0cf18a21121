"""Online calibration: acceptance probabilities, learned in each generation from the draft's.

Rules use the draft's probability q as the probability that a candidate is accepted. It is not.
Greedy decoding accepts the target's argmax, whatever its probability. A drawn candidate is accepted
with probability min(1, p / q), where p is the target's. But likelier candidates are accepted more
often. So acceptance is fitted as an increasing function of q, by logistic regression (Platt
scaling) on the candidates that were tried so far:

    acceptance probability   1 / (1 + exp(-(a + b x)))
    top-k    x is the log-odds of q^2 normalised over the row, because a token with a likely sibling
             is accepted less often. Initially a = 0, b = 1/2, which gives q or more
    drawn    x is the log-odds of q, because the estimate must not depend on the other draws.
             Initially a = 0, b = 1, which gives q

Each tried candidate moves a and b by one Newton step. Older candidates gradually lose weight, and
every generation starts anew. A tree uses only what earlier trees have taught, so no draw affects
its own acceptance. Two parameters are learned faster than a table of acceptance rates by q and
rank: over 100 tokens such tables gave half of the gain.

    drafter = CalibratedDrafter(drafter, is_drawn=False)  # wraps any drafter

Shapes: n rows of a level, k candidates per row.
"""

import math

import numpy
from numpy import ndarray

from draft_tree import Candidates, Tree, require_arrays
from dynatree import Drafter
from dynatree_lab.methods.rules import are_retrieved

INITIAL_TOP_K, INITIAL_DRAWN = (0.0, 0.5), (0.0, 1.0)  # a and b
PRIOR = (1.0, 0.0, 4.0)  # evidence that the initial a and b stand for
MIN_SLOPE = 0.05  # of b, so that a likelier candidate never gets a lower acceptance probability
MAX_STEP = 2.0  # change of the log-odds at x by one Newton step
FORGETTING = 0.002  # by which each iteration moves a, b and the evidence to their initial values
MIN_PROB = 1e-6  # a probability and its complement are raised to it before taking logs


class CalibratedDrafter(Drafter):
    """A drafter that replaces the draft's probabilities by learned acceptance probabilities."""

    def __init__(self, drafter: Drafter, is_drawn: bool) -> None:
        self.drafter, self.is_drawn = drafter, is_drawn
        self.draft_logprobs: list[ndarray] = []  # the draft's own, by level of the current tree
        self.weights: tuple[float, float] | None = None  # a and b; None: nothing drafted yet
        self.initial: tuple[float, float] | None = None  # the first values of `weights`
        # The Hessian of the log loss: sums of w, w x and w x^2, where w is the acceptance
        # probability times its complement
        self.evidence = PRIOR
        self.tokens: list[list[int]] = []  # candidates by draft slot of the current tree
        self.inputs: list[list[float]] = []  # x of each candidate

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.drafter.start(prompt, capacity, vocab_size)

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        if rows == [0]:
            self.tokens, self.inputs, self.draft_logprobs = [], [], []
        candidates = require_arrays(self.drafter.draft(tree, rows, k))
        self.draft_logprobs.append(candidates.logprobs)
        return candidates._replace(logprobs=self.calibrate(candidates))

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        self.drafter.commit(tree, path, tokens)
        self.learn(tree, path)

    def calibrate(self, candidates: Candidates) -> ndarray:
        """Return the log acceptance probability [n, k] of each candidate, given its path.

        The candidates are recorded, so that `learn` finds them.
        """
        is_drawn = self.is_drawn
        if self.weights is None:
            self.weights = self.initial = INITIAL_DRAWN if is_drawn else INITIAL_TOP_K
        if is_drawn:
            x = log_odds(numpy.exp(candidates.logprobs))
        else:
            x = log_odds_of_squares(candidates.logprobs)
        self.tokens += candidates.tokens.tolist()
        self.inputs += x.tolist()
        return self.log_acceptance(x, candidates.logprobs)

    def calibrate_drawn(self, logprobs: ndarray) -> ndarray:
        """Return log acceptance probabilities of tokens that could be drawn.

        logprobs: the draft's log-probabilities of these tokens, of any shape.
        """
        return self.log_acceptance(log_odds(numpy.exp(logprobs)), logprobs)

    def log_acceptance(self, x: ndarray, logprobs: ndarray) -> ndarray:
        """Return log acceptance probabilities for inputs x.

        -inf and nan in logprobs stay: the token is impossible, or the draft overflowed.
        """
        a, b = self.weights
        calibrated = -numpy.log1p(numpy.exp(-(a + b * x)))
        return numpy.where(logprobs > -numpy.inf, calibrated, logprobs).astype(numpy.float32)

    def learn(self, tree: Tree, path: list[int]) -> None:
        """Learn from the tried candidates of a verified tree.

        These are the drafted children of accepted rows. Of drawn children only the accepted one and
        its earlier siblings were tried.
        """
        if self.weights is None:
            return
        self.weights = decay(self.weights, self.initial)
        self.evidence = decay(self.evidence, PRIOR)
        retrieved = are_retrieved(tree)
        decided = set()  # rows of which a drawn child was accepted
        for row, parent in enumerate(tree.parents):
            slot = tree.draft_slots[parent]
            if row == 0 or parent not in path or slot < 0 or parent in decided:
                continue
            if retrieved[row]:
                continue
            is_accepted = row in path
            rank = self.tokens[slot].index(tree.tokens[row])
            self.newton_step(self.inputs[slot][rank], is_accepted)
            if is_accepted and self.is_drawn:
                decided.add(parent)

    def newton_step(self, x: float, is_accepted: bool) -> None:
        """Update a and b by one candidate, with a damped step: the log-odds at x change by at most
        MAX_STEP. Plain floats are faster than arrays, because few candidates of a tree are tried.
        """
        a, b = self.weights
        probability = 1 / (1 + math.exp(-(a + b * x)))
        w = probability * (1 - probability)
        s, sx, sxx = self.evidence
        s, sx, sxx = s + w, sx + w * x, sxx + w * x * x
        self.evidence = s, sx, sxx
        step = (is_accepted - probability) / (s * sxx - sx * sx)
        step_a, step_b = step * (sxx - sx * x), step * (s * x - sx)
        length = max(abs(step_a + step_b * x) / MAX_STEP, 1.0)
        self.weights = a + step_a / length, max(b + step_b / length, MIN_SLOPE)


def decay(current: tuple[float, ...], initial: tuple[float, ...]) -> tuple[float, ...]:
    """Move each number towards its initial value by the share FORGETTING."""
    return tuple(a + FORGETTING * (b - a) for a, b in zip(current, initial, strict=True))


def log_odds(probs: ndarray) -> ndarray:
    """Return log(probs / (1 - probs)), kept finite."""
    probs = numpy.minimum(numpy.maximum(probs.astype(numpy.float64), MIN_PROB), 1 - MIN_PROB)
    return numpy.log(probs / (1 - probs))


def log_odds_of_squares(logprobs: ndarray) -> ndarray:
    """Return the log-odds [n, k] of q^2, normalised over each row of top-k candidates.

    Each token beyond the top k is taken to be as likely as the last one of them.
    """
    q = numpy.exp(logprobs.astype(numpy.float64))
    squares = q * q
    rest = numpy.maximum(1 - q.sum(axis=1, keepdims=True), 0)
    total = squares.sum(axis=1, keepdims=True) + rest * q[:, -1:]
    return log_odds(squares / numpy.maximum(total, MIN_PROB**2))
