"""dyspec: the literal heap of Algorithm 1, the best connected set, and the threshold form."""

import heapq
import itertools
import math

import pytest
import torch
from test_draft_tree import (
    ROOT,
    VOCAB,
    FakeDraft,
    Path,
    assert_starts_anew,
    assert_well_formed,
    paths,
)

from draft_tree import Level, grow
from engine.scores import Scores
from methods.dyspec import DySpec, DySpecRule, draw_values

DEPTH = 6


def heap_tree(draft: FakeDraft, n_rows: int, max_depth: int) -> dict[Path, float]:
    """Algorithm 1 as it stands, for ranked children: pop the best guess, add it, push the two it
    opens: its first child, and its next sibling. Path -> value, the root included."""
    root = (ROOT.item(),)
    tree = {root: 1.0}
    children = {}  # path -> its children's log-probabilities and tokens, best first
    heap: list[tuple[float, Path, int]] = []  # (- log value, parent's path, rank among siblings)

    def push(parent: Path, rank: int) -> None:
        if len(parent) > max_depth or rank == VOCAB:
            return
        if parent not in children:
            logprobs = torch.log_softmax(draft.logits(parent), -1)
            children[parent] = logprobs.sort(descending=True)
        logprob = float(children[parent].values[rank])
        heapq.heappush(heap, (-math.log(tree[parent]) - logprob, parent, rank))

    push(root, 0)
    while heap and len(tree) < n_rows:
        negative, parent, rank = heapq.heappop(heap)
        token = int(children[parent].indices[rank])
        path = parent + (token,)
        tree[path] = math.exp(-negative)
        push(path, 0)
        push(parent, rank + 1)
    return tree


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("n_rows", [2, 3, 7, 24, 60])
def test_the_exact_form_is_the_heaps_set(seed: int, n_rows: int) -> None:
    draft = FakeDraft(seed)
    tree = grow(DySpec(N=n_rows, D_max=DEPTH).rule(), ROOT, draft, 127)
    assert sorted(paths(tree)) == sorted(heap_tree(draft, n_rows, DEPTH))
    assert draft.n_calls <= DEPTH  # one pass a level
    assert_well_formed(tree)


@pytest.mark.parametrize("seed", range(6))
def test_the_threshold_form_with_the_heaps_last_value_gives_the_same_set(seed: int) -> None:
    draft = FakeDraft(seed)
    heap = heap_tree(draft, 20, DEPTH)
    t = min(heap.values()) * (1 - 1e-5)
    rule = DySpec(N=64, t=t, D_max=DEPTH, exact=False).rule()
    assert sorted(paths(grow(rule, ROOT, draft, 127))) == sorted(heap)


def is_connected(nodes: tuple[Path, ...]) -> bool:
    """Whether every node of the second level has its parent among them."""
    return all(len(node) == 1 or node[:1] in nodes for node in nodes)


def test_the_set_has_the_highest_total_value_of_all_connected_sets() -> None:
    """Brute force over every connected set of five rows in a tree of two levels, four ids."""
    logits = torch.randn(21, 4, generator=torch.Generator().manual_seed(3))

    def draft(tokens: torch.Tensor, parents: torch.Tensor | None) -> Scores:
        if parents is None:
            return Scores(logits[:1])
        return Scores(logits[1 + tokens])

    probs = torch.softmax(logits, -1).tolist()
    value = {}  # of each path below the root
    for first in range(4):
        value[(first,)] = probs[0][first]
        for second in range(4):
            value[first, second] = probs[0][first] * probs[1 + first][second]
    best = ()
    highest = 0.0
    for nodes in itertools.combinations(value, 4):
        total = sum(value[node] for node in nodes)
        if is_connected(nodes) and total > highest:
            best = nodes
            highest = total
    tree = grow(DySpec(N=5, D_max=2).rule(), ROOT, draft, 127)
    assert sorted(path[1:] for path in paths(tree)[1:]) == sorted(best)


def test_a_draw_is_valued_before_it_is_drawn() -> None:
    """p(u) times what the earlier siblings left; the drawn token itself does not matter."""
    probs = torch.tensor([[0.5, 0.3, 0.1], [0.1, 0.1, 0.7]])
    above = torch.tensor([[0.5], [0.25]])
    level = Level(1, probs.log(), (above * probs).log(), is_drawn=True)
    expected = torch.tensor([[0.5, 0.25, 0.1], [0.25, 0.225, 0.2]])
    torch.testing.assert_close(draw_values(level).exp(), expected)
    rule = DySpec(t=0.21).rule()
    rule.begin(ROOT)
    add, expand = rule.expand(level)
    assert add.tolist() == expand.tolist() == [[True, True, False], [True, True, False]]


def test_a_tree_remembers_nothing_of_the_one_before() -> None:
    rule = DySpec(N=9, D_max=DEPTH).rule()
    assert isinstance(rule, DySpecRule)
    assert_starts_anew(rule)
