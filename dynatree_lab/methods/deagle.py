"""beam and deagle: a beam of the likeliest nodes, to a fixed depth or until votes stop it.

At every level the k likeliest nodes are expanded, and each gets k children. At the end the
likeliest nodes of all levels are verified. That is beam (the tree of EAGLE-2). deagle (DEAGLE,
section 3.4) may stop earlier: after each level there are up to three votes, and two votes stop. S_d
is the sum of the k highest path probabilities at depth d, and S_0 = 1:

    low         S_d < tau_S
    momentum    S_d / S_(d-1) < tau_rho for the second time in this tree
    length      d >= E_d, the expected accepted length

The paper defines the ratio twice. Eq. 25 has it upside down; the text below it means the ratio
above.

The paper's E_d (Eq. 26) is the sum of p over the active leaves at depth d. Their paths are
distinct, so E_d is at most 1. Then the length vote is always cast, and one other vote is enough.
The sum of Eq. 22, along a branch down to depth d, does not help, because it is at most d. Both sums
count only the levels grown so far. With either, the length vote as the only one would end every
tree at depth 1, with at most two tokens per iteration. But in the paper's Table 4 that vote as the
only one is 3.9 times as fast as ar. So by default E_d has a projected tail, from the last ratio
r = S_d / S_(d-1): E_d = S_1 + ... + S_d + S_d r / (1 - r). There is no vote if r >= 1.
`length=literal` is Eq. 26.

    python -m dynatree_lab --method deagle --set D_max=12 --prompt "..."
    python -m dynatree_lab --method deagle --set length=literal --prompt "..."

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

from draft_tree import MAX_LEVELS, MAX_ROWS, Gates, Level, Rule, setting
from dynatree_lab.methods.rules import MethodRule
from dynatree_lab.methods.settings import MethodSettings, choice


@dataclass(frozen=True)
class Beam(MethodSettings):
    """beam: expands the k likeliest nodes per level, verifies the likeliest of all (EAGLE-2)."""

    k: int = setting(4, 1, 32, "nodes expanded per level, and children per node")
    N_max: int = setting(32, 1, MAX_ROWS, "rows verified, the likeliest drafted, root included")
    D_max: int = setting(6, 1, MAX_LEVELS, "depth of the tree")

    def make_rule(self) -> Rule:
        return BeamRule(self.k, self.N_max, self.D_max)


class BeamRule(MethodRule):
    """The rule of beam."""

    def __init__(self, k: int, n_rows: int, max_depth: int):
        # The root, its k children, then k children of each of k nodes per level
        n_drafted = 1 + k + k**2 * (max_depth - 1)
        super().__init__(k, max_depth, max(n_drafted, n_rows) if n_rows > 1 else 1, n_rows)

    def expand_gates(self, level: Level) -> Gates:
        values = level.path_logprobs
        best = (-values).argsort(axis=None, kind="stable")[: self.max_branches]
        if self.is_last_level(values.take(best)):
            return {"votes": False}
        is_in_beam = numpy.zeros(values.shape, dtype=bool)
        is_in_beam.put(best, True)
        return {"k": is_in_beam}

    def is_last_level(self, logprobs: ndarray) -> bool:
        """Whether a level is the last. logprobs: the k highest log p(u) of its candidates."""
        return False


@dataclass(frozen=True)
class Deagle(MethodSettings):
    """deagle: a beam that ends when two of three votes stop it (DEAGLE, 3.4)."""

    k: int = setting(4, 1, 32, "nodes expanded per level, and children per node")
    N_max: int = setting(32, 1, MAX_ROWS, "rows verified, the likeliest drafted, root included")
    D_max: int = setting(10, 1, MAX_LEVELS, "hard limit of depth")
    tau_S: float = setting(0.15, 0.0, 128.0, "low vote: S_d below it")
    tau_rho: float = setting(0.6, 0.0, 1.0, "momentum vote: S_d / S_(d-1) below it a second time")
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

    def make_rule(self) -> Rule:
        return DeagleRule(self)


class DeagleRule(BeamRule):
    """The rule of DEAGLE."""

    def __init__(self, settings: Deagle):
        super().__init__(settings.k, settings.N_max, settings.D_max)
        self.settings = settings
        self.sums: list[float] = []  # S_0, S_1, ... of this tree so far

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        self.sums = [1.0]
        return super().begin_tree(root_token, max_depth)

    def is_last_level(self, logprobs: ndarray) -> bool:
        self.sums.append(float(numpy.exp(logprobs).sum()))
        return sum(cast_votes(self.sums, self.settings)) >= self.settings.votes


def cast_votes(sums: list[float], settings: Deagle) -> tuple[bool, bool, bool]:
    """Return the votes (low, momentum, length) after depth d. sums: S_0 = 1, S_1, ..., S_d."""
    s = settings
    ratios = [now / before if before else 0.0 for before, now in pairwise(sums)]
    is_low = s.low and sums[-1] < s.tau_S
    is_falling = s.momentum and sum(ratio < s.tau_rho for ratio in ratios) >= 2
    is_long = s.length == "literal"  # Eq. 26 is at most 1
    if s.length == "projected" and ratios[-1] < 1:
        tail = sums[-1] * ratios[-1] / (1 - ratios[-1])
        is_long = len(ratios) >= sum(sums[1:]) + tail  # d is an integer: E_d needs no ceil
    return is_low, is_falling, is_long
