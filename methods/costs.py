"""What an iteration takes, fitted as times come in, and what is worth its time.

An iteration gains tokens and costs time, and time is worth the rate of tokens per millisecond so
far. So a row is verified if its chance of acceptance is worth a row's time, a level drafted if the
tokens it may add are worth a pass of the draft, and the draft runs at all if iterations with it
have been worth more than one without; while it is off, it is probed: that may lose 1 % of the time.
This is the hardware-aware tree construction that the first DynaTree paper leaves to the future.

    account = Account()
    account.open()  # a tree begins; account.prices[ROW] is what a row costs, in tokens
    account.take(n_tokens=4, n_rows=12, n_levels=3, ms=7.5)
"""

import numpy
from numpy import ndarray

# What an iteration's time is made of, in this order wherever costs are listed
STEP, TREE, ROW, DRAFTING, LEVEL = range(5)
# Of all but the first, in steps of ar, as that is one: between those of a small CPU and of a GPU.
# Rather too dear than too cheap: a tree too large, once, takes as long as five steps
FIRST_COSTS = (0.1, 0.1, 0.1, 0.3)
UNSURE = (0.2, 0.3, 0.1, 0.2, 0.3)  # how far each, the first included, may be off

LEVEL_YIELD = 0.7  # of its parents' chance, what a level may be hoped to add
PROBE_SHARE = 0.01  # of the time, that probes may lose


SOME_COSTS = ("0.3:0.04:0.2:0.4", "0.1:0.01:0.05:0.05")  # as a user may give them


def parse_costs(word: str) -> tuple[float, ...] | None:
    """The four costs that a word gives; None: they are learned."""
    if word == "learned":
        return None
    costs = tuple(map(float, word.split(":")))
    if len(costs) != len(FIRST_COSTS) or not all(0 < cost < 100 for cost in costs):
        raise ValueError("learned, or four numbers between 0 and 100: tree:row:drafting:level")
    return costs


def work_of(n_rows: int, n_levels: int) -> list[float]:
    """How often an iteration pays each cost: one of n_rows verified, and n_levels drafted."""
    return [1.0, float(n_rows > 1), n_rows - 1.0, float(n_levels > 0), float(n_levels)]


class Costs:
    """Milliseconds of an iteration: its work, weighted; the weights are fitted as times come in."""

    def __init__(self, first_guess: tuple[float, ...]):
        """first_guess: each but the first, in steps of ar."""
        self.weights = numpy.array((1.0, *first_guess))  # [5]
        self.spread = numpy.diag(numpy.array(UNSURE) ** 2)  # [5, 5], how unsure they are
        self.n_seen = 0

    def predict(self, work: list[float] | ndarray) -> float:
        """Milliseconds; before the first iteration, steps of ar."""
        return float(self.weights @ work)

    def fit(self, work: list[float], ms: float) -> None:
        """Take in one iteration; the first time, it gives a step of ar."""
        if self.n_seen == 0:
            unit = ms / self.predict(work)
            self.weights = self.weights * unit
            self.spread = self.spread * unit**2
        self.n_seen += 1
        if self.n_seen <= 32 or self.n_seen % 8 == 0:  # later on little is left to learn
            self.correct(work, ms)

    def correct(self, work: list[float], ms: float) -> None:
        """Move the weights towards what this iteration took (recursive least squares)."""
        x = numpy.array(work)
        expected = self.predict(work)
        limit = 0.5 * expected
        error = min(max(ms - expected, -limit), limit)  # a hiccup is no cost
        gain = self.spread @ x
        gain /= x @ gain + (0.2 * expected) ** 2
        found = self.weights + gain * error
        self.weights = found.clip(min=1e-9)
        self.weights[TREE] = max(found[TREE], -self.weights[ROW])
        self.spread -= numpy.outer(gain, x @ self.spread)


class Worth:
    """What iterations of a kind have given and how much work they were, lately."""

    def __init__(self, tokens: float, work: list[float], n_seen: int = 0):
        """n_seen: iterations for which the first guess counts, but one."""
        self.tokens, self.work = tokens, numpy.array(work)
        self.n_seen = n_seen

    def take(self, tokens: float, work: list[float]) -> None:
        """A mean in which the first guess counts as one iteration, later one of the last ten."""
        self.n_seen += 1
        share = max(1 / (self.n_seen + 1), 0.1)
        self.tokens += share * (tokens - self.tokens)
        self.work += share * (numpy.array(work) - self.work)


class Account:
    """What a generation has given and taken so far, and what each cost is worth by that."""

    def __init__(self, costs: tuple[float, ...] | None = None, n_invited: int = 1):
        """costs: None for those that are learned from the times that are told. n_invited:
        iterations for which the first guess of drafting counts, which invites a try."""
        self.costs = Costs(costs or FIRST_COSTS)
        self.is_learning = costs is None
        self.overall = Worth(1.0, work_of(1, 0))  # all iterations
        self.drafting = Worth(3.3, work_of(9, 3), n_invited - 1)  # those that draft
        self.total_ms = 0.0
        self.probed_ms = 0.0  # lost by probes
        self.is_probe = False
        self.open()

    def open(self) -> None:
        """A tree begins."""
        self.rate = self.overall.tokens / self.costs.predict(self.overall.work)
        # Tokens that each cost is worth
        self.prices = [self.rate * weight for weight in self.costs.weights.tolist()]

    def worth(self, n_tokens: float, n_rows: int) -> float:
        """Tokens beyond what their time is worth, of an iteration without a draft."""
        return n_tokens - self.rate * self.costs.predict(work_of(n_rows, 0))

    @property
    def worth_of_draft(self) -> float:
        """The same of what iterations that draft have brought lately."""
        return self.drafting.tokens - self.rate * self.costs.predict(self.drafting.work)

    def may_draft(self, otherwise: float) -> bool:
        """Whether the draft is to run in this tree. otherwise: the worth of one without it."""
        is_better = self.worth_of_draft > otherwise
        loss = (otherwise - self.worth_of_draft) / self.rate  # ms
        is_due = self.probed_ms + loss < PROBE_SHARE * self.total_ms
        self.is_probe = is_due and not is_better
        self.probe_loss = loss
        return is_better or is_due

    def take(self, n_tokens: float, n_rows: int, n_levels: int, ms: float) -> None:
        """Take in one iteration. n_tokens: what it gave, or what its tree was to give by chances
        that are counted, which varies less. Work is what is kept, and weighed by what it costs as
        it is known when that is asked: a hiccup, or a slow beginning, makes no kind dearer."""
        work = work_of(n_rows, n_levels)
        if self.is_learning:
            self.costs.fit(work, ms)
        self.overall.take(n_tokens, work)
        self.total_ms += self.costs.predict(work)
        if n_levels:
            self.drafting.take(n_tokens, work)
        if self.is_probe:
            self.probed_ms += self.probe_loss
