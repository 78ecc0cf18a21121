"""A command line under torchrun: rank 0 carries it out, the others compute the target with it.

def execute(args):
    return on_ranks(write, args)  # write(args, mail), mail None without torchrun
"""

import argparse
from collections.abc import Callable
from functools import partial

from cli.interrupts import interrupts
from parallel.ranks import joined
from parallel.target import Mail, directing, follow


def on_ranks(
    execute: Callable[[argparse.Namespace, Mail | None], int], args: argparse.Namespace
) -> int:
    """Carry out a command line, once parsed. Returns the exit status."""
    with joined(partial(interrupts, raised=False)) as ranks:
        if ranks is None:
            return execute(args, None)
        if ranks.index:
            follow(ranks)
            return 0
        with directing(ranks) as mail:
            return execute(args, mail)
