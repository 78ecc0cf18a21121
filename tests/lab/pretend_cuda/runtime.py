"""Stand-ins for torch.cuda's functions and events, under their own names."""

from contextlib import nullcontext

import torch

from .streams import Stream, StreamContext
from .timeline import timeline

NAME = "NVIDIA Pretended H100"
CAPABILITY = (9, 0)
# Figures of memory, which the device does not measure
FREE, TOTAL, USED = 70 * 10**9, 80 * 10**9, 10**9
GRAPHS = {"segment_pool_id": (0, 1), "total_size": USED}


class Event:
    """A moment of the device, completed when the host waits for it or for a later one."""

    def __init__(self) -> None:
        self.moment = 0

    def record(self) -> None:
        self.moment = timeline.submit()

    def synchronize(self) -> None:
        timeline.forbid_capture("Event.synchronize")
        if self.moment > timeline.done:
            timeline.wait("Event.synchronize", self.moment)


class Generator(torch._C.Generator):
    """A generator on the host, whatever its device."""

    def __new__(cls, device: torch.device | str = "cpu") -> "Generator":
        return super().__new__(cls)


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
    "max_memory_allocated": lambda device=None: USED,
    "memory_allocated": lambda device=None: USED,
    "mem_get_info": lambda device=None: (FREE, TOTAL),
    "memory_reserved": lambda device=None: USED,
    "memory_snapshot": lambda: [GRAPHS],
    "stream": StreamContext,
    "synchronize": lambda device=None: timeline.wait("synchronize"),
}
