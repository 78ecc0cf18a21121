"""Count of the blocks of tree masks that are not empty, by the order of the rows.

An attention kernel computes a mask block by block, and it could skip a block in which no row
attends to any slot. How many remain depends on the order of the tree's rows (DySpec, appendix C):

grown          the order in which the rows were added: in dyspec by value
breadth-first  the order of this project's trees
depth-first    the order to which the paper changes
heavy path     depth-first, the child with the largest subtree first

    print(random_table(n_trees=2))  # the paper's table 5
    print(tree_table(pair, n_rows=64, n_prompts=1, new_tokens=50))

The attention of this project computes all blocks: the paper finds no gain end to end.

Shapes: N tree rows, P slots before the tree, which every row attends to.
"""

import random
from collections.abc import Sequence

import numpy
import pandas as pd
from numpy import ndarray

from benchmark.prompts import BUILTIN, cut_prompts
from cli.models import Pair, Request
from engine.generation_config import GenerationConfig
from verify import ancestor_mask

ORDERS = ("grown", "breadth-first", "depth-first", "heavy path")
# The paper's table 5: random trees, P = 0, blocks of 32; before and after its change of the order
PUBLISHED = {256: "36 / 22.5", 512: "135.5 / 52.8", 1024: "490.2 / 119.3", 2048: "1654.5 / 278.7"}


def random_parents(n: int, rng: random.Random) -> list[int]:
    """Return the parents of a random tree [N]. Each earlier row is equally likely as a parent."""
    return [-1] + [rng.randrange(row) for row in range(1, n)]


def breadth_first(parents: Sequence[int]) -> list[int]:
    """Return the rows in breadth-first order. Parents come before their children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return sorted(range(len(parents)), key=depths.__getitem__)


def depth_first(parents: Sequence[int], is_by_size: bool) -> list[int]:
    """Return the rows in depth-first order. Siblings keep their order or, if is_by_size, those with
    larger subtrees come first."""
    children: list[list[int]] = [[] for _ in parents]
    sizes = [1] * len(parents)  # of the subtrees
    for row in range(len(parents) - 1, 0, -1):
        children[parents[row]].append(row)  # the last sibling first, as a stack needs them
        sizes[parents[row]] += sizes[row]
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        above = children[order[-1]]
        stack += sorted(above, key=lambda child: sizes[child]) if is_by_size else above
    return order


def count_blocks(mask: ndarray, size: int, n_prefix: int) -> int:
    """Return how many blocks of size x size are not empty in a mask [N, N] after P slots, to which
    every row attends."""
    n = len(mask)
    n_rows, n_columns = -(-n // size), -(-(n_prefix + n) // size)
    padded = numpy.zeros((n_rows * size, n_columns * size), dtype=bool)
    padded[:n, :n_prefix] = True
    padded[:n, n_prefix : n_prefix + n] = mask
    return int(padded.reshape(n_rows, size, n_columns, size).any(axis=(1, 3)).sum())


def counts_by_order(
    parents: Sequence[int], grown: Sequence[int], size: int = 32, n_prefix: int = 0
) -> list[int]:
    """Return the number of blocks of a tree in each of ORDERS. grown: the rows in the order of
    growth."""
    mask = ancestor_mask(parents)
    orders = [grown, breadth_first(parents)]
    orders += [depth_first(parents, is_by_size) for is_by_size in (False, True)]
    return [count_blocks(mask[numpy.ix_(rows, rows)], size, n_prefix) for rows in orders]


def random_table(n_trees: int = 8) -> pd.DataFrame:
    """Return the mean counts of random trees of several sizes, next to the paper's."""
    rng, found = random.Random(0), {}
    for n in PUBLISHED:
        trees = [counts_by_order(random_parents(n, rng), range(n)) for _ in range(n_trees)]
        found[n] = numpy.mean(trees, axis=0)
    table = pd.DataFrame(found, index=ORDERS).T
    return table.assign(paper=PUBLISHED.values())


def tree_table(
    pair: Pair, n_rows: int, n_prompts: int = 4, new_tokens: int = 96, max_depth: int = 30
) -> pd.DataFrame:
    """Return the mean counts of dyspec's trees in greedy texts after the builtin prompts, by P.
    Trees that the end of the text may have made less deep are left out."""
    config = GenerationConfig.parse("dyspec", f"N={n_rows}", f"D_max={max_depth}")
    n_ids, found = pair.target.config.vocab_size, {0: [], 100: [], 500: [], 2000: []}
    for ids in cut_prompts(list(BUILTIN), pair.tokenizer, n_ids, 150, n_prompts):
        steps = list(Request(pair, ids, config, new_tokens).decode())
        n_left = new_tokens - 1
        for step in steps[1:]:
            # Greedy trees grow by value (appendix D.1)
            grown = sorted(range(len(step.tree)), key=lambda row: -step.tree.path_logprobs[row])
            for n_prefix in found if n_left > max_depth else ():
                counts = counts_by_order(step.tree.parents, grown, n_prefix=n_prefix)
                found[n_prefix].append(counts)
            n_left -= len(step.tokens)
    means = {n_prefix: numpy.mean(counts, axis=0) for n_prefix, counts in found.items()}
    return pd.DataFrame(means, index=ORDERS).T.rename_axis("P")
