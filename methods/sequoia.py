"""sequoia: one tree for all iterations, the best for measured chances by rank (Chen et al. 2024).

That a child is accepted, once its parent is, is taken to depend on its rank alone; `p` lists the
chances, rank by rank. A node then adds the product of the chances along its path to the expected
accepted length, and dynamic programming finds the N rows with the highest sum. A child is tried
after its elder siblings, so none is there without them.

When the text is sampled children are drawn, without replacement: the shape never depends on what
they are, nor on how likely.

    python dynatree.py --method sequoia --set N=24 --set p=0.6:0.15:0.05 --prompt "..."

Shapes: D depth, k ranks, n nodes.
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import cache

import numpy
from numpy import ndarray

from draft_tree import MAX_ROWS, Gates, Level, Rule, setting
from methods.rules import MethodRule, added
from methods.settings import MethodSettings, text

# Of the embedded pair, greedily, counted on 24 texts of its training corpus
P_TINY = "0.815:0.115:0.026:0.01"

Chances = tuple[float, ...]  # of acceptance, by rank
Shape = list[list[int]]  # the children of each node, nodes in breadth-first order


def parse_chances(word: str) -> Chances:
    """Chances of acceptance by rank. Raises ValueError."""
    try:
        chances = tuple(float(part) for part in word.split(":"))
    except ValueError:
        chances = (math.nan,)
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError("chances by rank are numbers from 0 to 1, such as 0.6:0.15:0.05")
    return chances


@dataclass(frozen=True)
class Sequoia(MethodSettings):
    """sequoia: the static tree of the highest expected length, by rank (Chen et al. 2024)."""

    N: int = setting(16, 1, MAX_ROWS, "rows per tree, root included")
    D_max: int = setting(6, 1, MAX_ROWS - 1, "hard limit of depth")
    p: str = text(
        P_TINY,
        parse_chances,
        "chances of acceptance by rank",
        ("0.6:0.15:0.05", "0.2:0.5:0.0:0.3", "0.0"),
    )

    def make_rule(self) -> Rule:
        shape = plan(self.N - 1, self.D_max, parse_chances(self.p))
        return SequoiaRule(shape, self.D_max)


@cache
def plan(n_nodes: int, max_depth: int, chances: Chances) -> Shape:
    """The best tree of so many nodes and levels below its root, by Sequoia's dynamic programming;
    of fewer nodes if they have no room."""
    # Of the best below a node, for each number of levels and of nodes that may follow it, if its
    # children of a rank below k are there: [D + 1, k + 1, n + 1]
    n_ranks = len(chances)
    lengths = numpy.zeros((max_depth + 1, n_ranks + 1, n_nodes + 1))  # what the n nodes add
    shares = numpy.zeros(lengths.shape, dtype=int)  # of the n, to the child of rank k; 0: no child
    n = numpy.arange(n_nodes + 1)
    left = n[:, None] - n  # [n + 1, n + 1], what each share leaves of n nodes
    for depth in range(1, max_depth + 1):
        for rank in reversed(range(n_ranks)):
            eldest = numpy.zeros(n_nodes + 1)  # what the child adds, by its share
            eldest[1:] = chances[rank] * (1 + lengths[depth - 1, 0, :-1])
            younger = lengths[depth, rank + 1][left]  # what its siblings add, of the nodes left
            younger[:, 0] = 0.0  # none is there without it
            both = numpy.where(left >= 0, eldest + younger, -math.inf)
            lengths[depth, rank] = both.max(axis=1)
            shares[depth, rank] = both.argmax(axis=1)
    return shape_of(shares, n_nodes, max_depth)


def shape_of(shares: ndarray, n_nodes: int, max_depth: int) -> Shape:
    """The tree that hands out its nodes by these shares."""
    shape = []
    waiting = deque([(n_nodes, max_depth)])  # nodes and levels to go below each node
    n_named = 1
    while waiting:
        n, depth = waiting.popleft()
        family = []
        while share := shares.item(depth, len(family), n):
            family.append(n_named)
            n_named += 1
            waiting.append((share - 1, depth - 1))
            n -= share
        shape.append(family)
    return shape


class SequoiaRule(MethodRule):
    """One generation of Sequoia; between the levels of a tree it knows which nodes have run."""

    draws_candidates = True
    depends_on_probs = False

    def __init__(self, shape: Shape, max_depth: int):
        widest = max(len(family) for family in shape)
        n_rows = len(shape)
        super().__init__(max(widest, 1), max_depth, n_rows)
        self.shape = shape
        self.nodes: list[int] = []  # of the shape, one for each row that the draft runs next

    def begin_tree(self, root: int, max_depth: int) -> int:
        self.nodes = [0]
        return super().begin_tree(root, max_depth)

    def add_gates(self, level: Level) -> Gates:
        is_child = numpy.zeros(level.tokens.shape, dtype=bool)
        has_children = is_child.copy()
        is_possible = added(level, {})
        growing = []
        for row, node in enumerate(self.nodes):
            for rank, child in enumerate(self.shape[node][: level.tokens.shape[1]]):
                is_child[row, rank] = True
                has_children[row, rank] = bool(self.shape[child])
                if self.shape[child] and is_possible.item(row, rank):
                    growing.append(child)  # what is impossible has no row to run
        self.nodes = growing
        self.has_children = has_children
        return {"shape": is_child}

    def expand_gates(self, level: Level) -> Gates:
        return {"shape": self.has_children}
