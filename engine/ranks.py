"""One command in several processes, its ranks, as torchrun starts them.

Rank 0 runs the program. The other ranks compute their shards of its target when rank 0 says so
(engine/driver.py), and end when rank 0 ends, because a rank that has gone closes its connections.

    torchrun --nproc-per-node 2 dynatree.py --prompt "The ship sailed at dawn"

    with joined() as ranks:  # None without torchrun
        shard = ranks.shard(torch.device("cpu"))
        target = FastGPTNeoX.from_pretrained("models/tiny/target", shard=shard)
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
from engine.tensor_parallel import Shard

JOIN_TIMEOUT = timedelta(minutes=5)  # every machine has to import torch
PASS_TIMEOUT = timedelta(days=30)  # rank 0 may take any time between two passes
MESSAGE_BYTES = 4096  # of one broadcast: enough for a pass over a tree of 128 nodes
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun
Group = object  # of torch.distributed, which is imported only where there are ranks


class RanksError(Exception):
    """Several processes cannot be one command. The message is one line for the user."""


ONE_RANK_ERRORS = (CheckpointError, OutOfMemory, RanksError)  # that may happen on one rank alone


def is_launched() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_rank_0() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def has_valid_rank() -> bool:
    """Whether torchrun's variables are all there and valid."""
    rank, count, *where = [os.environ.get(name, "") for name in VARIABLES]
    are_numbers = rank.isdecimal() and count.isdecimal()
    return are_numbers and all(where) and int(rank) < int(count)


@dataclass
class Ranks:
    """All processes of the command, seen from one of them."""

    rank: int
    world_size: int
    local_rank: int  # among those on this machine
    group: Group  # of gloo, on every device
    n_objects: int = 0  # models and caches that all ranks have made
    lock: threading.Lock = field(default_factory=threading.Lock)  # held for one call at a time
    are_in_step: bool = True  # False: within a call, or after one that did not end on all ranks

    def run(self, collective: Callable, *arguments: object, **options: object) -> None:
        """Run a collective of torch.distributed. Raises RanksError if another rank has gone.

        torchrun then sends SIGTERM. It is ignored, so that rank 0 can print the text that it has.
        """
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            who = f"rank {1 - self.rank}" if self.world_size == 2 else "another rank"
            raise RanksError(f"{who} has gone; torchrun says how that one ended") from error

    def broadcast(self, value: object) -> object:
        """Return rank 0's value on every rank. A short value takes one broadcast."""
        import torch.distributed as dist

        message = pack_message(value) if self.rank == 0 else b""
        first = as_bytes(message[:MESSAGE_BYTES], MESSAGE_BYTES)
        self.run(dist.broadcast, first, src=0, group=self.group)
        received = first.numpy().tobytes()
        n_more = int.from_bytes(received[:8], "little") - MESSAGE_BYTES
        if n_more > 0:
            rest = as_bytes(message[MESSAGE_BYTES:], n_more)
            self.run(dist.broadcast, rest, src=0, group=self.group)
            received += rest.numpy().tobytes()
        return pickle.loads(received[8:]) if self.rank else value

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock for one call, which the block broadcasts and makes. Threads take turns.

        Raises RanksError if an earlier call did not end here: the other ranks wait inside it.
        """
        with self.lock:
            if not self.are_in_step:
                raise RanksError("the ranks are out of step: an earlier call on rank 0 has failed")
            self.are_in_step = False
            yield
            self.are_in_step = True

    def new_number(self) -> int:
        """Return rank 0's number for a new model or cache."""
        self.n_objects += 1
        return self.n_objects

    def gather_objects(self, value: object) -> list:
        """Return every rank's value, by rank, on every rank."""
        import torch.distributed as dist

        found: list = [None] * self.world_size
        self.run(dist.all_gather_object, found, value, group=self.group)
        return found

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Raise an error of one rank's block on all ranks, at the end of the block."""
        own = None
        try:
            yield
        except ONE_RANK_ERRORS as error:
            own = error
        errors = self.gather_objects(own)
        self.are_in_step = True
        if own:
            raise own
        for rank, error in enumerate(errors):
            if error:
                raise type(error)(f"rank {rank}: {error}")

    def own_device(self, device: torch.device) -> torch.device:
        """Return this rank's device of the same type. Raises RanksError if there is none."""
        if device.type != "cuda":
            return device
        n_cuda = torch.cuda.device_count()
        if self.local_rank >= n_cuda:
            raise RanksError(f"there are {n_cuda} CUDA devices, and each rank needs one of its own")
        return torch.device("cuda", self.local_rank)

    def shard(self, device: torch.device) -> Shard:
        """Return this rank's shard of a model on its device. All ranks must call it."""
        import torch.distributed as dist

        group = self.group
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl")

        def all_reduce(x: Tensor) -> None:
            self.run(dist.all_reduce, x, group=group)

        def all_gather(parts: list[Tensor], x: Tensor) -> None:
            self.run(dist.all_gather, parts, x, group=group)

        return Shard(self.rank, self.world_size, all_reduce, all_gather, self.gather_objects)


def pack_message(value: object) -> bytes:
    """Return a pickled value after the length of the whole message in 8 bytes."""
    content = pickle.dumps(value)
    return (8 + len(content)).to_bytes(8, "little") + content


def as_bytes(content: bytes, n: int) -> Tensor:
    """Return [n] uint8 with this content, and zeros after it."""
    return torch.frombuffer(bytearray(content.ljust(n, b"\0")), dtype=torch.uint8)


@contextmanager
def joined() -> Iterator[Ranks | None]:
    """Join all processes of this command for the block, or give None if there is only one.

    Ctrl-C is handled by rank 0; the other ranks end when it does. Raises RanksError.
    """
    if not is_launched():
        yield None
        return
    if not has_valid_rank():
        given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
        raise RanksError(f"{given}: not a valid rank; start the command with torchrun")
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=JOIN_TIMEOUT)
        group = dist.new_group(backend="gloo", timeout=PASS_TIMEOUT)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ranks = Ranks(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), group)
    except (RuntimeError, ValueError) as error:
        raise RanksError(f"the ranks do not find each other: {first_line(error)}") from error
    if rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield ranks
    finally:
        with suppress(RuntimeError):  # of a device that has failed, which was reported
            destroy_graphs()  # nccl waits for graphs that hold a collective
        with suppress(RuntimeError):  # of a rank that has ended before this one
            dist.destroy_process_group()
