"""What one forward costs by the number of its rows, the least it can cost, and what follows.

A decode step reads every weight once, so bytes / bandwidth is its floor. Speculation pays when a
pass over a whole tree costs little more than a pass over one token; these times, with the rows that
a generation really ran, predict its speed, and the measured speed shows what is lost beside them.
Those rows are counted in counts.py.

    times = measure_step_times(target, draft, context=200)
    times.predict_ms(drafts={1: 40, 3: 35}, verifies={7: 40})
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta

from engine.memory import in_bytes, memory_for
from engine.model import FastCache, FastGPTNeoX
from engine.passes import ROW_COUNTS, causal_mask
from gpt_neox import Scores

COPY_BYTES = 2**28  # past every cache, so that memory itself is measured
BURST = 3  # times that a pass runs before the next one's turn

Rate = Annotated[float, Meta(gt=0, le=1e12)]
Rates = Annotated[list[Rate], Meta(min_length=2)]


@dataclass(frozen=True)
class StepTimes:
    """Median milliseconds of one forward, and the bytes that a one-row forward has to read."""

    context: Annotated[int, Meta(ge=0)]  # cached tokens before the rows
    rows: Annotated[list[int], Meta(min_length=2)]  # rising
    target_ms: Rates  # by `rows`
    draft_ms: Rates
    target_bytes: Annotated[int, Meta(ge=0)]
    draft_bytes: Annotated[int, Meta(ge=0)]
    copy_gb_s: Rate  # gigabytes read and written per second by a large copy

    def predict_ms(self, drafts: Mapping[int, int], verifies: Mapping[int, int]) -> float:
        """Milliseconds of the forwards alone; both arguments: rows of a forward -> how many."""
        total = 0.0
        for rows, n in drafts.items():
            total += n * interpolate(self.rows, self.draft_ms, rows)
        for rows, n in verifies.items():
            total += n * interpolate(self.rows, self.target_ms, rows)
        return total

    def floor_ms(self, role: str) -> float:
        """What the target's or the draft's one-row forward takes at the bandwidth of a copy."""
        return getattr(self, f"{role}_bytes") / self.copy_gb_s / 1e6


def interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """y at x, on the straight lines through (xs, ys), the outer ones prolonged. xs rise."""
    right = 1
    while right < len(xs) - 1 and xs[right] < x:
        right += 1
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return ys[left] + slope * (x - xs[left])


def measure_step_times(
    target: FastGPTNeoX, draft: FastGPTNeoX, context: int, graphs: bool = True, n_rounds: int = 5
) -> StepTimes:
    """Median times of both models at every width, taken in turn, in n_rounds bursts.

    graphs: on CUDA, as graphs. Raises OutOfMemory if the caches do not fit.
    """
    opened = [(model, open_cache(model, context, graphs)) for model in (target, draft)]
    passes = [forward_of(model, cache, n) for model, cache in opened for n in ROW_COUNTS]
    medians = median_ms(passes, n_rounds)
    for _, cache in opened:
        cache.__exit__()
    return StepTimes(
        context=context,
        rows=list(ROW_COUNTS),
        target_ms=medians[: len(ROW_COUNTS)],
        draft_ms=medians[len(ROW_COUNTS) :],
        target_bytes=step_bytes(target, context),
        draft_bytes=step_bytes(draft, context),
        copy_gb_s=copy_bandwidth(target.device),
    )


def open_cache(model: FastGPTNeoX, context: int, graphs: bool = True) -> FastCache:
    """A cache of `context` tokens, for every width; graphs: with what CUDA replays for it."""
    cache = model.new_cache(context + ROW_COUNTS[-1])
    cache.advance(context)
    if graphs:
        model.capture(cache, context)
    return cache


def forward_of(model: FastGPTNeoX, cache: FastCache, n: int) -> Callable[[], torch.Tensor]:
    """One forward of n rows, as the loop calls it: from the host, masked if n > 1."""
    context = cache.length
    tokens = torch.arange(n) % model.config.vocab_size
    mask = None
    if n > 1:
        mask = causal_mask(n)
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


def step_bytes(model: FastGPTNeoX, context: int) -> int:
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
