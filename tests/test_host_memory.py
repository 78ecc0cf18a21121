"""What is free: of all memory, and within a container's limits, as the system's files tell."""

import os
import sys
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from engine import host_memory
from engine.host_memory import free_host_memory, group_folders, left_of_groups


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: MonkeyPatch) -> dict[str, Path]:
    """Folders that stand for the system's, and what /proc/self/cgroup says of ours in them."""
    found = {"": tmp_path, "memory": tmp_path / "memory"}
    monkeypatch.setattr(host_memory, "GROUPS", found)
    told = {"/proc/self/cgroup": "3:cpuset:/\n4:memory:/box\n0::/a/b\n"}
    monkeypatch.setattr(host_memory, "read", lambda file: told.get(str(file)) or really_read(file))
    return found


really_read = host_memory.read


def limit(folder: Path, most: str, used: str, kept: str, names: tuple[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(kept)


NEWER = ("memory.max", "memory.current")
OLDER = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_a_containers_limit_and_those_around_it(groups: dict[str, Path]) -> None:
    """MemAvailable is the machine's: within a container the process was killed for what it took."""
    root = groups[""]
    assert list(group_folders())[:2] == [groups["memory"] / "box", groups["memory"]]
    assert list(group_folders())[2:] == [root / "a/b", root / "a", root]
    assert left_of_groups() == sys.maxsize, "no file tells of a limit"
    limit(root / "a/b", "max", "5000", "", NEWER)
    assert left_of_groups() == sys.maxsize
    limit(root / "a", "9000", "5000", "anon 1\ninactive_file 300\nactive_file 7\n", NEWER)
    assert left_of_groups() == 4300
    limit(groups["memory"], "6000", "3000", "inactive_file 1\ntotal_inactive_file 50\n", OLDER)
    assert left_of_groups() == 3050, "with what the groups within it keep"
    limit(groups["memory"] / "box", "100", "900", "", OLDER)
    assert left_of_groups() == free_host_memory() == 0


def test_a_system_that_tells_of_nothing(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "read", lambda file: "")
    assert free_host_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert left_of_groups() == sys.maxsize
