"""Tests of free_host_memory: the machine's free memory and the limits of containers."""

import os
from pathlib import Path

import pytest

from engine.memory import free_host_memory

GIB = 2**30
# Control groups, ours is a/b -> free bytes. Each group: its limit, its use, cached files of the use
GROUPS = {
    "none": ({}, 8 * GIB),
    "no limit": ({"a/b": ("max", 5000, 0)}, 8 * GIB),
    "ours": ({"a/b": (9000, 5000, 300)}, 4300),
    "around ours": ({"a/b": ("max", 10, 0), "a": (9000, 5000, 0)}, 4000),
    "the root's": ({"": (7000, 5000, 0)}, 2000),
    "the least": ({"a/b": (9000, 5000, 0), "a": (9000, 8000, 0)}, 1000),
    "another's": ({"a/c": (9000, 5000, 0)}, 8 * GIB),
    "overdrawn": ({"a/b": (100, 900, 0)}, 0),
    "wider than the machine": ({"a/b": (99 * GIB, 0, 0)}, 8 * GIB),
}


@pytest.mark.parametrize(("groups", "free"), GROUPS.values(), ids=GROUPS)
def test_a_containers_limit_and_those_around_it(
    groups: dict[str, tuple], free: int, tmp_path: Path
) -> None:
    """Check that the limits of all enclosing groups count. MemAvailable is the whole machine's, so
    a process that relied on it was killed in a container."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {8 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/a/b\n")
    for name, (limit, used, cached) in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 7\n")
    assert free_host_memory(tmp_path) == free


def test_a_system_without_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free_host_memory(tmp_path) == everything >= free_host_memory() > 0
    monkeypatch.delattr(os, "sysconf")  # as on Windows, where loading a model failed without it
    assert free_host_memory(tmp_path) > everything
