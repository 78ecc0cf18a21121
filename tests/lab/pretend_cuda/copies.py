"""Copies between host and device, and the host's pinned memory.

A non-blocking copy from or to pinned memory is pending until the host waits for it. Until then the
host must not write to memory that is copied from, and memory that is copied to holds poison.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .streams import record_use
from .tensors import CudaTensor, map_nested, poison, unwrap, wrap
from .timeline import timeline

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}  # the operators that copy between devices
PINNED: dict[int, StorageWeakRef] = {}  # all pinned memory, by the address of its storage


def is_pinned(tensor: Tensor) -> bool:
    storage = PINNED.get(tensor.untyped_storage()._cdata)
    return storage is not None and not storage.expired()


def run_on_host(func: Callable, args: tuple, kwargs: dict) -> object:
    """Run an operation on the host. Its result may be in pinned memory."""
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    tensor = func(*args, **kwargs | {"pin_memory": False})
    storage = StorageWeakRef(tensor.untyped_storage())
    PINNED[storage.cdata] = storage
    return tensor


class PendingTransfer:
    """A copy from or to pinned memory that the host has not waited for."""

    def __init__(self, host: Tensor, arriving: Tensor | None, moment: int):
        """arriving: the values that are copied to the host; None for a copy to the device."""
        self.host = host  # not freed while the copy is pending, as in torch's own allocator
        self.content = host.clone()
        self.arriving = arriving
        self.moment = moment

    def settle(self) -> None:
        """Complete the copy. Raises RuntimeError if the host has written to its memory."""
        if not torch.equal(as_bytes(self.host), as_bytes(self.content)):
            raise RuntimeError("pinned memory was written to before its copy was waited for")
        if self.arriving is not None:
            self.host.copy_(self.arriving)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def copy(func: Callable, args: tuple, kwargs: dict) -> object:
    """Run copy_ or _to_copy between host and device."""
    timeline.forbid_capture("copy between host and device")
    if func is aten._to_copy.default:
        if isinstance(args[0], CudaTensor):
            record_use([args[0]], [])
            return download(func(args[0].inner, **map_nested(unwrap, kwargs)))
        record_upload(args[0], kwargs.get("dtype"), not kwargs.get("non_blocking"))
        return wrap(func(args[0], **map_nested(unwrap, kwargs)))
    destination, source = args[:2]
    is_waiting = args[2:] != (True,) and not kwargs.get("non_blocking")
    if isinstance(source, CudaTensor):
        record_use([source], [])
        if is_waiting or not is_pinned(destination):
            return destination.copy_(download(source.inner))
        value = torch.empty_like(destination).copy_(source.inner)
        poison(destination)
        moment = timeline.submit()
        timeline.open.append(PendingTransfer(destination, value, moment))
        return destination
    record_use([], [destination])
    record_upload(source, destination.dtype, is_waiting)
    destination.inner.copy_(source)
    return destination


def record_upload(source: Tensor, dtype: torch.dtype | None, is_waiting: bool) -> None:
    """Wait for a copy to the device, or record it if it is pending."""
    moment = timeline.submit()
    if is_waiting:
        timeline.wait("copy to device")
    elif is_pinned(source) and source.is_contiguous() and dtype in (None, source.dtype):
        timeline.open.append(PendingTransfer(source, None, moment))
    # else the values go through another buffer, so the host may write to its memory at once


def download(value: Tensor) -> Tensor:
    """Wait for a blocking copy of this value to the host, and return it."""
    timeline.submit()
    timeline.wait("copy to host")
    return value
