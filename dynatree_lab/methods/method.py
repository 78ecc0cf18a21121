"""What a generation asks of a method: once, before it runs.

A method is a Settings whose make_rule returns a Rule. The core's have nothing else. MethodRule
(rules.py) says what more a rule may have, methods/__init__.py what more settings may have. Two
options belong to the generation, not to a method, so every method that drafts may have them:

    calibrate=on    replace the draft's probabilities by the acceptance probabilities learned in
                    this generation (calibration.py)
    costs=learned   draft and verify only rows and levels whose expected gain pays for their
                    measured time (cost_gates.py)
    costs=0.3:0.04:0.2:0.4   use these costs, so that sampled text is reproducible

    method = Method(DynaTree(tau=0.01), calibrate=True)
    method.needs_draft, method.facts.draws_candidates  # True, True
    rule = method.make_rule()  # a new one, for one text
"""

from draft_tree import Rule, Settings
from dynatree import draft_temperature
from dynatree_lab.methods.cost_gates import CostGates
from dynatree_lab.methods.costs import parse_costs
from dynatree_lab.methods.rules import facts_of, hooked
from dynatree_lab.methods.sampler import Sampling


class Method:
    """A method with the options of one generation, and the facts about it."""

    def __init__(
        self,
        settings: Settings,
        rule: Rule | None = None,
        *,
        calibrate: bool = False,
        costs: str = "off",
    ):
        """
        Args:
            rule: the caller's, in place of the one that the settings make.

        Raises ValueError for calibrate and costs if they have no effect or are invalid.
        """
        self.options = settings, calibrate, costs
        self.settings, self.own_rule, self.costs = settings, rule, costs
        example = self.make_rule()  # its facts are those of every rule of these settings
        self.facts = facts_of(example)
        self.max_branches = example.max_branches
        self.max_depth, self.max_rows = example.max_depth, example.max_rows
        self.needs_draft = self.max_depth > 0 and getattr(settings, "needs_draft", True)
        self.make_drafter = getattr(settings, "make_drafter", None)
        self.make_accept = getattr(settings, "make_accept", None)
        if calibrate and (self.facts.is_calibrated or not self.depends_on_probs):
            why = "the method's trees do not depend on the draft's probabilities"
            why = "the method calibrates them itself" if self.facts.is_calibrated else why
            raise ValueError(f"calibrate has no effect, because {why}")
        self.is_calibrated = calibrate or self.facts.is_calibrated

    def make_rule(self) -> Rule:
        """Return a rule with all hooks of a MethodRule, and cost gates unless costs is off."""
        rule = hooked(self.own_rule or self.settings.make_rule())
        if self.costs == "off":
            return rule
        try:
            costs = parse_costs(self.costs)
        except ValueError as error:
            why = f"it must be off, learned or four costs; {error}"
            raise ValueError(f"costs={self.costs}: {why}") from error
        if not (rule.max_depth and facts_of(rule).can_be_gated):
            raise ValueError("costs has no effect, because the method has no use for cost gates")
        return CostGates(rule, costs)

    @property
    def n_verified(self) -> int:
        """The rows of the largest pass over a tree, padding included."""
        return max(self.facts.max_verified, self.facts.min_rows)

    @property
    def depends_on_probs(self) -> bool:
        """Whether the draft's probabilities change the trees."""
        return self.max_depth > 0 and self.facts.depends_on_probs

    @property
    def can_draw(self) -> bool:
        """Whether candidates are drawn from the draft model if text is sampled; otherwise they are
        its top k, or a drafter's of its own."""
        drafts = self.max_depth > 0 and self.facts.max_verified > 1
        return drafts and not self.make_drafter and self.facts.draws_candidates

    def draft_temperature(self, sampling: Sampling) -> float:
        """Return the temperature of the draft's probabilities: the given one; for drawn candidates
        the text's; for others the method's, or what brings them near those of acceptance."""
        if self.can_draw and sampling.draws_candidates:
            own = sampling.temperature
        else:
            own = self.facts.draft_temperature or draft_temperature(sampling.temperature)
        return sampling.draft_temperature or own

    @property
    def writes_ar_ids(self) -> bool:
        """Whether sampled text has the ids that ar writes with the same seed (sampling.py)."""
        return not self.can_draw and not self.facts.acceptance

    def has_temperature(self, draws: bool) -> bool:
        """Whether the temperature of the draft changes the trees. draws: whether candidates are
        drawn if the rule supports it."""
        return (draws and self.can_draw) or (self.depends_on_probs and not self.make_drafter)
