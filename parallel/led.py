"""A target that several ranks compute: rank 0 makes its calls, and the others repeat them.

Rank 0 alone runs the program, and nothing in it knows of other ranks but this target, a Led, which
tells them each call before it makes it. They do nothing else: they hear a call, make it with their
share of the model (engine/shares.py), and hear the next (`follow`).

    with joined() as ranks:  # under torchrun
        if ranks.index:
            follow(ranks)
        else:
            target = Led.load(ranks, "models/tiny/target", torch.device("cpu"), torch.float32)

Two calls an iteration, a pass and its commit, are two broadcasts.

Shapes: n rows, s slots.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
from torch import Tensor

from engine.checkpoint import first_line
from engine.model import FastCache, FastGPTNeoX
from engine.passes import Use
from engine.scores import ReadScores as Scores
from parallel.ranks import ALONE, Ranks, RanksError, is_first, is_placed, joined

Mask = tuple[int, int, bytes]  # n, s and their n * s bits


class LedCache:
    """A cache of the target; as FastCache, but that the other ranks do the same to theirs."""

    def __init__(self, led: "Led", cache: FastCache, number: int):
        self.led, self.cache, self.number = led, cache, number

    def __getattr__(self, name: str) -> object:
        if name == "cache":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.cache, name)  # what is only looked at

    def close(self, is_failed: bool = False) -> None:
        try:
            with self.led.ranks.turn():
                self.led.calls("close", self.number)
        except RanksError:
            if not is_failed:  # else an earlier error is on its way
                raise
        finally:
            self.cache.close()

    def advance(self, n: int) -> None:
        with self.led.ranks.turn():
            self.led.calls("advance", self.number, n)
            self.cache.advance(n)

    def rewind(self, length: int) -> None:
        with self.led.ranks.turn():
            self.led.calls("rewind", self.number, length)
            self.cache.rewind(length)

    def commit(self, rows: Sequence[int]) -> None:
        with self.led.ranks.turn():
            self.led.calls("commit", self.number, list(rows))
            self.cache.commit(rows)


class Led:
    """Rank 0's model; what it does not have itself is the model's own."""

    def __init__(self, model: FastGPTNeoX, ranks: Ranks, number: int):
        """number: of the model, among those that the ranks have loaded."""
        self.model, self.ranks, self.number = model, ranks, number

    @classmethod
    def load(
        cls, ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
    ) -> "Led":
        """Every rank loads its share. Raises as FastGPTNeoX.from_pretrained does, of any rank."""
        with ranks.turn():
            ranks.tell(("load", name_or_path, device, dtype))
            ranks.n_models += 1
            return cls(load_share(ranks, name_or_path, device, dtype), ranks, ranks.n_models - 1)

    def __getattr__(self, name: str) -> object:
        if name == "model":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.model, name)

    def calls(self, name: str, *arguments: object) -> None:
        """Tell the others what is done next."""
        self.ranks.tell((name, self.number, *arguments))

    def new_cache(self, capacity: int, use: Use | None = None) -> LedCache:
        with self.ranks.turn():
            number = self.ranks.n_caches
            self.ranks.n_caches += 1
            # Rank 0 alone looks for room, and drops what is kept where there is too little
            is_kept = self.model.pool.find_idle(capacity) is not None
            self.calls("new_cache", number, capacity, use, is_kept)
            with self.ranks.agreeing():
                cache = self.model.new_cache(capacity, use)
            return LedCache(self, cache, number)

    def prefill(
        self,
        tokens: list[int],
        cache: LedCache,
        read: Callable[[list[int], Scores], None] | None = None,
    ) -> Scores:
        with self.ranks.turn():
            self.calls("prefill", cache.number, tokens, read is not None)
            return self.model.prefill(tokens, cache.cache, read)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: LedCache,
        mask: Tensor | None = None,
        start: int | None = None,
        n_last: int | None = None,
    ) -> Scores:
        rows = tokens.tolist(), positions.tolist()
        with self.ranks.turn():
            self.calls("forward", cache.number, *rows, packed(mask), start, n_last)
            return self.model.forward(tokens, positions, cache.cache, mask, start, n_last)

    def capture(self, cache: LedCache, shortest: int) -> None:
        if self.model.pool.is_shaped:
            with self.ranks.turn():
                self.calls("capture", cache.number, shortest)
                with self.ranks.agreeing():
                    self.model.capture(cache.cache, shortest)


class Follower:
    """What another rank does at rank 0's calls, by their names."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.models: list[FastGPTNeoX] = []
        self.caches: dict[tuple[int, int], FastCache] = {}  # by the model's number and their own

    def load(self, name_or_path: str, device: torch.device, dtype: torch.dtype) -> None:
        self.models.append(load_share(self.ranks, name_or_path, device, dtype))

    def new_cache(
        self, model: int, number: int, capacity: int, use: Use | None, is_kept: bool
    ) -> None:
        if not is_kept:
            self.models[model].pool.idle.clear()
        with self.ranks.agreeing():
            self.caches[model, number] = self.models[model].new_cache(capacity, use)

    def prefill(self, model: int, number: int, tokens: list[int], is_read: bool) -> None:
        read = look_away if is_read else None
        self.models[model].prefill(tokens, self.caches[model, number], read)

    def forward(
        self,
        model: int,
        number: int,
        tokens: list[int],
        positions: list[int],
        mask: Mask | None,
        start: int | None,
        n_last: int | None,
    ) -> None:
        rows = torch.tensor(tokens), torch.tensor(positions)
        cache = self.caches[model, number]
        self.models[model].forward(*rows, cache, unpacked(mask), start, n_last)

    def capture(self, model: int, number: int, shortest: int) -> None:
        with self.ranks.agreeing():
            self.models[model].capture(self.caches[model, number], shortest)

    def advance(self, model: int, number: int, n: int) -> None:
        self.caches[model, number].advance(n)

    def rewind(self, model: int, number: int, length: int) -> None:
        self.caches[model, number].rewind(length)

    def commit(self, model: int, number: int, rows: list[int]) -> None:
        self.caches[model, number].commit(rows)

    def close(self, model: int, number: int) -> None:
        self.caches.pop((model, number)).close()


def on_ranks(program: Callable[[Ranks | None], int]) -> int:
    """Run a program on rank 0 of several, which it gets, or None if this is the only process; the
    others make the calls of its target. Returns the exit status; what goes wrong is one line."""
    try:
        with joined() as ranks:
            if not (ranks and ranks.index):
                return program(ranks)
            follow(ranks)
            return 0
    except RanksError as error:  # they have not found each other
        if is_first() or not is_placed():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # of a rank that follows
        if is_first():
            raise
        line = f"error: rank {os.environ['RANK']}: {type(error).__name__}: {first_line(error)}"
        print(line, file=sys.stderr)
        return 70


@torch.inference_mode()
def follow(ranks: Ranks) -> None:
    """Make rank 0's calls until it has gone."""
    follower = Follower(ranks)
    for name, *arguments in heard(ranks):
        ranks.are_in_step = False
        try:
            getattr(follower, name)(*arguments)
        except ALONE:
            if not ranks.are_in_step:
                raise  # rank 0 waits for this one, until it has gone
            # else they have agreed on it, and rank 0 says it


def heard(ranks: Ranks) -> Iterator[tuple]:
    """What rank 0 calls, one call after the other, until it has gone."""
    while True:
        try:
            call = ranks.tell(None)
        except RanksError:
            return
        yield call


def load_share(
    ranks: Ranks, name_or_path: str, device: torch.device, dtype: torch.dtype
) -> FastGPTNeoX:
    """This rank's part of a model; all ranks call it at the same time."""
    with ranks.agreeing():
        device = ranks.own_device(device)
    share = ranks.share(device)
    with ranks.agreeing():
        return FastGPTNeoX.from_pretrained(name_or_path, device, dtype, share)


def look_away(tokens: list[int], scores: Scores) -> None:
    """What is read of a prompt takes a product that all ranks make."""


def packed(mask: Tensor | None) -> Mask | None:
    """A mask [n, s] as bits."""
    if mask is None:
        return None
    return *mask.shape, numpy.packbits(mask.numpy()).tobytes()


def unpacked(mask: Mask | None) -> Tensor | None:
    """The same again."""
    if mask is None:
        return None
    n, s, content = mask
    bits = numpy.unpackbits(numpy.frombuffer(content, numpy.uint8), count=n * s)
    return torch.from_numpy(bits.reshape(n, s).astype(bool))
