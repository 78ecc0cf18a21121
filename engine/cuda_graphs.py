"""Passes of a few fixed shapes over one cache, captured as CUDA graphs and replayed.

A forward of one token launches some hundreds of kernels, and on a fast GPU launching them takes
longer than running them. A graph launches all at once, but always the same kernels on the same
memory. So a pass is padded to one of a few numbers of rows and of cache slots, and whatever else
differs between passes is content of one buffer that never moves: tokens, positions, where to write,
the mask. It is put together on the host and goes up by one copy. What ranks the logits is a graph,
too, so that the few numbers that the host wants of them come down by one read. The loop knows
nothing of this. Without a capture the same code runs eagerly, which is also how it is tested where
there is no GPU.

    passes = ShapedPasses(run, kv, turns, vocab_size=50304)
    use = Use(n_rows=64, ranking=Ranking(3))
    passes.capture(range(200, 901), scratch=200, use=use)
    scores = passes.forward(tokens, positions, mask, start, 1, use)

Shapes: n rows of a pass, S slots it may see, V vocabulary.
"""

import gc
from collections.abc import Callable
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
    open_bias,
    row_count,
    slot_count,
)
from engine.scores import Ranking, Scores, rank, read_ranked
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
    if dtype == torch.float32:
        # Some environments allow TF32, whose products keep 10 bits: no text would be ar's
        torch.set_float32_matmul_precision("highest")


class Inputs(NamedTuple):
    """What differs between passes of one shape: views of one buffer of bytes."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    start: Tensor  # [1] int64, the first slot to write
    seen: Tensor  # [n, S] bool, True = may attend; or engine.strict's near slots, [n, NEAR] int64


class Shape(NamedTuple):
    """Of a pass."""

    n_rows: int
    n_slots: int  # that it may see
    is_strict: bool

    @property
    def n_words(self) -> int:
        """Numbers of 8 bytes in its inputs; a mask comes after them."""
        n_near = NEAR if self.is_strict else 0
        return self.n_rows * (2 + n_near) + 1

    @property
    def n_bytes(self) -> int:
        n_masked = 0 if self.is_strict else self.n_slots
        return 8 * self.n_words + self.n_rows * n_masked

    def inputs(self, buffer: Tensor) -> Inputs:
        """The beginning of a buffer of bytes, as the inputs of this shape."""
        n = self.n_rows
        words = buffer[: 8 * self.n_words].view(torch.int64)
        tokens, positions, start, near = words.split((n, n, 1, len(words) - 2 * n - 1))
        if self.is_strict:
            return Inputs(tokens, positions, start, near.view(n, NEAR))
        mask = buffer[8 * self.n_words : self.n_bytes].view(torch.bool)
        return Inputs(tokens, positions, start, mask.view(n, self.n_slots))


class ShapedPasses:
    """The passes of at most 128 rows over one cache."""

    def __init__(self, run: Run, kv: Tensor, turns: Tensor, vocab_size: int):
        """run, kv, turns: as engine.passes.PaddedPasses has them."""
        self.run, self.kv, self.turns = run, kv, turns
        n = ROW_COUNTS[-1]
        n_slots = kv.shape[3]
        n_bytes = max(Shape(n, n_slots, True).n_bytes, Shape(n, n_slots, False).n_bytes)
        self.buffer = torch.zeros(n_bytes, dtype=torch.uint8, device=kv.device)
        self.logits = torch.empty(n, vocab_size, device=kv.device)
        self.captured: dict[tuple, Captured] = {}  # by what was captured, and its arguments
        self.pool: tuple[int, int] | None = None  # the memory that all of them share
        self.is_replaying = False

    def has_room(self, n: int, use: Use) -> bool:
        """Whether a pass of n rows is one of these."""
        return n <= use.n_rows

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        start: int,
        n_last: int,
        use: Use,
    ) -> Scores:
        """GPTNeoX.forward in a fixed shape; the next pass overwrites the scores."""
        n = len(tokens)
        n_slots = slot_count(start + n if mask is None else mask.shape[1])
        if mask is None and not use.is_strict:
            mask = causal_mask(n, start)
        shape = Shape(row_count(max(n, use.min_rows)), n_slots, use.is_strict)
        self.upload(shape, tokens, positions, mask, start)
        self.do(self.run_pass, shape)
        logits = self.logits[n - n_last : n, : use.n_ids]
        if not use.ranking.is_read:
            return Scores(logits)
        ranked = self.do(self.rank, row_count(n), use.n_ids, use.ranking)
        return read_ranked(logits, ranked[n - n_last : n])

    def upload(
        self, shape: Shape, tokens: Tensor, positions: Tensor, mask: Tensor | None, start: int
    ) -> None:
        """Bring a pass from the host to where passes of its shape read it, by one copy.

        Rows added are of token 0 and see the first slot, as every row must see some.
        """
        n = len(tokens)
        # Pinned, so that the copy keeps nobody waiting; torch holds the memory until it is done
        is_pinned = self.buffer.device.type == "cuda"
        staged = torch.zeros(shape.n_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        inputs = shape.inputs(staged)
        inputs.tokens[:n] = tokens
        inputs.positions[:n] = positions
        inputs.start[0] = start
        if shape.is_strict:
            inputs.seen[:n] = near_slots(positions, mask)
        else:
            inputs.seen[:n, : mask.shape[1]] = mask
            inputs.seen[n:, 0] = True
        self.buffer[: shape.n_bytes].copy_(staged, non_blocking=True)

    def run_pass(self, shape: Shape) -> None:
        """The pass that was uploaded for this shape; no shape in it depends on a value, and nothing
        is read back."""
        inputs = shape.inputs(self.buffer)
        if shape.is_strict:
            bias = open_sight(inputs.positions, inputs.seen, shape.n_slots)
        else:
            bias = open_bias(inputs.seen, self.kv)
        slots = inputs.start + torch.arange(shape.n_rows, device=self.kv.device)
        run = self.run()
        logits = run(inputs.tokens, inputs.positions, self.kv, self.turns, slots, bias)
        self.logits[: shape.n_rows].copy_(logits)

    def rank(self, n_rows: int, n_ids: int, ranking: Ranking) -> Tensor:
        """What the host wants of its logits, [n_rows, 2 + 2 k]."""
        return rank(self.logits[:n_rows, :n_ids], ranking)

    def do(
        self, step: Callable[..., Tensor | None], *arguments: Shape | int | Ranking
    ) -> Tensor | None:
        """One of these two: its replay where it has been captured."""
        if not self.is_replaying:
            return step(*arguments)
        captured = self.captured[step.__name__, *arguments]
        captured.graph.replay()
        return captured.result

    def capture(self, lengths: range, scratch: int, use: Use) -> int:
        """Capture what is not yet: the passes over so many slots. Returns how many.

        scratch: the first slot that may be written to meanwhile.
        """
        device, was_collecting = self.buffer.device, gc.isenabled()
        missing = self.missing(lengths, use)
        gc.disable()  # a tensor or graph that it frees on the way would spoil the capture
        try:
            # To warm up, all run before the first is captured: kernels are chosen and loaded, which
            # no capture may do. What several processes compute together they do here and only
            # record in a capture, so that one that fails there leaves no other waiting
            with torch.inference_mode():
                for key, step in missing.items():
                    self.upload_nothing(key[1], scratch)
                    step()
            for key, step in missing.items():
                self.upload_nothing(key[1], scratch)  # what the buffer has is of another shape
                self.captured[key] = record(step, self.pool, device)
                self.pool = self.captured[key].graph.pool()
        finally:
            if was_collecting:
                gc.enable()
        self.is_replaying = True
        return len(missing)

    def missing(self, lengths: range, use: Use) -> dict[tuple, Callable[[], Tensor | None]]:
        """What is not captured for so many slots, as `captured` names it.

        Largest first, so that the smaller ones find room in the memory of the larger.
        """
        most = row_count(max(use.n_rows, use.min_rows))
        counts = [n for n in reversed(ROW_COUNTS) if n <= most]
        wanted = {}
        for n_slots in range(slot_count(lengths[-1]), slot_count(lengths[0]) - 1, -SLOT_STEP):
            for n_rows in counts:
                if n_rows >= use.min_rows:
                    shape = Shape(n_rows, n_slots, use.is_strict)
                    wanted["run_pass", shape] = partial(self.run_pass, shape)
        if use.ranking.is_read:
            for n_rows in counts:
                ranked = (n_rows, use.n_ids, use.ranking)
                wanted["rank", *ranked] = partial(self.rank, *ranked)
        return {key: step for key, step in wanted.items() if key not in self.captured}

    def upload_nothing(self, shape: Shape | int, scratch: int) -> None:
        """If it is of a pass: one whose rows are all added."""
        if isinstance(shape, Shape):
            nothing = torch.empty(0, dtype=torch.int64)
            no_mask = None if shape.is_strict else torch.empty(0, 0, dtype=torch.bool)
            self.upload(shape, nothing, nothing, no_mask, scratch)


class Captured(NamedTuple):
    """A function as a graph, and the tensor that every replay writes anew."""

    graph: torch.cuda.CUDAGraph
    result: Tensor | None


def destroy_graphs() -> None:
    """Destroy all that there are, where none is replayed any more."""
    for graph in KEPT:
        graph.reset()
    KEPT.clear()


def record(
    run: Callable[[], Tensor | None], pool: tuple[int, int] | None, device: torch.device
) -> Captured:
    """Capture a function that has run before, over a memory pool to share.

    Always in inference mode: torch up to 2.10 could not capture outside of it what it had once
    captured inside.
    """
    with torch.cuda.device(device), torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        KEPT.append(graph)  # even if that fails: it may have collectives in it
        try:
            with torch.cuda.graph(graph, pool=pool):
                result = run()
        except RuntimeError as error:  # the end of a broken capture hides what broke it
            raise error.__context__ or error from None
    return Captured(graph, result)
