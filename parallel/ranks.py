"""One command in several processes, its ranks, as torchrun starts them.

Rank 0 runs the program; the others compute their share of its target when it says so, and end when
it does: a rank that has gone closes its connections.

    torchrun --nproc-per-node 2 dynatree.py --prompt "The ship sailed at dawn"

    with joined() as ranks:  # under torchrun; else None
        share = ranks.share(torch.device("cpu"))
        target = FastGPTNeoX.from_pretrained("models/tiny/target", share=share)
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from engine.checkpoint import CheckpointError, first_line
from engine.cuda_graphs import destroy_graphs
from engine.memory import OutOfMemory
from engine.shares import Share

JOINING = timedelta(minutes=5)  # to import torch, on every machine
NO_HURRY = timedelta(days=30)  # rank 0 may take as long as it likes between two passes
LETTER = 4096  # bytes of a broadcast: a pass over a tree of 128 nodes
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun
Group = object  # torch.distributed is imported where there are ranks


class RanksError(Exception):
    """Several processes cannot be one command; the message is one line for the user."""


ALONE = (CheckpointError, OutOfMemory, RanksError)  # what may go wrong on one rank alone


def is_launched() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_first() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def is_placed() -> bool:
    """Whether all is there that torchrun gives, and the numbers can be."""
    rank, count, *where = [os.environ.get(name, "") for name in VARIABLES]
    are_numbers = rank.isdecimal() and count.isdecimal()
    return are_numbers and all(where) and int(rank) < int(count)


@dataclass
class Ranks:
    """All processes of the command, seen from one of them."""

    index: int  # this one's rank
    count: int
    local_index: int  # among those on this machine
    group: Group  # of gloo, whatever the device
    n_objects: int = 0  # models and caches that all have made
    lock: threading.Lock = field(default_factory=threading.Lock)  # held for one call at a time
    are_in_step: bool = True  # False: within a call, or after one that did not end on all ranks

    def together(self, collective: Callable, *arguments: object, **options: object) -> None:
        """A collective of torch.distributed. Raises RanksError if another rank has gone; torchrun
        ends this one next, and what there is of a text is to be kept first."""
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            who = f"rank {1 - self.index}" if self.count == 2 else "another rank"
            raise RanksError(f"{who} has gone; torchrun says how that one ended") from error

    def tell(self, value: object) -> object:
        """Rank 0's value on every rank, in one broadcast if it is short."""
        import torch.distributed as dist

        letter = write_letter(value) if self.index == 0 else b""
        first = as_bytes(letter[:LETTER], LETTER)
        self.together(dist.broadcast, first, src=0, group=self.group)
        heard = first.numpy().tobytes()
        n_more = int.from_bytes(heard[:8], "little") - LETTER
        if n_more > 0:
            rest = as_bytes(letter[LETTER:], n_more)
            self.together(dist.broadcast, rest, src=0, group=self.group)
            heard += rest.numpy().tobytes()
        return pickle.loads(heard[8:]) if self.index else value

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A call on all ranks, which the block tells and makes; threads take turns.

        Raises RanksError if an earlier call did not end here as on the others, who wait in it.
        """
        with self.lock:
            if not self.are_in_step:
                raise RanksError("the ranks are out of step: an earlier call on rank 0 has failed")
            self.are_in_step = False
            yield
            self.are_in_step = True

    def new_number(self) -> int:
        """Return rank 0's number for a new object."""
        self.n_objects += 1
        return self.n_objects

    def gather_objects(self, value: object) -> list:
        """What every rank gives here, by rank, on every rank."""
        import torch.distributed as dist

        found: list = [None] * self.count
        self.together(dist.all_gather_object, found, value, group=self.group)
        return found

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Where something may go wrong on one rank alone: at the end of the block it is raised on
        all, the others' with the rank it happened on."""
        own = None
        try:
            yield
        except ALONE as error:
            own = error
        errors = self.gather_objects(own)
        self.are_in_step = True
        if own:
            raise own
        for index, error in enumerate(errors):
            if error:
                raise type(error)(f"rank {index}: {error}")

    def own_device(self, device: torch.device) -> torch.device:
        """This rank's, of the same kind. Raises RanksError if there is none."""
        if device.type != "cuda":
            return device
        n_cuda = torch.cuda.device_count()
        if self.local_index >= n_cuda:
            raise RanksError(f"there are {n_cuda} CUDA devices, and each rank needs one of its own")
        return torch.device("cuda", self.local_index)

    def share(self, device: torch.device) -> Share:
        """What this rank has of a model on its device; all ranks call it at the same time."""
        import torch.distributed as dist

        group = self.group
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl")

        def reduce(x: Tensor) -> None:
            self.together(dist.all_reduce, x, group=group)

        def collect(parts: list[Tensor], x: Tensor) -> None:
            self.together(dist.all_gather, parts, x, group=group)

        return Share(self.index, self.count, reduce, collect, self.gather_objects)


def write_letter(value: object) -> bytes:
    """A value, behind the length of all in 8 bytes."""
    content = pickle.dumps(value)
    return (8 + len(content)).to_bytes(8, "little") + content


def as_bytes(content: bytes, n: int) -> Tensor:
    """[n] uint8: these, and zeros after them."""
    return torch.frombuffer(bytearray(content.ljust(n, b"\0")), dtype=torch.uint8)


@contextmanager
def joined() -> Iterator[Ranks | None]:
    """All processes of this command, as long as the block runs; None if this is the only one.

    Ctrl-C is for rank 0, after which all others end. Raises RanksError.
    """
    if not is_launched():
        yield None
        return
    if not is_placed():
        given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
        raise RanksError(f"{given} is no place among several processes: start them with torchrun")
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=JOINING)
        group = dist.new_group(backend="gloo", timeout=NO_HURRY)
        index, count = dist.get_rank(), dist.get_world_size()
        ranks = Ranks(index, count, int(os.environ.get("LOCAL_RANK", index)), group)
    except (RuntimeError, ValueError) as error:
        raise RanksError(f"the ranks do not find each other: {first_line(error)}") from error
    if index:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield ranks
    finally:
        with suppress(RuntimeError):  # of a device that has failed, which was said
            destroy_graphs()  # nccl waits for every one that has a collective in it
        with suppress(RuntimeError):  # of a rank that has ended before this one
            dist.destroy_process_group()
