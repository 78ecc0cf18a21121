"""How a command line ends: one line for every mistake, and the exit status.

status = run_command_line(execute, parser, arguments)
"""

import argparse
import io
import os
import platform
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import torch

from engine.checkpoint import CheckpointError, first_line
from engine.files import locked
from engine.foreign import shown
from engine.hub import HubUnreachable
from engine.memory import OutOfMemory, is_refusal
from parallel.ranks import RanksError
from verify import NonFiniteLogits

VERSION = f"%(prog)s 0.1, torch {torch.__version__}, Python {platform.python_version()}"
HANG_UP = getattr(signal, "SIGHUP", signal.SIGTERM)  # which Windows has not
WITHOUT_NETWORK = "--target models/tiny/target --draft models/tiny/draft ..."


class UsageError(Exception):
    """A request that cannot be carried out; the message is one line for the user."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and an exception, not a usage text and an exit."""

    less_memory = ""  # what lowers the memory that is needed

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.register("type", None, not_empty)  # of every option that names no other type

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else args
        for word in words:
            if word.startswith("--") and word.endswith("=--") and word.count("=") == 1:
                self.error(f"{word}: -- is no value")  # Python 3.11 makes it an empty list
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists everything)")


def not_empty(word: str) -> str:
    """An option's value as it is given. Raises argparse.ArgumentTypeError if it is empty, which a
    variable that is not set makes it: that is not the same as no option."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    return word


def say(line: str) -> None:
    """One line on stderr, whatever the names in it."""
    tell(shown(line))


def tell(text: str) -> None:
    """Text of our own making on stderr, as it is: a drawing, with its colours. If stderr takes no
    more, as on a full disk or when its reader has gone, the work goes on without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def run_command_line(
    execute: Callable[[argparse.Namespace], int], parser: Parser, arguments: Sequence[str] | None
) -> int:
    """Parse and execute; returns the exit status.

    Here, and nowhere else, every exception becomes one line on stderr: status 2 for a mistake, 70
    for what nobody foresaw. Ctrl-C, SIGTERM and SIGHUP are 130. --debug also shows the traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding has not
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--version", action="version", version=VERSION)
    is_debugging = False
    with heeding_signals() as heard, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"note: {message}")
        try:
            try:
                args = parser.parse_args(arguments)
                is_debugging = vars(args).pop("debug")
                return execute(args)
            finally:
                sys.stdout.flush()  # now, and not at the very end, where nothing can be said
        except KeyboardInterrupt:
            return 130  # a shell's for SIGINT: 128 and its number
        except Exception as error:
            drop_unwritten()
            if isinstance(error, BrokenPipeError):  # the reader has gone, as `| head` does
                return 1
            if is_debugging:
                traceback.print_exception(error)
            line, status = explain(error, parser)
            if status == 70 and heard:  # Python modules that are being imported may change Ctrl-C
                return 130
            say(f"error: {line}")
            return status


@contextmanager
def heeding_signals() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at Ctrl-C, SIGTERM and SIGHUP, and list them; what is ignored, as
    under nohup or behind a script's &, stays so. Before and after, they end the process without a
    traceback."""
    heard = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        heard.append(number)
        if number == HANG_UP:  # one terminal may send several
            signal.signal(HANG_UP, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, HANG_UP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reserved(file: Path) -> Iterator[None]:
    """Keep a file from every other run, and make its folder. Raises UsageError at once."""
    with ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(file))
        except BlockingIOError as error:
            raise UsageError(f"{file} is being written by another run: let it end first") from error
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from error
        yield


def drop_unwritten() -> None:
    """Drop what a stream that has failed still holds: Python would write it at the very end, and
    complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            silence(stream)


def silence(stream: TextIO) -> None:
    """Drop what a stream holds and gets."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def explain(error: Exception, parser: Parser) -> tuple[str, int]:
    """What went wrong, in one line; and the exit status."""
    match error:
        case HubUnreachable():
            line = f"{error}; without a network: python {parser.prog} {WITHOUT_NETWORK}"
        case UsageError() | CheckpointError() | NonFiniteLogits() | RanksError():
            line = str(error)
        case _ if is_refusal(error):
            line = f"there is no memory left: {first_line(error)}"
            if isinstance(error, OutOfMemory):  # which says what it was for
                line = str(error)
            if parser.less_memory:
                line += f"; these lower it: {parser.less_memory}"
        case OSError():  # a full disk, too many open files
            line = str(error)
        case _:
            line = f"{type(error).__name__}: {error}; nobody foresaw this, --debug shows where"
            return line, 70  # EX_SOFTWARE of sysexits.h
    return line, 2
