"""One check of free memory, and one error for everything that does not fit.

require_memory(n_bytes, device, "the weights of models/tiny/target")
with memory_for("the weights of models/tiny/target"):
    ...  # MemoryError and all other out-of-memory errors become OutOfMemory
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MEMORY_INFO = Path("/proc/meminfo")
# Out-of-memory messages of torch's CPU allocator, mapped files, the system, C++ and oneDNN
OUT_OF_MEMORY_MESSAGE = re.compile(
    "allocate memory|out of memory|bad_alloc|could not create a (memory|primitive)(?! desc)", re.I
)


class OutOfMemory(MemoryError):
    """Something does not fit in memory. The message names what it is."""


def require_memory(need: int, device: torch.device, what: str) -> None:
    """Raise OutOfMemory if `need` bytes are not free on the device."""
    free = free_memory(device)
    if need > free:
        sizes = f"{need / 1e9:,.2f} GB on {device}, {free / 1e9:,.2f} GB are free"
        raise OutOfMemory(f"{what} needs {sizes}")


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free, as the system counts them. Only Linux counts those of a CPU;
    elsewhere, all that can be needed are."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    text = MEMORY_INFO.read_text() if MEMORY_INFO.exists() else ""
    found = re.search(r"MemAvailable: *(\d+) kB", text)
    return int(found[1]) * 1024 if found else sys.maxsize


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemory if the block runs out of memory. what: the purpose of the memory."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory for {what}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out. On a CPU, torch and safetensors raise general
    errors, so their messages are searched."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return bool(OUT_OF_MEMORY_MESSAGE.search(str(error)))
