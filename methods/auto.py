"""auto: no thresholds; every choice by what it has been worth so far in this very text.

Two sources of candidates: the draft model, and the n-grams of this text: what the target liked best
the last time it stood after the same one, two or three tokens. What an iteration gains is tokens,
what it costs is time, and time is worth the current rate of tokens per millisecond. So

    the draft runs if tokens - rate x ms of iterations with it has been higher than what the
        n-grams promise now; while it is off, it is probed for at most 1 % of the time
    another level is drafted if the tokens it may add are worth its time
    a node is verified if its chance of acceptance is worth a row's time
    no tree is verified at all if its nodes together are not worth it: then this is ar

The draft's candidates are the likeliest, or if the text is sampled one that is drawn: then the
target keeps what both find likely, not only what it draws as well. Of sampled text the n-grams
first promise more than they keep: what the target likes best is not what it draws.

The chance is counted, not believed: for the draft by its confidence, for the n-grams by the length
of the context and by rank, and apart from these where the draft has chosen otherwise. The costs are
fitted to the times of the iterations so far. Both start from a first guess, and nothing outlives a
generation. This is the hardware-aware tree construction that the first DynaTree paper leaves to the
future.

    python dynatree.py --method auto --prompt "..."

First comes what is learned: costs, worth, chances; then the rule, its hooks in the order in which
they are called.

Shapes: N tree rows, n rows of one level, k candidates per row.
"""

import math
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy
from numpy import ndarray

from draft_tree import MAX_ROWS, Gates, Level, Rule, Settings, Tree, lone, setting
from methods.ngrams import Context, NGrams

# What an iteration's time is made of, in this order wherever costs are listed
STEP, TREE, ROW, DRAFTING, LEVEL = range(5)


def work_of(n_rows: int, n_levels: int) -> list[float]:
    """How often an iteration pays each cost: one of n_rows verified, and n_levels drafted."""
    return [1.0, float(n_rows > 1), n_rows - 1.0, float(n_levels > 0), float(n_levels)]


class Costs:
    """Milliseconds of an iteration: its work, weighted; the weights are fitted as times come in."""

    def __init__(self, first_guess: list[float]):
        """first_guess: each cost, in steps of ar."""
        self.weights = numpy.array(first_guess)  # [5]
        self.spread = numpy.diag((self.weights * 0.5) ** 2)  # [5, 5], how unsure they are
        self.n_seen = 0

    def predict(self, work: list[float]) -> float:
        """Milliseconds; before the first iteration, steps of ar."""
        return float(self.weights @ work)

    def fit(self, work: list[float], ms: float) -> float:
        """Take in one iteration.

        Returns what earlier predictions are to be multiplied with: the first time, a step of ar.
        """
        unit = 1.0
        if self.n_seen == 0:
            unit = ms / self.predict(work)
            self.weights = self.weights * unit
            self.spread = self.spread * unit**2
        self.n_seen += 1
        if self.n_seen <= 32 or self.n_seen % 8 == 0:  # later on little is left to learn
            self.correct(work, ms)
        return unit

    def correct(self, work: list[float], ms: float) -> None:
        """Move the weights towards what this iteration took (recursive least squares)."""
        x = numpy.array(work)
        expected = self.predict(work)
        limit = 0.5 * expected
        error = min(max(ms - expected, -limit), limit)  # a hiccup is no cost
        gain = self.spread @ x
        gain /= x @ gain + (0.2 * expected) ** 2
        self.weights = (self.weights + gain * error).clip(min=1e-9)
        self.spread -= numpy.outer(gain, x @ self.spread)


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


# Candidates are counted in bins, each with a first guess: the draft's by its confidence in them ...
CONFIDENCE = numpy.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95], numpy.float32)  # bounds
DRAFT_GUESS = (0.02, 0.07, 0.14, 0.27, 0.45, 0.65, 0.8, 0.93, 0.98)
# ... and the n-grams' by the tokens of context it knows and the rank of the candidate there
NGRAM_GUESS = ((0.45, 0.1, 0.05, 0.03), (0.75, 0.08, 0.03, 0.01), (0.85, 0.06, 0.02, 0.01))
BESIDE_GUESS = 0.4  # of that, where the draft has chosen otherwise
MAX_CONTEXT = len(NGRAM_GUESS)
N_RANKS = len(NGRAM_GUESS[0])
GUESS_WEIGHT = 8.0  # counts that a guess stands for
COUNT_DECAY = 0.99  # what an iteration leaves of the counts before it


def first_guess() -> list[float]:
    """The chance of each bin: the draft's, the n-grams' alone, the n-grams' beside the draft."""
    alone = [p for ranks in NGRAM_GUESS for p in ranks]
    return [*DRAFT_GUESS, *alone, *(BESIDE_GUESS * p for p in alone)]


def ngram_bin(n_known: int, is_beside: bool) -> int:
    """The bin of the best candidate after so many tokens of context; the next ranks' follow it."""
    n_before = n_known - 1 + (MAX_CONTEXT if is_beside else 0)
    return len(DRAFT_GUESS) + N_RANKS * n_before


class Counts:
    """How often candidates have been right where the text came by, lately above all; by bin."""

    def __init__(self, guess: list[float]):
        self.guess = numpy.array(guess)
        self.hits = GUESS_WEIGHT * self.guess
        self.tries = numpy.full(len(guess), GUESS_WEIGHT)
        self.chances = guess  # hits / tries

    def add(self, outcomes: list[tuple[int, bool]]) -> None:
        """Take in one iteration's (bin, was it right)."""
        # Back towards the guess
        self.hits += (1 - COUNT_DECAY) * (GUESS_WEIGHT * self.guess - self.hits)
        self.tries += (1 - COUNT_DECAY) * (GUESS_WEIGHT - self.tries)
        for bin, is_right in outcomes:
            self.hits[bin] += is_right
            self.tries[bin] += 1
        self.chances = (self.hits / self.tries).tolist()


@dataclass(frozen=True)
class Auto(Settings):
    """auto: both sources, each level and node only while it pays (this project's own)."""

    N: int = setting(48, 1, MAX_ROWS, "most rows per tree, root included")
    D_max: int = setting(8, 0, MAX_ROWS - 1, "most levels drafted; 0 needs no draft")
    c_tree: float = setting(0.3, 0.0, 100.0, "cost of a tree beside its rows, in steps of ar")
    c_row: float = setting(0.04, 0.0001, 100.0, "cost of a row")
    c_draft: float = setting(0.2, 0.0, 100.0, "cost of drafting beside its levels")
    c_level: float = setting(0.4, 0.0, 100.0, "cost of a level drafted")
    learn: bool = setting(True, False, True, "fit the costs; off: a seed decides a sampled text")

    def rule(self) -> Rule:
        return AutoRule(self)


MAX_DEPTH = 16  # of what the n-grams propose
PROBE_SHARE = 0.01
LEVEL_YIELD = 0.7  # of its parents' chance, what a level may be hoped to add


class AutoRule(Rule):
    """One generation of auto: all that it remembers, has counted and timed so far."""

    is_drawing = True
    n_read = N_RANKS

    def __init__(self, settings: Auto):
        s = settings
        super().__init__(N_RANKS, s.D_max, max_rows=s.N, max_drafted=s.N)
        self.n_drawn = 1
        self.settings = settings
        # What the target liked best after one to three tokens, the last time it stood there
        self.ngrams: NGrams[list[int]] = NGrams(MAX_CONTEXT)
        self.counts = Counts(first_guess())
        self.costs = Costs([1.0, s.c_tree, s.c_row, s.c_draft, s.c_level])
        self.overall = Worth(1.0, 1.0)  # all iterations
        self.drafting = Worth(3.3, self.costs.predict(work_of(9, 3)))  # those; invites a try
        self.total_ms = 0.0
        self.probed_ms = 0.0
        self.recent: Context = ()  # of the last token before the root
        # All else is of the tree that is being made or verified
        self.tree: Tree | None = None
        # [N], of each row:
        self.chances: list[float] = []  # to be accepted with all above it
        self.bins: list[int] = []  # where it is counted; -1, nowhere: the root is always accepted
        self.contexts: list[Context] = []  # its token included
        self.best: list[list[int]] = []  # what the target likes after it
        self.prices: list[float] = []  # tokens that each cost is worth
        self.worth_of_memory = self.worth_of_draft = 0.0
        self.is_probe = False
        self.n_levels = 0  # drafted
        self.above = numpy.zeros(0)  # log-chances of what the last level added: the next one's rows
        self.drafted: list[tuple[float, int]] = []  # log of chance and bin of all that were added

    def levels(self, root: int) -> int:
        """Make the n-grams' tree, and see whether the draft promises a better one."""
        self.n_levels, self.above, self.drafted = 0, numpy.zeros(1), []
        rate = self.overall.tokens / self.overall.ms
        self.prices = [rate * weight for weight in self.costs.weights.tolist()]
        self.begin(lone(root))
        self.add_remembered(MAX_DEPTH)
        if sum(self.chances[1:]) <= self.prices[TREE] + self.prices[ROW] * (len(self.tree) - 1):
            self.begin(lone(root))
        # Tokens beyond what their time is worth: what the n-grams promise, and what iterations that
        # draft have brought
        promise = sum(self.chances)  # the root's: the bonus
        self.worth_of_memory = promise - rate * self.costs.predict(work_of(len(self.tree), 0))
        self.worth_of_draft = self.drafting.tokens - rate * self.drafting.ms
        is_better = self.worth_of_draft > self.worth_of_memory
        is_due = self.probed_ms + self.drafting.ms < PROBE_SHARE * self.total_ms
        self.is_probe = is_due and not is_better and self.max_depth > 0
        return self.max_depth if is_better or self.is_probe else 0

    def state(self) -> dict[str, float | str]:
        """What both sources are worth, and what makes this tree."""
        chosen = "memory"
        if self.is_probe:
            chosen = "draft, to try it"
        elif self.max_depth and self.worth_of_draft > self.worth_of_memory:
            chosen = "draft and memory"
        elif len(self.tree) == 1:
            chosen = "nothing"
        return {"memory": self.worth_of_memory, "draft": self.worth_of_draft, "chosen": chosen}

    def begin(self, tree: Tree) -> None:
        """This is the tree to add to: its root, so far."""
        self.tree = tree
        self.chances, self.bins = [1.0], [-1]
        self.contexts = [self.ngrams.continued(self.recent, tree.tokens[0])]

    def note(self, row: int, chance: float, bin: int) -> None:
        """What is to be known of the next row of the tree."""
        above = self.contexts[self.tree.parents[row]]
        self.contexts.append(self.ngrams.continued(above, self.tree.tokens[row]))
        self.chances.append(chance)
        self.bins.append(bin)

    def add_remembered(self, max_depth: int) -> None:
        """Add the n-grams' likeliest candidates, best first, as long as each pays for its row."""
        tree = self.tree
        present = set(zip(tree.parents, tree.tokens, strict=True))
        heap: list[tuple[float, int, int, int]] = []  # - chance, row of the parent, token, bin
        for row in range(len(tree)):
            if tree.depths[row] < max_depth:
                self.offer(heap, row, present)
        while heap and len(tree) < self.max_rows:
            negative, parent, token, bin = heappop(heap)
            row = tree.add(token, parent, math.log(-negative), is_retrieved=True)
            self.note(row, -negative, bin)
            if tree.depths[row] < max_depth:
                self.offer(heap, row, present)

    def offer(self, heap: list, parent: int, present: set[tuple[int, int]]) -> None:
        """Put on the heap what the n-grams know below a row, if it pays and is not there yet."""
        price, chance_above = self.prices[ROW], self.chances[parent]
        if chance_above < price:
            return
        n_known, best = self.ngrams.recall(self.contexts[parent])
        first = ngram_bin(n_known, is_beside=self.tree.draft_slots[parent] >= 0)
        for bin, token in enumerate(best or (), start=first):
            chance = chance_above * self.counts.chances[bin]
            if chance >= price and (parent, token) not in present:
                heappush(heap, (-chance, parent, token, bin))

    def expand(self, level: Level) -> tuple[Gates, Gates]:
        """Candidates that pay for their rows; another level, if together they pay for that."""
        bins = numpy.searchsorted(CONFIDENCE, numpy.exp(level.logprobs), side="right")  # [n, k]
        chances = numpy.log(self.counts.chances[: len(DRAFT_GUESS)])
        log_chances = self.above[:, None] + chances[bins]  # [n, k]
        is_paying = log_chances >= math.log(self.prices[ROW])
        if level.is_drawn:  # what is added must not depend on what was drawn: always the one
            is_paying = numpy.ones_like(is_paying)
        is_added = is_paying & level.is_possible
        self.n_levels += 1
        self.above = log_chances[is_added]  # all of them run, or none does
        self.drafted += zip(self.above.tolist(), bins[is_added].tolist(), strict=True)
        hoped = LEVEL_YIELD * numpy.exp(self.above).sum()
        return {"c_row": is_paying}, {"c_level": hoped >= self.prices[LEVEL]}

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """The drafted tree with the n-grams' candidates, or these alone."""
        if len(tree) > 1:
            self.begin(tree)
            rows = range(1, len(tree))  # the budget may have cut the last level
            for row, (log_chance, bin) in zip(rows, self.drafted, strict=False):
                tree.path_logprobs[row] = log_chance  # as counted
                self.note(row, math.exp(log_chance), bin)
            self.add_remembered(min(max_depth, MAX_DEPTH))
        self.tree.draft_slots[0] = tree.draft_slots[0]  # the draft may have run the root
        rows = [row for row in range(len(self.tree)) if self.tree.depths[row] <= max_depth]
        rows.sort(key=self.tree.depths.__getitem__)  # of equals, the drafted ones stay first
        self.tree = self.tree.take(rows)
        self.bins = [self.bins[row] for row in rows]
        self.contexts = [self.contexts[row] for row in rows]
        return self.tree

    def read(self, tokens: list[int], candidates: ndarray) -> None:
        """Remember the prompt at once; of a tree it must first be known what was accepted."""
        self.best = candidates.tolist()
        if self.tree is None:
            for token, best in zip(tokens, self.best, strict=True):
                self.recent = self.ngrams.continued(self.recent, token)
                self.ngrams.write(self.recent, best)

    def adapt(self, tree: Tree, path: list[int], ms: float) -> None:
        """Remember what the target likes, count what was right, and learn what it cost."""
        # Every row, for what is wrong here may be right elsewhere; what is true comes last
        others = [row for row in range(len(tree)) if row not in path]
        for row in others + path:
            self.ngrams.write(self.contexts[row], self.best[row])
        self.recent = self.contexts[path[-1]]
        tried = [row for row in range(1, len(tree)) if tree.parents[row] in path]
        self.counts.add([(self.bins[row], row in path) for row in tried])
        work = work_of(len(tree), self.n_levels)
        if self.settings.learn:
            unit = self.costs.fit(work, ms)
            self.overall.ms *= unit
            self.drafting.ms *= unit
        else:
            ms = self.costs.predict(work)
        self.overall.take(len(path), ms)
        self.total_ms += ms
        if self.n_levels:
            self.drafting.take(len(path), ms)
        if self.is_probe:
            self.probed_ms += ms
