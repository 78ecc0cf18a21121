"""The ranks: several processes of one command, started by torchrun, and their collectives.

Rank 0 runs the program. The other ranks are workers: they repeat rank 0's calls on their shards of
the target (engine/driver.py). They end when rank 0 ends, because that closes its connections.

    torchrun --nproc-per-node 2 dynatree.py --prompt "The ship sailed at dawn"

    with join_ranks() as ranks:  # None without torchrun
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
MESSAGE_BYTES = 4096  # size of a broadcast; enough for the call of a pass over 128 nodes
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Group = object  # torch.distributed's ProcessGroup; the module is imported only where ranks exist


class RanksError(Exception):
    """The ranks cannot connect, or cannot go on. The message is one line for the user."""


ONE_RANK_ERRORS = (CheckpointError, OutOfMemory, RanksError)  # may occur on one rank only


def is_launched() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_rank_0() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def has_valid_rank() -> bool:
    """Whether torchrun's variables are all set and valid."""
    rank, count, *where = [os.environ.get(name, "") for name in TORCHRUN_VARIABLES]
    are_numbers = rank.isdecimal() and count.isdecimal()
    return are_numbers and all(where) and int(rank) < int(count)


@dataclass
class Ranks:
    """All processes of the command, seen from one of them."""

    rank: int
    world_size: int
    local_rank: int  # rank among the processes on this machine
    group: Group  # of the gloo backend, on every device
    n_handles: int = 0  # number of models and caches that all ranks have made
    lock: threading.Lock = field(default_factory=threading.Lock)  # held during a call
    is_in_sync: bool = True  # False: within a call, or after one that did not end on all ranks

    def run_collective(self, collective: Callable, *arguments: object, **options: object) -> None:
        """Run a collective of torch.distributed. Raises RanksError if another rank has ended.

        torchrun then sends SIGTERM to the others. They ignore it, so that rank 0 can still print
        the text that it has generated.
        """
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            who = f"rank {1 - self.rank}" if self.world_size == 2 else "another rank"
            raise RanksError(f"{who} has ended; torchrun reports why") from error

    def broadcast(self, value: object) -> object:
        """Return rank 0's value on every rank. A short value takes one broadcast."""
        import torch.distributed as dist

        message = pack_message(value) if self.rank == 0 else b""
        first = bytes_tensor(message[:MESSAGE_BYTES], MESSAGE_BYTES)
        self.run_collective(dist.broadcast, first, src=0, group=self.group)
        received = first.numpy().tobytes()
        n_more = int.from_bytes(received[:8], "little") - MESSAGE_BYTES
        if n_more > 0:
            rest = bytes_tensor(message[MESSAGE_BYTES:], n_more)
            self.run_collective(dist.broadcast, rest, src=0, group=self.group)
            received += rest.numpy().tobytes()
        return pickle.loads(received[8:]) if self.rank else value

    @contextmanager
    def lock_call(self) -> Iterator[None]:
        """Hold the lock while the block broadcasts and runs one call, so that threads take turns.

        Raises RanksError if an earlier call has failed on rank 0, because the other ranks still
        wait inside that call.
        """
        with self.lock:
            if not self.is_in_sync:
                raise RanksError("the ranks are out of sync: an earlier call on rank 0 has failed")
            self.is_in_sync = False
            yield
            self.is_in_sync = True

    def new_handle(self) -> int:
        """Return rank 0's number for a new model or cache, which the broadcasts refer to it by."""
        self.n_handles += 1
        return self.n_handles

    def gather_objects(self, value: object) -> list:
        """Return every rank's value, by rank, on every rank."""
        import torch.distributed as dist

        found: list = [None] * self.world_size
        self.run_collective(dist.all_gather_object, found, value, group=self.group)
        return found

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raise an error that occurs on one rank on all ranks, at the end of the block."""
        local_error = None
        try:
            yield
        except ONE_RANK_ERRORS as error:
            local_error = error
        errors = self.gather_objects(local_error)
        self.is_in_sync = True
        if local_error:
            raise local_error
        for rank, error in enumerate(errors):
            if error:
                raise type(error)(f"rank {rank}: {error}")

    def local_device(self, device: torch.device) -> torch.device:
        """Return this rank's device of the given device's type. Raises RanksError if the machine
        has too few."""
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
            self.run_collective(dist.all_reduce, x, group=group)

        def all_gather(parts: list[Tensor], x: Tensor) -> None:
            self.run_collective(dist.all_gather, parts, x, group=group)

        return Shard(self.rank, self.world_size, all_reduce, all_gather, self.gather_objects)


def pack_message(value: object) -> bytes:
    """Return a message: its length in bytes as 8 bytes, then the pickled value."""
    content = pickle.dumps(value)
    return (8 + len(content)).to_bytes(8, "little") + content


def bytes_tensor(content: bytes, n: int) -> Tensor:
    """Return the content as uint8 [n], padded with zeros."""
    return torch.frombuffer(bytearray(content.ljust(n, b"\0")), dtype=torch.uint8)


@contextmanager
def join_ranks() -> Iterator[Ranks | None]:
    """Connect all processes of this command for the block; yield None if there is only one.

    Only rank 0 handles Ctrl-C, and the other ranks end when it ends. Raises RanksError.
    """
    if not is_launched():
        yield None
        return
    if not has_valid_rank():
        given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in TORCHRUN_VARIABLES)
        raise RanksError(f"{given}: not a valid rank; start the command with torchrun")
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=JOIN_TIMEOUT)
        group = dist.new_group(backend="gloo", timeout=PASS_TIMEOUT)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ranks = Ranks(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), group)
    except (RuntimeError, ValueError) as error:
        raise RanksError(f"the ranks cannot connect: {first_line(error)}") from error
    if rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield ranks
    finally:
        with suppress(RuntimeError):  # a failed device, which was reported before
            destroy_graphs()  # otherwise nccl waits for graphs that hold a collective
        with suppress(RuntimeError):  # another rank has ended before this one
            dist.destroy_process_group()
