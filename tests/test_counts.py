"""What is counted from a generation's steps, and the three acceptances, on trees made by hand."""

import math
from dataclasses import replace

import pytest
from conftest import random_model
from torch import Tensor

from benchmark.counts import count_calibration, count_depths, count_passes, padded
from cli.metrics import code_acceptance, matching, measure, measure_acceptance
from draft_tree import DynaTree, Settings, Tree
from dynatree import Step, generate
from gpt_neox import GPTNeoX
from methods import METHODS
from methods.deagle import Deagle
from methods.dyspec import DySpec
from methods.static import Alone, Chain, Fixed

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("commit", ["keep", "rebuild"])
@pytest.mark.parametrize(
    "settings",
    [Alone(), Chain(K=3), Fixed(D=3, B=2), DynaTree(tau=0.01), DySpec(N=16), Deagle(N_max=16)],
)
def test_counted_passes_are_those_that_ran(
    settings: Settings, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that the prediction rests on are those of the forwards, catch-up included; also of
    draft rows that were run and then cut from the tree (dyspec: 36.9 counted of 54.7)."""
    target = random_model(0)
    draft = random_model(1)
    ran = {id(target): [], id(draft): []}
    real = GPTNeoX.run

    def spy(self: GPTNeoX, tokens: Tensor, *rest: object) -> Tensor:
        ran[id(self)].append(len(tokens))
        return real(self, tokens, *rest)

    monkeypatch.setattr(GPTNeoX, "run", spy)
    steps = list(generate(target, draft, PROMPT, settings, 30, commit=commit))
    drafts, verifies = count_passes(steps, commit)
    assert sorted(drafts.elements()) == sorted(ran[id(draft)])
    assert sorted(verifies.elements()) == sorted(ran[id(target)][1:])  # the first is prefill
    n_run = sum(sum(step.draft_rows[1:]) for step in steps[1:])
    n_kept = sum(slot >= 0 for step in steps[1:] for slot in step.tree.draft_slots[1:])
    assert (n_run > n_kept) == isinstance(settings, (DySpec, Deagle))


def test_passes_are_padded_as_their_own_pool_pads_them() -> None:
    pool = random_model(0).pool
    pool.min_rows = 3
    assert padded({1: 5, 2: 1, 4: 2}, pool, min_rows=1) == {3: 6, 4: 2}
    assert padded({1: 5, 4: 2}, pool, min_rows=8) == {8: 7}
    pool.is_shaped = True
    assert padded({3: 1, 5: 1, 8: 1, 200: 1}, pool, min_rows=1) == {4: 1, 8: 2, 200: 1}


def step_of(path: list[int], predictions: list[int], **changes: object) -> Step:
    """An iteration over the README's tree; of its tokens cat is 1, dog 2, sat 3 and ran 4."""
    probs = [1.0, 0.62, 0.33, 0.62 * 0.52, 0.62 * 0.33, 0.33 * 0.82]
    tree = Tree(
        tokens=[0, 1, 2, 3, 4, 4],
        parents=[-1, 0, 0, 1, 1, 2],
        depths=[0, 1, 1, 2, 2, 2],
        path_logprobs=[math.log(p) for p in probs],
        draft_slots=[0, 1, 2, -1, -1, -1],
        are_retrieved=[False] * 6,
    )
    return Step(
        tokens=[1] * len(path),
        tree=replace(tree, **changes),
        path=path,
        verify_ms=1.0,
        predictions=predictions,
    )


FIRST = Step([0])  # prefill's, without a tree
CAT_RAN = step_of([0, 1, 4], [1, 4, 4, 9, 9, 9])  # and after dog it would be ran, too
COW = step_of([0], [7, 9, 4, 9, 9, 9])


def test_matching_counts_what_is_off_the_path() -> None:
    """Of five tokens cat and its ran are accepted; dog's ran is what the target would say, too."""
    metrics = measure([FIRST, CAT_RAN, COW])
    assert metrics.acceptance == 2 / 10
    assert matching([FIRST, CAT_RAN, COW]) == (3 + 1) / 10
    assert matching([FIRST]) == 0.0


@pytest.mark.parametrize("method", METHODS)
def test_greedy_matching_is_no_less_than_acceptance(method: str) -> None:
    target = random_model(0)
    settings = METHODS[method]()
    steps = list(generate(target, random_model(1), PROMPT, settings, 20))
    found = measure_acceptance(steps, settings)
    assert found["matching"] >= measure(steps).acceptance
    by_code = isinstance(settings, (Chain, Fixed, DynaTree))
    assert ("code_acceptance" in found) == by_code
    own = list(generate(target, target, PROMPT, Chain(K=3), 20))  # everything is accepted
    assert matching(own) == measure(own).acceptance == 1.0


@pytest.mark.parametrize(
    ("settings", "path_length", "printed"),
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
    settings: Settings, path_length: float, printed: float
) -> None:
    """To the digits that the paper prints, of both: 102.2 % is 7.15 / 7."""
    least = code_acceptance(settings, path_length - 0.005) - 0.0005
    most = code_acceptance(settings, path_length + 0.005) + 0.0005
    assert least <= printed <= most


def test_other_methods_have_no_such_acceptance() -> None:
    for settings in (Alone(), Chain(K=0), DySpec(), Deagle()):
        assert code_acceptance(settings, 3.0) is None


def test_depths_reached_tried_and_accepted() -> None:
    target = random_model(0)
    steps = list(generate(target, target, [3, 1, 4], Chain(K=3), 13))
    depths = count_depths(steps)  # the draft is the target: everything is accepted
    assert depths == {"drafted": [3, 3, 3], "tried": [3, 3, 3], "accepted": [3, 3, 3]}
    assert count_depths(steps[:1]) == {"drafted": [], "tried": [], "accepted": []}
    lone_dog = step_of([0, 2], [2, 9, 9, 9, 9, 9], parents=[-1, 0, 0, 1, 1, 1])
    depths = count_depths([FIRST, CAT_RAN, COW, lone_dog])
    assert depths["drafted"] == [3, 3]
    assert depths["tried"] == [3, 1], "a path that ends where nothing was drafted is no failure"
    assert depths["accepted"] == [2, 1]


def test_matches_are_counted_by_the_probability_after_the_parent() -> None:
    """cat 0.62 and dog 0.33; after cat sat 0.52 and ran 0.33; after dog ran 0.82."""
    bins = {6: 2, 10: 1, 12: 1, 16: 1}
    found = count_calibration([FIRST, CAT_RAN])
    assert {i: n for i, n in enumerate(found["drafted"]) if n} == bins
    assert {i: n for i, n in enumerate(found["matching"]) if n} == {6: 1, 12: 1, 16: 1}
    both = count_calibration([FIRST, CAT_RAN, COW])
    assert sum(both["drafted"]) == 10 and both["drafted"][16] == 2 and both["matching"][16] == 2
    assert len(both["drafted"]) == len(both["matching"]) == 20


def test_what_was_retrieved_is_not_the_drafts_guess() -> None:
    are_retrieved = [False, False, True, False, False, True]
    step = step_of([0, 1, 4], [1, 4, 4, 9, 9, 9], are_retrieved=are_retrieved)
    found = count_calibration([FIRST, step])
    assert sum(found["drafted"]) == 3 and sum(found["matching"]) == 2


def test_a_certain_node_is_in_the_last_bin() -> None:
    step = step_of([0, 1, 4], [1, 4, 4, 9, 9, 9], path_logprobs=[0.0] * 6)
    found = count_calibration([FIRST, step])
    assert found["drafted"][19] == 5 and found["matching"][19] == 3
