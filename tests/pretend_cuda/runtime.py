"""Stand-ins for torch.cuda's functions, streams and events, under their own names."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .tensors import memory, own_device
from .timeline import project_line, timeline

NAME = "NVIDIA Pretended H100"
CAPABILITY = (9, 0)


class Event:
    """A moment of the device, completed when the host waits for it or for a later one."""

    def __init__(self, enable_timing: bool = False):
        self.moment = 0
        self.seconds = 0.0

    def record(self) -> None:
        self.moment = timeline.submit("event")
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        timeline.forbid_capture("Event.synchronize")
        if self.moment > timeline.done:
            timeline.wait("Event.synchronize", self.moment)

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to another. Raises RuntimeError unless both are
        completed."""
        if max(self.moment, end.moment) > timeline.done:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.seconds - self.seconds) * 1e3


class Stream:
    """A stream. The operations of all streams run in the order of their submission."""

    current: "Stream"

    def synchronize(self) -> None:
        timeline.wait("Stream.synchronize")


DEFAULT_STREAM = Stream()
Stream.current = DEFAULT_STREAM


class StreamContext:
    """torch.cuda.stream: makes another stream the current one inside a `with` block."""

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        self.before = Stream.current
        Stream.current = self.stream or Stream.current

    def __exit__(self, *error: object) -> None:
        Stream.current = self.before


CURRENT = {"device": 0}  # the index that "cuda" means


@contextmanager
def use_device(device: torch.device | str) -> Iterator[None]:
    """Make another device the current one inside a `with` block (torch.cuda.device)."""
    before = CURRENT["device"]
    set_device(device)
    try:
        yield
    finally:
        CURRENT["device"] = before


def set_device(device: torch.device | str) -> None:
    CURRENT["device"] = index_of(device)


def index_of(device: torch.device | str) -> int:
    """Return a device's index, or the current device's if there is none or -1. The device guard,
    which stands in for CUDA's, gives the index -1."""
    index = torch.device(device).index
    return CURRENT["device"] if index in (None, -1) else index


def require_own(device: torch.device | str = "cuda") -> None:
    """Raise AssertionError if a device is another rank's."""
    index = index_of(device)
    if index != own_device().index:
        raise AssertionError(f"cuda:{index} is another rank's device, at {project_line()}")


class Generator(torch._C.Generator):
    """A generator on the host, whatever its device."""

    def __new__(cls, device: torch.device | str = "cpu") -> "Generator":
        return super().__new__(cls)


def device_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def mem_get_info(device: torch.device | str = "cuda") -> tuple[int, int]:
    require_own(device)
    return memory.capacity - memory.reserved, memory.capacity


def memory_snapshot() -> list[dict]:
    """Return one segment for each pool, which is used completely."""
    sizes = {(0, 0): memory.allocated} | memory.pools
    index = own_device().index
    return [
        {"device": index, "segment_pool_id": pool, "total_size": size, "allocated_size": size}
        for pool, size in sizes.items()
    ]


FUNCTIONS = {  # these replace attributes of torch.cuda
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": lambda: None,
    "current_device": lambda: CURRENT["device"],
    "current_stream": lambda device=None: Stream.current,
    "device": use_device,
    "device_count": device_count,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: NAME,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: timeline.capture is not None,
    "max_memory_allocated": lambda device=None: memory.peak,
    "mem_get_info": mem_get_info,
    "memory_reserved": lambda device=None: memory.reserved,
    "memory_snapshot": memory_snapshot,
    "set_device": set_device,
    "stream": StreamContext,
    "synchronize": lambda device=None: timeline.wait("synchronize"),
}
