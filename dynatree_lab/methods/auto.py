"""auto: no thresholds; measured costs and acceptance rates decide which rows and levels to add.

There are two sources of candidates. One is the draft model. The other is an index of n-grams: for
each context of one to three tokens, the target's likeliest next tokens when it last ran this
context. Each level, each node and the draft itself must pay for its time (costs.py). If the n-gram
nodes together do not pay for verifying a tree, and nothing is drafted, this is ar.

The draft's candidates are the top k, or for sampled text one drawn token. A drawn token is accepted
with probability min(1, p / q), where p is the target's probability and q the draft's. An undrawn
token is accepted only if the target draws it.

Acceptance probabilities are learned in each generation: for the draft by calibration.py, for
n-grams by counting. Each context length and each rank has a count. Children of rows that the draft
has run have counts of their own, because the draft has proposed other tokens below these rows. In
sampled text all of these rates are lower, because the target often draws another token than its
likeliest. So a factor that all of them share is learned as well.

    python -m dynatree_lab --method auto --prompt "..."

Shapes: N tree rows, n rows of one level, k candidates per row.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
from numpy import ndarray

from draft_tree import MAX_LEVELS, MAX_ROWS, Gates, Level, Rule, Tree, setting
from dynatree_lab.methods.costs import (
    EXAMPLE_COSTS,
    ROW,
    TREE,
    CostTracker,
    parse_costs,
)
from dynatree_lab.methods.ngrams import Context, NGrams
from dynatree_lab.methods.rules import (
    DrawnLevel,
    MethodRule,
    MixedTree,
    Proposal,
    add_likeliest,
    added_mask,
    select,
)
from dynatree_lab.methods.settings import MethodSettings, text

# Initial acceptance rates of n-gram candidates: by length of the known context, then by rank
INITIAL_RATES = ((0.45, 0.1, 0.05, 0.03), (0.75, 0.08, 0.03, 0.01), (0.85, 0.06, 0.02, 0.01))
RUN_BY_DRAFT_FACTOR = 0.4  # of these rates, for children of rows that the draft has run
MAX_CONTEXT = len(INITIAL_RATES)
N_RANKS = len(INITIAL_RATES[0])
PRIOR_WEIGHT = 8.0  # trials that an initial rate stands for
FACTOR_WEIGHT = 2.0  # expected hits that the initial factor of all rates, 1, stands for
COUNT_DECAY = 0.99  # by which each iteration multiplies the counts
MAX_NGRAM_DEPTH = 16  # of n-gram nodes


class NGramAcceptance:
    """Acceptance rates of n-gram candidates by bin; recent iterations count most.

    A bin begins with its initial rate times a factor that all bins share. So a few outcomes show
    that a text is sampled, whose rates are all lower. The factor is at most 1.
    """

    def __init__(self, initial_rates: ndarray):
        self.initial_rates = initial_rates
        self.hits, self.tries = numpy.zeros((2, len(initial_rates)))
        self.rates = initial_rates.tolist()

    def update(self, outcomes: list[tuple[int, bool]]) -> None:
        """Record one iteration's tried candidates, each as (bin, is_accepted)."""
        self.hits *= COUNT_DECAY
        self.tries *= COUNT_DECAY
        for bin, is_accepted in outcomes:
            self.hits[bin] += is_accepted
            self.tries[bin] += 1
        expected = self.tries @ self.initial_rates
        factor = min((FACTOR_WEIGHT + self.hits.sum()) / (FACTOR_WEIGHT + expected), 1.0)
        hits = PRIOR_WEIGHT * factor * self.initial_rates + self.hits
        self.rates = (hits / (PRIOR_WEIGHT + self.tries)).tolist()


@dataclass(frozen=True)
class Auto(MethodSettings):
    """auto: draft and n-grams, each level and node only while it pays (this project's own)."""

    N: int = setting(48, 1, MAX_ROWS, "maximum rows per tree, root included")
    D_max: int = setting(8, 0, MAX_LEVELS, "maximum levels drafted; 0 needs no draft model")
    costs: str = text(
        "learned",
        parse_costs,
        "learned, or tree:row:drafting:level in ar iterations, for reproducible samples",
        EXAMPLE_COSTS,
    )

    def make_rule(self) -> Rule:
        return AutoRule(self)


class AutoRule(MethodRule):
    """The rule of auto: the n-grams, acceptance rates and costs of one generation."""

    draws_candidates = True
    is_chain = True  # n_drawn is 1
    is_calibrated = True
    can_be_gated = False  # it has gates by cost of its own
    target_top_k = N_RANKS

    def __init__(self, settings: Auto):
        super().__init__(N_RANKS, settings.D_max, settings.N)
        self.n_drawn = 1
        self.ngrams: NGrams[list[int]] = NGrams(MAX_CONTEXT)  # the target's best next tokens
        # The bins of INITIAL_RATES, then as many for children of rows that the draft has run
        rates = numpy.ravel(INITIAL_RATES)
        self.ngram_acceptance = NGramAcceptance(numpy.append(rates, RUN_BY_DRAFT_FACTOR * rates))
        self.tracker = CostTracker(parse_costs(settings.costs))
        self.recent: Context = ()  # of the last token before the root
        self.n_observed = 0  # tokens of the prompt
        # All else is about the tree that grows or is verified
        self.tree: MixedTree | None = None
        self.bins: list[int] = []  # [N], where a row is counted; -1 for the root and drafted rows
        self.contexts: list[Context] = []  # [N], each ends with the row's token
        self.top_ids: list[list[int]] = []  # [N, target_top_k], the target's best tokens after it
        self.ngram_net_gain = 0.0
        self.n_levels = 0  # drafted
        self.parents_sum = 1.0  # acceptance probabilities of the rows that the draft runs next

    def start(self, prompt: list[int]) -> None:
        self.began = time.perf_counter()

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        """Build a tree of n-gram nodes, and return 0 levels unless drafting may gain more."""
        self.began = time.perf_counter()
        self.depth_limit = max_depth
        self.n_levels, self.parents_sum = 0, 1.0
        self.tracker.begin_tree()
        self.set_tree(Tree.from_root(root_token), MAX_NGRAM_DEPTH)
        expected = sum(map(math.exp, self.tree.path_logprobs))  # the root's term: the bonus token
        price = self.tracker.prices[TREE] + self.tracker.prices[ROW] * (len(self.tree) - 1)
        if expected - 1 <= price:
            self.set_tree(Tree.from_root(root_token), ngram_depth=0)
            expected = 1.0
        self.ngram_net_gain = self.tracker.net_gain(expected, len(self.tree))
        should_draft = self.tracker.should_draft(self.ngram_net_gain)
        n_levels = super().begin_tree(root_token, max_depth) if should_draft else 0
        self.drafting_began = time.perf_counter()
        return n_levels

    def state(self) -> dict[str, float | str]:
        """Return the net gain of each source, and the source of this tree."""
        draft_net_gain = self.tracker.net_gain_of_drafting
        source = "n-grams" if len(self.tree) > 1 else "nothing"
        if self.max_depth and self.tracker.is_probe:
            source = "draft (probe)"
        elif self.max_depth and draft_net_gain > self.ngram_net_gain:
            source = "draft and n-grams"
        return {"ngrams": self.ngram_net_gain, "draft": draft_net_gain, "source": source}

    def set_tree(self, drafted: Tree, ngram_depth: int) -> None:
        """Make this the current tree, and add n-gram candidates down to a depth, the likeliest
        first, while each pays for its row."""
        self.tree = MixedTree.from_tree(drafted)
        self.bins, self.contexts = [], []
        self.ngram_depth = ngram_depth
        starts = [(row, drafted.path_logprobs[row], -1) for row in range(len(drafted))]
        add_likeliest(self.tree, self.max_rows, starts, self.propose)

    def propose(self, row: int, path_logprob: float, bin: int) -> Iterator[Proposal]:
        """Append the context and the bin of the next row of the tree, and return the n-gram
        candidates below it that pay, the likeliest first."""
        tree = self.tree
        if row < len(self.bins):  # a drafted row, which has proposed them already
            return iter(())
        above = self.contexts[tree.parents[row]] if row else self.recent
        self.contexts.append(self.ngrams.extend_context(above, tree.tokens[row]))
        self.bins.append(bin)
        row_prob, price = math.exp(path_logprob), self.tracker.prices[ROW]
        if row_prob < price or tree.depths[row] >= self.ngram_depth:
            return iter(())
        n_known, best = self.ngrams.find_longest(self.contexts[row])
        is_run_by_draft = tree.draft_slots[row] >= 0
        first = N_RANKS * (n_known - 1 + MAX_CONTEXT * is_run_by_draft)
        found = []
        for bin, token in enumerate(best or (), start=first):
            prob = row_prob * self.ngram_acceptance.rates[bin]
            if prob >= price:
                found.append((-prob, row, token, token, math.log(prob), bin))
        return iter(sorted(found))

    def add_gates(self, level: Level) -> Gates:
        """Return c_row, which passes candidates that pay for their rows."""
        self.n_levels += 1
        # The one drawn candidate is added, whatever it is
        pays = isinstance(level, DrawnLevel) or self.tracker.rows_pay(level.path_logprobs)
        self.is_added = added_mask(level, {"c_row": pays})
        return {"c_row": pays}

    def expand_gates(self, level: Level) -> Gates:
        """Return c_level, which passes all added rows if together they pay for another level."""
        probs = numpy.exp(level.path_logprobs[self.is_added])
        self.tracker.record_level(self.parents_sum, probs.sum(), len(probs))
        self.parents_sum = probs.sum()
        return {"c_level": self.tracker.level_pays(self.tracker.level_gain * self.parents_sum)}

    def finish_tree(self, tree: Tree) -> Tree:
        """Return the drafted tree with n-gram nodes, or the n-gram tree if nothing was drafted."""
        self.draft_ms = (time.perf_counter() - self.drafting_began) * 1e3
        if len(tree) > 1:
            self.set_tree(tree, min(self.depth_limit, MAX_NGRAM_DEPTH))
        # The draft may have run the root, even if none of its candidates became a row
        self.tree.draft_slots[0] = tree.draft_slots[0]
        rows = [row for row in range(len(self.tree)) if self.tree.depths[row] <= self.depth_limit]
        rows.sort(key=self.tree.depths.__getitem__)  # stable: drafted rows stay first in a level
        self.tree = select(self.tree, rows)
        self.bins = [self.bins[row] for row in rows]
        self.contexts = [self.contexts[row] for row in rows]
        return self.tree

    def observe_target(self, tokens: list[int], top_ids: ndarray) -> None:
        """Index the prompt's tokens. Those of a tree wait for `adapt`, which has the path."""
        self.top_ids = top_ids.tolist()
        if self.tree is None:  # a pass over the prompt
            self.n_observed += len(tokens)
            self.tracker.observe_prompt(self.n_observed, (time.perf_counter() - self.began) * 1e3)
            for token, best in zip(tokens, self.top_ids, strict=True):
                self.recent = self.ngrams.extend_context(self.recent, token)
                self.ngrams.write(self.recent, best)

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Index all rows, count the outcomes of the tried n-gram rows, and record the costs."""
        # Rejected rows are indexed too, because their tokens may be right elsewhere. The path comes
        # last, so that its entries replace those of the same contexts
        others = [row for row in range(len(tree)) if row not in path]
        for row in others + path:
            self.ngrams.write(self.contexts[row], self.top_ids[row])
        self.recent = self.contexts[path[-1]]
        tried = [row for row in range(1, len(tree)) if tree.parents[row] in path]
        outcomes = [(self.bins[row], row in path) for row in tried if self.bins[row] >= 0]
        self.ngram_acceptance.update(outcomes)
        ms = (time.perf_counter() - self.began) * 1e3
        self.tracker.record(len(path), len(tree), self.n_levels, self.draft_ms, ms - self.draft_ms)
