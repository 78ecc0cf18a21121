"""Passes of a few fixed shapes over one cache, captured as CUDA graphs and replayed.

A pass over one token launches some hundreds of kernels. On a fast GPU, launching them takes longer
than running them. A CUDA graph launches all of them at once, but always the same kernels on the
same memory. So a pass is padded to one of a few row counts and slot counts. Everything else that
differs between passes is the content of one buffer that never moves: tokens, positions, the slots
to write, and the mask of the slots above the committed ones. The host fills it and sends it by one
copy; the graph makes the whole mask of it. The graph also ranks the logits, so the few numbers that
the host needs are read at once. Without a capture the same code runs eagerly, which is how it is
tested without a GPU.

    passes = FixedPasses(kv, rotary, model.config.vocab_size)
    config = PassConfig(max_rows=64, ranking=Ranking(3))
    passes.capture(model, range(200, 901), scratch=200, config=config)
    scores = passes.forward(model, tokens, positions, mask, start, 1, config)

Shapes: n rows of a pass, S slots of its shape, V vocabulary.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.passes import (
    ROW_COUNTS,
    SLOT_STEP,
    PassConfig,
    Passes,
    causal_mask,
    row_count,
    slot_count,
)
from engine.scores import Ranking, ReadScores, Scores, rank
from engine.strict import RECENT, build_strict_mask, recent_slots
from methods.sampler import FEW

if TYPE_CHECKING:
    from engine.model import FastGPTNeoX

# All graphs are kept until none is replayed any more: destroying one frees a cuBLAS workspace that
# the others on its stream still use (pytorch issue 193402)
KEPT: list[torch.cuda.CUDAGraph] = []
Result = tuple[Tensor, Tensor | None]  # last hidden states, and what the host reads of the logits
Captured = tuple[torch.cuda.CUDAGraph, Result]  # every replay overwrites the result


def choose_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Set which kernels this process's passes use, where torch leaves a choice."""
    if device.type == "cuda":
        # cuDNN's attention is reported to refuse one row, so that ar would be rounded differently
        # than a tree, and to plan anew for every prompt length (neither was measured here)
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Partial sums of a product are added in float32, not in 16 bits
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if dtype == torch.float32:
        # TF32, which some environments allow, keeps 10 bits: the text would not be ar's
        torch.set_float32_matmul_precision("highest")


class Inputs(NamedTuple):
    """What differs between passes of one shape: views of one buffer of bytes."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    start: Tensor  # [1] int64, the first slot to write
    last: Tensor  # [1] int64, the last committed slot, -1 if there is none
    mask: Tensor  # strict: recent slots [n, RECENT] int64. Otherwise [n, 1 + n_scratch + 1], 0 or
    # -inf: for all committed slots, for each of n_scratch slots above them, for all other slots


class Shape(NamedTuple):
    """What all passes of one graph have in common."""

    n_rows: int
    n_slots: int  # that the rows may attend to
    n_scratch: int  # those of them above the committed ones, which a mask may cover
    is_strict: bool = False
    n_ids: int = sys.maxsize
    ranking: Ranking = Ranking()

    @property
    def n_words(self) -> int:
        """Number of int64 in the inputs. A mask that is not strict comes after them."""
        n_recent = RECENT if self.is_strict else 0
        return self.n_rows * (2 + n_recent) + 2

    def n_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the inputs, if the mask has this dtype."""
        n_columns = 0 if self.is_strict else self.n_scratch + 2
        return 8 * self.n_words + self.n_rows * n_columns * dtype.itemsize

    def inputs(self, buffer: Tensor, dtype: torch.dtype) -> Inputs:
        """Return the first bytes of a buffer as the inputs of this shape."""
        n = self.n_rows
        words = buffer[: 8 * self.n_words].view(torch.int64)
        tokens, positions, start, last, recent = words.split((n, n, 1, 1, len(words) - 2 * n - 2))
        if self.is_strict:
            return Inputs(tokens, positions, start, last, recent.view(n, RECENT))
        mask = buffer[8 * self.n_words : self.n_bytes(dtype)].view(dtype)
        return Inputs(tokens, positions, start, last, mask.view(n, self.n_scratch + 2))


MAX_READ = 2 * (ROW_COUNTS[-1] + 1)  # numbers of a row that the host reads


class FixedPasses(Passes):
    """The passes of at most 128 rows over one cache, each in one of a few shapes."""

    def __init__(self, kv: Tensor, rotary: Tensor, vocab_size: int):
        super().__init__(kv, rotary)
        n = ROW_COUNTS[-1]
        n_slots = kv.shape[3]
        widest = (Shape(n, n_slots, n_slots, is_strict) for is_strict in (False, True))
        n_bytes = max(shape.n_bytes(kv.dtype) for shape in widest)
        self.buffer = torch.zeros(n_bytes, dtype=torch.uint8, device=kv.device)
        self.slots = torch.arange(n_slots, device=kv.device)
        self.logits = torch.empty(n, vocab_size, device=kv.device)
        # Pinned, so that copies do not wait. The host reads a pass before it writes the next one,
        # or waits for the event
        is_pinned = kv.device.type == "cuda"
        self.staged = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.read = torch.empty(n * MAX_READ, pin_memory=is_pinned)
        self.is_up = torch.cuda.Event() if is_pinned else None  # the staged inputs have arrived
        self.captured: dict[Shape, Captured] = {}
        self.graph_pool: tuple[int, int] | None = None  # the memory that all graphs share
        self.is_replaying = False

    def forward(
        self,
        model: "FastGPTNeoX",
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        start: int,
        n_last: int,
        config: PassConfig,
    ) -> Scores:
        """Run Passes.forward in a fixed shape. The next pass overwrites the scores."""
        n = len(tokens)
        n_masked = 0 if mask is None else mask.shape[1]
        if n > config.max_rows or n_masked > config.n_scratch:
            return super().forward(model, tokens, positions, mask, start, n_last, config)
        length = start if mask is None else start + n - n_masked  # slots below the mask
        if mask is None and not config.is_strict:
            mask = causal_mask(n)
        shape = shape_of(row_count(max(n, config.min_rows)), slot_count(start + n), config)
        self.upload(shape, tokens, positions, mask, length, start)
        if self.is_replaying:
            graph, (x, ranked) = self.captured[shape]
            graph.replay()
        else:
            x, ranked = self.run(model, shape)
        rows = slice(n - n_last, n)
        logits = self.logits[rows, : config.n_ids]
        if ranked is None:
            return Scores(x[rows], logits)
        return ReadScores(x[rows], logits, self.copy_to_host(ranked[rows]), config.ranking)

    def upload(
        self,
        shape: Shape,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        length: int,
        start: int,
    ) -> None:
        """Send the inputs of a pass to where passes of this shape read them, by one copy.

        Added rows have token 0 and attend to at least one slot, because softmax over none is nan.
        """
        n = len(tokens)
        if self.is_up:
            self.is_up.synchronize()
        n_bytes = shape.n_bytes(self.kv.dtype)
        staged = self.staged[:n_bytes].zero_()
        inputs = shape.inputs(staged, self.kv.dtype)
        inputs.tokens[:n] = tokens
        inputs.positions[:n] = positions
        inputs.start[0] = start
        inputs.last[0] = length - 1
        if shape.is_strict:
            inputs.mask[:n] = recent_slots(positions, mask, length)
        else:
            end = 1 + mask.shape[1]
            inputs.mask[:n, 1:end].masked_fill_(~mask, -torch.inf)  # all others are 0 so far
            inputs.mask[:n, end:] = -torch.inf
            inputs.mask[:, -1] = -torch.inf
        self.buffer[:n_bytes].copy_(staged, non_blocking=True)
        if self.is_up:
            self.is_up.record()

    def run(self, model: "FastGPTNeoX", shape: Shape) -> Result:
        """Run the uploaded pass of this shape. Returns its last hidden states [n, hidden], and what
        the host reads of its logits, as engine.scores.rank returns it.

        No shape in it depends on a value, and nothing is read by the host.
        """
        inputs = shape.inputs(self.buffer, self.kv.dtype)
        if shape.is_strict:
            mask = build_strict_mask(inputs.positions, inputs.mask, shape.n_slots)
        else:
            columns = (self.slots[: shape.n_slots] - inputs.last).clamp_(0, shape.n_scratch + 1)
            mask = inputs.mask.index_select(1, columns)
        slots = inputs.start + self.slots[: shape.n_rows]
        rotary = self.rotary.index_select(0, inputs.positions)
        x = model.gpt_neox(inputs.tokens, rotary, self.kv, slots, mask)
        self.logits[: shape.n_rows].copy_(model.embed_out(x))
        if not shape.ranking.is_read:
            return x, None
        logits = self.logits[: shape.n_rows, : shape.n_ids]
        return x, rank(logits, shape.ranking)

    def copy_to_host(self, ranked: Tensor) -> Tensor:
        """Return `ranked` on the host, by one copy."""
        read = self.read[: ranked.numel()].view(ranked.shape)
        read.copy_(ranked, non_blocking=True)
        if self.is_up:
            torch.cuda.current_stream(ranked.device).synchronize()
        return read.clone()

    def capture(
        self, model: "FastGPTNeoX", lengths: range, scratch: int, config: PassConfig
    ) -> int:
        """Capture the passes over these numbers of slots that are not captured yet, and return how
        many. scratch: the first slot that may be written meanwhile."""
        missing = self.missing(lengths, config)
        # Every pass runs once before the first capture, because kernels are chosen and loaded then,
        # which no capture may do. Collectives run here as well and are only recorded in a capture,
        # so a rank whose capture fails leaves no other rank waiting
        with torch.inference_mode():
            for shape in missing:
                self.upload_nothing(shape, scratch)
                self.run(model, shape)
        for shape in missing:
            self.upload_nothing(shape, scratch)  # the buffer holds inputs of another shape
            run = partial(self.run, model, shape)
            graph, result = record(run, self.graph_pool, self.buffer.device)
            self.captured[shape], self.graph_pool = (graph, result), graph.pool()
            if model.shard.world_size == 1:  # else a rank that fails leaves the others waiting
                graph.replay()  # the first launch uploads the graph
        self.is_replaying = True
        return len(missing)

    def missing(self, lengths: range, config: PassConfig) -> list[Shape]:
        """Return the shapes of passes over these numbers of slots that are not captured.

        The largest come first, so that the memory of large ones has room for small ones.
        """
        most = row_count(max(config.max_rows, config.min_rows))
        wanted = []
        for n_slots in range(slot_count(lengths[-1]), slot_count(lengths[0]) - 1, -SLOT_STEP):
            for n_rows in reversed(ROW_COUNTS):
                if config.min_rows <= n_rows <= most:
                    wanted.append(shape_of(n_rows, n_slots, config))
        return [shape for shape in wanted if shape not in self.captured]

    def upload_nothing(self, shape: Shape, scratch: int) -> None:
        """Upload a pass of added rows only."""
        nothing = torch.empty(0, dtype=torch.int64)
        no_mask = None if shape.is_strict else torch.empty(0, 0, dtype=torch.bool)
        self.upload(shape, nothing, nothing, no_mask, scratch, scratch)


def shape_of(n_rows: int, n_slots: int, config: PassConfig) -> Shape:
    """Return the shape of a pass of these numbers of rows and slots. Candidates and scratch slots
    are rounded up as rows and slots are, so that similar methods share a graph."""
    ranking = config.ranking
    if 0 < ranking.k <= FEW:
        ranking = ranking._replace(k=row_count(ranking.k))
    n_scratch = config.n_scratch
    n_scratch = row_count(n_scratch) if n_scratch <= ROW_COUNTS[-1] else slot_count(n_scratch)
    n_scratch = min(n_scratch, n_slots)
    return Shape(n_rows, n_slots, n_scratch, config.is_strict, config.n_ids, ranking)


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch off garbage collection: a tensor or graph that it frees would spoil a capture."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def destroy_graphs() -> None:
    """Destroy all graphs, when none is replayed any more."""
    for graph in KEPT:
        graph.reset()
    KEPT.clear()


def record(
    run: Callable[[], Result],
    graph_pool: tuple[int, int] | None,
    device: torch.device,
) -> Captured:
    """Capture a function that has run before. graph_pool: the memory that graphs share.

    Captures in inference mode, because torch before 2.11 cannot capture a function outside of it
    after a capture inside. Restores the current stream, because torch does not do so if the end of
    a capture raises.
    """
    here = torch.cuda.stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.inference_mode(), here, uncollected():
        graph = torch.cuda.CUDAGraph()
        KEPT.append(graph)  # even if the capture fails, because it may hold collectives
        try:
            with torch.cuda.graph(graph, pool=graph_pool):
                result = run()
        except RuntimeError as error:  # the end of a failed capture hides its cause
            raise error.__context__ or error from None
    return graph, result
