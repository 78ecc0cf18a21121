"""All texts that a method may write over small tables, and their probabilities.

Sampling is exact if a method writes every text with the target's own probability. Here both models
are tables: the logits of the next token depend only on the last token. So the probability of each
text can be computed: every possible tree is drafted, each is accepted in every possible way, and
the probabilities are added up.

    found = Enumeration(Chain(K=2), target_table, draft_table).distribution(3)
    assert difference(found, target_distribution(target_table, 3)) < 1e-7

This finds an acceptance that is wrong, and a rule whose choices depend on what was drawn. `learn`
may change a method's parts first, to check that a state it has learned does not bias the text.
"""

import functools
from collections import defaultdict
from collections.abc import Callable

import torch
from fast import Stub
from torch import Tensor

from draft_tree import Settings, Tree, grow
from dynatree_lab.enumeration import (
    CPU,
    Choices,
    Distribution,
    Scripted,
    Text,
    every_outcome,
    given_sampler,
    model_distribution,
)
from dynatree_lab.generation.compose import Parts, compose
from dynatree_lab.generation.run import ModelRun
from dynatree_lab.methods.acceptances import ACCEPTANCES, DrawnAcceptance
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.sampler import DrawingSampler, Sampling
from verify import Acceptance

PLAIN = Sampling(1.0)
Learn = Callable[[Parts], None]  # changes the learned state of a method's parts


def table_model(table: Tensor) -> Stub:
    """Return a model that is a table [V, V]: row i has the logits after token i."""
    return Stub(lambda tokens, positions: table[tokens], len(table))


class Enumeration:
    """All texts that a method may write after token 0, with their probabilities.

    Iterates as dynatree.generate does, with one difference: every tree is made by new parts, which
    `learn` may change. All trees are drafted once, and may then be accepted in several ways.

    All random choices must be made by the sampler. The number of cases grows fast, so the
    vocabulary must be a few ids and a tree a few drawn nodes.
    """

    def __init__(
        self,
        settings: Settings | Method,
        target_table: Tensor,
        draft_table: Tensor,
        sampling: Sampling = PLAIN,
        learn: Learn | None = None,
    ):
        """target_table, draft_table: [V, V]; in float64 the error is about 1e-8. The draft may have
        fewer ids than the target, or more."""
        self.table = target_table
        self.target, self.draft = table_model(target_table), table_model(draft_table)
        self.method = settings if isinstance(settings, Method) else Method(settings)
        self.sampling, self.learn = sampling, learn
        self.trees = functools.cache(self.draft_trees)
        self.steps = functools.cache(self.accept_trees)

    def compose(self, sampler: DrawingSampler) -> Parts:
        """Return new parts of the method; all random choices are the sampler's."""
        given = given_sampler(self.sampling, sampler)
        target, draft = (ModelRun(each, 99) for each in (self.target, self.draft))
        parts = compose(target, draft, self.method, given)
        if self.learn:
            self.learn(parts)
        return parts

    def draft_trees(self, root: int, n_left: int) -> list[tuple[tuple[Tree, Parts], float]]:
        """Return every tree below `root`, the parts that drafted it, and its probability.

        n_left: tokens that are still to be written; a tree is not deeper than that allows.
        """

        def drafting(choices: Choices) -> tuple[Tree, Parts]:
            parts = self.compose(Scripted(self.sampling, choices))
            return draft(parts, root, n_left - 1, len(self.table)), parts

        return list(every_outcome(drafting))

    def accept_trees(
        self, root: int, n_left: int, acceptance: DrawnAcceptance | None
    ) -> list[tuple[Text, float]]:
        """Return the tokens that one iteration may write after `root`, and their probability."""
        found = []
        for (tree, parts), p_tree in self.trees(root, n_left):
            accept = acceptance or parts.accept.accept
            draws_once = accept in ACCEPTANCES.values()
            sampler = (BonusRecorder if draws_once else Scripted)(self.sampling, Choices([]))
            sampler.accept, sampler.draft_probs = accept, parts.accept.draft_probs

            def verifying(choices: Choices, sampler: Scripted = sampler, tree: Tree = tree) -> Text:
                sampler.choose = choices.choose
                return commit(sampler, tree, self.table)

            for text, p_path in every_outcome(verifying):
                if not draws_once:
                    found.append((text, p_tree * p_path))
                    continue
                for token, p in enumerate(sampler.bonus_probs):
                    if p > 0:
                        found.append(((*text[:-1], token), p_tree * p_path * p))
        return found

    @torch.inference_mode()
    def distribution(
        self, n_tokens: int, acceptance: DrawnAcceptance | None = None
    ) -> Distribution:
        """Return the probability of each text. acceptance: None for the method's own."""

        @functools.cache
        def after(root: int, n_left: int) -> Distribution:
            """Return the probability of each continuation of n_left tokens after `root`."""
            if n_left < 1:
                return {(): 1.0}
            found: Distribution = defaultdict(float)
            for new, probability in self.steps(root, n_left, acceptance):
                for rest, p in after(new[-1], n_left - len(new)).items():
                    found[new + rest] += probability * p
            return found

        return dict(after(0, n_tokens))

    @torch.inference_mode()
    def mean_length(self, n_tokens: int, acceptance: DrawnAcceptance | None = None) -> float:
        """Return the mean number of accepted drafted tokens of the first tree after token 0."""
        return sum(p * (len(new) - 1) for new, p in self.steps(0, n_tokens, acceptance))


def draft(parts: Parts, root: int, max_depth: int, vocab_size: int) -> Tree:
    """Draft a tree below a token."""
    if parts.drafter:
        parts.drafter.start([root], max_depth + parts.rule.max_rows + 2, vocab_size)
    draft_level = parts.drafter and parts.drafter.draft
    return grow(parts.rule, root, draft_level, max_depth, vocab_size)


def commit(accept: Acceptance, tree: Tree, table: Tensor) -> Text:
    """Accept a tree and return the accepted tokens, the bonus token last."""
    path, tokens = accept(tree, table[tree.tokens])
    assert path[0] == 0 and len(tokens) == len(path), "one token for each row, the root first"
    for above, row, token in zip(path, path[1:], tokens, strict=False):
        assert tree.parents[row] == above, "the rows are not a path"
        assert tree.tokens[row] == token, "the tokens are not the path's"
    return tuple(tokens)


def target_distribution(
    target_table: Tensor, n_tokens: int, sampling: Sampling = PLAIN
) -> Distribution:
    """Return the probability of each text of n_tokens that the target writes after token 0."""
    table = target_table.clamp(min=-1e30)  # a Stub's logits are its hidden states: never infinite
    warp = sampling.sampler(CPU).target_distribution
    return model_distribution(table_model(table), n_tokens, warp)


class BonusRecorder(Scripted):
    """A scripted sampler that records the distribution of the bonus token instead of drawing it.

    One trial then stands for all bonus tokens. It is for acceptances that draw no other token.
    """

    bonus_probs: list[float]

    def draw(self, probs: Tensor) -> int:
        self.bonus_probs = (probs / probs.sum()).tolist()
        return 0
