"""Errors of a command line: one line per user mistake, the exit status, and Ctrl-C.

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
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import torch

from cli.files import locked
from engine.checkpoint import CheckpointError, HubUnreachable, first_line, printable
from engine.memory import OutOfMemory, is_out_of_memory
from engine.ranks import RanksError
from verify import NonFiniteLogits

VERSION = f"%(prog)s 0.1, torch {torch.__version__}, Python {platform.python_version()}"
HANG_UP = getattr(signal, "SIGHUP", signal.SIGTERM)  # which Windows lacks
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
WITHOUT_NETWORK = "--target models/tiny/target --draft models/tiny/draft ..."


class UsageError(Exception):
    """A request that cannot be carried out. The message is one line for the user."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of printing its usage and exiting."""

    less_memory = ""  # options that lower the memory that is needed
    repeatable: Sequence[str] = ()  # options with a value that may be given several times
    renamed_options: Mapping[str, str] = {}  # former name -> present name

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.register("type", None, not_empty)  # for options without a type

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else args
        self.require_no_repeats(words)
        for word in words:
            if re.fullmatch("--[^=]+=--", word):
                self.error(f"{word}: -- is no value")  # Python 3.11 makes it an empty list
            option = word.partition("=")[0]
            if option in self.renamed_options:
                self.error(f"{option} is now called {self.renamed_options[option]}")
        return super().parse_args(words, namespace)

    def require_no_repeats(self, words: Sequence[str]) -> None:
        """Raise UsageError for two values of an option, of which argparse would use the last."""
        options = [word.partition("=")[0] for word in words]
        for option in options:
            action = self._option_string_actions.get(option)
            takes_value = action is not None and action.nargs != 0
            if takes_value and option not in self.repeatable and options.count(option) > 1:
                self.error(f"{option} is given {options.count(option)} times, it takes one value")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def not_empty(word: str) -> str:
    """Return an option's value. Raises argparse.ArgumentTypeError if it is empty, for example from
    an unset shell variable."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    return word


def print_line(line: str) -> None:
    """Print one line on stderr, without terminal control characters."""
    write_stderr(printable(line))


def write_stderr(text: str) -> None:
    """Print text on stderr unchanged, such as a coloured drawing. If stderr fails, for example on a
    full disk, later output to it is dropped and the program continues."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def run_command_line(
    execute: Callable[[argparse.Namespace], int], parser: Parser, arguments: Sequence[str] | None
) -> int:
    """Parse and execute a command line, and return its exit status.

    A user mistake prints one line on stderr and gives status 2. Ctrl-C, SIGTERM and SIGHUP give
    130. A closed stdout gives 1. Any other exception is a mistake in code and is raised.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the encoding lacks
    parser.add_argument("--version", action="version", version=VERSION, help=argparse.SUPPRESS)
    with interruptible() as signals, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print_line(f"note: {message}")
        try:
            try:
                return execute(parser.parse_args(arguments))
            finally:
                sys.stdout.flush()  # at interpreter exit an error would have no handler
        except KeyboardInterrupt:
            return 130  # the shell's status of SIGINT: 128 + 2
        except Exception as error:
            discard_unwritten()
            if isinstance(error, BrokenPipeError):  # for example after `| head`
                return 1
            line = describe_mistake(error, parser)
            if line is not None:
                print_line(f"error: {line}")
                return 2
            if signals:  # an import may have replaced KeyboardInterrupt by its own error
                return 130
            raise


def describe_mistake(error: Exception, parser: Parser) -> str | None:
    """Return one line for a user mistake or for a lack of memory or disk space; None for any other
    exception."""
    match error:
        case HubUnreachable():
            return f"{error}; without a network: python {parser.prog} {WITHOUT_NETWORK}"
        case UsageError() | CheckpointError() | NonFiniteLogits() | RanksError():
            return str(error)
        case OSError() if error.errno in DISK_IS_FULL:
            return str(error)
    if not is_out_of_memory(error):
        return None
    line = f"out of memory: {first_line(error)}"
    if isinstance(error, OutOfMemory):  # its message says what the memory was for
        line = str(error)
    return f"{line}; these lower it: {parser.less_memory}" if parser.less_memory else line


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in the block at Ctrl-C, SIGTERM and SIGHUP. Yields the list of these
    signals. A signal that is already ignored, for example under nohup, stays ignored. In a thread
    other than the main one, where Python sets no handlers, all of them stay as they are."""
    signals = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signals.append(number)
        if number == HANG_UP:  # one terminal may send several
            signal.signal(HANG_UP, signal.SIG_IGN)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, HANG_UP) if is_main else ()
    before = {n: signal.getsignal(n) for n in numbers}
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
    """Raise UsageError if the block fails to write a file."""
    try:
        yield
    except BlockingIOError as error:
        raise UsageError(f"{file} is being written by another run; wait for its end") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


@contextmanager
def reserved(file: Path) -> Iterator[None]:
    """Make a file's folder, and lock the file during the block. Raises UsageError."""
    with ExitStack() as stack:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(file))
        yield


def discard_unwritten() -> None:
    """Discard the buffers of failed streams, which Python would try to flush again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            silence(stream)


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
