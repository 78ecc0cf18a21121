"""beam and deagle: each vote true and false, the stop, the beam, the final choice."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from conftest import ranked
from test_draft_tree import ROOT, FakeDraft, Path, assert_starts_anew, paths

from draft_tree import Candidates, Draft, grow
from methods.deagle import Beam, Deagle, votes

SETTINGS = Deagle()
EXP = Deagle(votes=1, low=False, momentum=False)  # the columns of the paper's Table 4
MOMENTUM = Deagle(votes=1, low=False, length="off")
PROB = Deagle(votes=1, momentum=False, length="off")


@pytest.mark.parametrize(
    ("sums", "expected"),  # S_0 to S_d; whether probability, momentum and length vote to stop
    [
        # S_d against 0.15
        ([1.0, 0.16], (False, False, True)),  # E = 0.16 + 0.16 * 0.16 / 0.84 < 1
        ([1.0, 0.14], (True, False, True)),
        # ratios below 0.6, at two depths, not necessarily in a row
        ([1.0, 0.5, 0.4], (False, False, False)),  # E = 0.9 + 0.4 * 0.8 / 0.2 = 2.5
        ([1.0, 0.5, 0.4, 0.2], (False, True, True)),  # E = 1.1 + 0.2 = 1.3
        ([1.0, 0.9, 0.5, 0.25], (False, True, True)),
        ([1.0, 0.9, 0.8, 0.4], (False, False, True)),  # one fall; E = 2.1 + 0.4 = 2.5
        # length: no vote while the sums do not fall
        ([1.0, 1.0], (False, False, False)),
        ([1.0, 0.9, 0.95], (False, False, False)),
        ([1.0, 0.9, 0.81], (False, False, False)),  # E = 1.71 + 0.81 * 9 = 9
        ([1.0, 0.0], (True, False, True)),
    ],
)
def test_votes(sums: list[float], expected: tuple[bool, bool, bool]) -> None:
    assert votes(sums, SETTINGS) == expected


def test_a_promising_tree_by_hand() -> None:
    """Only the literal length vote is cast, and alone it does not stop."""
    sums = [1.0, 0.95, 0.9]
    assert votes(sums, SETTINGS) == (False, False, False)
    assert votes(sums, Deagle(length="literal")) == (False, False, True)


def test_one_vote_and_two_by_hand() -> None:
    """S_1 = 0.5 and S_2 = 0.2 fall twice; a vote that is off is not cast."""
    falling = [1.0, 0.5, 0.2]  # E_2 = 0.7 + 0.2 * 0.4 / 0.6 = 0.83
    assert votes(falling, Deagle(length="off")) == (False, True, False)
    assert votes(falling, SETTINGS) == (False, True, True)
    dying = [1.0, 0.9, 0.1]  # one fall; E_2 = 1 + 0.1 * 0.111 / 0.889 = 1.01
    assert votes(dying, Deagle(length="off")) == (True, False, False)
    assert votes(dying, SETTINGS) == (True, False, True)
    assert votes(dying, PROB) == (True, False, False)
    assert votes(dying, MOMENTUM) == (False, False, False)
    assert votes(dying, EXP) == (False, False, True)


def test_the_literal_length_vote_is_always_cast() -> None:
    """Eq. 26 adds up distinct paths; float32 makes of a sharp level's a little more than 1."""
    for sums in ([1.0, 1.0], [1.0, 1.0000001], [1.0, 0.3, 0.3, 0.3], [1.0, 0.0]):
        assert votes(sums, Deagle(length="literal"))[2]


@pytest.mark.parametrize(
    ("values", "n_on"),
    [
        ({"votes": 3, "length": "off"}, 2),
        ({"low": False, "momentum": False}, 1),
        ({"votes": 1, "low": False, "momentum": False, "length": "off"}, 0),
    ],
)
def test_votes_that_could_never_stop_a_tree_are_an_error(values: dict, n_on: int) -> None:
    with pytest.raises(ValueError, match=f"with {n_on} of .* could never stop .*method beam"):
        Deagle(**values)


def constant(p: float, n_ids: int = 8) -> Draft:
    """A draft whose best id has probability p after everything, the rest even."""
    probs = torch.full((n_ids,), (1 - p) / (n_ids - 1))
    probs[3] = p

    def draft(tokens: list[int], parents: list[int] | None) -> Candidates:
        return ranked(probs.log().expand(len(tokens), -1))

    return draft


def depth_below(draft: Draft) -> int:
    rule = Deagle(k=2, D_max=12, N_max=128).rule()
    return grow(rule, ROOT, draft, 127).depth


def test_a_flat_draft_stops_earlier_than_a_sharp_one() -> None:
    flat = depth_below(constant(0.2))
    sharp = depth_below(constant(0.8))
    sharpest = depth_below(constant(0.99))
    assert flat < sharp < sharpest == 12


@dataclass
class Oracle:
    """Section 3.4 written out: what is known after each depth, and how many votes to stop."""

    settings: Deagle
    before: float = 1.0  # S_(d-1)
    total: float = 0.0  # S_1 + ... + S_d
    n_declines: int = 0
    depth: int = 0

    def count(self, survival: Sequence[float]) -> int:
        """The votes cast at the next depth, of its k best path probabilities."""
        s = self.settings
        self.depth += 1
        s_d = sum(survival)  # Eq. 24
        rho = s_d / self.before
        self.before = s_d
        self.total += s_d
        self.n_declines += rho < s.tau_rho
        if s.length == "literal":
            horizon = math.ceil(round(s_d, 5))  # Eq. 26
        elif rho < 1:
            horizon = math.ceil(self.total + s_d * rho / (1 - rho))
        else:
            horizon = math.inf
        n_cast = 0
        if s.low and s_d < s.tau_S:
            n_cast += 1
        if s.momentum and self.n_declines >= 2:
            n_cast += 1
        if s.length != "off" and self.depth >= horizon:
            n_cast += 1
        return n_cast


def beam_tree(draft: FakeDraft, settings: Beam | Deagle) -> tuple[list[Path], int]:
    """The beam written out node by node: its likeliest rows, the root first, and its depth."""
    oracle = None
    if isinstance(settings, Deagle):
        oracle = Oracle(settings)
    root = (ROOT,)
    beam = {root: 0.0}  # path -> log p(u), of the nodes to expand
    drafted: dict[Path, float] = {}  # of all levels
    depth = 0
    is_over = False
    while not is_over and depth < settings.D_max:
        depth += 1
        level: dict[Path, float] = {}
        for path, logprob in beam.items():
            best = torch.log_softmax(draft.logits(path), -1).topk(settings.k)
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                level[path + (token,)] = logprob + value
        drafted |= level
        likeliest = sorted(level, key=level.get, reverse=True)[: settings.k]
        beam = {path: level[path] for path in likeliest}
        if oracle:
            survival = [math.exp(value) for value in beam.values()]
            is_over = oracle.count(survival) >= settings.votes
    likeliest = sorted(drafted, key=drafted.get, reverse=True)[: settings.N_max - 1]
    return [root] + likeliest, depth


VARIANTS = {
    "voting": {},
    "literal": {"length": "literal"},
    "exp": {"votes": 1, "low": False, "momentum": False},
    "exp literal": {"votes": 1, "low": False, "momentum": False, "length": "literal"},
    "momentum": {"votes": 1, "low": False, "length": "off"},
    "prob": {"votes": 1, "momentum": False, "length": "off"},
    "all three": {"votes": 3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_level_expands_the_k_likeliest_until_votes_stop_it(name: str) -> None:
    """Against the paper written out node by node; the likeliest rows are verified."""
    settings = Deagle(k=3, N_max=12, D_max=5, **VARIANTS[name])
    n_levels: Counter[int] = Counter()
    for seed in range(30):
        draft = FakeDraft(seed)
        tree = grow(settings.rule(), ROOT, draft, 127)
        expected, depth = beam_tree(draft, settings)
        assert sorted(paths(tree)) == sorted(expected)
        assert draft.n_calls == depth
        n_levels[depth] += 1
    if name == "exp literal":
        assert n_levels == {1: 30}, "the vote that is always cast"
    else:
        assert len(n_levels) > 2, f"the cases have become too tame: {n_levels}"


def test_a_beam_is_as_deep_as_it_is_told() -> None:
    for seed in range(20):
        draft = FakeDraft(seed)
        settings = Beam(k=3, N_max=12, D_max=4)
        tree = grow(settings.rule(), ROOT, draft, 127)
        expected, _ = beam_tree(draft, settings)
        assert sorted(paths(tree)) == sorted(expected)
        assert draft.n_calls == 4


def test_sums_start_anew_with_each_tree() -> None:
    assert_starts_anew(Deagle().rule())
