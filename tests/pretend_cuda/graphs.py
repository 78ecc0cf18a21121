"""CUDA graphs: what a capture records, and what a replay does with it.

A capture carries out nothing: what writes to a tensor is recorded, and so is what makes one, which
is poison afterwards. A replay runs what was recorded on the same memory, so a Python value stays
what it was then. Results lie in the memory of the pool, where a graph that was captured earlier may
write too. All other memory is the program's to keep; a graph that has lost some of it can only
raise.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .tensors import CudaTensor, mapped, memory, owner_of, poison, tensors_in, unwrap
from .timeline import project_line, timeline

POOLS: dict[tuple[int, int], list["CUDAGraph"]] = {}  # the graphs of each, in order of capture


class CUDAGraph:
    """One graph, captured by `with torch.cuda.graph(graph):`, which stays torch's own."""

    def __init__(self) -> None:
        self.operations: list[tuple[Callable, tuple, dict, Sequence[Tensor]]] = []
        self.nodes: Counter[str] = Counter()  # kernels by name
        self.made: list[Tensor] = []  # while it is captured, the memory of all results
        self.results: list[weakref.ref[CudaTensor]] = []  # those that somebody may still read
        self.watched: dict[int, weakref.ref[CudaTensor]] = {}  # owners of memory from outside
        self.lost = ""  # what used memory that was freed since
        self.peak = 0
        self.is_spoiled = False
        self.is_done = False

    def capture_begin(self, pool: tuple[int, int] | None = None, **_: object) -> None:
        self.id = pool or (0, id(self))
        self.bytes_before = self.peak = memory.allocated
        timeline.count("capture")
        timeline.capture = self

    def own(self, outer: CudaTensor) -> None:
        """A result; zeros while the capture lasts, so that an index is a valid one."""
        outer.inner.zero_()
        self.made.append(outer.inner)
        self.results.append(weakref.ref(outer))

    def record(
        self, func: Callable, args: tuple, kwargs: dict, results: Sequence[Tensor] = ()
    ) -> None:
        """results: the memory of what it makes, if it makes anything."""
        for tensor in tensors_in([args, kwargs]):
            if isinstance(tensor, CudaTensor):
                self.watch(owner_of(tensor), func)
        self.operations.append((func, mapped(kept, args), mapped(kept, kwargs), results))

    def watch(self, owner: CudaTensor, func: Callable) -> None:
        """Notice when memory is freed that a replay would use."""
        if owner.graph is not self and id(owner) not in self.watched:
            user = f"{func} at {project_line()}"
            self.watched[id(owner)] = weakref.ref(owner, partial(self.lose, user))

    def lose(self, user: str, _: object) -> None:
        self.lost = user
        self.operations.clear()

    def capture_end(self) -> None:
        timeline.capture = None
        if self.is_spoiled:
            raise torch.AcceleratorError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        needed = self.peak - self.bytes_before
        memory.pools[self.id] = max(needed, memory.pools.get(self.id, 0))
        POOLS.setdefault(self.id, []).append(self)
        for inner in self.made:
            poison(inner)
        self.made.clear()
        self.results = [result for result in self.results if result() is not None]
        self.is_done = True

    def replay(self) -> None:
        if timeline.capture is not None or not self.is_done:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if self.lost:
            raise RuntimeError(f"a replay uses memory that was freed since: {self.lost}")
        timeline.submit("replay")
        timeline.count("replayed", n=self.nodes.total())
        with _disable_current_modes(), torch.inference_mode():
            for func, args, kwargs, results in self.operations:
                made = func(*args, **kwargs)
                news = tensors_in([made]) if results else []
                for result, new in zip(results, news, strict=True):
                    result.copy_(new)
            graphs = POOLS[self.id]
            for graph in graphs[graphs.index(self) + 1 :]:  # whose results may lie where this works
                for result in graph.results:
                    if result() is not None:
                        poison(result().inner)

    def pool(self) -> tuple[int, int]:
        return self.id

    def reset(self) -> None:
        """Destroy it."""
        self.operations.clear()
        self.is_done = False


def kept(value: object) -> object:
    """An argument as it is recorded: a host tensor, a scalar then, with the value it has now."""
    if isinstance(value, Tensor) and not isinstance(value, CudaTensor):
        return value.clone()
    return unwrap(value)
