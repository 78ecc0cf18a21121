"""Whether something fits in memory, asked before it is taken."""

import os
import re
from pathlib import Path

import torch

# On CUDA, for what comes with the first passes: kernels, cuBLAS's workspaces, graphs and their
# pools, logits. Others tell of 0.3 to 0.7 GB; not measured here
CUDA_RESERVE = 750_000_000


class OutOfMemory(Exception):
    """Something that would not fit in memory; the message says what was needed and what is free."""


def require_memory(need: int, device: torch.device, what: str) -> None:
    """Raise OutOfMemory if `need` bytes are not free on the device."""
    free = free_memory(device)
    if need > free:
        raise OutOfMemory(
            f"{what} would take {need / 1e9:,.1f} GB on {device}, {free / 1e9:,.1f} GB are free"
        )


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


def free_host_memory() -> int:
    """Bytes that can be had without swapping, as Linux estimates it; elsewhere all there are."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"MemAvailable: *(\d+) kB", text)
    if not found:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(found[1]) * 1024
