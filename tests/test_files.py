"""Tests that files are written completely or not at all, and by one process at a time."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.files import locked, require_writable, write_whole


def list_names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_what_is_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    """Check that a user's file with a similar name is not overwritten."""
    (tmp_path / ".a.part").write_text("mine")
    require_writable(tmp_path / "a")
    write_whole(tmp_path / "a", "é\n")
    write_whole(tmp_path / "b", b"\xff")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "b").read_bytes() == b"\xff"
    assert (tmp_path / ".a.part").read_text() == "mine"
    assert list_names(tmp_path) == [".a.part", "a", "b"]


def test_a_link_and_the_permissions_of_its_file_stay(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_text("old")
    (tmp_path / "there" / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("there/a")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "a").read_text() == "new"
    assert list_names(tmp_path / "there") == ["a"]
    assert stat.S_IMODE((tmp_path / "there" / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("write", [lambda file: write_whole(file, "new"), require_writable])
def test_what_is_no_file_is_not_replaced(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Check special files and folders. Renaming a file onto a device would remove the device."""
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "none/a"):
        with pytest.raises(OSError):
            write(tmp_path / name)
    assert list_names(tmp_path) == ["fifo"] and stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_a_write_protected_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kept.html"
    file.write_text("old")
    file.chmod(0o444)
    with pytest.raises(PermissionError, match="kept.html"):
        require_writable(file)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_whole(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and list_names(tmp_path) == ["a"]


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    """Check the lock, also through a link. Files that a killed process has left do not lock."""
    (tmp_path / "link").symlink_to("a")
    for left in (".a.lock", ".a.0123.part"):
        (tmp_path / left).touch()
    with locked(tmp_path / "a"):
        assert list_names(tmp_path) == [".a.lock", "link"]
        for name in ("a", "link"):
            with pytest.raises(BlockingIOError), locked(tmp_path / name):
                raise AssertionError("locked twice")
    assert list_names(tmp_path) == ["link"], "no lock is left behind"
