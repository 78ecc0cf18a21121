"""auto: no thresholds; measured costs and acceptance rates decide which rows and levels to add.

There are two sources of candidates. One is the draft model. The other is an index of n-grams: for
each context of one to three tokens, the target's likeliest next tokens when it last ran this
context. Each level, each node and the draft itself must pay for its time (cost_gates.py). If the
n-gram nodes together do not pay for verifying a tree, and nothing is drafted, this is ar.

The draft's candidates are the top k, or for sampled text one drawn token. A drawn token is accepted
with probability min(1, p / q), where p is the target's probability and q the draft's. An undrawn
token is accepted only if the target draws it.

Acceptance probabilities are learned in each generation: for the draft by calibration.py, for
n-grams by counting. Each context length and each rank has a count. Below a row that the draft has
run, the best tokens are taken already, so these children are counted apart. In sampled text all of
these rates are lower, because the target often draws another token than its likeliest. So a factor
that all of them share is learned as well.

    python -m dynatree_lab --method auto --prompt "..."

Shapes: N tree rows, n rows of one level, k candidates per row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import mul

from numpy import ndarray

from draft_tree import MAX_LEVELS, MAX_ROWS, Rule, Tree, setting
from dynatree_lab.methods.cost_gates import CostGates
from dynatree_lab.methods.costs import EXAMPLE_COSTS, ROW, parse_costs
from dynatree_lab.methods.ngrams import Context, NGrams
from dynatree_lab.methods.rules import (
    MethodRule,
    MixedTree,
    Proposal,
    add_likeliest,
    breadth_first,
)
from dynatree_lab.methods.settings import MethodSettings, text

# Initial acceptance rates of n-gram candidates: by length of the known context, then by rank
INITIAL_RATES = ((0.45, 0.1, 0.05, 0.03), (0.75, 0.08, 0.03, 0.01), (0.85, 0.06, 0.02, 0.01))
RUN_BY_DRAFT_FACTOR = 0.4  # of these rates, for children of rows that the draft has run
MAX_CONTEXT = len(INITIAL_RATES)
N_RANKS = len(INITIAL_RATES[0])
PRIOR_WEIGHT = 8.0  # trials that an initial rate stands for
FACTOR_WEIGHT = 2.0  # expected hits that the initial factor of all rates, 1, stands for
COUNT_DECAY = 0.99  # by which each tree with n-grams multiplies the counts
MAX_NGRAM_DEPTH = 16  # of n-gram nodes


class NGramAcceptance:
    """Acceptance rates of n-gram candidates by bin; recent trees count most.

    A bin begins with its initial rate times a factor that all bins share. So a few outcomes show
    that a text is sampled, whose rates are all lower. The factor is at most 1.
    """

    def __init__(self, initial_rates: list[float]):
        self.initial_rates = self.rates = initial_rates
        self.hits = [0.0] * len(initial_rates)
        self.tries = list(self.hits)

    def update(self, outcomes: list[tuple[int, bool]]) -> None:
        """Record the tried candidates of one tree, each as (bin, is_accepted)."""
        self.hits = [COUNT_DECAY * n for n in self.hits]
        self.tries = [COUNT_DECAY * n for n in self.tries]
        for bin, is_accepted in outcomes:
            self.hits[bin] += is_accepted
            self.tries[bin] += 1
        expected = sum(map(mul, self.tries, self.initial_rates))
        factor = min((FACTOR_WEIGHT + sum(self.hits)) / (FACTOR_WEIGHT + expected), 1.0)
        counts = zip(self.initial_rates, self.hits, self.tries, strict=True)
        self.rates = [
            (PRIOR_WEIGHT * factor * initial + hits) / (PRIOR_WEIGHT + tries)
            for initial, hits, tries in counts
        ]


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


class AutoRule(CostGates):
    """The rule of auto: cost gates over a rule that wants all candidates, and the n-grams of one
    generation, which need no draft."""

    def __init__(self, settings: Auto):
        every_candidate = MethodRule(N_RANKS, settings.D_max, settings.N)
        super().__init__(every_candidate, parse_costs(settings.costs))
        self.facts = replace(
            self.facts,
            draws_candidates=True,
            n_drawn=1,
            is_chain=True,  # of drawn rows
            is_calibrated=True,
            can_be_gated=False,  # it is gated already
            target_top_k=N_RANKS,
        )
        self.ngrams: NGrams[list[int]] = NGrams(MAX_CONTEXT)  # the target's best next tokens
        # The bins of INITIAL_RATES, then as many for children of rows that the draft has run
        rates = [rate for of_length in INITIAL_RATES for rate in of_length]
        rates += [RUN_BY_DRAFT_FACTOR * rate for rate in rates]
        self.ngram_acceptance = NGramAcceptance(rates)
        self.recent: Context = ()  # of the last token before the root
        self.n_observed = 0  # tokens of the prompt
        # All else is about the tree that grows or is verified
        self.tree: MixedTree | None = None
        self.top_ids: list[list[int]] = []  # [N, target_top_k], the target's best tokens after it
        self.max_ngram_depth = 0
        self.net_gain = 0.0  # of the tree without a draft

    def start(self, prompt: list[int]) -> None:
        self.tracker.begin_tree()

    def net_gain_without(self, root_token: int, max_depth: int) -> float:
        """Build a tree of n-grams, or of its root alone if they do not pay together. Return its net
        gain."""
        self.max_ngram_depth = min(max_depth, MAX_NGRAM_DEPTH)
        self.grow_ngrams(Tree.from_root(root_token))
        expected = sum(map(math.exp, self.tree.path_logprobs))  # the root's term: the bonus token
        of_ngrams = self.tracker.net_gain(expected, len(self.tree))
        of_root = super().net_gain_without(root_token, max_depth)
        if of_ngrams < of_root:
            self.tree = MixedTree.from_tree(Tree.from_root(root_token))
        self.net_gain = max(of_ngrams, of_root)
        return self.net_gain

    def state(self) -> dict[str, float | str]:
        """Return the net gain of each source, and the source of this tree."""
        draft_net_gain = self.tracker.net_gain_of_drafting
        source = "n-grams" if len(self.tree) > 1 else "nothing"
        if self.max_depth and self.tracker.is_probe:
            source = "draft (probe)"
        elif self.max_depth and draft_net_gain > self.net_gain:
            source = "draft and n-grams"
        return {"ngrams": self.net_gain, "draft": draft_net_gain, "source": source}

    def grow_ngrams(self, drafted: Tree) -> None:
        """Make this the current tree, and add n-gram candidates, the likeliest first, while each
        pays for its row."""
        self.tree = MixedTree.from_tree(drafted)
        starts = dict(enumerate(self.tree.path_logprobs))
        add_likeliest(self.tree, self.max_rows, starts, self.propose)

    def propose(self, row: int, path_logprob: float) -> Iterator[Proposal]:
        """Return the n-gram candidates below a row that pay, the likeliest first."""
        row_prob, price = math.exp(path_logprob), self.tracker.prices[ROW]
        if row_prob < price or self.tree.depths[row] >= self.max_ngram_depth:
            return iter(())
        found = []
        for bin, token in self.candidates_below(row):
            prob = row_prob * self.ngram_acceptance.rates[bin]
            if prob >= price:
                found.append(Proposal(-math.log(prob), row, bin, token))
        return iter(sorted(found))

    def candidates_below(self, row: int) -> list[tuple[int, int]]:
        """Return the n-gram candidates below a row, each after the bin in which it is counted."""
        n_known, best = self.ngrams.find_longest(self.context_of(row))
        is_run_by_draft = self.tree.draft_slots[row] >= 0
        first = N_RANKS * (n_known - 1 + MAX_CONTEXT * is_run_by_draft)
        return list(enumerate(best or (), start=first))

    def context_of(self, row: int) -> Context:
        """Return the last tokens up to a row."""
        tokens: Context = ()
        while row >= 0 and len(tokens) < MAX_CONTEXT:
            tokens = (self.tree.tokens[row], *tokens)
            row = self.tree.parents[row]
        return (*self.recent, *tokens)[-MAX_CONTEXT:]

    def finish_tree(self, tree: Tree) -> Tree:
        """Return the drafted tree with n-gram nodes, or the n-gram tree if nothing was drafted."""
        tree = super().finish_tree(tree)
        if len(tree) > 1:
            self.grow_ngrams(tree)
        # The draft may have run the root, even if none of its candidates became a row
        self.tree.draft_slots[0] = tree.draft_slots[0]
        if any(self.tree.are_retrieved):
            self.tree = breadth_first(self.tree)
        return self.tree

    def observe_target(self, tokens: list[int], top_ids: ndarray) -> None:
        """Index the prompt's tokens. Those of a tree wait for `adapt`, which has the path."""
        self.top_ids = top_ids.tolist()
        if self.tree is None:  # a pass over the prompt
            self.n_observed += len(tokens)
            self.tracker.observe_prompt(self.n_observed, self.tracker.elapsed_ms())
            for token, best in zip(tokens, self.top_ids, strict=True):
                self.recent = self.ngrams.extend_context(self.recent, token)
                self.ngrams.write(self.recent, best)

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Count the outcomes of the tried n-gram rows, and index all rows."""
        if any(tree.are_retrieved):
            self.ngram_acceptance.update(self.outcomes(tree, path))
        # Rejected rows are indexed too, because their tokens may be right elsewhere. The path comes
        # last, so that its entries replace those of the same contexts
        others = [row for row in range(len(tree)) if row not in path]
        for row in others + path:
            self.ngrams.write(self.context_of(row), self.top_ids[row])
        self.recent = self.context_of(path[-1])
        super().adapt(tree, path)

    def outcomes(self, tree: MixedTree, path: list[int]) -> list[tuple[int, bool]]:
        """Return the bin of each n-gram row below an accepted row, and whether it was accepted."""
        edges = list(zip(tree.parents, tree.tokens, strict=True))
        rows = {edges[row]: row for row in range(len(tree)) if tree.are_retrieved[row]}
        return [
            (bin, rows[parent, token] in path)
            for parent in path
            for bin, token in self.candidates_below(parent)
            if (parent, token) in rows
        ]
