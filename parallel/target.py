"""A target that several processes compute together, each with a share of its weights and cache.

Rank 0 runs the loop, as ever, on a ParallelTarget, which is a GPTNeoX: what it is asked to do it
tells the other ranks, and all do it at the same time, each with its own share. The others `follow`.
A pass is told in one broadcast of some kilobytes: tokens, positions, what of the mask is not the
whole prefix. What computes nothing together (rows kept, rewinds, drops) travels with the next pass.
Scores come back to all, and only rank 0 looks at them.

    with joined() as ranks:
        if ranks.index:
            follow(ranks)
        else:
            with directing(ranks) as mail:
                target = mail.load("models/tiny/target", torch.device("cpu"), torch.float32)

Shapes: n rows, S cache slots.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from engine.caches import CachePool, Storage
from engine.checkpoint import DTYPES, first_line
from engine.passes import Use
from engine.scores import Ranking, Scores
from gpt_neox import GPTNeoX, KVCache
from parallel.ranks import AGREED, Ranks, RanksError

END = "end"


def load_share(
    ranks: Ranks, kind: type[GPTNeoX], folder: str, device: torch.device, dtype: torch.dtype
) -> GPTNeoX:
    """A rank's share of a model; all ranks load theirs at the same time.

    Raises CheckpointError, OutOfMemory and RanksError, on every rank if it happens on any.
    """
    with ranks.agreeing():
        device = ranks.own_device(device)
    share = ranks.share(device)
    with ranks.agreeing():
        model = kind.from_pretrained(folder, device, dtype, share)
    model.pool = SharedPool(model.pool, ranks)
    return model


class SharedPool(CachePool):
    """A rank's storages, of which all ranks have the same: what one captures all must."""

    def __init__(self, pool: CachePool, ranks: Ranks):
        vars(self).update(vars(pool))  # whose place it takes
        self.ranks = ranks

    def free_memory(self) -> int:
        return min(self.ranks.gather_objects(super().free_memory()))

    def steady_rows(self, model: GPTNeoX) -> int | None:
        if "rows" not in self.steady:
            found = self.ranks.gather_objects(super().steady_rows(model))
            self.steady["rows"] = None if None in found else max(found)
        return self.steady["rows"]


@dataclass
class Mail:
    """What rank 0 tells the others. Calls within a call are not told: they make them as well."""

    ranks: Ranks
    waiting: list[list] = field(default_factory=list)  # calls that travel with the next pass
    is_inside: bool = False  # a call that was told
    is_ended: bool = False  # by SIGTERM, which torchrun sends when another rank has gone
    n_models: int = 0
    n_caches: int = 0

    def load(self, folder: str | Path, device: torch.device, dtype: torch.dtype) -> GPTNeoX:
        """A target in shares. Raises as load_share."""
        folder = os.path.abspath(folder)
        name = str(dtype).removeprefix("torch.")
        self.ranks.tell([["load", folder, device.type, name, torch.get_num_threads()]])
        model = load_share(self.ranks, ParallelTarget, folder, device, dtype)
        model.direct(self, self.n_models)
        self.n_models += 1
        return model

    def later(self, call: list) -> None:
        """Tell something with the next pass."""
        if not self.is_inside:
            self.waiting.append(call)

    @contextmanager
    def within(self) -> Iterator[None]:
        """What is called in here is part of one call."""
        before = self.is_inside
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = before

    @contextmanager
    def now(self, call: list) -> Iterator[None]:
        """Tell something, and do it in here; Ctrl-C waits until it is done."""
        if self.is_inside:
            yield
            return
        if self.is_ended:
            raise RanksError(self.ranks.why_ended())
        with self.ranks.hold(), self.within():
            self.waiting.append(call)
            self.ranks.tell(self.waiting)
            self.waiting.clear()
            yield


class ParallelCache(KVCache):
    """Rank 0's part of a cache, whose number names it to the others."""

    def __init__(self, cache: KVCache, mail: Mail, number: int):
        super().__init__(cache.storage, cache.capacity, cache.use)
        self.mail, self.number = mail, number

    def advance(self, n: int) -> None:
        super().advance(n)
        self.mail.later(["advance", self.number, n])

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.mail.later(["rewind", self.number, length])

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        self.mail.later(["commit", self.number, list(rows)])


class ParallelPool(SharedPool):
    """Rank 0's storages, which are lent and taken back on every rank alike."""

    def __init__(self, pool: SharedPool, mail: Mail, number: int):
        """number: of the model."""
        super().__init__(pool, pool.ranks)
        self.mail, self.number = mail, number
        self.numbers: dict[Storage, int] = {}  # of the caches that are lent

    def take_back(self, storage: Storage) -> None:
        super().take_back(storage)
        self.mail.later(["take_back", self.numbers.pop(storage)])

    def drop_idle(self) -> None:
        super().drop_idle()
        self.mail.later(["drop_idle", self.number])

    def capture(self, storage: Storage, lengths: range, scratch: int, use: Use) -> None:
        if self.has_graphs:
            number = self.numbers[storage]
            with self.mail.now(["capture", number, lengths.start, lengths.stop, scratch, use]):
                super().capture(storage, lengths, scratch, use)


class ParallelTarget(GPTNeoX):
    """Rank 0's share of a model; it does what a GPTNeoX does, with the others."""

    def direct(self, mail: Mail, number: int) -> None:
        """From here on, tell the others."""
        self.mail, self.number = mail, number
        self.pool = ParallelPool(self.pool, mail, number)

    def new_cache(self, capacity: int, use: Use | None = None) -> KVCache:
        use = use or Use()
        with self.mail.now(["new_cache", self.number, capacity, use]):
            with self.mail.ranks.agreeing():
                cache = super().new_cache(capacity, use)
        number = self.mail.n_caches
        self.mail.n_caches += 1
        self.pool.numbers[cache.storage] = number
        return ParallelCache(cache, self.mail, number)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: ParallelCache,
        mask: Tensor | None = None,
        start: int | None = None,
        n_last: int | None = None,
    ) -> Scores:
        if start is None:
            start = cache.length
        cache.require(start + len(tokens))  # before it is told
        call = ["forward", cache.number, tokens.tolist(), positions.tolist(), pack(mask)]
        with self.mail.now(call + [start, n_last]):
            return super().forward(tokens, positions, cache, mask, start, n_last)

    def prefill(
        self,
        tokens: list[int],
        cache: ParallelCache,
        read: Callable[[list[int], ndarray], None] | None = None,
    ) -> Scores:
        cache.require(cache.length + len(tokens))
        with self.mail.now(["prefill", cache.number, list(tokens), read is not None]):
            return super().prefill(tokens, cache, read)

    def forget(self, cache: ParallelCache, start: int, n: int) -> None:
        self.mail.later(["forget", cache.number, start, n])
        with self.mail.within():
            super().forget(cache, start, n)


def pack(mask: Tensor | None) -> list | None:
    """A mask [n, S] as JSON has it: rows, slots, how many at the beginning all rows may attend,
    and the rest bit by bit, in hex."""
    if mask is None:
        return None
    n, n_slots = mask.shape
    n_seen = int(mask.all(dim=0).long().cumprod(dim=0).sum())
    bits = numpy.packbits(mask[:, n_seen:].numpy())
    return [n, n_slots, n_seen, bits.tobytes().hex()]


def unpack(packed: list | None) -> Tensor | None:
    """The mask again."""
    if packed is None:
        return None
    n, n_slots, n_seen, bits = packed
    mask = torch.ones(n, n_slots, dtype=torch.bool)
    found = numpy.unpackbits(numpy.frombuffer(bytes.fromhex(bits), dtype=numpy.uint8))
    n_rest = n_slots - n_seen
    mask[:, n_seen:] = torch.from_numpy(found[: n * n_rest]).view(n, n_rest)
    return mask


class Follower:
    """What a rank above 0 has: its shares of models and caches, and a method for each call."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.models: list[GPTNeoX] = []
        self.caches: dict[int, tuple[GPTNeoX, KVCache]] = {}
        self.n_caches = 0

    def load(self, folder: str, device: str, dtype: str, n_threads: int) -> None:
        torch.set_num_threads(n_threads)
        with suppress(*AGREED):  # rank 0 raises it
            own = load_share(self.ranks, GPTNeoX, folder, torch.device(device), DTYPES[dtype])
            self.models.append(own)

    def new_cache(self, model: int, capacity: int, use: list) -> None:
        with suppress(*AGREED):  # rank 0 raises it
            with self.ranks.agreeing():
                cache = self.models[model].new_cache(capacity, as_use(use))
            self.caches[self.n_caches] = (self.models[model], cache)
            self.n_caches += 1

    def forward(
        self,
        number: int,
        tokens: list[int],
        positions: list[int],
        mask: list | None,
        start: int,
        n_last: int | None,
    ) -> None:
        model, cache = self.caches[number]
        places = torch.tensor(positions)
        model.forward(torch.tensor(tokens), places, cache, unpack(mask), start, n_last)

    def prefill(self, number: int, tokens: list[int], is_read: bool) -> None:
        model, cache = self.caches[number]
        model.prefill(tokens, cache, ignore if is_read else None)

    def forget(self, number: int, start: int, n: int) -> None:
        model, cache = self.caches[number]
        model.forget(cache, start, n)

    def advance(self, number: int, n: int) -> None:
        self.caches[number][1].advance(n)

    def rewind(self, number: int, length: int) -> None:
        self.caches[number][1].rewind(length)

    def commit(self, number: int, rows: list[int]) -> None:
        self.caches[number][1].commit(rows)

    def take_back(self, number: int) -> None:
        model, cache = self.caches.pop(number)
        model.pool.take_back(cache.storage)

    def drop_idle(self, model: int) -> None:
        self.models[model].pool.drop_idle()

    def capture(self, number: int, first: int, last: int, scratch: int, use: list) -> None:
        model, cache = self.caches[number]
        model.pool.capture(cache.storage, range(first, last), scratch, as_use(use))


def as_use(told: list) -> Use:
    """What was told as JSON."""
    use = Use(*told)
    return use._replace(ranking=Ranking(*use.ranking))


def ignore(ids: list[int], candidates: ndarray) -> None:
    """What a follower does with what a prompt's tokens say: it was computed for rank 0."""


@torch.inference_mode()
def follow(ranks: Ranks) -> None:
    """What every rank but 0 does: what rank 0 tells, until it says that it ends.

    Raises RanksError if another rank has gone. Ctrl-C is for rank 0.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follower = Follower(ranks)
    try:
        while True:
            for name, *arguments in ranks.hear():
                if name == END:
                    return
                getattr(follower, name)(*arguments)
    except RanksError:
        raise
    except Exception as error:  # whatever it is, rank 0 is the one who says it
        ranks.leave_word(first_line(error))
        raise


@contextmanager
def directing(ranks: Ranks) -> Iterator[Mail]:
    """Rank 0: what tells the others, who end when the block does."""
    mail = Mail(ranks)

    def end(number: int, frame: object) -> None:
        mail.is_ended = True

    # Not at once, or who asks for a text does not hear why it has ended: torchrun sends this as
    # soon as one rank has gone
    signal.signal(signal.SIGTERM, end)
    try:
        yield mail
    finally:
        with suppress(RanksError):
            ranks.tell([[END]])
