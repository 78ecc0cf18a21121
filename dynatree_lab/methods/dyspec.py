"""dyspec: the nodes with the highest estimated values, in any shape (Xiong et al. 2024).

A node's value depends on how candidates are chosen:

top k   p(u), an estimate of the probability that the node is accepted (greedy text)
drawn   the probability that the path is accepted and every earlier sibling is not, which is known
        before the node itself is drawn (sampled text, and greedy text in the paper's tables; Eq. 11
        and `drawn_values` in drawn.py)

There are two forms. The exact form verifies the N highest values. With drawn candidates this is
Algorithm 1. With the top k it is the greedy choice of appendix D.1. (Algorithm 1 with the likeliest
token as the draw would be another rule, because its keys are values before the draw.) The paper
takes nodes off a heap one by one. Each is the child or the next sibling of an earlier one, and its
value is not higher than that one's. So this file can grow the tree by levels, with one draft pass
per level, and keep the N best so far. It gets the same set of nodes. The choice keeps sampled text
exact: the value of a drawn node depends neither on its own draw nor on later ones.

The threshold form adds all nodes with a value of at least t, up to N. It is Algorithm 2, whose
`while v < t` is a misprint for >=.

    python -m dynatree_lab --method dyspec --set N=32 --prompt "..."
    python -m dynatree_lab.benchmark --table dyspec-1
"""

import math
from dataclasses import dataclass

import numpy
from numpy import ndarray

from draft_tree import MAX_LEVELS, MAX_ROWS, Gates, Level, Rule, log_threshold, setting
from dynatree_lab.methods.rules import MethodRule
from dynatree_lab.methods.settings import MethodSettings


@dataclass(frozen=True)
class DySpec(MethodSettings):
    """dyspec: the N likeliest nodes, or all from a threshold on (DySpec, Algorithms 1 and 2)."""

    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included")
    t: float = setting(0.05, 0.0, 1.0, "value from which a node is added if exact is off")
    D_max: int = setting(16, 1, MAX_LEVELS, "hard limit of depth")
    exact: bool = setting(True, False, True, "add the N best; off: all of value t or more, up to N")
    needs = {"t": ("exact", False)}

    def make_rule(self) -> Rule:
        return DySpecRule(self)


class DySpecRule(MethodRule):
    """The rule of DySpec."""

    draws_candidates = True

    def __init__(self, settings: DySpec):
        s = settings
        n_others = s.N - 1  # rows below the root, which may all be its children
        # Every level may add n_others rows, because later rows may have higher values
        n_drafted = 1 + n_others * s.D_max if s.exact else s.N
        super().__init__(max(n_others, 1), s.D_max, n_drafted if s.N > 1 else 1, max_verified=s.N)
        self.settings = settings
        self.best = numpy.zeros(0, numpy.float32)  # log values of this tree's N - 1 best so far

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        self.best = self.best[:0]
        return super().begin_tree(root_token, max_depth)

    def add_gates(self, level: Level) -> Gates:
        if self.settings.exact:
            return {"N": self.is_among_best(level)}
        self.gate = "t", log_threshold(self.settings.t)
        return {"t": level.values >= self.gate[1]}

    def expand_gates(self, level: Level) -> Gates:
        """Expand a node if its path probability passes the gate: no value below it is higher."""
        name, min_logprob = self.gate
        return {name: level.path_logprobs >= min_logprob}

    def is_among_best(self, level: Level) -> ndarray:
        """Return which candidates [n, k] are among the N - 1 best so far. Of equal values, the
        earlier ones count as better.

        Calibrated values are often equal. If all candidates of equal value were added, they could
        use up the row budget. Then draws would decide which later rows are drafted.
        """
        n_best, n_before = self.settings.N - 1, len(self.best)
        lowest = self.best[-1] if n_before == n_best else -math.inf
        values = level.values
        higher = numpy.flatnonzero(values > lowest)  # few of a large level, so sorting is cheap
        values = numpy.append(self.best, values.take(higher))
        best = (-values).argsort(kind="stable")[:n_best]
        is_added = numpy.zeros(level.tokens.shape, dtype=bool)
        is_added.put(higher[best[best >= n_before] - n_before], True)
        self.best = values[best]
        self.gate = "N", self.best[-1] if len(best) == n_best else -math.inf
        return is_added
