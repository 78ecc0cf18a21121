"""A target that several ranks compute: rank 0 drives, and the workers repeat its calls.

Only rank 0 runs the program. To the program, the other ranks are part of one target, the Driver. It
broadcasts each call before it makes it. A worker receives a call, makes it with its own shard of
the model, and waits for the next.

    with joined() as ranks:  # under torchrun
        if ranks.rank:
            run_worker(ranks)
        else:
            target = Driver.load(ranks, "models/tiny/target", torch.device("cpu"), torch.float32)

An iteration makes two calls, a pass and its commit, so it takes two broadcasts.

Shapes: n rows, m slots of a mask.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

import numpy
import torch
from torch import Tensor

from engine.cache import FastCache, find_kept
from engine.checkpoint import first_line
from engine.model import FastGPTNeoX
from engine.ranks import ONE_RANK_ERRORS, Ranks, RanksError, has_valid_rank, is_rank_0, joined

# Methods of a model and of a cache that every rank must call: a pass or a length depends on them
OF_MODEL = {"new_cache", "prefill", "forward", "hidden", "drop_kept"}
OF_CACHE = {"advance", "rewind", "commit", "capture", "close"}
AGREED = {"new_cache", "capture"}  # those for which one rank alone may have no memory


class Driver:
    """Rank 0's model or cache. Each worker has its own under the same number."""

    def __init__(self, own: FastGPTNeoX | FastCache, ranks: Ranks, number: int):
        self.own, self.ranks, self.number = own, ranks, number

    @classmethod
    def load(
        cls, ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
    ) -> "Driver":
        """Load a model on all ranks, each its shard. Raises as FastGPTNeoX.from_pretrained does, on
        whichever rank the error is."""
        with ranks.turn():
            number = ranks.new_number()
            ranks.broadcast((number, "load", None, (name_or_path, device, dtype)))
            return cls(load_shard(ranks, name_or_path, device, dtype), ranks, number)

    def __getattr__(self, name: str) -> object:
        if name == "own":  # of a copy that has nothing yet
            raise AttributeError(name)
        if name in OF_MODEL | OF_CACHE:
            return partial(self.call, name)
        return getattr(self.own, name)  # what is only read

    def new_cache(self, capacity: int, *config: object) -> "Driver":
        """Make a cache on all ranks. Rank 0 decides for all whether kept memory is used again."""
        if find_kept(self.own, capacity) is None:
            self.call("drop_kept")
        return self.call("new_cache", capacity, *config)

    def capture(self, shortest: int) -> None:
        """On CUDA, capture the passes over a cache on all ranks."""
        if self.own.model.has_fixed_shapes:
            self.call("capture", shortest)

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, kind: type | None = None, *error: object) -> None:
        """Close the cache on all ranks, or if they are out of step, on rank 0."""
        try:
            self.call("close")
        except RanksError:
            self.own.close()
            if kind is None or kind is GeneratorExit:  # else an earlier error is on its way
                raise

    def call(self, name: str, *arguments: object) -> object:
        """Broadcast a call, and make it here. A new cache becomes a Driver too."""
        with self.ranks.turn():
            number = self.ranks.new_number() if name == "new_cache" else self.number
            self.ranks.broadcast((number, name, self.number, tuple(map(pack, arguments))))
            own = [each.own if isinstance(each, Driver) else each for each in arguments]
            found = make(self.ranks, self.own, name, own)
            return Driver(found, self.ranks, number) if name == "new_cache" else found


def make(ranks: Ranks, own: object, name: str, arguments: list) -> object:
    """Make one rank's part of a call. An error that one rank has alone is raised on all."""
    if name not in AGREED:
        return getattr(own, name)(*arguments)
    with ranks.agreeing():
        return getattr(own, name)(*arguments)


@torch.inference_mode()
def run_worker(ranks: Ranks) -> None:
    """Make rank 0's calls until it has gone."""
    objects: dict[int, FastGPTNeoX | FastCache] = {}  # by the numbers of their Drivers
    while True:
        try:
            number, name, owner, arguments = ranks.broadcast(None)
        except RanksError:
            return
        ranks.are_in_step = False
        try:
            if name == "load":
                objects[number] = load_shard(ranks, *arguments)
                continue
            values = [unpack(each, objects) for each in arguments]
            found = make(ranks, objects[owner], name, values)
            if name == "new_cache":
                objects[number] = found
            elif name == "close":
                del objects[owner]
        except ONE_RANK_ERRORS:
            if not ranks.are_in_step:
                raise  # rank 0 waits for this one, until it has gone
            # else all ranks have raised it, and rank 0 reports it


def pack(value: object) -> object:
    """Return what is broadcast for an argument: a number for a Driver, ids as a list, a mask as
    bits."""
    if isinstance(value, Driver):
        return "driver", value.number
    if not isinstance(value, Tensor):
        return value
    if value.dtype != torch.bool:
        return "ids", value.tolist()
    return "mask", (*value.shape, numpy.packbits(value.numpy()).tobytes())


def unpack(value: object, objects: dict[int, FastGPTNeoX | FastCache]) -> object:
    """Return the worker's own value of a packed argument."""
    match value:
        case "driver", number:
            return objects[number]
        case "ids", ids:
            return torch.tensor(ids, dtype=torch.int64)
        case "mask", (n, m, content):
            bits = numpy.unpackbits(numpy.frombuffer(content, numpy.uint8), count=n * m)
            return torch.from_numpy(bits.reshape(n, m).astype(bool))
    return value


def load_shard(
    ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
) -> FastGPTNeoX:
    """Load this rank's part of a model. All ranks must call it."""
    with ranks.agreeing():
        device = ranks.own_device(device)
    shard = ranks.shard(device)
    with ranks.agreeing():
        return FastGPTNeoX.from_pretrained(name_or_path, device, dtype, shard)


def on_ranks(program: Callable[[Ranks | None], int]) -> int:
    """Run a program on rank 0, and workers on the other ranks. Returns the exit status.

    The program gets the ranks, or None if this is the only process.
    """
    try:
        with joined() as ranks:
            if not (ranks and ranks.rank):
                return program(ranks)
            run_worker(ranks)
            return 0
    except RanksError as error:  # they have not found each other
        if is_rank_0() or not has_valid_rank():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # of a worker
        if is_rank_0():
            raise
        line = f"error: rank {os.environ['RANK']}: {type(error).__name__}: {first_line(error)}"
        print(line, file=sys.stderr)
        return 70
