"""A command line under torchrun: rank 0 carries it out, the others compute the target with it.

with on_ranks() as mail:  # None without torchrun
    ...
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from parallel.ranks import joined
from parallel.target import Mail, directing, follow


@contextmanager
def on_ranks() -> Iterator[Mail | None]:
    """What tells the other ranks, as long as the block runs; None if there are none.

    Every other rank does not come to the block: it follows, and then ends with status 0.
    """
    with joined(held_back) as ranks:
        if ranks is None:
            yield None
        elif ranks.index:
            follow(ranks)
            sys.exit(0)
        else:
            with directing(ranks) as mail:
                yield mail


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: what all ranks compute together they finish."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # it is ignored, or held back already
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
