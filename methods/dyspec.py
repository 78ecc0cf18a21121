"""dyspec: the nodes of the highest estimated value, whatever shape they make (Xiong et al. 2024).

A node's value estimates the chance that its guess is reached and accepted. Ranked children
(greedy): p(u), the draft's probability of the path. Drawn children (sampled text, and greedy text
in the paper's tables): the chance that the path is accepted and every elder sibling is not, known
before the child itself is drawn (Eq. 11; `drawn_values` in drawn.py).

Two forms. Exact: the N highest values; drawn that is Algorithm 1, ranked the greedy choice of its
appendix D.1, which Algorithm 1 with the likeliest token for the draw is not: its keys are values
before the draw. Either takes nodes off a heap one by one, each the child or the younger sibling of
one before it, and no value is higher than that of the node it follows. So growing by levels, with
one draft pass each, and keeping the N best so far gives the heap's set; and as no value of a drawn
node knows of its own draw, or of anything below or after it, a sampled text loses nothing by that
choice. Threshold (Algorithm 2, whose `while v < t` is a misprint for >=): all
nodes of value t or more, up to N.

    python dynatree.py --method dyspec --set N=32 --prompt "..."
    python bench.py --table dyspec-1
"""

import math
from dataclasses import dataclass

import numpy
from numpy import ndarray

from draft_tree import MAX_ROWS, Gates, Level, Rule, log_threshold, setting
from methods.rules import MethodRule, values_of
from methods.shared_settings import SharedSettings


@dataclass(frozen=True)
class DySpec(SharedSettings):
    """dyspec: the N likeliest nodes, or all above a threshold (DySpec, Algorithms 1 and 2)."""

    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included")
    t: float = setting(0.05, 0.0, 1.0, "a node of value below t is not added (threshold form)")
    D_max: int = setting(16, 1, MAX_ROWS - 1, "hard limit of depth")
    exact: bool = setting(True, False, True, "the N best; off: all of value t or more, up to N")

    def make_rule(self) -> Rule:
        return self.configure(DySpecRule(self))


class DySpecRule(MethodRule):
    """One generation of DySpec."""

    draws_candidates = True

    def __init__(self, settings: DySpec):
        s = settings
        n_others = s.N - 1  # than the root: all of them may be its children
        # Every level may add so many, of which later ones may prove better
        n_drafted = 1 + n_others * s.D_max if s.exact else s.N
        super().__init__(max(n_others, 1), s.D_max, n_drafted if s.N > 1 else 1, max_verified=s.N)
        self.settings = settings
        self.best = numpy.zeros(0, numpy.float32)  # log values of this tree's N - 1 best so far

    def begin_tree(self, root: int, max_depth: int) -> int:
        self.best = self.best[:0]  # none of this tree's
        return super().begin_tree(root, max_depth)

    def add_gates(self, level: Level) -> Gates:
        if self.settings.exact:
            return {"N": self.are_best(level)}
        self.gate = "t", log_threshold(self.settings.t)
        return {"t": values_of(level) >= self.gate[1]}

    def expand_gates(self, level: Level) -> Gates:
        """No value below a node is higher than the probability of its path."""
        name, least = self.gate
        return {name: level.path_logprobs >= least}

    def are_best(self, level: Level) -> ndarray:
        """Return which candidates [n, k] are among the N - 1 best so far, of equal values the
        earlier ones.

        Calibrated values are often equal. If all of equal value were added, they could use up the
        row budget, and what was drawn would decide which later rows are drafted.
        """
        n_best = self.settings.N - 1
        values = numpy.append(self.best, values_of(level))
        best = (-values).argsort(kind="stable")[:n_best]
        is_best = numpy.zeros(len(values), dtype=bool)
        is_best[best] = True
        is_added = is_best[len(self.best) :].reshape(level.tokens.shape)
        self.best = values[best]
        self.gate = "N", self.best[-1] if len(best) == n_best else -math.inf
        return is_added
