"""Files are written whole or not at all, and by one process at a time."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.files import locked, write_whole

ROOT = Path(__file__).parent.parent
HOLD = """
import sys
from pathlib import Path
from engine.files import locked
with locked(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_what_is_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "é\n")
    write_whole(tmp_path / "b", b"\xff")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "b").read_bytes() == b"\xff"
    assert names(tmp_path) == ["a", "b"]


def test_a_neighbour_is_never_overwritten(tmp_path: Path) -> None:
    """A draft was called as the file with another ending, which a user may have."""
    for name in ("a.part", "a.tmp", ".a.lock"):
        (tmp_path / name).write_text("mine")
    with locked(tmp_path / "a.json"), locked(tmp_path / "a"):
        write_whole(tmp_path / "a.json", "new")
        write_whole(tmp_path / "a", "new")
    for name in ("a.part", "a.tmp", ".a.lock"):
        assert (tmp_path / name).read_text() == "mine"
    assert names(tmp_path) == [".a.lock", "a", "a.json", "a.part", "a.tmp"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_text("old")
    (tmp_path / "link").symlink_to("there/a")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "a").read_text() == "new" and names(tmp_path / "there") == ["a"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A rename onto a device takes the device away."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "round").symlink_to("round")
    for name in ("fifo", "round", "."):
        with pytest.raises(OSError):
            write_whole(tmp_path / name, "new")
    assert names(tmp_path) == ["fifo", "round"]
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode) and (tmp_path / "round").is_symlink()


def test_who_may_read_it_stays(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o640)
    write_whole(tmp_path / "a", "new")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


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


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    """Through a link, too, until the first one ends, be it killed."""
    pytest.importorskip("fcntl")
    file = tmp_path / "a"
    (tmp_path / "link").symlink_to("a")
    command = [sys.executable, "-c", HOLD, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as holder:
        assert holder.stdout.readline() == b"in\n"
        for name in ("a", "link"):
            with pytest.raises(BlockingIOError), locked(tmp_path / name):
                raise AssertionError("let in")
        holder.kill()
    with locked(file):
        assert names(tmp_path) == [".a.lock", "link"]
    assert names(tmp_path) == ["link"], "no lock is left behind"


def test_a_lock_that_cannot_be_removed_hides_nothing(tmp_path: Path) -> None:
    """The folder had been closed while a table was measured: status 70, and not why."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(KeyError):
        with locked(folder / "r.json"):
            folder.rename(tmp_path / "elsewhere")
            folder.write_text("")
            raise KeyError
