"""Tests of the predicted time of a text: the sum of its forwards, which were timed one by one."""

from pathlib import Path

import pytest
from conftest import random_config, random_model, random_tensors

from benchmark.counts import predict_text_ms
from benchmark.report import step_notes
from benchmark.step_times import StepTimes, step_bytes
from cli.models import Pair, Request
from engine.generation_config import GenerationConfig
from engine.model import FastGPTNeoX


def test_predicted_time_is_the_forwards_alone() -> None:
    """Check a width between two that were measured, and one past the last: both are on a line
    through two of them."""
    times = StepTimes(200, [1, 2, 4], [10.0, 20.0, 30.0], [1.0, 2.0, 3.0], 0, 0, 1.0)
    assert times.predict_ms({1: 3, 2: 1}, {3: 2}) == 3 * 1.0 + 2.0 + 2 * 25.0
    assert times.predict_ms({}, {8: 1}) == 50.0


def test_notes_on_slow_and_fast_steps() -> None:
    """Check weights that fit the processor's cache, which are read faster than from memory."""
    times = StepTimes(200, [1, 2], [2.0, 2.0], [0.5, 0.5], 1_000_000, 1_000_000, 1.0)
    slow, fast = step_notes(times)
    assert "reads 1.0 MB, which would take 1.00 ms at 1.0 GB/s" in slow
    assert "takes 2.00 ms, 50% of that speed" in slow
    assert fast.endswith("takes 0.50 ms, faster, because the processor's cache holds the weights.")


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


def test_predicted_passes_are_padded_as_each_models_own_are() -> None:
    """Check the draft's passes, which were once padded like the target's. A row takes 1 ms here."""
    pair = Pair(random_model(0), random_model(1), None, Path(), None, {})
    pair.target.min_rows = 4
    pair.draft.min_rows = 16
    config = GenerationConfig.parse("linear", "K=2")
    steps = list(Request(pair, [3, 1, 4, 1, 5], config, 9).decode())
    rows = [n for step in steps for n in step.draft_rows]
    assert len(rows) > 4 and max(rows) < 16
    times = StepTimes(5, [1, 128], [1.0, 128.0], [1.0, 128.0], 0, 0, 1.0)
    expected = 4 * (len(steps) - 1) + 16 * len(rows)
    assert predict_text_ms(times, config, pair, steps) == pytest.approx(expected)
