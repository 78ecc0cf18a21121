"""Sampling: the committed text is distributed as the target's own samples, whatever the draft."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import Stub, make_tree, random_model, random_settings, ranked
from law import CPU, Ranked, Scripted, difference, every_outcome, law, target_law
from torch import Tensor

import engine.sampling
from cli.metrics import token_ids
from draft_tree import DynaTree, Gates, Level, Rule, Settings, Tree, best_rows
from engine.decoding import generate
from engine.sampling import FastSampling
from methods import METHODS
from methods.auto import Auto
from methods.dyspec import DySpec, DySpecRule
from methods.lookup import Lookup
from methods.opttree import OptTree
from methods.retrieval import Graft
from methods.sequoia import Sequoia
from methods.static import Alone, Chain, ConfidentChain, Fixed, SpecInfer, StaticRule
from sampling import Acceptance, Sampler, Sampling, accept_by_token

Draw = Callable[[Tensor, int], tuple[Tensor, Tensor]]
N_IDS = 5
N_DRAWS = 20_000
PLAIN = Sampling(1.0)


def logits_table(seed: int) -> Tensor:
    """A bigram model: logits [V, V] of the next token after each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_IDS, N_IDS, generator=generator).double() * 1.5


TARGET, OTHER = logits_table(0), logits_table(1)
# Certain of what the target never writes, and the reverse
DISJOINT = torch.where(TARGET > TARGET.median(), -1e4, 5.0)
# Never proposes two of the ids
ZEROS = OTHER.index_fill(1, torch.tensor([1, 3]), -torch.inf)
DRAFTS = {"equal": TARGET, "other": OTHER, "disjoint": DISJOINT, "zeros": ZEROS}
DRAFTS["fewer ids"] = OTHER[:3, :3]
# Of three ids only: whole trees of two drawn levels, in every combination of all their draws
FEW_TARGET = TARGET[:3, :3]
FEW_DRAFTS = {"few other": OTHER[:3, :3], "few zeros": ZEROS[:3, :3], "few flat": OTHER[:3, :3] / 4}
# The last: the draft's distribution, warped otherwise
HEATS = [Sampling(0.6), PLAIN, Sampling(1.0, 0.5), Sampling(1.0, draft_temperature=0.4)]


# The parts.


def test_warping_keeps_the_likeliest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.7, 0.1, 0.1, 0.1]]).log()
    kept = Sampling(1.0, top_p=0.75).sampler(CPU).warp(logits)
    expected = torch.tensor([[0, 0.625, 0.375, 0], [0.875, 0.125, 0, 0]])
    torch.testing.assert_close(kept, expected)
    sharper = Sampling(0.5).sampler(CPU).warp(logits)
    torch.testing.assert_close(sharper[0, 1], torch.tensor(25 / 36))
    for coldest in (Sampling(1.0, 1e-9), Sampling(1.0, 1e-30), Sampling(1e-30), Sampling(2e-38)):
        assert coldest.sampler(CPU).warp(logits + 9).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_the_top_p_set_of_many_ids_is_that_of_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, where many ids are equally likely; all are ranked only if a few do not do."""
    n_ranked: Counter = Counter()
    real = engine.sampling.likeliest

    def likeliest(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        n_ranked[k] += 1
        return real(probs, k)

    generator = torch.Generator().manual_seed(1)
    steps = (4 * torch.randn(20, 3000, generator=generator)).round() / 2
    few = engine.sampling.MANY
    for sharpness, top_p in itertools.product((0.0, 0.3, 1, 4), (1e-9, 0.3, 0.9, 1 - 1e-12)):
        sampler = FastSampling(1.0, top_p).sampler(CPU)
        probs = torch.softmax(sharpness * steps, dim=-1)
        kept = sampler.cut(probs, 3000)
        with monkeypatch.context() as patch:
            patch.setattr(engine.sampling, "likeliest", likeliest)
            assert sampler.cut(probs, few).equal(kept)
    assert n_ranked[few] == 16 and 4 <= n_ranked[3000] <= 12, n_ranked


def assert_distributed(counts: Counter, expected: dict[tuple, float]) -> None:
    """Pearson's chi-square at five standard deviations; nothing impossible was drawn."""
    assert all(expected.get(outcome, 0.0) > 0 for outcome in counts)
    parts = [(counts[outcome] - mean) ** 2 / mean for outcome, mean in expected.items() if mean]
    freedom = len(parts) - 1
    assert sum(parts) < freedom + 5 * math.sqrt(2 * freedom) + 5, (parts, freedom)


PLAIN_SAMPLER, FAST_SAMPLER = PLAIN.sampler(CPU), FastSampling.of(PLAIN).sampler(CPU)


@pytest.mark.parametrize("draw", [PLAIN_SAMPLER.draw, FAST_SAMPLER.pick, FAST_SAMPLER.race])
def test_draws_are_without_replacement_and_what_is_no_draw_has_no_chance(draw: Draw) -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2]).expand(N_DRAWS, N_IDS)
    ids, chances = draw(probs, 4)
    drawn = ids.tolist()
    assert all(sorted(row[:3]) == [1, 3, 4] for row in drawn)
    assert chances[:, :3].equal(probs.gather(1, ids[:, :3])) and not chances[:, 3].any()
    expected = {}
    for first, second in itertools.permutations([1, 3, 4], 2):
        left = 1 - probs[0, first]
        expected[first, second] = N_DRAWS * float(probs[0, first] * probs[0, second] / left)
    assert_distributed(Counter((row[0], row[1]) for row in drawn), expected)


@pytest.mark.parametrize("kind", [Sampling, FastSampling])
@pytest.mark.parametrize("k", [2, 5, 9])
def test_what_is_proposed_is_what_draw_draws(k: int, kind: type[Sampling]) -> None:
    """With its log-probabilities, and the draft's distribution: warped by its own temperature."""
    sampling = kind(1.0, top_p=0.9, seed=3, draft_temperature=0.5)
    logits = logits_table(4).float()
    ids, logprobs, drawn_from = sampling.sampler(CPU).propose(logits, k)
    torch.testing.assert_close(drawn_from, Sampling(0.5, top_p=0.9).sampler(CPU).warp(logits))
    drawn, chances = sampling.sampler(CPU).draw(drawn_from, min(k, N_IDS))
    assert ids.tolist() == drawn.tolist()
    numpy.testing.assert_allclose(numpy.exp(logprobs), chances, rtol=1e-6)


def test_a_rejection_that_rounding_alone_allows_is_none() -> None:
    """Nothing is left of the residual: the child is the only token the target can write."""
    tree = make_tree([0, 1], [-1, 0])
    tree.draft_slots, tree.drawn_from = [0, -1], [torch.tensor([0.0, 1.0 + 1e-7])]
    highest = SimpleNamespace(random=lambda: 1 - 2**-53)
    sampler = replace(PLAIN.sampler(CPU), coins=highest)
    path, _ = accept_by_token(tree, torch.tensor([[-90.0, 90.0]] * 2), sampler)
    assert path == [0, 1], "its chance is above every coin"


# Every text is as likely as from the target alone: by enumeration (law.py).


def error_of(
    settings: Settings,
    draft: Tensor,
    n_tokens: int = 3,
    acceptance: Acceptance | None = None,
    sampling: Sampling = PLAIN,
    target: Tensor | None = None,
) -> float:
    """How far texts of n_tokens are from the target's law; of a draft of three ids, FEW_TARGET's
    if it is none of DRAFTS."""
    if target is None:
        target = TARGET if any(draft is other for other in DRAFTS.values()) else FEW_TARGET
    found = law(settings, target, draft, n_tokens, acceptance, sampling)
    assert sum(found.values()) == pytest.approx(1.0, abs=2e-8)
    return difference(found, target_law(target, n_tokens, sampling))


@dataclass(frozen=True)
class Known:
    """graft or auto, when it has read every token; graft over a rule that draws."""

    settings: Graft | Auto
    n_ids: int = N_IDS

    def rule(self) -> Rule:
        rule = self.settings.rule()
        best = OTHER[: self.n_ids, : self.n_ids].flip(1)
        rule.read(list(range(self.n_ids)), ranked(best).tokens)
        return rule


@dataclass(frozen=True)
class Copied:
    """The two tokens that followed 0 before; no draft has a say."""

    def rule(self) -> Rule:
        rule = Lookup(K=2).rule()
        rule.start([0, 2, 1, 3])
        return rule


RULES = {
    "drawn chain": Chain(K=2),
    "drawn siblings": DySpec(N=4, D_max=1, t=0.001, exact=False),  # up to three
    "those of value": DySpec(N=4, D_max=1, t=0.3, exact=False),
    "stops by what was drawn": ConfidentChain(K=2, p_min=0.3),
    "ranked": Ranked(D=2, B=3, tau=0.0),
    "grafted beside drawn": Known(Graft(base="linear:K=1", N=4, D_max=1, checkpoints="off")),
    "grafted below drawn": Known(Graft(base="linear:K=1", N=4, at="tail")),
    "copied": Copied(),
}
FEW_RULES = {
    "best of all drawn": DySpec(N=3, D_max=2),  # more is drawn than verified
    "pairs of pairs": SpecInfer("2:2"),
    "by confidence": DynaTree(B_max=2, D0=1, D_max=2, tau=0.1, rho_stop=0.2),
    "above tau": Fixed(D=2, B=2, tau=0.2),
    "three below one": SpecInfer("1:3"),
    "settled shape": Sequoia(N=6, D_max=2, p="0.6:0.3:0.1"),
    "grafted, best": Known(Graft(base="dyspec:N=3:D_max=2", checkpoints="1@0.4", N=5), 3),
    "grafted, tail": Known(Graft(base="dyspec:N=4:D_max=1", N=5, at="tail"), 3),
    "grafted, confident": Known(
        Graft(base="dynatree:B_max=2:D0=1:D_max=2", checkpoints="1@0.4", N=5), 3
    ),
    "remembered beside drawn": Known(Auto(N=5, D_max=2, c_level=0.01, learn=False), 3),
}
CASES = [*itertools.product(RULES, DRAFTS, HEATS), *itertools.product(FEW_RULES, FEW_DRAFTS, HEATS)]


@pytest.mark.parametrize(("rule", "draft", "sampling"), CASES)
def test_the_law_is_the_targets(rule: str, draft: str, sampling: Sampling) -> None:
    settings, table = (RULES | FEW_RULES)[rule], (DRAFTS | FEW_DRAFTS)[draft]
    assert error_of(settings, table, sampling=sampling) < 2e-8


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_the_targets_law(method: str) -> None:
    """With what random settings of small trees it may have; a new one is tested by its line in the
    registry."""
    rng = random.Random(method)
    n_done = 0
    for _ in range(1000):
        settings = random_settings(method, rng)
        rule = settings.rule()
        if n_done < 4 and (not rule.is_drawing or rule.max_drafted <= 5):
            draft = rng.choice(list(FEW_DRAFTS.values()))
            assert error_of(settings, draft, sampling=rng.choice(HEATS)) < 2e-8
            n_done += 1
    assert n_done == 4


def test_what_a_budget_cuts_off_does_not_choose_among_drawn_nodes() -> None:
    """Graft's own rows are fewer than those of its base, whose threshold form has a budget."""
    base = "dyspec:exact=off:t=0.2:N=6:D_max=3"
    rule = Graft(base=base, N=4, checkpoints="off", graft=False)
    draft = torch.eye(4, dtype=torch.float64).log()  # certain, but for the root
    draft[0] = torch.tensor([0.0, 0.6, 0.3, 0.1]).log()
    assert error_of(rule, draft, 4, target=TARGET[:4, :4]) < 2e-8


# Planted errors, of rules and of acceptances: that the law would tell.


@dataclass(frozen=True)
class Planted:
    """A rule that is made wrong before it is used."""

    make: Callable[[], Rule]

    def rule(self) -> Rule:
        return self.make()


class Greedy(StaticRule):
    """A chain without the token that it is unsure of, as one may have it that is greedy."""

    def expand(self, level: Level) -> tuple[Gates, Gates]:
        return {"p_min": level.logprobs >= math.log(0.3)}, {}


class Choosing(DySpecRule):
    """The likeliest of the drawn nodes are verified."""

    def extend(self, tree: Tree, max_depth: int) -> Tree:
        return tree.take(best_rows(tree.path_logprobs, 3))


def test_a_rule_that_goes_by_what_was_drawn_is_caught() -> None:
    greedy = Planted(lambda: Greedy([1, 1], 3))
    assert error_of(greedy, OTHER, 2) > 0.01
    choosing = Planted(lambda: Choosing(DySpec(N=4, D_max=2)))
    assert error_of(choosing, FEW_DRAFTS["few zeros"]) > 0.1


def test_a_stop_that_decides_which_draws_are_tried_is_caught() -> None:
    """opttree with drawn children. By hand, of four rows: a (.6) is drawn first and goes on for
    sure, the second child is worth .4. If it is b (.3), level 2 adds .5 and level 3 is drafted,
    whose row takes b's; if it is c (.1), level 2 adds .3 and c is tried."""

    def drawing() -> Rule:
        rule = OptTree(N=4, D_max=3, delta=0.4).rule()
        rule.is_drawing = True
        return rule

    draft = torch.tensor([[0.0, 0.6, 0.3, 0.1]] + [[0.0, 1.0, 0.0, 0.0]] * 3).log()
    target = torch.tensor([[0.0, 0.2, 0.4, 0.4]] * 4).log()
    assert error_of(OptTree(N=4, D_max=3, delta=0.4), draft, 4, target=target) < 2e-8
    assert error_of(Planted(drawing), draft, 4, target=target) > 0.01


RESIDUAL = "the residual is not renormalised"
BONUS = "the bonus is the target's own, as if no child had been rejected"
SIBLING = "what a sibling was drawn from is not renormalised"
COIN = "one coin for all"
RANKED = "a ranked child is taken for a drawn one: R[y] / q[y]"


def acceptance_of(mistake: str = "") -> Acceptance:
    """Child by child, for tables of one size; wrong where it is told to be."""

    def accept(tree: Tree, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
        coin = sampler.coin()
        path = [0]
        is_over = False
        while not is_over:
            row = path[-1]
            residual = target_probs = sampler.warp(logits)[row]
            children = [child for child, parent in enumerate(tree.parents) if parent == row]
            for child in children:
                token = tree.tokens[child]
                drawn_from = torch.eye(len(residual), dtype=torch.float64)[token]
                if tree.drawn_from:
                    drawn_from = tree.drawn_from[tree.draft_slots[row]].clone()
                elif mistake == RANKED:
                    drawn_from = torch.softmax(OTHER[tree.tokens[row]], dim=-1)
                drawn_from[[tree.tokens[elder] for elder in children if elder < child]] = 0.0
                if mistake != SIBLING:
                    drawn_from = drawn_from / drawn_from.sum()
                coin = coin if mistake == COIN else sampler.coin()
                if coin < float(residual[token] / drawn_from[token]):
                    path.append(child)
                    break
                residual = (residual - drawn_from).clamp(min=0.0)
                if mistake != RESIDUAL:
                    residual = residual / residual.sum()
            is_over = path[-1] == row
        after = target_probs if mistake == BONUS else residual
        return path, [tree.tokens[row] for row in path[1:]] + [int(sampler.draw(after[None], 1)[0])]

    return accept


PAIR, RANKED_PAIR = SpecInfer("2"), Ranked(D=1, B=2, tau=0.0)
WRONG = [
    (RESIDUAL, PAIR),
    (BONUS, PAIR),
    (SIBLING, PAIR),
    (COIN, Chain(K=2)),
    (RANKED, RANKED_PAIR),
]


@pytest.mark.parametrize(("mistake", "settings"), WRONG, ids=str)
def test_a_wrong_acceptance_is_caught(mistake: str, settings: Settings) -> None:
    assert error_of(settings, OTHER, acceptance=acceptance_of(mistake)) > 0.01
    assert error_of(settings, OTHER, acceptance=acceptance_of()) < 2e-8


def test_an_acceptance_that_a_rule_brings_is_the_one_that_is_tested() -> None:
    def wrong() -> Rule:
        rule = SpecInfer("2").rule()
        rule.acceptance = acceptance_of(RESIDUAL)
        return rule

    assert error_of(Planted(wrong), OTHER) > 0.01


def test_what_an_acceptance_returns_must_be_a_path_and_its_tokens() -> None:
    """A text alone would not tell: it is the caches that would hold something else."""
    for path, tokens in (([1], [0]), ([0], [0, 0]), ([0, 2], [1, 0]), ([0, 1], [9, 0])):
        with pytest.raises(AssertionError, match="row|path"):
            law(Chain(K=2), TARGET, OTHER, 3, lambda *_, found=(path, tokens): found)


def test_a_coin_may_be_compared_more_than_once() -> None:
    """Every outcome with its chance; by hand."""

    def trial(sampler: Scripted) -> tuple[bool, ...]:
        coin = sampler.coin()
        return coin < 0.3, coin >= 0.6, 0.3 >= coin, coin > -1.0, coin <= math.nan

    found = Counter()
    for result, chance in every_outcome(trial, PLAIN.sampler(CPU)):
        found[result] += chance
    low, middle, high = (True, False, True), (False, False, False), (False, True, False)
    always = (True, False)
    assert found == pytest.approx({low + always: 0.3, middle + always: 0.3, high + always: 0.4})


# Drawn by the generator itself, by the loop.


def table_model(table: Tensor) -> Stub:
    """A model to which only the token before matters."""
    return Stub(lambda tokens, positions: table[tokens].float(), N_IDS)


@pytest.mark.parametrize("settings", [DySpec(N=4, D_max=2), Ranked(D=2, B=2, tau=0.0)], ids=str)
def test_a_long_text_follows_the_targets_law(settings: Settings) -> None:
    """What comes after each token, of 2,000 that were drawn."""
    sampling = Sampling(0.8, 0.95, seed=5)
    models = table_model(TARGET), table_model(OTHER)
    ids = token_ids(generate(*models, [0], settings, 2000, sampling=sampling))
    probs = sampling.sampler(CPU).warp(TARGET)
    pairs = Counter(itertools.pairwise([0, *ids]))
    for token, after in enumerate(probs.tolist()):
        counts = Counter({(i,): pairs[token, i] for i in range(N_IDS) if pairs[token, i]})
        assert_distributed(counts, {(i,): p * counts.total() for i, p in enumerate(after)})


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_text(method: str) -> None:
    """auto without learning, as it learns from a clock. A tiny temperature is greedy."""
    settings = Auto(learn=False) if method == "auto" else METHODS[method]()
    target = random_model(0)
    draft = random_model(1, vocab_size=80)

    def text(sampling: Sampling) -> list[int]:
        return token_ids(generate(target, draft, [3, 1, 4], settings, 30, sampling=sampling))

    one, again, other = (text(Sampling(1.0, top_p=0.9, seed=seed)) for seed in (1, 1, 2))
    assert one == again != other
    greedy = token_ids(generate(target, None, [3, 1, 4], Alone(), 30))
    assert text(Sampling(1e-6)) == greedy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0 is not a positive number"),
        ({"temperature": "0.8"}, "temperature '0.8' is not a positive number"),
        ({"temperature": 0.0, "is_drawn": True}, "greedy text need a draft-temperature"),
        ({"temperature": 0.0, "draft_temperature": 0.0}, "draft-temperature 0.0 is not"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan is not"),
        ({"temperature": 1e-46}, "temperature 1e-46 is not a positive number of float32"),
        ({"temperature": 1e39}, r"temperature 1e\+39 is not a positive number of float32"),
        ({"temperature": 1.0, "draft_temperature": 1e-46}, "draft-temperature 1e-46 is not"),
        ({"temperature": 1.0, "top_p": 1e-46}, "top-p 1e-46 is not a positive number of float32"),
        ({"temperature": 1.0, "top_p": 0.0}, "top-p 0.0 is not a positive number"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top-p 1.5 is outside \(0, 1\]"),
        ({"temperature": 1.0, "seed": -1}, "seed -1 is not a whole number"),
        ({"temperature": 1.0, "seed": 1.0}, "seed 1.0 is not a whole number"),
    ],
)
def test_settings_are_checked(values: dict[str, float], message: str) -> None:
    """What is 0 in float32 once gave id 0 every time: 0 / 0 is NaN."""
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
