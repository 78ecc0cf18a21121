"""Times of single forward passes by number of rows, their bandwidth floor, and predicted times.

A one-row pass reads every weight once, so bytes / bandwidth is its floor. Speculation pays if a
pass over a tree takes little longer than a pass over one token. The times of single passes, with
the rows that the passes of a text had, predict the speed of the text. Its measured speed is lower
because of the time between the passes.

    times = measure_step_times(target, draft, context=200, max_rows=256, graphs=True)
    times.predict_ms(**count_passes(steps, config))
"""

import bisect
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.eagle_head import fc_bytes
from dynatree_lab.engine.masks import causal_mask
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import ROW_COUNTS, PassConfig
from dynatree_lab.engine.scores import Ranking
from dynatree_lab.engine.streamed import StreamedGPTNeoX, StreamedLayers
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.costs import MIN_COST
from dynatree_lab.methods.eagle import EagleHead

COPY_BYTES = 2**28  # larger than any cache, so that memory is measured
BURST = 3  # consecutive runs of a pass before the next pass runs
FITTED_ROWS = 64  # of the largest pass that the costs are fitted to; auto has 48 rows or fewer
REPORTED = [1, 4, 16, 64]  # rows of the passes whose costs are reported
REPORTED_ROWS = f"{', '.join(map(str, REPORTED))} rows"
FIRST_ROWS = 4  # of the first draft pass of an iteration: three committed tokens and the root
# What passes of target and draft rank on CUDA, as those of DynaTree's default settings
RANKINGS = Ranking(), Ranking(3, are_logprobs=True)


@dataclass(frozen=True)
class StepTimes:
    """Median milliseconds of single forward passes, and the bytes that a one-row pass reads."""

    context: int  # cached tokens before the rows
    rows: list[int]  # increasing
    target_ms: list[float]  # one for each of `rows`
    draft_ms: list[float]
    target_bytes: int
    draft_bytes: int
    copy_gb_s: float  # gigabytes per second, read and written, of a large copy
    read_gb_s: float | None = None  # of reading a streamed target's layers without a pass
    has_fixed_shapes: bool = False  # a pass takes the time of the next larger number in `rows`
    how: str = ""  # how the passes were timed; older files do not say

    def predict_ms(self, target_rows: Mapping[str, int], draft_rows: Mapping[str, int]) -> float:
        """Return the milliseconds of these passes, as count_passes returns them, without other
        work. Times between two measured numbers of rows are interpolated."""
        return self.total_ms(target_rows, self.target_ms) + self.total_ms(draft_rows, self.draft_ms)

    def total_ms(self, counts: Mapping[str, int], ms: Sequence[float]) -> float:
        """Return the milliseconds of passes, which are counted by their rows."""
        each = self.interpolate([int(n) for n in counts], ms)
        return float(numpy.dot(each, list(counts.values())))

    def interpolate(self, rows: Sequence[int], ms: Sequence[float]) -> numpy.ndarray:
        """Return the milliseconds of passes over these numbers of rows. ms: one for each of
        `self.rows`."""
        if self.has_fixed_shapes:
            last = len(self.rows) - 1
            rows = [self.rows[min(bisect.bisect_left(self.rows, n), last)] for n in rows]
        return numpy.interp(rows, self.rows, ms)

    def pass_costs(self) -> tuple[str, float]:
        """Return what the target's passes of REPORTED_ROWS cost, in passes of one row, and DySpec's
        T_t / T_d: a one-row pass of the target over one of the draft."""
        ms = self.interpolate(REPORTED, self.target_ms)
        return ", ".join(f"{cost:.1f}" for cost in ms / ms[0]), ms[0] / self.draft_ms[0]

    def fit_costs(self) -> list[float]:
        """Return the costs tree, row, drafting and level that auto and cost gates take, in passes
        of one row. Costs of 0 are raised to MIN_COST.

        The first two are a least-squares line through passes of 2 to FITTED_ROWS rows. A level is
        a draft pass of one row. Drafting is what FIRST_ROWS rows add to it, because the first pass
        of an iteration also runs the tokens that the last one committed.
        """
        more = numpy.array([n - 1 for n in self.rows if 1 < n <= FITTED_ROWS])
        ms = self.interpolate(more + 1, self.target_ms) / self.target_ms[0] - 1
        line = numpy.stack([numpy.ones(len(more)), more], axis=1)
        tree, row = numpy.linalg.lstsq(line, ms)[0]
        if tree < MIN_COST:  # the line then starts there
            tree, row = MIN_COST, more @ (ms - MIN_COST) / (more @ more)
        level, first = self.interpolate([1, FIRST_ROWS], self.draft_ms) / self.target_ms[0]
        return [max(float(cost), MIN_COST) for cost in (tree, row, first - level, level)]

    def describe_floor(self, role: str) -> str:
        """Return a sentence that compares a one-row pass with its bandwidth floor. It is faster
        where the processor's cache holds the weights. role: target or draft."""
        gb_s, how = self.copy_gb_s, "of a copy"
        if role == "draft":
            ms, n_bytes = self.draft_ms[0], self.draft_bytes
        else:
            ms, n_bytes = self.target_ms[0], self.target_bytes
            if self.read_gb_s:
                gb_s, how = self.read_gb_s, "of reading alone"
        floor = n_bytes / gb_s / 1e6
        return (
            f"A one-row {role} pass at {self.context} cached tokens takes {ms:.2f} ms. Reading its "
            f"{n_bytes / 1e6:,.1f} MB at the {gb_s:.1f} GB/s {how} takes {floor:.2f}."
        )


def count_passes(steps: Sequence[Step], config: GenerationConfig) -> dict[str, dict[str, int]]:
    """Return how many passes of the target and of the draft had how many rows, after the target's
    pass over the prompt. The rows are those that the method asks for, without a model's padding."""
    verified = [len(step.tree) for step in steps[1:]]
    if config.commit == "rebuild":  # runs the accepted tokens again
        verified += [len(step.path) for step in steps[1:]]
    drafted = [n for step in steps[1:] for n in step.draft_rows]
    found, min_rows = {}, config.method.facts.min_rows
    for name, rows in (("target_rows", verified), ("draft_rows", drafted)):
        counts = Counter(max(n, min_rows) for n in rows)
        found[name] = {str(n): counts[n] for n in sorted(counts)}  # JSON's keys are strings
    return found


def measure_step_times(
    target: FastGPTNeoX,
    draft: FastGPTNeoX,
    context: int,
    max_rows: int,
    graphs: bool,
    n_rounds: int = 5,
) -> StepTimes:
    """Return the median times of both models' passes with each number of ROW_COUNTS up to max_rows,
    which is one of them. graphs: use CUDA graphs on CUDA."""
    rows = [n for n in ROW_COUNTS if n <= max_rows]
    is_streamed = isinstance(target, StreamedGPTNeoX) and target.layers.bytes_per_pass > 0
    if is_streamed:
        rows = [n for n in rows if n.bit_count() == 1]  # a pass takes seconds
    read_gb_s = read_bandwidth(target.layers) if is_streamed else None
    how = f"medians of {n_rounds * BURST} passes"
    medians = []
    for model, ranking in zip((target, draft), RANKINGS, strict=True):
        config = PassConfig(max_rows, n_scratch=max_rows, ranking=ranking)
        cache = model.new_cache(context + max_rows, config)
        cache.advance(context)
        if graphs:
            model.capture(cache, context)
        passes = {n: make_forward(model, cache, n) for n in rows}
        if model is target and is_streamed:
            ms, how = streamed_ms(passes, n_rounds)
        else:
            ms = median_ms(list(passes.values()), n_rounds)
        medians.append(ms)
        model.release(cache)
    return StepTimes(
        context=context,
        rows=rows,
        target_ms=medians[0],
        draft_ms=medians[1],
        target_bytes=step_bytes(target, context),
        draft_bytes=step_bytes(draft, context),
        copy_gb_s=copy_bandwidth(target.device),
        read_gb_s=read_gb_s,
        has_fixed_shapes=target.has_fixed_shapes,
        how=how,
    )


def make_forward(model: FastGPTNeoX, cache: FastCache, n: int) -> Callable[[], torch.Tensor]:
    """Return a function that runs a pass of n rows as the decoding loop does: tokens on the host,
    and a mask if n > 1."""
    tokens = torch.arange(n) % model.config.vocab_size
    mask = causal_mask(n) if n > 1 else None
    positions = torch.arange(cache.length, cache.length + n)

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        if isinstance(model, EagleHead):  # any states will do
            cache.next_states = model.gpt_neox.embed_in.weight[:n]
        return model.forward(tokens, positions, cache, mask)

    return forward


def median_ms(passes: Sequence[Callable], n_rounds: int) -> list[float]:
    """Return the median milliseconds of each pass. In each round every pass runs BURST times. All
    passes run once before, to warm up."""
    for forward in passes:
        forward()
    samples: list[list[float]] = [[] for _ in passes]
    for _ in range(n_rounds):
        for i, forward in enumerate(passes):
            samples[i] += [time_ms(forward) for _ in range(BURST)]
    return [statistics.median(ms) for ms in samples]


def time_ms(forward: Callable) -> float:
    start = time.perf_counter()
    forward()  # waits for the device, for example by reading a result
    return (time.perf_counter() - start) * 1e3


def streamed_ms(passes: Mapping[int, Callable], n_rounds: int) -> tuple[list[float], str]:
    """Return the milliseconds of a streamed target's passes, by number of rows, and a sentence's
    part on how they were timed.

    The disk's speed drifts. So each pass is divided by the mean of a pass of two rows before and
    one after it. The result is the median ratio times the median pass of two rows. A pass of one
    row counts as one of two, because a CPU pads it and reading takes most of its time.
    """
    passes[2]()  # to warm up
    twos = [time_ms(passes[2])]
    ratios = {n: [] for n in passes if n > 2}
    order = random.Random(0)
    for _ in range(n_rounds):
        for n in order.sample(list(ratios), len(ratios)):
            ms = time_ms(passes[n])
            twos.append(time_ms(passes[2]))
            ratios[n].append(ms / statistics.mean(twos[-2:]))
    middle = statistics.median(twos)
    how = (
        f"medians of {n_rounds} passes each in random order, divided by passes of two rows before "
        f"and after, times the median of those: {middle:.0f} ms ({min(twos):.0f}-{max(twos):.0f})"
    )
    return [statistics.median(ratios.get(n, [1.0])) * middle for n in passes], how


def step_bytes(model: FastGPTNeoX, context: int) -> int:
    """Return the bytes that a one-row pass reads: the stored weights without the input embedding,
    of which it reads one row, and the cache; of a streamed model the layers that are read again."""
    if isinstance(model, StreamedGPTNeoX) and model.layers.bytes_per_pass:
        return model.layers.bytes_per_pass
    weights = model.embed_out.nbytes + sum(layer.nbytes for layer in model.gpt_neox.layers)
    return weights + fc_bytes(model) + model.bytes_per_token * context


def read_bandwidth(layers: StreamedLayers) -> float:
    """Return the gigabytes per second of reading the streamed layers alone, the floor of a pass."""

    def read() -> None:
        layers.read_all()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    read()  # checks the weights
    return layers.bytes_per_pass / time_ms(read) / 1e6


def copy_bandwidth(device: torch.device) -> float:
    """Return the gigabytes read and written per second when a tensor larger than any cache is
    copied."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)

    def run() -> None:
        copy.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()  # touches new memory
    return 2 * COPY_BYTES / statistics.median(time_ms(run) for _ in range(5)) / 1e6
