"""Trees made by hand or at random, random settings, and a draft whose logits depend on a path."""

import math
import random
from collections.abc import Callable
from dataclasses import Field, fields
from zlib import crc32

import torch
from torch import Tensor

from draft_tree import MAX_ROWS, Candidates, Settings, Tree

VOCAB = 32  # ids of FakeDraft
ROOT = 7  # the token at the root of its trees

Path = tuple[int, ...]  # tokens from the root on


def make_tree(tokens: list[int], parents: list[int]) -> Tree:
    """Build a tree from tokens and parents. Verification reads nothing else but the depths."""
    tree = Tree.from_root(tokens[0])
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        tree.add(token, parent, 0.0)
    return tree


def random_tree(rng: random.Random, n_rows: int, n_ids: int = 90, max_depth: int = 15) -> Tree:
    """Return a random tree in breadth-first order, with either long chains or many siblings."""
    grown = Tree.from_root(rng.randrange(n_ids))
    is_bushy = rng.random() < 0.5
    while len(grown) < n_rows:
        row = rng.randrange(len(grown)) if is_bushy or rng.random() < 0.3 else len(grown) - 1
        siblings = [grown.tokens[i] for i, above in enumerate(grown.parents) if above == row]
        token = rng.randrange(n_ids)
        if grown.depths[row] < max_depth and token not in siblings:
            grown.add(token, row, 0.0)
    tree, rows = Tree.from_root(grown.tokens[0]), {0: 0}  # by rows of `grown`
    for row in sorted(range(1, n_rows), key=grown.depths.__getitem__):
        rows[row] = tree.add(grown.tokens[row], rows[grown.parents[row]], 0.0)
    return tree


def path_to(tree: Tree, row: int) -> list[int]:
    """Return the rows from the root to this one."""
    path = [row]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    return path


def paths(tree: Tree) -> list[Path]:
    """Return each row's tokens from the root on."""
    found: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        above = ()
        if parent >= 0:
            above = found[parent]
        found.append(above + (token,))
    return found


def assert_well_formed(tree: Tree) -> None:
    """Check what the comments on Tree's fields state for every tree."""
    rows = paths(tree)
    assert len(set(rows)) == len(rows)  # siblings carry distinct tokens
    assert tree.parents[0] == -1
    assert all(parent < row for row, parent in enumerate(tree.parents))
    assert tree.parents == sorted(tree.parents)  # breadth-first
    assert tree.depths == [len(path) - 1 for path in rows] == sorted(tree.depths)
    assert tree.path_logprobs[0] == 0.0
    assert all(math.isfinite(logprob) for logprob in tree.path_logprobs)
    columns = [tree.tokens, tree.parents, tree.depths, tree.draft_slots]
    columns += [tree.path_logprobs]
    assert {len(column) for column in columns} == {len(tree)}
    kinds = [{type(entry) for entry in column} for column in columns]
    assert kinds == [{int}] * 4 + [{float}]  # Python's types, not NumPy's


def random_value(field: Field, rng: random.Random) -> object:
    """Draw the value of one setting, often at an end of its range."""
    low = field.metadata["low"]
    high = field.metadata["high"]
    if field.type is bool:
        return rng.random() < 0.8
    if field.type is float:
        value = rng.choice([low, field.default, 10 ** rng.uniform(-3, 0)])
        return min(max(value, low), high)
    if high == MAX_ROWS:  # a limit on the rows of a tree
        n_rows = rng.choice([1, 2, 3, 5, 8, 13, 32, 64])
        return max(n_rows, low)
    return rng.randint(low, min(low + 5, high))


def random_settings(
    kind: type[Settings],
    rng: random.Random,
    draw_value: Callable[[Field, random.Random], object] = random_value,
) -> Settings:
    """Draw small settings of a method; some switch parts of it off."""
    for _ in range(1000):
        values = {field.name: draw_value(field, rng) for field in fields(kind)}
        try:
            return kind(**values)
        except ValueError as error:  # such as two thresholds out of order: draw again
            refused = error
    raise refused


def top_k(logits: Tensor, k: int) -> Candidates:
    """Return the top-k candidates of each row of logits [n, V]."""
    logprobs, ids = torch.log_softmax(logits, dim=-1).sort(descending=True, stable=True)
    return Candidates(ids.numpy()[:, :k], logprobs.numpy()[:, :k])


class FakeDraft:
    """A draft whose logits depend only on the path. They are peaked below some, flat below others.

    It finds a row's path in the tree that grow gives it, so a wrong parent gives other logits.
    """

    def __init__(self, seed: int, changed: dict[Path, Tensor] | None = None):
        """changed: other logits for some paths."""
        self.seed = seed
        self.changed = changed or {}
        self.level: list[Path] = []  # the rows of the last call
        self.ran: list[Path] = []  # the rows of all calls
        self.n_calls = 0

    def logits(self, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(repr((self.seed, path)).encode()))
        heat = 12 * torch.rand(1, generator=generator)
        logits = heat * torch.randn(VOCAB, generator=generator)
        return self.changed.get(path, logits)

    def __call__(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        self.level = [tuple(tree.tokens[above] for above in path_to(tree, row)) for row in rows]
        self.ran += self.level
        self.n_calls += 1
        return self.choose(torch.stack([self.logits(path) for path in self.level]), k)

    def choose(self, logits: Tensor, k: int) -> Candidates:
        """Return the k likeliest tokens after each row of logits [n, V]."""
        return top_k(logits, k)


class HalfHalfDraft(FakeDraft):
    """A draft with two tokens of probability 0.5, exact in float32."""

    def logits(self, path: Path) -> Tensor:
        logits = torch.full((VOCAB,), -math.inf)
        logits[:2] = 0.0
        return logits
