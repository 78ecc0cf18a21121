"""Chances that are counted and a stop by cost, as settings of whatever rule goes by the draft's
probabilities.

    chances=counted   path probabilities, confidence, values and thresholds are made of what guesses
                      have been worth in this text (chances.py), not of what the draft says
    stop=cost         what the rule allows is drafted and verified only while it pays (stop.py)
    stop=0.3:0.04:0.2:0.4   the same by given costs, so that a seed decides a sampled text

A paper's rule is itself without them.

    python dynatree.py --method dyspec --set chances=counted --set stop=cost --prompt "..."
"""

from dataclasses import dataclass

from draft_tree import DynaTree, Rule, Settings, Tree
from methods.chances import Counted
from methods.costs import SOME_COSTS, parse_costs
from methods.settings import choice, text
from methods.stop import Stop


def parse_stop(word: str) -> tuple[float, ...] | None:
    """The costs that a stop is given; None: there is none, or it learns them."""
    if word in ("own", "cost"):
        return None
    try:
        return parse_costs(word)
    except ValueError as error:
        raise ValueError(f"there are own, cost, and costs; {error}") from error


@dataclass(frozen=True, kw_only=True)
class Reckoned(Settings):
    """The settings of every rule that can be told so."""

    chances: str = choice(
        "believed", ("believed", "counted"), "that a guess is right: as the draft says, or as found"
    )
    stop: str = text(
        "own",
        parse_stop,
        "own: by the rule alone; cost: by what pays, too; or by given costs, as those of auto",
        ("own", *SOME_COSTS),
    )

    def reckoned(self, rule: Rule) -> Rule:
        """The rule, told so: around its own hooks its chances, and its costs, are told of every
        tree."""
        if self.chances == "counted":
            count(rule)
        return rule if self.stop == "own" else stopped(rule, self.stop)


def stopped(rule: Rule, stop: str) -> Rule:
    """Return the rule with the gates of cost that a setting names."""
    Stop(rule, parse_stop(stop))
    return rule


def count(rule: Rule) -> None:
    """Give a rule chances that are counted."""
    rule.chances = chances = Counted()
    levels, adapt = rule.levels, rule.adapt

    def begin(root: int) -> int:
        chances.begin()
        return levels(root)

    def learn(tree: Tree, path: list[int], ms: float) -> None:
        chances.learn(tree, path)
        adapt(tree, path, ms)

    rule.levels, rule.adapt = begin, learn


@dataclass(frozen=True)
class ReckonedDynaTree(Reckoned, DynaTree):
    __doc__ = DynaTree.__doc__

    def rule(self) -> Rule:
        return self.reckoned(super().rule())
