"""How a command line ends: one line for every mistake, and the exit status.

sys.exit(run_command_line(execute, parser, arguments))
"""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from engine.checkpoint import CheckpointError, first_line
from engine.hub import HubUnreachable
from engine.memory import OutOfMemory
from verify import NonFiniteLogits

WITHOUT_NETWORK = "--target models/tiny/target --draft models/tiny/draft ..."


class UsageError(Exception):
    """A request that cannot be carried out; the message is one line for the user."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and an exception, not a usage text and an exit."""

    less_memory = ""  # what lowers the memory that is needed

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists everything)")


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
    print(text, file=sys.stderr, flush=True)


def run_command_line(
    execute: Callable[[argparse.Namespace], int], parser: Parser, arguments: Sequence[str] | None
) -> int:
    """Parse and execute; a mistake is one line on stderr and status 2. Returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a character the terminal lacks is no reason to stop
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return execute(parser.parse_args(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stdout = None
        return 1
    except HubUnreachable as error:
        say(f"error: {error}; without a network: python {parser.prog} {WITHOUT_NETWORK}")
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        lower = f"; these lower it: {parser.less_memory}" if parser.less_memory else ""
        say(f"error: {first_line(error)}{lower}")
    except (UsageError, CheckpointError, NonFiniteLogits) as error:
        say(f"error: {error}")
    return 2
