"""opttree: the N likeliest nodes, drafted until a level adds too little (Wang et al. 2025).

E(A), the expected accepted length, is the sum of p(u) over the N likeliest nodes drafted so far,
without the root. A level that adds at most delta to it is the last. Otherwise this is dyspec's
exact form, which stops only when a level adds nothing at all.

A draft pass saves time only if it adds more than its cost. So delta should lie between 1 and the
ratio of the times of a draft pass and a target pass (the paper). The candidates of the last level
are known by then, so those among the N likeliest are verified; the authors' code drops them.

Candidates are the top k, also when the text is sampled. Drawn candidates would bias the text. Their
draws would decide how much a level adds, so whether another level is drafted. The nodes of that
level could take the places of nodes above them, so draws would decide which drawn nodes are tried.

    python -m dynatree_lab --method opttree --set delta=0.2 --prompt "..."
"""

from dataclasses import dataclass

import numpy

from draft_tree import MAX_LEVELS, MAX_ROWS, Gates, Level, Rule, setting
from dynatree_lab.methods.dyspec import DySpec, DySpecRule
from dynatree_lab.methods.settings import MethodSettings


@dataclass(frozen=True)
class OptTree(MethodSettings):
    """opttree: the N likeliest nodes, drafted until a level adds too little (OPT-Tree)."""

    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(16, 1, MAX_LEVELS, "hard limit of depth")
    delta: float = setting(0.05, 0.0, 1.0, "a level that adds at most delta to E(A) is the last")

    def make_rule(self) -> Rule:
        return OptTreeRule(self)


class OptTreeRule(DySpecRule):
    """The rule of OPT-Tree."""

    draws_candidates = False

    def __init__(self, settings: OptTree):
        super().__init__(DySpec(N=settings.N, D_max=settings.D_max))
        self.delta = settings.delta

    def add_gates(self, level: Level) -> Gates:
        before = numpy.exp(self.best).sum()  # E(A) without this level
        gates = super().add_gates(level)
        self.goes_on = bool(numpy.exp(self.best).sum() - before > self.delta)
        return gates

    def expand_gates(self, level: Level) -> Gates:
        return {**super().expand_gates(level), "delta": self.goes_on}
