"""The law of a sampled text: how likely each one is, over all that draft and coin can do.

Sampling is exact if every text is as likely as from the target alone. Where both models are tables,
logits of the next token by the last one, that is no estimate: all trees that can be drafted are
drafted, each is accepted in every way it can be, and the chances are added up.

    found = law(Chain(K=2), target_table, draft_table, 3)
    assert difference(found, target_law(target_table, 3)) < 1e-7

What it may find wrong is an acceptance, or a rule that looks at what was drawn.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import TypeVar

import numpy
import torch
from torch import Tensor

from draft_tree import Candidates, DynaTreeRule, Rule, Settings, Tree, grow
from dynatree import generate
from gpt_neox import Model, Scores
from methods.auto import AutoRule
from methods.chances import FIRST_DRAWN, LEAST_SLOPE
from methods.costs import Account
from methods.retrieval import GraftRule
from methods.stop import Stop
from sampling import Acceptance, Sampler, Sampling, accept_by_token

CPU = torch.device("cpu")
PLAIN = Sampling(1.0)
Text = tuple[int, ...]
Law = dict[Text, float]
Result = TypeVar("Result")


@torch.inference_mode()
def law(
    settings: Settings,
    target_table: Tensor,
    draft_table: Tensor,
    n_tokens: int,
    acceptance: Acceptance | None = None,
    sampling: Sampling = PLAIN,
) -> Law:
    """The probability of each text of n_tokens that a method may write after token 0.

    It is written as dynatree.generate does: a tree below the last token, no deeper than what is
    left to write, the accepted path and its bonus, the next tree, ... but each with a fresh rule,
    so what a rule learns from one tree to the next has no part in it. `Learned` settings start
    every tree from a state that earlier trees might have left.

    Tables: logits [V, V] by the token before; in float64 the law is right to 1e-8 or so. The draft
    may have fewer ids, or more. acceptance: None for the rule's own, else by token, as in the loop.
    All its chance must be from the sampler: `draw`, and `coin`, compared once. The number of cases
    grows fast: a few ids, and trees of a few drawn nodes, are what it is for.
    """
    step = partial(every_step, settings, target_table, draft_table, acceptance, sampling)

    @functools.cache
    def after(root: int, n_left: int) -> Law:
        """Of texts of n_left tokens."""
        if n_left < 1:
            return {(): 1.0}
        found: Law = defaultdict(float)
        for new, chance in step(root, n_left):
            for rest, p in after(new[-1], n_left - len(new)).items():
                found[new + rest] += chance * p
        return found

    return dict(after(0, n_tokens))


@dataclass(frozen=True)
class Learned:
    """Settings of which every rule starts from one random state, as if it had learned it."""

    settings: Settings
    seed: int

    def rule(self) -> Rule:
        rule = self.settings.rule()
        teach(rule, Random(self.seed))
        return rule


def teach(rule: Rule, rng: Random) -> None:
    """Give a rule random shares, weights, costs and thresholds.

    Chances are often above one half, because only then can a node be worth more than its sibling.
    """
    stop = stop_of(rule)
    if isinstance(rule, GraftRule):
        rule = rule.base
    if rule.chances:
        rule.chances.weights = rng.uniform(-1, 3), rng.uniform(LEAST_SLOPE, 2)
        rule.chances.first = FIRST_DRAWN
    if isinstance(rule, DynaTreeRule):
        for _ in range(rng.randrange(4)):
            rule.move(*rng.choice([(1, -0.05, -0.05), (-1, 0.05, 0.05)]))
    if isinstance(rule, AutoRule):
        rule.counts.chances = [rng.random() for _ in rule.counts.chances]
        teach_costs(rule.account, rng)
    if stop:
        stop.shares = numpy.array([rng.uniform(0.02, 1) for _ in stop.shares])
        stop.level_yield = rng.uniform(0.1, 0.98)
        teach_costs(stop.account, rng)


def stop_of(rule: Rule) -> Stop | None:
    """The stop by cost that stands before a rule's hooks."""
    found = getattr(rule.levels, "__self__", None)
    return found if isinstance(found, Stop) else None


def teach_costs(account: Account, rng: Random) -> None:
    """Random prices, at which the draft is worth a try."""
    if account.is_learning:
        account.costs.weights[1:] = [10 ** rng.uniform(-3, -0.5) for _ in range(4)]
    account.overall.tokens = rng.uniform(1, 3)
    account.drafting.tokens = 99.0


@torch.inference_mode()
def mean_length(
    settings: Settings,
    target_table: Tensor,
    draft_table: Tensor,
    n_tokens: int,
    acceptance: Acceptance | None = None,
    sampling: Sampling = PLAIN,
) -> float:
    """The mean number of drafted tokens that the first of those trees has accepted."""
    found = every_step(settings, target_table, draft_table, acceptance, sampling, 0, n_tokens)
    return sum(chance * (len(new) - 1) for new, chance in found)


def every_step(
    settings: Settings,
    target_table: Tensor,
    draft_table: Tensor,
    acceptance: Acceptance | None,
    sampling: Sampling,
    root: int,
    n_left: int,
) -> Iterator[tuple[Text, float]]:
    """What one tree may commit where n_left tokens are to be written, and how likely that is."""
    acceptance = acceptance or settings.rule().acceptance or accept_by_token
    sampler = sampling.sampler(CPU)
    drafting = partial(draft, settings, root, draft_table, len(target_table), n_left - 1)
    for tree, chance in every_outcome(drafting, sampler):
        verifying = partial(commit, acceptance, tree, target_table)
        for new, chance_below in every_outcome(verifying, sampler):
            yield new, chance * chance_below


def target_law(target_table: Tensor, n_tokens: int, sampling: Sampling = PLAIN) -> Law:
    """The probability of each text of n_tokens that the target alone writes after token 0."""
    return own_law(lambda text: target_table[text[-1:]], n_tokens, sampling)


def own_law(follows: Callable[[list[int]], Tensor], n_tokens: int, sampling: Sampling) -> Law:
    """The same of any model. follows: a text from token 0 on -> the logits [1, V] after it."""
    sampler = sampling.sampler(CPU)
    found: Law = {(): 1.0}
    for _ in range(n_tokens):
        longer = {}
        for text, chance in found.items():
            for token, p in enumerate(sampler.warp(follows([0, *text]))[0].tolist()):
                longer[*text, token] = chance * p
        found = longer
    return found


@torch.inference_mode()
def difference_by_generate(
    target: Model, draft: Model, settings: Settings, n_tokens: int, sampling: Sampling
) -> float:
    """How far the law of what generate writes is from the target's: by models, and over what a rule
    learns from one tree to the next. For fewer ids and tokens yet."""

    def write(sampler: Scripted) -> Text:
        given = SimpleNamespace(is_greedy=False, sampler=lambda *_: sampler)
        steps = generate(target, draft, [0], settings, n_tokens, sampling=given)
        return tuple(token for step in steps for token in step.tokens)

    def follows(text: list[int]) -> Tensor:
        return target.prefill(text, target.new_cache(len(text))).logits

    found: Law = defaultdict(float)
    for text, chance in every_outcome(write, sampling.sampler(CPU)):
        found[text] += chance
    return difference(found, own_law(follows, n_tokens, sampling))


def difference(one: Law, other: Law) -> float:
    """Their total variation: 0 if each text is as likely in both, 1 if none is possible in both."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one | other) / 2


def draft(
    settings: Settings, root: int, table: Tensor, n_ids: int, max_depth: int, sampler: Sampler
) -> Tree:
    """A tree below this token by the draft that a table makes, asked for n_ids ids as
    dynatree.ModelDrafter asks its model; an id that is not in the table is read as 0."""
    rule = settings.rule()

    def run(tokens: list[int], parents: list[int] | None) -> Candidates:
        logits = table[[token if token < len(table) else 0 for token in tokens], :n_ids]
        drawn_from = None
        if rule.is_drawing:
            ids, logprobs, drawn_from = sampler.propose(logits, rule.n_drawn)
        else:
            ids, logprobs = Scores(logits).top(n_ids)
        return Candidates(ids, logprobs.astype("float32"), drawn_from)

    return grow(rule, root, run, max_depth)


def commit(acceptance: Acceptance, tree: Tree, table: Tensor, sampler: Sampler) -> Text:
    """The tokens that are accepted of a tree, and the bonus."""
    path, tokens = acceptance(tree, table[tree.tokens], sampler)
    assert path[0] == 0 and len(tokens) == len(path), "a token after each row, from the root on"
    for above, row, token in zip(path, path[1:], tokens, strict=False):
        assert tree.parents[row] == above, "the rows are a path"
        assert tree.tokens[row] == token, "the tokens are the path's"
    return tuple(tokens)


class Scripted(Sampler):
    """A sampler whose every choice is fixed beforehand, and how likely it is that they come so."""

    def __init__(self, sampler: Sampler, script: list[int]):
        """script: which of its options each choice takes."""
        super().__init__(sampler.settings, sampler.generator, sampler.coins)
        self.__dict__ |= {"script": script, "n_options": [], "chances": []}  # it is frozen

    def choose(self, chances: list[float]) -> int:
        """One of the possible options, as the script says; the first past its end."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        place = len(self.n_options)
        self.n_options.append(len(possible))
        chosen = possible[self.script[place] if place < len(self.script) else 0]
        self.chances.append(chances[chosen])
        return chosen

    def draw(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([self.draw_row(row, k) for row in probs.tolist()])
        return ids, probs.gather(1, ids)

    def draw_row(self, probs: list[float], k: int) -> list[int]:
        """Each draw is from what the earlier ones leave; when nothing is left, impossible ids."""
        drawn: list[int] = []
        for _ in range(k):
            left = [0.0 if i in drawn else p for i, p in enumerate(probs)]
            total = sum(left)
            if total > 0:
                drawn.append(self.choose([p / total for p in left]))
            else:
                drawn.append(next(i for i in range(len(probs)) if i not in drawn))
        return drawn

    def coin(self) -> "Coin":
        return Coin(self.choose)


class Coin:
    """Uniform on [0, 1), compared once."""

    def __init__(self, choose: Callable[[list[float]], int]):
        self.choose = choose
        self.is_known = False

    def __lt__(self, chance: float) -> bool:
        assert not self.is_known, "one coin for two rows"
        self.is_known = True
        chance = min(max(0.0, float(chance)), 1.0)  # of nan 0: no coin is below it
        return self.choose([chance, 1 - chance]) == 0


def every_outcome(
    trial: Callable[[Scripted], Result], sampler: Sampler
) -> Iterator[tuple[Result, float]]:
    """What `trial` returns and how likely that is, for all of its choices in all combinations."""
    script: list[int] | None = []
    while script is not None:
        scripted = Scripted(sampler, script)
        result = trial(scripted)
        yield result, math.prod(scripted.chances)
        n_unscripted = len(scripted.n_options) - len(script)
        script = next_script(script + [0] * n_unscripted, scripted.n_options)


def next_script(taken: list[int], n_options: list[int]) -> list[int] | None:
    """The next combination, counting up from the last choice; None after the last one."""
    for i in reversed(range(len(taken))):
        if taken[i] + 1 < n_options[i]:
            return taken[:i] + [taken[i] + 1]
    return None
