"""auto: no thresholds; every choice by what it has been worth so far in this very text.

Two sources of candidates: the draft model, and the n-grams of this text: what the target liked best
the last time it stood after the same one, two or three tokens. Each level, each node and the draft
itself only if worth their time (costs.py); no tree is verified at all if its nodes together are not
worth it: then this is ar.

The draft's candidates are the likeliest, or if the text is sampled one that is drawn: then the
target keeps what both find likely, not only what it draws as well. Of sampled text the n-grams
first promise more than they keep: what the target likes best is not what it draws.

The chance is counted, not believed: for the draft by calibration.py, for the n-grams by the length
of the context and by rank, and apart from these where the draft has chosen otherwise. Both start
from a first guess, and nothing outlives a generation.

    python dynatree.py --method auto --prompt "..."

Shapes: N tree rows, n rows of one level, k candidates per row.
"""

import math
import time
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy
from numpy import ndarray

from draft_tree import MAX_ROWS, Gates, Level, Rule, Tree, setting
from methods.costs import LEVEL, LEVEL_YIELD, ROW, SOME_COSTS, TREE, Account, parse_costs
from methods.ngrams import Context, NGrams
from methods.rules import DrawnLevel, MethodRule, MixedTree, are_retrieved, select, values_of
from methods.settings import MethodSettings, text

# The n-grams' candidates are counted by the tokens of context known and the rank of the candidate
# there, each with a first guess
NGRAM_GUESS = ((0.45, 0.1, 0.05, 0.03), (0.75, 0.08, 0.03, 0.01), (0.85, 0.06, 0.02, 0.01))
BESIDE_GUESS = 0.4  # of that, where the draft has chosen otherwise
MAX_CONTEXT = len(NGRAM_GUESS)
N_RANKS = len(NGRAM_GUESS[0])
GUESS_WEIGHT = 8.0  # counts that a guess stands for
COUNT_DECAY = 0.99  # what an iteration leaves of the counts before it


def first_guess() -> list[float]:
    """The chance of each bin: the n-grams' alone, then beside the draft."""
    alone = [p for ranks in NGRAM_GUESS for p in ranks]
    return [*alone, *(BESIDE_GUESS * p for p in alone)]


def ngram_bin(n_known: int, is_beside: bool) -> int:
    """The bin of the best candidate after so many tokens of context; the next ranks' follow it."""
    n_before = n_known - 1 + (MAX_CONTEXT if is_beside else 0)
    return N_RANKS * n_before


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
class Auto(MethodSettings):
    """auto: both sources, each level and node only while it pays (this project's own)."""

    N: int = setting(48, 1, MAX_ROWS, "most rows per tree, root included")
    D_max: int = setting(8, 0, MAX_ROWS - 1, "most levels drafted; 0 needs no draft")
    costs: str = text(
        "learned",
        parse_costs,
        "of a tree:row:drafting:level, in steps of ar; given, a seed decides a sampled text",
        SOME_COSTS,
    )

    def make_rule(self) -> Rule:
        return AutoRule(self)


MAX_DEPTH = 16  # of what the n-grams propose


class AutoRule(MethodRule):
    """One generation of auto: all that it remembers, has counted and timed so far."""

    draws_candidates = True
    is_calibrated = True
    target_top_k = N_RANKS

    def __init__(self, settings: Auto):
        s = settings
        super().__init__(N_RANKS, s.D_max, s.N)
        self.n_drawn = 1
        self.settings = settings
        # What the target liked best after one to three tokens, the last time it stood there
        self.ngrams: NGrams[list[int]] = NGrams(MAX_CONTEXT)
        self.counts = Counts(first_guess())
        self.account = Account(parse_costs(s.costs))
        self.recent: Context = ()  # of the last token before the root
        # All else is of the tree that is being made or verified
        self.tree: Tree | None = None
        # [N], of each row:
        self.bins: list[int] = []  # where it is counted; -1, nowhere: the root, and what is drafted
        self.contexts: list[Context] = []  # its token included
        self.best: list[list[int]] = []  # what the target likes after it
        self.worth_of_memory = 0.0
        self.n_levels = 0  # drafted

    def begin_tree(self, root: int, max_depth: int) -> int:
        """Make the n-grams' tree, and see whether the draft promises a better one."""
        self.began = time.perf_counter()
        self.limit = max_depth
        self.n_levels = 0
        self.account.open()
        prices = self.account.prices
        self.begin(MixedTree.of(Tree.from_root(root)))
        self.add_remembered(MAX_DEPTH)
        promise = sum(map(math.exp, self.tree.path_logprobs))  # the root's: the bonus
        if promise - 1 <= prices[TREE] + prices[ROW] * (len(self.tree) - 1):
            self.begin(MixedTree.of(Tree.from_root(root)))
            promise = 1.0
        self.worth_of_memory = self.account.worth(promise, len(self.tree))
        may_draft = self.account.may_draft(self.worth_of_memory)
        return super().begin_tree(root, max_depth) if may_draft else 0

    def state(self) -> dict[str, float | str]:
        """What both sources are worth, and what makes this tree."""
        worth_of_draft = self.account.worth_of_draft
        chosen = "memory"
        if self.max_depth and self.account.is_probe:
            chosen = "draft, to try it"
        elif self.max_depth and worth_of_draft > self.worth_of_memory:
            chosen = "draft and memory"
        elif len(self.tree) == 1:
            chosen = "nothing"
        return {"memory": self.worth_of_memory, "draft": worth_of_draft, "chosen": chosen}

    def begin(self, tree: Tree) -> None:
        """This is the tree to add to: its root, so far."""
        self.tree = tree
        self.bins = [-1]
        self.contexts = [self.ngrams.continued(self.recent, tree.tokens[0])]

    def note(self, row: int, bin: int) -> None:
        """What is to be known of the next row of the tree."""
        above = self.contexts[self.tree.parents[row]]
        self.contexts.append(self.ngrams.continued(above, self.tree.tokens[row]))
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
            row = tree.add_retrieved(token, parent, math.log(-negative))
            self.note(row, bin)
            if tree.depths[row] < max_depth:
                self.offer(heap, row, present)

    def offer(self, heap: list, parent: int, present: set[tuple[int, int]]) -> None:
        """Put on the heap what the n-grams know below a row, if it pays and is not there yet."""
        price = self.account.prices[ROW]
        chance_above = math.exp(self.tree.path_logprobs[parent])
        if chance_above < price:
            return
        n_known, best = self.ngrams.recall(self.contexts[parent])
        first = ngram_bin(n_known, is_beside=self.tree.draft_slots[parent] >= 0)
        for bin, token in enumerate(best or (), start=first):
            chance = chance_above * self.counts.chances[bin]
            if chance >= price and (parent, token) not in present:
                heappush(heap, (-chance, parent, token, bin))

    def add_gates(self, level: Level) -> Gates:
        """Candidates that pay for their rows."""
        prices = self.account.prices
        is_paying = level.path_logprobs >= math.log(prices[ROW])
        if isinstance(level, DrawnLevel):  # drawn: the one candidate is added, whatever it is
            is_paying = numpy.ones_like(is_paying)
        self.n_levels += 1
        # All of these run, or none does
        added = level.path_logprobs[is_paying & (values_of(level) > -math.inf)]
        self.goes_on = bool(LEVEL_YIELD * numpy.exp(added).sum() >= prices[LEVEL])
        return {"c_row": is_paying}

    def expand_gates(self, level: Level) -> Gates:
        """Another level, if together they pay for that."""
        return {"c_level": self.goes_on}

    def finish_tree(self, tree: Tree) -> Tree:
        """The drafted tree with the n-grams' candidates, or these alone."""
        if len(tree) > 1:
            tree = MixedTree.of(tree)
            self.begin(tree)
            for row in range(1, len(tree)):
                self.note(row, -1)
            self.add_remembered(min(self.limit, MAX_DEPTH))
        self.tree.draft_slots[0] = tree.draft_slots[0]  # the draft may have run the root
        rows = [row for row in range(len(self.tree)) if self.tree.depths[row] <= self.limit]
        rows.sort(key=self.tree.depths.__getitem__)  # of equals, the drafted ones stay first
        self.tree = select(self.tree, rows)
        self.bins = [self.bins[row] for row in rows]
        self.contexts = [self.contexts[row] for row in rows]
        return self.tree

    def observe_target(self, tokens: list[int], candidates: ndarray) -> None:
        """Remember the prompt at once; of a tree it must first be known what was accepted."""
        self.best = candidates.tolist()
        if self.tree is None:
            for token, best in zip(tokens, self.best, strict=True):
                self.recent = self.ngrams.continued(self.recent, token)
                self.ngrams.write(self.recent, best)

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Remember what the target likes, count what was right, and learn what it cost."""
        # Every row, for what is wrong here may be right elsewhere; what is true comes last
        others = [row for row in range(len(tree)) if row not in path]
        for row in others + path:
            self.ngrams.write(self.contexts[row], self.best[row])
        self.recent = self.contexts[path[-1]]
        tried = [row for row in range(1, len(tree)) if tree.parents[row] in path]
        not_drafted = are_retrieved(tree)
        retrieved = [row for row in tried if not_drafted[row]]
        self.counts.add([(self.bins[row], row in path) for row in retrieved])
        ms = (time.perf_counter() - self.began) * 1e3
        self.account.take(len(path), len(tree), self.n_levels, ms)
