"""What one forward costs by the number of its rows, the least it can cost, and what follows.

A decode step reads every weight once, so bytes / bandwidth is its floor. Speculation pays when a
pass over a whole tree costs little more than a pass over one token; these times, with the rows that
a generation really ran, predict its speed, and the measured speed shows what is lost beside them.

    times = measure_step_times(target, draft, context=200)
    times.predict_ms(drafts={1: 40, 3: 35}, verifies={7: 40})
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from dynatree import Step
from engine.cuda_graphs import ROW_COUNTS
from engine.stopwatch import Stopwatch
from gpt_neox import GPTNeoX, KVCache

COPY_BYTES = 2**28  # past every cache, so that memory itself is measured


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
        return sum(
            n * interpolate(self.rows, ms, rows)
            for ms, passes in ((self.draft_ms, drafts), (self.target_ms, verifies))
            for rows, n in passes.items()
        )


def interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """y at x, on the straight lines through (xs, ys), the outer ones prolonged. xs rise."""
    right = next((i for i, known in enumerate(xs) if i and known >= x), len(xs) - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return ys[left] + slope * (x - xs[left])


def measure_step_times(
    target: GPTNeoX, draft: GPTNeoX, context: int, n_rounds: int = 5
) -> StepTimes:
    """Median times of both models at every width, taken in turn, n_rounds bursts of three.

    Raises OutOfMemory if the caches do not fit.
    """
    models = {"target_ms": target, "draft_ms": draft}
    caches = {name: _open_cache(model, context) for name, model in models.items()}
    passes = {
        (name, n): _forward(model, caches[name], n)
        for name, model in models.items()
        for n in ROW_COUNTS
    }
    for run in passes.values():  # warm-up
        run()
    watch = Stopwatch(target.device)
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in passes}
    for _ in range(n_rounds):
        for key, run in (item for item in passes.items() for _ in range(3)):
            watch.restart()
            run()
            samples[key].append(watch.ms())
    for name, model in models.items():
        model.pool.take_back(caches[name].storage)
    medians = {name: [statistics.median(samples[name, n]) for n in ROW_COUNTS] for name in models}
    sizes = {"target_bytes": step_bytes(target, context), "draft_bytes": step_bytes(draft, context)}
    bandwidth = copy_bandwidth(target.device)
    return StepTimes(context, list(ROW_COUNTS), **medians, **sizes, copy_gb_s=bandwidth)


def _open_cache(model: GPTNeoX, context: int) -> KVCache:
    """A cache of `context` tokens, for every width and with what CUDA replays for it."""
    cache = model.new_cache(context + ROW_COUNTS[-1], ROW_COUNTS[-1])
    cache.advance(context)
    lengths = range(context, cache.capacity + 1)
    model.pool.capture(cache.storage, lengths, context, cache.min_rows)
    return cache


def _forward(model: GPTNeoX, cache: KVCache, n: int) -> Callable[[], torch.Tensor]:
    """One forward of n rows, as the loop calls it: masked if n > 1."""
    context = cache.length
    tokens = torch.arange(n, device=model.device) % model.config.vocab_size
    mask = None
    if n > 1:
        mask = torch.ones(n, context + n, dtype=torch.bool, device=model.device).tril_(context)
    positions = torch.arange(context, context + n, device=model.device)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return model.forward(tokens, positions, cache, mask)

    return run


def step_bytes(model: GPTNeoX, context: int) -> int:
    """Bytes a one-row step reads: every weight but the input embedding (one row), and the cache."""
    read = [model.embed_out, model.final_norm]
    for layer in model.layers:
        read += layer
    weights = sum(affine.weight.nbytes + affine.bias.nbytes for affine in read)
    return weights + model.pool.token_bytes * context


def copy_bandwidth(device: torch.device) -> float:
    """Gigabytes read and written per second, from copies of a tensor larger than any cache."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    copy, watch, ms = torch.empty_like(source), Stopwatch(device), []
    for _ in range(6):
        watch.restart()
        copy.copy_(source)
        ms.append(watch.ms())
    return 2 * COPY_BYTES / statistics.median(ms[1:]) / 1e6  # the first one touches new memory


def count_passes(
    steps: Sequence[Step], n_prompt: int, commit: str, padded: Callable[[int], int] = int
) -> tuple[Counter, Counter]:
    """Forwards after prefill by their rows, padding included: the draft's, the target's."""
    drafts, verifies = Counter(), Counter()
    length, n_known = n_prompt, 0  # committed tokens; how many of them the draft has run
    for before, step in pairwise(steps):
        length += len(before.tokens)
        verifies[padded(len(step.tree))] += 1
        if commit == "rebuild":
            verifies[padded(len(step.path))] += 1
        was_run = step.tree.draft_slots >= 0
        if was_run[0]:
            _, *widths = step.tree.depths[was_run].bincount().tolist()
            widths.append(length - n_known)  # the catch-up, which ends with the root
            drafts.update(map(padded, widths))
            n_known = length - 1 + int(was_run[list(step.path)].sum())
    return drafts, verifies
