"""What a run of tools/distil.py leaves, however it ends, for the same command to go on from.

with checkpoint_of(Path("my-draft")) as file:
    state = read_state(file, identity)  # None at the beginning
    write_state(file, {"identity": identity, "training": training.state()})
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from cli.errors import UsageError
from engine.checkpoint import first_line
from engine.files import locked, write_whole

STATE = "state.pt"


@contextmanager
def checkpoint_of(folder: Path) -> Iterator[Path]:
    """The file of a run's checkpoint, in a hidden folder beside the one to come; no other run has
    it meanwhile. Raises UsageError."""
    hidden = folder.with_name(f".{folder.name}.training")
    with ExitStack() as stack:
        try:
            hidden.mkdir(parents=True, exist_ok=True)
            stack.callback(remove_empty, hidden)
            stack.enter_context(locked(hidden / STATE))
        except BlockingIOError as error:
            raise UsageError(f"another run is at work on {folder}") from error
        except OSError as error:
            raise UsageError(f"{hidden} cannot be written to: {error.strerror}") from error
        yield hidden / STATE


def remove_empty(folder: Path) -> None:
    """If there is nothing in it."""
    with suppress(OSError):
        folder.rmdir()


def read_state(file: Path, identity: dict) -> dict | None:
    """The checkpoint to go on from, if there is one. Raises UsageError if a run of another
    identity left it."""
    if not file.exists():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        found = state["identity"]
    except Exception as error:  # the library raises nothing narrower
        why = first_line(error)
        raise UsageError(f"{file} is no checkpoint ({why}): delete it to begin anew") from error
    differing = [name for name, value in identity.items() if found.get(name) != value]
    if differing:
        what = f"{file.parent} is of a run that differs in {', '.join(differing)}"
        raise UsageError(f"{what}: give what it was given, or delete it")
    return state


def write_state(file: Path, state: dict) -> None:
    """Whole, or what was there stays. Raises UsageError."""
    content = io.BytesIO()
    torch.save(state, content)
    try:
        write_whole(file, content.getvalue())
    except OSError as error:
        why = f"{file} cannot be written: {error.strerror}"
        raise UsageError(f"{why}; what was there stays, to go on from") from error
