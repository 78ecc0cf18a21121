"""The memory of caches: taken when there is room for it, and lent again with its graphs.

A generation needs a cache for its own length and no longer. On CUDA a cache that is given back is
kept for the next one, because what was captured over its memory can be replayed there and nowhere
else; so it is made for all the positions that the model has, if there is room. Elsewhere nothing is
kept.

    pool = CachePool(run, token_bytes=1024, device=device, config=config)
    storage = pool.lend(capacity=500, use=Use(n_rows=64), make=make)
    ...
    pool.take_back(storage)

Shapes: L layers, H heads, D head size, R rotary dims.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.cuda_graphs import ShapedPasses
from engine.memory import OutOfMemory, free_memory, in_bytes, memory_for, require_memory
from engine.passes import ROW_COUNTS, PaddedPasses, Run, Use, row_count, slot_count
from engine.shares import WHOLE, Share
from engine.strict import is_even, steady_rows
from gpt_neox import Config


@dataclass(frozen=True, eq=False)  # itself, not its tensors, is looked for among others
class Storage:
    """What a cache is made of."""

    kv: Tensor  # [2, L, H, slots, D], keys, then values
    turns: Tensor  # complex64 [positions, R / 2], the rotary table
    passes: ShapedPasses | PaddedPasses | None  # None where a pass has the shape that it needs


class CachePool:
    """One model's storages: those to be had, and those given back."""

    def __init__(
        self,
        run: Run,
        token_bytes: int,
        device: torch.device,
        config: Config,
        min_rows: int = 1,
        share: Share = WHOLE,
    ):
        """run: the model's passes. min_rows: of each, padded. share: of the model; what
        shapes a pass must be the same on all ranks."""
        self.run, self.token_bytes, self.device, self.config = run, token_bytes, device, config
        self.is_shaped = device.type == "cuda"
        self.share = share
        self.min_rows = min_rows  # of every pass, padded
        self.steady: dict[str, int | None] = {}  # what steady_rows found, once it is known
        self.even: dict[int, bool] = {}  # what is_even found, by rows
        self.idle: list[Storage] = []
        self.n_graphs = 0
        self.capture_s = 0.0

    def settle(self, use: Use, model: nn.Module) -> Use:
        """The same, told how many rows a pass has at least, and what computes it.

        Strict ones have no more and no fewer than the widest needs, unless a row's bits are the
        same from some count on: then they have so many, and padding shows nothing more.
        """
        min_rows = max(use.min_rows, self.min_rows)
        if use.is_strict:
            steady = self.steady_rows(model)
            min_rows = steady or self.even_rows(model, max(use.n_rows, min_rows))
        return use._replace(min_rows=min_rows)

    def steady_rows(self, model: nn.Module) -> int | None:
        """From how many rows on a row's bits are the same in each pass; None: only at one count."""
        if self.is_shaped:
            return None
        if "rows" not in self.steady:
            found = self.share.every(steady_rows(model))
            self.steady["rows"] = None if None in found else max(found)
        return self.steady["rows"]

    def even_rows(self, model: nn.Module, n: int) -> int:
        """The least count of n rows or more at which a row's bits do not depend on its place."""
        for count in ROW_COUNTS:
            if count < n:
                continue
            if count not in self.even:
                self.even[count] = all(self.share.every(is_even(model, count)))
            if self.even[count]:
                return count
        return ROW_COUNTS[-1]

    def lend(
        self, capacity: int, use: Use, make: Callable[[int], tuple[Tensor, Tensor]]
    ) -> Storage:
        """Storage for `capacity` tokens; make: its memory, of n_slots. Raises OutOfMemory."""
        storage = self.find_idle(capacity)
        if storage:
            self.idle.remove(storage)
            storage.passes.is_replaying = False  # until `capture` has seen to these lengths
            return storage
        self.idle.clear()  # they are too small
        n_slots = self.n_slots(self.ample(capacity), use)
        what = f"a cache of {capacity} tokens"
        n_bytes = self.bytes(capacity, use)
        require_memory(n_bytes, self.device, what)
        # To be lent again, it must be of use outside inference mode too
        is_inference = torch.is_inference_mode_enabled() and not self.is_shaped
        with memory_for(f"{what}, {in_bytes(n_bytes)}"), torch.inference_mode(is_inference):
            kv, turns = make(n_slots)
            return Storage(kv, turns, self.open_passes(kv, turns, use))

    def open_passes(
        self, kv: Tensor, turns: Tensor, use: Use
    ) -> ShapedPasses | PaddedPasses | None:
        """What passes over this memory need beside the model."""
        if self.is_shaped:
            return ShapedPasses(self.run, kv, turns, self.config.vocab_size)
        if use.is_strict or use.min_rows > 1:
            return PaddedPasses(self.run, kv, turns)
        return None

    def ample(self, capacity: int) -> int:
        """As many tokens, or where the storage is kept all that the model was trained for.

        Else each longer request would need a new one, and graphs over the old one are never freed.
        If that is half of what is free or more, the draft's cache may need the room.
        """
        most = max(capacity, self.config.max_position_embeddings)
        if not self.is_shaped:
            return capacity
        free = min(self.share.every(free_memory(self.device)))
        return capacity if self.bytes(most) > free / 2 else most

    def find_idle(self, capacity: int) -> Storage | None:
        """A storage that was given back and is large enough."""
        n_slots = self.n_slots(capacity)
        for storage in self.idle:
            if storage.kv.shape[3] >= n_slots:
                return storage
        return None

    def take_back(self, storage: Storage) -> None:
        """Keep what is not used any more, for what was captured over it."""
        if self.is_shaped:
            self.idle.append(storage)

    def capture(self, storage: Storage, lengths: range, scratch: int, use: Use) -> None:
        """On CUDA: capture the passes over these lengths, as far as that is not done.

        scratch: the first slot that may be written to meanwhile. Raises OutOfMemory.
        """
        if not self.is_shaped:
            return
        start = time.perf_counter()
        try:
            is_whole = self.share.count == 1
            self.n_graphs += storage.passes.capture(lengths, scratch, use, is_whole)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"no room for the CUDA graphs of {lengths[-1]} tokens; --no-graphs does without"
            ) from error
        self.capture_s += time.perf_counter() - start

    def padded(self, n: int, min_rows: int = 1) -> int:
        """The rows that a pass of n rows really has."""
        n = max(n, min_rows, self.min_rows)
        return row_count(n) if self.is_shaped and n <= ROW_COUNTS[-1] else n

    def n_slots(self, capacity: int, use: Use | None = None) -> int:
        """Slots that a cache needs so that every padded write stays inside."""
        use = use or Use()
        if self.is_shaped:
            return slot_count(capacity + ROW_COUNTS[-1])
        n_slots = capacity + max(use.min_rows, self.min_rows) - 1
        return slot_count(n_slots) if use.is_strict else n_slots  # which reads whole blocks

    def bytes(self, capacity: int, use: Use | None = None) -> int:
        """What a cache for `capacity` tokens takes."""
        return self.token_bytes * self.n_slots(capacity, use)


def require_caches(needs: list[tuple[CachePool, int, Use]]) -> None:
    """Raise OutOfMemory unless caches from these pools fit together, each for so many tokens.

    Memory is taken lazily: each alone might be made, and all of them fail when they are filled.
    """
    n_bytes = 0
    for pool, capacity, use in needs:
        if not pool.find_idle(capacity):
            pool.idle.clear()
            n_bytes += pool.bytes(capacity, use)
    sizes = " and ".join(str(capacity) for _, capacity, _ in needs)
    require_memory(n_bytes, needs[0][0].device, f"caches of {sizes} tokens")
