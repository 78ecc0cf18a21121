"""beam and deagle: a beam of the likeliest nodes, to a fixed depth or as deep as votes allow.

Every level expands its k likeliest nodes and gives each k children; at the end the likeliest nodes
of all levels are verified. That is beam (the tree of EAGLE-2). deagle (DEAGLE, section 3.4) stops
it early: after each level three signals vote, and two votes stop. S_d is the sum of the k best path
probabilities at depth d, S_0 = 1:

    low         S_d < tau_S
    momentum    S_d / S_(d-1) < tau_rho for the second time in this tree
    length      d >= E_d, the expected accepted length

The paper defines the ratio twice: Eq. 25 has it upside down, and the text below it means what
stands here.

Its E_d (Eq. 26) is the sum of p over the active leaves at depth d. Their paths are distinct, so it
is at most 1, and this vote is always cast: one of the other two is then enough. Nor does the sum of
Eq. 22 help, along a branch down to d, which is at most d. Both say what has been grown so far and
not what might still come, and the length vote alone would end every tree at depth 1, with two
tokens an iteration at most, where the paper's Table 4 has it 3.9 times as fast as ar. So by default
the sum down to d is continued by the tail that the last ratio r = S_d / S_(d-1) projects,
E_d = S_1 + ... + S_d + S_d r / (1 - r), and there is no vote if r >= 1. `length=literal` is Eq. 26.

    python dynatree.py --method deagle --set D_max=12 --prompt "..."
    python dynatree.py --method deagle --set length=literal --prompt "..."

The rows of the paper's Table 4, each vote as the only one:

    Exp         --set votes=1 --set low=off --set momentum=off
    Momentum    --set votes=1 --set low=off --set length=off
    Prob        --set votes=1 --set momentum=off --set length=off
    Voting      the defaults
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy
from numpy import ndarray

from draft_tree import MAX_ROWS, Gates, Level, Rule, setting
from methods.reckoning import Reckoned
from methods.settings import choice


@dataclass(frozen=True)
class Beam(Reckoned):
    """beam: the k likeliest nodes of every level, the likeliest of all verified (EAGLE-2)."""

    k: int = setting(4, 1, 32, "nodes expanded per level, and children of each")
    N_max: int = setting(32, 1, MAX_ROWS, "rows verified, root included: the likeliest drafted")
    D_max: int = setting(6, 1, MAX_ROWS - 1, "depth of the tree")

    def rule(self) -> Rule:
        return self.reckoned(BeamRule(self.k, self.N_max, self.D_max))


class BeamRule(Rule):
    """One generation of a beam."""

    def __init__(self, k: int, n_rows: int, max_depth: int):
        # The root's children, then k of each of the k that every level expands
        n_drafted = 1 + k + k**2 * (max_depth - 1)
        super().__init__(k, max_depth, max_rows=n_rows, max_drafted=max(n_drafted, n_rows))

    def expand(self, level: Level) -> tuple[Gates, Gates]:
        values = level.path_logprobs
        best = (-values).argsort(axis=None, kind="stable")[: self.max_branches]
        if self.is_over(values.take(best)):
            return {}, {"votes": False}
        is_in_beam = numpy.zeros(values.shape, dtype=bool)
        is_in_beam.put(best, True)
        return {}, {"k": is_in_beam}

    def is_over(self, logprobs: ndarray) -> bool:
        """Whether these, the k best log p(u) of a level, are the last to be drafted."""
        return False


@dataclass(frozen=True)
class Deagle(Reckoned):
    """deagle: a beam as deep as two of three votes allow (DEAGLE, 3.4)."""

    k: int = setting(4, 1, 32, "nodes expanded per level, and children of each")
    N_max: int = setting(32, 1, MAX_ROWS, "rows verified, root included: the likeliest drafted")
    D_max: int = setting(10, 1, MAX_ROWS - 1, "hard limit of depth")
    tau_S: float = setting(0.15, 0.0, 128.0, "low vote: S_d below it")
    tau_rho: float = setting(0.6, 0.0, 1.0, "momentum vote: S_d / S_(d-1) below it twice")
    low: bool = setting(True, False, True, "cast the low vote")
    momentum: bool = setting(True, False, True, "cast the momentum vote")
    length: str = choice(
        "projected", ("projected", "literal", "off"), "E_d of the length vote; literal: Eq. 26"
    )
    votes: int = setting(2, 1, 3, "votes that stop the tree")

    def __post_init__(self) -> None:
        super().__post_init__()
        n_on = self.low + self.momentum + (self.length != "off")
        if self.votes > n_on:
            raise ValueError(
                f"votes={self.votes} with {n_on} of low, momentum and length on could never stop "
                "a tree; that is the method beam"
            )

    def rule(self) -> Rule:
        return self.reckoned(DeagleRule(self))


class DeagleRule(BeamRule):
    """One generation of DEAGLE."""

    def __init__(self, settings: Deagle):
        super().__init__(settings.k, settings.N_max, settings.D_max)
        self.settings = settings
        self.sums: list[float] = []  # S_0, S_1, ... of this tree so far

    def levels(self, root: int) -> int:
        self.sums = [1.0]
        return self.max_depth

    def is_over(self, logprobs: ndarray) -> bool:
        self.sums.append(float(numpy.exp(logprobs).sum()))
        return sum(votes(self.sums, self.settings)) >= self.settings.votes


def votes(sums: list[float], settings: Deagle) -> tuple[bool, bool, bool]:
    """The votes to stop that are cast, from S_0 = 1, S_1, ..., S_d: low, momentum, length."""
    s = settings
    ratios = [now / before if before else 0.0 for before, now in pairwise(sums)]
    is_low = s.low and sums[-1] < s.tau_S
    is_falling = s.momentum and sum(ratio < s.tau_rho for ratio in ratios) >= 2
    is_long = s.length == "literal"  # Eq. 26 is at most 1
    if s.length == "projected" and ratios[-1] < 1:
        tail = sums[-1] * ratios[-1] / (1 - ratios[-1])
        is_long = len(ratios) >= sum(sums[1:]) + tail  # depth is whole: no need to round up
    return is_low, is_falling, is_long
