"""Tests of the metrics and counts of a generation, on steps and trees made by hand."""

import math
import random
from collections import Counter
from dataclasses import asdict, replace

import pytest
from fast import generate, random_model
from torch import Tensor
from trees import make_tree

from draft_tree import DynaTree, Settings
from dynatree_lab.engine.cache import FastCache
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.deagle import Deagle
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.rules import MixedTree
from dynatree_lab.methods.static import Chain, Fixed, PaddedAutoregressive
from dynatree_lab.metrics import (
    code_acceptance,
    count_calibration,
    count_passes,
    measure,
    repetition,
    top1_match,
)

TARGET, DRAFT = random_model(0), random_model(1)
PROMPT = [3, 1, 4, 1, 5]


def make_chain_step(
    tokens: list[int], n_accepted: int, n_drafted: int, draft_ms: float, verify_ms: float
) -> Step:
    """Return an iteration over a chain, with one millisecond of other work."""
    rows = list(range(n_drafted + 1))
    return Step(
        tokens,
        tree=make_tree(rows, [row - 1 for row in rows]),
        path=rows[: n_accepted + 1],
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=1.0,
        draft_rows=[2] + [1] * (n_drafted - 1),
    )


def test_metrics_worked_out_by_hand() -> None:
    """Check a prefill, then 3 of 4 drafted tokens accepted, 0 of 1, and 2 of 4 but cut to one."""
    first = replace(FIRST, verify_ms=20.0)
    steps = [
        first,
        make_chain_step([1, 2, 3, 4], n_accepted=3, n_drafted=4, draft_ms=2.0, verify_ms=5.0),
        make_chain_step([1], n_accepted=0, n_drafted=1, draft_ms=1.0, verify_ms=4.0),
        make_chain_step([2], n_accepted=2, n_drafted=4, draft_ms=3.0, verify_ms=6.0),
    ]
    expected = {
        "new_tokens": 7,
        "throughput": 6 / 0.024,
        "end_to_end": 7 / 0.044,
        "wall_ms": 44 / 7,
        "ttft_ms": 20.0,
        "tpot_ms": 4.0,
        "iterations": 3,
        "tokens_per_iter": (4 + 1 + 3) / 3,
        "accepted_per_iter": 5 / 3,
        "drafted_per_iter": 9 / 3,
        "acceptance_rate": 5 / 9,
        "draft_ms": 2.0,
        "verify_ms": 5.0,
        "other_ms": 1.0,
        "draft_passes": 9 / 3,
        "repetition": 0.0,
    }
    found = asdict(measure(steps))
    assert found.pop("depths")["accepted"] == [2, 2, 1, 0]
    assert found == pytest.approx(expected)
    nothing = {"new_tokens": 1, "end_to_end": 50.0, "wall_ms": 20.0, "ttft_ms": 20.0}
    alone = asdict(measure([first]))
    assert alone.pop("depths") == {"nodes": [], "accepted": []}
    assert alone == pytest.approx(dict.fromkeys(expected, 0.0) | nothing)


@pytest.mark.parametrize("n_ids", [1, 2, 7, 2**31 - 1])
def test_repetition_counts_four_grams(n_ids: int) -> None:
    rng = random.Random(n_ids)
    ids = [rng.randrange(n_ids) for _ in range(200)]
    grams = {tuple(ids[i : i + 4]) for i in range(197)}
    assert repetition(ids) == 1 - len(grams) / 197


def make_step(path: list[int], predictions: list[int], **changes: object) -> Step:
    """Return an iteration over the README's tree, with the tokens cat 1, dog 2, sat 3 and ran 4."""
    probs = [1.0, 0.62, 0.33, 0.62 * 0.52, 0.62 * 0.33, 0.33 * 0.82]
    tree = make_tree([0, 1, 2, 3, 4, 4], [-1, 0, 0, 1, 1, 2])
    changes = {"path_logprobs": [math.log(p) for p in probs]} | changes
    return Step([1] * len(path), replace(tree, **changes), path, predictions=predictions)


FIRST = Step([7], make_tree([3], [-1]), [0])  # the prefill's
CAT_RAN = make_step([0, 1, 4], [1, 4, 4, 9, 9, 9])  # the target predicts ran after dog as well
COW = make_step([0], [7, 9, 4, 9, 9, 9])
ALL = [True] * 6
MIXED = MixedTree.from_tree(COW.tree)


def test_top1_match_counts_what_is_off_the_path() -> None:
    """Check that off the path, the ran below dog counts, because the target predicts it there."""
    steps = [FIRST, replace(CAT_RAN, verify_ms=1.0), COW]
    assert measure(steps).acceptance_rate == 2 / 10
    assert top1_match(steps) == (3 + 1) / 10
    assert top1_match([FIRST]) == 0.0


@pytest.mark.parametrize(
    ("settings", "tokens_per_iter", "printed"),
    [
        (DynaTree(D0=5), 7.15, 1.022),  # WikiText-2
        (Fixed(D=8, B=3, tau=0.1), 7.10, 0.710),
        (Chain(K=8), 7.05, 0.882),
        (DynaTree(D0=5, D_max=9), 6.45, 0.922),  # PG-19
        (Fixed(D=8, B=3, tau=0.1), 6.43, 0.643),
        (Chain(K=5), 4.63, 0.925),
    ],
)
def test_the_codes_acceptance_is_table_3s(
    settings: Settings, tokens_per_iter: float, printed: float
) -> None:
    """Compare to the digits that the paper prints of both numbers: 102.2 % is 7.15 / 7."""
    low = code_acceptance(settings, tokens_per_iter - 0.005) - 0.0005
    high = code_acceptance(settings, tokens_per_iter + 0.005) + 0.0005
    assert low <= printed <= high
    others = (PaddedAutoregressive(), Chain(K=0), Deagle())
    assert all(code_acceptance(other, 3.0) is None for other in others)


def test_a_path_counts_without_its_tree() -> None:
    """Check the steps of transformers, whose trees are not known."""
    found = measure([FIRST, Step([7, 7, 7], FIRST.tree, [0, 1, 2], verify_ms=1.0)])
    assert found.tokens_per_iter == 3 and found.accepted_per_iter == 2
    assert found.acceptance_rate == found.drafted_per_iter == 0


def test_nodes_and_accepted_ones_by_depth() -> None:
    lone_dog = make_step([0, 2], [2, 9, 9, 9, 9, 9], parents=[-1, 0, 0, 1, 1, 1])
    depths = measure([replace(FIRST, verify_ms=1.0), CAT_RAN, COW, lone_dog]).depths
    assert depths == {"nodes": [6, 9], "accepted": [2, 1]}


@pytest.mark.parametrize(
    ("steps", "drafted", "matching"),
    [
        # cat 0.62 and dog 0.33; after cat sat 0.52 and ran 0.33; after dog ran 0.82
        ([CAT_RAN], {6: 2, 10: 1, 12: 1, 16: 1}, {6: 1, 12: 1, 16: 1}),
        ([CAT_RAN, COW], {6: 4, 10: 2, 12: 2, 16: 2}, {6: 1, 12: 1, 16: 2}),
        # Retrieved nodes do not count; a node of probability 1 is in the last bin
        ([replace(COW, tree=replace(MIXED, are_retrieved=ALL))], {}, {}),
        ([replace(CAT_RAN, tree=replace(CAT_RAN.tree, path_logprobs=[0.0] * 6))], {19: 5}, {19: 3}),
    ],
)
def test_matches_are_counted_by_the_probability_after_the_parent(
    steps: list[Step], drafted: dict[int, int], matching: dict[int, int]
) -> None:
    found = count_calibration([FIRST, *steps])
    assert {i: n for i, n in enumerate(found["drafted"]) if n} == drafted
    assert {i: n for i, n in enumerate(found["top1_match"]) if n} == matching
    assert len(found["drafted"]) == len(found["top1_match"]) == 20


@pytest.mark.parametrize(
    ("settings", "commit"),
    [
        (PaddedAutoregressive(), "keep"),
        (Chain(K=3), "rebuild"),
        (DynaTree(tau=0.01), "keep"),
        (DySpec(N=16), "rebuild"),
    ],
)
def test_counted_passes_are_those_that_ran(
    settings: Settings, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the counted rows with those of the passes after prefill. Rows of the draft that are
    cut from the tree after their pass count as well."""
    ran = {id(TARGET.gpt_neox): [], id(DRAFT.gpt_neox): []}
    real = FastCache.look_up

    def spy(self: FastCache, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        ran[id(self.transformer)].append(len(tokens))
        return real(self, tokens, positions)

    monkeypatch.setattr(FastCache, "look_up", spy)
    steps = list(generate(TARGET, DRAFT, PROMPT, settings, 30, commit=commit))
    found = count_passes(steps, GenerationConfig(settings, commit=commit))
    verified, drafted = ran.values()
    counts = [Counter(map(str, rows)) for rows in (verified[1:], drafted)]  # the first is prefill
    assert list(found.values()) == counts
    n_kept = sum(slot >= 0 for step in steps[1:] for slot in step.tree.draft_slots[1:])
    n_run = sum(sum(step.draft_rows[1:]) for step in steps[1:])
    assert (n_run > n_kept) == isinstance(settings, DySpec)


def test_counted_passes_have_the_minimum_rows_of_the_method() -> None:
    steps = list(generate(TARGET, None, PROMPT, PaddedAutoregressive(), 3))
    config = GenerationConfig(PaddedAutoregressive(rows=5))
    assert count_passes(steps, config) == {"target_rows": {"5": 2}, "draft_rows": {}}
