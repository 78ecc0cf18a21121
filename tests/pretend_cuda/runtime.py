"""Stand-ins for torch.cuda's functions, streams and events, under their own names."""

import time
from contextlib import nullcontext

import torch

from .tensors import memory
from .timeline import timeline

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


class Generator(torch._C.Generator):
    """A generator on the host, whatever its device."""

    def __new__(cls, device: torch.device | str = "cpu") -> "Generator":
        return super().__new__(cls)


def memory_snapshot() -> list[dict]:
    """Return one segment for each pool, which is used completely."""
    sizes = {(0, 0): memory.allocated} | memory.pools
    return [
        {"device": 0, "segment_pool_id": pool, "total_size": size, "allocated_size": size}
        for pool, size in sizes.items()
    ]


FUNCTIONS = {  # these replace attributes of torch.cuda
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": lambda: None,
    "current_device": lambda: 0,
    "current_stream": lambda device=None: Stream.current,
    "device": nullcontext,
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: NAME,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: timeline.capture is not None,
    "max_memory_allocated": lambda device=None: memory.peak,
    "memory_allocated": lambda device=None: memory.allocated,
    "mem_get_info": lambda device=None: (memory.capacity - memory.reserved, memory.capacity),
    "memory_reserved": lambda device=None: memory.reserved,
    "memory_snapshot": memory_snapshot,
    "stream": StreamContext,
    "synchronize": lambda device=None: timeline.wait("synchronize"),
}
