"""A target that several processes compute: rank 0 drives, and the workers repeat its calls.

Rank 0 alone runs the program, which knows of other ranks only by this target, a Driver. The Driver
broadcasts each call before it makes it; a worker receives a call, makes it with its own share of
the model (engine/shares.py), and waits for the next.

    with joined() as ranks:  # under torchrun
        if ranks.index:
            run_worker(ranks)
        else:
            target = Driver.load(ranks, "models/tiny/target", torch.device("cpu"), torch.float32)

Two calls an iteration, a pass and its commit, are two broadcasts.

Shapes: n rows, s slots.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

import numpy
import torch
from torch import Tensor

from engine.checkpoint import first_line
from engine.model import FastCache, FastGPTNeoX
from engine.scores import ReadScores
from parallel.ranks import ALONE, Ranks, RanksError, is_first, is_placed, joined

# Methods of a model and of a cache that every rank must call: a pass or a length depends on them
OF_MODEL = {"new_cache", "prefill", "forward", "capture", "drop_idle"}
OF_CACHE = {"advance", "rewind", "commit", "close"}
AGREED = {"new_cache", "capture"}  # those for which one rank alone may have no memory


class Driver:
    """Rank 0's model or cache; each worker has its own under the same number."""

    def __init__(self, own: FastGPTNeoX | FastCache, ranks: Ranks, number: int):
        self.own, self.ranks, self.number = own, ranks, number

    @classmethod
    def load(
        cls, ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
    ) -> "Driver":
        """Load a model, of which every rank loads its share. Raises as FastGPTNeoX.from_pretrained
        does, whatever rank the error is of."""
        with ranks.turn():
            number = ranks.new_number()
            ranks.tell((number, "load", None, (name_or_path, device, dtype), {}))
            return cls(load_share(ranks, name_or_path, device, dtype), ranks, number)

    def __getattr__(self, name: str) -> object:
        if name == "own":  # of a copy that has nothing yet
            raise AttributeError(name)
        if name in OF_MODEL | OF_CACHE:
            return partial(self.call, name)
        return getattr(self.own, name)  # what is only read

    def new_cache(self, capacity: int, *use: object) -> "Driver":
        """FastGPTNeoX.new_cache. Only rank 0 looks for a cache to lend again, so that all ranks
        give back the memory of the others, or none."""
        if self.own.pool.find_idle(capacity) is None:
            self.call("drop_idle")
        return self.call("new_cache", capacity, *use)

    def capture(self, cache: "Driver", shortest: int) -> None:
        if self.own.pool.is_shaped:
            self.call("capture", cache, shortest)

    def close(self, is_failed: bool = False) -> None:
        try:
            self.call("close")
        except RanksError:
            self.own.close()
            if not is_failed:  # else an earlier error is on its way
                raise

    def call(self, name: str, *arguments: object, **options: object) -> object:
        """Broadcast a call, and make it here. A new cache becomes a Driver, too."""
        with self.ranks.turn():
            number = self.ranks.new_number() if name == "new_cache" else self.number
            packed = tuple(map(pack, arguments)), {k: pack(v) for k, v in options.items()}
            self.ranks.tell((number, name, self.number, *packed))
            own = [each.own if isinstance(each, Driver) else each for each in arguments]
            found = make(self.ranks, self.own, name, own, options)
            return Driver(found, self.ranks, number) if name == "new_cache" else found


def make(ranks: Ranks, own: object, name: str, arguments: list, options: dict) -> object:
    """Make one rank's part of a call; an error that one rank has alone is raised on all."""
    if name not in AGREED:
        return getattr(own, name)(*arguments, **options)
    with ranks.agreeing():
        return getattr(own, name)(*arguments, **options)


@torch.inference_mode()
def run_worker(ranks: Ranks) -> None:
    """Make rank 0's calls until it has gone."""
    objects: dict[int, FastGPTNeoX | FastCache] = {}  # by the numbers of their Drivers
    while True:
        try:
            number, name, owner, arguments, options = ranks.tell(None)
        except RanksError:
            return
        ranks.are_in_step = False
        try:
            if name == "load":
                objects[number] = load_share(ranks, *arguments)
                continue
            values = [unpack(each, objects) for each in arguments]
            options = {k: unpack(v, objects) for k, v in options.items()}
            found = make(ranks, objects[owner], name, values, options)
            if name == "new_cache":
                objects[number] = found
            elif name == "close":
                del objects[owner]
        except ALONE:
            if not ranks.are_in_step:
                raise  # rank 0 waits for this one, until it has gone
            # else all ranks have raised it, and rank 0 reports it


def pack(value: object) -> object:
    """Return what is broadcast for an argument: the number of a Driver, ids as a list, a mask as
    bits, and no function."""
    if isinstance(value, Driver):
        return "driver", value.number
    if callable(value):
        return "read", None
    if not isinstance(value, Tensor):
        return value
    if value.dtype != torch.bool:
        return "ids", value.tolist()
    return "mask", (*value.shape, numpy.packbits(value.numpy()).tobytes())


def unpack(value: object, objects: dict[int, FastGPTNeoX | FastCache]) -> object:
    """Return the argument that was packed so, as a worker has it."""
    match value:
        case "driver", number:
            return objects[number]
        case "read", None:
            return ignore
        case "ids", ids:
            return torch.tensor(ids, dtype=torch.int64)
        case "mask", (n, s, content):
            bits = numpy.unpackbits(numpy.frombuffer(content, numpy.uint8), count=n * s)
            return torch.from_numpy(bits.reshape(n, s).astype(bool))
    return value


def ignore(tokens: list[int], scores: ReadScores) -> None:
    """Ignore what a prompt's pass gives: the worker runs it because all ranks compute it."""


def load_share(
    ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
) -> FastGPTNeoX:
    """Load this rank's part of a model; all ranks call it at the same time."""
    with ranks.agreeing():
        device = ranks.own_device(device)
    share = ranks.share(device)
    with ranks.agreeing():
        return FastGPTNeoX.from_pretrained(name_or_path, device, dtype, share)


def on_ranks(program: Callable[[Ranks | None], int]) -> int:
    """Run a program on rank 0, and workers on the other ranks. The program gets the ranks, or None
    if this is the only process. Returns the exit status; a mistake is one line."""
    try:
        with joined() as ranks:
            if not (ranks and ranks.index):
                return program(ranks)
            run_worker(ranks)
            return 0
    except RanksError as error:  # they have not found each other
        if is_first() or not is_placed():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # of a worker
        if is_first():
            raise
        line = f"error: rank {os.environ['RANK']}: {type(error).__name__}: {first_line(error)}"
        print(line, file=sys.stderr)
        return 70
