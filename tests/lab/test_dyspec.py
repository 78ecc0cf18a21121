"""Tests of dyspec against a literal Algorithm 1, for top-k and drawn candidates."""

import heapq
import random
from collections import Counter
from zlib import crc32

import numpy
import pytest
import torch
from growing import DrawnFakeDraft, grow
from torch import Tensor
from trees import ROOT, VOCAB, FakeDraft, Path, assert_well_formed, make_tree, paths

from dynatree_lab.methods.dyspec import DySpec, DySpecRule
from dynatree_lab.methods.rules import DrawnLevel, added_mask, best_rows
from dynatree_lab.methods.sampler import DrawingSampler, Sampling


class SeededByPath(DrawingSampler):
    """A sampler whose draws depend only on the path, so that two ways of growing agree on them."""

    def __init__(self, settings: Sampling, draft: FakeDraft, seed: int):
        super().__init__(settings, torch.device("cpu"))
        self.draft = draft
        self.seed = seed

    def draws(self, path: Path, probs: Tensor) -> list[int]:
        """Return all possible tokens below a path, in draw order."""
        generator = torch.Generator().manual_seed(crc32(repr((self.seed, path)).encode()))
        n = int((probs > 0).sum())
        # The last bits of a row differ between one pass per level and one per row. They must not
        # decide a draw
        rounded = (probs * 2**16).round().clamp(min=1) * (probs > 0)
        return torch.multinomial(rounded, n, generator=generator).tolist()

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw for the rows of the draft's last level."""
        rows = []
        for path, row in zip(self.draft.level, probs, strict=True):
            drawn = self.draws(path, row)
            others = [token for token in range(len(row)) if token not in drawn]
            rows.append((drawn + others)[:k])
        ids = torch.tensor(rows)
        return ids, probs.gather(1, ids)


class FewIds(DrawnFakeDraft):
    """A draft with few ids, and logits so flat that rounding does not decide the best nodes."""

    def __init__(self, seed: int, n_ids: int = VOCAB, scale: float = 0.2):
        super().__init__(seed)
        self.n_ids, self.scale = n_ids, scale

    def logits(self, path: Path) -> Tensor:
        return self.scale * super().logits(path)[: self.n_ids]

    def children(self, path: Path) -> tuple[list[int], list[float]]:
        """Return all possible tokens after a path and their probabilities, in draw order; without a
        sampler, the likeliest first."""
        logits = self.logits(path)[None]
        if not self.sampler:
            probs, tokens = torch.softmax(logits, -1)[0].sort(descending=True)
            return tokens.tolist(), probs.tolist()
        probs = self.sampler.draft_distribution(logits)[0]
        tokens = self.sampler.draws(path, probs)
        return tokens, probs[tokens].tolist()


def heap_tree(draft: FakeDraft, n_rows: int, max_depth: int) -> dict[Path, float]:
    """Run Algorithm 1 literally and return the value of each node by its path, the root included.

    It pops the candidate of the highest value, adds it, and pushes its first child and its next
    sibling. The value of a drawn candidate is the probability of its parent's path times the mass
    that its earlier siblings have left. That of a top-k candidate is p(u) (appendix D.1).
    """
    root = (ROOT,)
    tree = {root: 1.0}
    path_probs = {root: 1.0}
    children = {}  # by path: its children's tokens in order, and their probabilities
    heap: list[tuple[float, int, Path, int]] = []  # negative value; depth for ties; parent; rank

    def push(parent: Path, rank: int) -> None:
        if len(parent) > max_depth:
            return
        if parent not in children:
            children[parent] = draft.children(parent)
        tokens, probs = children[parent]
        if rank < len(tokens):
            factor = 1 - sum(probs[:rank]) if draft.sampler else probs[rank]
            heapq.heappush(heap, (-path_probs[parent] * factor, len(parent), parent, rank))

    push(root, 0)
    while heap and len(tree) < n_rows:
        negative, _, parent, rank = heapq.heappop(heap)
        tokens, probs = children[parent]
        path = (*parent, tokens[rank])
        tree[path] = -negative
        path_probs[path] = path_probs[parent] * probs[rank]
        push(path, 0)
        push(parent, rank + 1)
    return tree


@pytest.mark.parametrize("is_drawn", [False, True])
def test_the_tree_is_the_heaps_set(is_drawn: bool) -> None:
    """Compare with the set that the heap gives.

    Top-k trees are also grown by the threshold form with the lowest value of the heap's set. Some
    drafts are so peaked that the mass left by earlier siblings rounds to 0. If the vocabulary is
    smaller than the tree, a level may have fewer than N - 1 candidates, and later levels add some.
    """
    seen: Counter[str] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        n_ids, n_rows, depth = rng.randint(2, 12), rng.randint(2, 40), rng.choice([1, 2, 3, 6])
        draft = FewIds(seed, n_ids)
        if seed % 4 == 0 and not is_drawn:
            draft = FewIds(seed, scale=1.0)  # peaked, and more ids than most trees have nodes
        top_p, temperature = rng.choice([1.0, 0.8]), rng.choice([None, 0.1, 0.6, 2.0])
        sampler = SeededByPath(Sampling(1.0, top_p, draft_temperature=temperature), draft, seed)
        draft.sampler = sampler if is_drawn else None
        tree = grow(DySpec(N=n_rows, D_max=depth).make_rule(), ROOT, draft, 127)
        heap = heap_tree(draft, n_rows, depth)
        # Rounding to float32 may lose nodes of smaller values
        sure = {path for path, value in heap.items() if value > 1e-6}
        assert sure <= set(paths(tree)) <= set(heap), f"case {seed}"
        assert draft.n_calls <= depth, "one pass a level"
        assert_well_formed(tree)
        if not is_drawn:
            min_value = min(heap.values()) * (1 - 1e-5)
            above = DySpec(N=64, t=min_value, D_max=depth, exact=False).make_rule()
            assert sorted(paths(grow(above, ROOT, draft, 127))) == sorted(heap)
        n_deep = sum(len(path) > 2 for path in heap)
        is_scarce, is_full = n_ids < n_rows - 1, len(heap) == n_rows
        seen["a level is not enough"] += is_scarce and n_deep > 0
        seen["every row is used"] += is_scarce and is_full
        seen["too few nodes"] += is_scarce and not is_full
        seen["a level is enough"] += n_deep == 0 and is_full
    assert min(seen.values()) >= 10, f"the cases have become too tame: {seen}"


def test_equal_values_do_not_use_up_the_row_budget() -> None:
    """Check equal values, which are frequent when calibrated. If all of them were added, the budget
    would cut off later rows depending on what was drawn."""
    rule = DySpecRule(DySpec(N=5, D_max=5))
    n_added = []
    for depth, n in enumerate((1, 4, 4)):
        equal = numpy.full((n, 4), -1.0, numpy.float32)
        tokens = numpy.arange(4)[None].repeat(n, axis=0)
        level = DrawnLevel(
            depth, tokens, equal, equal, drawn_values=equal, find_confidence=lambda: numpy.ones(1)
        )
        n_added.append(int(added_mask(level, rule.add_gates(level)).sum()))
    assert n_added == [4, 0, 0]


def test_of_equal_values_the_earlier_row_stays() -> None:
    """Check a child that is certain, so its value is its parent's. Without its parent, it would be
    no tree."""
    tree = make_tree([7, 8, 9], [-1, 0, 1])
    tree.path_logprobs = [0.0, -1.0, -1.0]
    assert best_rows(tree, 2).tokens == [7, 8]
