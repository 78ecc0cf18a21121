"""ar, linear, confident, fixed, specinfer: trees whose widths are fixed before decoding.

linear      a chain of K tokens (Leviathan et al. 2023)
confident   a chain that ends after the first token with a probability below p_min; transformers has
            this as assistant_confidence_threshold (after Mamou et al. 2024, who train a model for
            it); llama.cpp's p-min also drops that token
fixed       B children per node (section 4.3)
specinfer   `widths` children per node, by depth (Miao et al. 2024, who use 1:1:3:1:1:1:1:1)

When the text is sampled, the candidates of all methods but ar are drawn. The text stays exact:
fixed prunes by value, which is known before the draw. confident adds every drawn token, and looks
at its probability only to decide whether to go on. A node's children are drawn without replacement,
unlike in specinfer's paper. A rejected token has probability 0 in the target's residual, so drawing
it a second time could never succeed (DySpec notes this, too).

    python -m dynatree_lab --method linear --set K=8 --prompt "..."
    python -m dynatree_lab --method specinfer --set widths=3:2:1 --prompt "..."
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from draft_tree import (
    MAX_LEVELS,
    MAX_ROWS,
    Autoregressive,
    Gates,
    Level,
    Rule,
    log_threshold,
    setting,
)
from dynatree_lab.methods.rules import MethodRule
from dynatree_lab.methods.settings import MethodSettings, text


@dataclass(frozen=True)
class PaddedAutoregressive(Autoregressive):
    """ar: the target without a draft; every tree is only its root."""

    rows: int = setting(
        1, 1, MAX_ROWS, "rows that a pass is padded to, which shows the effect of rounding"
    )

    def make_rule(self) -> Rule:
        rule = MethodRule(max_branches=1, max_depth=0, max_rows=1)
        rule.min_rows = self.rows
        return rule


@dataclass(frozen=True)
class Chain(MethodSettings):
    """linear: a chain of K tokens (Leviathan et al. 2023)."""

    K: int = setting(5, 0, MAX_LEVELS, "tokens drafted per iteration")

    def make_rule(self) -> Rule:
        return StaticRule([1] * self.K, self.K + 1)


@dataclass(frozen=True)
class ConfidentChain(MethodSettings):
    """confident: a chain that ends after the first token below p_min (Mamou et al. 2024)."""

    K: int = setting(16, 0, MAX_LEVELS, "maximum number of tokens drafted per iteration")
    p_min: float = setting(0.2, 0.0, 1.0, "draft probability below which a token is the last")

    def make_rule(self) -> Rule:
        threshold = log_threshold(self.p_min)
        rule = StaticRule([1] * self.K, self.K + 1, min_to_expand=threshold)
        rule.draft_temperature = 1.0  # at the default, p_min seldom stops a chain
        return rule


@dataclass(frozen=True)
class Fixed(MethodSettings):
    """fixed: a static tree, B children per node down to depth D (section 4.3)."""

    D: int = setting(5, 1, MAX_LEVELS, "depth of the tree")
    B: int = setting(2, 1, 32, "children per node")
    tau: float = setting(0.05, 0.0, 1.0, "a child with p(u) below tau is not added")
    N_max: int = setting(64, 1, MAX_ROWS, "rows per tree, root included")

    def make_rule(self) -> Rule:
        threshold = log_threshold(self.tau)
        return StaticRule([self.B] * self.D, self.N_max, min_to_add=threshold)


def parse_widths(word: str) -> list[int]:
    """Return the children per node at each depth, parsed from a word such as 4:2:1.

    Raises ValueError for any other word, and for a tree of more than MAX_ROWS rows or MAX_LEVELS
    levels.
    """
    try:
        widths = [int(part) for part in word.split(":")]
    except ValueError:
        widths = [0]
    if min(widths) < 1:
        raise ValueError("it must be children per node at each depth, whole numbers such as 4:2:1")
    if len(widths) > MAX_LEVELS:
        raise ValueError(f"its tree has {len(widths)} levels, it must have at most {MAX_LEVELS}")
    n_rows = count_rows(widths)
    if n_rows > MAX_ROWS:
        raise ValueError(f"its tree has {n_rows} rows, it must have at most {MAX_ROWS}")
    return widths


def count_rows(widths: Sequence[int]) -> int:
    """Return the rows of a tree with these children per node at each depth, root included."""
    n_rows = 1
    n_nodes = 1  # of one level
    for width in widths:
        n_nodes *= width
        n_rows += n_nodes
    return n_rows


@dataclass(frozen=True)
class SpecInfer(MethodSettings):
    """specinfer: a static tree with a width for each depth (Miao et al. 2024)."""

    widths: str = text(
        "3:2:1:1:1",
        parse_widths,
        "children per node at depth 0, 1, ...",
        ("1:1:3:1:1:1:1:1", "4:2", "1"),
    )

    def make_rule(self) -> Rule:
        widths = parse_widths(self.widths)
        return StaticRule(widths, count_rows(widths))


class StaticRule(MethodRule):
    """A rule that adds widths[depth] children per node, in breadth-first order up to n_rows."""

    draws_candidates = True

    def __init__(
        self,
        widths: Sequence[int],
        n_rows: int,
        min_to_add: float = -math.inf,
        min_to_expand: float = -math.inf,
    ):
        """
        Args:
            widths: children per node, by depth.
            min_to_add: smallest log value of a child that is added; the value of a top-k candidate
                is log p(u).
            min_to_expand: smallest log-probability, given its path, of a child that is expanded.
        """
        widest = max(widths, default=1)
        super().__init__(widest, len(widths), n_rows)
        self.is_chain = widest == 1
        self.widths = widths
        self.min_to_add, self.min_to_expand = min_to_add, min_to_expand
        self.depends_on_probs = max(min_to_add, min_to_expand) > -math.inf

    def add_gates(self, level: Level) -> Gates:
        is_wanted = numpy.zeros(level.tokens.shape, dtype=bool)
        is_wanted[:, : self.widths[level.row_depth]] = True
        return {"width": is_wanted, "tau": level.values >= self.min_to_add}

    def expand_gates(self, level: Level) -> Gates:
        return {"p_min": level.logprobs >= self.min_to_expand}
