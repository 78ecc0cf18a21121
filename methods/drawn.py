"""Drawn candidates: tokens drawn without replacement from the draft's distribution.

A rule with draws_candidates gets them in place of the top k where text is sampled. They need three
parts, which compose.py puts together: a drafter that draws and keeps what it drew from, a rule that
is shown what each candidate is worth before it is drawn, and an acceptance (acceptances.py).

The text is exact only if no row depends on draws after its own:

- Drawn candidates may be cut only as a suffix in draw order, and only by what is known before the
  draw: their `values` (DySpec, Eq. 11), their place in this order, the confidence of the row. A
  gate `level.logprobs >= log_threshold(0.1)` breaks this: it tries a likely token where one was
  drawn, and saves an unlikely one its rejection.
- Which of them are expanded may depend on anything if all that is drafted is verified. If only the
  best rows by value are, only those that cannot be among them may stay without children.

Shapes: n rows, k candidates per row, V vocabulary.
"""

import math

import numpy
from numpy import ndarray
from torch import Tensor

from draft_tree import Candidates, Gates, Level, Rule, Tree, passing
from dynatree import ModelDrafter
from gpt_neox import Model
from methods.calibration import CalibratedDrafter
from methods.rules import DrawnLevel, MixedTree, RuleWrapper, added
from methods.sampler import DrawingSampler


class DrawnDrafter(ModelDrafter):
    """A draft model whose candidates are drawn."""

    def __init__(self, model: Model, sampler: DrawingSampler, n_drawn: int):
        super().__init__(model)
        self.sampler, self.n_drawn = sampler, n_drawn
        self.probs: list[Tensor] = []  # [V] by draft slot, for its candidates

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        if parents is None:
            self.probs = []
        return super().draft(tokens, parents, k)

    def choose(self, logits: Tensor, k: int) -> Candidates:
        probs = self.level_probs = self.sampler.draft_distribution(logits)  # [n, V]
        self.probs.extend(probs)
        return Candidates(*self.sampler.propose(probs, self.n_drawn))


class DrawnRule(RuleWrapper):
    """Shows a rule its levels as drawn ones, and checks what it cuts."""

    def __init__(self, rule: Rule, drafter: DrawnDrafter, calibrated: CalibratedDrafter | None):
        super().__init__(rule)
        self.drafter, self.calibrated = drafter, calibrated

    def begin_tree(self, root: int, max_depth: int) -> int:
        self.values = [0.0]  # of each row of the tree
        self.above = numpy.zeros((1, 2), numpy.float32)  # log p(u) and value of the rows run next
        return super().begin_tree(root, max_depth)

    def add_gates(self, level: Level) -> Gates:
        values = drawn_values(level.logprobs, self.above, self.calibrated is not None)
        parts = level.depth, level.tokens, level.logprobs, level.path_logprobs
        self.level = DrawnLevel(*parts, values, self.find_confidence)
        gates = super().add_gates(self.level)
        self.is_added = added(self.level, gates)
        self.require_suffix(values > -math.inf)
        self.values += values[self.is_added].tolist()
        return {"added": self.is_added}

    def find_confidence(self) -> ndarray:
        """Return c(u) [n] of the level that the draft has just run; 0 where it overflowed."""
        likeliest = self.drafter.level_probs.amax(dim=1).cpu().numpy()
        if self.calibrated:
            likeliest = numpy.exp(self.calibrated.calibrate_drawn(numpy.log(likeliest)))
        return numpy.fmax(likeliest, 0)  # which ignores nan

    def require_suffix(self, is_possible: ndarray) -> None:
        """Raise ValueError if a possible candidate [n, k] is cut and a later one of its row is not.

        The later one was drawn from what the earlier one left, so its acceptance would be biased.
        """
        is_cut = is_possible & ~self.is_added
        if (is_cut[:, :-1] & self.is_added[:, 1:]).any():
            name = type(self.rule).__name__
            raise ValueError(
                f"{name} cuts a drawn candidate and adds a later one of the same row; drawn "
                "candidates may be cut only as a suffix in draw order"
            )

    def expand_gates(self, level: Level) -> Gates:
        gates = super().expand_gates(self.level)
        is_expanded = passing(self.level, gates) & self.is_added
        columns = self.level.path_logprobs[is_expanded], self.level.values[is_expanded]
        self.above = numpy.stack(columns, axis=1)  # in breadth-first order, as the rows are run
        return gates

    def finish_tree(self, tree: Tree) -> Tree:
        return super().finish_tree(MixedTree.of(tree, self.values[: len(tree)]))


def drawn_values(logprobs: ndarray, above: ndarray, is_calibrated: bool) -> ndarray:
    """Return the log values [n, k] of drawn candidates, each known before the candidate is drawn:
    the probability that the path is accepted and every earlier sibling is not (Eq. 9 and 11).

    Args:
        logprobs: [n, k], -inf for what cannot be drawn.
        above: [n, 2], log p(u) and value of the rows.
        is_calibrated: earlier siblings are rejected independently, each by its probability;
            otherwise what they leave is what their draws leave of the draft's distribution.
    """
    probs = numpy.exp(logprobs)
    left = numpy.ones_like(probs)
    if is_calibrated:
        left[:, 1:] = (1 - probs[:, :-1]).cumprod(axis=1)
    else:
        left[:, 1:] = 1 - probs[:, :-1].cumsum(axis=1)
    with numpy.errstate(divide="ignore"):
        values = above[:, :1] + numpy.log(left.clip(min=0))
    # Rounding may raise what is left. No value may exceed its parent's or its earlier sibling's
    values = numpy.minimum.accumulate(numpy.minimum(values, above[:, 1:]), axis=1)
    return numpy.where(probs > 0, values, -math.inf)
