"""What stands in for torch.cuda: its functions, streams and events, under their own names."""

import os
import time
from types import SimpleNamespace

import torch

from .tensors import memory, own_device
from .timeline import project_line, timeline

__all__ = ["Event", "Stream", "_lazy_init", "current_device", "current_stream", "default_stream"]
__all__ += ["device", "device_count", "empty_cache", "get_device_capability", "get_device_name"]
__all__ += ["get_device_properties", "is_available", "is_bf16_supported", "is_initialized"]
__all__ += ["is_current_stream_capturing", "max_memory_allocated", "mem_get_info"]
__all__ += ["memory_allocated", "memory_reserved", "memory_snapshot", "reset_peak_memory_stats"]
__all__ += ["set_device", "stream", "synchronize"]  # what goes into torch.cuda

NAME = "NVIDIA Pretended H100"
CAPABILITY = (9, 0)


class Event:
    """A moment of the device; complete once the host has waited for it, or for something later."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ):
        self.is_timing = enable_timing
        self.moment = 0
        self.seconds: float | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self.moment = timeline.submit("event")
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        if timeline.capture is not None:
            timeline.wait("Event.query")  # which says that it must not
        return self.moment <= timeline.done

    def synchronize(self) -> None:
        timeline.count("event wait")
        if not self.query():
            timeline.wait("Event.synchronize", self.moment)

    def wait(self, stream: "Stream | None" = None) -> None:
        timeline.count("stream wait")

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        if not (self.is_timing and end.is_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.seconds is None or end.seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.seconds - self.seconds) * 1e3


class Stream:
    """Everything is done in the order in which it is asked for, on whichever stream."""

    current: "Stream"

    def __init__(self, device: object = None, priority: int = 0, **_: object):
        """All are of the only device that this process may use."""

    @property
    def device(self) -> torch.device:
        return own_device()

    def synchronize(self) -> None:
        timeline.wait("Stream.synchronize")

    def query(self) -> bool:
        return timeline.done == timeline.now

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, stream: "Stream") -> None:
        timeline.count("stream wait")

    def wait_event(self, event: Event) -> None:
        timeline.count("stream wait")


DEFAULT_STREAM = Stream()
Stream.current = DEFAULT_STREAM


class StreamContext:
    """torch.cuda.stream: within it, another stream is the current one."""

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        self.before = Stream.current
        Stream.current = self.stream or Stream.current

    def __exit__(self, *error: object) -> None:
        Stream.current = self.before


class DeviceContext:
    """torch.cuda.device: within it, another device is the current one."""

    current = 0  # the index of what is meant by "cuda"

    def __init__(self, device: torch.device | str | int):
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = DeviceContext.current
        DeviceContext.current = self.index

    def __exit__(self, *error: object) -> None:
        DeviceContext.current = self.before


def index_of(device: torch.device | str | int | None) -> int:
    """Of a device that there is; without an index, and by the name that the guard that stands in
    for CUDA's gives it, the current one."""
    index = device
    if isinstance(device, (str, torch.device)):
        index = torch.device(device).index
    if index in (None, -1):
        return DeviceContext.current
    if index >= device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return index


def require_own(device: torch.device | str | int | None) -> None:
    """Raise if it is another rank's."""
    index = index_of(device)
    if index != own_device().index:
        raise AssertionError(f"cuda:{index} is another rank's device, at {project_line()}")


class Generator(torch._C.Generator):
    """Draws on the host, and says that it is where it was asked to be."""

    def __new__(cls, device: torch.device | str = "cpu") -> "Generator":
        return super().__new__(cls)

    def __init__(self, device: torch.device | str = "cpu"):
        self.where = torch.device(device)

    @property
    def device(self) -> torch.device:
        return own_device() if self.where.type == "cuda" else self.where


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def current_device() -> int:
    return DeviceContext.current


def set_device(device: torch.device | str | int) -> None:
    DeviceContext.current = index_of(device)


def device(device: torch.device | str | int) -> DeviceContext:
    return DeviceContext(device)


def get_device_name(device: object = None) -> str:
    return NAME


def get_device_capability(device: object = None) -> tuple[int, int]:
    return CAPABILITY


def get_device_properties(device: object = None) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=memory.capacity,
        multi_processor_count=132,
    )


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def current_stream(device: object = None) -> Stream:
    return Stream.current


def default_stream(device: object = None) -> Stream:
    return DEFAULT_STREAM


def is_current_stream_capturing() -> bool:
    return timeline.capture is not None


def synchronize(device: object = None) -> None:
    timeline.wait("synchronize")


def empty_cache() -> None:
    pass


def mem_get_info(device: object = None) -> tuple[int, int]:
    require_own(device)
    return memory.capacity - memory.reserved, memory.capacity


def memory_allocated(device: object = None) -> int:
    return memory.allocated


def memory_reserved(device: object = None) -> int:
    return memory.reserved


def max_memory_allocated(device: object = None) -> int:
    return memory.peak


def reset_peak_memory_stats(device: object = None) -> None:
    memory.peak = memory.allocated


def memory_snapshot() -> list[dict]:
    segments = [segment((0, 0), memory.allocated)]
    for pool, size in memory.pools.items():
        segments.append(segment(pool, size))
    return segments


def segment(pool: tuple[int, int], size: int) -> dict:
    """All of a pool, and none of it unused."""
    index = own_device().index
    return {"device": index, "segment_pool_id": pool, "total_size": size, "allocated_size": size}
