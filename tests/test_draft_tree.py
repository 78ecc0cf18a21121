"""Tests that grow, level by level, builds the tree of the paper's Algorithm 1, node for node.

The oracle is a literal transcription of DRAFTTREE (Appendix D): a queue, one node at a time, plain
Python. It differs in two points: the root is the pending token (p = 1, d = 0), and a child with
p < tau is neither added nor counted. Both use a draft whose logits depend only on a node's path.

    python -m pytest tests/test_draft_tree.py
"""

import math
import random
import re
from collections import Counter, deque
from dataclasses import replace

import numpy
import pytest
import torch
from trees import (
    ROOT,
    VOCAB,
    FakeDraft,
    HalfHalfDraft,
    Path,
    assert_well_formed,
    make_tree,
    paths,
    random_settings,
)

from draft_tree import Candidates, DynaTree, DynaTreeRule, Gates, Level, Rule, Tree, draw, grow


def grown(rule: Rule, draft: FakeDraft, max_depth: int = 127) -> Tree:
    return grow(rule, ROOT, draft, max_depth, VOCAB)


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


def assert_same(tree: Tree, expected: Tree) -> None:
    """Check that a tree is the oracle's, row for row."""
    assert tree.tokens == expected.tokens and tree.parents == expected.parents
    assert tree.depths == expected.depths
    assert tree.path_logprobs == pytest.approx(expected.path_logprobs, rel=1e-5, abs=1e-5)


def random_case(seed: int) -> tuple[DynaTree, FakeDraft, int]:
    """Return settings, a draft, and the caller's depth limit."""
    rng = random.Random(seed)
    settings = replace(random_settings(DynaTree, rng), history=True)
    max_depth = rng.choice([0, 1, 2, 3, 4, 127, 127, 127])
    return settings, FakeDraft(seed), max_depth


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
        tree = grown(settings.make_rule(), draft, max_depth)
        assert_same(tree, run_algorithm_1(settings, draft, max_depth))
        assert_well_formed(tree)
        assert_slots_follow_the_runs(tree, draft.ran)
        assert draft.n_calls <= min(max_depth, settings.D_max, settings.N_max - 1)
        seen["only the root"] += len(tree) == 1 < settings.N_max and max_depth > 0
        seen["full"] += len(tree) == settings.N_max > 1
        seen["deeper than D0"] += settings.adapt_depth and tree.depths[-1] > settings.D0
        seen["as deep as the caller allows"] += 0 < tree.depths[-1] == max_depth < settings.D_max
    assert min(seen.values()) >= 10, f"some kind of case is too rare: {seen}"


FULL = {"adapt_breadth": False, "adapt_depth": False, "history": False}  # B_mid children, depth D0
AT_THRESHOLDS = [  # settings, rows of the tree
    (DynaTree(D0=3, tau=0.25, **FULL), 1 + 2 + 4),
    (DynaTree(D0=2, B_mid=4, tau=0.0, **FULL), 1 + 2 + 4),
    (DynaTree(tau=0.25), 1 + 2 + 4),
    (DynaTree(B_min=1, tau_h=0.5, D0=2), 1 + 1 + 1),
    (DynaTree(B_mid=1, B_max=2, tau_l=0.5, D0=2), 1 + 1 + 1),
    (DynaTree(tau=0.0, rho_stop=0.25), 1 + 2 + 4 + 8),
    (DynaTree(tau=0.0, D0=1, rho_deep=0.25), 1 + 2 + 4 + 8),
    (DynaTree(B_mid=4, B_max=4, D0=2, prune=False), 1 + 2 + 4),
]


@pytest.mark.parametrize(("settings", "n_rows"), AT_THRESHOLDS)
def test_at_its_threshold_a_candidate_passes_but_never_at_0(
    settings: DynaTree, n_rows: int
) -> None:
    """Check the paper's bounds: p >= tau, rho_stop, rho_deep; c >= tau_h, c >= tau_l for B_mid."""
    assert len(grown(settings.make_rule(), HalfHalfDraft(0))) == n_rows


def test_the_first_rows_in_breadth_first_order_are_kept() -> None:
    """Check which rows are verified. Tests of exactness cannot: the text is right for any tree."""
    every = grown(Rule(3, 3, max_rows=40), FakeDraft(2))
    assert len(every) == 40 and paths(grown(Rule(3, 3, 8), FakeDraft(2))) == paths(every)[:8]


@pytest.mark.parametrize("gate", [numpy.ones((1, 3), bool), numpy.ones((3, 3)), None], ids=repr)
def test_an_invalid_gate_is_an_error(gate: object) -> None:
    """Check also a shape that broadcasts: it would let some candidates pass unchecked."""

    class Gated(Rule):
        def add_gates(self, level: Level) -> Gates:
            return {"fine": True, "mine": gate if level.row_depth == 1 else True}

    with pytest.raises(ValueError, match="gate 'mine'"):
        grown(Gated(3, 3, max_rows=40), FakeDraft(2))


IDS, LOGPROBS = numpy.zeros((1, 2), numpy.int64), numpy.zeros((1, 2), numpy.float32)
INVALID_CANDIDATES = [
    (Candidates(IDS, LOGPROBS[:, :1]), "tokens [1, 2] and logprobs [1, 1], both must be [1, k]"),
    (Candidates(IDS[[0, 0]], LOGPROBS[[0, 0]]), "tokens [2, 2] and logprobs [2, 2], both must be"),
    (Candidates(IDS[:, :0], LOGPROBS[:, :0]), "tokens [1, 0] and logprobs [1, 0], both must be"),
    (Candidates(IDS[0], LOGPROBS[0]), "tokens [2] and logprobs [2], both must be [1, k]"),
    (Candidates(IDS + VOCAB, LOGPROBS), "outside the target's ids, 0 to 31"),
    (Candidates(IDS - 1, LOGPROBS), "outside the target's ids, 0 to 31"),
    (
        Candidates([[0]], [[0.0]]),
        "a drafter gave list and list, it must return Candidates of numpy",
    ),
    (Candidates(IDS, torch.zeros(1, 2)), "a drafter gave ndarray and Tensor, it must return"),
    (torch.zeros(1, 2), "a drafter gave Tensor, it must return Candidates of numpy arrays"),
    (None, "a drafter gave NoneType, it must return Candidates of numpy arrays"),
]


@pytest.mark.parametrize(("found", "message"), INVALID_CANDIDATES)
def test_invalid_candidates_are_an_error(found: Candidates, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        grown(DynaTree().make_rule(), lambda tree, rows, k: found)


def test_a_log_probability_above_0_counts_as_0() -> None:
    """Check what rounding may give. It once made a path likelier than its parent's."""

    def draft(tree: Tree, rows: list[int], k: int) -> Candidates:
        logprobs = numpy.array([[1e-7, -1.0]], numpy.float32).repeat(len(rows), axis=0)
        return Candidates(numpy.arange(2)[None].repeat(len(rows), axis=0), logprobs)

    tree = grown(Rule(2, 2, 9), draft)
    assert tree.path_logprobs == [0.0, 0.0, -1.0, 0.0, -1.0, -1.0, -2.0]


WIDE = DynaTree(N_max=128, tau=0.0, rho_stop=0.0, rho_deep=0.01, D0=3, D_max=5)
ALL_IDS = slice(None)


@pytest.mark.parametrize("settings", [DynaTree(D0=4, B_mid=1, **FULL), WIDE], ids=["chain", "wide"])
@pytest.mark.parametrize(("ids", "value"), [(3, math.nan), (3, math.inf), (ALL_IDS, -math.inf)])
def test_broken_logits_end_only_their_own_branch(
    settings: DynaTree, ids: int | slice, value: float
) -> None:
    """Check the other branches. topk ranks NaN first, so a broken row looks very confident."""
    whole = paths(grown(settings.make_rule(), FakeDraft(1)))
    above = whole[1]  # the path with broken logits
    broken = FakeDraft(1).logits(above)
    broken[ids] = value
    tree = grown(settings.make_rule(), FakeDraft(1, {above: broken}))
    rest = [path for path in whole if path == above or path[: len(above)] != above]
    assert len(rest) < len(whole)  # the broken row has children
    assert paths(tree) == rest
    assert_well_formed(tree)


WRONG_SETTINGS = [
    ({"tau": "0.1"}, "tau is '0.1', it must be of type float"),
    ({"D0": 5.0}, "D0 is 5.0, it must be of type int"),
    ({"history": 1}, "history is 1, it must be of type bool"),
    ({"tau": math.nan}, "tau is nan, it must be from 0.0 to 1.0"),
    ({"N_max": 0}, "N_max is 0, it must be from 1 to 1024"),
    ({"B_mid": 4}, "must have B_min <= B_mid <= B_max"),
    ({"D_max": 4}, "D0 <= D_max"),
    ({"tau_l": 0.9}, "tau_l < tau_h"),
    ({"rho_stop": 0.5}, "rho_stop < rho_deep"),
]


@pytest.mark.parametrize(("values", "message"), WRONG_SETTINGS)
def test_settings_are_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DynaTree(**values)


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
    for seed in range(150):
        settings, draft, _ = random_case(seed)
        rule = replace(settings, W=1).make_rule()
        before = grown(rule, draft)
        for _ in range(4):
            record(rule, HIGH if seed % 2 else LOW)
        after = grown(rule, draft)
        as_moved = replace(settings, **moved_thresholds(rule))
        assert_same(after, run_algorithm_1(as_moved, draft, 127))
        n_changed[seed % 2] += paths(before) != paths(after)
    assert min(n_changed) >= 5, n_changed


def test_a_rule_remembers_no_tree() -> None:
    """Check that a draft gives the same tree again after the tree of another draft."""
    rule = DynaTree().make_rule()
    first, other, again = (paths(grown(rule, FakeDraft(seed))) for seed in (1, 2, 1))
    assert other != first == again


def test_a_drawn_tree_has_a_line_per_row() -> None:
    words = ["the", "cat", "dog", "sat", "ran", "ran"]
    tree = make_tree(list(range(6)), [-1, 0, 0, 1, 1, 2])
    assert draw(tree, words.__getitem__).splitlines() == [
        "the",
        "|-- cat",
        "|   |-- sat",
        "|   `-- ran",
        "`-- dog",
        "    `-- ran",
    ]
