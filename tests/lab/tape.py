"""A stand-in for CUDA graphs: records the operators of a function, and replays them on its memory.

As in a CUDA graph, a replay runs the same operators on the same tensors. Python's own values stay
as they were at the capture. As in a capture, an operator that reads a value, or makes a tensor of
host numbers, raises RuntimeError while it is recorded.

    tape, result = record(run)
    tape.replay()  # computes the result again, without calling `run`
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dynatree_lab.engine.cuda_graphs import PassResult

REFUSED = {"item", "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal"}
REFUSED |= {"scalar_tensor", "lift_fresh", "exponential_"}


class Tape(TorchDispatchMode):
    """The recorded operators of one function, each with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, object]] = []

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        name = func._schema.name.removeprefix("aten::")
        if name in REFUSED:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, found))
        return found

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, recorded in self.calls:
            found = func(*args, **kwargs)
            for old, new in zip(tensors(recorded), tensors(found), strict=True):
                if old.data_ptr() != new.data_ptr():  # equal for a view, or if computed in place
                    old.copy_(new)

    def pool(self) -> None:
        """Return None, because a tape has no memory pool."""


def tensors(found: object) -> list[Tensor]:
    """Return the tensors among an operator's results."""
    results = found if isinstance(found, tuple | list) else [found]
    return [each for each in results if isinstance(each, Tensor)]


def record(run: Callable[[], PassResult], *_: object) -> tuple[Tape, PassResult]:
    """Run and record a function. Replaces dynatree_lab.engine.cuda_graphs.capture_graph."""
    tape = Tape()
    with torch.inference_mode(), tape:
        result = run()
    return tape, result
