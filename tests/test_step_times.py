"""Claim: what is predicted of a text is its forwards alone, as single ones were timed."""

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
    """Between two widths that were measured, and past the last, on the line through two of them."""
    times = StepTimes(200, [1, 2, 4], [10.0, 20.0, 30.0], [1.0, 2.0, 3.0], 0, 0, 1.0)
    assert times.predict_ms({1: 3, 2: 1}, {3: 2}) == 3 * 1.0 + 2.0 + 2 * 25.0
    assert times.predict_ms({}, {8: 1}) == 50.0


def test_a_step_out_of_the_cache_does_not_contradict_its_floor() -> None:
    """Weights that fit the processor's cache are read faster than the memory is."""
    times = StepTimes(200, [1, 2], [2.0, 2.0], [0.5, 0.5], 1_000_000, 1_000_000, 1.0)
    slow, fast = step_notes(times)
    assert "reads 1.0 MB, 1.00 ms at the 1.0 GB/s of a large copy; it takes 2.00 ms, 50% of" in slow
    assert fast.endswith("it takes 0.50 ms, faster, as the processor's cache holds the weights.")


def test_step_bytes_are_every_matrix_but_the_input_embedding() -> None:
    """As it is stored: of a float32 model, numbers that float16 has take two bytes."""
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
    """The draft's were padded as the target's. Here a forward takes a millisecond a row."""
    pair = Pair(random_model(0), random_model(1), None, Path(), None, {})
    pair.target.min_rows = 4
    pair.draft.min_rows = 16
    way = GenerationConfig.parse("linear", "K=2")
    steps = list(Request(pair, [3, 1, 4, 1, 5], way, 9).decode())
    rows = [n for step in steps for n in step.draft_rows]
    assert len(rows) > 4 and max(rows) < 16
    times = StepTimes(5, [1, 128], [1.0, 128.0], [1.0, 128.0], 0, 0, 1.0)
    expected = 4 * (len(steps) - 1) + 16 * len(rows)
    assert predict_text_ms(times, way, pair, steps) == pytest.approx(expected)
