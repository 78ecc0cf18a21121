"""Chances that are counted, for whatever rule goes by the draft's probabilities.

    chances=counted   path probabilities, confidence, values and thresholds are made of what guesses
                      have been worth in this text (chances.py), not of what the draft says

A paper's rule is itself without it.

    python dynatree.py --method dyspec --set chances=counted --prompt "..."
"""

from dataclasses import dataclass

from draft_tree import DynaTree, Rule, Settings, Tree
from methods.chances import Counted
from methods.settings import choice


@dataclass(frozen=True, kw_only=True)
class Reckoned(Settings):
    """The setting of every rule that can be told so."""

    chances: str = choice(
        "believed", ("believed", "counted"), "that a guess is right: as the draft says, or as found"
    )

    def reckoned(self, rule: Rule) -> Rule:
        """The rule, told so: around its own hooks its chances are told of every tree."""
        if self.chances == "believed":
            return rule
        rule.chances = chances = Counted()
        levels, adapt = rule.levels, rule.adapt

        def begin(root: int) -> int:
            chances.begin()
            return levels(root)

        def learn(tree: Tree, path: list[int], ms: float) -> None:
            chances.learn(tree, path)
            adapt(tree, path, ms)

        rule.levels, rule.adapt = begin, learn
        return rule


@dataclass(frozen=True)
class ReckonedDynaTree(Reckoned, DynaTree):
    __doc__ = DynaTree.__doc__

    def rule(self) -> Rule:
        return self.reckoned(super().rule())
