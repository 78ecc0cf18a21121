"""ar, linear, confident, fixed, specinfer: trees whose shape is settled beforehand.

linear is a chain of tokens (Leviathan et al. 2023). confident is one that ends where the draft is
unsure: a token of less than p_min has nothing after it. So stops transformers, by its
assistant_confidence_threshold (after Mamou et al. 2024, who train a model for it); llama.cpp, by
its p-min, does not send that token along. fixed has B children everywhere (section 4.3), specinfer
as many as `widths` says for each depth (Miao et al. 2024; the paper's own are 1:1:3:1:1:1:1:1).

When the text is sampled, all that draft draw: fixed adds by value, known before the draw;
confident always adds what it has drawn and only then looks at its probability, so it loses nothing
by that. A node's children are drawn without replacement, a departure from specinfer's paper: where
a token has been rejected, the target's residual has none of it left, and a second draw of it can
never pass (DySpec says so, too).

    python dynatree.py --method linear --set K=8 --prompt "..."
    python dynatree.py --method specinfer --set widths=3:2:1 --prompt "..."
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from draft_tree import MAX_ROWS, Gates, Level, Rule, Settings, log_threshold, setting
from methods.reckoning import Reckoned
from methods.settings import text


@dataclass(frozen=True)
class Alone(Settings):
    """ar: the target alone; every tree is only its root."""

    rows: int = setting(
        1, 1, MAX_ROWS, "rows a pass is padded to: shows what rounding alone changes"
    )

    def rule(self) -> Rule:
        rule = Rule(max_branches=1, max_depth=0, max_rows=1, max_drafted=1)
        rule.min_rows = self.rows
        return rule


@dataclass(frozen=True)
class Chain(Settings):
    """linear: a chain of K tokens, a tree with one branch (Leviathan et al. 2023)."""

    K: int = setting(5, 0, MAX_ROWS - 1, "tokens drafted per iteration")

    def rule(self) -> Rule:
        return StaticRule([1] * self.K, self.K + 1)


@dataclass(frozen=True)
class ConfidentChain(Reckoned):
    """confident: a chain that ends with the first token of less than p_min (Mamou et al. 2024)."""

    K: int = setting(16, 0, MAX_ROWS - 1, "tokens drafted per iteration at most")
    p_min: float = setting(0.2, 0.0, 1.0, "a token to which the draft gives less is the last")

    def rule(self) -> Rule:
        least = log_threshold(self.p_min)
        return self.reckoned(StaticRule([1] * self.K, self.K + 1, least_to_expand=least))


@dataclass(frozen=True)
class Fixed(Reckoned):
    """fixed: the static tree, B children for every node down to depth D (section 4.3)."""

    D: int = setting(5, 1, MAX_ROWS - 1, "depth of the tree")
    B: int = setting(2, 1, 32, "children per node")
    tau: float = setting(0.05, 0.0, 1.0, "a child with p(path) below tau is not added")
    N_max: int = setting(64, 1, MAX_ROWS, "rows per tree, root included")

    def rule(self) -> Rule:
        least = log_threshold(self.tau)
        return self.reckoned(StaticRule([self.B] * self.D, self.N_max, least_to_add=least))


def parse_widths(word: str) -> list[int]:
    """Children per node at each depth. Raises ValueError unless the tree fits in a pass."""
    try:
        widths = [int(part) for part in word.split(":")]
    except ValueError:
        widths = [0]
    if min(widths) < 1:
        raise ValueError("children per node, by depth, are whole numbers such as 4:2:1")
    n_rows = count_rows(widths)
    if n_rows > MAX_ROWS:
        raise ValueError(f"its tree has {n_rows} rows, {MAX_ROWS} is the most")
    return widths


def count_rows(widths: Sequence[int]) -> int:
    """Of the tree with so many children per node at each depth, root included."""
    n_rows = 1
    n_nodes = 1  # of the level
    for width in widths:
        n_nodes *= width
        n_rows += n_nodes
    return n_rows


@dataclass(frozen=True)
class SpecInfer(Settings):
    """specinfer: as many children per node as is said for its depth (Miao et al. 2024)."""

    widths: str = text(
        "3:2:1:1:1",
        parse_widths,
        "children per node, at depth 0, 1, ...",
        ("1:1:3:1:1:1:1:1", "4:2", "1"),
    )

    def rule(self) -> Rule:
        widths = parse_widths(self.widths)
        return StaticRule(widths, count_rows(widths))


class StaticRule(Rule):
    """As many children per node as its depth allows, in breadth-first order up to n_rows."""

    is_drawing = True

    def __init__(
        self,
        widths: Sequence[int],
        n_rows: int,
        least_to_add: float = -math.inf,
        least_to_expand: float = -math.inf,
    ):
        """widths: children per node, by depth. least_to_add: log value of a child that is added, if
        it is ranked log p(u). least_to_expand: log-probability, given its path, of a child that has
        children."""
        widest = max(widths, default=1)
        super().__init__(widest, len(widths), max_rows=n_rows, max_drafted=n_rows)
        self.is_chain = widest == 1
        self.widths = widths
        self.least_to_add, self.least_to_expand = least_to_add, least_to_expand
        self.goes_by_probs = max(least_to_add, least_to_expand) > -math.inf

    def expand(self, level: Level) -> tuple[Gates, Gates]:
        is_wanted = numpy.zeros(level.tokens.shape, dtype=bool)
        is_wanted[:, : self.widths[level.depth]] = True
        to_add = {"width": is_wanted, "tau": level.values >= self.least_to_add}
        return to_add, {"p_min": level.logprobs >= self.least_to_expand}
