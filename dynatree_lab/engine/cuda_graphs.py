"""Passes of a few fixed shapes over one cache, captured as CUDA graphs and replayed.

A pass over one token launches hundreds of kernels. On a fast GPU, launching them takes longer than
running them. A CUDA graph launches all of them at once, but always the same kernels on the same
memory. So a pass is padded to one of a few row counts and slot counts. All inputs that differ
between passes are in one buffer with a fixed address: tokens, positions, the slots to write, and
one bit for each row and each slot after the committed ones. The host fills a staging buffer and
sends it by one copy, and the graph computes the whole mask from it. The graph also ranks the
logits, so the host reads the few numbers that it needs by one copy. Without a capture the same code
runs eagerly, so it can be tested without a GPU.

Graphs of small passes are captured before the first tree. A larger pass is captured when it first
runs, because a generation seldom needs all large row counts and lengths.

    config = PassConfig(max_rows=64, ranking=Ranking(3))
    passes = FixedPasses(kv, rotary, buffer_rows(config), model.config.vocab_size)
    passes.capture(model, range(200, 901), first_scratch=200, config=config)
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
from numpy import ndarray
from torch import Tensor

from dynatree_lab.engine.masks import PLAIN, ROW_BYTES, Masks, additive_bits, causal_mask
from dynatree_lab.engine.memory import memory_for
from dynatree_lab.engine.passes import (
    ROW_COUNTS,
    SLOT_STEP,
    SMALL_PASS,
    PassConfig,
    Passes,
    round_up_rows,
    round_up_slots,
)
from dynatree_lab.engine.scores import RankedScores, Ranking, Scores, rank_logits
from dynatree_lab.methods.sampler import SMALL_K

if TYPE_CHECKING:
    from dynatree_lab.engine.model import FastGPTNeoX

# All graphs live until destroy_graphs, because destroying one frees a cuBLAS workspace that other
# graphs on its stream still use (pytorch issue 193402)
ALL_GRAPHS: list[torch.cuda.CUDAGraph] = []
PassResult = tuple[Tensor, Tensor | None]  # last hidden states [n, hidden], result of rank_logits
CapturedPass = tuple[torch.cuda.CUDAGraph, PassResult]  # every replay overwrites the result


def choose_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Set torch's global options that decide which kernels passes use."""
    if device.type == "cuda":
        # cuDNN's attention is reported to reject a single row, which would make ar round
        # differently than a tree, and to plan again for every prompt length (not measured here)
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Partial sums of a product are added in float32, not in 16 bits
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if device.type == "cuda" or dtype == torch.float32:
        # Some environments allow TF32. Its 10 bits would change greedy text, and 16-bit models too
        # have products in float32: folded biases, and attention in strict passes
        torch.set_float32_matmul_precision("highest")


class PassInputs(NamedTuple):
    """The inputs of a pass, which a graph reads. All are views of one buffer of bytes."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    start: Tensor  # [1] int64, the first slot to write
    last: Tensor  # [1] int64, the last committed slot, -1 if there is none
    mask: Tensor  # [n, bytes] uint8, packed by Masks.pack


class PassShape(NamedTuple):
    """The key of a graph: the properties that all of its passes share."""

    n_rows: int
    n_slots: int  # number of slots that the rows may attend to
    n_scratch: int  # number of slots after the committed ones that a mask may cover
    masks: Masks = PLAIN
    n_ids: int = sys.maxsize
    ranking: Ranking = Ranking()

    @property
    def n_int64(self) -> int:
        """Number of int64 values in the inputs. The masks come after them."""
        return self.n_rows * 2 + 2

    @property
    def n_bytes(self) -> int:
        """Size of the inputs in bytes."""
        return 8 * self.n_int64 + self.n_rows * self.masks.row_bytes(self.n_scratch)

    def view_inputs(self, buffer: Tensor) -> PassInputs:
        """Return the inputs of this shape as views of the first bytes of a buffer."""
        n = self.n_rows
        words = buffer[: 8 * self.n_int64].view(torch.int64)
        tokens, positions, start, last = words.split((n, n, 1, 1))
        mask = buffer[8 * self.n_int64 : self.n_bytes]
        return PassInputs(tokens, positions, start, last, mask.view(n, -1))


class StagedInputs(NamedTuple):
    """The host's views of both buffers for one shape. Making them takes longer than filling them,
    so they are kept."""

    words: ndarray  # all int64 inputs in one array; those below are parts of it
    tokens: ndarray  # [n]
    positions: ndarray  # [n]
    start: ndarray  # [1]
    last: ndarray  # [1]
    mask: ndarray  # as in PassInputs
    staged: Tensor  # the bytes of all inputs in the staging buffer
    uploaded: Tensor  # the same bytes in the buffer that graphs read


def buffer_rows(config: PassConfig) -> int:
    """Return the number of rows that the buffers of a generation must have room for."""
    return round_up_rows(max(config.max_rows, config.min_rows, SMALL_PASS))


class FixedPasses(Passes):
    """The passes over one cache, in a few fixed shapes. A pass with more rows or a wider mask than
    its config allows runs as it is."""

    def __init__(self, kv: Tensor, rotary: Tensor, n_rows: int, vocab_size: int):
        """n_rows: of the largest pass, one of ROW_COUNTS."""
        super().__init__(kv, rotary)
        n_slots = kv.shape[3]
        n_bytes = PassShape(n_rows, n_slots, n_slots).n_bytes + n_rows * ROW_BYTES
        self.buffer = torch.zeros(n_bytes, dtype=torch.uint8, device=kv.device)
        self.slots = torch.arange(n_slots, device=kv.device)
        self.additive_bits = additive_bits(kv)
        self.logits = torch.empty(n_rows, vocab_size, device=kv.device)
        # Pinned memory, so that copies do not block. The host overwrites `staging` only after it
        # has read the last pass's results or waited for `upload_done`
        self.is_pinned = kv.device.type == "cuda"
        self.staging = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        self.upload_done = torch.cuda.Event() if self.is_pinned else None
        # By rows, scratch slots and masks, which decide the layout
        self.staged_inputs: dict[tuple[int, int, Masks], StagedInputs] = {}
        self.captured: dict[PassShape, CapturedPass] = {}
        self.graph_pool: tuple[int, int] | None = None  # memory pool that all graphs share
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
        """Run Passes.forward, in a fixed shape if the config allows it. The next pass overwrites
        the scores. Raises OutOfMemory."""
        n = len(tokens)
        mask = causal_mask(n) if mask is None else mask
        n_masked = mask.shape[1]
        if n > config.max_rows or n_masked > config.n_scratch:
            return super().forward(model, tokens, positions, mask, start, n_last, config)
        length = start + n - n_masked  # slots before those of the mask
        n_rows, n_slots = round_up_rows(max(n, config.min_rows)), round_up_slots(start + n)
        shape = make_shape(n_rows, n_slots, config)
        self.upload(shape, tokens, positions, mask, length, start)
        if self.is_replaying and shape in self.captured:
            graph, (x, ranked) = self.captured[shape]
            graph.replay()
        else:
            x, ranked = self.run(model, shape)
            if self.is_replaying:
                with memory_for(f"the CUDA graph of a pass of {n_rows} rows; use --no-graphs"):
                    self.capture_shape(model, shape)
        rows = slice(n - n_last, n)
        logits = self.logits[rows, : config.n_ids]
        if ranked is None:
            return Scores(x[rows], logits)
        return RankedScores(x[rows], logits, self.copy_to_host(ranked[rows]), config.ranking)

    def upload(
        self,
        shape: PassShape,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        length: int,
        start: int,
    ) -> None:
        """Copy the inputs of a pass to the buffer on the device. Padding rows have token 0."""
        n = len(tokens)
        if self.upload_done:
            self.upload_done.synchronize()
        inputs = self.stage(shape)
        inputs.words.fill(0)
        inputs.tokens[:n] = tokens.numpy()
        inputs.positions[:n] = positions.numpy()
        inputs.start[0] = start
        inputs.last[0] = length - 1
        inputs.mask[:] = shape.masks.pack(positions, mask, length, shape)
        inputs.uploaded.copy_(inputs.staged, non_blocking=True)
        if self.upload_done:
            self.upload_done.record()

    def stage(self, shape: PassShape) -> StagedInputs:
        """Return the kept views for a shape."""
        layout = shape.n_rows, shape.n_scratch, shape.masks
        inputs = self.staged_inputs.get(layout)
        if inputs is None:
            staged, uploaded = self.staging[: shape.n_bytes], self.buffer[: shape.n_bytes]
            words = staged[: 8 * shape.n_int64].view(torch.int64).numpy()
            arrays = (view.numpy() for view in shape.view_inputs(staged))
            inputs = self.staged_inputs[layout] = StagedInputs(words, *arrays, staged, uploaded)
        return inputs

    def run(self, model: "FastGPTNeoX", shape: PassShape) -> PassResult:
        """Run a pass of this shape on the uploaded inputs. Return its last hidden states
        [n, hidden], and the result of rank_logits, or None if the host reads nothing.

        A graph can capture this method: no tensor's shape depends on a value on the device, and the
        host does not read from the device.
        """
        inputs = shape.view_inputs(self.buffer)
        mask = shape.masks.unpack(self, inputs, shape)
        slots = inputs.start + self.slots[: shape.n_rows]
        rotary = self.rotary.index_select(0, inputs.positions)
        x = model.gpt_neox(inputs.tokens, rotary, self.kv, slots, mask)
        model.embed_out.write_logits(x, self.logits[: shape.n_rows])
        if not shape.ranking.is_read:
            return x, None
        logits = self.logits[: shape.n_rows, : shape.n_ids]
        return x, rank_logits(logits, shape.ranking)

    def copy_to_host(self, ranked: Tensor) -> Tensor:
        """Return a copy of `ranked` on the host. Wait until it has arrived."""
        results = torch.empty(ranked.shape, pin_memory=self.is_pinned)  # torch keeps pinned memory
        results.copy_(ranked, non_blocking=True)
        if self.is_pinned:
            torch.cuda.current_stream(ranked.device).synchronize()
        return results

    def capture(
        self, model: "FastGPTNeoX", lengths: range, first_scratch: int, config: PassConfig
    ) -> int:
        """Capture the small passes for these lengths of the sequence, and from now on every other
        pass when it first runs. Return the number of new graphs.

        Shapes that were captured before are skipped. Captures write to the slots from
        first_scratch on.
        """
        missing = self.missing_shapes(lengths, config)
        # Every pass runs once before the first capture, because this chooses and loads kernels,
        # which is not allowed in a capture. It also runs the collectives, which a capture only
        # records. So if the capture of a rank fails, no other rank waits for it
        with torch.inference_mode():
            for shape in missing:
                self.upload_padding(shape, first_scratch)
                self.run(model, shape)
        for shape in missing:
            self.upload_padding(shape, first_scratch)  # the buffer holds inputs of another shape
            graph = self.capture_shape(model, shape)
            if model.n_ranks() == 1:  # otherwise ranks would wait for one that has failed
                graph.replay()  # the first launch uploads the graph to the device
        self.is_replaying = True
        return len(missing)

    def capture_shape(self, model: "FastGPTNeoX", shape: PassShape) -> torch.cuda.CUDAGraph:
        """Capture a pass that has run before, and return its graph."""
        run = partial(self.run, model, shape)
        graph, result = capture_graph(run, self.graph_pool, self.buffer.device)
        self.captured[shape], self.graph_pool = (graph, result), graph.pool()
        return graph

    def missing_shapes(self, lengths: range, config: PassConfig) -> list[PassShape]:
        """Return the shapes of small passes for these lengths of the sequence that are not captured
        yet.

        The largest come first, so that smaller ones can reuse their memory in the pool.
        """
        max_rows = round_up_rows(max(config.min_rows, min(config.max_rows, SMALL_PASS)))
        min_slots, max_slots = round_up_slots(lengths[0]), round_up_slots(lengths[-1])
        wanted = []
        for n_slots in range(max_slots, min_slots - 1, -SLOT_STEP):
            for n_rows in reversed(ROW_COUNTS):
                if config.min_rows <= n_rows <= max_rows:
                    wanted.append(make_shape(n_rows, n_slots, config))
        return [shape for shape in wanted if shape not in self.captured]

    def upload_padding(self, shape: PassShape, first_scratch: int) -> None:
        """Upload a pass of padding rows only."""
        no_rows = torch.empty(0, dtype=torch.int64)
        self.upload(shape, no_rows, no_rows, causal_mask(0), first_scratch, first_scratch)


def make_shape(n_rows: int, n_slots: int, config: PassConfig) -> PassShape:
    """Return the shape of a pass of n_rows rows and n_slots slots. The numbers of candidates and
    scratch slots are rounded up, so that similar methods share a graph."""
    ranking = config.ranking
    if 0 < ranking.k <= SMALL_K:
        ranking = ranking._replace(k=round_up_rows(ranking.k))
    round_up = round_up_rows if config.n_scratch <= ROW_COUNTS[-1] else round_up_slots
    n_scratch = min(round_up(config.n_scratch), n_slots)
    return PassShape(n_rows, n_slots, n_scratch, config.masks, config.n_ids, ranking)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch off garbage collection, because freeing a tensor or graph would break a capture."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def destroy_graphs() -> None:
    """Destroy all graphs. None may be replayed afterwards."""
    for graph in ALL_GRAPHS:
        graph.reset()
    ALL_GRAPHS.clear()


def capture_graph(
    run: Callable[[], PassResult],
    graph_pool: tuple[int, int] | None,
    device: torch.device,
) -> CapturedPass:
    """Return the graph of a function that has run before, and its result.

    graph_pool: the memory pool of earlier graphs, which this one shares.
    """
    with torch.cuda.device(device), torch.inference_mode(), no_garbage_collection():
        graph = torch.cuda.CUDAGraph()
        ALL_GRAPHS.append(graph)  # even if the capture fails, because it may hold collectives
        try:
            with torch.cuda.graph(graph, pool=graph_pool):
                result = run()
        except RuntimeError as error:  # ending a failed capture hides its cause by another error
            raise error.__context__ or error from None
    return graph, result
