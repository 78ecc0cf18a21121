"""Tests of the predicted time of a text, which is the sum of its passes, and of their timing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from fast import generate, random_model
from small import random_config, random_tensors
from torch import Tensor

from draft_tree import DynaTree, Settings
from dynatree_lab.benchmark import step_times
from dynatree_lab.benchmark.step_times import MIN_COST, StepTimes, count_passes, step_bytes
from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.methods.costs import parse_costs
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.static import Chain, PaddedAutoregressive

TARGET, DRAFT = random_model(0), random_model(1)
PROMPT = [3, 1, 4, 1, 5]
# A row of the target takes 1 ms, of the draft 1,000 ms
BY_ROW = StepTimes(5, [1, 128], [1.0, 128.0], [1e3, 128e3], 0, 0, 1.0)


@pytest.mark.parametrize(
    ("settings", "commit"),
    [
        (PaddedAutoregressive(), "keep"),
        (Chain(K=3), "rebuild"),
        (DynaTree(tau=0.01), "keep"),
        (DySpec(N=16), "rebuild"),
    ],
)
def test_predicted_passes_are_those_that_ran(
    settings: Settings, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the counted rows with those of the passes after prefill, and the predicted time with
    their sum. Rows of the draft that are cut from the tree after their pass count as well."""
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
    assert BY_ROW.predict_ms(**found) == sum(verified[1:]) + 1e3 * sum(drafted)
    n_kept = sum(slot >= 0 for step in steps[1:] for slot in step.tree.draft_slots[1:])
    n_run = sum(sum(step.draft_rows[1:]) for step in steps[1:])
    assert (n_run > n_kept) == isinstance(settings, DySpec)


def test_passes_take_the_time_of_padded_ones() -> None:
    """Check minimum rows of the method, and the fixed row counts on CUDA."""
    steps = list(generate(TARGET, None, PROMPT, PaddedAutoregressive(), 3))
    config = GenerationConfig(PaddedAutoregressive(rows=5))
    assert count_passes(steps, config) == {"target_rows": {"5": 2}, "draft_rows": {}}
    times = StepTimes(5, [1, 4, 8], [1.0, 4.0, 5.0], [0.0] * 3, 0, 0, 1.0)
    assert times.predict_ms({"2": 3, "6": 1}, {}) == 3 * 2.0 + 4.5
    fixed = replace(times, has_fixed_shapes=True)
    assert fixed.predict_ms({"2": 3, "4": 1, "6": 1, "9": 1}, {}) == 4 * 4.0 + 5.0 + 5.0


def test_costs_are_fitted_to_passes() -> None:
    """Check that passes made from costs give them back, and that none is 0 or less where rows are
    free or a second row makes a pass faster."""
    rows, level = [1, 2, 4, 16, 64, 128], 0.05
    draft = [20 * (level + 0.02 * (n >= 4)) for n in rows]
    target = [20.0, *(20 * (1 + 0.3 + 0.04 * (n - 1)) for n in rows[1:-1]), 999.0]
    fit = StepTimes(5, rows, target, draft, 0, 0, 1.0).fit_costs()
    assert fit == pytest.approx([0.3, 0.04, 0.02, level])
    streamed = [20.0, 20.0, 19.0, 20.5, 26.0, 40.0]
    for target_ms, row in ((streamed, 0.004), ([20.0] * 6, MIN_COST)):
        costs = StepTimes(5, rows, target_ms, [1e-6] * 6, 0, 0, 1.0).fit_costs()
        assert costs == pytest.approx([MIN_COST, row, MIN_COST, MIN_COST], rel=0.2)
        assert parse_costs(":".join(map(str, costs))) == tuple(costs)


def test_streamed_passes_are_divided_by_passes_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a disk that gets slower with each pass. Every timed pass has one of two rows on each
    side, and the others come in random order."""
    ran, clock = [], [0.0]
    seconds = {1: 9.0, 2: 2.0, 4: 2.5, 8: 3.0, 16: 5.0}

    def make(n: int) -> Callable[[], None]:
        def forward() -> None:
            ran.append(n)
            clock[0] += seconds[n] * (1 + 0.01 * len(ran))

        return forward

    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock[0])
    ms, how = step_times.streamed_ms({n: make(n) for n in seconds}, 5)
    middle = 2000 * (1 + 0.01 * 17)  # the passes of two rows are the passes 2, 4, ... 32
    assert ms == pytest.approx([middle * ratio for ratio in (1, 1, 1.25, 1.5, 2.5)])
    others = ran[2::2]
    assert others != [4, 8, 16] * 5 and Counter(others) == {4: 5, 8: 5, 16: 5}
    assert set(ran[1::2]) == {2} and "those: 2340 ms (2040-2640)" in how


def test_a_pass_is_compared_with_its_floor() -> None:
    times = StepTimes(200, [1, 2], [2.0, 2.0], [0.5, 0.5], 3_000_000, 1_000_000, 2.0)
    assert times.describe_floor("target") == (
        "A one-row target pass at 200 cached tokens takes 2.00 ms. Reading its 3.0 MB at the 2.0 "
        "GB/s of a copy takes 1.50."
    )


def test_step_bytes_are_every_matrix_but_the_input_embedding() -> None:
    """Check bytes as stored: a float32 matrix that is exact in float16 takes two bytes a number."""
    hidden, wide, n_ids = 32, 64, 96
    layer = (hidden + 1) * (3 * hidden + wide) + (hidden + wide + 1) * hidden
    head = (hidden + 1) * n_ids
    cache = 4 * 2 * 2 * 10 * hidden  # bytes of keys and values, layers, tokens
    assert step_bytes(random_model(0), 10) == 4 * (2 * layer + head) + cache
    tensors = {name: t.half().float() for name, t in random_tensors(random_config(), 0).items()}
    n_biases = 2 * (3 * hidden + wide + hidden) + n_ids
    half = 2 * (2 * layer + head + n_biases) + cache
    assert step_bytes(FastGPTNeoX.from_tensors(random_config(), tensors), 10) == half
