"""Files written whole or not at all, and kept from a second writer.

A disk that is full, or Ctrl-C, leaves what was there before; no file of anybody else's is touched,
whatever its name.

    with locked(Path("draft.training")):
        write_whole(Path("draft.training"), b"...")
"""

import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


def write_whole(file: Path, content: bytes | str) -> None:
    """Put this content, text as UTF-8, where the file is, or where it leads if it is a link.

    It is written beside it, under a name that nobody has, and then renamed: whoever is killed
    leaves the old or the new. Raises OSError.
    """
    if isinstance(content, str):
        content = content.encode("utf-8")
    place, draft = places(file)
    try:
        draft.write_bytes(content)
        if place.exists():
            shutil.copymode(place, draft)
        os.replace(draft, place)
    finally:
        remove(draft)


def require_writable(file: Path) -> None:
    """Raise OSError where `write_whole` could not begin, and leave no trace of having asked."""
    _, probe = places(file)
    probe.touch()
    probe.unlink()


def places(file: Path) -> tuple[Path, Path]:
    """Where a file is, and beside it a name that nobody has. Raises OSError for what a rename would
    take away: a device, a folder, a link that leads to itself."""
    place = Path(os.path.realpath(file))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(place))
    return place, place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")


def remove(file: Path) -> None:
    """Remove what is in nobody's way, if that can be done."""
    with suppress(OSError):
        file.unlink()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep every other process out that asks for the same; what becomes of the file is free.

    What a writer that was killed has left beside the file is removed. Raises BlockingIOError if
    another one is in, and OSError if there can be no lock there.
    """
    place = Path(os.path.realpath(file))
    beside = place.with_name(f".{place.name}.lock")  # the file itself is another with every writing
    lock = FileLock(beside, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(file)) from error
    try:
        for draft in place.parent.glob(f".{glob.escape(place.name)}.*.part"):
            remove(draft)
        yield
    finally:
        remove(beside)  # before it is given up: whoever comes then makes another
        lock.release()
