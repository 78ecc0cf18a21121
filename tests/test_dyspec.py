"""dyspec: the literal heap of Algorithm 1, ranked and drawn, and the threshold form."""

import heapq
import math
import random
from collections import Counter
from zlib import crc32

import numpy
import pytest
import torch
from conftest import grow
from test_draft_tree import ROOT, VOCAB, FakeDraft, Path, assert_well_formed, paths
from torch import Tensor

from methods.dyspec import DySpec, DySpecRule
from methods.opttree import OptTree
from methods.rules import DrawnLevel, added
from methods.sampler import DrawingSampler, Sampling


class Drawing(DrawingSampler):
    """The i-th draw below a path is told beforehand, so that two ways of growing agree on it."""

    def __init__(self, settings: Sampling, draft: FakeDraft, seed: int):
        super().__init__(settings, torch.device("cpu"))
        self.draft = draft
        self.seed = seed

    def draws(self, path: Path, probs: Tensor) -> list[int]:
        """All tokens that can be drawn below a path, in order."""
        generator = torch.Generator().manual_seed(crc32(repr((self.seed, path)).encode()))
        n = int((probs > 0).sum())
        # A level's rows are not rounded as one alone: the draw must not hang on their last bits
        rounded = (probs * 2**16).round().clamp(min=1) * (probs > 0)
        return torch.multinomial(rounded, n, generator=generator).tolist()

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """For the level that the draft has just run."""
        rows = []
        for path, row in zip(self.draft.level, probs, strict=True):
            drawn = self.draws(path, row)
            others = [token for token in range(len(row)) if token not in drawn]
            rows.append((drawn + others)[:k])
        ids = torch.tensor(rows)
        return ids, probs.gather(1, ids)


class FewIds(FakeDraft):
    """A FakeDraft with few ids, at a heat at which rounding does not decide what they are worth."""

    def __init__(self, seed: int, n_ids: int = VOCAB, heat: float = 0.2):
        super().__init__(seed)
        self.n_ids, self.heat = n_ids, heat

    def logits(self, path: Path) -> Tensor:
        return self.heat * super().logits(path)[: self.n_ids]

    def children(self, path: Path) -> tuple[list[int], list[float]]:
        """All that may follow a path, drawn or the likeliest first, and how likely each is."""
        logits = self.logits(path)[None]
        if not self.sampler:
            probs, tokens = torch.softmax(logits, -1)[0].sort(descending=True)
            return tokens.tolist(), probs.tolist()
        probs = self.sampler.draft_distribution(logits)[0]
        tokens = self.sampler.draws(path, probs)
        return tokens, probs[tokens].tolist()


def heap_tree(draft: FakeDraft, n_rows: int, max_depth: int) -> dict[Path, float]:
    """Algorithm 1 as it stands: pop the most valuable guess, add it, push the two that follow it,
    its first child and its next sibling. Path -> value, the root included.

    Drawn, a guess is worth what its path is and its elder siblings have left; ranked, what its own
    path is (appendix D.1), which is another set than that of the likeliest for the draw.
    """
    root = (ROOT,)
    tree = {root: 1.0}
    path_probs = {root: 1.0}
    children = {}  # path -> its children's tokens, in order, and probabilities
    heap: list[tuple[float, int, Path, int]] = []  # - value, for ties depth, parent, rank

    def push(parent: Path, rank: int) -> None:
        if len(parent) > max_depth:
            return
        if parent not in children:
            children[parent] = draft.children(parent)
        tokens, probs = children[parent]
        if rank < len(tokens):
            share = 1 - sum(probs[:rank]) if draft.sampler else probs[rank]
            heapq.heappush(heap, (-path_probs[parent] * share, len(parent), parent, rank))

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
    """Ranked, also of the threshold form at the heap's last value, or drawn, also by a draft so
    sure that what elder siblings leave rounds to nothing. Where the draft has fewer ids than the
    tree nodes, a level may name fewer than N - 1, and what follows the least still belongs to the
    best."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        n_ids, n_rows, depth = rng.randint(2, 12), rng.randint(2, 40), rng.choice([1, 2, 3, 6])
        draft = FewIds(seed, n_ids)
        if seed % 4 == 0 and not is_drawn:
            draft = FewIds(seed, heat=1.0)  # peaked, and more ids than most trees have nodes
        top_p, temperature = rng.choice([1.0, 0.8]), rng.choice([None, 0.1, 0.6, 2.0])
        sampler = Drawing(Sampling(1.0, top_p, draft_temperature=temperature), draft, seed)
        draft.sampler = sampler if is_drawn else None
        tree = grow(DySpec(N=n_rows, D_max=depth).make_rule(), ROOT, draft, 127)
        heap = heap_tree(draft, n_rows, depth)
        sure = {path for path, value in heap.items() if value > 1e-6}  # whatever float32 rounds
        assert sure <= set(paths(tree)) <= set(heap), f"case {seed}"
        assert draft.n_calls <= depth, "one pass a level"
        assert_well_formed(tree)
        if not is_drawn:
            least = min(heap.values()) * (1 - 1e-5)
            above = DySpec(N=64, t=least, D_max=depth, exact=False).make_rule()
            assert sorted(paths(grow(above, ROOT, draft, 127))) == sorted(heap)
        n_deep = sum(len(path) > 2 for path in heap)
        is_scarce, is_full = n_ids < n_rows - 1, len(heap) == n_rows
        seen["a level is not enough"] += is_scarce and n_deep > 0
        seen["every row is used"] += is_scarce and is_full
        seen["nodes lack"] += is_scarce and not is_full
        seen["a level is enough"] += n_deep == 0 and is_full
    assert min(seen.values()) >= 10, f"the cases have become too tame: {seen}"


@pytest.mark.parametrize("settings", [DySpec(N=12, D_max=2), OptTree(N=12, D_max=2, delta=0.0)])
@pytest.mark.parametrize("row", [1, 2])
def test_broken_logits_end_only_their_own_branch(settings: DySpec | OptTree, row: int) -> None:
    """NaN sorts above every number; it is not among the best values."""
    above = paths(grow(settings.make_rule(), ROOT, FakeDraft(1), 127))[row]
    broken = FakeDraft(1).logits(above)
    broken[3] = math.nan
    tree = grow(settings.make_rule(), ROOT, FakeDraft(1, {above: broken}), 127)
    whole = heap_tree(FewIds(1, heat=1.0), 1 + 32 + 32**2, 2)
    rest = [path for path in whole if path == above or path[: len(above)] != above]
    rest.sort(key=whole.get, reverse=True)
    assert sorted(paths(tree)) == sorted(rest[:12])


def test_equal_values_do_not_use_up_the_row_budget() -> None:
    """Calibrated values are often equal. Were all of them added, the budget would cut off rows by
    what was drawn."""
    rule = DySpecRule(DySpec(N=5, D_max=5))
    n_added = []
    for depth, n in enumerate((1, 4, 4)):
        equal = numpy.full((n, 4), -1.0, numpy.float32)
        tokens = numpy.arange(4)[None].repeat(n, axis=0)
        level = DrawnLevel(depth, tokens, equal, equal, equal, lambda: numpy.ones(1))
        n_added.append(int(added(level, rule.add_gates(level)).sum()))
    assert n_added == [4, 0, 0]
