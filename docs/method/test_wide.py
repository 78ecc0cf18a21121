"""Tests of wide: its tree, against the definition taken literally, and its text."""

import random
from functools import partial

import torch
from fast import generate
from growing import grow, random_settings
from small import noisy_pair
from torch import Tensor
from trees import path_to, top_k

from draft_tree import MAX_ROWS, Candidates, Settings, Tree, log_threshold
from dynatree_lab.methods.static import PaddedAutoregressive
from dynatree_lab.methods.wide import Wide
from gpt_neox import GPTNeoX

ROOT, VOCAB = 7, 12
Path = tuple[int, ...]  # tokens from the root on


def literal_tree(settings: Wide, table: Tensor, max_depth: int) -> list[Path]:
    """Return the tree's paths in breadth-first order. table: logits [V, V] after each token."""
    logprobs = {(ROOT,): torch.tensor(0.0)}
    queue = [(ROOT,)]
    while queue:
        path = queue.pop(0)
        if len(path) > min(settings.D, max_depth):
            continue
        after = torch.log_softmax(table[path[-1]], dim=-1)  # [V]
        for token in after.argsort(descending=True)[: settings.B].tolist():
            if after[token] >= log_threshold(settings.p) and len(logprobs) < MAX_ROWS:
                logprobs[*path, token] = logprobs[path] + after[token]
                queue.append((*path, token))
    likeliest = sorted(logprobs, key=logprobs.get, reverse=True)[: settings.N]
    return [path for path in logprobs if path in likeliest]


def paths(tree: Tree) -> list[Path]:
    rows = range(len(tree))
    return [tuple(tree.tokens[above] for above in path_to(tree, row)) for row in rows]


def draft(table: Tensor, tree: Tree, rows: list[int], k: int) -> Candidates:
    return top_k(table[[tree.tokens[row] for row in rows]], k)


def test_the_tree_is_the_one_defined() -> None:
    rng = random.Random(0)
    n_rows = set()
    for seed in range(100):
        table = 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        settings = random_settings("wide", rng)
        max_depth = rng.randint(0, 6)
        tree = grow(settings.make_rule(), ROOT, partial(draft, table), max_depth)
        assert paths(tree) == literal_tree(settings, table, max_depth)
        n_rows.add(len(tree))
    assert len(n_rows) > 10


def write(settings: Settings) -> list[int]:
    target, draft = noisy_pair(kind=GPTNeoX)
    steps = generate(target, draft, [3, 14, 15], settings, 40)
    return [token for step in steps for token in step.tokens]


def test_the_text_is_the_targets() -> None:
    assert write(Wide()) == write(PaddedAutoregressive())
