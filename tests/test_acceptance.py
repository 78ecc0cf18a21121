"""Claim: by block and by traversal each text is as likely as from the target alone, whatever the
tree, and no fewer drafted tokens are kept than by token.

By enumeration (law.py), as test_sampling.py has it for the default.

    python -m pytest tests/test_acceptance.py
"""

import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import make_tree, path_to, random_model
from law import CPU, Ranked, commit, difference, draft, every_outcome, mean_length
from test_dynatree import PROMPT
from test_sampling import (
    DRAFTS,
    FEW_DRAFTS,
    FEW_RULES,
    FEW_TARGET,
    N_IDS,
    OTHER,
    PLAIN,
    RULES,
    TARGET,
    assert_distributed,
    error_of,
    table_model,
)
from torch import Tensor

from cli.metrics import token_ids
from draft_tree import DynaTree, Settings, Tree
from engine.decoding import generate
from engine.scores import Ranking, scores_of
from methods import METHODS
from methods.acceptances import ACCEPTANCES, accept_by_block, accept_by_traversal, choose_acceptance
from methods.dyspec import DySpec
from methods.lookup import Lookup
from methods.retrieval import Graft
from methods.static import Chain, ConfidentChain, SpecInfer
from sampling import Acceptance, Sampler, Sampling, accept_by_token
from verify import accept

HEATS = [PLAIN, Sampling(0.7, 0.9)]
MORE_IDS = torch.cat([OTHER, OTHER[:2]])[:, [0, 1, 2, 3, 4, 0, 1]]
OVERFLOWN = OTHER.clone()
OVERFLOWN[2] = math.nan
OVERFLOWN[3, 1] = math.inf
TABLES = DRAFTS | {"more ids": MORE_IDS, "overflown": OVERFLOWN}
CHAINS = {name: RULES[name] for name in ("drawn chain", "stops by what was drawn", "copied")}
CHAINS["ranked chain"] = Ranked(D=2, B=1, tau=0.0)
TREES = {name: rule for name, rule in RULES.items() if name not in CHAINS}
CASES = [
    *itertools.product([accept_by_block, accept_by_traversal], CHAINS, TABLES),
    *itertools.product([accept_by_traversal], TREES, TABLES),
    *itertools.product([accept_by_traversal], FEW_RULES, FEW_DRAFTS),
]
ALL_RULES = CHAINS | TREES | FEW_RULES
ALL_TABLES = TABLES | FEW_DRAFTS


def name_of(case: object) -> str:
    return case.__name__.removeprefix("accept_by_") if callable(case) else str(case)


def target_of(table: str) -> Tensor:
    return FEW_TARGET if table in FEW_DRAFTS else TARGET


@pytest.mark.parametrize(("acceptance", "rule", "table"), CASES, ids=name_of)
def test_the_law_is_the_targets_and_no_less_is_kept(
    acceptance: Acceptance, rule: str, table: str
) -> None:
    """Of two and of three tokens, where a tree is a level deeper; warped and not."""
    settings, draft, target = ALL_RULES[rule], ALL_TABLES[table], target_of(table)
    for sampling, n_tokens in itertools.product(HEATS, (2, 3)):
        assert error_of(settings, draft, n_tokens, acceptance, sampling, target) < 2e-8
        length = partial(mean_length, settings, target, draft, n_tokens, sampling=sampling)
        by_token = length(acceptance=accept_by_token)
        kept_more = length(acceptance=acceptance) - by_token
        assert kept_more > -1e-9
        if not settings.rule().is_drawing:
            assert kept_more < 1e-9, "of ranked rows none keeps more than by token"


def forked(seed: int) -> Tensor:
    """A draft of three ids, after each of which two are possible."""
    generator = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(3, 3, generator=generator).double()
    for row in table:
        row[int(torch.randint(3, (1,), generator=generator))] = -torch.inf
    return table


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_compete_for_a_budget_leave_the_law_alone(seed: int, is_exact: bool) -> None:
    """Which rows a branch has depends on what was drawn in others, and theirs on its own: what was
    rejected by the look of its branch says something of the others."""
    settings = DySpec(N=5, D_max=3, t=0.05, exact=is_exact)
    assert error_of(settings, forked(seed), 4, accept_by_traversal) < 2e-8
    assert error_of(settings, forked(seed), 4, accept_by_traversal, HEATS[1]) < 2e-8


def test_a_block_is_worth_more_than_its_tokens() -> None:
    """The example of methods/acceptances.py, of two ids."""
    target = torch.tensor([[1 / 3, 2 / 3]] * 2).double().log()
    found = {}
    for acceptance in ACCEPTANCES.values():
        found[acceptance] = mean_length(Chain(K=2), target, target.flip(1), 3, acceptance)
        assert error_of(Chain(K=2), target.flip(1), 3, acceptance, target=target) < 2e-8
    assert list(found.values()) == pytest.approx([10 / 9, 11 / 9, 11 / 9])


def test_a_tree_is_worth_more_than_its_tokens() -> None:
    """Somewhere strictly, of each shape."""
    for widths in ("2:1", "1:2", "2:2"):
        length = partial(mean_length, SpecInfer(widths), FEW_TARGET, FEW_DRAFTS["few other"], 3)
        assert length(accept_by_traversal) > length(accept_by_token) + 0.005


# A second traversal: literally the paper's loop, in plain numbers; wrong where it is told to be.

COIN = "one coin for all"
RESIDUAL = "what a rejected child accounts for stays in the residual"
WEIGHT = "h without the 1 - pi"
SIBLING = "what a sibling was drawn from is not renormalised"
ORDER = "younger siblings first"
ALONE = "a row's weight is its own ratio, without those above it"


class Traversal:
    """Of a tree of drawn or of ranked rows, for tables of one size."""

    def __init__(self, tree: Tree, target_probs: Tensor, mistake: str):
        self.tree, self.mistake = tree, mistake
        self.left = set(range(1, len(tree)))
        self.weights = {0: 1.0}
        self.residuals = target_probs.tolist()
        self.drawn_from = [self.draft_probs(row) for row in range(len(tree))]

    def draft_probs(self, row: int) -> list[float]:
        slot = self.tree.draft_slots[row]
        if slot < 0 or not self.tree.drawn_from:
            return [0.0] * N_IDS
        return self.tree.drawn_from[slot].tolist()

    def leaf(self) -> int:
        """The next row to try; those above it are weighed."""
        row = 0
        while children := [child for child in self.left if self.tree.parents[child] == row]:
            child = max(children) if self.mistake == ORDER else min(children)
            token = self.tree.tokens[child]
            if not self.tree.drawn_from:
                self.drawn_from[row] = [float(i == token) for i in range(len(self.residuals[row]))]
            above = 1.0 if self.mistake == ALONE else self.weights[row]
            ratio = self.residuals[row][token] / self.drawn_from[row][token]
            self.weights.setdefault(child, min(above * ratio, 1.0))
            row = child
        return row

    def reject(self, row: int) -> None:
        above, token = self.tree.parents[row], self.tree.tokens[row]
        weight, residual = self.weights[above], self.residuals[above]
        pairs = zip(residual, self.drawn_from[above], strict=False)
        rest = [max(weight * p - q, 0.0) for p, q in pairs]
        mass = sum(rest)
        self.weights[above] = mass if self.mistake == WEIGHT else mass / (mass + 1 - weight or 1)
        if self.mistake != RESIDUAL and mass:
            self.residuals[above] = [p / mass for p in rest]
        self.drawn_from[above][token] = 0.0
        if self.mistake != SIBLING:
            total = sum(self.drawn_from[above]) or 1.0
            self.drawn_from[above] = [q / total for q in self.drawn_from[above]]
        self.left.remove(row)


def traversal_of(mistake: str = "") -> Acceptance:
    def accept(tree: Tree, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
        run = Traversal(tree, sampler.warp(logits), mistake)
        coin = sampler.coin()
        row = run.leaf()
        while row and not coin < run.weights[row]:
            run.reject(row)
            row = run.leaf()
            coin = coin if mistake == COIN else sampler.coin()
        path = path_to(tree, row)
        residual = torch.tensor([run.residuals[row]], dtype=torch.float64)
        bonus = int(sampler.draw(residual, 1)[0])
        return path, [tree.tokens[each] for each in path[1:]] + [bonus]

    return accept


LITERAL = {
    "chain": Chain(K=2),
    "siblings": SpecInfer("3"),
    "a tree": SpecInfer("2:1"),
    "as valued": DySpec(N=4, D_max=2),
    "ranked": Ranked(D=2, B=2, tau=0.0),
}


@pytest.mark.parametrize("settings", LITERAL.values(), ids=LITERAL)
def test_traversal_is_the_papers(settings: Settings) -> None:
    """Not only by its law: as likely to commit each text, tree for tree."""
    sampler = PLAIN.sampler(CPU)
    n_trees = 0
    drafting = partial(draft, settings, 0, FEW_DRAFTS["few other"], 3, 2)
    for tree, _ in every_outcome(drafting, sampler):
        found = []
        for acceptance in (accept_by_traversal, traversal_of()):
            law_of_tree: Counter = Counter()
            committing = partial(commit, acceptance, tree, FEW_TARGET)
            for new, chance in every_outcome(committing, sampler):
                law_of_tree[new] += chance
            found.append(law_of_tree)
        assert difference(*found) < 1e-9
        n_trees += 1
    assert n_trees > 1 or settings == LITERAL["ranked"]


WRONG = [
    (COIN, "chain"),
    (RESIDUAL, "chain"),
    (WEIGHT, "chain"),
    (ALONE, "chain"),
    (SIBLING, "siblings"),
    (ORDER, "siblings"),
    (RESIDUAL, "ranked"),
]


@pytest.mark.parametrize(("mistake", "shape"), WRONG, ids=str)
def test_a_wrong_traversal_is_caught(mistake: str, shape: str) -> None:
    assert error_of(LITERAL[shape], OTHER, acceptance=traversal_of(mistake)) > 0.005
    assert error_of(LITERAL[shape], OTHER, acceptance=traversal_of()) < 2e-8


# By the loop.


def test_a_chain_is_accepted_alike_by_block_and_by_traversal() -> None:
    """Coin for coin: the same seeds give the same texts, in the same steps."""
    models = random_model(0), random_model(1, vocab_size=80)
    n_accepted = 0
    for settings, seed in itertools.product((Chain(K=4), ConfidentChain(K=6), Lookup()), range(4)):
        steps = {}
        for name in ("block", "traversal"):
            how = {"sampling": Sampling(0.5, 0.95, seed=seed), "acceptance": ACCEPTANCES[name]}
            found = list(generate(*models, PROMPT, settings, 40, **how))
            steps[name] = [step.tokens for step in found]
            n_accepted += sum(len(step.path) - 1 for step in found[1:])
        assert steps["block"] == steps["traversal"]
    assert n_accepted > 50


LONG = [
    ("block", Chain(K=3)),
    ("traversal", SpecInfer("2:2")),
    ("traversal", DySpec(N=6, D_max=3)),
    ("traversal", Ranked(D=2, B=2, tau=0.0)),
]


@pytest.mark.parametrize(("acceptance", "settings"), LONG, ids=str)
def test_a_long_text_follows_the_targets_law(acceptance: str, settings: Settings) -> None:
    """What comes after each token, of 2,000 that were drawn by the generator itself."""
    sampling = Sampling(0.8, 0.95, seed=5)
    models = table_model(TARGET), table_model(OTHER)
    how = {"sampling": sampling, "acceptance": ACCEPTANCES[acceptance]}
    ids = token_ids(generate(*models, [0], settings, 2000, **how))
    pairs = Counter(itertools.pairwise([0, *ids]))
    for token, after in enumerate(sampling.sampler(CPU).warp(TARGET).tolist()):
        counts = Counter({(i,): pairs[token, i] for i in range(N_IDS) if pairs[token, i]})
        assert_distributed(counts, {(i,): p * counts.total() for i, p in enumerate(after)})


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_who_watches_is_told_every_coin(acceptance: str) -> None:
    """The rows tried, in order: only the last accepted row's coin, and by token those above it,
    were below the chance."""
    told: list[tuple[int, float, float, float]] = []
    target_probs = TARGET.float()
    settings = Chain(K=3) if acceptance == "block" else SpecInfer("2:2")
    n_kept = n_rejected = 0
    for seed in range(30):
        sampler = PLAIN.sampler(CPU, lambda *trial: told.append(trial))
        tree = draft(settings, 0, OTHER.float(), N_IDS, 3, Sampling(1.0, seed=seed).sampler(CPU))
        path, _ = ACCEPTANCES[acceptance](tree, target_probs[tree.tokens], sampler)
        kept = [row for row, chance, coin, _ in told if coin < chance]
        assert kept == (path[1:] if acceptance == "token" else path[1:][-1:])
        assert all(0 <= coin < 1 and 0 <= left <= 1 + 1e-6 for _, _, coin, left in told)
        tried = [row for row, *_ in told]
        assert len(set(tried)) == len(tried)
        n_kept += len(kept)
        n_rejected += len(tried) - len(kept)
        told.clear()
    assert n_kept > 10 and n_rejected > 10


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_path_ends_where_the_target_overflows(acceptance: str, value: float) -> None:
    """Row 1's token is the last that is committed, as likely as if the row were a leaf."""
    tree = make_tree([0, 1, 2], [-1, 0, 1])
    logits = TARGET[:3].float()
    logits[1, 3] = value
    scores = scores_of(logits, Ranking(1))
    p = float(PLAIN.sampler(CPU).warp(logits[:1])[0, 1])
    n_reached = 0
    for seed in range(500):
        sampler = Sampling(1.0, seed=seed).sampler(CPU)
        path, tokens = accept(tree, scores, sampler, ACCEPTANCES[acceptance])
        assert path == [0] and len(tokens) == 1
        n_reached += tokens == [1]
    assert abs(n_reached - 500 * p) < 5 * math.sqrt(500 * p * (1 - p))


# How a run chooses.


def test_by_default_it_is_by_the_kind_of_tree() -> None:
    rules = {name: kind().rule() for name, kind in METHODS.items()}
    chosen = {n: choose_acceptance(rule, None) for n, rule in rules.items() if not rule.acceptance}
    chains, static = {"linear", "confident"}, {"specinfer", "sequoia"}
    assert {name for name, by in chosen.items() if by is accept_by_block} == chains
    assert {name for name, by in chosen.items() if by is accept_by_traversal} == static
    assert {by for name, by in chosen.items() if name not in chains | static} == {accept_by_token}


@pytest.mark.parametrize(
    "settings",
    [DynaTree(B_min=1, B_mid=1, B_max=1), Graft("linear", graft=False, checkpoints="off")],
    ids=str,
)
def test_a_method_that_its_settings_make_a_chain_is_accepted_as_one(settings: Settings) -> None:
    assert choose_acceptance(settings.rule(), None) is accept_by_block
    tree = draft(settings, 0, OTHER.float(), N_IDS, 3, Sampling(1.0).sampler(CPU))
    assert len(tree) > 2 and tree.parents == list(range(-1, len(tree) - 1))


def test_what_cannot_be_chosen_is_said() -> None:
    with pytest.raises(ValueError, match="no acceptance is called 'blocks'; there are"):
        choose_acceptance(Chain().rule(), "blocks")
    with pytest.raises(ValueError, match="block is for chains"):
        choose_acceptance(DynaTree().rule(), "block")
    own = Chain().rule()
    own.acceptance = accept_by_token
    assert choose_acceptance(own, None) is accept_by_token
    with pytest.raises(ValueError, match="the method brings an acceptance of its own"):
        choose_acceptance(own, "token")
    with pytest.raises(ValueError, match="an acceptance is of sampled text"):
        next(generate(*[random_model(0)] * 2, PROMPT, Chain(), 5, acceptance=accept_by_block))
