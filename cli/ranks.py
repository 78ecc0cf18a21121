"""A command line under torchrun: rank 0 carries it out, the others compute the target with it.

with on_ranks() as mail:  # None without torchrun
    ...
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from cli.interrupts import interrupts
from parallel.ranks import joined
from parallel.target import Mail, directing, follow


@contextmanager
def on_ranks() -> Iterator[Mail | None]:
    """What tells the other ranks, as long as the block runs; None if there are none.

    Every other rank does not come to the block: it follows, and then ends with status 0.
    """
    with joined(partial(interrupts, raised=False)) as ranks:
        if ranks is None:
            yield None
        elif ranks.index:
            follow(ranks)
            sys.exit(0)
        else:
            with directing(ranks) as mail:
                yield mail
