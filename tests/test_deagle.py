"""deagle: each vote true and false, the stop, the beam, the final choice."""

import pytest
import torch
from test_draft_tree import ROOT, FakeDraft, Path, assert_starts_anew, paths
from torch import Tensor

from draft_tree import Draft, grow
from engine.scores import Scores
from methods.deagle import Deagle, votes

SETTINGS = Deagle()


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


def constant(p: float, n_ids: int = 8) -> Draft:
    """A draft whose best id has probability p after everything, the rest even."""
    probs = torch.full((n_ids,), (1 - p) / (n_ids - 1))
    probs[3] = p

    def draft(tokens: Tensor, parents: Tensor | None) -> Scores:
        return Scores(probs.log().expand(len(tokens), -1))

    return draft


def depth_below(draft: Draft) -> int:
    rule = Deagle(k=2, D_max=12, N_max=128).rule()
    return grow(rule, ROOT, draft, 127).depth


def test_a_flat_draft_stops_earlier_than_a_sharp_one() -> None:
    flat = depth_below(constant(0.2))
    sharp = depth_below(constant(0.8))
    sharpest = depth_below(constant(0.99))
    assert flat < sharp < sharpest == 12


def beam_tree(draft: FakeDraft, settings: Deagle) -> list[Path]:
    """The beam written out node by node: its likeliest rows, the root first."""
    root = (ROOT.item(),)
    beam = {root: 0.0}  # path -> log p(u), of the nodes to expand
    drafted: dict[Path, float] = {}  # of all levels
    sums = [1.0]
    for _ in range(settings.D_max):
        level: dict[Path, float] = {}
        for path, logprob in beam.items():
            best = torch.log_softmax(draft.logits(path), -1).topk(settings.k)
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                level[path + (token,)] = logprob + value
        drafted |= level
        likeliest = sorted(level, key=level.get, reverse=True)[: settings.k]
        beam = {path: level[path] for path in likeliest}
        sums.append(sum(torch.tensor(value).exp().item() for value in beam.values()))
        if sum(votes(sums, settings)) >= 2:
            break
    likeliest = sorted(drafted, key=drafted.get, reverse=True)[: settings.N_max - 1]
    return [root] + likeliest


def test_a_level_expands_the_k_likeliest_and_the_likeliest_rows_are_verified() -> None:
    """Against a beam written out node by node."""
    settings = Deagle(k=3, N_max=12, D_max=5)
    for seed in range(20):
        draft = FakeDraft(seed)
        tree = grow(settings.rule(), ROOT, draft, 127)
        assert sorted(paths(tree)) == sorted(beam_tree(draft, settings))


def test_sums_start_anew_with_each_tree() -> None:
    assert_starts_anew(Deagle().rule())
