"""Checks of free memory before an allocation, and one exception for all out-of-memory errors.

require_memory(n_bytes, device, "the weights of models/tiny/target")
with memory_for("the weights of models/tiny/target"):
    ...  # MemoryError and all other out-of-memory errors become OutOfMemory
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

# Bytes of CUDA memory for the allocations of the first passes of up to 128 rows: kernels, cuBLAS's
# workspaces, graphs and their pools, logits. Others report 0.3 to 0.7 GB; not measured here
CUDA_RESERVE = 750_000_000
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
        raise OutOfMemory(
            f"{what} needs {format_bytes(need)} on {device}, {format_bytes(free)} are free"
        )


def format_bytes(n: int) -> str:
    """Return a size in GB or MB."""
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemory if the block runs out of memory. what: the purpose of the memory."""
    try:
        yield
    except OutOfMemory:  # its message is more precise
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory for {what}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out. On a CPU, torch and safetensors raise general
    errors, so their messages are searched."""
    if isinstance(error, (OutOfMemory, MemoryError, torch.OutOfMemoryError)):
        return True
    return bool(OUT_OF_MEMORY_MESSAGE.search(str(error)))


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps free memory between blocks in use. After a
    model was packed layer by layer, this was half of the model's size (measured)."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def free_memory(device: torch.device) -> int:
    """Return the bytes that weights and caches can still take."""
    if device.type != "cuda":
        return free_host_memory()
    free = torch.cuda.mem_get_info(device)[0] - CUDA_RESERVE
    index = torch.cuda.current_device() if device.index is None else device.index
    for segment in torch.cuda.memory_snapshot():  # torch reserves memory that it does not use
        is_graphs = tuple(segment["segment_pool_id"]) != (0, 0)  # only graphs can use it
        if segment["device"] == index and not is_graphs:
            free += segment["total_size"] - segment["allocated_size"]
    return max(free, 0)


def free_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping.

    This is Linux's estimate, within the limits of this process's control groups (version 2), such
    as those of a container. Without /proc, returns all physical memory, or sys.maxsize if the
    system does not report it. root: the folder of proc and sys.
    """
    found = re.search(r"MemAvailable: *(\d+) kB", read_system_file(root / "proc/meminfo"))
    if not found and not hasattr(os, "sysconf"):  # Windows: allocation itself will fail
        return sys.maxsize
    if not found:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = int(found[1]) * 1024
    group = re.search(r"^0::/(.*)$", read_system_file(root / "proc/self/cgroup"), re.MULTILINE)
    innermost = root / "sys/fs/cgroup" / (group[1] if group else "")
    for folder in (innermost, *innermost.parents):  # the limits of outer groups hold as well
        limit = read_system_file(folder / "memory.max").strip()
        if limit.isdigit():  # neither "max" nor absent
            files = re.search(
                r"^inactive_file (\d+)$", read_system_file(folder / "memory.stat"), re.MULTILINE
            )
            n_cached = int(files[1]) if files else 0  # cached files, which the system can drop
            n_used = int(read_system_file(folder / "memory.current")) - n_cached
            free = min(free, int(limit) - n_used)
    return max(free, 0)


def read_system_file(file: Path) -> str:
    """Return the text of a system file, or "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
