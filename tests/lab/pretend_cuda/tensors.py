"""Tensors on the pretended device.

outer = wrap(torch.ones(3))   # on cuda:0
outer.inner                   # the CPU tensor with its values
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .timeline import timeline

if TYPE_CHECKING:
    from .graphs import CUDAGraph
    from .streams import Stream

POISON = 0x5A5A5A5A  # as an index far out of range
LISTS = (list, tuple)  # the containers of arguments and results


class CudaTensor(torch.Tensor):
    """A tensor on the device; `inner` is the CPU tensor that holds its values."""

    inner: Tensor
    owner: "CudaTensor | None"  # the tensor that this is a view of; None if it is no view
    # If it is no view: the capture that made it, and the last operation of each stream that read it
    # and that wrote to it
    graph: "CUDAGraph | None"
    readers: "dict[Stream, int]"
    writers: "dict[Stream, int]"

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CudaTensor":
        if inner.is_inference() != torch.is_inference_mode_enabled():
            # A view of a tensor must be made in the tensor's own mode
            with torch.inference_mode(inner.is_inference()):
                return CudaTensor(inner)
        outer = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cuda:0",
        )
        outer.inner = inner
        return outer

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        raise AssertionError(f"{func} went past the pretended device")

    def tolist(self) -> list:
        timeline.wait(".tolist()")
        return self.inner.tolist()

    def __repr__(self, **_: object) -> str:
        return f"cuda({self.inner!r})"


OWNERS: dict[int, weakref.ref[CudaTensor]] = {}  # the tensor that made each storage


def wrap(inner: object) -> object:
    """Return a result as a tensor of the device."""
    if not isinstance(inner, Tensor):
        return inner
    outer = CudaTensor(inner)
    storage = inner.untyped_storage()._cdata
    known = OWNERS.get(storage)
    if known:
        outer.owner = known()
    else:
        OWNERS[storage] = weakref.ref(outer)
        weakref.finalize(outer, OWNERS.pop, storage).atexit = False
        outer.owner, outer.readers, outer.writers = None, {}, {}
        outer.graph = timeline.capture
        if timeline.capture:
            timeline.capture.add_result(outer)
    return outer


def owner_of(outer: CudaTensor) -> CudaTensor:
    """Return the tensor that this is a view of, or itself."""
    return outer if outer.owner is None else outer.owner


def unwrap(value: object) -> object:
    """Return an argument for the host's operation: a tensor's inner one, cpu for cuda."""
    if isinstance(value, CudaTensor):
        return value.inner
    if isinstance(value, torch.device) and is_cuda(value):
        return torch.device("cpu")
    return value


def is_cuda(device: torch.device | str | int | None) -> bool:
    """Whether a device is cuda. "meta" counts, because the guard that stands in for CUDA's is the
    meta device's."""
    return device is not None and torch.device(device).type in ("cuda", "meta")


def poison(tensor: Tensor) -> None:
    """Fill a tensor with values that are wrong wherever they are read."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype in (torch.int32, torch.int64):
        tensor.fill_(POISON)
    else:
        tensor.fill_(1)


def map_nested(change: Callable[[object], object], value: object) -> object:
    """Return a value changed by a function, which is applied inside lists, tuples and dicts."""
    if isinstance(value, dict):
        return {name: map_nested(change, element) for name, element in value.items()}
    if isinstance(value, LISTS):
        changed = [map_nested(change, element) for element in value]
        return tuple(changed) if isinstance(value, tuple) else changed
    return change(value)


def tensors_in(values: object) -> list[Tensor]:
    """Return the tensors among arguments, including those in nested lists and dicts."""
    found = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (*LISTS, dict)):
            found += tensors_in(value)
    return found
