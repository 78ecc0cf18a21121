"""Calibration and cost gates, as settings of every rule that depends on the draft's probabilities.

    calibrate=on      probabilities are the acceptance probabilities learned in this generation
                      (calibration.py), not the draft's own
    costs=learned     rows and levels that the rule allows are drafted and verified only while their
                      gain is worth their measured time (cost_gates.py)
    costs=0.3:0.04:0.2:0.4   the same by given costs, so that a seed decides a sampled text

By default both are off, and a rule is its paper's.

    python dynatree.py --method dyspec --set calibrate=on --set costs=learned --prompt "..."
"""

from dataclasses import dataclass

from draft_tree import DynaTree, DynaTreeRule, Gates, Level, Rule, log_threshold, setting
from methods.cost_gates import CostGates
from methods.costs import SOME_COSTS, parse_costs
from methods.rules import MethodRule, values_of
from methods.settings import MethodSettings, text


def require_costs(word: str) -> None:
    """Raise ValueError unless the word is off, learned or four costs."""
    if word != "off":
        try:
            parse_costs(word)
        except ValueError as error:
            raise ValueError(f"there are off, learned, and costs; {error}") from error


@dataclass(frozen=True, kw_only=True)
class SharedSettings(MethodSettings):
    """Settings of every rule that can be calibrated and gated by cost."""

    calibrate: bool = setting(
        False, False, True, "replace the draft's probabilities by learned acceptance probabilities"
    )
    costs: str = text(
        "off",
        require_costs,
        "off, learned or tree:row:drafting:level: draft and verify only what pays",
        ("off", *SOME_COSTS),
    )

    def configure(self, rule: Rule) -> Rule:
        """Set is_calibrated of a rule, and wrap the rule in cost gates unless costs is off."""
        rule.is_calibrated = self.calibrate
        return rule if self.costs == "off" else CostGates(rule, parse_costs(self.costs))


class DrawingDynaTreeRule(DynaTreeRule, MethodRule):
    """The core's rule, of which sampled text may draw the candidates."""

    draws_candidates = True

    def __init__(self, settings: DynaTree):
        super().__init__(settings)
        s = settings
        self.is_chain = self.max_branches == 1
        self.depends_on_probs = s.adapt_breadth or s.adapt_depth or s.prune

    def add_gates(self, level: Level) -> Gates:
        """tau prunes drawn candidates by what is known before the draw."""
        gates = super().add_gates(level)
        if "tau" in gates:
            gates["tau"] = values_of(level) >= log_threshold(self.current.tau)
        return gates

    def state(self) -> dict[str, float | str]:
        """The thresholds as history has moved them, and the mean of a_r that moves them."""
        now = self.current
        found = {"D0": now.D0, "tau_h": now.tau_h, "rho_deep": now.rho_deep}
        return found | ({"reach": self.mean_depth_ratio()} if self.depth_ratios else {})


@dataclass(frozen=True)
class ExtendedDynaTree(SharedSettings, DynaTree):
    __doc__ = DynaTree.__doc__

    def make_rule(self) -> Rule:
        return self.configure(DrawingDynaTreeRule(self))
