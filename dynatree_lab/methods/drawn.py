"""Drawn candidates: tokens drawn without replacement from the draft's distribution.

A rule with draws_candidates gets them in place of the top k if text is sampled. This takes three
parts, which compose.py puts together: a drafter that draws and stores the distributions, a rule
that gets the value of each candidate before its draw, and an acceptance (acceptances.py).

The text is exact only if no row depends on its own draw or on later ones:

- Drawn candidates may be cut only as a suffix in draw order, and only by what is known before the
  draw: their `values` (DySpec, Eq. 11), their place in this order, the confidence of the row. A
  gate `level.logprobs >= log_threshold(0.1)` breaks this. It cuts unlikely tokens after their draw,
  so these are never rejected, and the text is biased towards likely ones.
- Which rows are expanded may depend on anything if all drafted rows are verified, as in confident.
  If only the best rows by value are verified, as in dyspec, a row may stay without children only if
  none of them could be among the best.

Shapes: n rows, k candidates per row, V vocabulary.
"""

import math
from dataclasses import fields

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from draft_tree import Candidates, Gates, Level, Rule, Tree, passing
from dynatree import ModelDrafter
from dynatree_lab.methods.calibration import CalibratedDrafter
from dynatree_lab.methods.rules import DrawnLevel, MixedTree, RuleWrapper, added_mask
from dynatree_lab.methods.sampler import DrawingSampler
from gpt_neox import Model


class DrawnDrafter(ModelDrafter):
    """A draft model whose candidates a sampler (sampler.py) draws, n_drawn per row."""

    def __init__(self, model: Model, sampler: DrawingSampler, n_drawn: int, has_entropy: bool):
        super().__init__(model)
        self.sampler, self.n_drawn, self.has_entropy = sampler, n_drawn, has_entropy

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        if rows == [0]:
            self.sampler.draft_probs = []
        return super().draft(tree, rows, k)

    def choose(self, logits: Tensor, k: int) -> Candidates:
        probs = self.level_probs = self.sampler.draft_distribution(logits)  # [n, V]
        self.sampler.draft_probs.extend(probs)
        entropy = torch.special.entr(probs).sum(dim=-1) if self.has_entropy else None
        return self.sampler.propose(probs, self.n_drawn, entropy)


class DrawnRule(RuleWrapper):
    """A wrapper that gives a rule DrawnLevels, and checks which candidates the rule cuts."""

    def __init__(self, rule: Rule, drafter: DrawnDrafter, calibrated: CalibratedDrafter | None):
        super().__init__(rule)
        self.drafter, self.calibrated = drafter, calibrated

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        self.values = [0.0]  # of each row of the tree
        # Log acceptance probability and value of the rows that the draft runs next, [n, 2]
        self.parent_scores = numpy.zeros((1, 2), numpy.float32)
        return super().begin_tree(root_token, max_depth)

    def add_gates(self, level: Level) -> Gates:
        values = drawn_values(level.logprobs, self.parent_scores, self.calibrated is not None)
        parts = [getattr(level, f.name) for f in fields(Level)]
        self.level = DrawnLevel(*parts, drawn_values=values, find_confidence=self.find_confidence)
        gates = super().add_gates(self.level)
        self.is_added = added_mask(self.level, gates)
        self.require_suffix(values > -math.inf)
        self.values += values[self.is_added].tolist()
        return {"added": self.is_added}

    def find_confidence(self) -> ndarray:
        """Return c(u) [n] of the level that the draft has just run; 0 where it overflowed."""
        likeliest = self.drafter.level_probs.amax(dim=1).cpu().numpy()
        if self.calibrated:
            likeliest = numpy.exp(self.calibrated.calibrate_drawn(numpy.log(likeliest)))
        return numpy.nan_to_num(likeliest)

    def require_suffix(self, is_possible: ndarray) -> None:
        """Raise ValueError if a possible candidate [n, k] is cut and a later one of its row is not.

        The later one was drawn without the earlier one's token, so its acceptance would be biased.
        """
        is_cut = is_possible & ~self.is_added
        if (is_cut[:, :-1] & self.is_added[:, 1:]).any():
            rule = self.rule
            while isinstance(rule, RuleWrapper):
                rule = rule.rule
            what = (
                f"{type(rule).__name__} cuts a drawn candidate and adds a later one of the same row"
            )
            raise ValueError(f"{what}; drawn candidates may be cut only as a suffix in draw order")

    def expand_gates(self, level: Level) -> Gates:
        gates = super().expand_gates(self.level)
        is_expanded = passing(self.level, gates) & self.is_added
        accepted = acceptance_logprobs(self.level, self.calibrated is not None)
        columns = accepted[is_expanded], self.level.values[is_expanded]
        self.parent_scores = numpy.stack(columns, axis=1)  # breadth-first, as the rows are run
        return gates

    def finish_tree(self, tree: Tree) -> Tree:
        return super().finish_tree(MixedTree.from_tree(tree, self.values[: len(tree)]))


def acceptance_logprobs(level: DrawnLevel, is_calibrated: bool) -> ndarray:
    """Return the log-probability [n, k] that each drawn candidate is accepted, earlier siblings
    rejected. p(u) is that already, because a draft's probabilities are relative to all siblings."""
    return level.values + level.logprobs if is_calibrated else level.path_logprobs


def drawn_values(logprobs: ndarray, parent_scores: ndarray, is_calibrated: bool) -> ndarray:
    """Return the log values [n, k] of drawn candidates, each known before the candidate is drawn.

    value = a(u) * (1 - sum(probs of earlier siblings))  # of a child of row u (DySpec, Eq. 11)
    value = a(u) * product(1 - probs of earlier siblings)  # if calibrated

    a(u) is the probability that row u is accepted. The second factor is the probability that all
    earlier siblings are rejected. The draft's probabilities are renormalised after each draw;
    acceptance probabilities are not.

    Args:
        logprobs: [n, k], -inf for tokens that cannot be drawn.
        parent_scores: [n, 2], log a(u) and value of the rows.
        is_calibrated: logprobs are of acceptance.
    """
    probs = numpy.exp(logprobs)
    p_reached = numpy.ones_like(probs)  # that all earlier siblings are rejected
    if is_calibrated:
        p_reached[:, 1:] = (1 - probs[:, :-1]).cumprod(axis=1)
    else:
        p_reached[:, 1:] = 1 - probs[:, :-1].cumsum(axis=1)
    with numpy.errstate(divide="ignore"):
        values = parent_scores[:, :1] + numpy.log(p_reached.clip(min=0))
    # Rounding may raise a value. None may exceed its parent's or its earlier sibling's
    values = numpy.minimum.accumulate(numpy.minimum(values, parent_scores[:, 1:]), axis=1)
    return numpy.where(probs > 0, values, -math.inf)
