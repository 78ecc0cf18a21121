"""recycle and graft: table, template, merging and refilling, tails, checkpoints, budget."""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy
import pytest
import torch
from conftest import TINY, Remembering, pretend_capture, random_model, ranked
from test_draft_tree import ROOT, FakeDraft, Path, assert_starts_anew, paths
from tokenizers import Tokenizer

from cli.metrics import measure
from draft_tree import Candidates, DynaTree, Gates, Level, Settings, Tree, grow, lone
from dynatree import generate
from engine.settings import setting, text
from gpt_neox import GPTNeoX
from methods.deagle import Deagle
from methods.drafting import DRAFTING
from methods.dyspec import DySpec
from methods.retrieval import (
    RANK_PROBS,
    Graft,
    GraftRule,
    Node,
    Recycle,
    SuccessorTable,
    parse_base,
    parse_checkpoints,
    template,
    unroll,
)
from methods.static import Alone, Chain, Fixed, StaticRule


def full_table(n_ids: int = 32, seed: int = 0) -> SuccessorTable:
    """Every token has successors, all different."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n_ids, n_ids, generator=generator)
    return dict(enumerate(logits.topk(len(RANK_PROBS)).indices.tolist()))


def successors(table: SuccessorTable, token: int) -> list[int]:
    """What the table knows after a token, best first."""
    return table.get(token, [])


def forget(table: SuccessorTable, tokens: list[int]) -> None:
    """As if they had never been read."""
    for token in tokens:
        table.pop(token, None)


def test_a_template_is_the_likeliest_tree_of_its_size() -> None:
    nodes = template(20, 4)
    assert nodes[0].depth == 0 and max(node.depth for node in nodes) <= 4
    probs = [1.0]
    children = set()
    for i, node in enumerate(nodes[1:], start=1):
        assert 0 <= node.parent < i
        assert node.depth == nodes[node.parent].depth + 1
        probs.append(probs[node.parent] * RANK_PROBS[node.rank])
        children.add((node.parent, node.rank))
    assert len(children) == 19  # no child twice
    assert [math.exp(node.logprob) for node in nodes] == pytest.approx(probs)
    level = [1.0]
    every = [1.0]  # each path of ranks down to depth 4
    for _ in range(4):
        level = [above * p for above in level for p in RANK_PROBS]
        every += level
    assert probs == pytest.approx(sorted(every, reverse=True)[:20])


def test_the_table_holds_the_last_reading_of_each_token() -> None:
    rule = Recycle().rule()
    best = numpy.array([[5, 6], [6, 7], [7, 8], [8, 9]])
    rule.read([3, 1, 3, 2], best)
    known = {token: successors(rule.table, token) for token in range(20)}
    assert {token: ids for token, ids in known.items() if ids} == {1: [6, 7], 2: [8, 9], 3: [7, 8]}
    rule.read([1], best[:1])
    assert successors(rule.table, 1) == [5, 6] and successors(rule.table, 2) == [8, 9]


def known_below(table: SuccessorTable, root: int, nodes: list[Node]) -> dict[int, int]:
    """The token of each node of the template that the table knows."""
    return {i: token for _, _, i, token in unroll(lone(root), table, 0, nodes, 99)}


def test_unrolling_follows_the_table() -> None:
    table = full_table()
    nodes = template(16, 4)
    for root in (3, 7):
        tokens = {0: root} | known_below(table, root, nodes)
        assert list(tokens) == list(range(16))  # every node, a parent before its children
        for i, node in enumerate(nodes[1:], start=1):
            assert tokens[i] == successors(table, tokens[node.parent])[node.rank]
    forget(table, [tokens[1]])  # nothing known of it, so nothing below it
    known = known_below(table, root, nodes)
    assert 1 in known
    below = [i for i, node in enumerate(nodes) if node.parent == 1]
    assert below and not set(below) & set(known)


def agree_at_the_root(table: SuccessorTable, token: int) -> None:
    """Let the table's best guess after ROOT be this token, and none of its others there."""
    others = [other for other in successors(table, ROOT) if other != token]
    table[ROOT] = [token, *others][: len(RANK_PROBS)]


def assert_holds(merged: Tree, drafted: Tree) -> None:
    """What was drafted is there, in its old order and with its old slots; the rest is retrieved."""
    found = paths(merged)
    kept = [path for path, is_new in zip(found, merged.are_retrieved, strict=True) if not is_new]
    assert kept == paths(drafted)
    slots = dict(zip(paths(drafted), drafted.draft_slots, strict=True))
    assert merged.draft_slots == [slots.get(path, -1) for path in found]


def assert_in_order(merged: Tree) -> None:
    """Rows by depth, each below its parent, and no grafted row before a drafted sibling."""
    found = paths(merged)
    depths = [len(path) - 1 for path in found]
    assert merged.depths == depths == sorted(depths)
    assert merged.depth == max(depths)
    for row in range(1, len(merged)):
        assert found[merged.parents[row]] == found[row][:-1]
        earlier_siblings = [i for i in range(row) if merged.parents[i] == merged.parents[row]]
        if not merged.are_retrieved[row]:
            assert not any(merged.are_retrieved[i] for i in earlier_siblings)


def test_a_grafted_token_merges_with_its_drafted_sibling_and_the_slot_is_refilled() -> None:
    """Drafted and table's trees share nodes; the budget is full all the same, nothing twice."""
    for seed in range(20):
        drafted = grow(Fixed(D=3, B=2, tau=0.0).rule(), ROOT, FakeDraft(seed), 127)
        rule = Graft(base="fixed:D=3:B=2:tau=0", checkpoints="off", N=30, D_max=5).rule()
        rule.table = full_table(seed=seed)
        agree_at_the_root(rule.table, drafted.tokens[1])
        merged = grow(rule, ROOT, FakeDraft(seed), 127)
        assert len(merged) == 30
        assert len(set(paths(merged))) == 30
        assert_holds(merged, drafted)
        assert_in_order(merged)


@pytest.mark.parametrize("at", ["root", "tail"])
@pytest.mark.parametrize("base", DRAFTING)
def test_the_budget_identity(base: str, at: str) -> None:
    """Retained + grafted is the budget whenever the table offers that many nodes."""
    for n_rows in (1, 2, 9, 24):
        rule = Graft(base=base, N=n_rows, at=at).rule()
        rule.table = full_table()
        tree = grow(rule, ROOT, FakeDraft(3), 127)
        assert len(tree) == n_rows
        assert len(grow(rule, ROOT, FakeDraft(3), 0)) == 1


NO_CHECKPOINTS = {"checkpoints": "off", "N": 32}


def test_the_base_keeps_to_its_own_settings() -> None:
    """Its budget while growing, the best of it that it keeps, and its depth are its own."""
    for base, own in (
        ("fixed:D=3:B=2:tau=0:N_max=9", Fixed(D=3, B=2, tau=0.0, N_max=9)),
        ("deagle:k=3:N_max=7:tau_S=0", Deagle(k=3, N_max=7, tau_S=0.0)),
        ("dyspec:N=12", DySpec(N=12)),
        ("linear:K=4", Chain(K=4)),
    ):
        own_tree = grow(own.rule(), ROOT, FakeDraft(5), 127)
        pruned = Graft(base=base, **NO_CHECKPOINTS, graft=False).rule()
        assert paths(grow(pruned, ROOT, FakeDraft(5), 127)) == paths(own_tree)
        for at in ("root", "tail"):
            rule = Graft(base=base, **NO_CHECKPOINTS, at=at).rule()
            assert rule.max_drafted == own.rule().max_drafted
            rule.table = full_table()
            tree = grow(rule, ROOT, FakeDraft(5), 127)
            assert len(tree) == 32
            assert_holds(tree, own_tree)


def test_a_smaller_budget_keeps_the_best_that_the_base_drafts() -> None:
    every = grow(Fixed(D=3, B=2, tau=0.0).rule(), ROOT, FakeDraft(5), 127)
    best = torch.tensor(every.path_logprobs).topk(6).indices.tolist()
    rule = Graft(base="fixed:D=3:B=2:tau=0", checkpoints="off", N=6, graft=False).rule()
    tree = grow(rule, ROOT, FakeDraft(5), 127)
    assert set(paths(tree)) == {paths(every)[row] for row in best}


def test_without_grafting_the_target_is_not_asked() -> None:
    target = random_model(0)
    draft = random_model(1)
    settings = Remembering(Graft(base="linear", graft=False))
    steps = list(generate(target, draft, [3, 1, 4, 1], settings, 40))
    (rule,) = settings.rules
    assert rule.n_read == 0
    assert not rule.table
    assert not any(any(step.tree.are_retrieved) for step in steps[1:])
    assert any(0 < len(step.tree) - 1 < 5 for step in steps[1:])  # a checkpoint stopped it


def test_nothing_known_means_nothing_grafted() -> None:
    rule = Recycle(N=8).rule()
    rule.read([1, 2], numpy.array([[5, 6, 7], [8, 2, 4]]))
    assert len(grow(rule, 9, None, 127)) == 1
    assert len(grow(rule, 1, None, 127)) > 1


def test_no_node_is_deeper_than_the_text_has_room() -> None:
    rule = Recycle(N=32, D_max=6).rule()
    rule.table = full_table()
    depths = [grow(rule, ROOT, None, room).depth for room in (0, 1, 2, 5, 99)]
    assert depths == [0, 1, 2, 5, 6]


def test_checkpoints_stop_the_drafting() -> None:
    """At their depths, and nowhere else, if the best path is below the threshold there."""
    stopped_at = Counter()
    for seed in range(60):
        chain = grow(Chain(K=6).rule(), ROOT, FakeDraft(seed), 127)
        expected = 6
        for depth, threshold in ((4, 0.3), (2, 0.4)):
            if math.exp(chain.path_logprobs[depth]) < threshold:
                expected = depth
        rule = Graft(base="linear:K=6", checkpoints="2@0.4:4@0.3", N=7).rule()
        rule.table = full_table()
        draft = FakeDraft(seed)
        tree = grow(rule, ROOT, draft, 127)
        assert draft.n_calls == expected
        kept = [path for path in paths(tree) if path in paths(chain)]
        assert kept[: expected + 1] == paths(chain)[: expected + 1]  # that level is kept itself
        stopped_at[expected] += 1
    assert min(stopped_at[depth] for depth in (2, 4, 6)) >= 5, stopped_at


def test_the_best_path_decides_not_every_path() -> None:
    """One likely path lets the whole level go on."""
    drafted = grow(Fixed(D=2, B=2, tau=0.0).rule(), ROOT, FakeDraft(1), 127)
    best, other = map(math.exp, drafted.path_logprobs[1:3])
    checkpoints = f"1@{(best + other) / 2}"
    rule = Graft(base="fixed:D=2:B=2:tau=0", checkpoints=checkpoints, graft=False).rule()
    assert paths(grow(rule, ROOT, FakeDraft(1), 127)) == paths(drafted)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"checkpoints": "1"}, "checkpoints=1: '1' is not DEPTH@P such as 1@0.5"),
        ({"checkpoints": ""}, "'' is not DEPTH@P"),
        ({"checkpoints": "1@0.5:off"}, "'off' is not DEPTH@P"),
        ({"checkpoints": "0@0.5"}, "depths are 1 or more"),
        ({"checkpoints": "1@1.5"}, "probabilities from 0 to 1"),
        ({"checkpoints": "1@nan"}, "probabilities from 0 to 1"),
        ({"base": "recycle"}, "base=recycle: no drafting method is called 'recycle'; there are"),
        ({"base": "linear:K"}, "no drafting method is called 'linear:K'"),
        ({"base": "linear:K=x"}, "base=linear:K=x: K=x: K takes a value of type int"),
        ({"base": "linear:B=2"}, "B=2: this method has no 'B'; it has K"),
        ({"base": "linear:K=500"}, "K=500 is outside 0 to 127"),
        ({"base": None}, "base=None is not of type str"),
        ({"at": "top"}, "at=top is not one of root, tail"),
    ],
)
def test_settings_are_checked(values: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Graft(**values)


def test_checkpoints_and_bases_are_read_as_they_are_written() -> None:
    assert parse_checkpoints("1@0.5:3@0.3:12@.25") == {1: 0.5, 3: 0.3, 12: 0.25}
    assert parse_checkpoints("off") == {}
    assert parse_base("deagle:k=2:N_max=5") == Deagle(k=2, N_max=5)
    assert parse_base("dynatree:history=off:tau = 0.2") == DynaTree(history=False, tau=0.2)


def test_a_value_of_the_base_may_have_colons(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Wordy:
        widths: str = text("1", str, "")
        n: int = setting(1, 0, 9, "")

    monkeypatch.setitem(DRAFTING, "wordy", Wordy)
    assert parse_base("wordy:widths=4:2:1:n=3") == Wordy("4:2:1", 3)


# Graft(TAIL): below the ends of the branches.


def literal_tails(drafted: Tree, table: SuccessorTable, nodes: list[Node]) -> dict[Path, float]:
    """All that the table knows below the leaves, node by node, with the log-probabilities."""
    found = paths(drafted)
    offered = {}
    for row, leaf in enumerate(found):
        if row in drafted.parents:
            continue
        below = {0: (leaf, drafted.path_logprobs[row])}  # by node of the template
        for i, node in enumerate(nodes[1:], start=1):
            if node.parent not in below:
                continue
            path, logprob = below[node.parent]
            known = successors(table, path[-1])
            if known:
                token = known[node.rank]
                below[i] = (path + (token,), logprob + math.log(RANK_PROBS[node.rank]))
                offered[path + (token,)] = below[i][1]
    return offered


def assert_likeliest(
    tree: Tree, drafted: Tree, offered: dict[Path, float], n_rows: int
) -> set[Path]:
    """What was added to the drafted tree is the best of what was offered, up to n_rows."""
    added = set(paths(tree)) - set(paths(drafted))
    assert len(added) == min(n_rows - len(drafted), len(offered))
    if not added:
        return added
    assert_holds(tree, drafted)
    assert_in_order(tree)
    for path, logprob in zip(paths(tree), tree.path_logprobs, strict=True):
        if path in added:
            assert logprob == pytest.approx(offered[path], abs=1e-4)
    least = min(offered[path] for path in added)
    for path in set(offered) - added:
        assert offered[path] <= least + 1e-4
    return added


def test_tails_are_the_likeliest_continuations_of_the_branches() -> None:
    rng = random.Random(0)
    seen: Counter = Counter()
    for seed in range(150):
        n_drafted = rng.choice([1, 2, 5, 12, 40])
        n_rows = rng.randint(1, 40)
        levels = rng.randint(1, 5)
        max_depth = rng.randint(0, 7)
        base = f"fixed:D={rng.randint(1, 4)}:B={rng.randint(1, 3)}:tau=0.03:N_max={n_drafted}"
        settings = Graft(base=base, checkpoints="off", N=n_rows, D_max=levels, at="tail")
        rule = settings.rule()
        rule.table = full_table(seed=seed)
        forget(rule.table, rng.sample(range(32), rng.choice([0, 10, 31])))
        tree = grow(rule, ROOT, FakeDraft(seed), max_depth)
        pruned = replace(settings, graft=False)
        drafted = grow(pruned.rule(), ROOT, FakeDraft(seed), max_depth)
        nodes = template(2 * n_rows, min(levels, max_depth))
        offered = literal_tails(drafted, rule.table, nodes)
        n_offered = len(offered)
        offered = {path: p for path, p in offered.items() if len(path) - 1 <= max_depth}
        added = assert_likeliest(tree, drafted, offered, n_rows)
        n_left = n_rows - len(drafted)
        seen["full"] += len(added) == n_left > 0
        seen["not full"] += 0 < len(added) < n_left
        seen["nothing known"] += n_left > 0 and not n_offered and max_depth > 0
        seen["too deep"] += len(offered) < n_offered and 0 < len(added)
        seen["below several leaves"] += len({path[:2] for path in added}) > 1
        leaf_depths = {len(path) for path in paths(drafted) if len(path) > 1}
        seen["leaves at several depths"] += len(leaf_depths) > 1 and len(added) > 0
    assert min(seen.values()) >= 5 and len(seen) == 6, seen


def test_a_lone_root_is_its_own_leaf() -> None:
    trees = []
    for at in ("root", "tail"):
        rule = Graft(base="linear:K=0", N=20, at=at).rule()
        rule.table = full_table()
        trees.append(grow(rule, ROOT, None, 5))
    assert len(trees[0]) == 20
    assert paths(trees[0]) == paths(trees[1])
    assert trees[0].path_logprobs == pytest.approx(trees[1].path_logprobs)


def test_the_base_is_told_the_prompt() -> None:
    base = Chain(K=2).rule()
    told = []
    base.start = told.append
    GraftRule(base, n_rows=4, graft_depth=2, checkpoints={}).start([3, 1, 4])
    assert told == [[3, 1, 4]]


def test_the_base_learns_from_its_own_nodes() -> None:
    """History once took a grafted level for a drafted one, and a draft that was right for wrong."""
    rule = Graft(base="dynatree:D_max=2:D0=1", checkpoints="off", at="tail").rule()
    rule.table = full_table()
    tree = grow(rule, ROOT, FakeDraft(5), 127)
    drafted = [row for row in range(len(tree)) if not tree.are_retrieved[row]]
    assert tree.depth > 2 == max(tree.depths[row] for row in drafted)
    path = [drafted[-1]]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    below = [row for row in range(len(tree)) if tree.parents[row] == path[-1]]
    assert tree.are_retrieved[below[0]]
    for committed, reach in ((path + below[:1], 1.0), (path[:2], 0.5), (path[:1], 0.0)):
        rule.adapt(tree, committed, 1.0)
        assert rule.base.reaches[-1] == reach


@pytest.mark.parametrize("base", ["deagle", "dyspec"])
def test_the_rule_below_is_told_of_every_new_tree(base: str) -> None:
    """What a base remembers of one tree, sums or best values, once ended with its first level."""
    assert_starts_anew(Graft(base=base, N=9).rule())


def shapes_of(target: GPTNeoX, draft: GPTNeoX, settings: Settings) -> list[tuple[int, list[int]]]:
    """The size of each tree of a text, and the path accepted of it."""
    steps = list(generate(target, draft, [3, 1, 4, 1], settings, 40))
    return [(len(step.tree), step.path) for step in steps[1:]]


def test_the_same_text_twice_and_nothing_learned_in_between() -> None:
    target = random_model(0)
    draft = random_model(1)
    for settings in (Recycle(), Graft(), Graft(base="linear")):
        first = shapes_of(target, draft, settings)
        assert shapes_of(target, draft, settings) == first


def test_recycle_on_repeated_text_commits_several_tokens_a_pass() -> None:
    target = GPTNeoX.from_pretrained(TINY / "target")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    prompt = tokenizer.encode("The king sat by the fire and the queen sang. " * 6).ids
    metrics = measure(list(generate(target, None, prompt, Recycle(), 80)))
    assert metrics.tokens_per_iter >= 2.5


@pytest.mark.parametrize("commit", ["keep", "rebuild"])
def test_the_table_reads_candidates_before_another_pass_overwrites_them(
    commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of fixed shapes share one buffer of logits, and rebuild is a pass more."""
    pretend_capture(monkeypatch)
    tables = []
    for is_shaped in (False, True):
        target = random_model(7)
        target.pool.is_shaped = target.pool.has_graphs = is_shaped
        settings = Remembering(Recycle(N=8))
        steps = list(generate(target, None, [3, 1, 4, 1, 5], settings, 40, commit=commit))
        assert any(len(step.path) > 2 for step in steps)
        tables.append(settings.rules[0].table)
    assert tables[0] == tables[1]


def with_one_setting(name: str) -> Iterator[str]:
    """A base with each of its settings in turn at its least, or as one of its examples."""
    for field in fields(DRAFTING[name]):
        values = field.metadata.get("options") or field.metadata.get("examples")
        for value in values if values else [field.type(field.metadata["low"])]:
            try:
                parse_base(f"{name}:{field.name}={value}")
            except ValueError:
                continue  # against its other settings
            yield f"{name}:{field.name}={value}"


def n_drafted(base: str) -> int:
    """Rows that graft lets it have verified at most, root included."""
    rule = Graft(base=base).rule()
    return min(rule.max_drafted, rule.max_kept)


LEAST = [min(with_one_setting(name), key=n_drafted) for name in DRAFTING]


def test_most_bases_can_be_set_to_draft_nothing() -> None:
    assert [n_drafted(base) for base in LEAST].count(1) > len(DRAFTING) / 2


@pytest.mark.parametrize("base", LEAST)
def test_a_base_of_the_least_settings_is_grafted_over(base: str) -> None:
    target = random_model(0)
    expected = [step.tokens for step in generate(target, None, [3, 1, 4], Alone(), 12)]
    text = []
    for step in generate(target, random_model(1), [3, 1, 4], Graft(base=base, N=8), 12):
        text += step.tokens
    assert text == sum(expected, [])


def test_a_checkpoint_looks_at_paths_that_are_in_the_tree() -> None:
    """The draft's only node at depth 1 is unlikely; a candidate that was not added is no reason."""
    logits = torch.tensor([[-9.0, 1.0, 0.9, 0.8]])

    def draft(tokens: list[int], parents: list[int] | None) -> Candidates:
        return ranked(logits.expand(len(tokens), -1))

    class Second(StaticRule):
        def expand(self, level: Level) -> tuple[Gates, Gates]:
            return {"second": level.tokens == 2}, {}

    base = Second(widths=[2, 2, 2], n_rows=8, is_drawing=False, deepest="widths")
    best = float(torch.log_softmax(logits, -1).max().exp())
    rule = GraftRule(base, 8, 0, checkpoints={1: best - 1e-3})
    assert grow(rule, ROOT, draft, 3).depth == 1
