"""recycle and graft: the table, the template, merging and refilling, budget, determinism."""

import pytest
import torch
from conftest import TINY, Remembering, pretend_capture, random_model
from test_draft_tree import ROOT, FakeDraft, paths
from tokenizers import Tokenizer

from cli.metrics import measure
from draft_tree import grow, lone
from dynatree import generate
from gpt_neox import GPTNeoX
from methods import DRAFTING
from methods.retrieval import (
    RANK_PROBS,
    Graft,
    GraftRule,
    Recycle,
    SuccessorTable,
    Template,
    graft,
    template,
)
from methods.static import Chain, Fixed


def full_table(n_ids: int = 32, seed: int = 0) -> SuccessorTable:
    """Every token has successors, all different."""
    generator = torch.Generator().manual_seed(seed)
    table = SuccessorTable()
    table.read(torch.arange(n_ids), torch.randn(n_ids, n_ids, generator=generator))
    return table


def ranks_of(shape: Template) -> list[int]:
    """Which successor of its parent each node is; the root has 0."""
    laid_out = torch.cat([torch.tensor([0]), *(ranks for _, ranks in shape.levels)])
    return laid_out[shape.place].tolist()


def test_a_template_is_the_likeliest_tree_of_its_size() -> None:
    shape = template(20, 4)
    parents, depths, ranks = shape.parents.tolist(), shape.depths.tolist(), ranks_of(shape)
    assert parents[0] == 0 and all(parents[i] < i for i in range(1, 20)) and max(depths) <= 4
    probs = [1.0]
    for i in range(1, 20):
        assert depths[i] == depths[parents[i]] + 1
        assert shape.ancestors[i].sum() == depths[i] + 1 and shape.ancestors[i, parents[i]]
        probs.append(probs[parents[i]] * RANK_PROBS[ranks[i]])
    torch.testing.assert_close(shape.logprobs.exp(), torch.tensor(probs))
    rounded = [round(p, 9) for p in probs]
    assert rounded == sorted(rounded, reverse=True)
    assert len({*zip(parents[1:], ranks[1:], strict=True)}) == 19


def test_the_table_holds_the_last_reading_of_each_token() -> None:
    table = SuccessorTable()
    logits = torch.zeros(4, 20)
    for row, best in enumerate([5, 6, 7, 8]):
        logits[row, best] = 9.0
        logits[row, best + 1] = 8.0
    table.read(torch.tensor([3, 1, 3, 2]), logits)
    assert table.ids[[1, 2, 3], :2].tolist() == [[6, 7], [8, 9], [7, 8]]
    assert (table.ids[[0, *range(4, 21)]] == table.unknown).all() and table.unknown == 20
    table.read(torch.tensor([1]), logits[:1])
    assert table.ids[[1, 2], 0].tolist() == [5, 8]


def test_unrolling_follows_the_table() -> None:
    table, shape = full_table(), template(16, 4)
    tokens, ranks = table.unroll(torch.tensor([7]), shape).tolist(), ranks_of(shape)
    assert tokens[0] == 7
    for i in range(1, 16):
        assert tokens[i] == table.ids[tokens[shape.parents[i]], ranks[i]]
    table.ids[tokens[1]] = table.unknown  # nothing known of it, so nothing below it
    tokens = table.unroll(torch.tensor([7]), shape).tolist()
    below = [i for i in range(2, 16) if shape.parents[i] == 1]
    assert below and all(tokens[i] == table.unknown for i in below)


def test_a_grafted_token_merges_with_its_drafted_sibling_and_the_slot_is_refilled() -> None:
    """Drafted and table's trees share nodes; the budget is full all the same, nothing twice."""
    for seed in range(20):
        table, draft = full_table(seed=seed), FakeDraft(seed)
        tree = grow(Fixed(D=3, B=2, tau=0.0).rule(), ROOT, draft, 127)
        first = tree.tokens[1]  # make the table agree with the draft at the root
        table.ids[ROOT, 0] = first
        table.ids[ROOT, 1:] = torch.where(table.ids[ROOT, 1:] == first, 31, table.ids[ROOT, 1:])
        shape = template(64, 5)
        tokens = table.unroll(ROOT, shape)
        merged = graft(tree, tokens, shape, tokens < table.unknown, n_rows=30)
        assert len(merged) == 30
        found = paths(merged)
        assert len(set(found)) == 30 and set(paths(tree)) <= set(found)
        is_retrieved = merged.is_retrieved.tolist()
        drafted = [path for path, is_new in zip(found, is_retrieved, strict=True) if not is_new]
        assert drafted == paths(tree)  # in their old order
        assert merged.depths.tolist() == sorted(len(path) - 1 for path in found)
        slots = dict(zip(paths(tree), tree.draft_slots.tolist(), strict=True))
        assert merged.draft_slots.tolist() == [slots.get(path, -1) for path in found]
        for row, parent in enumerate(merged.parents.tolist()[1:], start=1):
            above = merged.ancestors[row].nonzero().flatten().tolist()
            assert found[parent] == found[row][:-1] and len(above) == len(found[row])
            siblings = [r for r in range(row) if merged.parents[r] == parent]
            assert not (any(is_retrieved[r] for r in siblings) and not is_retrieved[row])
        assert merged.depth == int(merged.depths.max())


def test_the_budget_identity() -> None:
    """Retained + grafted is the budget whenever the table offers that many nodes."""
    for base in DRAFTING:
        for n_rows in (1, 2, 9, 24):
            rule = Graft(base=base, N=n_rows).rule()
            rule.table = full_table()
            tree = grow(rule, ROOT, FakeDraft(3), 127)
            assert len(tree) == n_rows
            assert len(grow(rule, ROOT, FakeDraft(3), 0)) == 1


def test_nothing_known_means_nothing_grafted() -> None:
    rule = Recycle(N=8).rule()
    rule.read(torch.tensor([1, 2]), torch.randn(2, 32))
    assert len(grow(rule, torch.tensor([9]), None, 127)) == 1
    assert len(grow(rule, torch.tensor([1]), None, 127)) > 1


def test_no_node_is_deeper_than_the_text_has_room() -> None:
    rule = Recycle(N=32, D_max=6).rule()
    rule.table = full_table()
    depths = [grow(rule, ROOT, None, room).depth for room in (0, 1, 2, 5, 99)]
    assert depths == [0, 1, 2, 5, 6]


def test_a_checkpoint_stops_the_drafting() -> None:
    """The best path's probability at depth 1 decides whether level 2 is drafted."""
    for p_1, expected in ((0.0, 4), (1.0, 1)):
        rule, draft = GraftRule(Chain(K=4).rule(), 5, 3, {1: p_1}), FakeDraft(0)
        rule.table = full_table()
        assert len(grow(rule, ROOT, draft, 127)) == 5
        assert draft.n_calls == expected


@pytest.mark.parametrize("base", ["deagle", "dyspec"])
def test_the_rule_below_is_told_of_every_new_tree(base: str) -> None:
    """What a base remembers of one tree, sums or best values, once ended with its first level."""
    rule = Graft(base=base, N=9).rule()
    first = [paths(grow(rule, ROOT, FakeDraft(seed), 127)) for seed in (1, 2, 1)]
    assert first[0] == first[2] != first[1]


def test_a_grafted_tree_does_not_change_the_drafted_one() -> None:
    tree = lone(ROOT)
    shape = template(8, 3)
    is_known = torch.arange(8) == 0
    assert graft(tree, torch.full((8,), 7), shape, is_known, 8) is tree


def test_the_same_text_twice_and_nothing_learned_in_between() -> None:
    target, draft = random_model(0), random_model(1)
    for settings in (Recycle(), Graft(), Graft(base="linear")):
        runs = [list(generate(target, draft, [3, 1, 4, 1], settings, 40)) for _ in range(2)]
        shapes = [[(len(s.tree), list(s.path)) for s in steps[1:]] for steps in runs]
        assert shapes[0] == shapes[1]


def test_recycle_on_repeated_text_commits_several_tokens_a_pass() -> None:
    target = GPTNeoX.from_pretrained(TINY / "target")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    prompt = tokenizer.encode("The king sat by the fire and the queen sang. " * 6).ids
    metrics = measure(list(generate(target, None, prompt, Recycle(), 80)))
    assert metrics.tokens_per_iter >= 2.5


@pytest.mark.parametrize("commit", ["keep", "rebuild"])
def test_the_table_reads_logits_before_another_pass_overwrites_them(
    commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of fixed shapes share one buffer of logits, and rebuild is a pass more."""
    pretend_capture(monkeypatch)
    tables = []
    for is_fixed in (False, True):
        target = random_model(7)
        target.pool.is_fixed = target.pool.has_graphs = is_fixed
        settings = Remembering(Recycle(N=8))
        steps = list(generate(target, None, [3, 1, 4, 1, 5], settings, 40, commit=commit))
        assert any(len(step.path) > 2 for step in steps)
        tables.append(settings.rules[0].table)
    assert torch.equal(tables[0].ids, tables[1].ids)
