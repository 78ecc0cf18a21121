"""Files are written whole or not at all, and by one process at a time."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.files import locked, require_writable, write_whole


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_what_is_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    """Nor is a file of the user's overwritten that is called almost the same."""
    (tmp_path / ".a.part").write_text("mine")
    require_writable(tmp_path / "a")
    write_whole(tmp_path / "a", "é\n")
    write_whole(tmp_path / "b", b"\xff")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "b").read_bytes() == b"\xff"
    assert (tmp_path / ".a.part").read_text() == "mine"
    assert names(tmp_path) == [".a.part", "a", "b"]


def test_a_link_stays_a_link_and_who_may_read_it_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_text("old")
    (tmp_path / "there" / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("there/a")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "a").read_text() == "new" and names(tmp_path / "there") == ["a"]
    assert stat.S_IMODE((tmp_path / "there" / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("write", [lambda file: write_whole(file, "new"), require_writable])
def test_what_is_no_file_is_not_replaced(write: Callable[[Path], None], tmp_path: Path) -> None:
    """A rename onto a device takes the device away."""
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "none/a"):
        with pytest.raises(OSError):
            write(tmp_path / name)
    assert names(tmp_path) == ["fifo"] and stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


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
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    """Through a link, too. What one that was killed has left beside the file keeps nobody out."""
    (tmp_path / "link").symlink_to("a")
    for left in (".a.lock", ".a.0123.part"):
        (tmp_path / left).touch()
    with locked(tmp_path / "a"):
        assert names(tmp_path) == [".a.lock", "link"]
        for name in ("a", "link"):
            with pytest.raises(BlockingIOError), locked(tmp_path / name):
                raise AssertionError("let in")
    assert names(tmp_path) == ["link"], "no lock is left behind"
