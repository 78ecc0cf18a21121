"""Cost gates: draft and verify only what is expected to pay for its time (costs.py).

They are added to a rule's own gates:

- c_row: a row is verified if its acceptance probability is at least its price. A drawn row is
  judged before the draw: by its value, times the share of such values that draws have left so far.
  The shares are learned separately for the first, second, ... candidate of a row.
- c_level: another level is drafted if its expected gain is at least the price of a draft pass. This
  gain is the sum of its parents' acceptance probabilities, times the mean gain per unit of such a
  sum. For drawn trees other than chains the number of levels is fixed in advance, from earlier
  trees. It must not depend on what is drawn, because some rules keep the best rows of all levels
  (drawn.py).
- Nothing is drafted while recent trees were not expected to pay for their time. Decoding is then
  autoregressive, except for occasional probes.

    CostGates(rule, costs=None)  # learns the costs as it runs

Shapes: n rows of a level, k candidates per row.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy
from numpy import ndarray

from draft_tree import Gates, Level, Rule, Tree, passing
from dynatree_lab.methods.costs import CostTracker
from dynatree_lab.methods.rules import DrawnLevel, RuleWrapper, added_mask

RATE = 0.1  # weight of the latest tree in the mean of a share
INITIAL_SHARE = 0.7  # of the first drawn candidate of a row; to the power of the place of others


class LevelStats(NamedTuple):
    """The expected gain of one level of a tree."""

    values: ndarray  # [n, k], probabilities of acceptance before the draw; 0 for rows not added
    accepted: ndarray  # [n, k], the same after the draw
    n_added: int
    expandable: float  # sum of the acceptance probabilities of the rows that the rule would expand


class CostGates(RuleWrapper):
    """A rule with cost gates, which learn from the costs and gains of this generation's trees."""

    def __init__(self, rule: Rule, costs: tuple[float, ...] | None):
        """costs: as methods.costs.parse_costs returns them; None to learn them."""
        super().__init__(rule)
        self.facts = replace(self.facts, depends_on_probs=True)
        self.tracker = CostTracker(costs)
        # [k] by place in draw order: the share of a drawn row's value that its draw leaves
        self.shares = INITIAL_SHARE ** numpy.arange(1, self.facts.n_drawn + 1)
        self.is_drawn = False
        self.levels: list[LevelStats] = []  # of the current tree

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        """Return 0 levels if drafting does not pay, otherwise as many as the rule wants."""
        self.tracker.begin_tree()
        self.levels = []
        n_levels = super().begin_tree(root_token, max_depth)
        net_gain = self.net_gain_without(root_token, max_depth)
        return n_levels if self.tracker.should_draft(net_gain) else 0

    def net_gain_without(self, root_token: int, max_depth: int) -> float:
        """Return the net gain of the tree that is verified if nothing is drafted."""
        return self.tracker.net_gain(1.0, n_rows=1)

    def finish_tree(self, tree: Tree) -> Tree:
        self.tracker.end_draft()
        return super().finish_tree(tree)

    def plan_drawn_levels(self) -> int:
        """Return how many levels of a drawn tree are expected to pay; at least 1."""
        n_levels, expected = 1, self.tracker.level_gain**2
        while n_levels < self.rule.max_depth and self.tracker.level_pays(expected):
            n_levels += 1
            expected *= self.tracker.level_gain
        return n_levels

    def add_gates(self, level: Level) -> Gates:
        """Return the rule's gates and c_row."""
        gates = super().add_gates(level)
        expected = level.values
        self.is_drawn = isinstance(level, DrawnLevel)
        if self.is_drawn:
            expected = expected + numpy.log(self.shares[: expected.shape[1]])
            # A later share may exceed an earlier one, because each is learned separately. But no
            # candidate may pass without the earlier ones of its row, because it was drawn from
            # what they left
            expected = numpy.minimum.accumulate(expected, axis=1)
        gates = {**gates, "c_row": self.tracker.rows_pay(expected)}
        self.is_added = added_mask(level, gates)
        return gates

    def expand_gates(self, level: Level) -> Gates:
        """Return the rule's gates and c_level."""
        gates = super().expand_gates(level)
        values = numpy.where(self.is_added, numpy.exp(level.values), 0.0)
        accepted = values * numpy.exp(level.logprobs) if self.is_drawn else values
        expandable = float(accepted[passing(level, gates)].sum())
        self.levels.append(LevelStats(values, accepted, int(self.is_added.sum()), expandable))
        if self.is_drawn and not self.facts.is_chain:
            goes_on = len(self.levels) < self.plan_drawn_levels()
        else:
            goes_on = self.tracker.level_pays(self.tracker.level_gain * expandable)
        return {**gates, "c_level": goes_on}

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Update costs, gain per level and shares; only now, because all draws are decided."""
        self.tracker.end_tree(len(path), len(tree), len(self.levels))
        parents_sum = 1.0  # the root's acceptance probability
        for level in self.levels:
            self.tracker.record_level(parents_sum, level.accepted.sum(), level.n_added)
            if self.is_drawn:
                self.update_shares(level)
            parents_sum = level.expandable
        super().adapt(tree, path)

    def update_shares(self, level: LevelStats) -> None:
        """Move the share of each place at which a row was added."""
        values, accepted = level.values.sum(axis=0), level.accepted.sum(axis=0)
        for place in values.nonzero()[0]:
            self.shares[place] += RATE * (accepted[place] / values[place] - self.shares[place])
