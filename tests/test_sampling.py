"""Sampling: the committed text is distributed as the target's own samples, whatever the draft."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import Stub, generate, make_tree, random_model, random_settings, ranked
from law import CPU, PLAIN, Learned, difference, law, mean_length, stop_of, target_law
from torch import Tensor

import engine.sampling
from cli.metrics import token_ids
from draft_tree import DynaTree, Rule, Settings
from engine.sampling import FastSampling
from methods import METHODS
from methods.acceptances import ACCEPTANCES, accept_by_traversal, choose_acceptance
from methods.auto import Auto
from methods.drafting import DRAFTING
from methods.dyspec import DySpec
from methods.lookup import Lookup
from methods.opttree import OptTree
from methods.retrieval import Graft
from methods.sequoia import Sequoia
from methods.static import Alone, Chain, ConfidentChain, Fixed, SpecInfer
from sampling import Acceptance, Sampling, accept_by_token

Draw = Callable[[Tensor, int], tuple[Tensor, Tensor]]
N_IDS = 5
N_DRAWS = 20_000


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
DRAFTS["more ids"] = torch.cat([OTHER, OTHER[:2]])[:, [0, 1, 2, 3, 4, 0, 1]]
DRAFTS["overflown"] = OTHER.clone()
DRAFTS["overflown"][2], DRAFTS["overflown"][3, 1] = torch.nan, torch.inf
# Of three ids only: whole trees of two drawn levels, in every combination of all their draws
FEW_TARGET = TARGET[:3, :3]
FEW_DRAFTS = {"few other": OTHER[:3, :3], "few zeros": ZEROS[:3, :3], "few flat": OTHER[:3, :3] / 4}
# The last: the draft's distribution, warped otherwise
HEATS = [Sampling(0.6), Sampling(1.0, 0.5), Sampling(1.0, draft_temperature=0.4)]


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


class Ranked(Fixed):
    """fixed that ranks also where the text is sampled, as beam does."""

    def rule(self) -> Rule:
        rule = super().rule()
        rule.is_drawing = False
        return rule


@dataclass(frozen=True)
class Known:
    """graft or auto, when it has read every token; graft over a rule that draws."""

    settings: Graft | Auto
    n_ids: int = N_IDS

    def rule(self) -> Rule:
        rule = self.settings.rule()
        best = OTHER[: self.n_ids, : self.n_ids].flip(1)
        rule.read(list(range(self.n_ids)), ranked(best).tokens[:, : rule.n_read])
        return rule


@dataclass(frozen=True)
class Copied:
    """The two tokens that followed 0 before; no draft has a say."""

    def rule(self) -> Rule:
        rule = Lookup(K=2).rule()
        rule.start([0, 2, 1, 3])
        return rule


CHAINS = {
    "drawn chain": Chain(K=2),
    "stops by what was drawn": ConfidentChain(K=2, p_min=0.3),
    "ranked chain": Ranked(D=2, B=1, tau=0.0),
    "copied": Copied(),
}
RULES = CHAINS | {
    "drawn siblings": DySpec(N=4, D_max=1, t=0.001, exact=False),  # up to three
    "those of value": DySpec(N=4, D_max=1, t=0.3, exact=False),
    "ranked": Ranked(D=2, B=3, tau=0.0),
    "grafted beside drawn": Known(Graft(base="linear:K=1", N=4, D_max=1, checkpoints="off")),
    "grafted below drawn": Known(Graft(base="linear:K=1", N=4, at="tail")),
}
FEW_RULES = {
    "best of all drawn": DySpec(N=3, D_max=2),  # more is drawn than verified
    "pairs of pairs": SpecInfer("2:2"),
    "by confidence": DynaTree(B_mid=1, B_max=2, tau_l=0.6, D0=1, D_max=2, rho_stop=0.2),
    "above tau": Fixed(D=2, B=2, tau=0.2),
    "three below one": SpecInfer("1:3"),
    "settled shape": Sequoia(N=6, D_max=2, p="0.6:0.3:0.1"),
    "grafted, best": Known(Graft(base="dyspec:N=3:D_max=2", checkpoints="1@0.4", N=5), 3),
    "grafted, tail": Known(Graft(base="dyspec:N=4:D_max=1", N=5, at="tail"), 3),
    "grafted, confident": Known(
        Graft(base="dynatree:B_mid=1:B_max=2:tau_l=0.6:D0=1:D_max=2", checkpoints="1@0.4", N=5), 3
    ),
    "remembered beside drawn": Known(Auto(N=5, D_max=2, costs="0.3:0.04:0.2:0.01"), 3),
}
CASES = [
    (by, rule)
    for by, rule in itertools.product(ACCEPTANCES, RULES | FEW_RULES)
    if by != "block" or rule in CHAINS
]


def error_of(
    settings: Settings,
    draft: Tensor,
    n_tokens: int = 3,
    acceptance: Acceptance | None = None,
    sampling: Sampling = PLAIN,
    target: Tensor = FEW_TARGET,
) -> float:
    """How far texts of n_tokens are from the target's law."""
    found = law(settings, target, draft, n_tokens, acceptance, sampling)
    return difference(found, target_law(target, n_tokens, sampling))


@pytest.mark.parametrize(("by", "rule"), CASES)
def test_the_law_is_the_targets_and_no_less_is_kept_than_by_token(by: str, rule: str) -> None:
    """Whatever the draft says, and however it is warped. Of ranked rows no more is kept either, of
    drawn ones below one another somewhere strictly."""
    settings, target, tables = (RULES | FEW_RULES)[rule], TARGET, DRAFTS
    if rule in FEW_RULES:
        target, tables = FEW_TARGET, FEW_DRAFTS
    gains = []
    for (name, draft), other in zip(tables.items(), itertools.cycle(HEATS), strict=False):
        for sampling in (PLAIN, other):
            error = error_of(settings, draft, 3, ACCEPTANCES[by], sampling, target)
            assert error < 2e-8, (name, sampling)
        if by != "token":
            length = partial(mean_length, settings, target, draft, 3)
            gains.append(length(ACCEPTANCES[by]) - length(accept_by_token))
    assert min(gains, default=0.0) > -1e-9
    if not settings.rule().is_drawing:
        assert max(gains, default=0.0) < 1e-9
    elif by != "token" and rule in ("drawn chain", "pairs of pairs"):
        assert max(gains) > 0.005


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
            draft, acceptance = rng.choice(list(FEW_DRAFTS.values())), choose_acceptance(rule, None)
            assert error_of(settings, draft, 3, acceptance, rng.choice(HEATS)) < 2e-8
            n_done += 1
    assert n_done == 4


DRAWING = [name for name, kind in METHODS.items() if kind().rule().is_drawing]


def as_base(settings: Settings) -> str:
    """What graft calls a drafting method with these settings."""
    name = next(name for name, kind in METHODS.items() if kind is type(settings))
    values = [f"{f.name}={getattr(settings, f.name)}" for f in fields(settings)]
    return ":".join([name, *values])


def small_settings(method: str, rng: random.Random) -> Settings:
    """Random settings of a small drawn tree, with calibration and a stop where it has them."""
    drawn = [random_settings(method, rng) for _ in range(20)]
    settings = min(drawn, key=lambda settings: abs(settings.rule().max_drafted - 5))
    if hasattr(settings, "stop"):
        stop = rng.choice(["own", "cost", "0.01:0.1:0.01:0.1"])
        settings = replace(settings, chances=rng.choice(["believed", "counted"]), stop=stop)
    return settings


@pytest.mark.parametrize("is_grafted", [False, True], ids=["alone", "graft"])
@pytest.mark.parametrize("method", DRAWING)
def test_learned_states_leave_the_targets_law(method: str, is_grafted: bool) -> None:
    """Whatever earlier trees have taught a rule, its next tree leaves the law alone."""
    if is_grafted and method not in DRAFTING:
        return
    for seed in range(20):
        rng = random.Random(f"{method} {seed}")
        settings = small_settings(method, rng)
        if is_grafted:
            base, checkpoints = as_base(settings), f"1@{rng.uniform(0.3, 0.9):.2f}"
            settings = Graft(base, N=rng.randint(3, 5), D_max=1, checkpoints=checkpoints)
        settings = Known(settings, 3) if settings.rule().n_read else settings
        draft = logits_table(seed)[:3, :3]
        draft[[1, 2], [rng.randrange(3), rng.randrange(3)]] = -torch.inf
        target = logits_table(100 + seed)[:3, :3]
        error = error_of(Learned(settings, seed), draft, 3, target=target)
        assert error < 2e-8, (seed, settings)


@dataclass(frozen=True)
class Taught:
    """Settings whose every rule has learned these weights, or these shares of draws by place."""

    settings: Settings
    weights: tuple[float, float] | None = None
    shares: tuple[float, ...] | None = None

    def rule(self) -> Rule:
        rule = self.settings.rule()
        if self.weights:
            rule.chances.weights = rule.chances.first = self.weights
        if self.shares:
            stop_of(rule).shares = numpy.array(self.shares)
        return rule


@pytest.mark.parametrize("shares", [(0.09, 0.6), (0.7, 0.49)], ids=["rising", "falling"])
def test_a_stop_cuts_drawn_candidates_from_the_end(shares: tuple[float, ...]) -> None:
    """Cut each by itself where shares rise with the place, the second child would be tried without
    the first one, and the law be 9.8 % off."""
    settings = DySpec(N=3, D_max=1, stop="0.01:0.1:0.01:0.1")
    draft, target = torch.tensor([0.6, 0.25, 0.15]), torch.tensor([0.2, 0.5, 0.3])
    tables = [probs.repeat(3, 1).log() for probs in (draft, target)]
    assert error_of(Taught(settings, shares=shares), tables[0], 2, target=tables[1]) < 1e-7


def test_a_checkpoint_does_not_look_at_a_draw_that_may_be_displaced() -> None:
    """graft over dyspec with counted chances: the law was 1.9 % off."""
    base = "dyspec:N=3:D_max=3:chances=counted"
    settings = Taught(Graft(base, checkpoints="1@0.7", graft=False), weights=(1.386, 0.856))
    draft, target = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.01, 0.55, 0.44])
    tables = [probs.repeat(3, 1).log() for probs in (draft, target)]
    assert error_of(settings, tables[0], 4, target=tables[1]) < 1e-7


class SecondChild(Fixed):
    """Adds the second drawn candidate of each row, and not the first."""

    def rule(self) -> Rule:
        rule = super().rule()
        rule.expand = lambda level: ({"place": numpy.arange(2) == 1 + 0 * level.tokens}, {})
        return rule


def test_a_rule_may_cut_drawn_candidates_from_the_end_alone() -> None:
    """What SecondChild writes would be 53 % off the law."""
    with pytest.raises(ValueError, match="only as a suffix in draw order"):
        error_of(SecondChild(D=1, B=2, tau=0.0), torch.zeros(3, 3), 2, target=torch.zeros(3, 3))


def test_what_a_budget_cuts_off_does_not_choose_among_drawn_nodes() -> None:
    """Graft's own rows are fewer than those of its base, whose threshold form has a budget."""
    base = "dyspec:exact=off:t=0.2:N=6:D_max=3"
    rule = Graft(base=base, N=4, checkpoints="off", graft=False)
    draft = torch.eye(4, dtype=torch.float64).log()  # certain, but for the root
    draft[0] = torch.tensor([0.0, 0.6, 0.3, 0.1]).log()
    assert error_of(rule, draft, 4, target=TARGET[:4, :4]) < 2e-8


def test_a_stop_by_what_a_level_adds_does_not_choose_among_drawn_nodes() -> None:
    """opttree, which therefore ranks. If it drew, of four rows: a (.6) first goes on for sure, the
    second child is worth .4. If that is b (.3), level 2 adds .5 and level 3 is drafted, whose row
    takes b's; if it is c (.1), level 2 adds .3 and c is tried."""
    draft = torch.tensor([[0.0, 0.6, 0.3, 0.1]] + [[0.0, 1.0, 0.0, 0.0]] * 3).log()
    target = torch.tensor([[0.0, 0.2, 0.4, 0.4]] * 4).log()
    assert error_of(OptTree(N=4, D_max=3, delta=0.4), draft, 4, target=target) < 2e-8


def test_a_stop_by_cost_does_not_choose_among_drawn_nodes() -> None:
    """dyspec of three rows, whose a goes on for sure: what follows takes its sibling's. If a row
    were worth its time by what this tree's own draws have kept, that would be so where the sibling
    is b, and not where it is c."""
    draft = torch.tensor([[0.0, 0.6, 0.3, 0.1]] + [[0.0, 1.0, 0.0, 0.0]] * 3).log()
    target = torch.tensor([[0.0, 0.2, 0.4, 0.4]] * 4).log()
    settings = DySpec(N=3, D_max=3, stop="1e-9:0.277:1e-9:1e-9")
    assert error_of(settings, draft, 4, target=target) < 2e-8


def test_a_stops_last_level_is_settled_before_the_tree() -> None:
    """dyspec of four rows: which of the first level are kept goes by whether there is a second one.
    Were that drafted for what this tree's own draws promise, the law would be 0.8 % off."""
    draft = [[0.4, 0, 0.6, 0], [0.1, 0.9, 0, 0], [0.3, 0.7, 0, 0], [0.15, 0, 0.2, 0.65]]
    target = torch.tensor([[0.29, 0.22, 0.2, 0.29]] * 4).log()
    settings = DySpec(N=4, D_max=2, stop="1e-9:1e-9:1e-9:0.5")
    assert error_of(settings, torch.tensor(draft).log(), 4, target=target) < 1e-7


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_compete_for_a_budget_leave_the_law_alone(seed: int, is_exact: bool) -> None:
    """Which rows a branch has depends on what was drawn in others, and theirs on its own: what was
    rejected by the look of its branch says something of the others. Of three ids, after each of
    which two are possible."""
    draft = 2 * logits_table(seed)[:3, :3]
    draft[torch.arange(3), torch.randint(3, (3,))] = -torch.inf
    settings = DySpec(N=5, D_max=3, t=0.05, exact=is_exact)
    for sampling in (PLAIN, Sampling(0.7, 0.9)):
        assert error_of(settings, draft, 4, accept_by_traversal, sampling) < 2e-8


def test_a_long_text_follows_the_targets_law() -> None:
    """What comes after each token, of 2,000 that were drawn by the generator itself."""
    sampling = Sampling(0.8, 0.95, seed=5)
    target, draft = (
        Stub(lambda tokens, positions, table=table: table[tokens].float(), N_IDS)
        for table in (TARGET, OTHER)
    )
    ids = token_ids(generate(target, draft, [0], DySpec(N=4, D_max=2), 2000, sampling=sampling))
    pairs = Counter(itertools.pairwise([0, *ids]))
    for token, after in enumerate(sampling.sampler(CPU).warp(TARGET).tolist()):
        counts = Counter({(i,): pairs[token, i] for i in range(N_IDS) if pairs[token, i]})
        assert_distributed(counts, {(i,): p * counts.total() for i, p in enumerate(after)})


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_text(method: str) -> None:
    """auto by given costs, as it learns from a clock. A tiny temperature is greedy."""
    settings = Auto(costs="0.3:0.04:0.2:0.4") if method == "auto" else METHODS[method]()
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
        ({"temperature": "0.8"}, "temperature '0.8' is not a positive number"),
        ({"temperature": math.nan}, "temperature nan is not"),
        ({"temperature": 1e-46}, "temperature 1e-46 is not a positive number of float32"),
        ({"temperature": 1e39}, r"temperature 1e\+39 is not a positive number of float32"),
        ({"temperature": 0.0, "is_drawn": True}, "greedy text need a draft-temperature"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top-p 1.5 is outside \(0, 1\]"),
        ({"temperature": 1.0, "seed": -1}, "seed -1 is not a whole number"),
        ({"temperature": 1.0, "seed": 1.0}, "seed 1.0 is not a whole number"),
    ],
)
def test_settings_are_checked(values: dict[str, float], message: str) -> None:
    """What is 0 in float32 once gave id 0 every time: 0 / 0 is NaN."""
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
