"""Random and large settings of every method, and the growth of trees from drawn candidates."""

import random
from collections.abc import Callable
from dataclasses import Field

import trees
from torch import Tensor
from trees import FakeDraft, Path

import draft_tree
from draft_tree import Candidates, Rule, Settings, Tree
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.costs import EXAMPLE_COSTS
from dynatree_lab.methods.drawn import DrawnRule
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.rules import hooked
from dynatree_lab.methods.sampler import DrawingSampler


class RuleRecorder:
    """Settings that record every rule they make."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rules: list[Rule] = []

    def make_rule(self) -> Rule:
        rule = self.settings.make_rule()
        self.rules.append(rule)
        return rule


LARGE_TREES = {  # settings that give trees of more than 128 rows
    "specinfer": "widths=6:5:4:2",
    "dynatree": "B_min=2 B_mid=4 B_max=6 tau=0 rho_stop=0 rho_deep=0.001 N_max=300",
    "dyspec": "N=256",
    "graft": "base=fixed:D=4:B=4:tau=0:N_max=256 N=300",
    "beam": "k=12 N_max=400",
    "opttree": "N=200 delta=0",
    "sequoia": "N=700 D_max=12 p=0.5:0.3:0.1:0.05",
}
LARGE_SETTINGS = {
    method: GenerationConfig.parse(method, *words.split()).settings
    for method, words in LARGE_TREES.items()
}


def random_settings(method: str, rng: random.Random) -> Settings:
    """Draw small settings of a method, as trees.random_settings does. A new method is covered by
    its line in the registry. Raises KeyError if there is no such method."""
    return trees.random_settings(METHODS[method], rng, random_value)


def random_options(settings: Settings, rng: random.Random) -> dict[str, object]:
    """Draw calibrate and costs of a GenerationConfig; none where they have no effect."""
    costs = rng.choice(("off", *EXAMPLE_COSTS))
    options = {"calibrate": rng.random() < 0.5, "costs": costs}
    try:
        Method(settings, **options)
    except ValueError:
        return {}
    return options


def random_value(field: Field, rng: random.Random) -> object:
    """Draw the value of one setting; one that is a text is an example of the field's metadata."""
    if "parse" in field.metadata:
        return rng.choice(field.metadata["examples"])
    return trees.random_value(field, rng)


class DrawnFakeDraft(FakeDraft):
    """A FakeDraft whose candidates are drawn by a sampler; without one they are the top k."""

    def __init__(
        self,
        seed: int,
        sampler: DrawingSampler | None = None,
        changed: dict[Path, Tensor] | None = None,
    ):
        super().__init__(seed, changed)
        self.sampler = sampler
        self.probs: list[Tensor] = []  # of all rows, as in dynatree_lab.methods.drawn.DrawnDrafter

    def choose(self, logits: Tensor, k: int) -> Candidates:
        if not self.sampler:
            return super().choose(logits, k)
        probs = self.level_probs = self.sampler.draft_distribution(logits)
        self.probs.extend(probs)
        return self.sampler.propose(probs, logits.shape[1])


def grow(
    rule: Rule, root: int, draft: Callable[..., Candidates], max_depth: int, vocab_size: int = 1000
) -> Tree:
    """Run draft_tree.grow. If the draft has a sampler, it draws its candidates, and the rule is
    wrapped in DrawnRule."""
    if getattr(draft, "sampler", None):
        rule = DrawnRule(hooked(rule), draft, None)
    return draft_tree.grow(rule, root, draft, max_depth, vocab_size)
