"""Copies between host and device, and the host's pinned memory.

A copy from or to pinned memory that is not waited for is made later. Until the host has waited, it
must leave memory alone that is copied from, and what it reads of memory that is copied to is not
yet there. Such memory may be freed: torch's own allocator then keeps it until the copy is made.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .runtime import require_own
from .tensors import CudaTensor, poison, unwrapped, wrap
from .timeline import project_line, timeline

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}  # the only two that may cross
PINNED: dict[int, StorageWeakRef] = {}  # the pinned memory there is, by storage


def pin(tensor: Tensor) -> Tensor:
    """Declare the memory of a host tensor pinned, which the current device's context does."""
    require_own(None)
    storage = StorageWeakRef(tensor.untyped_storage())
    PINNED[storage.cdata] = storage
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    storage = PINNED.get(tensor.untyped_storage()._cdata)
    return storage is not None and not storage.expired()


def on_host(func: Callable, args: tuple, kwargs: dict) -> object:
    """An operation of the host alone, which here may ask for pinned memory."""
    if func is aten.is_pinned.default:
        return is_pinned(args[0])
    if func in (aten._pin_memory.default, aten.pin_memory.default):
        return args[0] if is_pinned(args[0]) else pin(args[0].clone())
    if kwargs.get("pin_memory"):
        return pin(func(*args, **kwargs | {"pin_memory": False}))
    return func(*args, **kwargs)


class OpenTransfer:
    """A copy of pinned memory that the host has not waited for."""

    def __init__(self, host: Tensor, arriving: Tensor | None, moment: int):
        """arriving: what the copy brings to the host; None if it reads there."""
        self.storage = StorageWeakRef(host.untyped_storage())
        self.dtype = host.dtype
        self.view = (host.storage_offset(), host.size(), host.stride())
        self.content = host.clone()
        self.arriving = arriving
        self.moment = moment
        self.line = project_line()

    def settle(self) -> None:
        """The copy is made: raise if the host has written meanwhile."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return
        host = torch.empty(0, dtype=self.dtype).set_(storage, *self.view)
        if not torch.equal(as_bytes(host), as_bytes(self.content)):
            raise RuntimeError(
                f"pinned memory was written to before the copy at {self.line} was waited for"
            )
        if self.arriving is not None:
            host.copy_(self.arriving)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def copy(func: Callable, args: tuple, kwargs: dict) -> object:
    """copy_ or _to_copy between host and device."""
    if timeline.capture is not None:
        raise RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
            f"tensor is pinned, at {project_line()}"
        )
    if func is aten._to_copy.default:
        is_waiting = not kwargs.get("non_blocking")
        if isinstance(args[0], CudaTensor):
            return copy_down(func(args[0].inner, **unwrapped(kwargs)), is_waiting, None)
        note_copy_up(args[0], kwargs.get("dtype"), is_waiting)
        return wrap(func(args[0], **unwrapped(kwargs)))
    destination, source = args[:2]
    is_waiting = args[2:] != (True,) and not kwargs.get("non_blocking")
    if isinstance(source, CudaTensor):
        value = torch.empty_like(destination).copy_(source.inner)
        return copy_down(value, is_waiting, destination)
    note_copy_up(source, destination.dtype, is_waiting)
    destination.inner.copy_(source)
    return destination


def note_copy_up(source: Tensor, dtype: torch.dtype | None, is_waiting: bool) -> None:
    """Count a copy to the device, and remember it if it is made later."""
    if is_waiting:
        timeline.submit("h2d", "waits")
        timeline.wait("copy to device")
    elif is_pinned(source) and source.is_contiguous() and dtype in (None, source.dtype):
        moment = timeline.submit("h2d", "pinned")
        timeline.open.append(OpenTransfer(source, None, moment))
    else:  # the host prepares what is copied, and the driver takes it from there
        timeline.submit("h2d", "staged")


def copy_down(value: Tensor, is_waiting: bool, destination: Tensor | None) -> Tensor:
    """Bring a value to host memory; to new memory, pinned unless it is waited for, if None."""
    if is_waiting or not (destination is None or is_pinned(destination)):
        timeline.submit("d2h")
        timeline.wait("copy to host")
        return value if destination is None else destination.copy_(value)
    if destination is None:
        destination = pin(torch.empty_like(value))
    moment = timeline.submit("d2h", "pinned")
    poison(destination)
    timeline.open.append(OpenTransfer(destination, value, moment))
    return destination
