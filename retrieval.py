"""recycle and graft: candidates from a table of successors instead of a draft model.

The table holds, for every token id, the k tokens that the target liked best the last time it read
that token: in the prompt, or in a verified tree, whether accepted or not. Unrolled from the root by
one gather a level it gives a tree for nearly nothing. Alone this is recycle (Luo et al. 2024, Token
Recycling); graft (Graft, section 3) lets a drafting rule go first, stops it early where its best
path is unlikely, and fills the rows that this leaves of the budget from the table.

    python dynatree.py --method recycle --set N=16 --prompt "..."
    python dynatree.py --method graft --set base=fixed --prompt "..."

Shapes: V vocabulary, k successors, M nodes of the template, N tree rows.
"""

import heapq
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deagle import Deagle
from draft_tree import (
    MAX_ROWS,
    Chain,
    DynaTree,
    Fixed,
    Level,
    Rule,
    Tree,
    check_settings,
    choice,
    log_threshold,
    make_tree,
    setting,
)
from dyspec import DySpec

BASES = {"linear": Chain, "fixed": Fixed, "dynatree": DynaTree, "dyspec": DySpec, "deagle": Deagle}
# How often the target's next token is the successor of this rank: measured on 24 texts of the
# embedded pair's training corpus, 150 greedy tokens after 150 of the text
RANK_PROBS = (0.7, 0.079, 0.031, 0.017, 0.008, 0.006, 0.006, 0.004)


@dataclass(frozen=True)
class Template:
    """The shape to unroll: nodes by falling estimated probability, so every beginning is a tree."""

    parents: Tensor  # [M] int64, earlier nodes; the root has -1
    ranks: Tensor  # [M] int64, which successor of the parent
    depths: Tensor  # [M] int64
    logprobs: Tensor  # [M] float32, estimated
    levels: list[Tensor]  # of each depth from 1 on, its nodes


@cache
def template(n: int, max_depth: int, device: torch.device) -> Template:
    """The n likeliest nodes by RANK_PROBS, no deeper than max_depth."""
    nodes = [(-1, 0, 0, 0.0)]  # parent, rank, depth, log-probability
    heap: list[tuple[float, int, int]] = []  # of children not taken yet: - log-prob, parent, rank

    def push(parent: int) -> None:
        if nodes[parent][2] < max_depth:
            for rank, p in enumerate(RANK_PROBS):
                heapq.heappush(heap, (-nodes[parent][3] - math.log(p), parent, rank))

    push(0)
    while heap and len(nodes) < n:
        negative, parent, rank = heapq.heappop(heap)
        nodes.append((parent, rank, nodes[parent][2] + 1, -negative))
        push(len(nodes) - 1)
    *columns, logprobs = zip(*nodes, strict=True)
    parents, ranks, depths = (torch.tensor(column, device=device) for column in columns)
    levels = [(depths == d).nonzero().squeeze(1) for d in range(1, int(depths.max()) + 1)]
    return Template(parents, ranks, depths, torch.tensor(logprobs, device=device), levels)


class SuccessorTable:
    """ids [V, k] int64: each token's successors, best first; -1 where nothing is known."""

    def __init__(self) -> None:
        self.ids = torch.empty(0, 0, dtype=torch.int64)

    def read(self, tokens: Tensor, logits: Tensor) -> None:
        """Take over the target's k best after each token. tokens: [n]; logits: [n, V]."""
        n_ids = logits.shape[1]
        k = min(len(RANK_PROBS), n_ids)
        if not len(self.ids):
            self.ids = torch.full((n_ids, len(RANK_PROBS)), -1, device=logits.device)
        best = logits.topk(k).indices  # [n, k]
        order = torch.arange(len(tokens), device=tokens.device)
        # A token read twice takes its last row: all its writes then write the same, in any order
        last = ((tokens[:, None] == tokens) * order).amax(dim=1)
        self.ids[tokens, :k] = best[last]

    def unroll(self, root: Tensor, shape: Template) -> Tensor:
        """The template's tokens [M] below the root [1]; -1 where the table knows none."""
        tokens = torch.full_like(shape.parents, -1)
        tokens[0] = root[0]
        for level in shape.levels:
            above = tokens[shape.parents[level]]
            found = self.ids[above.clamp(min=0), shape.ranks[level]]
            tokens[level] = found.masked_fill(above < 0, -1)
        return tokens


def graft(tree: Tree, tokens: Tensor, shape: Template, n_rows: int) -> Tree:
    """Add unrolled nodes to a tree until it has n_rows, the likeliest first.

    A node whose parent already has a child with its token merges with that child, and the next node
    of the template takes its place. Rows stay ordered by depth, drafted siblings before grafted.
    """
    n = len(tree)
    ids = torch.full_like(tokens, -1)  # tree row of each node; n + node for one to add; -1 for none
    ids[0] = 0
    for level in shape.levels:
        above, token = ids[shape.parents[level]], tokens[level]
        same = (tree.parents == above[:, None]) & (tree.tokens == token[:, None])  # [w, n]
        is_there, row = same.max(dim=1)
        ids[level] = torch.where(is_there, row, level + n).masked_fill(
            (token < 0) | (above < 0), -1
        )
    added = (ids >= n).nonzero().squeeze(1)[: n_rows - n]  # in the template's order: closed above
    if not len(added):
        return tree
    new_rows = torch.full_like(ids, -1)
    new_rows[added] = torch.arange(len(added), device=ids.device) + n
    above = ids[shape.parents[added]]
    above = torch.where(above < n, above, new_rows[(above - n).clamp(min=0)])
    order = torch.cat([tree.depths, shape.depths[added]]).sort(stable=True).indices
    place = torch.empty_like(order)  # of each row in that order
    place[order] = torch.arange(len(order), device=order.device)
    parents = place[torch.cat([tree.parents, above]).clamp(min=0)][order]
    parents[0] = -1  # the root stays first
    return make_tree(
        tokens=torch.cat([tree.tokens, tokens[added]])[order],
        parents=parents,
        logprobs=torch.cat([tree.logprobs, shape.logprobs[added]])[order],
        draft_slots=torch.cat([tree.draft_slots, torch.full_like(added, -1)])[order],
        depth=max(tree.depth, int(shape.depths[added].max())),
        draft_probs=tree.draft_probs,
        is_retrieved=order >= n,
    )


@dataclass(frozen=True)
class Recycle:
    """recycle: a tree from the successor table alone, no draft model (Token Recycling)."""

    N: int = setting(16, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "hard limit of depth")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        return GraftRule(Chain(K=0), self.N, self.D_max)


@dataclass(frozen=True)
class Graft:
    """graft: a drafting rule, stopped early where unlikely, then the successor table (Graft, 3)."""

    base: str = choice("dynatree", tuple(BASES), "the drafting rule, with its defaults")
    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included: drafted, then grafted")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "hard limit of depth of what is grafted")
    p_1: float = setting(0.5, 0.0, 1.0, "checkpoint: stop at depth 1 if the best path is below")
    p_3: float = setting(0.3, 0.0, 1.0, "the same at depth 3")
    p_5: float = setting(0.2, 0.0, 1.0, "the same at depth 5")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        checkpoints = {1: self.p_1, 3: self.p_3, 5: self.p_5}
        return GraftRule(BASES[self.base]().rule(), self.N, self.D_max, checkpoints)


class GraftRule(Rule):
    """One generation of recycle or graft: a drafting rule, and the table as it has grown."""

    is_reading = True

    def __init__(
        self, base: Rule, n_rows: int, max_depth: int, checkpoints: dict[int, float] | None = None
    ):
        self.base, self.checkpoints, self.graft_depth = base, checkpoints or {}, max_depth
        self.table = SuccessorTable()
        self.max_branches, self.max_depth = base.max_branches, base.max_depth
        self.max_rows, self.is_drawing = n_rows, base.is_drawing

    @property
    def max_drafted(self) -> int:
        return max(self.base.max_drafted, self.max_rows)

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        add, expand = self.base.expand(level)
        threshold = log_threshold(self.checkpoints.get(level.depth + 1, 0.0))
        return add, expand & (level.path_logprobs.max() >= threshold)

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """Fill the rows that drafting left."""
        if len(tree) >= self.max_rows or max_depth < 1:
            return tree
        # Twice the nodes: some merge with drafted ones, of some the table knows nothing
        depth = min(self.graft_depth, max_depth)
        shape = template(2 * self.max_rows, depth, tree.tokens.device)
        return graft(tree, self.table.unroll(tree.tokens[:1], shape), shape, self.max_rows)

    def read(self, tokens: Tensor, logits: Tensor) -> None:
        self.table.read(tokens, logits)

    def adapt(self, n_accepted: int, depth: int) -> None:
        self.base.adapt(n_accepted, depth)
