"""What auto learns while it writes: what the target liked, what is accepted, what things cost.

memory.write((12, 7), [3, 9, 4, 1])  # after 12, 7 the target liked 3 best
memory.recall((5, 12, 7))  # 2 tokens of context known: [3, 9, 4, 1]
"""

from dataclasses import dataclass

import torch

GUESS_WEIGHT, COUNT_DECAY = 8.0, 0.99  # counts that a guess stands for; what an iteration leaves
MAX_CONTEXTS = 1 << 16  # in memory; the oldest is forgotten


class Memory:
    """What the target liked best after a context of one to three tokens, the last time it did."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], list[int]] = {}

    def write(self, context: tuple[int, ...], best: list[int]) -> None:
        for n in range(1, len(context) + 1):
            key = context[-n:]
            self.seen.pop(key, None)  # to the end: the first is the oldest
            self.seen[key] = best
        while len(self.seen) > MAX_CONTEXTS:
            del self.seen[next(iter(self.seen))]

    def recall(self, context: tuple[int, ...]) -> tuple[int, list[int]]:
        """The candidates after the longest context known, and its length; 0 if none is."""
        for n in range(len(context), 0, -1):
            if best := self.seen.get(context[-n:]):
                return n, best
        return 0, []


class Counts:
    """Chances of acceptance by bin: a first guess, then what has been counted, lately more."""

    def __init__(self, guess: list[float]):
        self.guess = guess
        self.hits, self.tries = [GUESS_WEIGHT * p for p in guess], [GUESS_WEIGHT] * len(guess)

    def chance(self, bin: int) -> float:
        return self.hits[bin] / self.tries[bin]

    def add(self, outcomes: list[tuple[int, bool]]) -> None:
        """Take in one iteration's (bin, was it right)."""
        for i, p in enumerate(self.guess):  # towards the guess
            self.hits[i] += (1 - COUNT_DECAY) * (GUESS_WEIGHT * p - self.hits[i])
            self.tries[i] += (1 - COUNT_DECAY) * (GUESS_WEIGHT - self.tries[i])
        for bin, is_right in outcomes:
            self.hits[bin] += is_right
            self.tries[bin] += 1


class Costs:
    """Milliseconds of an iteration: a weighted sum of what was done, fitted as times come in."""

    def __init__(self, first_guess: list[float]):
        """first_guess: of a step of ar, a tree, a row, drafting, a level, in steps of ar."""
        self.weights = torch.tensor(first_guess, dtype=torch.float64)
        self.spread = torch.diag((self.weights * 0.5).square())  # how unsure the guess is
        self.n_seen = 0

    def predict(self, done: list[float]) -> float:
        return sum(w * x for w, x in zip(self.weights.tolist(), done, strict=True))

    def fit(self, done: list[float], ms: float) -> float:
        """Take in one iteration (recursive least squares).

        Returns what earlier predictions are to be multiplied with: the first time, a step of ar.
        """
        unit = 1.0
        if not self.n_seen:
            unit = ms / self.predict(done)
            self.weights, self.spread = self.weights * unit, self.spread * unit**2
        self.n_seen += 1
        if self.n_seen > 32 and self.n_seen % 8:  # by then little is left to learn
            return unit
        x, expected = torch.tensor(done, dtype=torch.float64), self.predict(done)
        error = min(max(ms - expected, -0.5 * expected), 0.5 * expected)  # a hiccup is no cost
        gain = self.spread @ x
        gain /= x @ gain + (0.2 * expected) ** 2
        self.weights = (self.weights + gain * error).clamp(min=1e-9)
        self.spread -= torch.outer(gain, x @ self.spread)
        return unit


@dataclass
class Worth:
    """What iterations of a kind have given and taken lately."""

    tokens: float
    ms: float
    n_seen: int = 0

    def take(self, tokens: int, ms: float) -> None:
        """A mean in which the first guess counts as one iteration, later one of the last ten."""
        self.n_seen += 1
        share = max(1 / (self.n_seen + 1), 0.1)
        self.tokens += share * (tokens - self.tokens)
        self.ms += share * (ms - self.ms)
