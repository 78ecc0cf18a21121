"""A tensor on the device, and the device's memory.

outer = wrap(torch.ones(3))   # cuda:0, or under torchrun that of the rank
outer.inner                   # the CPU tensor with its values
"""

import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .timeline import project_line, timeline

if TYPE_CHECKING:
    from .graphs import CUDAGraph

CAPACITY = 80 * 10**9  # bytes
POISON = 0x5A5A5A5A  # an index far out of range
LISTS = (list, tuple)  # what arguments and results come in


@cache
def own_device() -> torch.device:
    """The only one that this process may use: under torchrun each has one of its own."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class CudaTensor(torch.Tensor):
    """A tensor on the device; `inner` is the CPU tensor that holds its values."""

    inner: Tensor
    owner: "CudaTensor | None"  # whose memory this is a view of; None if it has its own
    graph: "CUDAGraph | None"  # of an owner: the capture that it is a result of

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CudaTensor":
        if inner.is_inference() != torch.is_inference_mode_enabled():
            # A view of a tensor that was made in the other mode is of that mode, too
            with torch.inference_mode(inner.is_inference()):
                return CudaTensor(inner)
        outer = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=own_device(),
        )
        outer.inner = inner
        return outer

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        raise AssertionError(f"{func} at {project_line()} went past the pretended device")

    def tolist(self) -> list:
        timeline.wait(".tolist()")
        return self.inner.tolist()

    def __repr__(self, **_: object) -> str:
        return f"cuda({self.inner!r})"


class Memory:
    """Of the device, in bytes."""

    def __init__(self) -> None:
        self.capacity = CAPACITY  # a test may make the device smaller
        self.allocated = 0
        self.peak = 0
        self.pools: dict[tuple[int, int], int] = {}  # what graphs keep for their results, by pool
        self.owners: dict[int, weakref.ref[CudaTensor]] = {}  # by storage

    @property
    def reserved(self) -> int:
        """With what only graphs may use."""
        return self.allocated + sum(self.pools.values())

    def take(self, outer: CudaTensor) -> None:
        """A tensor with memory of its own: until it is freed. Raises torch.OutOfMemoryError."""
        storage = outer.inner.untyped_storage()
        size = storage.nbytes()
        capture = timeline.capture
        of_others = self.reserved
        if capture:
            of_others -= self.pools.get(capture.id, 0)
        if of_others + size > self.capacity:
            if capture:
                capture.is_spoiled = True
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes at {project_line()}"
            )
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        if capture:
            capture.peak = max(capture.peak, self.allocated)
        self.owners[storage._cdata] = weakref.ref(outer)
        weakref.finalize(outer, self.give_back, storage._cdata, size).atexit = False

    def give_back(self, storage: int, size: int) -> None:
        self.allocated -= size
        del self.owners[storage]


memory = Memory()


def wrap(inner: object) -> object:
    """A result as a tensor of the device, which takes memory unless it is a view."""
    if not isinstance(inner, Tensor):
        return inner
    outer = CudaTensor(inner)
    known = memory.owners.get(inner.untyped_storage()._cdata)
    if known:
        outer.owner = known()
    else:
        memory.take(outer)
        outer.owner = None
        outer.graph = timeline.capture
        if timeline.capture:
            timeline.capture.own(outer)
    return outer


def owner_of(outer: CudaTensor) -> CudaTensor:
    """The tensor whose memory it views, or itself."""
    return outer if outer.owner is None else outer.owner


def unwrap(value: object) -> object:
    """An argument as the host's operation takes it."""
    if isinstance(value, CudaTensor):
        return value.inner
    if isinstance(value, torch.device) and is_cuda(value):
        return torch.device("cpu")
    return value


def is_cuda(device: torch.device | str | int | None) -> bool:
    """Meta, too: the guard that stands in for CUDA's gives devices its own name."""
    return device is not None and torch.device(device).type in ("cuda", "meta")


def poison(tensor: Tensor) -> None:
    """Fill with what nobody should read."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype in (torch.int32, torch.int64):
        tensor.fill_(POISON)
    else:
        tensor.fill_(1)


def mapped(change: Callable[[object], object], value: object) -> object:
    """An argument changed, or of a list or of named arguments each."""
    if isinstance(value, dict):
        return {name: mapped(change, element) for name, element in value.items()}
    if isinstance(value, LISTS):
        changed = [mapped(change, element) for element in value]
        return tuple(changed) if isinstance(value, tuple) else changed
    return change(value)


def tensors_in(values: object) -> list[Tensor]:
    """The tensors among arguments, and in lists of them."""
    found = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (*LISTS, dict)):
            found += tensors_in(value)
    return found
