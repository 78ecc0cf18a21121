"""ar, linear and fixed: trees whose shape is settled beforehand.

python dynatree.py --method linear --set K=8 --prompt "..."
python dynatree.py --method fixed --set D=4 --set B=3 --prompt "..."
"""

from dataclasses import dataclass

from torch import Tensor

from draft_tree import LOWEST, MAX_ROWS, Level, Rule, log_threshold
from engine.settings import check_settings, setting


@dataclass(frozen=True)
class Alone:
    """ar: the target alone; every tree is only its root."""

    rows: int = setting(
        1, 1, MAX_ROWS, "rows a pass is padded to: shows what rounding alone changes"
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        rule = Rule(max_branches=1, max_depth=0, max_rows=1, max_drafted=1)
        rule.min_rows = self.rows
        return rule


@dataclass(frozen=True)
class Chain:
    """linear: a chain of K tokens, a tree with one branch (Leviathan et al. 2023)."""

    K: int = setting(5, 0, MAX_ROWS - 1, "tokens drafted per iteration")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        rule = StaticRule(max_branches=1, max_depth=self.K, n_rows=self.K + 1, least=LOWEST)
        rule.is_drawing = True
        return rule


@dataclass(frozen=True)
class Fixed:
    """fixed: the static tree, B children for every node down to depth D (section 4.3)."""

    D: int = setting(5, 1, MAX_ROWS - 1, "depth of the tree")
    B: int = setting(2, 1, 32, "children per node")
    tau: float = setting(0.05, 0.0, 1.0, "a child with p(path) below tau is not added")
    N_max: int = setting(64, 1, MAX_ROWS, "rows per tree, root included")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        return StaticRule(self.B, self.D, self.N_max, log_threshold(self.tau))


class StaticRule(Rule):
    """Every candidate whose path is likely enough, in breadth-first order up to n_rows."""

    def __init__(self, max_branches: int, max_depth: int, n_rows: int, least: float):
        """least: the lowest log p(u) of a child that is added."""
        super().__init__(max_branches, max_depth, max_rows=n_rows, max_drafted=n_rows)
        self.least = least

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        add = level.path_logprobs >= self.least  # [W, k]
        return add, add
