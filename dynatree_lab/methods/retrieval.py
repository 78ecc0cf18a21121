"""recycle and graft: candidates from a table of successors instead of a draft model.

The successors of a token are the k best ids by the target's logits, from the last pass that ran
this token: in the prompt, or in a verified tree, accepted or not. Following the table from the root
gives a tree at almost no cost. recycle does only this (Luo et al. 2024, Token Recycling). graft
(Graft, section 3) first runs a drafting rule. It stops that rule at checkpoints if the best path is
unlikely there, and fills the rest of the row budget from the table.

    python -m dynatree_lab --method recycle --set N=16 --prompt "..."
    python -m dynatree_lab --method graft --set base=deagle:k=4:N_max=24 --prompt "..."

The probability of a successor is assumed to depend only on its rank. `p` lists the probabilities
by rank, and the table has as many successors per token. The likeliest nodes are added first, from
one heap, so the tree needs neither a template nor a width.

The paper's other forms are settings of graft. `graft=off` only prunes, `checkpoints=off` only
grafts. Graft(ROOT) and Graft(TAIL) of section 2.2 are static trees that leave rows for retrieved
nodes, below the root or below the ends of the branches:

    dynatree-bench --methods "graft checkpoints=off base=fixed:N_max=24 N=32 at=root"
    dynatree-bench --methods "graft checkpoints=off base=fixed:N_max=24 N=32 at=tail"
"""

import math
import re
from collections.abc import Iterator
from dataclasses import Field, dataclass, replace

import numpy
from numpy import ndarray

from draft_tree import (
    MAX_LEVELS,
    MAX_ROWS,
    Gates,
    Level,
    Rule,
    Settings,
    Tree,
    log_threshold,
    setting,
)
from dynatree_lab.methods.drafting import DRAFTING
from dynatree_lab.methods.rules import (
    MixedTree,
    Proposal,
    RuleWrapper,
    add_likeliest,
    added_mask,
    are_retrieved,
    best_rows,
    breadth_first,
    hooked,
    select,
)
from dynatree_lab.methods.sequoia import RankProbs, parse_rank_probs
from dynatree_lab.methods.settings import MethodSettings, choice, read_values, text
from dynatree_lab.methods.static import PaddedAutoregressive

# Acceptance rates of successors by rank: the embedded pair's target, 150 greedy tokens after 150
# tokens of each of 24 texts of its training corpus
TINY_PAIR_SUCCESSOR_PROBS = "0.7:0.079:0.031:0.017:0.008:0.006:0.006:0.004"
MAX_SUCCESSORS = 32

SuccessorTable = dict[int, list[int]]  # each token's k successors, best first


def parse_successor_probs(word: str) -> RankProbs:
    """Return the probabilities of successors in a word such as 0.6:0.2.

    Raises ValueError if one is 0 or higher than the one before, or there are too many.
    """
    rank_probs = parse_rank_probs(word)
    if 0 in rank_probs or list(rank_probs) != sorted(rank_probs, reverse=True):
        raise ValueError("each probability must be above 0 and at most the one before")
    if len(rank_probs) > MAX_SUCCESSORS:
        n = len(rank_probs)
        raise ValueError(f"it has {n} successors, it must have at most {MAX_SUCCESSORS}")
    return rank_probs


def successor_setting() -> Field:
    """Return the dataclass field of `p`, a setting of both methods."""
    examples = (TINY_PAIR_SUCCESSOR_PROBS, "0.6:0.2", "0.3:0.3:0.1", "1.0")
    meaning = "probabilities of successors by rank, as many as the table has per token"
    return text(TINY_PAIR_SUCCESSOR_PROBS, parse_successor_probs, meaning, examples)


@dataclass(frozen=True)
class Recycle(MethodSettings):
    """recycle: a tree from a table of successors, no draft model (Token Recycling)."""

    N: int = setting(16, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(8, 1, MAX_LEVELS, "hard limit of depth")
    p: str = successor_setting()

    def make_rule(self) -> Rule:
        rank_probs = parse_successor_probs(self.p)
        base = PaddedAutoregressive().make_rule()
        return GraftRule(base, self.N, self.D_max, checkpoints={}, rank_probs=rank_probs)


def parse_base(word: str) -> Settings:
    """Return the settings of a drafting method, from a word such as deagle:k=4:N_max=24.

    Raises ValueError for any other word.
    """
    parts = re.split(r":(?=\s*\w+\s*=)", word)  # only before NAME=: a value may have colons too
    name = parts[0]
    if name not in DRAFTING:
        known = ", ".join(DRAFTING)
        raise ValueError(f"the base is {name!r}, it must be one of {known}")
    kind = DRAFTING[name]
    return kind(**read_values(kind, parts[1:]))


def parse_checkpoints(word: str) -> dict[int, float]:
    """Return thresholds by depth, from a word such as 1@0.5:3@0.3; none for off.

    Raises ValueError for any other word.
    """
    if word == "off":
        return {}
    thresholds = {}
    for part in word.split(":"):
        depth, _, threshold = part.partition("@")
        try:
            thresholds[int(depth)] = float(threshold)
        except ValueError as error:
            raise ValueError(f"{part!r} must have the form DEPTH@P, such as 1@0.5") from error
    if min(thresholds) < 1 or not all(0 <= p <= 1 for p in thresholds.values()):
        raise ValueError("depths must be at least 1, probabilities from 0 to 1")
    return thresholds


@dataclass(frozen=True)
class Graft(MethodSettings):
    """graft: a drafting rule that may stop early, then the successor table (Graft, 3)."""

    base: str = text(
        "dynatree",
        parse_base,
        "the drafting method, followed by its settings",
        (*DRAFTING, "linear:K=3", "deagle:k=4:N_max=24"),
    )
    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included, drafted and grafted")
    D_max: int = setting(8, 1, MAX_LEVELS, "maximum number of grafted levels")
    checkpoints: str = text(
        "1@0.5:3@0.3:5@0.2",
        parse_checkpoints,
        "DEPTH@P: stop drafting at this depth if the best path is below P",
        ("1@0.5:3@0.3:5@0.2", "2@0.1", "off"),
    )
    at: str = choice(
        "root", ("root", "tail"), "where to graft; tail: below the ends of the branches"
    )
    graft: bool = setting(True, False, True, "fill the tree from the table; off: only prune")
    p: str = successor_setting()

    def make_rule(self) -> Rule:
        n_levels = self.D_max if self.graft else 0
        thresholds = parse_checkpoints(self.checkpoints)
        rank_probs = parse_successor_probs(self.p)
        base = parse_base(self.base).make_rule()
        return GraftRule(base, self.N, n_levels, thresholds, rank_probs, self.at == "tail")


class GraftRule(RuleWrapper):
    """The rule of recycle and graft: a drafting rule, and the table of successors so far."""

    def __init__(
        self,
        base: Rule,
        n_rows: int,
        graft_depth: int,
        checkpoints: dict[int, float],
        rank_probs: RankProbs,
        grafts_at_tail: bool = False,
    ):
        """
        Args:
            graft_depth: maximum number of grafted levels; 0 for none.
            checkpoints: by depth, the probability of the best path below which drafting stops.
            rank_probs: probabilities of successors, by rank.
            grafts_at_tail: graft below the ends of the branches, not below the root.
        """
        super().__init__(hooked(base))
        of_base, n_drafted = self.facts, base.max_rows
        if of_base.draws_candidates and n_drafted <= of_base.max_verified:
            # The base verifies all rows that it drafts, so the graft drafts no more than it can
            # verify. A cut by value would be wrong: draws decide which rows fit the base's budget
            n_drafted = min(n_drafted, n_rows)
        self.max_rows = n_drafted if n_rows > 1 else 1
        self.max_kept = min(of_base.max_verified, n_rows)
        self.max_verified = n_rows
        self.graft_depth, self.grafts_at_tail = graft_depth, grafts_at_tail
        self.checkpoints = checkpoints
        self.table: SuccessorTable = {}
        self.logprobs = [math.log(p) for p in rank_probs]
        # Probabilities decide which nodes are cut if there are too many, and which ends of branches
        # get grafts
        is_cut = n_drafted > self.max_kept
        uses_probs = bool(checkpoints) or grafts_at_tail or is_cut
        self.facts = replace(
            of_base,
            max_verified=n_rows,
            target_top_k=len(rank_probs) if graft_depth else 0,
            is_chain=of_base.is_chain and not graft_depth,
            depends_on_probs=of_base.depends_on_probs or uses_probs,
            draft_temperature=1.0,  # at the default, checkpoints seldom stop drafting
        )

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        self.limit = max_depth
        return super().begin_tree(root_token, max_depth)

    def add_gates(self, level: Level) -> Gates:
        gates = super().add_gates(level)
        self.is_added = added_mask(level, gates)
        return gates

    def expand_gates(self, level: Level) -> Gates:
        gates = super().expand_gates(level)
        threshold = self.checkpoints.get(level.row_depth + 1)
        if threshold:
            # A drawn candidate counts with p(u), but with no more than its value, which is known
            # before the draw, because rows below may take its place in the tree
            known = numpy.minimum(level.path_logprobs, level.values)
            likely = known[self.is_added]
            is_likely = likely.max(initial=-math.inf) >= log_threshold(threshold)
            gates = {**gates, "checkpoints": bool(is_likely)}
        return gates

    def finish_tree(self, tree: Tree) -> Tree:
        """Fill the rest of the row budget with nodes from the table, the likeliest first."""
        tree = MixedTree.from_tree(best_rows(tree, self.max_kept))
        graft_rows = [0]
        if self.grafts_at_tail:
            graft_rows = sorted(set(range(len(tree))) - set(tree.parents))

        max_depths = {row: tree.depths[row] + self.graft_depth for row in graft_rows}

        def propose(row: int, path_logprob: float) -> Iterator[Proposal]:
            max_depth = max_depths.setdefault(row, max_depths.get(tree.parents[row]))
            if tree.depths[row] < min(max_depth, self.limit):
                for rank, token in enumerate(self.table.get(tree.tokens[row], ())):
                    yield Proposal(-(path_logprob + self.logprobs[rank]), row, rank, token)

        starts = {row: tree.path_logprobs[row] for row in graft_rows}
        add_likeliest(tree, self.max_verified, starts, propose)
        return breadth_first(tree)

    def observe_target(self, tokens: list[int], top_ids: ndarray) -> None:
        self.table.update(zip(tokens, top_ids.tolist(), strict=True))  # a token's last row wins

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Show the base only its own nodes, because it must not learn from retrieved ones."""
        retrieved = are_retrieved(tree)
        drafted = [row for row in range(len(tree)) if not retrieved[row]]
        drafted_path = [drafted.index(row) for row in path if not retrieved[row]]
        super().adapt(select(tree, drafted), drafted_path)
