"""Count of the blocks of tree masks that are not empty, by the order of the rows.

An attention kernel computes a mask block by block, and it could skip a block in which no row
attends to any slot. How many remain depends on the order of the tree's rows (DySpec, appendix C):

grown          the order in which the rows were added: in dyspec by value
breadth-first  the order of this project's trees
depth-first    the order to which the paper changes
heavy path     depth-first, the child with the largest subtree first

    python -m benchmark.blocks  # trees of the embedded pair, and random ones

The attention of this project computes all blocks: the paper finds no gain end to end.

Shapes: N tree rows, P slots before the tree, which every row attends to.
"""

if __name__ == "__main__":
    from cli.start import run_program

    run_program("benchmark.blocks")

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from itertools import product

import numpy
from numpy import ndarray

from benchmark.prompts import BUILTIN, cut_prompts
from benchmark.report import text_table
from cli.errors import Parser, print_line, run_command_line
from cli.models import Pair, Request, open_pair
from cli.options import add_model_options
from draft_tree import Tree
from engine.generation_config import GenerationConfig
from verify import ancestor_mask

BLOCK_SIZES = (32, 128)  # rows and columns
PREFIXES = (0, 100, 500, 2000)  # P
REAL_ROWS = (256, 768, 1024)
MAX_DEPTH = 30
N_RANDOM = 8  # trees of each number of rows
N_PROMPTS, N_TOKENS = 4, 96  # of the texts whose trees are counted
ORDERS = ("grown", "breadth-first", "depth-first", "heavy path")
# The paper's table 5: random trees, P = 0, blocks of 32; before and after its change of the order
PUBLISHED = {256: "36 / 22.5", 512: "135.5 / 52.8", 1024: "490.2 / 119.3", 2048: "1654.5 / 278.7"}


def random_parents(n: int, rng: random.Random) -> list[int]:
    """Return the parents of a random tree [N]. Each earlier row is equally likely as a parent."""
    return [-1] + [rng.randrange(row) for row in range(1, n)]


def grown_order(tree: Tree) -> list[int]:
    """Return the rows of a greedy tree in the order in which DySpec adds them (appendix D.1)."""
    return sorted(range(len(tree)), key=lambda row: -tree.path_logprobs[row])


def breadth_first(parents: Sequence[int]) -> list[int]:
    """Return the rows in breadth-first order. Parents come before their children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return sorted(range(len(parents)), key=depths.__getitem__)


def depth_first(parents: Sequence[int], is_by_size: bool) -> list[int]:
    """Return the rows in depth-first order.

    is_by_size: among siblings, those with larger subtrees come first. Otherwise they keep their
        order.
    """
    children: list[list[int]] = [[] for _ in parents]
    sizes = [1] * len(parents)  # of the subtrees
    for row in range(len(parents) - 1, 0, -1):
        children[parents[row]].append(row)  # the last sibling first, as a stack needs them
        sizes[parents[row]] += sizes[row]
    order, stack = [], [0]
    while stack:
        row = stack.pop()
        order.append(row)
        if is_by_size:
            children[row].sort(key=lambda child: sizes[child])
        stack += children[row]
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


def masks_by_order(parents: Sequence[int], grown: Sequence[int]) -> list[ndarray]:
    """Return a tree's mask [N, N] in each of ORDERS. grown: the rows in the order of growth."""
    mask = ancestor_mask(parents)
    orders = [grown, breadth_first(parents)]
    orders += [depth_first(parents, is_by_size) for is_by_size in (False, True)]
    return [mask[numpy.ix_(rows, rows)] for rows in orders]


def mean_counts(trees: Sequence[list[ndarray]], size: int, n_prefix: int) -> list[str]:
    """Return the cells of a table: the mean number of blocks in each of ORDERS. trees: the results
    of masks_by_order."""
    counts = [[count_blocks(mask, size, n_prefix) for mask in masks] for masks in trees]
    return [f"{mean:,.1f}" for mean in numpy.mean(counts, axis=0)]


def real_trees(pair: Pair, n_rows: int) -> Iterator[Tree]:
    """Yield the trees of dyspec in greedy texts after the builtin prompts, but not those that the
    end of the text may have made less deep."""
    config = GenerationConfig.parse("dyspec", f"N={n_rows}", f"D_max={MAX_DEPTH}")
    n_ids = pair.target.config.vocab_size
    for ids in cut_prompts(list(BUILTIN), pair.tokenizer, n_ids, 150, N_PROMPTS):
        n_left = N_TOKENS
        for step in Request(pair, ids, config, N_TOKENS).decode():
            if step.tree and n_left > MAX_DEPTH:
                yield step.tree
            n_left -= len(step.tokens)


def random_cells() -> Iterator[list[str]]:
    """Yield the rows of the table of random trees, as text."""
    rng = random.Random(0)
    for n, published in PUBLISHED.items():
        trees = [masks_by_order(random_parents(n, rng), range(n)) for _ in range(N_RANDOM)]
        for size in BLOCK_SIZES:
            paper = published if size == 32 else ""
            yield [f"{n:,}", str(size), *mean_counts(trees, size, 0), paper]


def real_cells(pair: Pair) -> Iterator[list[str]]:
    """Yield the rows of the table of real trees, as text."""
    for n in REAL_ROWS:
        trees = [masks_by_order(tree.parents, grown_order(tree)) for tree in real_trees(pair, n)]
        for size, n_prefix in product(BLOCK_SIZES, PREFIXES):
            yield [f"{n:,}", str(size), f"{n_prefix:,}", *mean_counts(trees, size, n_prefix)]


def execute(args: argparse.Namespace) -> int:
    pair, _ = open_pair(args, is_drafting=True, announce=print_line)
    width = shutil.get_terminal_size().columns
    print("Random trees, P = 0; paper: table 5, before and after its change of the order\n")
    header = ["rows", "block", *ORDERS, "paper"]
    print(text_table(header, list(random_cells()), width))
    print("\nTrees of dyspec; paper, figure 9, blocks of 32, P not stated: 366.1 and 218.3")
    print("with 768 rows, 580.1 and 295.6 with 1,024\n")
    header = ["rows", "block", "P", *ORDERS]
    print(text_table(header, list(real_cells(pair)), width))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Count the blocks of tree masks that are not empty, by the order of the rows."
    parser = Parser(prog="python -m benchmark.blocks", description=description)
    add_model_options(parser)
    return run_command_line(execute, parser, arguments)
