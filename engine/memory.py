"""Whether something fits in memory, asked before it is taken; and what to say if it did not.

require_memory(n_bytes, device, "the weights of models/tiny/target")
with memory_for("the weights of models/tiny/target"):
    ...  # MemoryError and what else means that there is none becomes OutOfMemory
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

# On CUDA, for what comes with the first passes: kernels, cuBLAS's workspaces, graphs and their
# pools, logits. Others tell of 0.3 to 0.7 GB; not measured here
CUDA_RESERVE = 750_000_000
# In torch's words for its allocator on CPU and for a mapped file, in the system's own, C++'s,
# oneDNN's
REFUSED = re.compile(
    "allocate memory|out of memory|bad_alloc|could not create a (memory|primitive)(?! desc)", re.I
)


class OutOfMemory(MemoryError):
    """Something that would not fit in memory; the message says what was needed and what is free."""


def require_memory(need: int, device: torch.device, what: str) -> None:
    """Raise OutOfMemory if `need` bytes are not free on the device."""
    free = free_memory(device)
    if need > free:
        raise OutOfMemory(
            f"{what} would take {in_bytes(need)} on {device}, {in_bytes(free)} are free"
        )


def in_bytes(n: int) -> str:
    """A size as one reads it."""
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemory, naming what it was for, for every way in which memory is refused."""
    try:
        yield
    except OutOfMemory:  # which says it better
        raise
    except Exception as error:
        if not is_refusal(error):
            raise
        raise OutOfMemory(f"there is no memory for {what}") from error


def is_refusal(error: Exception) -> bool:
    """Whether this says that there is no memory; torch and safetensors raise nothing narrower than
    a RuntimeError on CPU."""
    if isinstance(error, (OutOfMemory, MemoryError, torch.OutOfMemoryError)):
        return True
    return bool(REFUSED.search(str(error)))


def give_back() -> None:
    """Let the system have the memory that was freed, of which glibc keeps what lies between what is
    in use: of a model that was packed layer by layer as much again as half of it (measured)."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def free_memory(device: torch.device) -> int:
    """Bytes that weights and caches can still have."""
    if device.type != "cuda":
        return free_host_memory()
    free = torch.cuda.mem_get_info(device)[0] - CUDA_RESERVE
    index = torch.cuda.current_device() if device.index is None else device.index
    for segment in torch.cuda.memory_snapshot():  # what torch holds and does not use
        is_graphs = tuple(segment["segment_pool_id"]) != (0, 0)  # theirs alone
        if segment["device"] == index and not is_graphs:
            free += segment["total_size"] - segment["allocated_size"]
    return max(free, 0)


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping, as Linux estimates it, within the limits of our
    control groups (version 2), as a container's is one; elsewhere all there are, or where nothing
    tells, no limit.

    root: where proc and sys are.
    """
    found = re.search(r"MemAvailable: *(\d+) kB", read_system_file(root / "proc/meminfo"))
    if not found and not hasattr(os, "sysconf"):  # Windows: what is taken will tell
        return sys.maxsize
    if not found:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = int(found[1]) * 1024
    group = re.search(r"^0::/(.*)$", read_system_file(root / "proc/self/cgroup"), re.MULTILINE)
    own = root / "sys/fs/cgroup" / (group[1] if group else "")
    for folder in (own, *own.parents):  # it is part of those around it
        limit = read_system_file(folder / "memory.max").strip()
        if limit.isdigit():  # not "max", and it is there
            files = re.search(
                r"^inactive_file (\d+)$", read_system_file(folder / "memory.stat"), re.MULTILINE
            )
            kept = int(files[1]) if files else 0  # for files, which is given up when it is needed
            free = min(free, int(limit) - int(read_system_file(folder / "memory.current")) + kept)
    return max(free, 0)


def read_system_file(file: Path) -> str:
    """What a file of the system says; nothing if it has none such."""
    try:
        return file.read_text()
    except OSError:
        return ""
