"""The distribution of sampled text by enumeration, over all random numbers.

Sampling is exact if every text is as likely as from the target alone. Where both models are tables,
logits of the next token by the last one, that is no estimate: all trees that can be drafted are
drafted, each is accepted in every way it can be, and the probabilities are added up.

    found = law(Chain(K=2), target_table, draft_table, 3)
    assert difference(found, target_law(target_table, 3)) < 1e-7

What it may find wrong is an acceptance, or a rule that looks at what was drawn. A method starts
fresh, or from what `learn` makes of its parts: what it has learned must not bias the text.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TypeVar

import torch
from conftest import Stub
from torch import Tensor

from draft_tree import Settings, Tree, grow
from gpt_neox import Config, GPTNeoX, Model
from methods.acceptances import DrawnAcceptance
from methods.compose import Parts, compose, generate
from methods.sampler import DrawingSampler, Sampling
from verify import Acceptance

CPU = torch.device("cpu")
PLAIN = Sampling(1.0)
Text = tuple[int, ...]
Law = dict[Text, float]
Result = TypeVar("Result")
Learn = Callable[[Parts], None]  # changes what the parts of a method have learned


@dataclass(frozen=True)
class Pair:
    """Two models that are tables: logits [V, V] by the token before."""

    target: Tensor
    draft: Tensor

    def compose(
        self,
        settings: Settings,
        sampling: Sampling,
        sampler: DrawingSampler,
        acceptance: DrawnAcceptance | None,
        learn: Learn | None,
    ) -> Parts:
        """Return a method's parts over these models, all random numbers from this sampler."""
        draft = Stub(lambda tokens, positions: self.draft[tokens], len(self.draft))
        target = Stub(lambda tokens, positions: self.target[tokens], len(self.target))
        parts = compose(target, draft, settings, given_sampler(sampling, sampler))
        if acceptance:
            parts.accept.accept = acceptance
        if learn:
            learn(parts)
        return parts


def given_sampler(sampling: Sampling, sampler: DrawingSampler) -> SimpleNamespace:
    """Return sampled text's Sampling whose sampler is this one."""
    top_k_temperature = sampling.top_k_temperature
    found = {"is_greedy": False, "draws_candidates": True, "top_k_temperature": top_k_temperature}
    return SimpleNamespace(**found, sampler=lambda _: sampler)


@torch.inference_mode()
def law(
    settings: Settings,
    target_table: Tensor,
    draft_table: Tensor,
    n_tokens: int,
    acceptance: DrawnAcceptance | None = None,
    sampling: Sampling = PLAIN,
    learn: Learn | None = None,
) -> Law:
    """Return the probability of each text of n_tokens that a method may write after token 0.

    It is written as dynatree.generate does: a tree below the last token, no deeper than what is
    left to write, the accepted path and its bonus, the next tree, ... but each with fresh parts, or
    with what `learn` makes of them.

    Args:
        target_table, draft_table: [V, V]; in float64 the result is right to 1e-8 or so. The draft
            may have fewer ids, or more.
        acceptance: None for the method's own.

    All random numbers must be the sampler's. The number of cases grows fast: a few ids, and trees
    of a few drawn nodes, are what it is for.
    """
    pair = Pair(finite(target_table), draft_table)
    step = partial(every_step, pair, settings, acceptance, sampling, learn)

    @functools.cache
    def after(root: int, n_left: int) -> Law:
        """Return the probabilities of texts of n_left tokens."""
        if n_left < 1:
            return {(): 1.0}
        found: Law = defaultdict(float)
        for new, chance in step(root, n_left):
            for rest, p in after(new[-1], n_left - len(new)).items():
                found[new + rest] += chance * p
        return found

    return dict(after(0, n_tokens))


@torch.inference_mode()
def mean_length(
    settings: Settings,
    target_table: Tensor,
    draft_table: Tensor,
    n_tokens: int,
    acceptance: DrawnAcceptance | None = None,
    sampling: Sampling = PLAIN,
) -> float:
    """Return the mean number of drafted tokens that the first of those trees has accepted."""
    pair = Pair(target_table, draft_table)
    found = every_step(pair, settings, acceptance, sampling, None, 0, n_tokens)
    return sum(chance * (len(new) - 1) for new, chance in found)


def every_step(
    pair: Pair,
    settings: Settings,
    acceptance: DrawnAcceptance | None,
    sampling: Sampling,
    learn: Learn | None,
    root: int,
    n_left: int,
) -> Iterator[tuple[Text, float]]:
    """Yield what one tree may commit where n_left tokens are to be written, and its probability."""
    vocab_size = len(pair.target)

    def drafting(choices: Choices) -> tuple[Tree, Parts]:
        sampler = Scripted(sampling, choices)
        parts = pair.compose(settings, sampling, sampler, acceptance, learn)
        tree = draft(parts, root, n_left - 1, vocab_size)
        return tree, parts

    def verifying(tree: Tree, parts: Parts, choices: Choices) -> Text:
        parts.accept.sampler = Scripted(sampling, choices)
        return commit(parts.accept, tree, pair.target)

    for drafted, chance in every_outcome(drafting):
        for new, chance_below in every_outcome(partial(verifying, *drafted)):
            yield new, chance * chance_below


def draft(parts: Parts, root: int, max_depth: int, vocab_size: int) -> Tree:
    """Return a tree below this token."""
    if parts.drafter:
        parts.drafter.start([root], max_depth + parts.rule.max_rows + 2, vocab_size)
    draft_level = parts.drafter and parts.drafter.draft
    return grow(parts.rule, root, draft_level, max_depth, vocab_size)


def commit(accept: Acceptance, tree: Tree, table: Tensor) -> Text:
    """Return the tokens that are accepted of a tree, and the bonus."""
    path, tokens = accept(tree, table[tree.tokens])
    assert path[0] == 0 and len(tokens) == len(path), "a token after each row, from the root on"
    for above, row, token in zip(path, path[1:], tokens, strict=False):
        assert tree.parents[row] == above, "the rows are a path"
        assert tree.tokens[row] == token, "the tokens are the path's"
    return tuple(tokens)


def finite(table: Tensor) -> Tensor:
    """Return a target's table whose impossible tokens have finite logits: it has not overflowed."""
    return table.clamp(min=-1e30)


def target_law(target_table: Tensor, n_tokens: int, sampling: Sampling = PLAIN) -> Law:
    """Return the probability of each text of n_tokens that the target writes after token 0."""
    table = Stub(lambda tokens, positions: finite(target_table)[tokens], len(target_table))
    return own_law(table, n_tokens, sampling)


def own_law(model: Model, n_tokens: int, sampling: Sampling) -> Law:
    """Return the same for any model."""
    sampler = sampling.sampler(CPU)
    found: Law = {(): 1.0}
    for _ in range(n_tokens):
        longer = {}
        for text, chance in found.items():
            tokens = [0, *text]
            logits = model.prefill(tokens, model.new_cache(len(tokens)))
            probs = sampler.target_distribution(logits)[0]
            for token, p in enumerate(probs.tolist()):
                longer[*text, token] = chance * p
        found = longer
    return found


def tiny_model(seed: int, n_ids: int) -> GPTNeoX:
    """Return a model of one layer and two heads whose weights make some texts likelier."""
    torch.manual_seed(seed)
    model = GPTNeoX(Config(n_ids, 8, 1, 2, 16, 16, 1.0, 10000.0))
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model.double().requires_grad_(False)


@torch.inference_mode()
def difference_by_generate(
    target: Model, draft: Model, settings: Settings, n_tokens: int, sampling: Sampling
) -> float:
    """Return how far the distribution of what generate writes is from the target's: by models, and
    over what a rule learns from one tree to the next. For fewer ids and tokens yet."""

    def write(choices: Choices) -> Text:
        given = given_sampler(sampling, Scripted(sampling, choices))
        steps = generate(target, draft, [0], settings, n_tokens, sampling=given)
        return tuple(token for step in steps for token in step.tokens)

    found: Law = defaultdict(float)
    for text, chance in every_outcome(write):
        found[text] += chance
    return difference(found, own_law(target, n_tokens, sampling))


def difference(one: Law, other: Law) -> float:
    """Return their total variation: 0 if each text is as likely in both, 1 if none is possible in
    both."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one | other) / 2


class Choices:
    """Choices that a script makes, and the probability of each."""

    def __init__(self, script: list[int]):
        """script: which of its options each choice takes."""
        self.script = script
        self.n_options: list[int] = []
        self.chances: list[float] = []

    def choose(self, chances: list[float]) -> int:
        """Return one of the possible options, as the script says; the first past its end."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        place = len(self.n_options)
        self.n_options.append(len(possible))
        chosen = possible[self.script[place] if place < len(self.script) else 0]
        self.chances.append(chances[chosen])
        return chosen


class Scripted(DrawingSampler):
    """A sampler whose every choice is scripted."""

    def __init__(self, sampling: Sampling, choices: Choices):
        super().__init__(sampling, CPU)
        self.choose = choices.choose

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
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

    def uniform(self) -> "Coin":
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


def every_outcome(trial: Callable[[Choices], Result]) -> Iterator[tuple[Result, float]]:
    """Yield what `trial` returns and its probability, for all choices in all combinations."""
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        result = trial(choices)
        yield result, math.prod(choices.chances)
        n_unscripted = len(choices.n_options) - len(script)
        script = next_script(script + [0] * n_unscripted, choices.n_options)


def next_script(taken: list[int], n_options: list[int]) -> list[int] | None:
    """The next combination, counting up from the last choice; None after the last one."""
    for i in reversed(range(len(taken))):
        if taken[i] + 1 < n_options[i]:
            return taken[:i] + [taken[i] + 1]
    return None
