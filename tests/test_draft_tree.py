"""Tests that grow, level by level, builds the tree of the paper's Algorithm 1, node for node.

The oracle is a literal transcription of DRAFTTREE (Appendix D): a queue, one node at a time, plain
Python. It differs in two points: the root is the pending token (p = 1, d = 0), and a child with
p < tau is neither added nor counted. Both use a draft whose logits depend only on a node's path.

    python -m pytest tests/test_draft_tree.py
"""

import math
import random
from collections import Counter, deque
from dataclasses import replace
from zlib import crc32

import numpy
import pytest
import torch
from conftest import grow, random_settings, top_k
from torch import Tensor

from draft_tree import (
    Candidates,
    DynaTree,
    DynaTreeRule,
    Gates,
    Level,
    Settings,
    Tree,
)
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.drafting import DRAFTING
from dynatree_lab.methods.rules import MethodRule
from dynatree_lab.methods.sampler import DrawingSampler, Sampling
from dynatree_lab.methods.static import Chain, ConfidentChain, Fixed

VOCAB = 32
ROOT = 7

Path = tuple[int, ...]  # tokens from the root on


class FakeDraft:
    """A draft whose logits depend only on the path. They are peaked below some, flat below others.

    It finds a row's path by the parents that grow gives it, so a wrong parent gives other logits.
    """

    def __init__(
        self,
        seed: int,
        changed: dict[Path, Tensor] | None = None,
        sampler: DrawingSampler | None = None,
    ):
        """changed: other logits for some paths. sampler: draws all candidates; without one they
        are the top k."""
        self.seed = seed
        self.changed = changed or {}
        self.sampler = sampler
        self.level: list[Path] = []  # the rows of the last call
        self.ran: list[Path] = []  # the rows of all calls
        self.n_calls = 0
        self.probs: list[Tensor] = []  # of all rows, as in dynatree_lab.methods.drawn.DrawnDrafter

    def logits(self, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(repr((self.seed, path)).encode()))
        heat = 12 * torch.rand(1, generator=generator)
        logits = heat * torch.randn(VOCAB, generator=generator)
        return self.changed.get(path, logits)

    def __call__(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        above = [()]
        if parents is not None:
            above = [self.level[parent] for parent in parents]
        self.level = []
        for path, token in zip(above, tokens, strict=True):
            self.level.append(path + (token,))
        self.ran += self.level
        self.n_calls += 1
        logits = torch.stack([self.logits(path) for path in self.level])  # [n, V]
        if self.sampler:
            probs = self.level_probs = self.sampler.draft_distribution(logits)
            self.probs.extend(probs)
            return self.sampler.propose(probs, logits.shape[1])
        return top_k(logits, k)


def is_expandable(s: DynaTree, depth: int, p: float) -> bool:
    """Whether a row may get children (lines 17 to 25)."""
    if not s.adapt_depth:
        return depth < s.D0
    if depth >= s.D_max or p < s.rho_stop:
        return False
    return depth < s.D0 or p >= s.rho_deep


def branching_factor(s: DynaTree, confidence: float) -> int:
    """Return the limit of a row's children (line 27)."""
    if not s.adapt_breadth:
        return s.B_mid
    if confidence >= s.tau_h:
        return s.B_min
    return s.B_max if confidence < s.tau_l else s.B_mid


def run_algorithm_1(s: DynaTree, draft: FakeDraft, max_depth: int) -> Tree:
    """Return the tree of lines 11 to 30."""
    tree = Tree.from_root(ROOT)
    frontier = deque([0])
    while frontier:
        row = frontier.popleft()
        depth, above = tree.depths[row], tree.path_logprobs[row]
        if depth >= max_depth or not is_expandable(s, depth, math.exp(above)):
            continue
        logprobs = torch.log_softmax(draft.logits(paths(tree)[row]), dim=-1)
        n_children = branching_factor(s, math.exp(logprobs.max()))
        for token in logprobs.argsort(descending=True)[:n_children].tolist():
            logprob = above + logprobs[token]  # float32, as in grow: rounding may cross a threshold
            is_pruned = s.prune and math.exp(logprob) < s.tau
            if not is_pruned and len(tree) < s.N_max:
                frontier.append(len(tree))
                tree.add(token, row, float(logprob))
    return tree


def paths(tree: Tree) -> list[Path]:
    """Return each row's tokens from the root on."""
    found: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        above = ()
        if parent >= 0:
            above = found[parent]
        found.append(above + (token,))
    return found


def assert_same(tree: Tree, expected: Tree) -> None:
    """Check that a tree is the oracle's, row for row."""
    assert tree.tokens == expected.tokens and tree.parents == expected.parents
    assert tree.depths == expected.depths
    assert tree.path_logprobs == pytest.approx(expected.path_logprobs, rel=1e-5, abs=1e-5)


def random_case(seed: int) -> tuple[DynaTree, FakeDraft, int]:
    """Return settings, a draft, and the caller's depth limit."""
    rng = random.Random(seed)
    settings = replace(random_settings("dynatree", rng), calibrate=False, costs="off", history=True)
    max_depth = rng.choice([0, 1, 2, 3, 4, 127, 127, 127])
    return settings, FakeDraft(seed), max_depth


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


def assert_slots_follow_the_runs(tree: Tree, ran: list[Path]) -> None:
    """Check that slots number the rows in the order of their runs, and that parents run first."""
    rows = paths(tree)
    slots = {path: slot for slot, path in enumerate(ran)}
    assert len(slots) == len(ran)  # nothing ran twice
    assert set(ran) <= set(rows)
    assert tree.draft_slots == [slots.get(path, -1) for path in rows]
    assert all(path == (ROOT,) or path[:-1] in slots for path in ran)


def test_grow_draws_the_tree_of_algorithm_1() -> None:
    seen: Counter[str] = Counter()
    for seed in range(600):
        settings, draft, max_depth = random_case(seed)
        tree = grow(settings.make_rule(), ROOT, draft, max_depth)
        assert_same(tree, run_algorithm_1(settings, draft, max_depth))
        assert_well_formed(tree)
        assert_slots_follow_the_runs(tree, draft.ran)
        assert draft.n_calls <= min(max_depth, settings.D_max, settings.N_max - 1)
        seen["only the root"] += len(tree) == 1 < settings.N_max and max_depth > 0
        seen["full"] += len(tree) == settings.N_max > 1
        seen["deeper than D0"] += settings.adapt_depth and tree.depths[-1] > settings.D0
        seen["as deep as the caller allows"] += 0 < tree.depths[-1] == max_depth < settings.D_max
    assert min(seen.values()) >= 10, f"some kind of case is too rare: {seen}"


def test_fixed_and_chain_are_algorithm_1_without_its_adaptive_parts() -> None:
    """Check fixed, with B children for every node above depth D, and the draft's greedy chain."""
    for seed in range(150):
        s, draft, max_depth = random_case(seed)
        static = replace(s, adapt_breadth=False, adapt_depth=False, prune=True)
        fixed = Fixed(D=s.D0, B=s.B_mid, tau=s.tau, N_max=s.N_max)
        expected = run_algorithm_1(static, draft, max_depth)
        assert_same(grow(fixed.make_rule(), ROOT, draft, max_depth), expected)
        single = replace(static, B_min=1, B_mid=1, prune=False, N_max=128)
        expected = run_algorithm_1(single, draft, max_depth)
        assert_same(grow(Chain(K=s.D0).make_rule(), ROOT, draft, max_depth), expected)


class HalfHalfDraft(FakeDraft):
    """A draft with two tokens of probability 0.5, exact in float32."""

    def logits(self, path: Path) -> Tensor:
        logits = torch.full((VOCAB,), -math.inf)
        logits[:2] = 0.0
        return logits


@pytest.mark.parametrize(
    ("settings", "n_rows"),
    [
        (Fixed(D=3, B=2, tau=0.25), 1 + 2 + 4),
        (DynaTree(tau=0.25), 1 + 2 + 4),
        (DynaTree(B_min=1, tau_h=0.5, D0=2), 1 + 1 + 1),
        (DynaTree(B_mid=1, B_max=2, tau_l=0.5, D0=2), 1 + 1 + 1),
        (DynaTree(tau=0.0, rho_stop=0.25), 1 + 2 + 4 + 8),
        (DynaTree(tau=0.0, D0=1, rho_deep=0.25), 1 + 2 + 4 + 8),
        (DynaTree(B_mid=4, B_max=4, D0=2, prune=False), 1 + 2 + 4),
        (Fixed(D=2, B=4, tau=0.0), 1 + 2 + 4),
        (ConfidentChain(K=6, p_min=0.5), 1 + 6),
        (ConfidentChain(K=6, p_min=0.51), 1 + 1),
    ],
)
def test_at_its_threshold_a_candidate_passes_but_never_at_0(
    settings: Settings, n_rows: int
) -> None:
    """Check the paper's bounds: p >= tau, rho_stop, rho_deep; c >= tau_h, c >= tau_l for B_mid."""
    assert len(grow(settings.make_rule(), ROOT, HalfHalfDraft(0), 127)) == n_rows


class TernaryRule(MethodRule):
    """A rule, as of a fork, that adds all three candidates of every row."""


def test_of_what_is_drafted_the_best_or_the_first_are_kept() -> None:
    """Check which rows are verified. Tests of exactness cannot: the text is right for any tree."""
    cut = grow(TernaryRule(3, 3, max_rows=8), ROOT, FakeDraft(2), 9)
    best = grow(TernaryRule(3, 3, max_rows=40, max_verified=8), ROOT, FakeDraft(2), 9)
    every = grow(TernaryRule(3, 3, max_rows=40), ROOT, FakeDraft(2), 9)
    likeliest = torch.tensor(every.path_logprobs).topk(8).indices.tolist()
    assert paths(cut) == paths(every)[:8]
    assert paths(best) == [paths(every)[row] for row in sorted(likeliest)] != paths(cut)
    slots = dict(zip(paths(every), every.draft_slots, strict=True))
    assert best.draft_slots == [slots[path] for path in paths(best)]


@pytest.mark.parametrize("gate", [numpy.ones((1, 3), bool), numpy.ones((3, 3)), None], ids=repr)
def test_an_invalid_gate_is_an_error(gate: object) -> None:
    """Check also a shape that broadcasts: it would let some candidates pass unchecked."""

    class Gated(TernaryRule):
        def add_gates(self, level: Level) -> Gates:
            return {"fine": True, "mine": gate if level.row_depth == 1 else True}

    with pytest.raises(ValueError, match="gate 'mine'"):
        grow(Gated(3, 3, max_rows=40), ROOT, FakeDraft(2), 127)


WIDE = DynaTree(N_max=128, tau=0.0, rho_stop=0.0, rho_deep=0.01, D0=3, D_max=5)
ALL_IDS = slice(None)


@pytest.mark.parametrize("settings", [Chain(K=4), Fixed(D=3, B=3, tau=0.0), WIDE])
@pytest.mark.parametrize(("ids", "value"), [(3, math.nan), (3, math.inf), (ALL_IDS, -math.inf)])
def test_broken_logits_end_only_their_own_branch(
    settings: Settings, ids: int | slice, value: float
) -> None:
    """Check the other branches. topk ranks NaN first, so a broken row looks very confident."""
    whole = paths(grow(settings.make_rule(), ROOT, FakeDraft(1), 127))
    above = whole[1]  # the path with broken logits
    broken = FakeDraft(1).logits(above)
    broken[ids] = value
    tree = grow(settings.make_rule(), ROOT, FakeDraft(1, {above: broken}), 127)
    rest = [path for path in whole if path == above or path[: len(above)] != above]
    assert len(rest) < len(whole)  # the broken row has children
    assert paths(tree) == rest
    assert_well_formed(tree)


@pytest.mark.parametrize("is_drawn", [False, True], ids=["top k", "drawn"])
def test_confidence_is_0_where_the_draft_overflowed(is_drawn: bool) -> None:
    """Check top-k and drawn candidates. It was once NaN, which a rule could not round up."""
    found = []

    class ConfidenceRecorder(MethodRule):
        def add_gates(self, level: Level) -> Gates:
            found.append(level.confidence)
            return {}

    sampler = Sampling(1.0).sampler(torch.device("cpu")) if is_drawn else None
    broken = FakeDraft(1).logits((ROOT,)).fill_(math.nan)
    for changed in ({}, {(ROOT,): broken}):
        grow(ConfidenceRecorder(2, 1, 3), ROOT, FakeDraft(1, changed, sampler), 1)
    assert 0 < found[0] <= 1 and found[1] == 0


def moved_thresholds(rule: DynaTreeRule) -> dict[str, float]:
    """Return the current values of the thresholds that history moves."""
    now = rule.current
    return {"D0": now.D0, "tau_h": now.tau_h, "rho_deep": now.rho_deep}


# Depth ratio (accepted / depth) of one tree, which is the mean if W is 1
HIGH = 1.0  # above 0.8
LOW = 0.0  # below 0.6


def record(rule: DynaTreeRule, ratio: float) -> None:
    """Adapt the rule to a chain of ten nodes, of which this share was accepted."""
    tree = Tree.from_root(ROOT)
    for row in range(10):
        tree.add(ROOT, row, 0.0)
    rule.adapt(tree, list(range(1 + round(10 * ratio))))


# A setting, its initial value, and its value after a high and after a low mean. The last two of
# each setting start outside its bounds; they stay there, or move in the right direction.
MOVES = [
    ("D0", 5, 6, 4),
    ("D0", 7, 7, 6),
    ("D0", 2, 3, 2),
    ("D0", 1, 2, 1),
    ("D0", 8, 8, 7),
    ("tau_h", 0.9, 0.85, 0.95),
    ("tau_h", 0.93, 0.88, 0.95),
    ("tau_h", 0.52, 0.5, 0.57),
    ("tau_h", 0.97, 0.92, 0.97),
    ("tau_h", 0.45, 0.45, 0.5),
    ("rho_deep", 0.5, 0.45, 0.55),
    ("rho_deep", 0.78, 0.73, 0.8),
    ("rho_deep", 0.32, 0.3, 0.37),
    ("rho_deep", 0.9, 0.85, 0.9),
    ("rho_deep", 0.2, 0.2, 0.25),
]


@pytest.mark.parametrize(("name", "start", "after_high", "after_low"), MOVES)
def test_history_moves_within_its_bounds(
    name: str, start: float, after_high: float, after_low: float
) -> None:
    for step, expected in ((HIGH, after_high), (LOW, after_low)):
        rule = DynaTree(**{name: start}, W=1).make_rule()
        record(rule, step)
        assert moved_thresholds(rule)[name] == pytest.approx(expected)
        rule = DynaTree(**{name: start}, W=1, history=False).make_rule()
        record(rule, step)
        assert moved_thresholds(rule)[name] == start


@pytest.mark.parametrize("W", [1, 4, 10])
def test_history_looks_at_exactly_the_last_w_iterations(W: int) -> None:
    """Check that a mean from 0.6 to 0.8 moves nothing. With 3 of 5 accepted ten times, the sum was
    once 5.999999999999999, so the mean was below 0.6."""
    rng = random.Random(W)
    D0 = 60  # far from its bounds
    rule = DynaTree(D0=D0, D_max=127, W=W).make_rule()
    history = []
    for i in range(200):
        # In long stretches of one kind, because the mean of a mixture stays in the middle
        accepted = rng.choice([[0, 1, 6], [6, 7, 8], [9, 10], [8], [6]][i // 20 % 5])  # of 10
        history.append(accepted)
        record(rule, accepted / 10)
        if len(history) >= W:
            total = sum(history[-W:])
            D0 += (total > 8 * W) - (total < 6 * W)
        assert moved_thresholds(rule)["D0"] == D0, f"iteration {i}"


@pytest.mark.parametrize(("tau_l", "rho_stop"), [(0.62, 0.41), (0.5, 0.3)])
def test_history_keeps_the_thresholds_in_order(tau_l: float, rho_stop: float) -> None:
    """Check also where the bounds of tau_h and rho_deep, 0.5 and 0.3, would make two equal."""
    rule = DynaTree(tau_l=tau_l, tau_h=0.7, rho_stop=rho_stop, rho_deep=0.5, W=1).make_rule()
    for _ in range(10):
        record(rule, HIGH)
        assert tau_l < rule.current.tau_h <= 0.7
        assert rho_stop < rule.current.rho_deep <= 0.5


def test_the_next_tree_is_that_of_the_moved_thresholds() -> None:
    n_changed = [0, 0]
    for seed in range(60):
        settings, draft, _ = random_case(seed)
        rule = replace(settings, W=1).make_rule()
        before = grow(rule, ROOT, draft, 127)
        for _ in range(4):
            record(rule, HIGH if seed % 2 else LOW)
        after = grow(rule, ROOT, draft, 127)
        as_moved = replace(settings, **moved_thresholds(rule))
        assert_same(after, run_algorithm_1(as_moved, draft, 127))
        n_changed[seed % 2] += paths(before) != paths(after)
    assert min(n_changed) >= 5, n_changed


@pytest.mark.parametrize("base", [*DRAFTING, "graft"])
def test_a_tree_remembers_nothing_of_the_one_before(base: str) -> None:
    """Check that a draft gives the same tree again after the tree of another draft."""
    rule = METHODS[base]().make_rule()
    first, other, again = (paths(grow(rule, ROOT, FakeDraft(seed), 127)) for seed in (1, 2, 1))
    assert other != first == again
