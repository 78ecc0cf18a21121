"""deagle: a beam of the likeliest nodes, as deep as two of three votes allow (DEAGLE, section 3.4).

Every level expands its k likeliest nodes and gives each k children; at the end the likeliest nodes
of all levels are verified. After each level three signals vote on stopping, where S_d is the sum of
the k best path probabilities at depth d and S_0 = 1:

    low probability      S_d < tau_S
    momentum             S_d / S_(d-1) < tau_rho for the second time in this tree
    length               d >= ceil(E_d), the expected accepted length

E_d departs from the paper, whose sums (Eq. 22 and 26) never exceed d and so would vote to stop at
every depth: here the sum up to d is continued by the tail that the last ratio r = S_d / S_(d-1)
projects, E_d = sum of S_t for t <= d, plus S_d r / (1 - r); no vote if r >= 1.

    python dynatree.py --method deagle --set D_max=12 --prompt "..."
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draft_tree import LOWEST, MAX_ROWS, Level, Rule
from engine.settings import check_settings, setting


@dataclass(frozen=True)
class Deagle:
    """deagle: a beam as deep as two of three votes allow (DEAGLE, 3.4)."""

    k: int = setting(4, 1, 32, "nodes expanded per level, and children of each")
    N_max: int = setting(32, 1, MAX_ROWS, "rows verified, root included: the likeliest drafted")
    D_max: int = setting(10, 1, MAX_ROWS - 1, "hard limit of depth")
    tau_S: float = setting(0.15, 0.0, 128.0, "low-probability vote: S_d below it")
    tau_rho: float = setting(0.6, 0.0, 1.0, "momentum vote: S_d / S_(d-1) below it twice")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        return DeagleRule(self)


class DeagleRule(Rule):
    """One generation of DEAGLE; between the levels of a tree it holds S_0, S_1, ..."""

    def __init__(self, settings: Deagle):
        s = settings
        # The root's children, then k of each of the k that every level expands
        n_drafted = 1 + s.k + s.k**2 * (s.D_max - 1)
        super().__init__(s.k, s.D_max, max_rows=s.N_max, max_drafted=max(n_drafted, s.N_max))
        self.settings = settings
        self.sums: list[float] = []

    def begin(self, root: Tensor) -> int:
        self.sums = [1.0]
        return self.max_depth

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        values = level.path_logprobs
        beam = values.flatten().topk(min(self.settings.k, values.numel()))
        self.sums.append(beam.values.exp().sum().item())
        expand = torch.zeros_like(values, dtype=torch.bool)
        if sum(votes(self.sums, self.settings)) < 2:
            expand.view(-1)[beam.indices] = True
        return values >= LOWEST, expand


def votes(sums: list[float], settings: Deagle) -> tuple[bool, bool, bool]:
    """The three votes to stop, from S_0 = 1, S_1, ..., S_d."""
    ratio = 0.0  # S_d / S_(d-1)
    n_falls = 0
    for d in range(1, len(sums)):
        if sums[d - 1]:
            ratio = sums[d] / sums[d - 1]
            n_falls += ratio < settings.tau_rho
    is_low = sums[-1] < settings.tau_S
    is_falling = n_falls >= 2
    return is_low, is_falling, is_long(sums, ratio)


def is_long(sums: list[float], ratio: float) -> bool:
    """Whether d reaches the expected accepted length E_d; ratio: S_d / S_(d-1)."""
    if ratio >= 1:
        return False
    expected = sum(sums[1:]) + sums[-1] * ratio / (1 - ratio)
    return len(sums) - 1 >= expected  # d is whole: no need to round up
