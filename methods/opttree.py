"""opttree: the N likeliest nodes, level by level until one adds too little (Wang et al. 2025).

E(A), the expected accepted length, is the sum of p(u) over the N likeliest nodes drafted so far,
the root not counted. A level that adds delta or less to it is the last. Until then this is dyspec's
exact form, which stops only when a level adds nothing at all.

A pass of the draft pays if what it adds is worth its time, so delta is to be above the draft's time
per pass over the target's (the paper) and below 1. Of the last level, whose probabilities are known
by then, this keeps what belongs to the N likeliest; the authors' code leaves it out.

Its candidates are ranked, also when the text is sampled. Had they been drawn, how much a level adds
would depend on what came out; so would then whether another level is drafted, whose nodes take
the rows of nodes above it, and so whether a node that has been drawn is tried.

    python dynatree.py --method opttree --set delta=0.2 --prompt "..."
"""

from dataclasses import dataclass

import numpy

from draft_tree import MAX_ROWS, Gates, Level, Rule, setting
from methods.dyspec import DySpec, DySpecRule
from methods.reckoning import Reckoned


@dataclass(frozen=True)
class OptTree(Reckoned):
    """opttree: the N likeliest nodes, until a level adds too little (OPT-Tree)."""

    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(16, 1, MAX_ROWS - 1, "hard limit of depth")
    delta: float = setting(0.05, 0.0, 1.0, "a level that adds no more to E(A) is the last")

    def rule(self) -> Rule:
        return self.reckoned(OptTreeRule(self))


class OptTreeRule(DySpecRule):
    """One generation of OPT-Tree."""

    is_drawing = False

    def __init__(self, settings: OptTree):
        super().__init__(DySpec(N=settings.N, D_max=settings.D_max))
        self.delta = settings.delta

    def expand(self, level: Level) -> tuple[Gates, Gates]:
        before = numpy.exp(self.best).sum()  # E(A) without this level
        to_add, to_grow = super().expand(level)
        is_paying = numpy.exp(self.best).sum() - before > self.delta
        return to_add, {**to_grow, "delta": is_paying}
