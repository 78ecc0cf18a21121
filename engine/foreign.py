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
import json
import os
import reprlib
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

T = TypeVar("T")
LIMIT = 2**26  # bytes of a file
LARGEST = sys.float_info.max
LONGEST = 300  # characters of what msgspec says, which may quote the file


class ForeignFile(Exception):
    """A file that cannot be read, or says what it may not; the message is one line for the user."""


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
    """The bytes of a regular file or of what a link leads to. Raises ForeignFile if it is none."""
    try:
        found = os.stat(file)
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


# What follows declares what benchmark/schema.py, prompts.py, pg19.py and results.py check; it goes
# once their types say it


class Kind(Protocol):
    """What a value may be."""

    def accept(self, value: object, where: str) -> object:
        """The value, with defaults filled in. Raises ForeignFile naming `where` it stands."""


Schema = Mapping[str, Kind]


def checked(content: object, schema: Schema, where: str) -> dict:
    """A parsed file as its schema has it, defaults filled in, unknown keys left as they are.

    where: the file, for errors. Raises ForeignFile naming the key: it is lacking, of another type,
    out of range.
    """
    if not isinstance(content, dict):
        raise ForeignFile(f"{where} is not a JSON object")
    return _accept_fields(content, schema, where, f"{where}: ")


def _accept_fields(content: dict, schema: Schema, where: str, prefix: str) -> dict:
    found = dict(content)
    for key, kind in schema.items():
        if key in content:
            found[key] = kind.accept(content[key], prefix + key)
        elif isinstance(kind, Optional):
            found[key] = kind.default
        else:
            raise ForeignFile(f"{where} has no {key}")
    return found


def wrong(where: str, value: object, expected: object) -> ForeignFile:
    """The error for a value that is not what its schema expects."""
    return ForeignFile(f"{where} is {short(value)}, not {expected}")


def short(value: object) -> str:
    """A JSON value on part of a line, whatever its size and depth."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value)


class Number(NamedTuple):
    """A whole number, or if `kind` is float any; never true, nor what is not finite."""

    kind: type  # int or float
    low: float = -LARGEST
    high: float = LARGEST

    def accept(self, value: object, where: str) -> object:
        is_number = type(value) is int or type(value) is self.kind  # a bool is an int, too
        if is_number and self.low <= value <= self.high:
            return value
        raise wrong(where, value, self)

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        if self.high < LARGEST:
            return f"{noun} from {self.low:,} to {self.high:,}"
        if self.low > -LARGEST:
            return f"{noun} of at least {self.low:,}"
        return noun


class Switch:
    """true or false, and nothing that only looks like it."""

    def accept(self, value: object, where: str) -> object:
        if isinstance(value, bool):
            return value
        raise wrong(where, value, "true or false")


class Word(NamedTuple):
    """A text; one of the options if there are any."""

    options: tuple[str, ...] = ()

    def accept(self, value: object, where: str) -> object:
        if isinstance(value, str) and (not self.options or value in self.options):
            return value
        raise wrong(where, value, f"one of {', '.join(self.options)}" if self.options else "a text")


class List(NamedTuple):
    """A list of values of one kind."""

    of: Kind

    def accept(self, value: object, where: str) -> object:
        if not isinstance(value, list):
            raise wrong(where, value, "a list")
        return [self.of.accept(item, f"{where}[{i}]") for i, item in enumerate(value)]


class Map(NamedTuple):
    """An object with keys of any name and values of one kind."""

    of: Kind

    def accept(self, value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        return {key: self.of.accept(item, f"{where}.{key}") for key, item in value.items()}


class Object(NamedTuple):
    """An object with a schema of its own."""

    schema: Schema

    def accept(self, value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        return _accept_fields(value, self.schema, where, f"{where}.")


class Either(NamedTuple):
    """A value of one of two kinds; errors are those of the second."""

    first: Kind
    second: Kind

    def accept(self, value: object, where: str) -> object:
        try:
            return self.first.accept(value, where)
        except ForeignFile:
            return self.second.accept(value, where)


class Optional(NamedTuple):
    """A key that may be absent or null; `default` stands for it then."""

    of: Kind
    default: object = None

    def accept(self, value: object, where: str) -> object:
        if value is None:
            return self.default
        return self.of.accept(value, where)
