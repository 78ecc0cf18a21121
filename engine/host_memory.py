"""What memory the host still has for this process: of all there is, and of each limit that is set.

free = free_host_memory()  # bytes
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

GROUPS = {  # controllers, as /proc/self/cgroup names them -> where their folders are
    "": Path("/sys/fs/cgroup"),  # version 2
    "memory": Path("/sys/fs/cgroup/memory"),
}
LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
FILES_KEPT = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)


def free_host_memory() -> int:
    """Bytes that can be had without swapping, as Linux estimates it; elsewhere all there are."""
    found = re.search(r"MemAvailable: *(\d+) kB", read(Path("/proc/meminfo")))
    if not found:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(found[1]) * 1024, left_of_addresses(), left_of_groups())


def left_of_addresses() -> int:
    """What is left of the addresses that this process may have (ulimit -v)."""
    import resource  # which not every system has

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    n_pages = int(read(Path("/proc/self/statm")).split()[0])
    return max(limit - n_pages * os.sysconf("SC_PAGE_SIZE"), 0)


def left_of_groups() -> int:
    """What is left to our control group, as a container is one, and to all that it is part of."""
    left = sys.maxsize
    for folder in group_folders():
        for limit, used in LIMITS.items():
            most = read(folder / limit).strip()
            if most.isdigit():  # not "max", and it is there
                kept = FILES_KEPT.findall(read(folder / "memory.stat"))
                room = int(kept[-1]) if kept else 0  # that they make; version 1 adds all up last
                free = int(most) - int(read(folder / used)) + room
                left = min(left, max(free, 0))
    return left


def group_folders() -> Iterator[Path]:
    """The folders that tell of our control groups, the outermost last."""
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        root = GROUPS.get(controllers)
        if root:
            folder = root / path.lstrip("/")
            yield folder
            yield from folder.parents[: len(folder.parts) - len(root.parts)]


def read(file: Path) -> str:
    """What a file of the system says; nothing if it has none such."""
    try:
        return file.read_text()
    except OSError:
        return ""
