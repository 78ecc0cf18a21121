"""Files written whole or not at all, and kept from a second writer.

A disk that is full, or Ctrl-C, leaves what was there before; no file of anybody else's is touched,
whatever its name.

    with locked(Path("results.json")):
        write_whole(Path("results.json"), "{}")
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # there is no such lock on this system
    fcntl = None


def write_whole(file: Path, content: bytes | str) -> None:
    """Put this content, text as UTF-8, where the file is, or where it leads if it is a link.

    It is written beside it, under a name that nobody has, and then renamed. Raises OSError.
    """
    if isinstance(content, str):
        content = content.encode("utf-8")
    place = Path(os.path.realpath(file))
    require_regular(place)
    draft = place.with_name(f".{secrets.token_hex(12)}.part")
    try:
        with open(draft, "xb") as stream:
            stream.write(content)
        if place.exists():
            shutil.copymode(place, draft)
        os.replace(draft, place)
    finally:
        remove(draft)


def require_writable(file: Path) -> None:
    """Raise OSError where `write_whole` could not begin, and leave no trace of having asked."""
    place = Path(os.path.realpath(file))
    require_regular(place)
    probe = place.with_name(f".{secrets.token_hex(12)}.part")
    with open(probe, "xb"):
        probe.unlink()


def require_regular(place: Path) -> None:
    """Raise OSError for what a rename would take away: a device, a folder, a link to itself."""
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(place))


def remove(file: Path) -> None:
    """Remove what is in nobody's way, if that can be done."""
    with suppress(OSError):
        file.unlink()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep every other process out that asks for the same; what becomes of the file is free.

    Raises BlockingIOError if another one is in, and OSError if there can be no lock there. Where
    the system has none, nobody is kept out.
    """
    place = Path(os.path.realpath(file))
    beside = place.with_name(f".{place.name}.lock")  # the file itself is another with every writing
    descriptor = take_lock(beside)
    try:
        yield
    finally:
        if os.fstat(descriptor).st_size == 0:  # whoever has written into it may want it
            remove(beside)
        os.close(descriptor)


def take_lock(beside: Path) -> int:
    """The descriptor of a locked file of this name, made if there is none."""
    while True:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock(descriptor)
            if is_still_there(beside, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the one that had it has removed it: the next is another file


def lock(descriptor: int) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return


def is_still_there(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False
