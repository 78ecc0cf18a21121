"""The model of gpt_neox.py made fast: fused layers, padded passes or CUDA graphs, lent caches.

Both write the same greedy text. What a generation asks of its passes is a Use: engine/decoding.py
makes one for each model, and gives the loop a view of it, which is a gpt_neox.Model.

    model = FastGPTNeoX.from_pretrained("models/tiny/target", "cpu", torch.float32)
    cache = model.new_cache(256, Use(n_rows=64))
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from engine.caches import Storage
from engine.checkpoint import DTYPES, load_tensors, published_shapes, read_config
from engine.fused import fill, require_divisible
from engine.hub import find_checkpoint
from engine.memory import memory_for, require_memory
from engine.passes import Use, causal_bias, open_bias
from engine.scores import ReadScores, scores_of
from engine.shares import WHOLE, Share, split_axis
from engine.strict import MAX_DEPTH
from gpt_neox import PREFILL_CHUNK, Config, GPTNeoX, KVCache, rotary_table, with_own_head


class FastCache(KVCache):
    """A cache in memory that is lent, and what its generation asks of it."""

    def __init__(self, model: "FastGPTNeoX", storage: Storage, capacity: int, use: Use):
        super().__init__(storage.kv, storage.turns, capacity)
        self.model, self.storage, self.use = model, storage, use
        self.turns = storage.turns
        self.full = use.window.full  # tokens at which the window drops some
        self.passes = storage.passes  # that are padded or have fixed shapes; None: as they come
        self.scratch = torch.empty(0, dtype=torch.int64)  # tokens of the rows that ran last

    def close(self, is_failed: bool = False) -> None:
        """Give the memory back."""
        self.model.pool.take_back(self.storage)

    @property
    def until_drop(self) -> int:
        """How many tokens may be committed before the window drops some, at least 1."""
        return self.full - self.length

    @property
    def most(self) -> int:
        """Tokens that a step may commit: none commits across a drop, nor beyond strict sight."""
        return min(self.until_drop, MAX_DEPTH + 1) if self.use.is_strict else self.until_drop

    def require(self, need: int) -> None:
        if need > self.capacity:
            raise IndexError(f"the cache has {self.capacity} slots, {need} are needed")

    def advance(self, n: int) -> None:
        self.require(self.length + n)
        self.length += n
        self.drop()

    def commit(self, rows: Sequence[int]) -> None:
        if self.use.is_rebuilt:
            positions = torch.arange(self.length, self.length + len(rows))
            self.model.forward(self.scratch[list(rows)], positions, self, n_last=1)
            self.length += len(rows)
        else:
            super().commit(rows)
        self.drop()

    def drop(self) -> None:
        """Drop the oldest tokens after the sinks if that is due."""
        if not self.until_drop:
            self.model.forget(self, self.use.window.sinks, self.use.window.slack)


class FastGPTNeoX(GPTNeoX):
    """A causal language model over an explicit cache; batch 1, no batch axis. Made by
    from_pretrained or from_tensors."""

    told: Callable[[int], None] | None = None  # by prefill, how many tokens more have been read

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = torch.float32,
        share: Share = WHOLE,
    ) -> "FastGPTNeoX":
        """Load a folder, or a hub repository `NAME` or `NAME@REVISION`; of a share, no more.

        Raises CheckpointError (nothing there, not GPT-NeoX, a tensor missing, extra or misshapen,
        a truncated file) and OutOfMemory.
        """
        with memory_for(f"the weights of {name_or_path}"):
            return cls.from_tensors(*open_checkpoint(name_or_path, device, dtype, share), share)

    @classmethod
    def from_tensors(
        cls, config: Config, tensors: Mapping[str, Tensor], share: Share = WHOLE
    ) -> "FastGPTNeoX":
        """A model of these weights, by their published names. Raises CheckpointError."""
        if share is WHOLE:
            config = with_own_head(config, tensors)
        with torch.device("meta"):  # no memory: the weights have theirs
            model = cls(config)
        fill(model, tensors, share)
        return model

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        """Raise TypeError, because packed matrices can be neither copied nor pickled."""
        raise TypeError("a fast model cannot be copied or pickled; load it again, or a GPTNeoX")

    def new_cache(self, capacity: int, use: Use | None = None) -> FastCache:
        """An empty cache for `capacity` tokens. Raises OutOfMemory if it would not fit."""
        use = self.pool.settle(use or Use(), self)
        storage = self.pool.lend(capacity, use, self.make_memory)
        return FastCache(self, storage, capacity, use)

    def make_memory(self, n_slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values, and the turns of as many positions."""
        config = self.config
        shape = (2, config.num_hidden_layers, self.n_heads, n_slots, config.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return kv, rotary_table(config, n_slots, self.device)

    def run_pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        turns: Tensor,
        start: int,
        bias: Tensor,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """A whole pass on the model's device: last hidden states [n - first, hidden] and logits
        [n - first, V], of the rows from `first` on.

        tokens, positions: [n] int64; the others as FusedTransformer.forward has them.
        """
        x = self.gpt_neox(tokens, turns.index_select(0, positions), kv, start, bias)[first:]
        return x, self.embed_out(x)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: FastCache,
        mask: Tensor | None = None,
        start: int | None = None,
        n_last: int | None = None,
    ) -> ReadScores:
        """GPTNeoX.forward; on CUDA the next pass over this cache may overwrite the logits."""
        n = len(tokens)
        start = cache.length if start is None else start
        length = start if mask is None else cache.length
        n_slots = length + (n if mask is None else mask.shape[1])
        cache.require(n_slots)
        if start + n > n_slots:
            raise ValueError(f"a mask up to slot {n_slots}, and rows up to {start + n}")
        cache.scratch = tokens
        n_last = n_last or n
        if cache.passes and cache.passes.has_room(n, mask, cache.use):
            return cache.passes.forward(tokens, positions, mask, length, start, n_last, cache.use)
        x = self.hidden(tokens, positions, cache, mask, start)
        return self.score(x[-n_last:], cache)

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: FastCache, mask: Tensor | None, start: int
    ) -> Tensor:
        """x [n, hidden] of rows that are run as they come."""
        if mask is None:
            bias = causal_bias(len(tokens), start, cache.kv)
        else:
            bias = open_bias(mask, cache.length, cache.kv)
        turns = cache.turns.index_select(0, positions.to(self.device, non_blocking=True))
        tokens = tokens.to(self.device, non_blocking=True)
        return self.gpt_neox(tokens, turns, cache.kv, start, bias)

    def score(self, x: Tensor, cache: FastCache) -> ReadScores:
        """What follows each of the rows x [n, hidden]."""
        logits = self.embed_out(x).float()[:, : cache.use.n_ids]
        return scores_of(x, logits, cache.use.ranking)

    def prefill(
        self,
        tokens: list[int],
        cache: FastCache,
        read: Callable[[list[int], ReadScores], None] | None = None,
    ) -> ReadScores:
        """GPTNeoX.prefill, in chunks that also end where a drop is due."""
        ids = torch.tensor(tokens)
        is_finite = torch.tensor(True, device=self.device)
        while len(ids):
            chunk, ids = ids.tensor_split([min(PREFILL_CHUNK, cache.until_drop)])
            cache.require(cache.length + len(chunk))
            positions = torch.arange(cache.length, cache.length + len(chunk))
            x = self.hidden(chunk, positions, cache, None, cache.length)  # [n, hidden]
            is_finite &= x.isfinite().all()
            if read:
                read(chunk.tolist(), self.score(x, cache))
            cache.advance(len(chunk))
            if self.told:
                self.told(len(chunk))
        return self.score(x[-1:].masked_fill(~is_finite, torch.nan), cache)

    def drop_idle(self) -> None:
        """Give back the memory of caches that wait to be lent again."""
        self.pool.idle.clear()

    def forget(self, cache: FastCache, start: int, n: int) -> None:
        """Drop slots [start, start + n); what follows moves down to them, n positions back.

        A key carries its position as a rotation, so turning it by n positions more moves it; each
        turn rounds it once in the model's dtype.
        """
        kept = cache.kv[:, :, :, start + n : cache.length].clone()  # read, then write: they overlap
        kept[0] = self.gpt_neox.rotate(kept[0], cache.turns[n : n + 1].conj())
        cache.length -= n
        cache.kv[:, :, :, start : cache.length] = kept

    def capture(self, cache: FastCache, shortest: int) -> None:
        """On CUDA: the passes over a cache from a length on, as graphs. Raises OutOfMemory."""
        lengths = range(shortest, cache.capacity + 1)
        self.pool.capture(cache.storage, lengths, cache.length, cache.use)


def is_fast(model: object) -> bool:
    """Whether it is a FastGPTNeoX, or rank 0's of one (parallel/driver.py)."""
    return hasattr(model, "pool")


def load_plain(
    name_or_path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPTNeoX:
    """The plain model, its checkpoint found and checked as the fast one's; raises as that."""
    with memory_for(f"the weights of {name_or_path}"):
        return GPTNeoX.from_tensors(*open_checkpoint(name_or_path, device, dtype))


def open_checkpoint(
    name_or_path: str | Path,
    device: str | torch.device,
    dtype: torch.dtype | str,
    share: Share = WHOLE,
) -> tuple[Config, Mapping[str, Tensor]]:
    """A checkpoint's config, and its tensors, each read when it is looked at. Raises
    CheckpointError, and OutOfMemory if they would not fit."""
    folder, device = find_checkpoint(name_or_path), torch.device(device)
    config = read_config(folder)
    require_divisible(config, share)
    tensors = load_tensors(folder, config, device, named_dtype(dtype))
    config = with_own_head(config, tensors)
    n_bytes = weight_bytes(config, tensors.dtype, share)
    require_memory(n_bytes, device, f"the weights of {name_or_path}")
    return config, replace(tensors, share=share)


def named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype that may be given by its name. Raises ValueError for another name."""
    dtype = DTYPES.get(dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}, it must be a torch.dtype or {', '.join(DTYPES)}")
    return dtype


def weight_bytes(config: Config, dtype: torch.dtype, share: Share = WHOLE) -> int:
    """What all weights take in a dtype, or a share of them. Raises CheckpointError."""
    n = 0
    for name, shape in published_shapes(config).items():
        axis = split_axis(name)
        n_split = 1 if axis is None else shape[axis]
        n_here = 1 if axis is None else share.size(n_split)
        n += math.prod(shape) // n_split * n_here
    return n * dtype.itemsize
