"""Passes of a few fixed shapes over one cache, captured as CUDA graphs and replayed.

A forward of one token launches some hundreds of kernels, and on a fast GPU launching them takes
longer than running them. A graph launches all at once, but always the same kernels on the same
memory. So a pass is padded to one of a few numbers of rows and of cache slots, and whatever else
differs between passes is content of one buffer that never moves: tokens, positions, where to write,
what the rows see of the slots above the committed ones. It is put together on the host and goes up
by one copy; the whole mask is made of it in the graph. What ranks the logits is in the graph, too,
so that the few numbers that the host wants of them come down by one read. The loop knows nothing of
this. Without a capture the same code runs eagerly, which is also how it is tested where there is no
GPU.

    passes = ShapedPasses(run, kv, turns, config.vocab_size)
    use = Use(n_rows=64, ranking=Ranking(3))
    passes.capture(range(200, 901), scratch=200, use=use)
    scores = passes.forward(tokens, positions, mask, length, start, 1, use)

Shapes: n rows of a pass, S slots it may see, V vocabulary.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.passes import (
    ROW_COUNTS,
    SLOT_STEP,
    Run,
    Use,
    causal_mask,
    row_count,
    slot_count,
)
from engine.scores import FEW, Ranking, ReadScores, rank, read_ranked
from engine.strict import NEAR, near_slots, open_sight

# Every graph: destroying one frees a cuBLAS workspace that the others on its stream go on using
# (pytorch issue 193402), so none is before the last has been replayed
KEPT: list[torch.cuda.CUDAGraph] = []


def settle_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """What all of this process's passes are to be computed with, where torch leaves a choice."""
    if device.type == "cuda":
        # cuDNN's attention is reported to refuse one row, so that ar would round otherwise than a
        # tree, and to plan anew for every length of a prompt (not measured here)
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Parts of a product's sum are added up in float32, not in 16 bits
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if dtype == torch.float32:
        # Some environments allow TF32, whose products keep 10 bits: no text would be ar's
        torch.set_float32_matmul_precision("highest")


class Inputs(NamedTuple):
    """What differs between passes of one shape: views of one buffer of bytes."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    start: Tensor  # [1] int64, the first slot to write
    last: Tensor  # [1] int64, the last committed slot, -1 if there is none
    seen: Tensor  # engine.strict's near slots, [n, NEAR] int64; or [n, 1 + s + 1]: of what is
    # committed, of s slots above it, of all others, 0 or -inf


class Shape(NamedTuple):
    """Of a pass, and of what is wanted of it."""

    n_rows: int
    n_slots: int  # that it may see
    n_scratch: int  # of these those above the committed ones, of which a mask may speak
    is_strict: bool = False
    n_ids: int = sys.maxsize  # of the vocabulary
    ranking: Ranking = Ranking()

    @property
    def n_words(self) -> int:
        """Numbers of 8 bytes in its inputs; a mask comes after them."""
        n_near = NEAR if self.is_strict else 0
        return self.n_rows * (2 + n_near) + 2

    def n_bytes(self, dtype: torch.dtype) -> int:
        """Of its inputs, if a mask is of this dtype."""
        n_seen = 0 if self.is_strict else self.n_scratch + 2
        return 8 * self.n_words + self.n_rows * n_seen * dtype.itemsize

    def inputs(self, buffer: Tensor, dtype: torch.dtype) -> Inputs:
        """The beginning of a buffer of bytes, as the inputs of this shape."""
        n = self.n_rows
        words = buffer[: 8 * self.n_words].view(torch.int64)
        tokens, positions, start, last, near = words.split((n, n, 1, 1, len(words) - 2 * n - 2))
        if self.is_strict:
            return Inputs(tokens, positions, start, last, near.view(n, NEAR))
        seen = buffer[8 * self.n_words : self.n_bytes(dtype)].view(dtype)
        return Inputs(tokens, positions, start, last, seen.view(n, self.n_scratch + 2))


MOST_TOLD = 2 * (ROW_COUNTS[-1] + 1)  # numbers that the host is told of a row


class ShapedPasses:
    """The passes of at most 128 rows over one cache."""

    def __init__(self, run: Run, kv: Tensor, turns: Tensor, vocab_size: int):
        """run, kv, turns: as engine.passes.PaddedPasses has them."""
        self.run, self.kv, self.turns = run, kv, turns
        n = ROW_COUNTS[-1]
        n_slots = kv.shape[3]
        widest = (Shape(n, n_slots, n_slots, is_strict) for is_strict in (False, True))
        n_bytes = max(shape.n_bytes(kv.dtype) for shape in widest)
        self.buffer = torch.zeros(n_bytes, dtype=torch.uint8, device=kv.device)
        self.slots = torch.arange(n_slots, device=kv.device)
        self.logits = torch.empty(n, vocab_size, device=kv.device)
        # Both are pinned, so that a copy keeps nobody waiting: the host reads a pass before the
        # next is put together, or waits for the event
        is_pinned = kv.device.type == "cuda"
        self.staged = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.told = torch.empty(n * MOST_TOLD, pin_memory=is_pinned)
        self.is_up = torch.cuda.Event() if is_pinned else None  # what was staged last
        self.captured: dict[Shape, Captured] = {}
        self.pool: tuple[int, int] | None = None  # the memory that all of them share
        self.is_replaying = False

    def has_room(self, n: int, mask: Tensor | None, use: Use) -> bool:
        """Whether a pass of n rows is one of these."""
        return n <= use.n_rows and (mask is None or mask.shape[1] <= use.n_scratch)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        length: int,
        start: int,
        n_last: int,
        use: Use,
    ) -> ReadScores:
        """GPTNeoX.forward in a fixed shape; the next pass overwrites the scores. The mask is of the
        slots from `length` on."""
        n = len(tokens)
        n_slots = slot_count(start + n if mask is None else length + mask.shape[1])
        if mask is None and not use.is_strict:
            mask = causal_mask(n)
        shape = shape_of(row_count(max(n, use.min_rows)), n_slots, use)
        self.upload(shape, tokens, positions, mask, length, start)
        x, ranked = self.captured[shape].replay() if self.is_replaying else self.run_pass(shape)
        rows = slice(n - n_last, n)
        logits = self.logits[rows, : use.n_ids]
        if ranked is None:
            return ReadScores(x[rows], logits, use.ranking, None)
        return read_ranked(x[rows], logits, self.read(ranked[rows]), use.ranking)

    def upload(
        self,
        shape: Shape,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        length: int,
        start: int,
    ) -> None:
        """Bring a pass from the host to where passes of its shape read it, by one copy.

        Rows added are of token 0 and see all that may be seen, as every row must see some.
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
            inputs.seen[:n] = near_slots(positions, mask, length)
        else:
            end = 1 + mask.shape[1]
            inputs.seen[:n, 1:end].masked_fill_(~mask, -torch.inf)  # 0 elsewhere so far
            inputs.seen[:n, end:] = -torch.inf
            inputs.seen[:, -1] = -torch.inf
        self.buffer[:n_bytes].copy_(staged, non_blocking=True)
        if self.is_up:
            self.is_up.record()

    def run_pass(self, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """The pass that was uploaded for this shape: its last hidden states, and what the host
        wants of its logits, as engine.scores.rank has it. No shape in it depends on a value, and
        nothing is read back."""
        inputs = shape.inputs(self.buffer, self.kv.dtype)
        if shape.is_strict:
            bias = open_sight(inputs.positions, inputs.seen, shape.n_slots)
        else:
            above = (self.slots[: shape.n_slots] - inputs.last).clamp_(0, shape.n_scratch + 1)
            bias = inputs.seen.index_select(1, above)
        slots = inputs.start + self.slots[: shape.n_rows]
        run = self.run()
        x, logits = run(inputs.tokens, inputs.positions, self.kv, self.turns, slots, bias)
        self.logits[: shape.n_rows].copy_(logits)
        if not shape.ranking.is_read:
            return x, None
        logits = self.logits[: shape.n_rows, : shape.n_ids]
        return x, rank(logits, shape.ranking)

    def read(self, ranked: Tensor) -> Tensor:
        """The same on the host, by one copy."""
        told = self.told[: ranked.numel()].view(ranked.shape)
        told.copy_(ranked, non_blocking=True)
        if self.is_up:
            torch.cuda.current_stream(ranked.device).synchronize()
        return told.clone()

    def capture(self, lengths: range, scratch: int, use: Use, is_whole: bool = True) -> int:
        """Capture what is not yet: the passes over so many slots. Returns how many.

        scratch: the first slot that may be written to meanwhile. is_whole: no other process has a
        part in the passes.
        """
        missing = self.missing(lengths, use)
        # To warm up, all run before the first is captured: kernels are chosen and loaded, which no
        # capture may do. What several processes compute together they do here and only record in a
        # capture, so that one that fails there leaves no other waiting
        with torch.inference_mode():
            for shape in missing:
                self.upload_nothing(shape, scratch)
                self.run_pass(shape)
        for shape in missing:
            self.upload_nothing(shape, scratch)  # what the buffer has is of another shape
            run = partial(self.run_pass, shape)
            self.captured[shape] = record(run, self.pool, self.buffer.device)
            self.pool = self.captured[shape].graph.pool()
            if is_whole:  # else one that fails next would leave the others waiting
                self.captured[shape].replay()  # the first launch has to upload it
        self.is_replaying = True
        return len(missing)

    def missing(self, lengths: range, use: Use) -> list[Shape]:
        """The shapes of passes that are not captured for so many slots.

        Largest first, so that the smaller ones find room in the memory of the larger.
        """
        most = row_count(max(use.n_rows, use.min_rows))
        wanted = []
        for n_slots in range(slot_count(lengths[-1]), slot_count(lengths[0]) - 1, -SLOT_STEP):
            for n_rows in reversed(ROW_COUNTS):
                if use.min_rows <= n_rows <= most:
                    wanted.append(shape_of(n_rows, n_slots, use))
        return [shape for shape in wanted if shape not in self.captured]

    def upload_nothing(self, shape: Shape, scratch: int) -> None:
        """A pass whose rows are all added."""
        nothing = torch.empty(0, dtype=torch.int64)
        no_mask = None if shape.is_strict else torch.empty(0, 0, dtype=torch.bool)
        self.upload(shape, nothing, nothing, no_mask, scratch, scratch)


def shape_of(n_rows: int, n_slots: int, use: Use) -> Shape:
    """Of a pass of so many rows and slots. Candidates and scratch are rounded up as rows and slots
    are, so that methods which look at two and at three share a graph."""
    ranking = use.ranking
    if 0 < ranking.k <= FEW:
        ranking = ranking._replace(k=row_count(ranking.k))
    n_scratch = use.n_scratch
    n_scratch = row_count(n_scratch) if n_scratch <= ROW_COUNTS[-1] else slot_count(n_scratch)
    n_scratch = min(n_scratch, n_slots)
    return Shape(n_rows, n_slots, n_scratch, use.is_strict, use.n_ids, ranking)


class Captured(NamedTuple):
    """A function as a graph, and the tensors that every replay writes anew."""

    graph: torch.cuda.CUDAGraph
    result: tuple[Tensor, Tensor | None]

    def replay(self) -> tuple[Tensor, Tensor | None]:
        self.graph.replay()
        return self.result


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: a tensor or graph that it frees would spoil a capture."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def destroy_graphs() -> None:
    """Destroy all that there are, where none is replayed any more."""
    for graph in KEPT:
        graph.reset()
    KEPT.clear()


def record(
    run: Callable[[], tuple[Tensor, Tensor | None]],
    pool: tuple[int, int] | None,
    device: torch.device,
) -> Captured:
    """Capture a function that has run before, over a memory pool to share.

    Always in inference mode: torch up to 2.10 could not capture outside of it what it had once
    captured inside. Whatever fails, the current stream is then the one that it was: torch leaves
    the one that it captures on only if the capture's end does not raise.
    """
    here = torch.cuda.stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.inference_mode(), here, uncollected():
        graph = torch.cuda.CUDAGraph()
        KEPT.append(graph)  # even if that fails: it may have collectives in it
        try:
            with torch.cuda.graph(graph, pool=pool):
                result = run()
        except RuntimeError as error:  # the end of a broken capture hides what broke it
            raise error.__context__ or error from None
    return Captured(graph, result)
