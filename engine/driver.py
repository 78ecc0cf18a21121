"""Tensor parallelism of the target: rank 0 drives, and the workers repeat its calls.

Only rank 0 runs the program. Its target is a Driver, which has the methods of a FastGPTNeoX. The
Driver broadcasts each call and then runs it on rank 0's own shard of the model. A worker receives
the call, runs it on its shard, and waits for the next one.

    with join_ranks() as ranks:  # under torchrun
        if ranks.rank:
            run_worker(ranks)
        else:
            target = Driver.load(ranks, "models/tiny/target", torch.device("cpu"), torch.float32)

An iteration makes two calls, a pass and its commit, so it takes two broadcasts, and a third one if
the call does not fit into one (ranks.MESSAGE_BYTES).

Shapes: n rows of a mask, m slots that it covers.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

import numpy
import torch
from torch import Tensor

from engine.cache import FastCache, find_reusable
from engine.checkpoint import first_line
from engine.model import FastGPTNeoX
from engine.passes import PassConfig
from engine.ranks import ONE_RANK_ERRORS, Ranks, RanksError, has_valid_rank, is_rank_0, join_ranks

# Every rank must run these methods of a model or a cache, because they run passes, change a cache's
# length or allocate memory
BROADCAST_METHODS = {"new_cache", "prefill", "forward", "hidden", "free_reusable"}  # of a model
BROADCAST_METHODS |= {"advance", "rewind", "commit", "capture", "close"}  # of a cache
ALLOCATING_METHODS = {"new_cache", "capture"}  # they may run out of memory on one rank only


class Driver:
    """Rank 0's model or cache. Each worker has its own under the same handle."""

    def __init__(self, local: FastGPTNeoX | FastCache, ranks: Ranks, handle: int):
        self.local, self.ranks, self.handle = local, ranks, handle

    @classmethod
    def load(
        cls, ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
    ) -> "Driver":
        """Load each rank's shard of a model. Raises the errors of FastGPTNeoX.from_pretrained, also
        if they occur on another rank."""
        with ranks.lock_call():
            handle = ranks.new_handle()
            ranks.broadcast((handle, "load", None, (name_or_path, device, dtype)))
            return cls(load_shard(ranks, name_or_path, device, dtype), ranks, handle)

    def __getattr__(self, name: str) -> object:
        if name == "local":  # copy.copy looks up attributes before it sets them
            raise AttributeError(name)
        if name in BROADCAST_METHODS:
            return partial(self.call, name)
        return getattr(self.local, name)

    def new_cache(self, capacity: int, config: PassConfig | None = None) -> "Driver":
        """Make a cache on all ranks. Rank 0 decides for all of them whether memory is reused."""
        if find_reusable(self.local, capacity, config) is None:
            self.call("free_reusable")
        return self.call("new_cache", capacity, config)

    def capture(self, shortest: int) -> None:
        """Capture the passes over a cache on all ranks. On a CPU, do nothing."""
        if self.local.model.has_fixed_shapes:
            self.call("capture", shortest)

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, kind: type | None = None, *error: object) -> None:
        """Close the cache on all ranks, or only on rank 0 if the ranks are out of sync."""
        try:
            self.call("close")
        except RanksError:
            self.local.close()
            if kind is None or kind is GeneratorExit:  # otherwise the block has raised an error
                raise

    def call(self, name: str, *arguments: object) -> object:
        """Broadcast a call, and run it on rank 0. Returns a new cache as a Driver."""
        with self.ranks.lock_call():
            handle = self.ranks.new_handle() if name == "new_cache" else self.handle
            self.ranks.broadcast((handle, name, self.handle, tuple(map(pack_argument, arguments))))
            values = [each.local if isinstance(each, Driver) else each for each in arguments]
            result = run_call(self.ranks, self.local, name, values)
            return Driver(result, self.ranks, handle) if name == "new_cache" else result


def run_call(ranks: Ranks, local: FastGPTNeoX | FastCache, name: str, values: list) -> object:
    """Call a method of this rank's model or cache. If memory is short on one rank, raise its error
    on all ranks."""
    if name not in ALLOCATING_METHODS:
        return getattr(local, name)(*values)
    with ranks.raise_on_all_ranks():
        return getattr(local, name)(*values)


@torch.inference_mode()
def run_worker(ranks: Ranks) -> None:
    """Repeat rank 0's calls until rank 0 ends."""
    objects: dict[int, FastGPTNeoX | FastCache] = {}  # by the handles of their Drivers
    while True:
        try:
            handle, name, owner, arguments = ranks.broadcast(None)
        except RanksError:
            return
        ranks.is_in_sync = False
        try:
            if name == "load":
                objects[handle] = load_shard(ranks, *arguments)
                continue
            values = [unpack_argument(each, objects) for each in arguments]
            result = run_call(ranks, objects[owner], name, values)
            if name == "new_cache":
                objects[handle] = result
            elif name == "close":
                del objects[owner]
        except ONE_RANK_ERRORS:
            if not ranks.is_in_sync:
                raise  # only on this rank; rank 0 notices when this process has ended
            # Otherwise all ranks have raised the error, and rank 0 reports it


def pack_argument(value: object) -> object:
    """Return an argument as it is broadcast: a Driver as its handle, ids as a list, a mask as
    bits."""
    if isinstance(value, Driver):
        return "driver", value.handle
    if not isinstance(value, Tensor):
        return value
    if value.dtype != torch.bool:
        return "ids", value.tolist()
    return "mask", (*value.shape, numpy.packbits(value.numpy()).tobytes())


def unpack_argument(value: object, objects: dict[int, FastGPTNeoX | FastCache]) -> object:
    """Return the value of an argument on a worker. objects: the worker's, by handle."""
    match value:
        case "driver", handle:
            return objects[handle]
        case "ids", ids:
            return torch.tensor(ids, dtype=torch.int64)
        case "mask", (n, m, content):
            bits = numpy.unpackbits(numpy.frombuffer(content, numpy.uint8), count=n * m)
            return torch.from_numpy(bits.reshape(n, m).astype(bool))
    return value


def load_shard(
    ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
) -> FastGPTNeoX:
    """Load this rank's shard of a model. All ranks must call it."""
    with ranks.raise_on_all_ranks():
        device = ranks.local_device(device)
    shard = ranks.shard(device)
    with ranks.raise_on_all_ranks():
        return FastGPTNeoX.from_pretrained(name_or_path, device, dtype, shard)


def run_on_ranks(program: Callable[[Ranks | None], int]) -> int:
    """Run a program on rank 0, and workers on the other ranks. Returns the exit status.

    The program gets the ranks, or None if this is the only process.
    """
    try:
        with join_ranks() as ranks:
            if not (ranks and ranks.rank):
                return program(ranks)
            run_worker(ranks)
            return 0
    except RanksError as error:  # the ranks could not connect, or a rank has ended
        if is_rank_0() or not has_valid_rank():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if is_rank_0():  # the program's own error
            raise
        line = f"error: rank {os.environ['RANK']}: {type(error).__name__}: {first_line(error)}"
        print(line, file=sys.stderr)
        return 70
