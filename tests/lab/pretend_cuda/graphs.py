"""CUDA graphs: captures, which record operations, and replays, which run them.

A capture computes nothing. It records the operations that write to a tensor or make one, and the
tensors that were made hold poison afterwards. A replay runs the operations on the same memory, with
Python values as they were at the capture.

Results are in the memory of a pool, where graphs that were captured earlier may write, too. The
program must keep all other memory that a graph uses. If some was freed, a replay raises. After a
broken capture, torch believes that it still records to the capture's pool, and captures nothing
more into it.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .tensors import CudaTensor, map_nested, owner_of, poison, tensors_in, unwrap
from .timeline import timeline

POOLS: dict[tuple[int, int], list["CUDAGraph"]] = {}  # each pool's graphs, in order of capture
BROKEN: set[tuple[int, int]] = set()  # pools of broken captures


class CUDAGraph:
    """A graph, captured by torch's own context manager `with torch.cuda.graph(graph):`."""

    def __init__(self) -> None:
        self.operations: list[tuple[Callable, tuple, dict, Sequence[Tensor]]] = []
        self.made: list[Tensor] = []  # during the capture, the memory of all results
        self.results: list[weakref.ref[CudaTensor]] = []  # those that are still referenced
        self.watched: dict[int, weakref.ref[CudaTensor]] = {}  # owners of memory not of the pool
        self.stale_use = ""  # the operation whose memory was freed after the capture
        self.is_spoiled = False
        self.is_done = False

    def capture_begin(self, pool: tuple[int, int] | None = None, **_: object) -> None:
        self.id = pool or (0, id(self))
        if self.id in BROKEN:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        timeline.capture = self

    def add_result(self, outer: CudaTensor) -> None:
        """Add a result. It holds zeros during the capture, so that an index is valid."""
        outer.inner.zero_()
        self.made.append(outer.inner)
        self.results.append(weakref.ref(outer))

    def record(
        self, func: Callable, args: tuple, kwargs: dict, results: Sequence[Tensor] = ()
    ) -> None:
        """Record an operation. results: the memory of the tensors that it makes."""
        for tensor in tensors_in([args, kwargs]):
            if isinstance(tensor, CudaTensor):
                self.watch(owner_of(tensor), func)
        self.operations.append(
            (func, map_nested(freeze, args), map_nested(freeze, kwargs), results)
        )

    def watch(self, owner: CudaTensor, func: Callable) -> None:
        """Call `invalidate` when memory that a replay would use is freed."""
        if owner.graph is not self and id(owner) not in self.watched:
            self.watched[id(owner)] = weakref.ref(owner, partial(self.invalidate, str(func)))

    def invalidate(self, user: str, _: object) -> None:
        self.stale_use = user
        self.operations.clear()

    def capture_end(self) -> None:
        timeline.capture = None
        if self.is_spoiled:
            BROKEN.add(self.id)
            raise torch.AcceleratorError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        POOLS.setdefault(self.id, []).append(self)
        for inner in self.made:
            poison(inner)
        self.made.clear()
        self.results = [result for result in self.results if result() is not None]
        self.is_done = True

    def replay(self) -> None:
        if timeline.capture is not None or not self.is_done:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if self.stale_use:
            raise RuntimeError(f"a replay uses memory that was freed since: {self.stale_use}")
        timeline.submit()
        with _disable_current_modes(), torch.inference_mode():
            for func, args, kwargs, results in self.operations:
                made = func(*args, **kwargs)
                news = tensors_in([made]) if results else []
                for result, new in zip(results, news, strict=True):
                    result.copy_(new)
            graphs = POOLS[self.id]
            for graph in graphs[graphs.index(self) + 1 :]:  # their results may use the same memory
                for result in graph.results:
                    if result() is not None:
                        poison(result().inner)

    def pool(self) -> tuple[int, int]:
        return self.id

    def reset(self) -> None:
        """Destroy the graph."""
        self.operations.clear()
        self.is_done = False


def freeze(value: object) -> object:
    """Return an argument as it is recorded: of a host tensor, which is a scalar, a copy."""
    if isinstance(value, Tensor) and not isinstance(value, CudaTensor):
        return value.clone()
    return unwrap(value)
