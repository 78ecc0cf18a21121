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

from .runtime import DEFAULT_STREAM, current_stream
from .tensors import CudaTensor, mapped, memory, owner_of, poison, tensors_in, unwrap
from .timeline import project_line, timeline

POOLS: dict[tuple[int, int], list["CUDAGraph"]] = {}  # the graphs of each, in order of capture


class Seeds:
    """The tensors with the random generator's state that capture_begin fills.

    Up to torch 2.10 the first capture made those of all others, and if it did in inference mode, no
    other could fill them outside (pytorch issue 166792).
    """

    are_kept = False  # from capture to capture; a test may switch it on
    are_inference: bool | None = None  # once they are made

    @classmethod
    def fill(cls) -> None:
        is_inference = torch.is_inference_mode_enabled()
        if cls.are_inference is None or not cls.are_kept:
            cls.are_inference = is_inference
        if cls.are_inference and not is_inference:
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode")


class CUDAGraph:
    """One graph, captured by `with torch.cuda.graph(graph):`, which stays torch's own."""

    def __init__(self, keep_graph: bool = False):
        self.operations: list[tuple[Callable, tuple, dict, Sequence[Tensor]]] = []
        self.nodes: Counter[str] = Counter()  # kernels by name
        self.made: list[Tensor] = []  # while it is captured, the memory of all results
        self.results: list[weakref.ref[CudaTensor]] = []  # those that somebody may still read
        self.watched: dict[int, weakref.ref[CudaTensor]] = {}  # owners of memory from outside
        self.lost = ""  # what used memory that was freed since
        self.peak = 0
        self.is_spoiled = False
        self.is_done = False

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        if timeline.capture is not None or current_stream() is DEFAULT_STREAM:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream, one by one")
        Seeds.fill()
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
        for tensor in tensors_in([args, list(kwargs.values())]):
            if isinstance(tensor, CudaTensor):
                self.watch(owner_of(tensor), func)
        kept_kwargs = {name: mapped(kept, value) for name, value in kwargs.items()}
        self.operations.append((func, mapped(kept, args), kept_kwargs, results))

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
                if results:
                    for result, new in zip(results, tensors_in([made]), strict=True):
                        result.copy_(new)
            self.overwrite_later_results()

    def overwrite_later_results(self) -> None:
        """A graph that was captured later may have put its results where this one works."""
        graphs = POOLS[self.id]
        for graph in graphs[graphs.index(self) + 1 :]:
            for result in graph.results:
                outer = result()
                if outer is not None:
                    poison(outer.inner)

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
