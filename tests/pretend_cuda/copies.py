"""Copies between host and device, and the host's pinned memory.

A copy from or to pinned memory that is not waited for is made later. Until the host has waited, it
must leave memory alone that is copied from, and what it reads of memory that is copied to is not
yet there.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .runtime import require_own
from .tensors import CudaTensor, mapped, poison, unwrap, wrap
from .timeline import project_line, timeline

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}  # the only two that may cross
PINNED: dict[int, StorageWeakRef] = {}  # the pinned memory there is, by storage


def is_pinned(tensor: Tensor) -> bool:
    storage = PINNED.get(tensor.untyped_storage()._cdata)
    return storage is not None and not storage.expired()


def on_host(func: Callable, args: tuple, kwargs: dict) -> object:
    """An operation of the host alone, which here may ask for pinned memory."""
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    require_own()  # the current device's context pins it
    tensor = func(*args, **kwargs | {"pin_memory": False})
    storage = StorageWeakRef(tensor.untyped_storage())
    PINNED[storage.cdata] = storage
    return tensor


class OpenTransfer:
    """A copy of pinned memory that the host has not waited for."""

    def __init__(self, host: Tensor, arriving: Tensor | None, moment: int):
        """arriving: what the copy brings to the host; None if it reads there."""
        self.host = host  # kept until then, as torch's own allocator does
        self.content = host.clone()
        self.arriving = arriving
        self.moment = moment
        self.line = project_line()

    def settle(self) -> None:
        """The copy is made: raise if the host has written meanwhile."""
        if not torch.equal(as_bytes(self.host), as_bytes(self.content)):
            raise RuntimeError(
                f"pinned memory was written to before the copy at {self.line} was waited for"
            )
        if self.arriving is not None:
            self.host.copy_(self.arriving)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def copy(func: Callable, args: tuple, kwargs: dict) -> object:
    """copy_ or _to_copy between host and device."""
    timeline.forbid_capture("copy between host and device")
    if func is aten._to_copy.default:
        if isinstance(args[0], CudaTensor):
            return wait_down(func(args[0].inner, **mapped(unwrap, kwargs)))
        note_copy_up(args[0], kwargs.get("dtype"), not kwargs.get("non_blocking"))
        return wrap(func(args[0], **mapped(unwrap, kwargs)))
    destination, source = args[:2]
    is_waiting = args[2:] != (True,) and not kwargs.get("non_blocking")
    if isinstance(source, CudaTensor):
        if is_waiting or not is_pinned(destination):
            return destination.copy_(wait_down(source.inner))
        value = torch.empty_like(destination).copy_(source.inner)
        poison(destination)
        moment = timeline.submit("d2h", "pinned")
        timeline.open.append(OpenTransfer(destination, value, moment))
        return destination
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


def wait_down(value: Tensor) -> Tensor:
    """What comes to the host, at once."""
    timeline.submit("d2h")
    timeline.wait("copy to host")
    return value
