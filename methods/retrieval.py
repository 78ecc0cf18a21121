"""recycle and graft: candidates from a table of successors instead of a draft model.

The table holds, for every token id, the k tokens that the target liked best the last time it read
that token: in the prompt, or in a verified tree, whether accepted or not. Unrolled from the root it
gives a tree for nearly nothing. Alone this is recycle (Luo et al. 2024, Token Recycling); graft
(Graft, section 3) lets a drafting rule go first, stops it at checkpoints if its best path is
unlikely there, and fills the rows that are left of the budget from the table.

    python dynatree.py --method recycle --set N=16 --prompt "..."
    python dynatree.py --method graft --set base=deagle:k=4:N_max=24 --prompt "..."

How likely a successor is, is taken to depend on its rank alone: `p` lists the chances, rank by
rank, and a token keeps as many successors. Trees grow by one heap over them, so there is no
template, nor a width of one.

The paper's other forms are settings of graft. Pruning alone is `graft=off`, grafting alone
`checkpoints=off`. Its Graft(ROOT) and Graft(TAIL) of section 2.2, static trees of which a part goes
to what is retrieved, hung below the root or below the ends of the branches:

    python bench.py --methods "graft checkpoints=off base=fixed:N_max=24 N=32 at=root"
    python bench.py --methods "graft checkpoints=off base=fixed:N_max=24 N=32 at=tail"
"""

import math
import re
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy
from numpy import ndarray

from draft_tree import MAX_ROWS, Gates, Level, Rule, Settings, Tree, log_threshold, setting
from methods.cost_gates import CostGates
from methods.drafting import DRAFTING
from methods.rules import (
    MixedTree,
    RuleWrapper,
    added,
    are_retrieved,
    best_rows,
    breadth_first,
    make_rule,
    select,
    values_of,
)
from methods.sequoia import Chances, parse_chances
from methods.settings import MethodSettings, choice, read_values, text
from methods.static import Alone

# How often the target's next token is the successor of this rank: measured on 24 texts of the
# embedded pair's training corpus, 150 greedy tokens after 150 of the text
P_TINY = "0.7:0.079:0.031:0.017:0.008:0.006:0.006:0.004"
MOST_SUCCESSORS = 32

SuccessorTable = dict[int, list[int]]  # each token's k successors, best first


def parse_successors(word: str) -> Chances:
    """Chances of successors by rank, none above the one before. Raises ValueError."""
    chances = parse_chances(word)
    if 0 in chances or list(chances) != sorted(chances, reverse=True):
        raise ValueError("chances of successors are above 0, and none above the one before")
    if len(chances) > MOST_SUCCESSORS:
        raise ValueError(f"{len(chances)} successors, {MOST_SUCCESSORS} is the most")
    return chances


def successors() -> str:
    """The setting of both."""
    meaning = "chances of successors by rank; a token keeps so many"
    return text(P_TINY, parse_successors, meaning, (P_TINY, "0.6:0.2", "0.3:0.3:0.1", "1.0"))


@dataclass(frozen=True)
class Recycle(MethodSettings):
    """recycle: a tree from the successor table alone, no draft model (Token Recycling)."""

    N: int = setting(16, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "hard limit of depth")
    p: str = successors()

    def make_rule(self) -> Rule:
        chances = parse_successors(self.p)
        return GraftRule(Alone().make_rule(), self.N, self.D_max, checkpoints={}, chances=chances)


def parse_base(word: str) -> Settings:
    """A drafting method with settings of its own, as in deagle:k=4:N_max=24. Raises ValueError."""
    parts = re.split(r":(?=\s*\w+\s*=)", word)  # only before NAME=: a value may have colons too
    name = parts[0]
    if name not in DRAFTING:
        known = ", ".join(DRAFTING)
        raise ValueError(f"no drafting method is called {name!r}; there are {known}")
    kind = DRAFTING[name]
    return kind(**read_values(kind, parts[1:]))


def parse_checkpoints(word: str) -> dict[int, float]:
    """Thresholds by depth, as in 1@0.5:3@0.3; none for off. Raises ValueError."""
    if word == "off":
        return {}
    thresholds = {}
    for part in word.split(":"):
        depth, _, threshold = part.partition("@")
        try:
            thresholds[int(depth)] = float(threshold)
        except ValueError as error:
            raise ValueError(f"{part!r} is not DEPTH@P such as 1@0.5") from error
    if min(thresholds) < 1 or not all(0 <= p <= 1 for p in thresholds.values()):
        raise ValueError("depths are 1 or more, probabilities from 0 to 1")
    return thresholds


@dataclass(frozen=True)
class Graft(MethodSettings):
    """graft: a drafting rule, stopped early where unlikely, then the successor table (Graft, 3)."""

    base: str = text(
        "dynatree",
        parse_base,
        "the drafting rule, its own settings after it",
        (*DRAFTING, "linear:K=3", "deagle:k=4:N_max=24"),
    )
    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included: drafted, then grafted")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "levels grafted at most")
    checkpoints: str = text(
        "1@0.5:3@0.3:5@0.2",
        parse_checkpoints,
        "DEPTH@P: drafting stops there if its best path is below P",
        ("1@0.5:3@0.3:5@0.2", "2@0.1", "off"),
    )
    at: str = choice(
        "root", ("root", "tail"), "below what to graft: tail is the ends of the branches"
    )
    graft: bool = setting(True, False, True, "fill up from the table; off: pruning alone")
    p: str = successors()

    def make_rule(self) -> Rule:
        n_levels = self.D_max if self.graft else 0
        thresholds = parse_checkpoints(self.checkpoints)
        chances = parse_successors(self.p)
        base = make_rule(parse_base(self.base))
        gates = base if isinstance(base, CostGates) else None
        if gates:
            base = gates.rule
        rule = GraftRule(base, self.N, n_levels, thresholds, chances, self.at == "tail")
        # Gates of cost go around the graft: an iteration's time is that of all its rows
        return CostGates(rule, gates.given_costs) if gates else rule


class GraftRule(RuleWrapper):
    """One generation of recycle or graft: a drafting rule, and the table as it has grown."""

    def __init__(
        self,
        base: Rule,
        n_rows: int,
        graft_depth: int,
        checkpoints: dict[int, float],
        chances: Chances,
        is_at_tail: bool = False,
    ):
        """graft_depth: levels grafted at most, 0 for none. checkpoints: depth -> probability of the
        best path below which drafting stops there. chances: of successors, by rank. is_at_tail:
        graft below the ends of the branches, not the root."""
        super().__init__(base)
        n_drafted = base.max_rows
        if base.draws_candidates and n_drafted <= base.max_verified:
            # All that it draws is kept, so here, too: which rows a budget cuts off depends on what
            # was drawn, and they must not decide which drawn nodes are worth keeping
            n_drafted = min(n_drafted, n_rows)
        self.max_rows = n_drafted if n_rows > 1 else 1
        self.max_kept = min(base.max_verified, n_rows)
        self.max_verified = n_rows
        self.graft_depth, self.is_at_tail = graft_depth, is_at_tail
        self.checkpoints = checkpoints
        self.table: SuccessorTable = {}
        self.logprobs = [math.log(p) for p in chances]
        self.target_top_k = len(chances) if graft_depth else 0
        self.is_chain = base.is_chain and not graft_depth
        # A base's nodes are cut by value if they are too many, and those at the tail compared
        is_cut = n_drafted > self.max_kept
        self.depends_on_probs = base.depends_on_probs or bool(checkpoints) or is_at_tail or is_cut

    def begin_tree(self, root: int, max_depth: int) -> int:
        self.limit = max_depth
        return super().begin_tree(root, max_depth)

    def add_gates(self, level: Level) -> Gates:
        gates = super().add_gates(level)
        self.is_added = added(level, gates)
        return gates

    def expand_gates(self, level: Level) -> Gates:
        gates = super().expand_gates(level)
        threshold = self.checkpoints.get(level.depth + 1)
        if threshold:
            # Of a drawn candidate no more may count than what was known before the draw, because
            # rows below may take its place in the tree
            known = numpy.minimum(level.path_logprobs, values_of(level))
            likely = known[self.is_added]
            is_likely = likely.max(initial=-math.inf) >= log_threshold(threshold)
            gates = {**gates, "checkpoints": bool(is_likely)}
        return gates

    def finish_tree(self, tree: Tree) -> Tree:
        """Fill the rows that drafting left with what the table knows, the likeliest first.

        A node that the tree has already merges with it, and the next one takes its place.
        """
        tree = MixedTree.of(best_rows(tree, self.max_kept))
        tops = [0]
        if self.is_at_tail:
            tops = sorted(set(range(len(tree))) - set(tree.parents))
        present = {(tree.parents[row], tree.tokens[row]): row for row in range(len(tree))}
        # - log-probability of the best proposal below a row, the row, the proposal's rank, - that
        # of the row, and the depth down to which is grafted there
        heap: list[tuple[float, int, int, float, int]] = []

        def propose(row: int, rank: int, negative: float, deepest: int) -> None:
            successors = self.table.get(tree.tokens[row], ())
            if rank < len(successors) and tree.depths[row] < deepest:
                heappush(heap, (negative - self.logprobs[rank], row, rank, negative, deepest))

        for top in tops:
            deepest = min(tree.depths[top] + self.graft_depth, self.limit)
            propose(top, 0, -tree.path_logprobs[top], deepest)
        while heap and len(tree) < self.max_verified:
            negative, parent, rank, above, deepest = heappop(heap)
            token = self.table[tree.tokens[parent]][rank]
            row = present.get((parent, token))
            if row is None:
                row = tree.add_retrieved(token, parent, -negative)
            propose(parent, rank + 1, above, deepest)  # a younger sibling, which is no likelier
            propose(row, 0, negative, deepest)
        return breadth_first(tree)

    def observe_target(self, tokens: list[int], candidates: ndarray) -> None:
        self.table.update(zip(tokens, candidates.tolist(), strict=True))  # the last reading stays

    def adapt(self, tree: Tree, path: list[int]) -> None:
        """Tell the base of its own nodes: how far the retrieved ones reach says nothing of it."""
        retrieved = are_retrieved(tree)
        drafted = [row for row in range(len(tree)) if not retrieved[row]]
        places = {row: place for place, row in enumerate(drafted)}
        super().adapt(select(tree, drafted), [places[row] for row in path if row in places])
