"""auto: no thresholds; every choice by what it has been worth so far in this very text.

Two sources of candidates: the draft model, and the n-grams of this text: what the target liked best
the last time it stood after the same one, two or three tokens. What an iteration gains is tokens,
what it costs is time, and time is worth the current rate of tokens per millisecond. So

    the draft runs if tokens - rate x ms of iterations with it has been higher than what the
        n-grams promise now; while it is off, it is probed for at most 1 % of the time
    another level is drafted if the tokens it may add are worth its time
    a node is verified if its chance of acceptance is worth a row's time
    no tree is verified at all if its nodes together are not worth it: then this is ar

The chance is counted, not believed: for the draft by its confidence, for the n-grams by the length
of the context and by rank, and apart from these where the draft has chosen otherwise. The costs are
fitted to the times of the iterations so far. Both start from a first guess, and nothing outlives a
generation. This is the hardware-aware tree construction that the first DynaTree paper leaves to the
future.

    python dynatree.py --method auto --prompt "..."

First comes what is learned: costs, worth, chances, n-grams; then a node; then the rule, its
hooks in the order in which they are called.

Shapes: N tree rows, V vocabulary, W rows of one level, k candidates per row.
"""

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter

import torch
from torch import Tensor

from draft_tree import CERTAIN, MAX_ROWS, Level, Rule, Tree, mark_ancestors
from engine.scores import Scores
from engine.settings import check_settings, setting

# What an iteration's time is made of, in this order wherever costs are listed
STEP, TREE, ROW, DRAFTING, LEVEL = range(5)


def work_of(n_rows: int, n_levels: int) -> list[float]:
    """How often an iteration pays each cost: one of n_rows verified, and n_levels drafted."""
    n_trees = float(n_rows > 1)
    n_draftings = float(n_levels > 0)
    return [1.0, n_trees, n_rows - 1.0, n_draftings, float(n_levels)]


class Costs:
    """Milliseconds of an iteration: its work, weighted; the weights are fitted as times come in."""

    def __init__(self, first_guess: list[float]):
        """first_guess: each cost, in steps of ar."""
        self.weights = torch.tensor(first_guess, dtype=torch.float64)  # [5]
        self.spread = torch.diag((self.weights * 0.5).square())  # [5, 5], how unsure they are
        self.n_seen = 0

    def predict(self, work: list[float]) -> float:
        """Milliseconds; before the first iteration, steps of ar."""
        return sum(w * x for w, x in zip(self.weights.tolist(), work, strict=True))

    def fit(self, work: list[float], ms: float) -> float:
        """Take in one iteration.

        Returns what earlier predictions are to be multiplied with: the first time, a step of ar.
        """
        unit = 1.0
        if self.n_seen == 0:
            unit = ms / self.predict(work)
            self.weights = self.weights * unit
            self.spread = self.spread * unit**2
        self.n_seen += 1
        if self.n_seen <= 32 or self.n_seen % 8 == 0:  # later on little is left to learn
            self.correct(work, ms)
        return unit

    def correct(self, work: list[float], ms: float) -> None:
        """Move the weights towards what this iteration took (recursive least squares)."""
        x = torch.tensor(work, dtype=torch.float64)
        expected = self.predict(work)
        limit = 0.5 * expected
        error = min(max(ms - expected, -limit), limit)  # a hiccup is no cost
        gain = self.spread @ x
        gain /= x @ gain + (0.2 * expected) ** 2
        self.weights = (self.weights + gain * error).clamp(min=1e-9)
        self.spread -= torch.outer(gain, x @ self.spread)


@dataclass
class Worth:
    """What iterations of a kind have given and taken lately."""

    tokens: float
    ms: float
    n_seen: int = 0

    def take(self, tokens: int, ms: float) -> None:
        """A mean in which the first guess counts as one iteration, later one of the last ten."""
        self.n_seen += 1
        share = max(1 / (self.n_seen + 1), 0.1)
        self.tokens += share * (tokens - self.tokens)
        self.ms += share * (ms - self.ms)


# Candidates are counted in bins, each with a first guess: the draft's by its confidence in them ...
CONFIDENCE = torch.tensor([0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])  # bounds of the bins
DRAFT_GUESS = (0.02, 0.07, 0.14, 0.27, 0.45, 0.65, 0.8, 0.93, 0.98)
# ... and the n-grams' by the tokens of context it knows and the rank of the candidate there
NGRAM_GUESS = ((0.45, 0.1, 0.05, 0.03), (0.75, 0.08, 0.03, 0.01), (0.85, 0.06, 0.02, 0.01))
BESIDE_GUESS = 0.4  # of that, where the draft has chosen otherwise
MAX_CONTEXT = len(NGRAM_GUESS)
N_RANKS = len(NGRAM_GUESS[0])
GUESS_WEIGHT = 8.0  # counts that a guess stands for
COUNT_DECAY = 0.99  # what an iteration leaves of the counts before it


def first_guess() -> list[float]:
    """The chance of each bin: the draft's, the n-grams' alone, the n-grams' beside the draft."""
    alone = []
    for ranks in NGRAM_GUESS:
        alone += ranks
    beside = [BESIDE_GUESS * p for p in alone]
    return list(DRAFT_GUESS) + alone + beside


def ngram_bin(n_known: int, is_beside: bool) -> int:
    """The bin of the best candidate after so many tokens of context; the next ranks' follow it."""
    bin = len(DRAFT_GUESS) + N_RANKS * (n_known - 1)
    if is_beside:
        bin += N_RANKS * MAX_CONTEXT
    return bin


class Counts:
    """How often candidates have been right where the text came by, lately above all; by bin."""

    def __init__(self, guess: list[float]):
        self.guess = guess
        self.hits = [GUESS_WEIGHT * p for p in guess]
        self.tries = [GUESS_WEIGHT] * len(guess)
        self.chances = list(guess)  # hits / tries

    def add(self, outcomes: list[tuple[int, bool]]) -> None:
        """Take in one iteration's (bin, was it right)."""
        for bin, p in enumerate(self.guess):  # back towards the guess
            self.hits[bin] += (1 - COUNT_DECAY) * (GUESS_WEIGHT * p - self.hits[bin])
            self.tries[bin] += (1 - COUNT_DECAY) * (GUESS_WEIGHT - self.tries[bin])
        for bin, is_right in outcomes:
            self.hits[bin] += is_right
            self.tries[bin] += 1
        for bin, tries in enumerate(self.tries):
            self.chances[bin] = self.hits[bin] / tries


MAX_CONTEXTS = 1 << 16  # that are kept; the oldest is forgotten

Context = tuple[int, ...]  # the text up to a token, as much of it as an n-gram has


def continued(context: Context, token: int) -> Context:
    """The context of the token that follows."""
    return (*context, token)[-MAX_CONTEXT:]


class NGrams:
    """What the target liked best after a context of one to three tokens, the last time it did.

    ngrams.write((12, 7), [3, 9, 4, 1])  # after 12, 7 the target liked 3 best
    ngrams.recall((5, 12, 7))  # 2 tokens of this context are known: (2, [3, 9, 4, 1])
    """

    def __init__(self) -> None:
        self.seen: dict[Context, list[int]] = {}

    def write(self, context: Context, best: list[int]) -> None:
        """Also after each shorter end of the context."""
        for n in range(1, len(context) + 1):
            end = context[-n:]
            self.seen.pop(end, None)  # so that it goes to the end: the first is the oldest
            self.seen[end] = best
        while len(self.seen) > MAX_CONTEXTS:
            oldest = next(iter(self.seen))
            del self.seen[oldest]

    def recall(self, context: Context) -> tuple[int, list[int]]:
        """The length of the longest end that is known, and the candidates there; 0 if none is."""
        for n in range(len(context), 0, -1):
            best = self.seen.get(context[-n:])
            if best:
                return n, best
        return 0, []


@dataclass(slots=True)
class Node:
    """A node of the tree that is being made; its parent comes before it."""

    row: int  # its place in the tree, for now
    token: int
    parent: "Node | None"  # None: the root
    depth: int
    context: Context  # the token included
    chance: float  # of acceptance, all the way from the root
    bin: int  # where it is counted; -1, nowhere: the root, which is always accepted
    draft_slot: int = -1  # as in Tree
    is_retrieved: bool = False  # from the n-grams


def expected_tokens(nodes: list[Node]) -> float:
    """What the nodes are worth in tokens; the root stands for the bonus token."""
    return sum(node.chance for node in nodes)


def as_tree(nodes: list[Node]) -> Tree:
    """Nodes that stand by depth, each in its row."""
    parents = [-1]
    for node in nodes[1:]:
        parents.append(node.parent.row)
    parents = torch.tensor(parents)
    depth = nodes[-1].depth
    return Tree(
        tokens=torch.tensor([node.token for node in nodes]),
        parents=parents,
        depths=torch.tensor([node.depth for node in nodes]),
        logprobs=torch.tensor([math.log(node.chance) for node in nodes]),
        ancestors=mark_ancestors(parents, depth),
        draft_slots=torch.tensor([node.draft_slot for node in nodes]),
        depth=depth,
        is_retrieved=torch.tensor([node.is_retrieved for node in nodes]),
    )


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


MAX_DEPTH = 16  # of what the n-grams propose
PROBE_SHARE = 0.01
LEVEL_YIELD = 0.7  # of its parents' chance, what a level may be hoped to add


class AutoRule(Rule):
    """One generation of auto: all that it remembers, has counted and timed so far."""

    n_read = N_RANKS

    def __init__(self, settings: Auto):
        s = settings
        super().__init__(N_RANKS, s.D_max, max_rows=s.N, max_drafted=s.N)
        self.settings = settings
        self.ngrams = NGrams()
        self.counts = Counts(first_guess())
        self.costs = Costs([1.0, s.c_tree, s.c_row, s.c_draft, s.c_level])
        self.overall = Worth(1.0, 1.0)  # all iterations
        self.drafting = Worth(3.3, self.costs.predict(work_of(9, 3)))  # those; invites a try
        self.total_ms = 0.0
        self.probed_ms = 0.0
        self.recent: Context = ()  # of the last token before the root
        # All else is of the tree that is being made or verified
        self.nodes: list[Node] = []
        self.rate = 1.0  # tokens that a millisecond is worth
        self.prices: list[float] = []  # tokens that each cost is worth
        self.worth_of_memory = 0.0
        self.worth_of_draft = 0.0
        self.is_probe = False
        self.n_levels = 0  # drafted so far
        self.log_chances: list[Tensor] = []  # of what was drafted, by level
        self.bins: list[Tensor] = []
        self.best: list[list[int]] = []  # [N, ranks], what the target likes after each row

    def begin(self, root: Tensor) -> int:
        """Make the n-grams' tree, and see whether the draft promises a better one."""
        token = int(root)
        context = continued(self.recent, token)
        self.nodes = [Node(0, token, None, 0, context, chance=1.0, bin=-1)]
        self.n_levels = 0
        self.log_chances = [CERTAIN]
        self.bins = [torch.tensor([-1])]
        self.rate = self.overall.tokens / self.overall.ms
        self.prices = [self.rate * weight for weight in self.costs.weights.tolist()]
        self.add_remembered(MAX_DEPTH)
        n_added = len(self.nodes) - 1
        if expected_tokens(self.nodes[1:]) <= self.prices[TREE] + self.prices[ROW] * n_added:
            del self.nodes[1:]
        self.worth_of_memory, self.worth_of_draft = self.compare_sources()
        is_better = self.worth_of_draft > self.worth_of_memory
        probed_ms = self.probed_ms + self.drafting.ms
        self.is_probe = not is_better and probed_ms < PROBE_SHARE * self.total_ms
        return self.max_depth if is_better or self.is_probe else 0

    def compare_sources(self) -> tuple[float, float]:
        """Tokens beyond what the time is worth: what the n-grams promise, and what iterations that
        draft have brought."""
        work = work_of(len(self.nodes), 0)
        promise = expected_tokens(self.nodes) - self.rate * self.costs.predict(work)
        return promise, self.drafting.tokens - self.rate * self.drafting.ms

    def standing(self) -> dict[str, float | str]:
        """What both sources are worth, and what makes this tree."""
        chosen = "memory"
        if self.is_probe:
            chosen = "draft, to try it"
        elif self.max_depth and self.worth_of_draft > self.worth_of_memory:
            chosen = "draft and memory"
        elif len(self.nodes) == 1:
            chosen = "nothing"
        return {"memory": self.worth_of_memory, "draft": self.worth_of_draft, "chosen": chosen}

    def add_remembered(self, max_depth: int) -> None:
        """Add the n-grams' likeliest candidates, best first, as long as each pays for its row."""
        present = {(node.parent.row, node.token) for node in self.nodes[1:]}
        heap: list[tuple[float, int, int, int]] = []  # - chance, row of the parent, token, bin
        for node in self.nodes:
            if node.depth < max_depth:
                self.offer(heap, node, present)
        while heap and len(self.nodes) < self.max_rows:
            negative, row, token, bin = heappop(heap)
            node = self.add(self.nodes[row], token, -negative, bin)
            node.is_retrieved = True
            if node.depth < max_depth:
                self.offer(heap, node, present)

    def offer(self, heap: list, parent: Node, present: set[tuple[int, int]]) -> None:
        """Put on the heap what the n-grams know below a node, if it pays and is not there yet."""
        price = self.prices[ROW]
        if parent.chance < price:
            return
        n_known, best = self.ngrams.recall(parent.context)
        bin = ngram_bin(n_known, is_beside=parent.draft_slot >= 0)
        for token in best:
            chance = parent.chance * self.counts.chances[bin]
            if chance >= price and (parent.row, token) not in present:
                heappush(heap, (-chance, parent.row, token, bin))
            bin += 1

    def add(self, parent: Node, token: int, chance: float, bin: int) -> Node:
        """A new node of the tree, in its last row for now."""
        context = continued(parent.context, token)
        node = Node(len(self.nodes), token, parent, parent.depth + 1, context, chance, bin)
        self.nodes.append(node)
        return node

    def expand(self, level: Level) -> tuple[Tensor, Tensor]:
        """Candidates that pay for their rows; another level, if together they pay for that."""
        self.n_levels += 1
        bins = torch.bucketize(level.logprobs.exp(), CONFIDENCE, right=True)  # [W, k]
        chances = torch.tensor(self.counts.chances[: len(DRAFT_GUESS)])
        above = self.log_chances[-1].unsqueeze(1)  # [W, 1]: if a level runs, all of it does
        log_chances = above + chances.log()[bins]  # [W, k]
        add = (log_chances >= math.log(self.prices[ROW])) & (level.logprobs > -math.inf)
        added = log_chances[add]
        self.log_chances.append(added)
        self.bins.append(bins[add])
        is_paying = LEVEL_YIELD * float(added.exp().sum()) >= self.prices[LEVEL]
        self.tell({"c_row": add}, {"c_level": is_paying})
        return add, add & is_paying

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        """The drafted tree with the n-grams' candidates, or these alone."""
        if len(tree) > 1:
            self.adopt(tree)
            self.add_remembered(min(max_depth, MAX_DEPTH))
        else:
            self.nodes = [node for node in self.nodes if node.depth <= max_depth]
            self.nodes[0].draft_slot = int(tree.draft_slots[0])  # the draft may have run the root
        if len(self.nodes) == 1:
            return tree
        self.nodes.sort(key=attrgetter("depth"))  # of equals, the drafted ones stay first
        for row, node in enumerate(self.nodes):
            node.row = row
        return as_tree(self.nodes)

    def adopt(self, tree: Tree) -> None:
        """Take the drafted tree for the one to add to."""
        tokens = tree.tokens.tolist()
        parents = tree.parents.tolist()
        slots = tree.draft_slots.tolist()
        chances = torch.cat(self.log_chances).exp().tolist()  # [N or more: the budget may cut]
        bins = torch.cat(self.bins).tolist()
        del self.nodes[1:]
        self.nodes[0].draft_slot = slots[0]
        for row in range(1, len(tree)):
            node = self.add(self.nodes[parents[row]], tokens[row], chances[row], bins[row])
            node.draft_slot = slots[row]

    def read(self, tokens: Tensor, scores: Scores) -> None:
        """Remember the prompt at once; of a tree it must first be known what was accepted."""
        self.best = scores.likeliest_ids(N_RANKS).tolist()
        if self.nodes:
            return
        for row, token in enumerate(tokens.tolist()):
            self.recent = continued(self.recent, token)
            self.ngrams.write(self.recent, self.best[row])

    def adapt(self, tree: Tree, path: list[int], ms: float) -> None:
        """Remember what the target likes, count what was right, and learn what it cost."""
        self.remember(path)
        self.count(path)
        work = work_of(len(tree), self.n_levels)
        if self.settings.learn:
            unit = self.costs.fit(work, ms)
            self.overall.ms *= unit
            self.drafting.ms *= unit
        else:
            ms = self.costs.predict(work)
        self.overall.take(len(path), ms)
        if self.n_levels:
            self.drafting.take(len(path), ms)
        self.total_ms += ms
        if self.is_probe:
            self.probed_ms += ms

    def remember(self, path: list[int]) -> None:
        """Every row, for what is wrong here may be right elsewhere; what is true comes last."""
        for node in self.nodes:
            if node.row not in path:
                self.ngrams.write(node.context, self.best[node.row])
        for row in path:
            self.ngrams.write(self.nodes[row].context, self.best[row])
        self.recent = self.nodes[path[-1]].context

    def count(self, path: list[int]) -> None:
        """The nodes that were tried are those below the path."""
        outcomes = []
        for node in self.nodes[1:]:
            if node.parent.row in path:
                outcomes.append((node.bin, node.row in path))
        self.counts.add(outcomes)
