"""Atomic writes, and a lock against a second writer.

After a full disk or Ctrl-C the former content is still there. No unrelated file is touched.

    with locked(Path("draft.training")):
        write_whole(Path("draft.training"), b"...")
"""

import errno
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


def write_whole(file: Path, content: bytes | str) -> None:
    """Replace a file's content at once. A link is followed, and text is written as UTF-8.

    The content goes to a temporary file in the same folder, which is then renamed. So a process
    that is killed leaves the old content or the new. Raises OSError.
    """
    if isinstance(content, str):
        content = content.encode("utf-8")
    place, temporary = places(file)
    try:
        temporary.write_bytes(content)
        if place.exists():
            shutil.copymode(place, temporary)
        os.replace(temporary, place)
    finally:
        remove(temporary)


def require_writable(file: Path) -> None:
    """Raise OSError if `write_whole` could not write this file, or if the file is write-protected,
    which a rename would not respect. Leaves no new file."""
    place, probe = places(file)
    if place.exists() and not place.stat().st_mode & stat.S_IWUSR:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    probe.touch()
    probe.unlink()


def places(file: Path) -> tuple[Path, Path]:
    """Return a file's real path and an unused temporary name in its folder. Raises OSError for a
    device, a folder or a link to itself, which a rename would replace."""
    place = Path(os.path.realpath(file))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(place))
    return place, place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")


def remove(file: Path) -> None:
    """Remove a file if the system allows it."""
    with suppress(OSError):
        file.unlink()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file, so that one process at a time writes it.

    Removes temporary files of writers that were killed. Raises BlockingIOError if another process
    holds the lock, and OSError if the lock cannot be made.
    """
    place = Path(os.path.realpath(file))
    lock_file = place.with_name(f".{place.name}.lock")  # not the file: each write replaces it
    lock = FileLock(lock_file, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(file)) from error
    try:
        for temporary in place.parent.glob(f".{glob.escape(place.name)}.*.part"):
            remove(temporary)
        yield
    finally:
        remove(lock_file)  # before the release, so the next process makes a new one
        lock.release()
