"""Cost gates: what a rule allows is drafted and verified only while it pays (costs.py).

Beside the rule's own gates,

- a row is verified if its chance of acceptance is worth a row's time. That of a drawn row is taken
  before the draw: its value, times the share of the values of such rows, first, second or later
  among their siblings, that draws have left so far
- a level is drafted if what it may bring is worth a pass of the draft: its parents' chances, times
  what levels have brought for each of theirs. Of drawn trees that is settled before the tree, by
  earlier ones: which level is the last must not depend on what was drawn, where the best rows of
  all levels are kept (`Rule` in draft_tree.py)
- nothing is drafted if trees have promised less than their time is worth; then it is ar, but for a
  tree now and then

    CostGates(rule, costs=None)  # costs are learned as it runs
"""

import math
import time
from typing import NamedTuple

import numpy
from numpy import ndarray

from draft_tree import Gates, Level, Rule, Tree, passing
from methods.costs import LEVEL, LEVEL_YIELD, ROW, Account
from methods.rules import DrawnLevel, RuleWrapper, added, are_retrieved, values_of

MEMORY = 0.1  # what one more tree counts in a mean
INVITED = 10  # trees for which the first guess of drafting counts
FIRST_SHARE = 0.7  # of its value, that a drawn row is worth: the first; of that each next one
MOST_YIELD = 0.98  # below 1: else no depth would be too much


class Seen(NamedTuple):
    """The expected gain of one level of a tree."""

    tried: ndarray  # the values of the rows it added, by place among their siblings: [k]
    brought: ndarray  # their chances to be accepted; of drawn ones, with what was drawn
    n_added: int
    below: float  # the chances of those that the rule lets grow


class CostGates(RuleWrapper):
    """What a generation's trees have cost and promised, and the gates that follow from it."""

    def __init__(self, rule: Rule, costs: tuple[float, ...] | None):
        """rule: gets the gates. costs: None to learn them."""
        super().__init__(rule)
        self.depends_on_probs = True
        self.given_costs = costs
        self.account = Account(costs, n_invited=INVITED)
        self.level_yield = LEVEL_YIELD  # what levels have gained of their parents' chances
        # Of drawn rows' values, by place in draw order, what their draws have left of them: [k]
        self.shares = FIRST_SHARE ** numpy.arange(1, rule.n_drawn + 1)
        self.is_drawn = False

    def begin_tree(self, root: int, max_depth: int) -> int:
        """No level if the draft is not worth it; else as many as the rule has."""
        self.began = time.perf_counter()
        self.account.open()
        self.price = self.account.prices[ROW]
        self.least = math.log(self.price)
        self.last_drawn = self.deepest_worth()
        self.seen: list[Seen] = []
        n_levels = super().begin_tree(root, max_depth)
        return n_levels if self.account.may_draft(self.account.worth(1.0, n_rows=1)) else 0

    def deepest_worth(self) -> int:
        """How many levels are drafted, where they are drawn: the first in any case."""
        n_levels, hoped = 1, self.level_yield**2
        while n_levels < self.rule.max_depth and hoped >= self.account.prices[LEVEL]:
            n_levels += 1
            hoped *= self.level_yield
        return n_levels

    def add_gates(self, level: Level) -> Gates:
        """The rule's gates, and that of a row's cost."""
        gates = super().add_gates(level)
        likely = values_of(level)
        self.is_drawn = isinstance(level, DrawnLevel)
        if self.is_drawn:
            likely = likely + numpy.log(self.shares[: likely.shape[1]])
            # Shares are learned apart for each place, and so may rise. A candidate is worth no more
            # than an earlier one of its row, because it was drawn from what that one left
            likely = numpy.minimum.accumulate(likely, axis=1)
        self.is_paying = likely >= self.least
        gates = {**gates, "c_row": self.is_paying}
        self.is_added = added(level, gates)
        return gates

    def expand_gates(self, level: Level) -> Gates:
        """The rule's gates, and that of a level's cost."""
        gates = super().expand_gates(level)
        is_added, values = self.is_added, values_of(level)
        is_growing = passing(level, gates) & is_added
        found = numpy.exp(values + level.logprobs if self.is_drawn else values)
        tried = numpy.where(is_added, numpy.exp(values), 0).sum(axis=0)
        brought = numpy.where(is_added, found, 0).sum(axis=0)
        self.seen.append(Seen(tried, brought, int(is_added.sum()), found[is_growing].sum()))
        if self.is_drawn:
            goes_on = level.depth + 1 < self.last_drawn
        else:
            goes_on = self.level_yield * self.seen[-1].below >= self.account.prices[LEVEL]
        return {**gates, "c_level": bool(goes_on)}

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Learn what the tree cost, promised and kept of draws: not before they are all decided."""
        ms = (time.perf_counter() - self.began) * 1e3
        is_drawn = self.is_drawn and tree.draft_slots[0] >= 0
        self.account.take(promised(tree, is_drawn), len(tree), len(self.seen), ms)
        above = 1.0
        for seen in self.seen:
            if above > 0:
                gained = max(seen.brought.sum() - self.price * seen.n_added, 0.0)
                self.level_yield += MEMORY * (min(gained / above, MOST_YIELD) - self.level_yield)
            for place in seen.tried.nonzero()[0] if is_drawn else ():
                left = seen.brought[place] / seen.tried[place]
                self.shares[place] += MEMORY * (left - self.shares[place])
            above = seen.below
        super().adapt(tree, path)


def promised(tree: Tree, is_drawn: bool) -> float:
    """The tokens that a tree gives by its chances, the bonus among them."""
    left = [1.0] * len(tree)  # chance that none of its drawn children so far is accepted
    total = 1.0
    retrieved = are_retrieved(tree)
    for row in range(1, len(tree)):
        parent = tree.parents[row]
        if retrieved[row]:
            continue
        found = math.exp(tree.path_logprobs[row])
        total += left[parent] * found
        if is_drawn:
            left[parent] *= 1 - math.exp(tree.path_logprobs[row] - tree.path_logprobs[parent])
    return total
