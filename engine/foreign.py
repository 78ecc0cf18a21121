"""Files that somebody else may have written, or cut short: read whole, then checked, or refused.

Nothing of such a file is believed: not that it is a file, nor its size, encoding and nesting, nor
the types and ranges of what it says. msgspec reads JSON straight into the type that says what it
may be; a key that the type does not name is left out. Whatever is wrong is one line that names the
file and the key.

    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    index = read_json(Path("model.safetensors.index.json"), Index)
"""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
LIMIT = 2**26  # bytes of a file
LONGEST = 300  # characters of what msgspec says, which may quote the file


class ForeignFile(ValueError):
    """A file that cannot be read, or says what it may not; the message is one line for the user."""

    def __init__(self, line: str):
        super().__init__(shown(line))


def shown(text: str) -> str:
    """Return text of unknown origin on one line, with nothing in it that a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def read_json(file: Path, kind: type[T] = object, limit: int = LIMIT) -> T:
    """What a JSON file says, as this type. Raises ForeignFile."""
    return parse_json(read_bytes(file, limit), str(file), kind)


def parse_json(text: bytes | str, where: str, kind: type[T] = object) -> T:
    """What a JSON text says, as this type; `where` it stands is named in errors. Raises
    ForeignFile, naming the key that is lacking, of another type or out of range."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise misread(where, error) from error


def convert(content: object, where: str, kind: type[T]) -> T:
    """The same of what was parsed before."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise misread(where, error) from error


def misread(where: str, error: Exception) -> ForeignFile:
    """What to say of a text that msgspec did not take: JSON of another type, or none."""
    what = where if isinstance(error, msgspec.ValidationError) else f"{where} is not JSON"
    return ForeignFile(f"{what}: {str(error)[:LONGEST]}")


def read_text(file: Path, limit: int = LIMIT) -> str:
    """A UTF-8 text. Raises ForeignFile."""
    try:
        return read_bytes(file, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForeignFile(f"{file} is not UTF-8: {error}") from error


def read_bytes(file: Path, limit: int = LIMIT) -> bytes:
    """A regular file's content. Raises ForeignFile, also for more than `limit` bytes."""
    if require_file(file) > limit:
        raise ForeignFile(f"{file} is larger than {limit / 1e6:,.1f} MB, too large for what it is")
    try:
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error


def require_file(file: Path) -> int:
    """Size in bytes of a regular file that can be opened, or of a link's. Raises ForeignFile."""
    try:
        found = os.stat(file)
        if stat.S_ISREG(found.st_mode):
            open(file, "rb").close()  # because safetensors calls a file without permission absent
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise ForeignFile(f"{file} is {kind}, not a file")
    return found.st_size


def unreadable(file: Path, error: OSError | ValueError) -> ForeignFile:
    """What to say of a path that the system refused."""
    if isinstance(error, ValueError):  # a null character, or half of a surrogate pair
        return ForeignFile(f"{str(file)!r} cannot be a file's name")
    if error.errno == errno.ENOENT and os.path.islink(file):
        return ForeignFile(f"{file} is a link to {os.readlink(file)}, which is not there")
    if error.errno == errno.ENOENT:
        return ForeignFile(f"{file} is not there")
    return ForeignFile(f"{file} cannot be read: {error.strerror}")
