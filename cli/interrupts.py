"""Ctrl-C, from a program's first line to its last.

As long as nothing is written, as in the second that importing torch takes, it ends the process.
Once a command line runs, the first raises KeyboardInterrupt where the work is; where what was
written is being summed up, which is short and must not be lost, it waits. Another one within a
second is the same, from a key held down or a shell that sends it twice; a later one ends the
process at once.

    with handling_interrupts():
        heed_termination(Ended)  # if SIGTERM, too, is to leave what was written
        with interrupts(raised=True):
            ...
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the exit status, a shell's for SIGINT: 128 and its number
SAME_S = 1.0  # seconds after the first in which others are no more than that


def end_quietly() -> None:
    """From here on Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as nohup and a script's & leave it
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


class CtrlC:
    """The handler of SIGINT while a command line runs, and of SIGTERM where that is heeded."""

    def __init__(self) -> None:
        self.came_at: float | None = None  # the first, by time.monotonic
        self.pending: Callable[[], BaseException] | None = None  # what it raises, and has not yet
        self.is_raising = False  # now
        self.at_termination: Callable[[], BaseException] = KeyboardInterrupt

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.came_at is None:
            self.came_at = now
            self.pending = KeyboardInterrupt
            if number == signal.SIGTERM:
                self.pending = self.at_termination
            self.deliver()
        elif now - self.came_at > SAME_S:
            os._exit(128 + number)

    def deliver(self) -> None:
        """Raise what the first stands for, if one has come and need not wait."""
        if self.pending and self.is_raising:
            error = self.pending()
            self.pending = None
            raise error


def heed_termination(error: Callable[[], BaseException] = KeyboardInterrupt) -> None:
    """Until the command line ends SIGTERM, as of torchrun or kill, is raised where Ctrl-C would be,
    as this error; by default it is what Ctrl-C is. Also where that is ignored: with nohup."""
    handler = handler_at_work()
    if not handler:
        handler = CtrlC()
        handler.is_raising = True
    handler.at_termination = error
    signal.signal(signal.SIGTERM, handler)


def handler_at_work() -> CtrlC | None:
    """What handles Ctrl-C, or if that is ignored SIGTERM alone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if isinstance(handler, CtrlC):
            return handler
    return None


@contextmanager
def handling_interrupts() -> Iterator[None]:
    """Handle Ctrl-C as this file says; it waits for the first place that lets it be raised."""
    before = signal.getsignal(signal.SIGINT)
    at_termination = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, CtrlC())
    try:
        yield
    finally:
        if isinstance(signal.getsignal(signal.SIGTERM), CtrlC):
            signal.signal(signal.SIGTERM, at_termination)
        if before is _end:  # all is written, and the interpreter, as it goes, must not be killed
            before = signal.SIG_IGN
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts(raised: bool) -> Iterator[None]:
    """Whether Ctrl-C is raised in here as KeyboardInterrupt, or waits until that is so again."""
    handler = handler_at_work()
    if not handler:  # both are ignored, or a caller handles them otherwise
        yield
        return
    before = handler.is_raising
    try:
        handler.is_raising = raised
        handler.deliver()
        yield
    finally:
        handler.is_raising = before
    handler.deliver()
