"""recycle and graft: candidates from a table of successors instead of a draft model.

The table holds, for every token id, the k tokens that the target liked best the last time it read
that token: in the prompt, or in a verified tree, whether accepted or not. Unrolled from the root by
one gather a level it gives a tree for nearly nothing. Alone this is recycle (Luo et al. 2024, Token
Recycling); graft (Graft, section 3) lets a drafting rule go first, stops it at checkpoints if its
best path is unlikely there, and fills the rows that are left of the budget from the table.

    python dynatree.py --method recycle --set N=16 --prompt "..."
    python dynatree.py --method graft --set base=deagle:k=4:N_max=24 --prompt "..."

The paper's other forms are settings of graft. Pruning alone is `graft=off`, grafting alone
`checkpoints=off`. Its Graft(ROOT) and Graft(TAIL) of section 2.2, static trees of which a part goes
to what is retrieved, hung below the root or below the ends of the branches:

    checkpoints=off base=fixed:N_max=24 N=32 at=root
    checkpoints=off base=fixed:N_max=24 N=32 at=tail

Shapes: V vocabulary, k successors, M nodes of the template, N tree rows, L leaves.
"""

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

import methods  # the registry, which imports this file: read when a setting is, not before
from draft_tree import MAX_ROWS, Level, Rule, Settings, Tree, log_threshold, mark_ancestors
from engine.scores import Scores
from engine.settings import check_settings, choice, read_values, setting, text
from methods.static import Alone

# How often the target's next token is the successor of this rank: measured on 24 texts of the
# embedded pair's training corpus, 150 greedy tokens after 150 of the text
RANK_PROBS = (0.7, 0.079, 0.031, 0.017, 0.008, 0.006, 0.006, 0.004)


@dataclass(frozen=True)
class Template:
    """The shape to unroll: nodes by falling estimated probability, so every beginning is a tree."""

    parents: Tensor  # [M] int64, earlier nodes; the root's is itself
    depths: Tensor  # [M] int64
    logprobs: Tensor  # [M] float32, estimated
    ancestors: Tensor  # [M, M] bool; row i marks the path from the root to i, both included
    levels: list[tuple[Tensor, Tensor]]  # from depth 1 on: each node's parent in its level, rank
    place: Tensor  # [M] int64, each node's place in the levels laid end to end


@cache
def template(n: int, max_depth: int) -> Template:
    """The n likeliest nodes by RANK_PROBS, no deeper than max_depth."""
    parents = [0]
    ranks = [0]
    depths = [0]
    logprobs = [0.0]
    heap: list[tuple[float, int, int]] = []  # - log-probability, parent, rank of each proposal
    while len(parents) < n:  # the latest node proposes its children, the best proposal is next
        if depths[-1] < max_depth:
            propose(heap, len(parents) - 1, logprobs[-1])
        if not heap:
            break
        negative, parent, rank = heapq.heappop(heap)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depths[parent] + 1)
        logprobs.append(-negative)
    return lay_out(
        torch.tensor(parents), torch.tensor(ranks), torch.tensor(depths), torch.tensor(logprobs)
    )


def propose(heap: list[tuple[float, int, int]], parent: int, logprob: float) -> None:
    """Put a parent's children on the heap, one of every rank; logprob: the parent's."""
    for rank, p in enumerate(RANK_PROBS):
        heapq.heappush(heap, (-logprob - math.log(p), parent, rank))


def lay_out(parents: Tensor, ranks: Tensor, depths: Tensor, logprobs: Tensor) -> Template:
    """Nodes [M], each after its parent, and the levels to unroll them by."""
    max_depth = int(depths.max())
    place = depths.argsort(stable=True).argsort()  # with the levels laid end to end
    levels = []
    for depth in range(1, max_depth + 1):
        level = (depths == depth).nonzero().flatten()  # its nodes
        start = (depths < depth - 1).sum()  # where the level above begins
        levels.append((place[parents[level]] - start, ranks[level]))
    ancestors = mark_ancestors(parents, max_depth)
    return Template(parents, depths, logprobs, ancestors, levels, place)


class SuccessorTable:
    """ids [V + 1, k] int64 on the host: each token's successors, best first; V if not known.

    V, which is no token, has a row of its own: nothing is known of what follows the unknown.
    """

    def __init__(self) -> None:
        self.ids = torch.empty(0, 0, dtype=torch.int64)

    @property
    def unknown(self) -> int:
        return len(self.ids) - 1  # V

    def read(self, tokens: Tensor, scores: Scores) -> None:
        """Take over the target's k best after each token [n]."""
        if not len(self.ids):
            n_ids = scores.logits.shape[1]
            shape = (n_ids + 1, len(RANK_PROBS))
            self.ids = torch.full(shape, n_ids)
        best = scores.likeliest_ids(len(RANK_PROBS))  # [n, k]
        order = torch.arange(len(tokens))
        # A token read twice takes its last row: all its writes then write the same, in any order
        last = ((tokens[:, None] == tokens) * order).amax(dim=1)
        self.ids[tokens, : best.shape[1]] = best[last]

    def unroll(self, roots: Tensor, shape: Template) -> Tensor:
        """The template's tokens [L, M] below each root [L]; V where the table knows none."""
        level = roots.unsqueeze(1)
        levels = [level]
        for parents, ranks in shape.levels:
            above = level.index_select(1, parents)
            places = torch.add(ranks, above, alpha=self.ids.shape[1])  # row by row
            level = self.ids.take(places)  # ids[above, ranks]
            levels.append(level)
        return torch.cat(levels, dim=1).index_select(1, shape.place)


def graft(tree: Tree, tokens: Tensor, shape: Template, is_known: Tensor, n_rows: int) -> Tree:
    """Add unrolled nodes to a tree until it has n_rows, the likeliest first.

    tokens, is_known: [M], of the template. A node that the tree has already merges with it, and the
    next node of the template takes its place. Rows stay ordered by depth, drafted siblings before
    grafted.
    """
    ours = path_keys(tree.tokens, tree.depths, tree.ancestors)  # [N]
    theirs = path_keys(tokens, shape.depths, shape.ancestors)  # [M]
    same = theirs[:, None] == ours  # [M, N]
    is_there, rows = same.max(dim=1)  # [M] each; the rows in the tree of those that are there
    is_new = is_known & ~is_there
    n_left = n_rows - len(tree)
    added = is_new.nonzero().squeeze(1)[:n_left]  # in the template's order: parents come first
    if not len(added):
        return tree
    rows[added] = torch.arange(len(tree), len(tree) + len(added))
    parents = rows[shape.parents[added]]
    return extended(tree, tokens[added], parents, shape.depths[added], shape.logprobs[added])


def graft_tails(
    tree: Tree, table: SuccessorTable, shape: Template, n_rows: int, max_depth: int
) -> Tree:
    """Unroll the template below every leaf; add the likeliest of it until the tree has n_rows.

    A leaf has no children that could merge. No node is deeper than max_depth.
    """
    leaves = leaf_rows(tree)  # [L]
    tokens = table.unroll(tree.tokens[leaves], shape)  # [L, M]
    logprobs = tree.logprobs[leaves].unsqueeze(1) + shape.logprobs  # [L, M], of paths
    depths = tree.depths[leaves].unsqueeze(1) + shape.depths
    is_new = (tokens < table.unknown) & (depths <= max_depth)
    is_new[:, 0] = False  # the leaves themselves
    n_added = min(n_rows - len(tree), int(is_new.sum()))
    if n_added == 0:
        return tree
    # No node is as likely as its parent, so whatever is taken hangs together
    ranked = logprobs.masked_fill(~is_new, -torch.inf).flatten().sort(descending=True, stable=True)
    added = ranked.indices[:n_added]
    rows = torch.empty_like(tokens)
    rows[:, 0] = leaves
    rows.view(-1)[added] = torch.arange(len(tree), len(tree) + n_added)
    leaf = added // len(shape.parents)
    parents = rows[leaf, shape.parents[added % len(shape.parents)]]
    return extended(tree, tokens.take(added), parents, depths.take(added), logprobs.take(added))


def leaf_rows(tree: Tree) -> Tensor:
    """The rows [L] without children; the root if it is alone."""
    is_leaf = torch.ones(len(tree), dtype=torch.bool)
    is_leaf[tree.parents[1:]] = False
    return is_leaf.nonzero().squeeze(1)


def extended(tree: Tree, tokens: Tensor, parents: Tensor, depths: Tensor, logprobs: Tensor) -> Tree:
    """A tree with retrieved nodes [n] behind its rows, then all of them in order of depth."""
    depths = torch.cat([tree.depths, depths])
    order = depths.argsort(stable=True)  # of equals the drafted first
    place = order.argsort()  # of each row in that order
    parents = torch.cat([tree.parents, parents])[order]
    parents[1:] = place[parents[1:]]  # the root stays first
    depth = int(depths.max())
    not_run = torch.full_like(tokens, -1)
    return Tree(
        tokens=torch.cat([tree.tokens, tokens])[order],
        parents=parents,
        depths=depths[order],
        ancestors=mark_ancestors(parents, depth),
        logprobs=torch.cat([tree.logprobs, logprobs])[order],
        draft_slots=torch.cat([tree.draft_slots, not_run])[order],
        depth=depth,
        draft_probs=tree.draft_probs,
        is_retrieved=order >= len(tree),
    )


def path_keys(tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
    """A number [N] for each node's path of tokens: equal for equal paths.

    That unequal paths have equal numbers is as good as impossible; such a node would be taken for
    another and its children hung below that one, which costs a guess and no correctness.
    """
    mixed = (tokens + 1) * (2 * depths + 1) * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 29)) * 0x14057B7EF767814F
    return (mixed * ancestors).sum(dim=1)


@dataclass(frozen=True)
class Recycle:
    """recycle: a tree from the successor table alone, no draft model (Token Recycling)."""

    N: int = setting(16, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "hard limit of depth")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        return GraftRule(Alone().rule(), self.N, self.D_max, checkpoints={})


def parse_base(word: str) -> Settings:
    """A drafting method with settings of its own, as in deagle:k=4:N_max=24. Raises ValueError."""
    parts = re.split(r":(?=\s*\w+\s*=)", word)  # only before NAME=: a value may have colons too
    name = parts[0]
    if name not in methods.DRAFTING:
        known = ", ".join(methods.DRAFTING)
        raise ValueError(f"no drafting method is called {name!r}; there are {known}")
    kind = methods.DRAFTING[name]
    return kind(**read_values(kind, parts[1:]))


def example_bases() -> Sequence[str]:
    return list(methods.DRAFTING) + ["linear:K=3", "deagle:k=4:N_max=24"]


def parse_checkpoints(word: str) -> dict[int, float]:
    """Thresholds by depth, as in 1@0.5:3@0.3; none for off. Raises ValueError."""
    thresholds: dict[int, float] = {}
    if word == "off":
        return thresholds
    deepest = 0
    for part in word.split(":"):
        before, _, after = part.partition("@")
        try:
            depth = int(before)
            threshold = float(after)
        except ValueError as error:
            raise ValueError(f"{part!r} is not DEPTH@P such as 1@0.5") from error
        if depth <= deepest:
            raise ValueError("depths rise, from 1 on")
        if not 0 <= threshold <= 1:
            raise ValueError(f"{threshold} is no probability")
        thresholds[depth] = threshold
        deepest = depth
    return thresholds


def example_checkpoints() -> Sequence[str]:
    return ("1@0.5:3@0.3:5@0.2", "2@0.1", "off")


def places() -> Sequence[str]:
    """Below which drafted nodes the template is unrolled."""
    return ("root", "tail")


@dataclass(frozen=True)
class Graft:
    """graft: a drafting rule, stopped early where unlikely, then the successor table (Graft, 3)."""

    base: str = text(
        "dynatree", parse_base, "the drafting rule, its own settings after it", example_bases
    )
    N: int = setting(32, 1, MAX_ROWS, "rows per tree, root included: drafted, then grafted")
    D_max: int = setting(8, 1, MAX_ROWS - 1, "levels grafted at most")
    checkpoints: str = text(
        "1@0.5:3@0.3:5@0.2",
        parse_checkpoints,
        "DEPTH@P: drafting stops there if its best path is below P",
        example_checkpoints,
    )
    at: str = choice("root", places, "below what to graft: tail is the ends of the branches")
    graft: bool = setting(True, False, True, "fill up from the table; off: pruning alone")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        base = parse_base(self.base).rule()
        rule = GraftRule(base, self.N, self.D_max, parse_checkpoints(self.checkpoints))
        rule.is_at_tail = self.at == "tail"
        if not self.graft:
            rule.graft_depth = 0
            rule.n_read = 0
        return rule


class GraftRule(Rule):
    """One generation of recycle or graft: a drafting rule, and the table as it has grown."""

    n_read = len(RANK_PROBS)
    is_at_tail = False  # graft below the ends of the branches, not the root

    def __init__(self, base: Rule, n_rows: int, graft_depth: int, checkpoints: dict[int, float]):
        """graft_depth: levels grafted at most, 0 for none. checkpoints: depth -> probability of the
        best path below which drafting stops there."""
        n_drafted = base.max_drafted
        if base.is_drawing and n_drafted <= base.max_kept:
            # All that it draws is kept, so here, too: which rows a budget cuts off depends on what
            # was drawn, and they must not decide which drawn nodes are worth keeping
            n_drafted = min(n_drafted, n_rows)
        super().__init__(
            base.max_branches,
            base.max_depth,
            max_rows=n_rows,
            max_drafted=n_drafted,
            max_kept=min(base.max_kept, n_rows),
        )
        self.is_drawing = base.is_drawing
        self.base = base
        self.graft_depth = graft_depth
        self.checkpoints = checkpoints
        self.table = SuccessorTable()

    def start(self, prompt: list[int]) -> None:
        self.base.watcher = self.watcher
        self.base.start(prompt)

    def begin(self, root: Tensor) -> int:
        return self.base.begin(root)

    def standing(self) -> dict[str, float | str]:
        return self.base.standing()

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        add, expand = self.base.expand(level)
        threshold = self.checkpoints.get(level.depth + 1, 0.0)
        if threshold:
            added = level.path_logprobs.masked_fill(~add, -torch.inf)
            is_likely = added.max() >= log_threshold(threshold)
            self.tell({}, {"checkpoints": is_likely})
            expand = expand & is_likely
        return add, expand

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """Fill the rows that drafting left."""
        depth = min(self.graft_depth, max_depth)
        if len(tree) >= self.max_rows or depth < 1:
            return tree
        # Twice the nodes: some merge with drafted ones, of some the table knows nothing
        shape = template(2 * self.max_rows, depth)
        if self.is_at_tail:
            return graft_tails(tree, self.table, shape, self.max_rows, max_depth)
        tokens = self.table.unroll(tree.tokens[:1], shape)[0]
        return graft(tree, tokens, shape, tokens < self.table.unknown, self.max_rows)

    def read(self, tokens: Tensor, scores: Scores) -> None:
        if self.graft_depth:
            self.table.read(tokens, scores)

    def adapt(self, tree: Tree, path: list[int], ms: float) -> None:
        """Tell the base of its own nodes: how far the retrieved ones reach says nothing of it."""
        if tree.is_retrieved is not None:
            is_drafted = ~tree.is_retrieved
            path = [row for row in path if is_drafted[row]]
            tree = replace(tree, depth=int(tree.depths[is_drafted].max()))
        self.base.adapt(tree, path, ms)
