"""Tests of recycle and graft: table, merging, tails, checkpoints, budget."""

import math
import random
from collections import Counter
from dataclasses import fields, replace

import numpy
import pytest
import torch
from fast import generate, pretend_capture, random_model
from growing import RuleRecorder, grow, random_settings
from trees import ROOT, FakeDraft, Path, make_tree, path_to, paths

from draft_tree import Tree
from dynatree_lab.methods.deagle import Deagle
from dynatree_lab.methods.drafting import DRAFTING
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.retrieval import (
    TINY_PAIR_SUCCESSOR_PROBS,
    Graft,
    Recycle,
    SuccessorTable,
    parse_base,
    parse_checkpoints,
    parse_successor_probs,
)
from dynatree_lab.methods.rules import MixedTree, are_retrieved
from dynatree_lab.methods.sequoia import Sequoia
from dynatree_lab.methods.settings import needs_of
from dynatree_lab.methods.static import Chain

RANK_PROBS = parse_successor_probs(TINY_PAIR_SUCCESSOR_PROBS)


def full_table(n_ids: int = 32, seed: int = 0, k: int = len(RANK_PROBS)) -> SuccessorTable:
    """Return a table in which every token has k different successors."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n_ids, n_ids, generator=generator)
    return dict(enumerate(logits.topk(k).indices.tolist()))


def test_the_table_has_the_last_successors_of_each_token() -> None:
    rule = Recycle().make_rule()
    best = numpy.array([[5, 6], [6, 7], [7, 8], [8, 9]])
    rule.observe_target([3, 1, 3, 2], best)
    assert rule.table == {1: [6, 7], 2: [8, 9], 3: [7, 8]}
    rule.observe_target([1], best[:1])
    assert rule.table == {1: [5, 6], 2: [8, 9], 3: [7, 8]}


def agree_at_the_root(table: SuccessorTable, token: int) -> None:
    """Make this token the first successor of ROOT in the table."""
    others = [other for other in table[ROOT] if other != token]
    table[ROOT] = [token, *others][: len(RANK_PROBS)]


def assert_contains(merged: Tree, drafted: Tree) -> None:
    """Check that drafted rows are there in order, with their slots, and others are retrieved."""
    found = paths(merged)
    kept = [path for path, is_new in zip(found, are_retrieved(merged), strict=True) if not is_new]
    assert kept == paths(drafted)
    slots = dict(zip(paths(drafted), drafted.draft_slots, strict=True))
    assert merged.draft_slots == [slots.get(path, -1) for path in found]


def assert_in_order(merged: Tree) -> None:
    """Check that rows are ordered by depth, and no grafted row is before a drafted sibling."""
    depths = [len(path) - 1 for path in paths(merged)]
    assert merged.depths == depths == sorted(depths)
    for row, parent in enumerate(merged.parents):
        if not are_retrieved(merged)[row]:
            earlier_siblings = [i for i in range(row) if merged.parents[i] == parent]
            assert not any(are_retrieved(merged)[i] for i in earlier_siblings)


def has_effect(settings: object, switch: str = "", needed: bool = True) -> bool:
    """Whether a setting that needs this value of a switch has an effect."""
    return not switch or getattr(settings, switch) == needed


@pytest.mark.parametrize("at", ["root", "tail"])
@pytest.mark.parametrize("name", DRAFTING)
def test_the_base_keeps_to_its_own_settings(name: str, at: str) -> None:
    """Check that the base has its own budgets and depth. The rest of graft's budget is grafted if
    the table has that many nodes."""
    rng = random.Random(name)
    for _ in range(10):
        own = random_settings(name, rng)
        drafted = grow(own.make_rule(), ROOT, FakeDraft(5), 127)
        needs = needs_of(type(own))  # without them a setting has no effect and is refused
        given = [f.name for f in fields(own) if has_effect(own, *needs.get(f.name, ()))]
        base = ":".join([name, *(f"{each}={getattr(own, each)}" for each in given)])
        rule = Graft(base=base, checkpoints="off", N=96, at=at).make_rule()
        rule.table = full_table()
        tree = grow(rule, ROOT, FakeDraft(5), 127)
        assert len(tree) == 96
        if Method(own).facts.max_verified > 1:  # one row alone would not be run
            assert_contains(tree, drafted)


def test_checkpoints_stop_the_drafting() -> None:
    """Check that drafting stops only at their depths, if the best path is below the threshold."""
    assert Graft(base="linear", graft=False).make_rule().facts.target_top_k == 0
    stopped_at = Counter()
    for seed in range(60):
        chain = grow(Chain(K=6).make_rule(), ROOT, FakeDraft(seed), 127)
        expected = 6
        for depth, threshold in ((4, 0.3), (2, 0.4)):
            if math.exp(chain.path_logprobs[depth]) < threshold:
                expected = depth
        rule = Graft(base="linear:K=6", checkpoints="2@0.4:4@0.3", N=7).make_rule()
        rule.table = full_table()
        draft = FakeDraft(seed)
        tree = grow(rule, ROOT, draft, 127)
        assert draft.n_calls == expected
        kept = [path for path in paths(tree) if path in paths(chain)]
        assert kept[: expected + 1] == paths(chain)[: expected + 1]  # that level is kept
        stopped_at[expected] += 1
    assert min(stopped_at[depth] for depth in (2, 4, 6)) >= 5, stopped_at


def test_checkpoints_and_bases_are_parsed() -> None:
    """Check also that a value in a base may contain colons."""
    assert parse_checkpoints("1@0.5:3@0.3:12@.25") == {1: 0.5, 3: 0.3, 12: 0.25}
    assert parse_checkpoints("off") == {}
    assert parse_base("deagle:k=2:N_max=5") == Deagle(k=2, N_max=5)
    assert parse_base("dynatree:history=off:tau = 0.2") == DRAFTING["dynatree"](
        history=False, tau=0.2
    )
    assert parse_base("sequoia:p=0.6:0.2:N=3") == Sequoia(p="0.6:0.2", N=3)


# Grafted nodes, below the root or below the ends of the branches.


def graft_literally(
    drafted: Tree, table: SuccessorTable, n_levels: int, at: str
) -> dict[Path, float]:
    """Return all paths that the table gives there, level by level, with log-probabilities."""
    offered = {}
    for row, top in enumerate(paths(drafted)):
        if row in drafted.parents if at == "tail" else row > 0:
            continue
        level = [(top, drafted.path_logprobs[row])]
        for _ in range(n_levels):
            below = []
            for path, logprob in level:
                for p, token in zip(RANK_PROBS, table.get(path[-1], []), strict=False):
                    below.append((path + (token,), logprob + math.log(p)))
            offered.update(below)
            level = below
    return offered


def assert_likeliest(
    tree: Tree, drafted: Tree, offered: dict[Path, float], n_rows: int
) -> set[Path]:
    """Check that the likeliest of the offered paths were added, up to n_rows. Return these."""
    added = set(paths(tree)) - set(paths(drafted))
    assert len(added) == min(n_rows - len(drafted), len(offered))
    assert len(set(paths(tree))) == len(tree)
    assert_contains(tree, drafted)
    assert_in_order(tree)
    if not added:
        return added
    for path, logprob in zip(paths(tree), tree.path_logprobs, strict=True):
        if path in added:
            assert logprob == pytest.approx(offered[path], abs=1e-4)
    lowest = min(offered[path] for path in added)
    for path in set(offered) - added:
        assert offered[path] <= lowest + 1e-4
    return added


@pytest.mark.parametrize("at", ["root", "tail"])
def test_the_likeliest_nodes_of_the_table_are_grafted(at: str) -> None:
    """Check that a drafted node is not grafted again; the next likeliest takes its place."""
    rng = random.Random(at)
    seen: Counter = Counter()
    for seed in range(150):
        n_drafted = rng.choice([1, 2, 5, 12, 40])
        n_rows = rng.randint(1, 40)
        levels = rng.randint(1, 5)
        max_depth = rng.randint(0, 7)
        base = f"fixed:D={rng.randint(1, 4)}:B={rng.randint(1, 3)}:tau=0.03:N_max={n_drafted}"
        settings = Graft(base=base, checkpoints="off", N=n_rows, D_max=levels, at=at)
        pruned = replace(settings, graft=False)
        drafted = grow(pruned.make_rule(), ROOT, FakeDraft(seed), max_depth)
        rule = settings.make_rule()
        rule.table = full_table(seed=seed, k=3)
        for token in rng.sample(range(32), rng.choice([0, 10, 31])):
            del rule.table[token]  # as if no pass had run this token
        if seed % 3 == 0 and len(drafted) > 1 and ROOT in rule.table:
            agree_at_the_root(rule.table, drafted.tokens[1])
        tree = grow(rule, ROOT, FakeDraft(seed), max_depth)
        found = graft_literally(drafted, rule.table, levels, at)
        new = {path: p for path, p in found.items() if path not in paths(drafted)}
        offered = {path: p for path, p in new.items() if len(path) - 1 <= max_depth}
        added = assert_likeliest(tree, drafted, offered, n_rows)
        n_left = n_rows - len(drafted)
        seen["full"] += len(added) == n_left > 0
        seen["not full"] += 0 < len(added) < n_left
        seen["merged"] += at == "tail" or (len(new) < len(found) and len(added) > 0)
        seen["too deep"] += at == "root" or (len(offered) < len(new) and len(added) > 0)
    assert min(seen.values()) >= 5, seen


def test_the_base_learns_from_its_own_nodes() -> None:
    """Check depth ratios. Once grafted levels counted as drafted, so a right draft seemed wrong."""
    rule = Graft(base="dynatree:D_max=2:D0=1", checkpoints="off", at="tail").make_rule()
    rule.table = full_table()
    tree = grow(rule, ROOT, FakeDraft(5), 127)
    drafted = [row for row in range(len(tree)) if not are_retrieved(tree)[row]]
    assert max(tree.depths) > 2 == max(tree.depths[row] for row in drafted)
    path = path_to(tree, drafted[-1])
    below = [row for row in range(len(tree)) if tree.parents[row] == path[-1]]
    assert are_retrieved(tree)[below[0]]
    for committed, ratio in ((path + below[:1], 1.0), (path[:2], 0.5), (path[:1], 0.0)):
        rule.adapt(tree, committed)
        assert rule.rule.rule.depth_ratios[-1] == ratio  # of the core's rule


@pytest.mark.parametrize("commit", ["keep", "rebuild"])
def test_the_table_reads_candidates_before_another_pass_overwrites_them(
    commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with passes of other shapes. Those of fixed shapes share one buffer of logits, which
    the additional pass of rebuild overwrites."""
    pretend_capture(monkeypatch)
    tables = []
    for is_shaped in (False, True):
        target = random_model(7)
        target.has_fixed_shapes = is_shaped
        settings = RuleRecorder(Recycle(N=8))
        steps = list(generate(target, None, [3, 1, 4, 1, 5], settings, 40, commit=commit))
        assert any(len(step.path) > 2 for step in steps)
        tables.append(settings.rules[-1].table)
    assert tables[0] == tables[1]


def test_each_token_has_as_many_successors_as_p_has_ranks() -> None:
    """Check two ranks. A second rank that is nearly as likely gives a bushier tree."""
    table = full_table(k=8)
    for p, n_below_root in (("0.5:0.4", 2), ("0.9:0.01", 1)):
        rule = Recycle(N=4, p=p).make_rule()
        assert rule.facts.target_top_k == 2
        rule.table = {token: best[:2] for token, best in table.items()}
        tree = grow(rule, ROOT, None, 127)
        assert tree.parents.count(0) == n_below_root and len(tree) == 4


def test_cost_gates_over_graft_learn_from_all_rows() -> None:
    """Check that drafted and grafted rows are recorded, because both take time."""
    rule = Method(Graft(), costs="learned").make_rule()
    recorded = []
    rule.tracker.record = lambda tokens, n_rows, *others: recorded.append(n_rows)
    rule.begin_tree(0, 9)
    tree = MixedTree.from_tree(make_tree([0, 1], [-1, 0]))
    for token in (2, 3):
        tree.add_retrieved(token, 0, -1.0)
    rule.adapt(tree, [0, 1])
    assert recorded == [4]
