"""Tests of beam and deagle: each vote, when the votes stop a tree, the beam, the verified rows."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from growing import grow
from trees import ROOT, FakeDraft, Path, paths

from dynatree_lab.methods.deagle import Beam, Deagle, cast_votes

SETTINGS = Deagle()
LITERAL = Deagle(length="literal")
EXP = Deagle(votes=1, low=False, momentum=False)  # the columns of the paper's Table 4
MOMENTUM = Deagle(votes=1, low=False, length="off")
PROB = Deagle(votes=1, momentum=False, length="off")
DYING = [1.0, 0.9, 0.1]  # one ratio below tau_rho; E_2 = 1 + 0.1 * 0.111 / 0.889 = 1.01


@pytest.mark.parametrize(
    ("sums", "settings", "expected"),  # sums: S_0 to S_d. expected: votes low, momentum, length
    [
        # low: S_d below 0.15
        ([1.0, 0.16], SETTINGS, (False, False, True)),  # E = 0.16 + 0.16 * 0.16 / 0.84 < 1
        ([1.0, 0.14], SETTINGS, (True, False, True)),
        # momentum: ratios below 0.6 at two depths, which need not be consecutive
        ([1.0, 0.5, 0.4], SETTINGS, (False, False, False)),  # E = 0.9 + 0.4 * 0.8 / 0.2 = 2.5
        ([1.0, 0.5, 0.4, 0.2], SETTINGS, (False, True, True)),  # E = 1.1 + 0.2 = 1.3
        ([1.0, 0.9, 0.5, 0.25], SETTINGS, (False, True, True)),
        ([1.0, 0.9, 0.8, 0.4], SETTINGS, (False, False, True)),  # one ratio; E = 2.1 + 0.4 = 2.5
        # length: no vote while the sums do not fall
        ([1.0, 1.0], SETTINGS, (False, False, False)),
        ([1.0, 0.9, 0.95], SETTINGS, (False, False, False)),
        ([1.0, 0.9, 0.81], SETTINGS, (False, False, False)),  # E = 1.71 + 0.81 * 9 = 9
        ([1.0, 0.0], SETTINGS, (True, False, True)),
        # literal length: always cast, because Eq. 26 is at most 1, also if float32 rounds up
        ([1.0, 0.95, 0.9], LITERAL, (False, False, True)),
        ([1.0, 1.0000001], LITERAL, (False, False, True)),
        # votes switched off
        (DYING, SETTINGS, (True, False, True)),
        (DYING, Deagle(length="off"), (True, False, False)),
        (DYING, PROB, (True, False, False)),
        (DYING, MOMENTUM, (False, False, False)),
        (DYING, EXP, (False, False, True)),
    ],
)
def test_votes(sums: list[float], settings: Deagle, expected: tuple[bool, bool, bool]) -> None:
    assert cast_votes(sums, settings) == expected


def beam_tree(draft: FakeDraft, settings: Beam | Deagle) -> tuple[list[Path], int]:
    """Return the paths of the verified rows, the root's first, and the depth that was drafted.

    The oracle: the paper's algorithm, literally, node by node.
    """
    root = (ROOT,)
    sums = [1.0]  # S_d, the sum of the k best path probabilities of level d (Eq. 24)
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
        sums.append(sum(math.exp(value) for value in beam.values()))
        if isinstance(settings, Deagle):
            is_over = sum(cast_votes(sums, settings)) >= settings.votes
    likeliest = sorted(drafted, key=drafted.get, reverse=True)[: settings.N_max - 1]
    return [root] + likeliest, depth


VARIANTS = {
    "beam": Beam(k=3, N_max=12, D_max=4),
    "voting": SETTINGS,
    "literal": LITERAL,
    "exp": EXP,
    "exp literal": replace(EXP, length="literal"),
    "momentum": MOMENTUM,
    "prob": PROB,
    "all three": Deagle(votes=3),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_level_expands_the_k_likeliest_until_votes_stop_it(name: str) -> None:
    settings = VARIANTS[name]
    if isinstance(settings, Deagle):
        settings = replace(settings, k=3, N_max=12, D_max=5)
    n_levels: Counter[int] = Counter()
    for seed in range(30):
        draft = FakeDraft(seed)
        tree = grow(settings.make_rule(), ROOT, draft, 127)
        expected, depth = beam_tree(draft, settings)
        assert sorted(paths(tree)) == sorted(expected)
        assert draft.n_calls == depth
        n_levels[depth] += 1
    if name in ("beam", "exp literal"):  # a fixed depth; a vote that is always cast
        assert n_levels == {4 if name == "beam" else 1: 30}
    else:
        assert len(n_levels) > 2, f"the cases have too few depths: {n_levels}"
