"""How a command line ends: one line for every mistake of the user's, the exit status, Ctrl-C.

status = run_command_line(execute, parser, arguments)
"""

import argparse
import errno
import io
import os
import platform
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import torch

from cli.files import locked
from engine.checkpoint import CheckpointError, HubUnreachable, first_line, printable
from engine.memory import OutOfMemory, is_refusal
from engine.ranks import RanksError
from verify import NonFiniteLogits

VERSION = f"%(prog)s 0.1, torch {torch.__version__}, Python {platform.python_version()}"
HANG_UP = getattr(signal, "SIGHUP", signal.SIGTERM)  # which Windows has not
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
WITHOUT_NETWORK = "--target models/tiny/target --draft models/tiny/draft ..."


class UsageError(Exception):
    """A request that cannot be carried out; the message is one line for the user."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError, where argparse prints its usage and exits."""

    less_memory = ""  # what lowers the memory that is needed

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.register("type", None, not_empty)  # of every option that names no other type

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else args
        for word in words:
            if re.fullmatch("--[^=]+=--", word):
                self.error(f"{word}: -- is no value")  # Python 3.11 makes it an empty list
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists everything)")


def not_empty(word: str) -> str:
    """Return an option's value as it is given. Raises argparse.ArgumentTypeError if it is empty, as
    a shell variable that is not set makes it."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    return word


def say(line: str) -> None:
    """Print one line on stderr, with nothing in it that a terminal obeys."""
    write_stderr(printable(line))


def write_stderr(text: str) -> None:
    """Print text on stderr as it is, such as a drawing with its colours. If stderr takes no more,
    as on a full disk or when its reader has gone, the work goes on without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def run_command_line(
    execute: Callable[[argparse.Namespace], int], parser: Parser, arguments: Sequence[str] | None
) -> int:
    """Parse and execute a command line, and return its exit status.

    A mistake of the user's is one line on stderr and status 2. Ctrl-C, SIGTERM and SIGHUP are 130,
    and 1 means that the reader of stdout has gone. Any other exception is a mistake in code, which
    is raised.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding has not
    parser.add_argument("--version", action="version", version=VERSION)
    with interruptible() as signals, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"note: {message}")
        try:
            try:
                return execute(parser.parse_args(arguments))
            finally:
                sys.stdout.flush()  # here, because at the very end an error would have no handler
        except KeyboardInterrupt:
            return 130  # a shell's for SIGINT: 128 and its number
        except Exception as error:
            drop_unwritten()
            if isinstance(error, BrokenPipeError):  # the reader has gone, as `| head` does
                return 1
            line = describe_mistake(error, parser)
            if line is not None:
                say(f"error: {line}")
                return 2
            if signals:  # a module that was being imported may have changed KeyboardInterrupt
                return 130
            raise


def describe_mistake(error: Exception, parser: Parser) -> str | None:
    """Return one line on a mistake of the user's or a lack of memory or disk; None for any other
    exception."""
    match error:
        case HubUnreachable():
            return f"{error}; without a network: python {parser.prog} {WITHOUT_NETWORK}"
        case UsageError() | CheckpointError() | NonFiniteLogits() | RanksError():
            return str(error)
        case OSError() if error.errno in DISK_IS_FULL:
            return str(error)
    if not is_refusal(error):
        return None
    line = f"there is no memory left: {first_line(error)}"
    if isinstance(error, OutOfMemory):  # it says what the memory was for
        line = str(error)
    return f"{line}; these lower it: {parser.less_memory}" if parser.less_memory else line


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in the block at Ctrl-C, SIGTERM and SIGHUP, and list these signals.
    A signal that is ignored, as under nohup or behind a script's &, stays so."""
    signals = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signals.append(number)
        if number == HANG_UP:  # one terminal may send several
            signal.signal(HANG_UP, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, HANG_UP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def writing(file: Path | str) -> Iterator[None]:
    """Raise UsageError if the system does not let the block write a file."""
    try:
        yield
    except BlockingIOError as error:
        raise UsageError(f"{file} is being written by another run: let it end first") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


@contextmanager
def reserved(file: Path) -> Iterator[None]:
    """Make a file's folder, and keep every other run from the file during the block. Raises
    UsageError."""
    with ExitStack() as stack:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(file))
        yield


def drop_unwritten() -> None:
    """Drop what a stream that has failed still holds. Python would write it at the very end, and
    complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            silence(stream)


def silence(stream: TextIO) -> None:
    """Send what a stream holds and gets to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
