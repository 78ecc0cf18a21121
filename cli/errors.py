"""How a command line ends: one line for every mistake, and the exit status.

sys.exit(run_command_line(execute, parser, arguments))
"""

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import NoReturn, TextIO

from cli.interrupts import INTERRUPTED, handling_interrupts, interrupts
from cli.start import MISTAKE, UNFORESEEN
from engine.checkpoint import CheckpointError, first_line
from engine.hub import HubUnreachable
from engine.memory import OutOfMemory, is_refusal
from parallel.ranks import RanksError, is_silent
from verify import NonFiniteLogits

WITHOUT_NETWORK = "--target models/tiny/target --draft models/tiny/draft ..."
READER_GONE = 1  # an exit status


class UsageError(Exception):
    """A request that cannot be carried out; the message is one line for the user."""


class OutputLost(OSError):
    """Standard output takes no more."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and an exception, not a usage text and an exit."""

    less_memory = ""  # what lowers the memory that is needed

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.register("type", None, possible)  # of every option that names no other type

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists everything)")

    def print_help(self, file: TextIO | None = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse's own hides a failure


def possible(word: str) -> str:
    """An option's value as it is given. Raises argparse.ArgumentTypeError if it is empty, which a
    variable that is not set makes it: that is not the same as no option; or has a null character,
    which only Python can pass on."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    if "\0" in word:
        raise argparse.ArgumentTypeError("has a null character")
    return word


def shown(text: str) -> str:
    """Foreign text on one line, for a terminal to show and never to obey.

    What is not printable is written as Python writes it: controls and escapes, the ends of lines,
    characters that turn the direction of writing, lone surrogates.
    """
    if text.isprintable():
        return text
    parts = []
    for character in text:
        if not character.isprintable():
            character = ascii(character)[1:-1]
        parts.append(character)
    return "".join(parts)


def say(line: str) -> None:
    """One line on stderr, whatever the names in it."""
    tell(shown(line))


def tell(text: str) -> None:
    """Text of our own making on stderr, as it is: a drawing, with its colours."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # a full device, a reader that has gone: the text itself comes all the same
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Drop what a stream that has failed still holds and gets; Python, too, would write it at the
    very end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def mend_streams() -> None:
    """Open what was closed before we began (`>&-`), and let no character be too much for either.

    Python leaves None there: what is printed to stdout would vanish without a word, and what is
    printed to stderr would appear in stdout.
    """
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # each write fails, as it ought to
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # python -u: of a write that a signal cuts short the rest would be lost
        sys.stdout = open(sys.stdout.fileno(), "w", encoding=sys.stdout.encoding, closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    wait_for_streams()


def wait_for_streams() -> None:
    """Let reads and writes wait, as they do unless another program on the same terminal or pipe has
    changed that for all: then there is no prompt yet, and half of what is written is lost."""
    for descriptor in range(3):
        try:
            os.set_blocking(descriptor, True)
        except (AttributeError, OSError):  # this system has no such call; it is closed
            continue


@contextmanager
def no_panic() -> Iterator[None]:
    """Let tokenizers raise ValueError where it panics, as libraries written in Rust do: what they
    raise then is no Exception, and they have printed it before, on several lines."""
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(str(error)) from error
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def is_panic(error: BaseException) -> bool:
    """Whether code in Rust gave up; the type cannot be imported, each library has its own."""
    return type(error).__name__ == "PanicException"


class Output:
    """Standard output, whose failures are told from those of any other file: OutputLost."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from error

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from error

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def run_command_line(
    execute: Callable[[argparse.Namespace], int], parser: Parser, arguments: Sequence[str] | None
) -> int:
    """Parse and execute; returns the exit status.

    Here, and nowhere else, every exception becomes one line on stderr: status 2 for a mistake, 70
    for what nobody foresaw. Ctrl-C is 130. --debug shows the traceback as well.
    """
    mend_streams()
    if is_silent() and "--debug" not in (arguments or sys.argv):  # rank 0 says it all
        silence(sys.stdout)
        silence(sys.stderr)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    is_debugging = False
    with handling_interrupts(), redirect_stdout(Output(sys.stdout)):
        try:
            with interrupts(raised=True):
                try:
                    args = parser.parse_args(arguments)
                    is_debugging = vars(args).pop("debug")
                    return execute(args)
                finally:
                    sys.stdout.flush()  # now, and not at the very end, where nothing can be said
        except KeyboardInterrupt:
            return INTERRUPTED
        except SystemExit:  # --help has been given
            raise
        except BaseException as error:  # a panic is no Exception
            if is_debugging:
                for line in "".join(traceback.format_exception(error)).splitlines():
                    say(line)
            return conclude(error, parser)


def refusal(error: BaseException) -> str:
    """What to say where memory was refused: our own words, or torch's after ours."""
    if isinstance(error, OutOfMemory):
        return str(error)
    return f"there is no memory left: {first_line(error)}"


def conclude(error: BaseException, parser: Parser) -> int:
    """Say in one line what went wrong. Returns the exit status."""
    if isinstance(error, OutputLost):
        silence(sys.stdout)
        if error.errno == errno.EPIPE:  # the reader has gone, as `| head` does
            return READER_GONE
    line, status = explain(error, parser)
    say(f"error: {line}")
    return status


def explain(error: BaseException, parser: Parser) -> tuple[str, int]:
    """What went wrong, in one line; and the exit status."""
    status = MISTAKE
    match error:
        case OutputLost():
            line = f"standard output cannot be written: {error.strerror}"
        case HubUnreachable():
            line = f"{error}; without a network: python {parser.prog} {WITHOUT_NETWORK}"
        case UsageError() | CheckpointError() | NonFiniteLogits() | RanksError():
            line = str(error)
        case _ if os.strerror(errno.EMFILE) in str(error):  # of the system, of torch
            line = f"{first_line(error)}; ulimit -n lets more be open"
        case _ if is_panic(error):
            line = f"the tokenizer's library gave up ({error}); is tokenizer.json damaged?"
        case _ if is_refusal(error):
            lower = f"; these lower it: {parser.less_memory}" if parser.less_memory else ""
            line = f"{refusal(error)}{lower}"
        case _:
            status = UNFORESEEN
            line = f"{type(error).__name__}: {error}; nobody foresaw this, --debug shows where"
    return line, status
