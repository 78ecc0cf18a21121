"""auto: no thresholds; every choice by what it has been worth so far in this very text.

Two sources of candidates: the draft model, and a memory of what the target liked best the last time
it stood after the same one, two or three tokens. What an iteration gains is tokens, what it costs
is time, and time is worth the current rate of tokens per millisecond. So

    the draft runs if tokens - rate x ms of iterations with it has been higher than what the memory
        promises now; while it is off, it is probed for at most 1 % of the time
    another level is drafted if the tokens it may add are worth its time
    a node is verified if its chance of acceptance is worth a row's time
    no tree is verified at all if its nodes together are not worth it: then this is ar

The chance is counted, not believed: for the draft by its confidence, for the memory by the length
of the context and by rank, and apart from these where the draft has chosen otherwise. The costs are
fitted to the times of the iterations so far. Both start from a first guess, and nothing outlives a
generation. This is the hardware-aware tree construction that the first DynaTree paper leaves to the
future.

    python dynatree.py --method auto --prompt "..."

Shapes: N tree rows, V vocabulary, W rows of one level, k candidates per row.
"""

import math
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

from draft_tree import MAX_ROWS, Level, Rule, Tree, mark_ancestors
from engine.settings import check_settings, setting
from methods.learning import Costs, Counts, Memory, Worth

# Chance of a candidate before anything is counted, by the draft's confidence in it ...
CONFIDENCE = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)  # bounds of the bins
DRAFT_GUESS = (0.02, 0.07, 0.14, 0.27, 0.45, 0.65, 0.8, 0.93, 0.98)
# ... and by the tokens of context the memory knows and the rank of the candidate there
MEMORY_GUESS = ((0.45, 0.1, 0.05, 0.03), (0.75, 0.08, 0.03, 0.01), (0.85, 0.06, 0.02, 0.01))
BESIDE_GUESS = 0.4  # of that, where the draft has chosen otherwise
N_RANKS, MAX_CONTEXT = len(MEMORY_GUESS[0]), len(MEMORY_GUESS)
MAX_DEPTH = 16  # of what the memory proposes
PROBE_SHARE = 0.01
LEVEL_YIELD = 0.7  # of its parents' chance, what a level may be hoped to add
STEP, TREE, ROW, DRAFTING, LEVEL = range(5)  # the costs


@dataclass(frozen=True)
class Auto:
    """auto: both sources, each level and node only while it pays (this project's own)."""

    N: int = setting(48, 1, MAX_ROWS, "most rows per tree, root included")
    D_max: int = setting(8, 0, MAX_ROWS - 1, "most levels drafted; 0 needs no draft")
    c_tree: float = setting(0.3, 0.0, 100.0, "cost of a tree beside its rows, in steps of ar")
    c_row: float = setting(0.04, 0.0001, 100.0, "cost of a row")
    c_draft: float = setting(0.2, 0.0, 100.0, "cost of drafting beside its levels")
    c_level: float = setting(0.4, 0.0, 100.0, "cost of a level drafted")
    learn: bool = setting(True, False, True, "fit the costs; off: a seed decides a sampled text")

    def __post_init__(self) -> None:
        check_settings(self)

    def rule(self) -> Rule:
        return AutoRule(self)


@dataclass
class Nodes:
    """A tree on the host, while the memory adds to it; rows in any order, the root first."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    chances: list[float]  # that the row is accepted
    bins: list[int]  # where that is counted; the root's means nothing
    draft_slots: list[int]
    contexts: list[tuple[int, ...]]  # the tokens up to the row, as many as the memory looks at

    def take(self, rows: list[int]) -> "Nodes":
        """These rows in this order, parents among them."""
        place = {row: i for i, row in enumerate(rows)} | {-1: -1}
        taken = Nodes(*([column[row] for row in rows] for column in vars(self).values()))
        taken.parents = [place[parent] for parent in taken.parents]
        return taken

    def down_to(self, depth: int) -> "Nodes":
        """Without the rows below a depth."""
        return self.take([row for row, d in enumerate(self.depths) if d <= depth])

    def add(self, parent: int, token: int, chance: float, bin: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        self.bins.append(bin)
        self.draft_slots.append(-1)
        self.contexts.append((*self.contexts[parent], token)[-MAX_CONTEXT:])


class AutoRule(Rule):
    """One generation of auto: all that it remembers, has counted and timed so far."""

    is_reading = True

    def __init__(self, settings: Auto):
        s = self.settings = settings
        super().__init__(N_RANKS, s.D_max, max_rows=s.N, max_drafted=s.N)
        self.memory, self.tail = Memory(), ()  # the text's last tokens, before the root
        beside = [BESIDE_GUESS * p for ranks in MEMORY_GUESS for p in ranks]
        self.counts = Counts([*DRAFT_GUESS, *(p for ranks in MEMORY_GUESS for p in ranks), *beside])
        self.costs = Costs([1.0, s.c_tree, s.c_row, s.c_draft, s.c_level])
        self.drafting = Worth(3.3, self.costs.predict([1.0, 1.0, 8.0, 1.0, 3.0]))  # invites a try
        self.rate = Worth(1.0, 1.0)
        self.total_ms = self.probed_ms = 0.0
        self.nodes: Nodes | None = None  # of the tree that is being made or verified
        self.best: list[list[int]] = []  # [N, ranks], what the target likes after each row
        self.n_levels, self.is_probe = 0, False

    def price(self, cost: int) -> float:
        """What a cost is worth in tokens."""
        return self.rate.tokens / self.rate.ms * float(self.costs.weights[cost])

    def read(self, tokens: Tensor, logits: Tensor) -> None:
        """Remember the prompt at once; of a tree it must first be known what was accepted."""
        self.best = logits.topk(min(N_RANKS, logits.shape[1])).indices.tolist()
        if self.nodes:
            return
        for token, best in zip(tokens.tolist(), self.best, strict=True):
            context = (*self.tail, token)
            self.memory.write(context, best)
            self.tail = context[1 - MAX_CONTEXT :]

    def begin(self, root: Tensor) -> int:
        """Draft or not; how deep, the levels decide one by one."""
        token = int(root)
        context = (*self.tail, token)
        self.nodes = Nodes([token], [-1], [0], [1.0], [0], [-1], [context])
        self.recall(MAX_DEPTH)
        self.n_levels, self.values = 0, [torch.zeros_like(root, dtype=torch.float32)]
        self.bins = [torch.zeros_like(root)]
        per_ms, n = self.rate.tokens / self.rate.ms, len(self.nodes.tokens)
        here = [1.0, float(n > 1), n - 1.0, 0.0, 0.0]
        promise = sum(self.nodes.chances) - per_ms * self.costs.predict(here)
        is_drafting = self.drafting.tokens - per_ms * self.drafting.ms > promise
        probed_ms = self.probed_ms + self.drafting.ms
        self.is_probe = not is_drafting and probed_ms < PROBE_SHARE * self.total_ms
        return self.max_depth if is_drafting or self.is_probe else 0

    def recall(self, max_depth: int) -> None:
        """Add the memory's likeliest candidates, best first, as long as each pays for its row.

        Takes them back if there is no other node and together they do not pay for a tree.
        """
        nodes, floor, heap = self.nodes, self.price(ROW), []
        siblings = [set() for _ in nodes.tokens]
        for parent, token in zip(nodes.parents[1:], nodes.tokens[1:], strict=True):
            siblings[parent].add(token)

        def push(row: int, taken: set[int]) -> None:
            """The candidates below a row."""
            if nodes.depths[row] >= max_depth or nodes.chances[row] < floor:
                return
            n_known, best = self.memory.recall(nodes.contexts[row])
            first = len(DRAFT_GUESS) + N_RANKS * (n_known - 1)
            first += N_RANKS * MAX_CONTEXT * (nodes.draft_slots[row] >= 0)
            for rank, token in enumerate(best):
                chance = nodes.chances[row] * self.counts.chance(first + rank)
                if chance >= floor and token not in taken:
                    heappush(heap, (-chance, row, token, first + rank))

        n = len(nodes.tokens)
        for row in range(n):
            push(row, siblings[row])
        while heap and len(nodes.tokens) < self.max_rows:
            negative, row, token, bin = heappop(heap)
            nodes.add(row, token, -negative, bin)
            push(len(nodes.tokens) - 1, set())
        gain, cost = sum(nodes.chances[n:]), self.price(TREE) + floor * (len(nodes.tokens) - n)
        if n == 1 and gain <= cost:
            self.nodes = nodes.down_to(0)

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        self.n_levels += 1
        chances = [self.counts.chance(bin) for bin in range(len(DRAFT_GUESS))]
        bounds = level.logprobs.new_tensor(CONFIDENCE)
        bins = torch.bucketize(level.logprobs.exp(), bounds, right=True)
        values = self.values[-1][: len(bins), None] + bounds.new_tensor(chances).log()[bins]
        add = (values >= math.log(self.price(ROW))) & (level.logprobs > -math.inf)  # [W, k]
        self.values.append(values[add])
        self.bins.append(bins[add])
        is_paying = LEVEL_YIELD * float(values[add].exp().sum()) >= self.price(LEVEL)
        return add, add & is_paying

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """The drafted tree with the memory's candidates, or the memory's alone."""
        if len(tree) > 1:
            self.adopt(tree)
            self.recall(min(max_depth, MAX_DEPTH))
        elif max(self.nodes.depths) > max_depth:
            self.nodes = self.nodes.down_to(max_depth)
        nodes, n = self.nodes, len(tree)
        if len(nodes.tokens) == 1:
            return tree
        order = sorted(range(len(nodes.tokens)), key=nodes.depths.__getitem__)  # drafted ones first
        self.nodes = nodes = nodes.take(order)
        parents, depth = torch.tensor(nodes.parents), nodes.depths[-1]
        return Tree(
            tokens=torch.tensor(nodes.tokens),
            parents=parents,
            depths=torch.tensor(nodes.depths),
            logprobs=torch.tensor([math.log(p) for p in nodes.chances]),
            ancestors=mark_ancestors(parents, depth),
            draft_slots=torch.tensor(nodes.draft_slots),
            depth=depth,
            is_retrieved=torch.tensor([row >= n for row in order]),
        )

    def adopt(self, tree: Tree) -> None:
        """Take the drafted tree for the one to add to."""
        n, context = len(tree), self.nodes.contexts[0]
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        chances = torch.cat(self.values)[:n].exp().tolist()
        bins, slots = torch.cat(self.bins)[:n].tolist(), tree.draft_slots.tolist()
        contexts = [context]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            contexts.append((*contexts[parent], token)[-MAX_CONTEXT:])
        self.nodes = Nodes(tokens, parents, tree.depths.tolist(), chances, bins, slots, contexts)

    def adapt(self, tree: Tree, path: list[int], ms: float) -> None:
        """Remember every row, count what was right where the text went, and fit the costs."""
        nodes, n = self.nodes, len(tree)
        for row in [row for row in range(n) if row not in path] + path:  # what is true comes last
            self.memory.write(nodes.contexts[row], self.best[row])
        self.tail = nodes.contexts[path[-1]][1 - MAX_CONTEXT :]
        tried = [row for row in range(1, n) if nodes.parents[row] in path]
        self.counts.add([(nodes.bins[row], row in path) for row in tried])
        done = [1.0, float(n > 1), n - 1.0, float(self.n_levels > 0), float(self.n_levels)]
        if self.settings.learn:
            unit = self.costs.fit(done, ms)
            self.drafting.ms, self.rate.ms = self.drafting.ms * unit, self.rate.ms * unit
        else:
            ms = self.costs.predict(done)
        if self.n_levels:
            self.drafting.take(len(path), ms)
        self.rate.take(len(path), ms)
        self.total_ms += ms
        self.probed_ms += ms * self.is_probe
