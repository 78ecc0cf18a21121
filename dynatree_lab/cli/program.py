"""The frame of every program: its parser, one line per user mistake, the exit status, Ctrl-C.

status = run_command_line(execute, parser, arguments)
"""

import argparse
import errno
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from dynatree_lab import __version__
from dynatree_lab.cli.load import load_files
from dynatree_lab.engine.checkpoint import CheckpointError, first_line
from dynatree_lab.engine.memory import OutOfMemory, is_out_of_memory
from dynatree_lab.engine.ranks import RanksError
from dynatree_lab.errors import UsageError
from dynatree_lab.replay.texts import ReplayError
from gpt_neox import NonFiniteLogits

COMMANDS = ("dynatree-lab", "dynatree-bench")  # of pyproject.toml
# Of a closed pipe and of a full disk. Other files raise UsageError (errors.writing)
STDOUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
USER_MISTAKES = (UsageError, CheckpointError, ReplayError, NonFiniteLogits, RanksError)
VERSION = f"%(prog)s {__version__}, torch {torch.__version__}, Python {platform.python_version()}"


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of printing its usage and exiting."""

    less_memory = ""  # options that lower the memory that is needed
    repeatable: Sequence[str] = ()  # options with a value that may be given several times

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.register("type", None, not_empty)  # for options without a type

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else list(map(str, args))
        self.require_no_repeats(words)
        if "--load" in self._option_string_actions:
            load_files(words)  # first, because other options may name their methods
        return super().parse_args(words, namespace)

    def require_no_repeats(self, words: Sequence[str]) -> None:
        """Raise UsageError for two values of an option, of which argparse would use the last."""
        options = [word.partition("=")[0] for word in words]
        for option in options:
            action = self._option_string_actions.get(option)
            takes_value = action is not None and action.nargs != 0
            if takes_value and option not in self.repeatable and options.count(option) > 1:
                self.error(f"{option} is given {options.count(option)} times, it takes one value")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # after --help, as in run_command_line
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def command_name(module: str) -> str:
    """Return how the program was started: by its installed command, or as a module."""
    name = Path(sys.argv[0]).name
    return name if name in COMMANDS else f"python -m {module}"


def not_empty(word: str) -> str:
    """Return an option's value. Raises argparse.ArgumentTypeError if it is empty, for example from
    an unset shell variable."""
    if not word:
        raise argparse.ArgumentTypeError("is empty")
    return word


def print_line(line: str) -> None:
    """Print one line on stderr."""
    print(line, file=sys.stderr, flush=True)


def run_command_line(
    execute: Callable[[argparse.Namespace], int], parser: Parser, arguments: Sequence[str] | None
) -> int:
    """Parse and execute a command line, and return its exit status.

    A user mistake or a full disk under stdout prints one line on stderr and gives status 2. Ctrl-C
    and SIGTERM give 130. A closed stdout gives 1. Any other exception is a mistake in code and is
    raised.
    """
    parser.add_argument("--version", action="version", version=VERSION, help=argparse.SUPPRESS)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print_line(f"note: {message}")
        try:
            status = execute(parser.parse_args(arguments))
            sys.stdout.flush()  # here a full disk is still reported
            return status
        except KeyboardInterrupt:
            return 130  # the shell's status of SIGINT: 128 + 2
        except Exception as error:
            if isinstance(error, OSError) and error.errno in STDOUT_ERRORS:
                return end_stdout(error)
            return report_mistake(error, parser)


def end_stdout(error: OSError) -> int:
    """Return the exit status after stdout could not be written. Prints a line unless its reader has
    ended, for example `| head`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)  # for what Python still writes at its end
    os.dup2(nowhere, sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 1
    print_line(f"error: stdout cannot be written: {error.strerror}")
    return 2


def report_mistake(error: Exception, parser: Parser, where: str = "") -> int:
    """Print one line for a user mistake or a lack of memory, and return status 2. Raise any other
    exception again. where: the start of the line."""
    if isinstance(error, USER_MISTAKES):
        line = str(error)
    elif is_out_of_memory(error):
        # The message of OutOfMemory says what the memory was for
        what = "" if isinstance(error, OutOfMemory) else "out of memory: "
        line = f"{what}{first_line(error)}; these lower it: {parser.less_memory}"
    else:
        raise error
    print_line(f"error: {where}{line}")
    return 2
