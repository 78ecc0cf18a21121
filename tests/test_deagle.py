"""deagle: each vote true and false, the stop, the beam, the final choice."""

import pytest
import torch
from test_draft_tree import ROOT, FakeDraft, paths

from draft_tree import grow
from methods.deagle import Deagle, votes

SETTINGS = Deagle()


@pytest.mark.parametrize(
    ("sums", "expected"),
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


def constant(p: float, n_ids: int = 8) -> object:
    """A draft whose best id has probability p after everything, the rest even."""
    logits = torch.full((n_ids,), (1 - p) / (n_ids - 1)).log()
    logits[3] = torch.tensor(p).log()
    return lambda tokens, parents: logits.expand(len(tokens), -1)


def test_a_flat_draft_stops_earlier_than_a_sharp_one() -> None:
    depths = [
        grow(Deagle(k=2, D_max=12, N_max=128).rule(), ROOT, constant(p), 127).depth
        for p in (0.2, 0.8, 0.99)
    ]
    assert depths[0] < depths[1] < depths[2] == 12


def test_a_level_expands_the_k_likeliest_and_the_likeliest_rows_are_verified() -> None:
    """Against a beam written out node by node."""
    for seed in range(20):
        draft, settings = FakeDraft(seed), Deagle(k=3, N_max=12, D_max=5)
        tree = grow(settings.rule(), ROOT, draft, 127)
        beam, drafted, sums = [((ROOT.item(),), 0.0)], {}, [1.0]
        for _ in range(settings.D_max):
            level = []
            for path, logprob in beam:
                best = torch.log_softmax(draft.logits(path), -1).topk(settings.k)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                level += [((*path, i), logprob + value) for i, value in pairs]
            drafted |= dict(level)
            beam = sorted(level, key=lambda node: -node[1])[: settings.k]
            sums.append(sum(torch.tensor(value).exp().item() for _, value in beam))
            if sum(votes(sums, settings)) >= 2:
                break
        best = sorted(drafted, key=lambda path: -drafted[path])[: settings.N_max - 1]
        assert sorted(paths(tree)) == sorted([(ROOT.item(),), *best])


def test_sums_start_anew_with_each_tree() -> None:
    rule = Deagle().rule()
    shapes = [paths(grow(rule, ROOT, FakeDraft(seed), 127)) for seed in (1, 2, 1)]
    assert shapes[0] == shapes[2] != shapes[1]
