"""Sampling: the committed text is distributed as the target's own samples, whatever the draft."""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
import pytest
import torch
from conftest import random_model, random_settings, ranked
from law import CPU, Law, Scripted, bigram, difference, every_outcome, law, target_law
from torch import Tensor

import draft_tree
import verify
from cli.metrics import token_ids
from draft_tree import Acceptance, DynaTree, Gates, Level, Rule, Settings, Tree, grow
from dynatree import generate
from engine.sampling import Sampler, Sampling
from methods import METHODS
from methods.auto import Auto
from methods.dyspec import DySpec
from methods.lookup import Lookup, LookupRule
from methods.opttree import OptTree, OptTreeRule
from methods.retrieval import Graft, GraftRule
from methods.sequoia import Sequoia
from methods.static import Alone, Chain, ConfidentChain, Fixed, SpecInfer, StaticRule
from verify import accept_sampled, try_child

N_IDS = 5
ROOT = 0
N_DRAWS = 20_000
N_TEXTS = 8_000


def logits_table(seed: int, sharpness: float = 1.5) -> Tensor:
    """A bigram model: logits [V, V] of the next token after each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_IDS, N_IDS, generator=generator).double() * sharpness


TARGET = logits_table(0)
# Certain of what the target never writes, and the reverse
DISJOINT = torch.where(TARGET > TARGET.median(), -1e4, 5.0)
OTHER = logits_table(1)
# Never proposes two of the ids
ZEROS = OTHER.index_fill(1, torch.tensor([1, 3]), -torch.inf)
DRAFTS = {"equal": TARGET, "other": OTHER, "disjoint": DISJOINT, "zeros": ZEROS}
DRAFTS["fewer ids"] = OTHER[:3, :3]


def test_warping_keeps_the_likeliest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.7, 0.1, 0.1, 0.1]]).log()
    sampler = Sampling(1.0, top_p=0.75).sampler(CPU)
    kept = torch.tensor([[0, 0.625, 0.375, 0], [0.875, 0.125, 0, 0]])
    torch.testing.assert_close(sampler.warp(logits), kept)
    sharper = Sampling(0.5).sampler(CPU).warp(logits)
    torch.testing.assert_close(sharper[0, 1], torch.tensor(25 / 36))
    one = Sampling(1.0, top_p=1e-9).sampler(CPU).warp(logits)
    assert one.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    least = Sampling(1.0, top_p=1e-30).sampler(CPU).warp(logits)
    assert least.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    cold = Sampling(1e-30).sampler(CPU).warp(logits)
    assert cold.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_draws_are_without_replacement_and_impossible_tokens_come_last() -> None:
    sampler = Sampling(1.0).sampler(CPU)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2]).expand(N_DRAWS, N_IDS)
    drawn = sampler.draw(probs, 4)
    for row in drawn.tolist():
        assert sorted(row[:3]) == [1, 3, 4]
        assert row[3] in (0, 2)
    expected = {}
    for first, second in itertools.permutations([1, 3, 4], 2):
        left = 1 - probs[0, first]
        expected[first, second] = N_DRAWS * float(probs[0, first] * probs[0, second] / left)
    counts = Counter([tuple(pair) for pair in drawn[:, :2].tolist()])
    assert_distributed(counts, expected)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_what_is_proposed_is_what_draw_draws(k: int) -> None:
    """With its log-probabilities, and the draft's distribution: warped by its own temperature."""
    sampling = Sampling(1.0, top_p=0.9, seed=3, draft_temperature=0.5)
    logits = logits_table(4).float()
    ids, logprobs, drawn_from = sampling.sampler(CPU).propose(logits, k)
    again = sampling.sampler(CPU)
    torch.testing.assert_close(drawn_from, Sampling(0.5, top_p=0.9).sampler(CPU).warp(logits))
    drawn = again.draw(again.warp_draft(logits), min(k, N_IDS))
    assert ids.tolist() == drawn.tolist()
    numpy.testing.assert_allclose(numpy.exp(logprobs), drawn_from.gather(1, drawn), rtol=1e-6)
    assert (ids.dtype, logprobs.dtype) == (numpy.int64, numpy.float32)
    assert k < 5 or numpy.isinf(logprobs).any(), "what cannot be drawn comes last"


def pearson(counts: Counter, expected: dict[tuple, float]) -> tuple[float, int]:
    """Pearson's chi-square over the possible outcomes, and its degrees of freedom."""
    statistic = 0.0
    n_possible = 0
    for outcome, mean in expected.items():
        if mean > 0:
            statistic += (counts[outcome] - mean) ** 2 / mean
            n_possible += 1
    return statistic, n_possible - 1


def assert_distributed(counts: Counter, expected: dict[tuple, float]) -> None:
    """Pearson's chi-square at five standard deviations; nothing impossible was drawn."""
    for outcome in counts:
        assert expected.get(outcome, 0.0) > 0, f"{outcome} is impossible"
    statistic, freedom = pearson(counts, expected)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5, (statistic, freedom)


def assert_same_law(
    rule: Settings,
    draft: Tensor,
    sampling: Sampling,
    target: Tensor = TARGET,
    acceptance: Acceptance | None = None,
    lengths: Sequence[int] = (2, 3),
) -> None:
    """Each text of two tokens, and of three, is as likely as from the target alone."""
    for n_tokens in lengths:
        found = law(rule, target, draft, n_tokens, acceptance, sampling)
        assert difference(found, target_law(target, n_tokens, sampling)) < 2e-8
        assert sum(found.values()) == pytest.approx(1.0, abs=2e-8)


def error_of(
    rule: Settings,
    draft: Tensor,
    n_tokens: int,
    target: Tensor = TARGET,
    acceptance: Acceptance | None = None,
) -> float:
    """How far texts of n_tokens are from the target's law."""
    found = law(rule, target, draft, n_tokens, acceptance)
    return difference(found, target_law(target, n_tokens))


OWN_HEAT = Sampling(1.0, draft_temperature=0.4)  # the draft's distribution, warped otherwise
HEATS = [Sampling(0.6), Sampling(1.0), Sampling(1.0, 0.5), OWN_HEAT]
CASES = list(itertools.product(HEATS, DRAFTS))


@pytest.mark.parametrize(("sampling", "draft"), CASES)
def test_drawn_chains_leave_the_targets_law(sampling: Sampling, draft: str) -> None:
    assert_same_law(Chain(K=2), DRAFTS[draft], sampling)


# Up to three of them, drawn without replacement
SIBLINGS = DySpec(N=4, D_max=1, t=0.001, exact=False)


@pytest.mark.parametrize(("sampling", "draft"), CASES)
@pytest.mark.parametrize("t", [0.001, 0.3])  # the second leaves out draws of little value
def test_drawn_siblings_leave_the_targets_law(t: float, sampling: Sampling, draft: str) -> None:
    assert_same_law(replace(SIBLINGS, t=t), DRAFTS[draft], sampling)


# Of three ids only: whole trees of two drawn levels, in every combination of all their draws
FEW_TARGET = TARGET[:3, :3]
FEW_DRAFTS = {"other": OTHER[:3, :3], "zeros": ZEROS[:3, :3], "flat": OTHER[:3, :3] / 4}


@pytest.mark.parametrize("n_rows", [3, 4])
@pytest.mark.parametrize(("sampling", "draft"), list(itertools.product(HEATS, FEW_DRAFTS)))
def test_the_best_of_all_drawn_nodes_leave_the_targets_law(
    n_rows: int, sampling: Sampling, draft: str
) -> None:
    """More is drawn than verified, and what is left out is chosen by value."""
    rule = DySpec(N=n_rows, D_max=2)
    assert_same_law(rule, FEW_DRAFTS[draft], sampling, FEW_TARGET)


def test_choosing_by_what_was_drawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the likeliest of the drawn nodes are verified."""
    best_rows, lone = draft_tree.best_rows, draft_tree.lone
    growing = []

    def noted(root: int) -> Tree:
        growing.append(lone(root))
        return growing[-1]

    def likeliest_rows(values: list[float], n: int) -> list[int]:
        return best_rows(growing[-1].path_logprobs, n)

    monkeypatch.setattr(draft_tree, "lone", noted)
    monkeypatch.setattr(draft_tree, "best_rows", likeliest_rows)
    rule = DySpec(N=3, D_max=2)
    assert max(error_of(rule, draft, 3, FEW_TARGET) for draft in FEW_DRAFTS.values()) > 0.1


def test_what_a_budget_cuts_off_does_not_choose_among_drawn_nodes() -> None:
    """Graft's own rows are fewer than those of its base, whose threshold form has a budget."""
    base = "dyspec:exact=off:t=0.2:N=6:D_max=3"
    rule = Graft(base=base, N=4, checkpoints="off", graft=False)
    draft = torch.eye(4, dtype=torch.float64).log()  # certain, but for the root
    draft[0] = torch.tensor([0.0, 0.6, 0.3, 0.1]).log()
    target = TARGET[:4, :4]
    assert_same_law(rule, draft, Sampling(1.0), target, lengths=(2, 3, 4))


@pytest.mark.parametrize(("sampling", "draft"), CASES)
@pytest.mark.parametrize("rule", [Fixed(D=2, B=3, tau=0.0), DynaTree(tau=0.0, rho_stop=0.01)])
def test_ranked_children_leave_the_targets_law(
    rule: Settings, sampling: Sampling, draft: str
) -> None:
    assert_same_law(rule, DRAFTS[draft], sampling)


@dataclass(frozen=True)
class GraftedChain:
    """A drawn child with ranked siblings from the successor table beside it."""

    def rule(self) -> GraftRule:
        rule = GraftRule(Chain(K=1).rule(), n_rows=4, graft_depth=1, checkpoints={})
        rule.read(list(range(N_IDS)), ranked(OTHER.flip(1)).tokens)
        return rule


@pytest.mark.parametrize(("sampling", "draft"), CASES)
def test_drawn_and_grafted_siblings_leave_the_targets_law(sampling: Sampling, draft: str) -> None:
    assert_same_law(GraftedChain(), DRAFTS[draft], sampling)


def test_a_ranked_sibling_is_tried_after_the_drawn_ones() -> None:
    tree = drawn_tree(GraftedChain().rule(), OTHER, 1, Sampling(1.0).sampler(CPU))
    assert tree.are_retrieved == [False, False, True, True]
    assert tree.depth == 1
    assert [probs.shape for probs in tree.drawn_from] == [(N_IDS,)]


@dataclass(frozen=True)
class Known:
    """graft, when the table has read every token; over a rule that draws."""

    settings: Graft
    best: Tensor  # [V, V], by falling logit what the table holds after each token

    def rule(self) -> GraftRule:
        rule = self.settings.rule()
        assert rule.is_drawing
        rule.read(list(range(len(self.best))), ranked(self.best).tokens)
        return rule


@pytest.mark.parametrize(("sampling", "draft"), CASES)
def test_what_is_grafted_below_a_drawn_leaf_leaves_the_targets_law(
    sampling: Sampling, draft: str
) -> None:
    rule = Known(Graft(base="linear:K=1", N=4, at="tail"), OTHER.flip(1))
    assert_same_law(rule, DRAFTS[draft], sampling)
    tree = drawn_tree(rule.rule(), DRAFTS[draft], 2, sampling.sampler(CPU))
    assert tree.depths == [0, 1, 2, 2]
    assert tree.are_retrieved == [False, False, True, True]


@pytest.mark.parametrize("at", ["root", "tail"])
@pytest.mark.parametrize("base", ["dyspec:N=3:D_max=2", "dyspec:N=4:D_max=1"])
@pytest.mark.parametrize(("sampling", "draft"), list(itertools.product(HEATS, FEW_DRAFTS)))
def test_graft_over_the_best_of_all_drawn_nodes_leaves_the_targets_law(
    base: str, at: str, sampling: Sampling, draft: str
) -> None:
    """What was drawn is kept whatever it is; what is grafted beside it depends on it."""
    grafted = Graft(base=base, checkpoints="1@0.4", N=5, at=at)
    rule = Known(grafted, OTHER[:3, :3].flip(1))
    assert_same_law(rule, FEW_DRAFTS[draft], sampling, FEW_TARGET)


@dataclass(frozen=True)
class Copied:
    """The two tokens that followed 0 before; no draft has a say."""

    def rule(self) -> LookupRule:
        rule = Lookup(K=2).rule()
        rule.start([0, 2, 1, 3])
        return rule


@pytest.mark.parametrize("sampling", HEATS)
def test_a_copy_leaves_the_targets_law(sampling: Sampling) -> None:
    tree = grow(Copied().rule(), ROOT, None, 2)
    assert tree.tokens == [0, 2, 1]
    assert_same_law(Copied(), OTHER, sampling)


@pytest.mark.parametrize(("sampling", "draft"), CASES)
def test_a_chain_that_stops_by_what_was_drawn_leaves_the_targets_law(
    sampling: Sampling, draft: str
) -> None:
    rule = ConfidentChain(K=2, p_min=0.3)
    assert_same_law(rule, DRAFTS[draft], sampling)


SHAPES = [SpecInfer("2:2"), SpecInfer("1:3"), Sequoia(N=6, D_max=2, p="0.6:0.3:0.1")]


@pytest.mark.parametrize("rule", SHAPES)
@pytest.mark.parametrize(("sampling", "draft"), list(itertools.product(HEATS, FEW_DRAFTS)))
def test_drawn_trees_of_a_settled_shape_leave_the_targets_law(
    rule: Settings, sampling: Sampling, draft: str
) -> None:
    assert_same_law(rule, FEW_DRAFTS[draft], sampling, FEW_TARGET)


def test_leaving_out_an_unlikely_draw_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: a chain without the unsure token, as one may have it that is greedy."""

    def expand(rule: StaticRule, level: Level) -> tuple[Gates, Gates]:
        is_sure = level.logprobs >= rule.least_to_expand
        return {"p_min": is_sure}, {}

    monkeypatch.setattr(StaticRule, "expand", expand)
    assert error_of(ConfidentChain(K=2, p_min=0.3), OTHER, 2) > 0.01


def test_a_stop_that_decides_which_draws_are_tried_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted error: opttree with drawn children. By hand, of four rows: a (.6) is drawn first
    and goes on for sure, the second child is worth .4. If it is b (.3), level 2 adds .5 and level 3
    is drafted, whose row takes b's; if it is c (.1), level 2 adds .3 and c is tried."""
    a_first = [0.0, 0.6, 0.3, 0.1]
    draft = torch.tensor([a_first] + [[0.0, 1.0, 0.0, 0.0]] * 3).log()
    target = torch.tensor([[0.0, 0.2, 0.4, 0.4]] * 4).log()
    rule = OptTree(N=4, D_max=3, delta=0.4)
    assert_same_law(rule, draft, Sampling(1.0), target, lengths=(2, 3, 4))
    monkeypatch.setattr(OptTreeRule, "is_drawing", True)
    assert error_of(rule, draft, 4, target) > 0.01


def test_a_draft_that_is_not_renormalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the next sibling's chance is taken from the first one's distribution."""
    monkeypatch.setattr(verify, "without", lambda token, draft_probs: draft_probs)
    for n_tokens in (2, 3):
        assert error_of(SIBLINGS, OTHER, n_tokens) > 0.01
    rule, depth = RULES["dyspec"]
    assert chi_square(rule, depth, [(Sampling(0.6), "zeros")], 2000) > 5


def test_a_ranked_child_taken_for_a_drawn_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: R[y] / q[y] for a child that was not drawn from q."""
    draft_probs = torch.softmax(OTHER[0], dim=-1)

    def as_if_drawn(token: int, residual: Tensor, drawn_from: None) -> tuple[float, Tensor, float]:
        return try_child(token, residual, draft_probs)

    monkeypatch.setattr(verify, "try_child", as_if_drawn)
    for n_tokens in (2, 3):
        assert error_of(Fixed(D=1, B=2, tau=0.0), OTHER, n_tokens) > 0.01
    rule, depth = RULES["fixed"]
    assert chi_square(rule, depth, [(Sampling(1.0), "other")], 2000) > 5


def acceptance_of(renormalises: bool = True, knows_residual: bool = True) -> Acceptance:
    """An acceptance of drawn siblings, for tables of one size; wrong where it is told to be.

    It may leave the residual as large as the rejection left it, or draw the bonus from the target's
    own distribution, as if no child had been rejected.
    """

    def accept(
        tree: Tree, logits: Tensor, sampler: Sampler, settings: Settings
    ) -> tuple[list[int], list[int]]:
        path = [0]
        is_over = False
        while not is_over:
            row = path[-1]
            residual = target_probs = sampler.warp(logits)[row]
            children = [child for child, parent in enumerate(tree.parents) if parent == row]
            for child in children:
                token = tree.tokens[child]
                drawn_from = tree.drawn_from[tree.draft_slots[row]].clone()
                drawn_from[[tree.tokens[elder] for elder in children if elder < child]] = 0.0
                drawn_from /= drawn_from.sum()
                if sampler.coin() < float(residual[token] / drawn_from[token]):
                    path.append(child)
                    break
                residual = (residual - drawn_from).clamp(min=0.0)
                if renormalises:
                    residual = residual / residual.sum()
            is_over = path[-1] == row
        bonus = sampler.draw((residual if knows_residual else target_probs)[None], 1)
        return path, [tree.tokens[row] for row in path[1:]] + [int(bonus)]

    return accept


PAIR = SpecInfer("2")  # siblings, below every token but the last
WRONG = [{"renormalises": False}, {"knows_residual": False}]


@pytest.mark.parametrize("n_tokens", [2, 3])
@pytest.mark.parametrize("mistake", WRONG, ids=str)
def test_a_wrong_acceptance_is_caught(mistake: dict[str, bool], n_tokens: int) -> None:
    assert error_of(PAIR, OTHER, n_tokens, acceptance=acceptance_of(**mistake)) > 0.01
    assert error_of(PAIR, OTHER, n_tokens, acceptance=acceptance_of()) < 2e-8


def test_an_acceptance_that_a_rule_brings_is_the_one_that_is_tested() -> None:
    """It is told the settings of its method."""
    seen = []

    @dataclass(frozen=True)
    class Unsure(Chain):
        def rule(self) -> StaticRule:
            rule = super().rule()
            rule.acceptance = accept_nothing
            return rule

    def accept_nothing(
        tree: Tree, logits: Tensor, sampler: Sampler, settings: Settings
    ) -> tuple[list[int], list[int]]:
        seen.append(settings)
        return [0], sampler.draw(sampler.warp(logits[:1]), 1)[0].tolist()

    rule = Unsure(K=2)
    assert_same_law(rule, OTHER, Sampling(1.0))
    assert set(seen) == {rule}
    assert error_of(rule, OTHER, 2, acceptance=acceptance_of(knows_residual=False)) > 0.01


def test_what_an_acceptance_returns_must_be_a_path_and_its_tokens() -> None:
    """A text alone would not tell: it is the caches that would hold something else."""
    for path, tokens in (([1], [0]), ([0], [0, 0]), ([0, 2], [1, 0]), ([0, 1], [9, 0])):
        with pytest.raises(AssertionError, match="row|path"):
            law(Chain(K=2), TARGET, OTHER, 3, lambda *_, found=(path, tokens): found)


def test_a_coin_may_be_compared_more_than_once() -> None:
    """Every outcome with its chance; by hand."""

    def trial(sampler: Scripted) -> tuple[bool, ...]:
        coin = sampler.coin()
        return coin < 0.3, coin >= 0.6, 0.3 >= coin, coin > -1.0, coin < 7.0, coin <= math.nan

    found = Counter()
    for result, chance in every_outcome(trial, Sampling(1.0).sampler(CPU)):
        found[result] += chance
    always = (True, True, False)
    low, middle, high = (True, False, True), (False, False, False), (False, True, False)
    assert found == pytest.approx({low + always: 0.3, middle + always: 0.3, high + always: 0.4})


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
            assert_same_law(settings, draft, rng.choice(HEATS), FEW_TARGET)
            n_done += 1
    assert n_done == 4


RULES = {  # those with siblings, and the depth to draft
    "dyspec": (DySpec(N=4, D_max=2), 2),
    "fixed": (Fixed(D=1, B=3, tau=0.0), 1),
    "graft": (GraftedChain(), 1),
}
HEAT = [Sampling(0.6, 1.0), Sampling(0.6, 0.7), Sampling(1.0, 1.0, draft_temperature=0.6)]
HEAT.append(Sampling(1.0, 0.7))
RARE = ("rare",)  # stands for all outcomes that are expected less than five times


def drawn_tree(rule: Rule, table: Tensor, depth: int, sampler: Sampler) -> Tree:
    return grow(rule, ROOT, bigram(table, rule, sampler, N_IDS), depth)


@torch.inference_mode()
def draw_pairs(rule: Settings, depth: int, draft: str, sampler: Sampler, n: int) -> list[tuple]:
    """The first two tokens of n texts, by the real generator; one that is missing is ar's."""
    target_probs = sampler.warp(TARGET)
    one_rule = rule.rule()
    tree = None
    texts = []
    for _ in range(n):
        if tree is None or one_rule.is_drawing:  # a ranked tree is always the same
            tree = drawn_tree(one_rule, DRAFTS[draft], depth, sampler)
        _, tokens = accept_sampled(tree, TARGET[tree.tokens], sampler, rule)
        texts.append(tokens[:2])
    short = [text for text in texts if len(text) == 1]
    last = [text[0] for text in short]
    following = sampler.draw(target_probs[last], 1).tolist()
    for text, second in zip(short, following, strict=True):
        text += second
    return [tuple(text) for text in texts]


def chi_square(rule: Settings, depth: int, conditions: list[tuple], n_draws: int) -> float:
    """How far the first two tokens are from the target's law, in standard deviations.

    Pearson's statistic, summed over conditions (sampling, draft) of n_draws each.
    """
    total = 0.0
    total_freedom = 0
    for seed, (sampling, draft) in enumerate(conditions):
        sampler = replace(sampling, seed=seed).sampler(CPU)
        counts = Counter(draw_pairs(rule, depth, draft, sampler, n_draws))
        expected_law = target_law(TARGET, 2, sampling)
        for outcome in counts:
            assert expected_law[outcome] > 0, f"an impossible text: {outcome}"
        seen: Counter = Counter()
        expected: Law = defaultdict(float)
        for outcome, p in expected_law.items():
            cell = outcome if p * n_draws >= 5 else RARE
            seen[cell] += counts[outcome]
            expected[cell] += p * n_draws
        statistic, freedom = pearson(seen, expected)
        total += statistic
        total_freedom += freedom
    return (total - total_freedom) / math.sqrt(2 * total_freedom)


@pytest.mark.parametrize("name", RULES)
def test_drawn_texts_follow_the_targets_law(name: str) -> None:
    """Drawn by the generator itself, not a script: every heat with every draft."""
    conditions = list(itertools.product(HEAT, DRAFTS))
    rule, depth = RULES[name]
    assert chi_square(rule, depth, conditions, N_TEXTS // len(conditions)) < 5


def test_a_rejection_that_rounding_alone_allows_is_none() -> None:
    """Nothing is left of the residual: the child is the only token the target can write."""
    only = torch.tensor([0.0, 1.0, 0.0])
    almost = torch.tensor([0.0, 1.0 + 1e-7, 0.0])
    chance, _, _ = try_child(1, only, almost)
    assert chance == 1.0, "above every coin"


def repeatable(method: str) -> Settings:
    """A method's defaults; auto without learning, as it learns from a clock."""
    if method == "auto":
        return Auto(learn=False)
    return METHODS[method]()


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_text(method: str) -> None:
    settings = repeatable(method)
    target = random_model(0)
    draft = random_model(1, vocab_size=80)

    def text(seed: int) -> list[int]:
        sampling = Sampling(1.0, top_p=0.9, seed=seed)
        return token_ids(generate(target, draft, [3, 1, 4], settings, 30, sampling=sampling))

    first = text(1)
    assert len(first) == 30
    assert text(1) == first
    assert text(2) != first


def test_a_tiny_temperature_is_greedy() -> None:
    target = random_model(0)
    draft = random_model(1)
    greedy = token_ids(generate(target, None, [3, 1, 4], Alone(), 30))
    for kind in METHODS.values():
        cold = generate(target, draft, [3, 1, 4], kind(), 30, sampling=Sampling(1e-6))
        assert token_ids(cold) == greedy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 is not a positive number"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan is not"),
        ({"temperature": 1e-46}, "temperature 1e-46 is out of float32's range, 1.2e-38 to 3.4e"),
        ({"temperature": 5e-324}, "temperature 5e-324 is out of float32's range"),
        ({"temperature": 1e39}, r"temperature 1e\+39 is out of float32's range"),
        ({"temperature": 1.0, "draft_temperature": 1e-46}, "draft-temperature 1e-46 is out of"),
        ({"temperature": 1.0, "top_p": 1e-46}, "top-p 1e-46 is out of float32's range"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top-p 0.0 is outside \(0, 1\]"),
        ({"temperature": 1.0, "seed": -1}, "seed -1 is outside"),
    ],
)
def test_settings_are_checked(values: dict[str, float], message: str) -> None:
    """What is 0 in float32 once gave id 0 every time: 0 / 0 is NaN."""
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
