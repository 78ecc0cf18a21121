"""sequoia: one tree shape, the best for measured acceptance probabilities (Chen et al. 2024).

The acceptance probability of a child, given that its parent is accepted, is assumed to depend only
on its rank. `p` lists these probabilities by rank. A node adds the product of the probabilities
along its path to the expected accepted length. Dynamic programming finds the tree of N rows with
the highest sum. A child is tried after its earlier siblings, so no tree has it without them.

When the text is sampled, children are drawn without replacement. The text stays exact, because the
shape does not depend on the drawn tokens or their probabilities.

    python -m dynatree_lab --method sequoia --set N=24 --set p=0.6:0.15:0.05 --prompt "..."

Shapes: D depth, k ranks, n nodes.
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import cache

import numpy
from numpy import ndarray
from numpy.lib.stride_tricks import sliding_window_view

from draft_tree import MAX_LEVELS, MAX_ROWS, Gates, Level, Rule, setting
from dynatree_lab.methods.rules import MethodRule, added_mask
from dynatree_lab.methods.settings import MethodSettings, text

# Acceptance rates by rank of the embedded pair: greedy decoding of 24 texts of its training corpus
TINY_PAIR_RANK_PROBS = "0.815:0.115:0.026:0.01"

RankProbs = tuple[float, ...]  # acceptance probabilities by rank
TreeShape = list[list[int]]  # the children of each node, nodes in breadth-first order


def parse_rank_probs(word: str) -> RankProbs:
    """Return the acceptance probabilities in a word such as 0.6:0.15. Raises ValueError."""
    try:
        rank_probs = tuple(float(part) for part in word.split(":"))
    except ValueError:
        rank_probs = (math.nan,)
    if not all(0 <= p <= 1 for p in rank_probs):
        raise ValueError("it must be probabilities by rank, from 0 to 1, such as 0.6:0.15:0.05")
    return rank_probs


@dataclass(frozen=True)
class Sequoia(MethodSettings):
    """sequoia: the static tree with the highest expected accepted length (Chen et al. 2024)."""

    N: int = setting(16, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(6, 1, MAX_LEVELS, "hard limit of depth")
    p: str = text(
        TINY_PAIR_RANK_PROBS,
        parse_rank_probs,
        "acceptance probabilities by rank",
        ("0.6:0.15:0.05", "0.2:0.5:0.0:0.3", "0.0"),
    )

    def make_rule(self) -> Rule:
        shape = plan_shape(self.N - 1, self.D_max, parse_rank_probs(self.p))
        return SequoiaRule(shape, self.D_max)


@cache
def plan_shape(n_nodes: int, max_depth: int, rank_probs: RankProbs) -> TreeShape:
    """Return the best shape with n_nodes below its root, by Sequoia's dynamic programming. It has
    fewer nodes if max_depth levels have no room for all, and fewer levels if they are enough."""
    # Both are indexed by [d, k, n]: n nodes are to be placed in the d levels below a node that has
    # children of all ranks below k already. [D + 1, k + 1, n + 1]
    n_ranks = len(rank_probs)
    lengths = numpy.zeros((max_depth + 1, n_ranks + 1, n_nodes + 1))  # that the n nodes add at best
    shares = numpy.zeros(lengths.shape, dtype=int)  # nodes for the child of rank k; 0: no child
    n = numpy.arange(n_nodes + 1)
    for depth in range(1, max_depth + 1):
        for rank in reversed(range(n_ranks)):
            child = numpy.zeros(n_nodes + 1)  # length added by the child's share
            child[1:] = rank_probs[rank] * (1 + lengths[depth - 1, 0, :-1])
            both = child + by_share(lengths[depth, rank + 1])
            both[:, 0] = 0.0  # without the child there are no later siblings
            shares[depth, rank] = both.argmax(axis=1)
            lengths[depth, rank] = both[n, shares[depth, rank]]
        if (lengths[depth] == lengths[depth - 1]).all():  # more levels add nothing
            return shape_from_shares(shares, n_nodes, depth)
    return shape_from_shares(shares, n_nodes, max_depth)


def by_share(siblings: ndarray) -> ndarray:
    """Return the length [n + 1, n + 1] that later siblings add, by the number of nodes and the
    child's share of them: -inf if the share is larger.

    siblings: [n + 1], the same length by the number of nodes that are left for them.
    """
    n_nodes = len(siblings) - 1
    padded = numpy.concatenate([numpy.full(n_nodes, -math.inf), siblings])
    return sliding_window_view(padded, n_nodes + 1)[:, ::-1]  # [n, share] is siblings[n - share]


def shape_from_shares(shares: ndarray, n_nodes: int, max_depth: int) -> TreeShape:
    """Return the shape whose nodes have these shares."""
    shape = []
    queue = deque([(n_nodes, max_depth)])  # nodes and levels below each node
    next_node = 1
    while queue:
        n, depth = queue.popleft()
        children = []
        while share := shares.item(depth, len(children), n):
            children.append(next_node)
            next_node += 1
            queue.append((share - 1, depth - 1))
            n -= share
        shape.append(children)
    return shape


class SequoiaRule(MethodRule):
    """The rule of Sequoia."""

    draws_candidates = True
    depends_on_probs = False
    can_be_gated = False  # each row that it expands has its place in the shape

    def __init__(self, shape: TreeShape, max_depth: int):
        widest = max(len(children) for children in shape)
        super().__init__(max(widest, 1), max_depth, max_rows=len(shape))
        self.shape = shape
        self.nodes: list[int] = []  # node of the shape for each row that the draft runs next

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        self.nodes = [0]
        return super().begin_tree(root_token, max_depth)

    def add_gates(self, level: Level) -> Gates:
        is_child = numpy.zeros(level.tokens.shape, dtype=bool)
        has_children = is_child.copy()
        is_possible = added_mask(level, {})
        expanded = []
        for row, node in enumerate(self.nodes):
            for rank, child in enumerate(self.shape[node][: level.tokens.shape[1]]):
                is_child[row, rank] = True
                has_children[row, rank] = bool(self.shape[child])
                if self.shape[child] and is_possible.item(row, rank):
                    expanded.append(child)  # an impossible candidate gets no row
        self.nodes = expanded
        self.has_children = has_children
        return {"shape": is_child}

    def expand_gates(self, level: Level) -> Gates:
        return {"shape": self.has_children}
