"""What one forward costs by the number of its rows, the least it can cost, and what follows.

A decode step reads every weight once, so bytes / bandwidth is its floor. Speculation pays when a
pass over a whole tree costs little more than a pass over one token; these times, with the rows that
a generation really ran, predict its speed, and the measured speed shows what is lost beside them.
Those rows are counted in counts.py.

    times = measure_step_times(target, draft, context=200)
    times.predict_ms(drafts={1: 40, 3: 35}, verifies={7: 40})
    predict_text_ms(times, run, pair, steps)
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmark.counts import count_passes, padded
from benchmark.results import Run
from benchmark.rows import settings_of
from cli.models import Pair
from dynatree import Step, capture
from engine.memory import in_bytes, memory_for
from engine.passes import ROW_COUNTS
from engine.scores import Scores
from gpt_neox import GPTNeoX, KVCache

COPY_BYTES = 2**28  # past every cache, so that memory itself is measured
BURST = 3  # times that a pass runs before the next one's turn


@dataclass(frozen=True)
class StepTimes:
    """Median milliseconds of one forward, and the bytes that a one-row forward has to read."""

    context: int  # cached tokens before the rows
    rows: list[int]
    target_ms: list[float]  # by `rows`
    draft_ms: list[float]
    target_bytes: int
    draft_bytes: int
    copy_gb_s: float  # gigabytes read and written per second by a large copy

    def predict_ms(self, drafts: Mapping[int, int], verifies: Mapping[int, int]) -> float:
        """Milliseconds of the forwards alone; both arguments: rows of a forward -> how many."""
        total = 0.0
        for rows, n in drafts.items():
            total += n * interpolate(self.rows, self.draft_ms, rows)
        for rows, n in verifies.items():
            total += n * interpolate(self.rows, self.target_ms, rows)
        return total


def predict_text_ms(times: StepTimes, run: Run, pair: Pair, steps: Sequence[Step]) -> float:
    """What the forwards of a run's text would take alone."""
    min_rows = settings_of(run).rule().min_rows
    drafts, verifies = count_passes(steps, run.commit)
    drafts = padded(drafts, pair.draft.pool, min_rows)
    verifies = padded(verifies, pair.target.pool, min_rows)
    return times.predict_ms(drafts, verifies)


def interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """y at x, on the straight lines through (xs, ys), the outer ones prolonged. xs rise."""
    right = 1
    while right < len(xs) - 1 and xs[right] < x:
        right += 1
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return ys[left] + slope * (x - xs[left])


def measure_step_times(
    target: GPTNeoX, draft: GPTNeoX, context: int, n_rounds: int = 5
) -> StepTimes:
    """Median times of both models at every width, taken in turn, in n_rounds bursts.

    Raises OutOfMemory if the caches do not fit.
    """
    target_cache = _open_cache(target, context)
    draft_cache = _open_cache(draft, context)
    target_passes = [_forward(target, target_cache, n) for n in ROW_COUNTS]
    draft_passes = [_forward(draft, draft_cache, n) for n in ROW_COUNTS]
    medians = median_ms(target_passes + draft_passes, n_rounds)
    target.pool.take_back(target_cache.storage)
    draft.pool.take_back(draft_cache.storage)
    return StepTimes(
        context=context,
        rows=list(ROW_COUNTS),
        target_ms=medians[: len(target_passes)],
        draft_ms=medians[len(target_passes) :],
        target_bytes=step_bytes(target, context),
        draft_bytes=step_bytes(draft, context),
        copy_gb_s=copy_bandwidth(target.device),
    )


def _open_cache(model: GPTNeoX, context: int) -> KVCache:
    """A cache of `context` tokens, for every width and with what CUDA replays for it."""
    cache = model.new_cache(context + ROW_COUNTS[-1])
    cache.advance(context)
    capture(model, cache, context)
    return cache


def _forward(model: GPTNeoX, cache: KVCache, n: int) -> Callable[[], torch.Tensor]:
    """One forward of n rows, as the loop calls it: from the host, masked if n > 1."""
    context = cache.length
    tokens = torch.arange(n) % model.config.vocab_size
    mask = None
    if n > 1:
        mask = torch.ones(n, context + n, dtype=torch.bool).tril_(context)
    positions = torch.arange(context, context + n)

    @torch.inference_mode()
    def forward() -> Scores:
        return model.forward(tokens, positions, cache, mask)

    return forward


def median_ms(passes: Sequence[Callable], n_rounds: int) -> list[float]:
    """Each pass's median time, all in turn, n_rounds bursts of each; once before, to warm up."""
    for forward in passes:
        forward()
    samples: list[list[float]] = [[] for _ in passes]
    for _ in range(n_rounds):
        for i, forward in enumerate(passes):
            for _ in range(BURST):
                start = time.perf_counter()
                forward()  # what it says is read, so a device has come to its end
                samples[i].append((time.perf_counter() - start) * 1e3)
    return [statistics.median(ms) for ms in samples]


def step_bytes(model: GPTNeoX, context: int) -> int:
    """Bytes a one-row step reads: every matrix as it is stored but the input embedding (one row),
    and the cache."""
    weights = model.embed_out.nbytes + sum(layer.nbytes for layer in model.gpt_neox.layers)
    return weights + model.pool.token_bytes * context


def copy_bandwidth(device: torch.device) -> float:
    """Gigabytes read and written per second, from copies of a tensor larger than any cache.

    Raises OutOfMemory.
    """
    with memory_for(f"a copy of {in_bytes(COPY_BYTES)} (for table steps and column predicted)"):
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        copy = torch.empty_like(source)
    ms = []
    for _ in range(6):
        start = time.perf_counter()
        copy.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ms.append((time.perf_counter() - start) * 1e3)
    return 2 * COPY_BYTES / statistics.median(ms[1:]) / 1e6  # the first one touches new memory
