"""Tests of sampling: with any draft, the text is distributed as the target's own samples are."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy
import pytest
import torch
from every_text import CPU, PLAIN, Enumeration, Learn, target_distribution
from fast import Stub, generate, random_model
from growing import random_options, random_settings
from torch import Tensor
from trees import make_tree, top_k

import dynatree_lab.methods.sampler
from draft_tree import Gates, Level, Rule, Settings
from dynatree_lab.enumeration import difference
from dynatree_lab.generation.compose import Parts
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.acceptances import (
    ACCEPTANCES,
    DrawnAcceptance,
    accept_by_token,
    accept_by_traversal,
)
from dynatree_lab.methods.auto import Auto
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.opttree import OptTree
from dynatree_lab.methods.retrieval import Graft
from dynatree_lab.methods.rules import MethodRule
from dynatree_lab.methods.sampler import MAX_CDF_DRAWS, Sampling
from dynatree_lab.methods.static import (
    Chain,
    ConfidentChain,
    Fixed,
    PaddedAutoregressive,
    SpecInfer,
)
from dynatree_lab.metrics import token_ids
from sampling import probabilities

Draw = Callable[[Tensor, int], tuple[Tensor, Tensor]]
N_IDS = 5
N_DRAWS = 20_000


def logits_table(seed: int) -> Tensor:
    """Return a bigram model: logits [V, V] of the next token after each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_IDS, N_IDS, generator=generator).double() * 1.5


TARGET, OTHER = logits_table(0), logits_table(1)
# Proposes only tokens whose logits are at most the median of the target's
DISJOINT = torch.where(TARGET > TARGET.median(), -1e4, 5.0)
# Never proposes two of the ids
ZEROS = OTHER.index_fill(1, torch.tensor([1, 3]), -torch.inf)
DRAFTS = {"equal": TARGET, "other": OTHER, "disjoint": DISJOINT, "zeros": ZEROS}
DRAFTS["fewer ids"] = OTHER[:3, :3]
DRAFTS["more ids"] = torch.cat([OTHER, OTHER[:2]])[:, [0, 1, 2, 3, 4, 0, 1]]
DRAFTS["overflown"] = OTHER.clone()
DRAFTS["overflown"][2], DRAFTS["overflown"][3, 1] = torch.nan, torch.inf
# With only three ids, all draws of whole trees with two levels can be enumerated
FEW_TARGET = TARGET[:3, :3]
FEW_DRAFTS = {"few other": OTHER[:3, :3], "few zeros": ZEROS[:3, :3], "few flat": OTHER[:3, :3] / 4}
# The last one has another temperature for the draft's distribution
SAMPLINGS = [Sampling(0.6), Sampling(1.0, 0.5), Sampling(1.0, draft_temperature=0.4)]
SAMPLINGS += [Sampling(1.0, top_k=2), Sampling(0.8, 0.9, top_k=3, min_p=0.4)]


# Warping and drawing.


def test_warping_keeps_the_likeliest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.7, 0.1, 0.1, 0.1]]).log()
    kept = Sampling(1.0, top_p=0.75).sampler(CPU).target_distribution(logits)
    expected = torch.tensor([[0, 0.625, 0.375, 0], [0.875, 0.125, 0, 0]])
    torch.testing.assert_close(kept, expected)
    sharper = Sampling(0.5).sampler(CPU).target_distribution(logits)
    torch.testing.assert_close(sharper[0, 1], torch.tensor(25 / 36))
    for coldest in (Sampling(1.0, 1e-9), Sampling(1.0, 1e-30), Sampling(1e-30), Sampling(2e-38)):
        assert coldest.sampler(CPU).target_distribution(logits + 9).tolist() == [
            [0, 1, 0, 0],
            [1, 0, 0, 0],
        ]


def kept_ids(logits: list[float], sampling: Sampling) -> set[int]:
    """Return the ids that transformers' warpers keep, each among those that the one before kept."""
    probs = [math.exp(logit / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=probs.__getitem__, reverse=True)
    lowest = probs[order[min(sampling.top_k or len(order), len(order)) - 1]]
    order = [i for i in order if probs[i] >= lowest]
    total = sum(probs[i] for i in order)
    before = [sum(probs[j] for j in order[:n]) / total for n in range(len(order))]
    order = [i for i, mass in zip(order, before, strict=True) if mass < sampling.top_p]
    return {i for i in order if probs[i] >= sampling.min_p * probs[order[0]]}


def test_top_k_top_p_and_min_p_follow_one_another() -> None:
    """Compare with each set computed by its definition, also for equally likely ids."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 40, generator=generator) * 2
    logits[0, :9] = logits[0].max()
    settings = itertools.product((0.7, 1.6), (1.0, 0.83), (0, 1, 5, 99), (0.0, 0.2, 1.0))
    for temperature, top_p, k, min_p in settings:
        sampling = Sampling(temperature, top_p, top_k=k, min_p=min_p)
        sampler = sampling.sampler(CPU)
        probs = sampler.target_distribution(logits)
        torch.testing.assert_close(probs.sum(dim=1), torch.ones(6))
        assert torch.equal(probs, sampler.draft_distribution(logits))
        for row, found in zip(logits.tolist(), probs, strict=True):
            assert set(found.nonzero().flatten().tolist()) == kept_ids(row, sampling)


def test_the_top_p_set_of_many_ids_is_that_of_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare bit for bit, with many equally likely ids. All ids are sorted only if the first few
    do not suffice."""
    n_ranked: Counter = Counter()
    real = dynatree_lab.methods.sampler.stable_top_k

    def counting(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        n_ranked[k] += 1
        return real(probs, k)

    generator = torch.Generator().manual_seed(1)
    steps = (4 * torch.randn(20, 3000, generator=generator)).round() / 2
    few = dynatree_lab.methods.sampler.N_SORTED
    for sharpness, top_p in itertools.product((0.0, 0.3, 1, 4), (1e-9, 0.3, 0.9, 1 - 1e-12)):
        sampler = Sampling(1.0, top_p).sampler(CPU)
        probs = torch.softmax(sharpness * steps, dim=-1)
        kept = sampler.keep_top_p(probs, 3000)
        with monkeypatch.context() as patch:
            patch.setattr(dynatree_lab.methods.sampler, "stable_top_k", counting)
            assert sampler.keep_top_p(probs, few).equal(kept)
    assert n_ranked[few] == 16 and 4 <= n_ranked[3000] <= 12, n_ranked


def test_the_top_p_set_of_a_large_vocabulary() -> None:
    """Compare with sums in float64. With few bits, most of 50,304 probabilities would count as 0,
    and all tokens would stay."""
    logits = torch.randn(2, 50_304, generator=torch.Generator().manual_seed(3))
    logits[1] *= 4
    probs = torch.softmax(logits, dim=-1).double().sort(dim=-1, descending=True).values
    expected = (probs.cumsum(dim=-1) - probs < 0.9).sum(dim=-1)
    for found in (
        Sampling(1.0, 0.9).sampler(CPU).target_distribution(logits),
        probabilities(logits, 1.0, 0.9),
    ):
        assert ((found > 0).sum(dim=-1) - expected).abs().max() <= 1


def test_min_p_keeps_what_equals_its_limit() -> None:
    sampler = Sampling(1.0, min_p=1.0).sampler(CPU)
    found = sampler.target_distribution(torch.tensor([[3.0, 1.0, 3.0]]))
    assert found.tolist() == [[0.5, 0.0, 0.5]]


def assert_distributed(counts: Counter, expected: dict[tuple, float]) -> None:
    """Fail if something impossible was drawn, or if Pearson's chi-square is more than five standard
    deviations too high."""
    assert all(expected.get(outcome, 0.0) > 0 for outcome in counts)
    parts = [(counts[outcome] - mean) ** 2 / mean for outcome, mean in expected.items() if mean]
    freedom = len(parts) - 1
    assert sum(parts) < freedom + 5 * math.sqrt(2 * freedom) + 5, (parts, freedom)


PLAIN_SAMPLER = PLAIN.sampler(CPU)
DRAWS = [(PLAIN_SAMPLER.draw_by_inverse_cdf, 4), (PLAIN_SAMPLER.draw_by_exponential_race, 4)]
DRAWS.append((PLAIN_SAMPLER.draw_several, MAX_CDF_DRAWS + 1))  # by a race that ranks by topk


@pytest.mark.parametrize(("draw", "k"), DRAWS)
def test_draws_are_without_replacement_and_padding_has_probability_0(draw: Draw, k: int) -> None:
    """Check that the second id depends on the first one as it should."""
    probs = torch.zeros(N_DRAWS, k + 1)
    probs[:, 1], probs[:, 3], probs[:, 4] = 0.5, 0.3, 0.2
    ids, drawn_probs = draw(probs, k)
    drawn = ids[:, :3].tolist()
    assert all(sorted(row) == [1, 3, 4] for row in drawn)
    assert drawn_probs[:, :3].equal(probs.gather(1, ids[:, :3])) and not drawn_probs[:, 3:].any()
    expected = {}
    for first, second in itertools.permutations([1, 3, 4], 2):
        left = 1 - probs[0, first]
        expected[first, second] = N_DRAWS * float(probs[0, first] * probs[0, second] / left)
    assert_distributed(Counter((row[0], row[1]) for row in drawn), expected)


@pytest.mark.parametrize("k", [2, MAX_CDF_DRAWS + 1])
def test_the_seed_decides_what_is_drawn(k: int) -> None:
    """Check both ways to draw. On a GPU, all candidates are drawn in the second way."""
    probs = torch.full((9, 70), 1 / 70)
    one, again, other = (
        Sampling(1.0, seed=seed).sampler(CPU).draw_several(probs, k)[0] for seed in (1, 1, 2)
    )
    assert one.equal(again) and not one.equal(other)


def test_rounding_alone_rejects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a child that is the target's only possible token, so that the residual after a
    rejection is empty. Its ratio is just below 1 by rounding."""
    tree = make_tree([0, 1], [-1, 0])
    tree.draft_slots = [0, -1]
    sampler = PLAIN.sampler(CPU)
    monkeypatch.setattr(sampler, "uniform", lambda: 1 - 2**-53)
    target_probs = torch.tensor([[0.0, 1.0]] * 2)
    path, _ = accept_by_token(tree, target_probs, sampler, [torch.tensor([0.0, 1.0 + 1e-7])])
    assert path == [0, 1], "its probability is above every random number"


def test_a_row_that_overflowed_uses_no_random_number() -> None:
    """Check that the path ends before an accepted row that overflowed, and which number is next."""
    sampler, numbers = PLAIN.sampler(CPU), random.Random(PLAIN.seed)
    logits = torch.tensor([[-torch.inf, 0.0], [torch.nan, torch.nan]])
    assert sampler(make_tree([0, 1], [-1, 0]), logits) == ([0], [1])
    numbers.random()  # drew token 1
    assert sampler.uniform() == numbers.random()


# The distribution of texts is the target's, by enumeration.


@dataclass(frozen=True)
class Made:
    """Settings whose rules are made by a function."""

    make_rule: Callable[[], Rule]


def make_top_k() -> Rule:
    """Return a rule with top-k candidates for sampled text too, as beam has them."""
    rule = Fixed(D=2, B=3, tau=0.0).make_rule()
    rule.draws_candidates = False
    return rule


def make_primed(settings: Graft | Auto, n_ids: int = N_IDS) -> Rule:
    """Return a rule of graft or auto that has already observed the successors of every token."""
    rule = settings.make_rule()
    rule.start([])
    best = OTHER[:n_ids, :n_ids].flip(1)
    rule.observe_target(list(range(n_ids)), top_k(best, n_ids).tokens)
    return rule


def primed(settings: Graft | Auto, n_ids: int = N_IDS) -> Made:
    return Made(partial(make_primed, settings, n_ids))


RULES = {
    "drawn chain": Chain(K=2),
    "stops by what was drawn": ConfidentChain(K=2, p_min=0.3),
    "those of value": DySpec(N=4, D_max=1, t=0.3, exact=False),
    "ranked": Made(make_top_k),
    "grafted beside drawn": primed(Graft(base="linear:K=1", N=4, D_max=1, checkpoints="off")),
    "grafted below drawn": primed(Graft(base="linear:K=1", N=4, at="tail")),
}
FEW_RULES = {
    "best of all drawn": DySpec(N=3, D_max=2),  # more is drawn than verified
    "pairs of pairs": SpecInfer("2:2"),
    "grafted, best": primed(Graft(base="dyspec:N=3:D_max=2", checkpoints="1@0.4", N=5), 3),
    "grafted, tail": primed(Graft(base="dyspec:N=4:D_max=1", N=5, at="tail"), 3),
    "remembered beside drawn": primed(Auto(N=5, D_max=2, costs="0.3:0.04:0.2:0.01"), 3),
}


def error_of(
    settings: Settings,
    draft: Tensor,
    n_tokens: int = 3,
    acceptance: DrawnAcceptance | None = None,
    sampling: Sampling = PLAIN,
    target: Tensor = FEW_TARGET,
    learn: Learn | None = None,
) -> float:
    """Return the total variation between a method's texts of n_tokens and the target's."""
    texts = Enumeration(settings, target, draft, sampling, learn)
    found = texts.distribution(n_tokens, acceptance)
    return difference(found, target_distribution(target, n_tokens, sampling))


@pytest.mark.parametrize("rule", RULES | FEW_RULES)
def test_every_acceptance_is_exact_and_accepts_no_less_than_token(rule: str) -> None:
    """Check the distribution for every acceptance and draft, and the mean accepted length.

    Every acceptance accepts at least as much as token: of top-k rows equally much, and of drawn
    rows below drawn rows more for at least one draft.
    """
    rules = RULES | FEW_RULES
    settings, target, tables = rules[rule], TARGET, DRAFTS
    if rule in FEW_RULES:
        target, tables = FEW_TARGET, FEW_DRAFTS
    turns = itertools.cycle([PLAIN, *SAMPLINGS])
    samplings = itertools.islice(turns, list(rules).index(rule), None)  # each rule begins elsewhere
    gains: dict[str, list[float]] = {by: [] for by in ACCEPTANCES}
    for (name, draft), sampling in zip(tables.items(), samplings, strict=False):
        texts = Enumeration(settings, target, draft, sampling)
        expected = target_distribution(target, 3, sampling)
        for by, accept in ACCEPTANCES.items():
            error = difference(texts.distribution(3, accept), expected)
            assert error < 2e-8, (by, name, sampling)
            length = texts.mean_length(3, accept)
            gains[by].append(length - texts.mean_length(3, accept_by_token))
    for by, more in gains.items():
        assert min(more) > -1e-9
        if not Method(settings).facts.draws_candidates:
            assert max(more) < 1e-9
        elif by != "token" and rule in ("drawn chain", "pairs of pairs"):
            assert max(more) > 0.005


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_exact(method: str) -> None:
    """Check random settings with small trees. A new method needs only its line in the registry."""
    rng = random.Random(method)
    n_done = 0
    for _ in range(1000):
        settings = random_settings(method, rng)
        own = Method(settings, **random_options(settings, rng))
        if n_done < 2 and (not own.facts.draws_candidates or own.max_rows <= 5):
            draft = rng.choice(list(FEW_DRAFTS.values()))
            assert error_of(own, draft, 3, None, rng.choice(SAMPLINGS)) < 2e-8
            n_done += 1
    assert n_done == 2


# What was drawn, or was learned, does not choose among drawn rows.


def set_rising_shares(parts: Parts) -> None:
    parts.rule.rule.shares[:2] = 0.09, 0.6


def set_weights(parts: Parts) -> None:
    parts.drafter.weights = parts.drafter.initial = (1.386, 0.856)


# The draft is certain, but for the root, whose best child is a
SURE = [[0.0, 0.6, 0.3, 0.1], [0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
AFTER_SURE = [[0.0, 0.2, 0.4, 0.4]] * 4
CHOICES = {  # settings; probabilities of the draft and of the target; a learned state
    # A base in threshold form, whose row budget is larger than graft's
    "row budget": (
        Graft(base="dyspec:exact=off:t=0.2:N=6:D_max=3", N=4, checkpoints="off", graft=False),
        [SURE[0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
        TARGET[:4, :4].softmax(-1),
        None,
    ),
    # opttree has top-k candidates for this reason. If it drew, a second child b (0.3) would make
    # level 3 pay, and a row of that level would replace b; c (0.1) would be verified
    "stop by what a level adds": (OptTree(N=4, D_max=3, delta=0.4), SURE, AFTER_SURE, None),
    # The certain child of a takes the row of a's sibling. A net gain that depended on this tree's
    # own draws would let this happen if the sibling is b, but not if it is c
    "cost of a row": (
        Method(DySpec(N=3, D_max=3), costs="1e-9:0.277:1e-9:1e-9"),
        SURE,
        AFTER_SURE,
        None,
    ),
    # Which rows of level 1 are kept depends on whether there is a second level. If the tree's own
    # draws decided that, the total variation would be 0.008
    "cost of a level": (
        Method(DySpec(N=4, D_max=2), costs="1e-9:1e-9:1e-9:0.5"),
        [[0.4, 0, 0.6, 0], [0.1, 0.9, 0, 0], [0.3, 0.7, 0, 0], [0.15, 0, 0.2, 0.65]],
        [[0.29, 0.22, 0.2, 0.29]] * 4,
        None,
    ),
    # Shares that rise from one place to the next. The gate once cut the first drawn candidate and
    # not the second: total variation 0.098
    "later sibling": (
        Method(DySpec(N=3, D_max=1), costs="0.01:0.1:0.01:0.1"),
        [[0.6, 0.25, 0.15]] * 3,
        [[0.2, 0.5, 0.3]] * 3,
        set_rising_shares,
    ),
    # A drawn row may be displaced if its calibrated probability is above the value known before the
    # draw. A checkpoint that looked at the former gave a total variation of 0.019
    "checkpoint": (
        Method(Graft(base="dyspec:N=3:D_max=3", checkpoints="1@0.7", graft=False), calibrate=True),
        [[0.2, 0.5, 0.3]] * 3,
        [[0.01, 0.55, 0.44]] * 3,
        set_weights,
    ),
    # Branches compete for rows, with two possible ids after each. So the rows of one depend on the
    # draws of the others
    "competing branches": (
        DySpec(N=5, D_max=3, t=0.05, exact=False),
        [[0.7, 0.3, 0.0], [0.0, 0.45, 0.55], [0.8, 0.0, 0.2]],
        FEW_TARGET.softmax(-1),
        None,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_no_draw_chooses_among_drawn_rows(name: str) -> None:
    settings, draft, target, learn = CHOICES[name]
    draft, target = (torch.as_tensor(rows).double().log() for rows in (draft, target))
    accept = accept_by_traversal if name == "competing branches" else None
    assert error_of(settings, draft, 4, accept, target=target, learn=learn) < 1e-7


class Second(MethodRule):
    """A fork's faulty rule: of two drawn candidates it adds only the second."""

    def __init__(self, draws_candidates: bool):
        super().__init__(max_branches=2, max_depth=1, max_rows=3)
        self.draws_candidates = draws_candidates

    def add_gates(self, level: Level) -> Gates:
        return {"second": numpy.arange(level.tokens.shape[1]) == numpy.ones((len(level.tokens), 1))}


def test_a_rule_may_cut_drawn_candidates_only_as_a_suffix() -> None:
    """Refuse another cut, whose total variation would be 0.53. Any top-k candidate may be cut."""
    draft = FEW_DRAFTS["few other"]
    with pytest.raises(ValueError, match="Second cuts a drawn candidate and adds a later one"):
        error_of(Made(partial(Second, True)), draft)
    assert error_of(Made(partial(Second, False)), draft) < 2e-8


def test_a_long_text_follows_the_targets_distribution() -> None:
    """Check which tokens follow each token, in 600 tokens by the random generator itself."""
    sampling = Sampling(0.8, 0.95, seed=5)
    target, draft = (
        Stub(lambda tokens, positions, table=table: table[tokens].float(), N_IDS)
        for table in (TARGET, OTHER)
    )
    ids = token_ids(generate(target, draft, [0], DySpec(N=4, D_max=2), 600, sampling=sampling))
    pairs = Counter(itertools.pairwise([0, *ids]))
    for token, after in enumerate(sampling.sampler(CPU).target_distribution(TARGET).tolist()):
        counts = Counter({(i,): pairs[token, i] for i in range(N_IDS) if pairs[token, i]})
        assert_distributed(counts, {(i,): p * counts.total() for i, p in enumerate(after)})


@pytest.mark.parametrize("settings", [OptTree(), SpecInfer(), DySpec()], ids=str)
def test_the_same_seed_gives_the_same_text(settings: Settings) -> None:
    """Compare texts by seed, and a tiny temperature with greedy, for each acceptance."""
    target = random_model(0)
    draft = random_model(1, vocab_size=80)

    def text(sampling: Sampling) -> list[int]:
        return token_ids(generate(target, draft, [3, 1, 4], settings, 12, sampling=sampling))

    one, again, other = (text(Sampling(1.0, top_p=0.9, seed=seed)) for seed in (1, 1, 2))
    assert one == again != other
    greedy = token_ids(generate(target, None, [3, 1, 4], PaddedAutoregressive(), 12))
    assert text(Sampling(1e-6)) == greedy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "0.8"}, "temperature is '0.8', it must be of type float"),
        ({"temperature": -1.0}, "temperature is -1.0, it must be above 0 and finite"),
        ({"temperature": 0.0, "draws_greedy": True}, "greedy text needs a draft_temperature"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5, it must be above 0 and at most 1"),
        ({"temperature": 1.0, "seed": -1}, "seed is -1, it must be from 0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1, it must be at least 0"),
        ({"temperature": 1.0, "min_p": 2.0}, "min_p is 2.0, it must be between 0 and 1"),
    ],
)
def test_settings_are_checked(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
