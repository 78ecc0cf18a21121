"""The error of a request that cannot be carried out.

with writing("run.html"):  # an OSError in the block becomes a UsageError
    Path("run.html").write_text("...", encoding="utf-8")
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UsageError(ValueError):
    """A request that cannot be carried out. The message is one line for the user."""


@contextmanager
def writing(file: Path | str) -> Iterator[None]:
    """Raise UsageError if the block fails to write a file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
