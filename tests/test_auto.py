"""auto: what it remembers, counts and times, and the choices it makes of that."""

import math
import random

import pytest
import torch
from conftest import random_config, random_model, random_tensors
from test_draft_tree import FakeDraft, paths

from cli.metrics import token_ids
from draft_tree import Tree, grow
from dynatree import generate
from gpt_neox import GPTNeoX
from methods import auto
from methods.auto import (
    DRAFT_GUESS,
    MEMORY_GUESS,
    Auto,
    AutoRule,
    Costs,
    Counts,
    Memory,
    Worth,
)

N_IDS = 32
FREE = {"c_tree": 0.0, "c_row": 0.0001, "c_draft": 0.0, "c_level": 0.0}


def test_memory_recalls_after_the_longest_context_it_knows() -> None:
    memory = Memory()
    memory.write((1, 2, 3), [10, 11])
    memory.write((9, 2, 3), [20, 21])
    memory.write((7, 3), [30])
    assert memory.recall((1, 2, 3)) == (3, [10, 11])
    assert memory.recall((5, 2, 3)) == (2, [20, 21])  # the last time
    assert memory.recall((5, 5, 3)) == (1, [30])
    assert memory.recall((1, 2, 4)) == (0, [])


def test_memory_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MAX_CONTEXTS", 3)
    memory = Memory()
    for token in (1, 2, 3, 1, 4):
        memory.write((token,), [token])
    assert [key for (key,) in memory.seen] == [3, 1, 4]


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
    true, guess = [5.0, 2.0, 0.1, 2.0, 1.0], [1.0, 0.2, 0.04, 0.2, 0.4]

    def take(done: list[float]) -> float:
        return sum(w * x for w, x in zip(true, done, strict=True))

    costs, rng = Costs(guess), random.Random(0)
    assert costs.predict([1, 1, 10, 0, 0]) == pytest.approx(1.6)
    for i in range(600):
        n, levels = rng.choice([0, 1, 5, 20]), rng.choice([0, 0, 1, 4])
        done = [1.0, float(n > 0), n, float(levels > 0), levels]
        ms = take(done) * rng.uniform(0.95, 1.05) * (20 if i % 50 == 49 else 1)
        assert (costs.fit(done, ms) == 1.0) == (i > 0)
    for done in ([1.0, 0, 0, 0, 0], [1.0, 1, 8, 0, 0], [1.0, 1, 20, 0, 0], [1.0, 1, 8, 1, 3]):
        assert costs.predict(done) == pytest.approx(take(done), rel=0.15)


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
    logits = torch.zeros(len(best), N_IDS)
    for row, ids in enumerate(best.values()):
        for rank, token in enumerate(ids):
            logits[row, token] = 9.0 - rank
    for i, token in enumerate(best):
        rule.recent = ()  # each on its own: a context of one token
        rule.read(torch.tensor([token]), logits[i : i + 1])
    rule.recent = ()
    return rule


BEST = {1: [2, 3, 4, 5], 2: [6, 7, 8, 9], 3: [10, 11, 12, 13], 6: [1, 14, 15, 16]}


def test_the_memory_is_unrolled_best_first_and_each_node_pays() -> None:
    """Chances multiply along the path; the node set is the literal one above the price."""
    settings = Auto(D_max=0, c_tree=0.0, c_row=0.02, learn=False)
    tree = grow(taught(settings, BEST), torch.tensor([1]), None, 99)
    ranks = MEMORY_GUESS[0]

    def expected(path: tuple[int, ...], chance: float) -> dict[tuple[int, ...], float]:
        found = {path: chance}
        for rank, token in enumerate(BEST.get(path[-1], [])):
            if chance * ranks[rank] >= 0.02:
                found |= expected((*path, token), chance * ranks[rank])
        return found

    wanted = expected((1,), 1.0)
    chances = dict(zip(paths(tree), tree.logprobs.exp().tolist(), strict=True))
    assert chances == pytest.approx(wanted) and len(wanted) > 6
    assert tree.is_retrieved.tolist() == [False] + [True] * (len(tree) - 1)
    small = grow(taught(Auto(D_max=0, N=4, **FREE), BEST), torch.tensor([1]), None, 99)
    best = sorted(wanted.values(), reverse=True)[:4]
    assert sorted(small.logprobs.exp().tolist(), reverse=True) == pytest.approx(best)
    assert grow(taught(settings, BEST), torch.tensor([1]), None, 1).depth == 1
    assert len(grow(taught(settings, BEST), torch.tensor([20]), None, 99)) == 1  # never read


def test_drafted_and_remembered_nodes_are_never_the_same() -> None:
    for seed in range(20):
        rule = taught(Auto(N=30, D_max=2, **FREE), {token: [*range(4)] for token in range(N_IDS)})
        rule.drafting.tokens = 1e6  # so that it drafts
        draft = FakeDraft(seed)
        tree = grow(rule, torch.tensor([7]), draft, 99)
        found = paths(tree)
        assert len(tree) == 30 == len(set(found)) and draft.n_calls > 0
        is_retrieved = tree.is_retrieved.tolist()
        assert any(is_retrieved) and not all(is_retrieved[1:])
        assert tree.depths.tolist() == sorted(len(path) - 1 for path in found)
        for row, parent in enumerate(tree.parents.tolist()[1:], start=1):
            assert found[parent] == found[row][:-1]
        slots = tree.draft_slots.tolist()
        assert all(slots[row] == -1 for row in range(30) if is_retrieved[row])


def noisy(seed: int, noise: float) -> tuple[GPTNeoX, GPTNeoX]:
    config, tensors = random_config(), random_tensors(random_config(), seed)
    other = random_tensors(config, seed + 1)
    near = {name: t + noise * other[name] for name, t in tensors.items()}
    return GPTNeoX(config, tensors), GPTNeoX(config, near)


def n_drafting(steps: list) -> int:
    """Iterations in which the draft has run."""
    return sum(bool((step.tree.draft_slots >= 0).any()) for step in steps[1:])


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
    config, tensors = random_config(), random_tensors(random_config(), 3)
    tensors["embed_out.weight"] = -tensors["embed_out.weight"]
    adversary = GPTNeoX(config, tensors)
    steps = list(generate(target, adversary, [3, 1, 4], Auto(learn=False), 200))
    assert 0 < n_drafting(steps) < len(steps) / 8


def test_a_draft_that_is_off_is_probed_for_one_percent_of_the_time() -> None:
    rule = taught(Auto(learn=False), BEST)
    rule.drafting = Worth(0.0, 1.0)
    n_probes = 0
    for _ in range(1000):
        root = torch.tensor([20])
        tree = grow(rule, root, FakeDraft(0), 99)
        rule.read(tree.tokens, torch.zeros(len(tree), N_IDS))
        rule.adapt(tree, [0], 1.0)
        n_probes += rule.is_probe
        assert rule.probed_ms <= 0.01 * rule.total_ms + 5
    assert n_probes >= 2


def test_fixed_costs_make_a_text_depend_on_nothing_but_itself() -> None:
    target, draft = noisy(5, 0.1)
    runs = [list(generate(target, draft, [3, 1, 4], Auto(learn=False), 60)) for _ in range(2)]
    shapes = [[(paths(step.tree), list(step.path)) for step in steps[1:]] for steps in runs]
    assert shapes[0] == shapes[1]


def test_a_row_with_non_finite_logits_adds_nothing() -> None:
    rule = Auto(**FREE).rule()
    rule.read(torch.tensor([1]), torch.zeros(1, N_IDS))
    rule.drafting.tokens = 1e6

    def draft(tokens: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
        return torch.full((len(tokens), N_IDS), math.nan)

    tree: Tree = grow(rule, torch.tensor([9]), draft, 99)
    assert len(tree) == 1 and rule.n_levels == 1


def test_a_small_vocabulary() -> None:
    target, draft = random_model(0, vocab_size=3), random_model(1, vocab_size=3)
    ids = token_ids(generate(target, draft, [1, 2], Auto(), 20))
    assert len(ids) == 20 and len(DRAFT_GUESS) == 9
