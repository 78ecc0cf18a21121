"""Files that are written whole.

write_whole(Path("draft.training"), b"...")
"""

import errno
import os
from pathlib import Path


def write_whole(file: Path, content: bytes | str) -> None:
    """Replace a file's content at once, so that a process that is killed leaves the old content or
    the new. Text is written as UTF-8. Raises OSError."""
    place, temporary = places(file)
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def require_writable(file: Path) -> None:
    """Raise OSError if `write_whole` could not write this file. Leaves no new file."""
    _, temporary = places(file)
    temporary.touch()
    temporary.unlink()


def places(file: Path) -> tuple[Path, Path]:
    """Return the file that a name leads to, and a temporary one beside it. Raises OSError for a
    folder or a device, which a rename would replace."""
    place = file.resolve()
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return place, place.with_name(f".{place.name}.part")
