"""Calibration and cost gates, as settings of all rules that depend on the draft's probabilities.

    calibrate=on    replace the draft's probabilities by the acceptance probabilities learned in
                    this generation (calibration.py)
    costs=learned   draft and verify only rows and levels whose expected gain pays for their
                    measured time (cost_gates.py)
    costs=0.3:0.04:0.2:0.4   use these costs, so that sampled text is reproducible

By default both are off, and a method is as in its paper.

    python -m dynatree_lab --method dyspec --set calibrate=on --set costs=learned --prompt "..."
"""

from dataclasses import dataclass

from draft_tree import DynaTree, DynaTreeRule, Gates, Level, Rule, log_threshold, setting
from dynatree_lab.methods.cost_gates import CostGates
from dynatree_lab.methods.costs import EXAMPLE_COSTS, parse_costs
from dynatree_lab.methods.rules import MethodRule, values_of, with_attributes
from dynatree_lab.methods.settings import MethodSettings, text


def require_costs(word: str) -> None:
    """Raise ValueError unless the word is "off" or valid for parse_costs."""
    if word != "off":
        try:
            parse_costs(word)
        except ValueError as error:
            raise ValueError(f"it must be off, learned or four costs; {error}") from error


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
        ("off", *EXAMPLE_COSTS),
    )

    def configure(self, rule: Rule) -> Rule:
        """Set rule.is_calibrated, and return the rule, with cost gates unless costs is off."""
        rule = with_attributes(rule)
        rule.is_calibrated = self.calibrate
        return rule if self.costs == "off" else CostGates(rule, parse_costs(self.costs))


class DrawingDynaTreeRule(DynaTreeRule, MethodRule):
    """The core's rule, whose candidates are drawn if text is sampled."""

    draws_candidates = True

    def __init__(self, settings: DynaTree):
        super().__init__(settings)
        self.is_chain = self.max_branches == 1
        self.depends_on_probs = settings.adapt_breadth or settings.adapt_depth or settings.prune

    def add_gates(self, level: Level) -> Gates:
        """Return the core's gates; tau prunes drawn candidates by their values, which are known
        before the draw."""
        gates = super().add_gates(level)
        if "tau" in gates:
            gates["tau"] = values_of(level) >= log_threshold(self.current.tau)
        return gates

    def state(self) -> dict[str, float | str]:
        """Return the current thresholds, and the mean of a_r by which history moves them."""
        s = self.current
        found = {"D0": s.D0, "tau_h": s.tau_h, "rho_deep": s.rho_deep}
        return found | ({"depth_ratio": self.mean_depth_ratio()} if self.depth_ratios else {})


@dataclass(frozen=True)
class ExtendedDynaTree(SharedSettings, DynaTree):
    __doc__ = DynaTree.__doc__
    needs = dict.fromkeys(("B_min", "B_max", "tau_h", "tau_l"), ("adapt_breadth", True))
    needs |= dict.fromkeys(("rho_stop", "rho_deep"), ("adapt_depth", True))
    needs |= {"tau": ("prune", True), "W": ("history", True)}

    def make_rule(self) -> Rule:
        return self.configure(DrawingDynaTreeRule(self))
