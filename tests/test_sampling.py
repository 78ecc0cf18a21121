"""Sampling: the committed text is distributed as the target's own samples, whatever the draft."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import random_model
from torch import Tensor

import draft_tree
import verify
from cli.metrics import token_ids
from draft_tree import Draft, DynaTree, Level, Settings, Tree, grow
from dynatree import generate
from engine.sampling import Sampler, Sampling
from engine.scores import Scores
from methods import METHODS
from methods.auto import Auto
from methods.dyspec import DySpec
from methods.lookup import Lookup, LookupRule
from methods.opttree import OptTree, OptTreeRule
from methods.retrieval import Graft, GraftRule
from methods.sequoia import Sequoia
from methods.static import Alone, Chain, ConfidentChain, Fixed, SpecInfer, StaticRule
from verify import accept_sampled, try_children

CPU = torch.device("cpu")
N_IDS = 5
ROOT = torch.tensor([0])
N_DRAWS = 20_000
N_TEXTS = 8_000


def logits_table(seed: int, sharpness: float = 1.5) -> Tensor:
    """A bigram model: logits [V, V] of the next token after each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_IDS, N_IDS, generator=generator).double() * sharpness


def bigram(table: Tensor) -> Draft:
    """The draft that a table of logits [V, V] makes."""

    def draft(tokens: Tensor, parents: Tensor | None) -> Scores:
        return Scores(table[tokens])

    return draft


TARGET = logits_table(0)
# Certain of what the target never writes, and the reverse
DISJOINT = torch.where(TARGET > TARGET.median(), -1e4, 5.0)
OTHER = logits_table(1)
# Never proposes two of the ids
ZEROS = OTHER.index_fill(1, torch.tensor([1, 3]), -torch.inf)
DRAFTS = {"equal": TARGET, "other": OTHER, "disjoint": DISJOINT, "zeros": ZEROS}


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


class Scripted:
    """A sampler whose every choice is fixed beforehand, and the probability that it comes so."""

    def __init__(self, settings: Sampling, script: list[int]):
        """script: which of its options each choice takes."""
        self.warp = settings.sampler(CPU).warp
        self.warp_draft = settings.sampler(CPU).warp_draft
        self.script = script
        self.weight = 1.0  # of all choices so far together
        self.n_options: list[int] = []  # that each choice has had

    def choose(self, weights: list[float]) -> int:
        """One of the options of positive weight, as the script says; the first past its end."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        position = len(self.n_options)
        self.n_options.append(len(possible))
        scripted = 0
        if position < len(self.script):
            scripted = self.script[position]
        chosen = possible[scripted]
        self.weight *= weights[chosen]
        return chosen

    def draw(self, probs: Tensor, k: int) -> Tensor:
        return torch.tensor([self.draw_row(row, k) for row in probs.tolist()])

    def draw_row(self, probs: list[float], k: int) -> list[int]:
        """Each draw is from what the earlier ones leave; when nothing is left, impossible ids."""
        drawn: list[int] = []
        for _ in range(k):
            left = 1 - sum(probs[i] for i in drawn)
            rest = [0.0] * len(probs)
            for i, p in enumerate(probs):
                if i not in drawn and left >= 1e-6:
                    rest[i] = p / left
            if any(rest):
                drawn.append(self.choose(rest))
            else:
                impossible = [i for i, p in enumerate(probs) if p == 0 and i not in drawn]
                drawn.append(impossible[0])
        return drawn

    def coin(self) -> "Scripted":
        return self

    def __lt__(self, ratio: Tensor) -> bool:
        """coin < ratio, a choice between yes and no."""
        yes = min(1.0, float(ratio))
        return self.choose([yes, 1 - yes]) == 0


def every_outcome(
    trial: Callable[[Scripted], object], settings: Sampling
) -> Iterator[tuple[object, float]]:
    """What `trial` returns and how likely that is, for all of its choices in all combinations."""
    script: list[int] | None = []
    while script is not None:
        sampler = Scripted(settings, script)
        result = trial(sampler)
        yield result, sampler.weight
        n_unscripted = len(sampler.n_options) - len(script)
        taken = script + [0] * n_unscripted
        script = next_script(taken, sampler.n_options)


def next_script(taken: list[int], n_options: list[int]) -> list[int] | None:
    """The next combination, counting up from the last choice; None after the last one."""
    for i in reversed(range(len(taken))):
        if taken[i] + 1 < n_options[i]:
            return taken[:i] + [taken[i] + 1]
    return None


def law_of(
    rule: Settings, draft: Tensor, depth: int, settings: Sampling, target: Tensor = TARGET
) -> dict[tuple, float]:
    """The exact distribution of two tokens after token 0, drafted below it and verified.

    Each tree that can be drafted is so once, and then verified in every way.
    """

    def drafting(sampler: Scripted) -> Tree:
        return grow(rule.rule(), ROOT, bigram(draft), depth, sampler)

    law: dict[tuple, float] = defaultdict(float)
    for tree, chance in every_outcome(drafting, settings):
        for text, chance_below in every_outcome(two_tokens(tree, target), settings):
            law[text] += chance * chance_below
    return law


def two_tokens(tree: Tree, target: Tensor) -> Callable[[Scripted], tuple]:
    """Verify the tree, and fill up with the target's own samples."""

    def trial(sampler: Scripted) -> tuple:
        _, tokens = accept_sampled(tree, target[tree.tokens], sampler)
        text = tokens[:2]
        while len(text) < 2:
            text += sampler.draw(sampler.warp(target[text[-1:]]), 1)[0].tolist()
        return tuple(text)

    return trial


def target_law(settings: Sampling, target: Tensor = TARGET) -> dict[tuple, float]:
    """How the target's own samples of two tokens after token 0 are distributed."""
    probs = settings.sampler(CPU).warp(target)
    law = {}
    for first, second in itertools.product(range(len(target)), repeat=2):
        law[first, second] = float(probs[0, first] * probs[first, second])
    return law


def error_of(law: dict[tuple, float], settings: Sampling, target: Tensor = TARGET) -> float:
    """By how much any text of two tokens is likelier, or less likely, than from the target."""
    expected = target_law(settings, target)
    return max(abs(law.get(outcome, 0.0) - p) for outcome, p in expected.items())


def assert_same_law(law: dict[tuple, float], settings: Sampling, target: Tensor = TARGET) -> None:
    """Each text of two tokens is as likely as from the target alone."""
    assert error_of(law, settings, target) < 2e-8
    assert sum(law.values()) == pytest.approx(1.0, abs=2e-8)


OWN_HEAT = Sampling(1.0, draft_temperature=0.4)  # the draft's distribution, warped otherwise
HEATS = [Sampling(0.6), Sampling(1.0), Sampling(1.0, 0.5), OWN_HEAT]
CASES = list(itertools.product(HEATS, DRAFTS))


@pytest.mark.parametrize(("settings", "draft"), CASES)
def test_drawn_chains_leave_the_targets_law(settings: Sampling, draft: str) -> None:
    law = law_of(Chain(K=2), DRAFTS[draft], 2, settings)
    assert_same_law(law, settings)


# Up to three of them, drawn without replacement
SIBLINGS = DySpec(N=4, D_max=1, t=0.001, exact=False)


@pytest.mark.parametrize(("settings", "draft"), CASES)
@pytest.mark.parametrize("t", [0.001, 0.3])  # the second leaves out draws of little value
def test_drawn_siblings_leave_the_targets_law(t: float, settings: Sampling, draft: str) -> None:
    law = law_of(replace(SIBLINGS, t=t), DRAFTS[draft], 1, settings)
    assert_same_law(law, settings)


# Of three ids only: whole trees of two drawn levels, in every combination of all their draws
FEW_TARGET = TARGET[:3, :3]
FEW_DRAFTS = {"other": OTHER[:3, :3], "zeros": ZEROS[:3, :3], "flat": OTHER[:3, :3] / 4}


@pytest.mark.parametrize("n_rows", [3, 4])
@pytest.mark.parametrize(("settings", "draft"), list(itertools.product(HEATS, FEW_DRAFTS)))
def test_the_best_of_all_drawn_nodes_leave_the_targets_law(
    n_rows: int, settings: Sampling, draft: str
) -> None:
    """More is drawn than verified, and what is left out is chosen by value."""
    rule = DySpec(N=n_rows, D_max=2)
    law = law_of(rule, FEW_DRAFTS[draft], 2, settings, FEW_TARGET)
    assert_same_law(law, settings, FEW_TARGET)


def test_choosing_by_what_was_drawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the likeliest of the drawn nodes are verified."""
    by_value = draft_tree.best_of
    monkeypatch.setattr(
        draft_tree, "best_of", lambda tree, values, n: by_value(tree, tree.logprobs, n)
    )
    errors = []
    for draft in FEW_DRAFTS.values():
        law = law_of(DySpec(N=3, D_max=2), draft, 2, Sampling(1.0), FEW_TARGET)
        errors.append(error_of(law, Sampling(1.0), FEW_TARGET))
    assert max(errors) > 0.1


def test_what_a_budget_cuts_off_does_not_choose_among_drawn_nodes() -> None:
    """Graft's own rows are fewer than those of its base, whose threshold form has a budget."""
    base = "dyspec:exact=off:t=0.2:N=6:D_max=3"
    rule = Graft(base=base, N=4, checkpoints="off", graft=False)
    draft = torch.eye(4, dtype=torch.float64).log()  # certain, but for the root
    draft[0] = torch.tensor([0.0, 0.6, 0.3, 0.1]).log()
    target = TARGET[:4, :4]
    law = law_of(rule, draft, 3, Sampling(1.0), target)
    assert_same_law(law, Sampling(1.0), target)


@pytest.mark.parametrize(("settings", "draft"), CASES)
@pytest.mark.parametrize("rule", [Fixed(D=2, B=3, tau=0.0), DynaTree(tau=0.0, rho_stop=0.01)])
def test_ranked_children_leave_the_targets_law(
    rule: Settings, settings: Sampling, draft: str
) -> None:
    law = law_of(rule, DRAFTS[draft], 2, settings)
    assert_same_law(law, settings)


@dataclass(frozen=True)
class GraftedChain:
    """A drawn child with ranked siblings from the successor table beside it."""

    def rule(self) -> GraftRule:
        rule = GraftRule(Chain(K=1).rule(), n_rows=4, graft_depth=1, checkpoints={})
        rule.table.read(torch.arange(N_IDS), Scores(OTHER.flip(1)))
        return rule


@pytest.mark.parametrize(("settings", "draft"), CASES)
def test_drawn_and_grafted_siblings_leave_the_targets_law(settings: Sampling, draft: str) -> None:
    law = law_of(GraftedChain(), DRAFTS[draft], 1, settings)
    assert_same_law(law, settings)


def test_a_ranked_sibling_is_tried_after_the_drawn_ones() -> None:
    sampler = Sampling(1.0).sampler(CPU)
    tree = grow(GraftedChain().rule(), ROOT, bigram(OTHER), 1, sampler)
    assert tree.is_retrieved.tolist() == [False, False, True, True]
    assert tree.depth == 1
    assert tree.draft_probs.shape == (1, N_IDS)


@dataclass(frozen=True)
class Known:
    """graft, when the table has read every token; over a rule that draws."""

    settings: Graft
    best: Tensor  # [V, V], by falling logit what the table holds after each token

    def rule(self) -> GraftRule:
        rule = self.settings.rule()
        assert rule.is_drawing
        rule.table.read(torch.arange(len(self.best)), Scores(self.best))
        return rule


@pytest.mark.parametrize(("settings", "draft"), CASES)
def test_what_is_grafted_below_a_drawn_leaf_leaves_the_targets_law(
    settings: Sampling, draft: str
) -> None:
    rule = Known(Graft(base="linear:K=1", N=4, at="tail"), OTHER.flip(1))
    law = law_of(rule, DRAFTS[draft], 2, settings)
    assert_same_law(law, settings)
    tree = grow(rule.rule(), ROOT, bigram(DRAFTS[draft]), 2, settings.sampler(CPU))
    assert tree.depths.tolist() == [0, 1, 2, 2]
    assert tree.is_retrieved.tolist() == [False, False, True, True]


@pytest.mark.parametrize("at", ["root", "tail"])
@pytest.mark.parametrize("base", ["dyspec:N=3:D_max=2", "dyspec:N=4:D_max=1"])
@pytest.mark.parametrize(("settings", "draft"), list(itertools.product(HEATS, FEW_DRAFTS)))
def test_graft_over_the_best_of_all_drawn_nodes_leaves_the_targets_law(
    base: str, at: str, settings: Sampling, draft: str
) -> None:
    """What was drawn is kept whatever it is; what is grafted beside it depends on it."""
    grafted = Graft(base=base, checkpoints="1@0.4", N=5, at=at)
    rule = Known(grafted, OTHER[:3, :3].flip(1))
    law = law_of(rule, FEW_DRAFTS[draft], 2, settings, FEW_TARGET)
    assert_same_law(law, settings, FEW_TARGET)


@dataclass(frozen=True)
class Copied:
    """The two tokens that followed 0 before; no draft has a say."""

    def rule(self) -> LookupRule:
        rule = Lookup(K=2).rule()
        rule.start([0, 2, 1, 3])
        return rule


@pytest.mark.parametrize("settings", HEATS)
def test_a_copy_leaves_the_targets_law(settings: Sampling) -> None:
    tree = grow(Copied().rule(), ROOT, None, 2)
    assert tree.tokens.tolist() == [0, 2, 1]
    law = law_of(Copied(), OTHER, 2, settings)
    assert_same_law(law, settings)


@pytest.mark.parametrize(("settings", "draft"), CASES)
def test_a_chain_that_stops_by_what_was_drawn_leaves_the_targets_law(
    settings: Sampling, draft: str
) -> None:
    rule = ConfidentChain(K=2, p_min=0.3)
    law = law_of(rule, DRAFTS[draft], 2, settings)
    assert_same_law(law, settings)


SHAPES = [SpecInfer("2:2"), SpecInfer("1:3"), Sequoia(N=6, D_max=2, p="0.6:0.3:0.1")]


@pytest.mark.parametrize("rule", SHAPES)
@pytest.mark.parametrize(("settings", "draft"), list(itertools.product(HEATS, FEW_DRAFTS)))
def test_drawn_trees_of_a_settled_shape_leave_the_targets_law(
    rule: Settings, settings: Sampling, draft: str
) -> None:
    law = law_of(rule, FEW_DRAFTS[draft], 2, settings, FEW_TARGET)
    assert_same_law(law, settings, FEW_TARGET)


def test_leaving_out_an_unlikely_draw_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: a chain without the unsure token, as one may have it that is greedy."""

    def expand(rule: StaticRule, level: Level) -> tuple[Tensor, Tensor]:
        is_sure = level.logprobs >= rule.least_to_expand
        return is_sure, is_sure

    monkeypatch.setattr(StaticRule, "expand", expand)
    law = law_of(ConfidentChain(K=2, p_min=0.3), OTHER, 2, Sampling(1.0))
    assert error_of(law, Sampling(1.0)) > 0.01


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
    law = law_of(rule, draft, 3, Sampling(1.0), target)
    assert_same_law(law, Sampling(1.0), target)
    monkeypatch.setattr(OptTreeRule, "is_drawing", True)
    law = law_of(rule, draft, 3, Sampling(1.0), target)
    assert error_of(law, Sampling(1.0), target) > 0.01


def test_a_draft_that_is_not_renormalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the next sibling's chance is taken from the first one's distribution."""
    monkeypatch.setattr(verify, "without", lambda token, draft_probs: draft_probs)
    settings = Sampling(1.0)
    law = law_of(SIBLINGS, DRAFTS["other"], 1, settings)
    with pytest.raises(AssertionError):
        assert_same_law(law, settings)
    rule, depth = RULES["dyspec"]
    assert chi_square(rule, depth, [(Sampling(0.6), "zeros")], 2000) > 5


def test_a_ranked_child_taken_for_a_drawn_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: R[y] / q[y] for a child that was not drawn from q."""
    draft_probs = torch.softmax(DRAFTS["other"][0], dim=-1)

    def as_if_drawn(token: Tensor, residual: Tensor, drawn_from: None) -> tuple[Tensor, Tensor]:
        return try_children(token, residual, draft_probs.expand(len(token), -1))

    monkeypatch.setattr(verify, "try_children", as_if_drawn)
    settings = Sampling(1.0)
    law = law_of(Fixed(D=1, B=2, tau=0.0), DRAFTS["other"], 1, settings)
    with pytest.raises(AssertionError):
        assert_same_law(law, settings)
    rule, depth = RULES["fixed"]
    assert chi_square(rule, depth, [(settings, "other")], 2000) > 5


RULES = {  # those with siblings, and the depth to draft
    "dyspec": (DySpec(N=4, D_max=2), 2),
    "fixed": (Fixed(D=1, B=3, tau=0.0), 1),
    "graft": (GraftedChain(), 1),
}
HEAT = [Sampling(0.6, 1.0), Sampling(0.6, 0.7), Sampling(1.0, 1.0, draft_temperature=0.6)]
HEAT.append(Sampling(1.0, 0.7))
RARE = ("rare",)  # stands for all outcomes that are expected less than five times


@torch.inference_mode()
def draw_pairs(rule: Settings, depth: int, draft: str, sampler: Sampler, n: int) -> list[tuple]:
    """The first two tokens of n texts, by the real generator; one that is missing is ar's."""
    target_probs = sampler.warp(TARGET)
    one_rule = rule.rule()
    tree = None
    texts = []
    for _ in range(n):
        if tree is None or one_rule.is_drawing:  # a ranked tree is always the same
            tree = grow(one_rule, ROOT, bigram(DRAFTS[draft]), depth, sampler)
        _, tokens = accept_sampled(tree, TARGET[tree.tokens], sampler)
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
    for seed, (settings, draft) in enumerate(conditions):
        sampler = replace(settings, seed=seed).sampler(CPU)
        counts = Counter(draw_pairs(rule, depth, draft, sampler, n_draws))
        law = target_law(settings)
        for outcome in counts:
            assert law[outcome] > 0, f"an impossible text: {outcome}"
        seen: Counter = Counter()
        expected: dict[tuple, float] = defaultdict(float)
        for outcome, p in law.items():
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
    chance, _ = try_children(torch.tensor([[1]]), only[None], almost[None])
    assert chance.tolist() == [1.0], "above every coin"


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
