"""The record of how a rule decided each tree, from which the page of --html is made (trace.py).

Shapes: n rows of one level, k candidates per row.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from numpy import ndarray

from draft_tree import Gates, Level, Rule, Tree
from dynatree_lab.methods.calibration import CalibratedDrafter
from dynatree_lab.methods.rules import RuleWrapper


class LevelRecord(NamedTuple):
    """A level with its gates by name, True where a candidate passed."""

    level: Level
    add_gates: Gates
    expand_gates: Gates
    draft_logprobs: ndarray | None  # [n, k], the draft model's own, if the level's are calibrated


@dataclass
class TreeRecord:
    """How a tree was decided."""

    state: dict[str, float | str]  # of the rule, before the tree
    n_levels: int  # that the rule wanted
    max_depth: int  # levels for which there was room
    is_full: bool = False  # the tree had all rows that the rule allows
    levels: list[LevelRecord] = field(default_factory=list)
    # As methods.sampler.OnTrial: row, probability, uniform number, remaining mass
    trials: list[tuple[int, float, float, float]] = field(default_factory=list)


class RecordedRule(RuleWrapper):
    """A rule that keeps the record of its latest tree."""

    def __init__(self, rule: Rule, calibrated: CalibratedDrafter | None):
        super().__init__(rule)
        self.calibrated = calibrated
        self.record: TreeRecord | None = None

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        n_levels = super().begin_tree(root_token, max_depth)
        self.record = TreeRecord(self.state(), n_levels, max_depth)
        return n_levels

    def add_gates(self, level: Level) -> Gates:
        self.gates = super().add_gates(level)
        return self.gates

    def expand_gates(self, level: Level) -> Gates:
        gates = super().expand_gates(level)
        logprobs = self.calibrated.draft_logprobs[-1] if self.calibrated else None
        level.confidence  # noqa: B018  # cached now, before the calibration learns
        self.record.levels.append(LevelRecord(level, self.gates, gates, logprobs))
        return gates

    def finish_tree(self, tree: Tree) -> Tree:
        self.record.is_full = len(tree) >= self.rule.max_rows
        return super().finish_tree(tree)

    def add_trial(self, *trial: float) -> None:
        self.record.trials.append(trial)
