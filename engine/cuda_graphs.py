"""Passes of a few fixed shapes over one cache, captured as CUDA graphs and replayed.

A forward of one token launches some hundreds of kernels, and on a fast GPU launching them takes
longer than running them. A graph launches all at once, but always the same kernels on the same
memory. So a pass is padded to one of a few numbers of rows and of cache slots, and whatever else
differs between passes is content of buffers that never move: tokens, positions, the mask, where to
write. The loop knows nothing of this. Without a capture the same code runs eagerly, which is also
how it is tested where there is no GPU.

    passes = FixedPasses(run, n_rows=64, n_slots=1024, vocab_size=50304, device=device)
    passes.capture(shortest=200, longest=900, scratch=200)
    logits = passes.forward(tokens, positions, mask, start)

Shapes: n rows of a pass, S slots it may see, V vocabulary.
"""

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
SLOT_STEP = 256
# Every graph: destroying one frees a cuBLAS workspace that the others on its stream go on using
# (pytorch issue 193402), so none ever is
KEPT: list[torch.cuda.CUDAGraph] = []

# run(tokens [n], positions [n], mask [n, S] bool, start [1], logits [n, V]): write the rows to the
# slots from start on and their logits to the last argument, and read nothing back
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def row_count(n: int) -> int:
    """The rows that a pass of n is padded to."""
    return next(count for count in ROW_COUNTS if count >= n)


def slot_count(n: int) -> int:
    """The slots that a pass over n is padded to."""
    return -(-n // SLOT_STEP) * SLOT_STEP


class FixedPasses:
    """The passes of at most n_rows rows over one cache of n_slots slots."""

    def __init__(self, run: Run, n_rows: int, n_slots: int, vocab_size: int, device: torch.device):
        if device.type == "cuda":
            # cuDNN's attention is reported to refuse one row, so that ar would round otherwise than
            # a tree, and to plan anew for every length of a prompt (not measured here)
            torch.backends.cuda.enable_cudnn_sdp(False)
        n = row_count(n_rows)
        self.run, self.n_rows = run, n
        # What a pass does not fill keeps older content: real ids, positions and slots all the same
        self.tokens, self.positions = torch.zeros(2, n, dtype=torch.int64, device=device)
        self.start = torch.zeros(1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(n, n_slots, dtype=torch.bool, device=device)
        self.mask[:, 0] = True  # a row added, too, needs something to see
        self.causal = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        self.logits = torch.empty(n, vocab_size, device=device)
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}  # by rows and slots
        self.pool: tuple[int, int] | None = None  # the memory that all of them share
        self.is_replaying = False

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, start: int, min_rows: int = 1
    ) -> Tensor:
        """GPTNeoX.forward in a fixed shape; logits [n, V] that the next pass overwrites."""
        n, end = len(tokens), start + len(tokens) if mask is None else mask.shape[1]
        n_rows, n_slots = row_count(max(n, min_rows)), slot_count(end)
        self.tokens[:n].copy_(tokens, non_blocking=True)  # from the host, without waiting
        self.positions[:n].copy_(positions, non_blocking=True)
        self.start.fill_(start)
        if mask is None:
            self.mask[:n, :start].fill_(True)
            self.mask[:n, start:end].copy_(self.causal[:n, :n])
        else:
            self.mask[:n, :end].copy_(mask, non_blocking=True)
        self.mask[:n, end:n_slots].fill_(False)
        if self.is_replaying:
            self.replays[n_rows, n_slots]()
        else:
            self._run(n_rows, n_slots)
        return self.logits[:n]

    def capture(self, shortest: int, longest: int, scratch: int, min_rows: int = 1) -> int:
        """Capture what is not yet: all passes over shortest to longest slots. Returns how many.

        scratch: the first slot that may be written to meanwhile. Largest first, so that the smaller
        ones find room in the memory of the larger.
        """
        n_before, was_collecting = len(self.replays), gc.isenabled()
        self.start.fill_(scratch)
        gc.disable()  # a tensor or graph that it frees on the way would spoil the capture
        try:
            for n_slots in range(slot_count(longest), slot_count(shortest) - 1, -SLOT_STEP):
                for n_rows in reversed(ROW_COUNTS):
                    if row_count(min_rows) <= n_rows <= self.n_rows:
                        self._capture(n_rows, n_slots)
        finally:
            if was_collecting:
                gc.enable()
        self.is_replaying = True
        return len(self.replays) - n_before

    def _capture(self, n_rows: int, n_slots: int) -> None:
        if (n_rows, n_slots) not in self.replays:
            run = partial(self._run, n_rows, n_slots)
            replay, self.pool = record(run, self.pool, self.start.device)
            self.replays[n_rows, n_slots] = replay

    def _run(self, n_rows: int, n_slots: int) -> None:
        rows = self.tokens[:n_rows], self.positions[:n_rows], self.mask[:n_rows, :n_slots]
        self.run(*rows, self.start, self.logits[:n_rows])


def record(
    run: Callable[[], None], pool: tuple[int, int] | None, device: torch.device
) -> tuple[Callable[[], None], tuple[int, int]]:
    """Capture a function: its replay, and the memory pool it uses."""
    with torch.cuda.device(device):
        run()  # warm up: kernels are chosen and loaded, which no capture may do
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
    KEPT.append(graph)
    return graph.replay, graph.pool()
