"""The ranks: several processes of one command, started by torchrun, and their collectives.

Every rank runs the whole program. With one prompt, seed and draft model, all ranks grow the same
trees. Only the target's layers are split (engine/tensor_parallel.py). Values that may differ
between processes come from rank 0: the prompt, a results file, and the times of methods/costs.py.
Only rank 0 prints and writes files.

    torchrun --nproc-per-node 2 -m dynatree_lab --prompt "She opened the door"

    def program() -> int:
        print(from_rank_0(os.getcwd))
        return 0

    status = run_on_ranks(program)
"""

import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dynatree_lab.engine.cuda_graphs import destroy_graphs

TIMEOUT = timedelta(days=30)  # rank 0 may take any time, for example while its reader pauses
RANK_0_TIMEOUT = timedelta(seconds=5)  # within it, rank 0 ends too if it has a rank's error
RANK_0_ENDED = "rank 0 has ended"  # key in the store
RANK_ENDED = "another rank has ended; torchrun reports why"
T = TypeVar("T")


class RanksError(Exception):
    """The ranks cannot go on. The message is one line for the user."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes of this command. Raises RanksError if the variables that
    torchrun sets are not all there, for example because one was left from another program."""
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if n > 1 and "RANK" not in os.environ:
        raise RanksError(
            f"WORLD_SIZE is {n}, but RANK is not set; use torchrun or unset WORLD_SIZE"
        )
    return n


def run_on_ranks(program: Callable[[], int]) -> int:
    """Run a program on every rank, and return its exit status."""
    if "RANK" not in os.environ or world_size() == 1:
        return program()
    store = join()
    try:
        return run_silently(program, store) if rank() else run_on_rank_0(program, store)
    finally:
        with suppress(RuntimeError):  # a device has failed, or another rank has ended before
            destroy_graphs()  # otherwise nccl waits for graphs that hold a collective
            dist.destroy_process_group()


def join() -> "dist.Store":
    """Connect the ranks. Return the store that they share."""
    store, number, count = next(dist.rendezvous("env://", timeout=TIMEOUT))
    place = {"store": store, "rank": number, "world_size": count}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, **place)
    return store


def run_on_rank_0(program: Callable[[], int], store: "dist.Store") -> int:
    """Run a program, then tell the other ranks that it has ended, maybe by an error."""
    try:
        return program()
    finally:
        with suppress(RuntimeError):
            store.set(RANK_0_ENDED, "")


def run_silently(program: Callable[[], int], store: "dist.Store") -> int:
    """Run a program on another rank. Print nothing, except for an error that rank 0 does not have.

    Ctrl-C goes to all ranks, and only rank 0 handles it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err):
        try:
            status = program()
        except Exception as error:  # a mistake in code; rank 0 prints its traceback
            status, line = 70, str(error).partition("\n")[0]
            print(f"error: {type(error).__name__}: {line}", file=err)
    errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    if not errors or errors[-1].endswith(RANK_ENDED):
        return status
    try:
        store.wait([RANK_0_ENDED], RANK_0_TIMEOUT)
    except dist.DistStoreError:
        print(errors[-1].replace("error: ", f"error: rank {rank()}: ", 1), file=sys.stderr)
    except dist.DistNetworkError:
        pass  # the store has ended, so rank 0 has too
    return status


def run_collective(collective: Callable, *arguments: object, **options: object) -> None:
    """Run a collective of torch.distributed. Raises RanksError if another rank has ended.

    torchrun then sends SIGTERM to the others. They ignore it, so that rank 0 can still print the
    text that it has generated.
    """
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RanksError(RANK_ENDED) from error


def from_rank_0(read: Callable[..., T], *arguments: object) -> T:
    """Return on every rank what a function returns on rank 0. Only rank 0 calls it."""
    if world_size() == 1:
        return read(*arguments)
    values = [None if rank() else read(*arguments)]
    run_collective(dist.broadcast_object_list, values)
    return values[0]


def gather(value: T) -> list[T]:
    """Return every rank's value, by rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    run_collective(dist.all_gather_object, values, value)
    return values
