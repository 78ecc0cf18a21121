"""auto: what it remembers, counts and times, and the choices it makes of that."""

import math
import random

import pytest
import torch
from conftest import random_config, random_model, random_tensors
from test_draft_tree import FakeDraft, paths

from cli.metrics import token_ids
from draft_tree import Tree, grow
from dynatree import Step, generate
from engine.scores import Scores
from gpt_neox import GPTNeoX
from methods import auto
from methods.auto import (
    BESIDE_GUESS,
    CONFIDENCE,
    DRAFT_GUESS,
    NGRAM_GUESS,
    Auto,
    AutoRule,
    Costs,
    Counts,
    NGrams,
    Worth,
    first_guess,
    ngram_bin,
    work_of,
)

N_IDS = 32
FREE = {"c_tree": 0.0, "c_row": 0.0001, "c_draft": 0.0, "c_level": 0.0}


def test_ngrams_recall_after_the_longest_context_they_know() -> None:
    ngrams = NGrams()
    ngrams.write((1, 2, 3), [10, 11])
    ngrams.write((9, 2, 3), [20, 21])
    ngrams.write((7, 3), [30])
    assert ngrams.recall((1, 2, 3)) == (3, [10, 11])
    assert ngrams.recall((5, 2, 3)) == (2, [20, 21])  # the last time
    assert ngrams.recall((5, 5, 3)) == (1, [30])
    assert ngrams.recall((1, 2, 4)) == (0, [])


def test_ngrams_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MAX_CONTEXTS", 3)
    ngrams = NGrams()
    for token in (1, 2, 3, 1, 4):
        ngrams.write((token,), [token])
    assert list(ngrams.seen) == [(3,), (1,), (4,)]


def test_counts_move_from_the_guess_to_what_happens_and_back() -> None:
    counts = Counts([0.5, 0.2])
    assert counts.chances[0] == 0.5
    for _ in range(300):
        counts.add([(0, True), (0, True), (0, False)])
    assert 0.6 < counts.chances[0] < 2 / 3 and counts.chances[1] == pytest.approx(0.2)
    for _ in range(2000):
        counts.add([])
    assert counts.chances[0] == pytest.approx(0.5)


def test_costs_are_found_from_the_times_of_iterations() -> None:
    """In another unit than guessed, each cost twice or half the guess, a hiccup now and then."""
    true = torch.tensor([5.0, 2.0, 0.1, 2.0, 1.0])
    costs = Costs([1.0, 0.2, 0.04, 0.2, 0.4])
    assert costs.predict(work_of(11, 0)) == pytest.approx(1.6)
    rng = random.Random(0)
    for i in range(600):
        work = work_of(rng.choice([1, 2, 6, 21]), rng.choice([0, 0, 1, 4]))
        ms = float(true @ torch.tensor(work)) * rng.uniform(0.95, 1.05)
        if i % 50 == 49:
            ms *= 20
        assert (costs.fit(work, ms) == 1.0) == (i > 0)
    for n_rows, n_levels in ((1, 0), (9, 0), (21, 0), (9, 3)):
        work = work_of(n_rows, n_levels)
        ms = float(true @ torch.tensor(work))
        assert costs.predict(work) == pytest.approx(ms, rel=0.15)


def test_work_is_what_an_iteration_did() -> None:
    """A step, a tree, its rows below the root, a drafting, its levels."""
    assert work_of(1, 0) == [1, 0, 0, 0, 0]
    assert work_of(9, 0) == [1, 1, 8, 0, 0]
    assert work_of(1, 2) == [1, 0, 0, 1, 2]
    assert work_of(9, 3) == [1, 1, 8, 1, 3]


def test_worth_starts_as_the_guess_and_follows_the_last_ten() -> None:
    worth = Worth(3.0, 10.0)
    worth.take(1, 20.0)
    assert (worth.tokens, worth.ms) == (2.0, 15.0)
    for _ in range(60):
        worth.take(5, 8.0)
    assert worth.tokens == pytest.approx(5, rel=0.01) and worth.ms == pytest.approx(8, rel=0.01)


def taught(settings: Auto, best: dict[int, list[int]]) -> AutoRule:
    """A rule that has read each token with these best successors, worst of all ids the others."""
    rule = settings.rule()
    for token, successors in best.items():
        logits = torch.zeros(1, N_IDS)
        for rank, successor in enumerate(successors):
            logits[0, successor] = 9.0 - rank
        rule.recent = ()  # each on its own: a context of one token
        rule.read(torch.tensor([token]), Scores(logits))
    rule.recent = ()
    return rule


BEST = {1: [2, 3, 4, 5], 2: [6, 7, 8, 9], 3: [10, 11, 12, 13], 6: [1, 14, 15, 16]}


def expected_chances(price: float) -> dict[tuple[int, ...], float]:
    """Every path from 1 by BEST that is worth the price: chances multiply along it."""
    found = {}
    waiting = [((1,), 1.0)]
    while waiting:
        path, chance = waiting.pop()
        if chance < price:
            continue
        found[path] = chance
        for rank, token in enumerate(BEST.get(path[-1], [])):
            waiting.append(((*path, token), chance * NGRAM_GUESS[0][rank]))
    return found


def test_the_ngrams_are_unrolled_best_first_and_each_node_pays() -> None:
    """The node set is the literal one above the price; of too many, the likeliest."""
    settings = Auto(D_max=0, c_tree=0.0, c_row=0.02, learn=False)
    tree = grow(taught(settings, BEST), torch.tensor([1]), None, 99)
    expected = expected_chances(0.02)
    chances = tree.logprobs.exp().tolist()
    assert dict(zip(paths(tree), chances, strict=True)) == pytest.approx(expected)
    assert len(expected) > 6
    assert not tree.is_retrieved[0] and tree.is_retrieved[1:].all()
    small = grow(taught(Auto(D_max=0, N=4, **FREE), BEST), torch.tensor([1]), None, 99)
    best = sorted(expected.values(), reverse=True)[:4]
    assert sorted(small.logprobs.exp().tolist(), reverse=True) == pytest.approx(best)


def test_the_ngrams_go_no_deeper_than_asked_and_propose_nothing_unread() -> None:
    settings = Auto(D_max=0, c_tree=0.0, c_row=0.02, learn=False)
    assert grow(taught(settings, BEST), torch.tensor([1]), None, 99).depth > 1
    assert grow(taught(settings, BEST), torch.tensor([1]), None, 1).depth == 1
    assert len(grow(taught(settings, BEST), torch.tensor([20]), None, 99)) == 1


def test_drafted_and_remembered_nodes_are_never_the_same() -> None:
    same_for_all = dict.fromkeys(range(N_IDS), [0, 1, 2, 3])
    for seed in range(20):
        rule = taught(Auto(N=30, D_max=2, **FREE), same_for_all)
        rule.drafting.tokens = 1e6  # so that it drafts
        draft = FakeDraft(seed)
        tree = grow(rule, torch.tensor([7]), draft, 99)
        found = paths(tree)
        assert len(tree) == 30 == len(set(found)) and draft.n_calls > 0
        for row in range(1, 30):
            assert found[tree.parents[row]] == found[row][:-1]
            assert tree.depths[row] == len(found[row]) - 1
        assert (tree.depths.diff() >= 0).all()
        is_retrieved = tree.is_retrieved
        assert is_retrieved.any() and not is_retrieved[1:].all()
        assert (tree.draft_slots[is_retrieved] == -1).all()


def noisy(seed: int, noise: float) -> tuple[GPTNeoX, GPTNeoX]:
    """A target, and a draft that is it but for so much noise."""
    config = random_config()
    tensors = random_tensors(config, seed)
    other = random_tensors(config, seed + 1)
    near = {name: t + noise * other[name] for name, t in tensors.items()}
    return GPTNeoX.from_tensors(config, tensors), GPTNeoX.from_tensors(config, near)


def adversary(seed: int) -> GPTNeoX:
    """Its best candidates are the worst of that seed's target."""
    config = random_config()
    tensors = random_tensors(config, seed)
    tensors["embed_out.weight"] = -tensors["embed_out.weight"]
    return GPTNeoX.from_tensors(config, tensors)


def n_drafting(steps: list[Step]) -> int:
    """Iterations of which a drafted tree came."""
    n = 0
    for step in steps[1:]:
        if step.tree.draft_slots.max() >= 0:
            n += 1
    return n


def test_when_nothing_pays_it_is_ar() -> None:
    target, draft = noisy(3, 0.0)
    dear = Auto(c_tree=50.0, c_draft=50.0, learn=False)
    steps = list(generate(target, draft, [3, 1, 4], dear, 100))
    assert all(len(step.tree) == 1 for step in steps[1:])
    assert n_drafting(steps) == 0  # a single probe would take more than 1 % of the time


def test_a_perfect_cheap_draft_is_used_and_a_useless_one_is_dropped() -> None:
    cheap = Auto(c_draft=0.05, c_level=0.05, learn=False)
    target, perfect = noisy(3, 0.0)
    steps = list(generate(target, perfect, [3, 1, 4], cheap, 100))
    assert n_drafting(steps) >= 4 and len(steps) < 40
    steps = list(generate(target, adversary(3), [3, 1, 4], Auto(learn=False), 200))
    assert 0 < n_drafting(steps) < len(steps) / 8


def test_a_draft_that_is_off_is_probed_for_one_percent_of_the_time() -> None:
    rule = taught(Auto(learn=False), BEST)
    rule.drafting = Worth(0.0, 1.0)
    n_probes = 0
    for _ in range(1000):
        root = torch.tensor([20])
        tree = grow(rule, root, FakeDraft(0), 99)
        rule.read(tree.tokens, Scores(torch.zeros(len(tree), N_IDS)))
        rule.adapt(tree, [0], 1.0)
        n_probes += rule.is_probe
        assert rule.probed_ms <= 0.01 * rule.total_ms + 5
    assert n_probes >= 2


def test_fixed_costs_make_a_text_depend_on_nothing_but_itself() -> None:
    target, draft = noisy(5, 0.1)

    def shapes() -> list:
        steps = list(generate(target, draft, [3, 1, 4], Auto(learn=False), 60))
        return [(paths(step.tree), list(step.path)) for step in steps[1:]]

    assert shapes() == shapes()


def test_a_row_with_non_finite_logits_adds_nothing() -> None:
    rule = Auto(**FREE).rule()
    rule.read(torch.tensor([1]), Scores(torch.zeros(1, N_IDS)))
    rule.drafting.tokens = 1e6

    def draft(tokens: torch.Tensor, parents: torch.Tensor | None) -> Scores:
        return Scores(torch.full((len(tokens), N_IDS), math.nan))

    tree: Tree = grow(rule, torch.tensor([9]), draft, 99)
    assert len(tree) == 1 and rule.n_levels == 1


def test_the_drafts_run_of_the_root_is_kept_if_nothing_was_drafted() -> None:
    """It was lost if there were n-grams, and so the draft read the root twice."""
    rule = taught(Auto(**FREE), BEST)
    rule.drafting.tokens = 1e6  # so that it drafts

    def draft(tokens: torch.Tensor, parents: torch.Tensor | None) -> Scores:
        return Scores(torch.full((len(tokens), N_IDS), math.nan))

    tree = grow(rule, torch.tensor([1]), draft, 99)
    assert rule.n_levels == 1 and len(tree) > 1
    assert tree.draft_slots.tolist() == [0] + [-1] * (len(tree) - 1)


def test_a_small_vocabulary() -> None:
    target = random_model(0, vocab_size=3)
    draft = random_model(1, vocab_size=3)
    ids = token_ids(generate(target, draft, [1, 2], Auto(), 20))
    assert len(ids) == 20


def test_every_bin_has_its_guess() -> None:
    guess = first_guess()
    assert len(DRAFT_GUESS) == len(CONFIDENCE) + 1
    for n_known, ranks in enumerate(NGRAM_GUESS, start=1):
        alone = ngram_bin(n_known, is_beside=False)
        beside = ngram_bin(n_known, is_beside=True)
        for rank, p in enumerate(ranks):
            assert guess[alone + rank] == p
            assert guess[beside + rank] == BESIDE_GUESS * p
    assert len(guess) == beside + len(ranks)
