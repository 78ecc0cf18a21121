"""A cache with passes of a few fixed shapes, captured as CUDA graphs and replayed.

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

    cache = model.new_cache(900, PassConfig(max_rows=64, ranking=Ranking(3)))  # on CUDA
    model.prefill(prompt, cache)
    model.capture(cache, shortest=200)
    logits = model.forward(tokens, positions, cache, mask)

Shapes: n rows of a pass, S slots of its shape, V vocabulary.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from numpy import ndarray
from torch import Tensor

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.inputs import DeviceInputs, PassInputs
from dynatree_lab.engine.masks import PLAIN, ROW_BYTES, Masks, additive_bits, causal_mask
from dynatree_lab.engine.memory import memory_for
from dynatree_lab.engine.passes import (
    ROW_COUNTS,
    SLOT_STEP,
    SMALL_PASS,
    PassConfig,
    round_up_rows,
    round_up_slots,
)
from dynatree_lab.engine.scores import RankedScores, Ranking, Scores, rank_logits
from dynatree_lab.methods.sampler import SMALL_K

# All graphs live until destroy_graphs, because destroying one frees a cuBLAS workspace that other
# graphs on its stream still use (pytorch issue 193402)
ALL_GRAPHS: list[torch.cuda.CUDAGraph] = []
PassResult = tuple[Tensor, Tensor | None]  # last hidden states [n, hidden], result of rank_logits
CapturedPass = tuple[torch.cuda.CUDAGraph, PassResult]  # every replay overwrites the result


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

    def view_inputs(self, buffer: Tensor) -> DeviceInputs:
        """Return the inputs of this shape as views of the first bytes of a buffer."""
        n = self.n_rows
        words = buffer[: 8 * self.n_int64].view(torch.int64)
        tokens, positions, start, last = words.split((n, n, 1, 1))
        mask = buffer[8 * self.n_int64 : self.n_bytes]
        return DeviceInputs(tokens, positions, start, last, mask.view(n, -1))


class StagedInputs(NamedTuple):
    """The host's views of both buffers for one shape. Making them takes longer than filling them,
    so they are kept."""

    words: ndarray  # all int64 inputs in one array
    inputs: DeviceInputs  # its parts, and the masks; as arrays, which are filled faster
    staged: Tensor  # the bytes of all inputs in the staging buffer
    uploaded: Tensor  # the same bytes in the buffer that graphs read


class FixedCache(FastCache):
    """A cache whose passes have a few fixed shapes. A pass with more rows or a wider mask than its
    config allows runs as it is. Released, it leaves its memory and graphs to the next cache."""

    def __init__(self, kv: Tensor, rotary: Tensor, n_rows: int, n_ids: int):
        """n_rows: number of rows for which the buffers have room. n_ids: V."""
        n_slots, device = kv.shape[3], kv.device
        super().__init__(kv, rotary, n_slots)
        n_bytes = PassShape(n_rows, n_slots, n_slots).n_bytes + n_rows * ROW_BYTES
        self.buffer = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self.slots = torch.arange(n_slots, device=device)
        self.additive_bits = additive_bits(kv)
        self.logits = torch.empty(n_rows, n_ids, device=device)
        # Pinned memory, so that copies do not block. The host overwrites `staging` only after it
        # has read the last pass's results or waited for `upload_done`
        self.is_pinned = device.type == "cuda"
        self.staging = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        self.upload_done = torch.cuda.Event() if self.is_pinned else None
        # By rows, scratch slots and masks, which decide the layout
        self.staged_inputs: dict[tuple[int, int, Masks], StagedInputs] = {}
        self.captured: dict[PassShape, CapturedPass] = {}
        self.graph_pool: tuple[int, int] | None = None  # memory pool that all graphs share

    def run(self, inputs: PassInputs) -> Scores:
        """Run FastCache.run, in a fixed shape if the config allows it. The next pass overwrites the
        scores. Raises OutOfMemory."""
        n, n_masked = inputs.mask.shape
        config = self.config
        if n > config.max_rows or n_masked > config.n_scratch:
            return super().run(inputs)
        n_rows = round_up_rows(max(n, config.min_rows))
        shape = make_shape(n_rows, round_up_slots(inputs.start + n), config)
        self.upload(shape, inputs)
        if self.is_replaying and shape in self.captured:
            graph, (x, ranked) = self.captured[shape]
            graph.replay()
        else:
            x, ranked = self.run_shape(shape)
            if self.is_replaying:
                with memory_for(f"the CUDA graph of a pass of {n_rows} rows; use --no-graphs"):
                    self.capture_shape(shape)
        rows = slice(n - inputs.n_last, n)
        logits = self.logits[rows, : config.n_ids]
        if ranked is None:
            return Scores(x[rows], logits)
        return RankedScores(x[rows], logits, self.copy_to_host(ranked[rows]), config.ranking)

    def upload(self, shape: PassShape, inputs: PassInputs) -> None:
        """Copy the inputs of a pass to the buffer on the device. Padding rows have token 0."""
        n = len(inputs.tokens)
        if self.upload_done:
            self.upload_done.synchronize()
        staged = self.stage(shape)
        staged.words.fill(0)
        staged.inputs.tokens[:n] = inputs.tokens.numpy()
        staged.inputs.positions[:n] = inputs.positions.numpy()
        staged.inputs.start[0] = inputs.start
        staged.inputs.last[0] = inputs.n_older - 1
        staged.inputs.mask[:] = shape.masks.pack(inputs, shape.n_rows, shape.n_scratch)
        staged.uploaded.copy_(staged.staged, non_blocking=True)
        if self.upload_done:
            self.upload_done.record()

    def stage(self, shape: PassShape) -> StagedInputs:
        """Return the kept views for a shape."""
        layout = shape.n_rows, shape.n_scratch, shape.masks
        inputs = self.staged_inputs.get(layout)
        if inputs is None:
            staged, uploaded = self.staging[: shape.n_bytes], self.buffer[: shape.n_bytes]
            words = staged[: 8 * shape.n_int64].view(torch.int64).numpy()
            arrays = DeviceInputs(*(view.numpy() for view in shape.view_inputs(staged)))
            inputs = self.staged_inputs[layout] = StagedInputs(words, arrays, staged, uploaded)
        return inputs

    def run_shape(self, shape: PassShape) -> PassResult:
        """Run a pass of this shape on the uploaded inputs. Return its last hidden states
        [n, hidden], and the result of rank_logits, or None if the host reads nothing.

        A graph can capture this method: no tensor's shape depends on a value on the device, and the
        host does not read from the device.
        """
        inputs, slots = shape.view_inputs(self.buffer), self.slots[: shape.n_slots]
        mask = shape.masks.unpack(inputs, slots, shape.n_scratch, self.additive_bits)
        written = inputs.start + self.slots[: shape.n_rows]
        rotary = self.rotary.index_select(0, inputs.positions)
        x = self.transformer(inputs.tokens, rotary, self.kv, written, mask)
        self.head.write_logits(x, self.logits[: shape.n_rows])
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

    def capture(self, shortest: int, is_alone: bool) -> int:
        """Capture the small passes for all lengths of the text from `shortest` on as CUDA graphs,
        and from now on every other pass when it first runs. Return the number of captured graphs.
        Shapes that were captured before are skipped. Captures write to the scratch slots.

        is_alone: no other rank computes with this one. Raises OutOfMemory.
        """
        # Trees seldom fill all of their scratch slots, so not all of them count
        n_rare = max(self.config.n_scratch - SMALL_PASS, 0)
        lengths = range(shortest, max(self.capacity - n_rare, shortest) + 1)
        missing = self.missing_shapes(lengths)
        with memory_for(f"the CUDA graphs of {lengths[-1]} tokens; use --no-graphs"):
            # Every pass runs once before the first capture, because this chooses and loads kernels,
            # which is not allowed in a capture. It also runs the collectives, which a capture only
            # records. So if the capture of a rank fails, no other rank waits for it
            with torch.inference_mode():
                for shape in missing:
                    self.upload_padding(shape)
                    self.run_shape(shape)
            for shape in missing:
                self.upload_padding(shape)  # the buffer holds inputs of another shape
                graph = self.capture_shape(shape)
                if is_alone:  # otherwise ranks would wait for one that has failed
                    graph.replay()  # the first launch uploads the graph to the device
        self.is_replaying = True
        return len(missing)

    def capture_shape(self, shape: PassShape) -> torch.cuda.CUDAGraph:
        """Capture a pass that has run before, and return its graph."""
        run = partial(self.run_shape, shape)
        graph, result = capture_graph(run, self.graph_pool, self.buffer.device)
        self.captured[shape], self.graph_pool = (graph, result), graph.pool()
        return graph

    def missing_shapes(self, lengths: range) -> list[PassShape]:
        """Return the shapes of small passes for these lengths of the sequence that are not captured
        yet.

        The largest come first, so that smaller ones can reuse their memory in the pool.
        """
        config = self.config
        max_rows = round_up_rows(max(config.min_rows, min(config.max_rows, SMALL_PASS)))
        min_slots, max_slots = round_up_slots(lengths[0]), round_up_slots(lengths[-1])
        wanted = []
        for n_slots in range(max_slots, min_slots - 1, -SLOT_STEP):
            for n_rows in reversed(ROW_COUNTS):
                if config.min_rows <= n_rows <= max_rows:
                    wanted.append(make_shape(n_rows, n_slots, config))
        return [shape for shape in wanted if shape not in self.captured]

    def upload_padding(self, shape: PassShape) -> None:
        """Upload a pass of padding rows only."""
        no_rows = torch.empty(0, dtype=torch.int64)
        self.upload(shape, PassInputs(no_rows, no_rows, causal_mask(0), self.length, n_last=0))


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
    run: Callable[[], PassResult], graph_pool: tuple[int, int] | None, device: torch.device
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
