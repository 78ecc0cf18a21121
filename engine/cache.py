"""The fast model's KV cache: its memory, its passes, and what one generation asks of them.

A generation needs a cache for its own length. On CUDA the memory of a closed cache is kept for the
next one, because the CUDA graphs that were captured over it work on no other memory. So there it is
made for all positions of the model, if there is room. On a CPU nothing is kept.

    cache = FastCache(model, 500, PassConfig(max_rows=64))
    ...
    cache.close()

Shapes: n rows, L layers, H heads, D head size, R rotary dimensions.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda_graphs import FixedPasses
from engine.layers import rotate_
from engine.memory import OutOfMemory, format_bytes, free_memory, memory_for, require_memory
from engine.passes import ROW_COUNTS, PassConfig, Passes, slot_count
from engine.scores import Scores
from engine.strict import MAX_DEPTH, is_place_invariant, min_invariant_rows
from gpt_neox import PREFILL_CHUNK, KVCache

if TYPE_CHECKING:
    from engine.model import FastGPTNeoX

# on_pass(tokens, scores): the ids that a pass has run, and what it computed after each of them
OnPass = Callable[[list[int], Scores], None]


class FastCache(KVCache):
    """A cache with what its generation asks of it, and the scores of its last pass."""

    def __init__(self, model: "FastGPTNeoX", capacity: int, config: PassConfig):
        """Raises OutOfMemory."""
        self.model = model
        min_rows = max(config.min_rows, model.min_rows)
        if config.is_strict:
            min_rows = strict_min_rows(model, max(config.max_rows, min_rows))
        self.config = config._replace(min_rows=min_rows)
        self.passes = find_kept(model, capacity)
        if self.passes:
            model.kept.remove(self.passes)
            self.passes.is_replaying = False  # until `capture` has looked at these lengths
        else:
            model.drop_kept()  # too small
            self.passes = new_passes(model, capacity, self.config)
        super().__init__(self.passes.kv, self.passes.rotary, capacity)
        self.full = config.window.full
        self.tokens = torch.empty(0, dtype=torch.int64)  # of the rows that ran last
        self.scores: Scores | None = None  # of the last pass; on CUDA the next one overwrites them
        self.on_pass: list[OnPass] = []
        self.ms = 0.0  # that passes and commits have taken
        self.rows: list[int] = []  # of each pass, a prefill counted as one

    def capture(self, shortest: int) -> None:
        """On CUDA, capture the passes over this cache from a length on, unless they are captured
        already. Raises OutOfMemory."""
        model, began = self.model, time.perf_counter()
        if not model.has_fixed_shapes:
            return
        lengths = range(shortest, self.capacity + 1)
        try:
            model.n_graphs += self.passes.capture(model, lengths, self.length, self.config)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"no room for the CUDA graphs of {lengths[-1]} tokens; --no-graphs does without"
            ) from error
        model.capture_s += time.perf_counter() - began

    def close(self) -> None:
        """Keep the memory for the next cache, with what was captured over it."""
        if self.model.has_fixed_shapes and self.passes not in self.model.kept:
            self.model.kept.append(self.passes)

    def __enter__(self) -> "FastCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def until_drop(self) -> int:
        """Number of tokens that may be committed before the window drops some, at least 1."""
        return self.full - self.length

    @property
    def max_commit(self) -> int:
        """Number of tokens that an iteration may commit: none commits across a drop, nor more than
        strict attention reaches."""
        is_strict = self.config.is_strict
        return min(self.until_drop, MAX_DEPTH + 1) if is_strict else self.until_drop

    def require(self, need: int) -> None:
        if need > self.capacity:
            raise IndexError(f"the cache has {self.capacity} slots, {need} are needed")

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        n_last: int | None = None,
    ) -> Scores:
        """Run n rows as GPTNeoX.forward does. Returns the scores of the last n_last rows, or of
        all, and keeps them."""
        began = time.perf_counter()
        scores = self.run(tokens, positions, mask, n_last or len(tokens))
        self.record(began, len(tokens))
        return scores

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, n_last: int) -> Scores:
        """Run n rows, and keep their tokens and scores."""
        n = len(tokens)
        self.require(self.length + n)
        if mask is not None and not n <= mask.shape[1] <= self.length + n:
            slots = f"{n} to {self.length + n}"
            raise ValueError(f"the mask covers {mask.shape[1]} slots, it must cover {slots}")
        self.tokens = tokens
        rows = tokens, positions, mask, self.length, n_last
        self.scores = self.passes.forward(self.model, *rows, self.config)
        return self.scores

    def prefill(self, tokens: list[int]) -> Tensor:
        """Run and keep the next tokens of the sequence as GPTNeoX.prefill does, in chunks that also
        end where the window drops tokens. Returns the logits [1, V] after the last one."""
        n = len(tokens)
        if self.config.is_draft and n <= min(ROW_COUNTS[-1], self.max_commit):
            positions = torch.arange(self.length, self.length + n)
            scores = self.forward(torch.tensor(tokens), positions, n_last=1)
            self.advance(n)
            return scores.logits
        began = time.perf_counter()
        ids, is_finite = torch.tensor(tokens), torch.tensor(True, device=self.kv.device)
        while len(ids):
            chunk, ids = ids.tensor_split([min(PREFILL_CHUNK, self.until_drop)])
            x = self.prefill_chunk(chunk)  # [n, hidden]
            is_finite &= x.isfinite().all()
        x = x[-1:].masked_fill(~is_finite, torch.nan)
        self.scores = self.model.score(x, self.config)
        self.record(began, n)
        return self.scores.logits

    def prefill_chunk(self, tokens: Tensor) -> Tensor:
        """Run and keep tokens [n] of the sequence. Returns their last hidden states [n, hidden]."""
        n = len(tokens)
        self.require(self.length + n)
        x = self.passes.prefill(self.model, tokens, self.length)
        if self.config.shows_prompt:
            self.show(tokens, self.model.score(x, self.config))
        self.advance(n)
        if self.model.on_progress:
            self.model.on_progress(n)
        return x

    def show(self, tokens: Tensor, scores: Scores) -> None:
        """Report a pass over tokens [n] to the callbacks."""
        for on_pass in self.on_pass:
            on_pass(tokens.tolist(), scores)

    def record(self, began: float, *n_rows: int) -> None:
        """Add the time since `began`, and the rows of a pass, to what take_passes returns."""
        self.ms += (time.perf_counter() - began) * 1e3
        self.rows.extend(n_rows)

    def take_passes(self) -> tuple[float, list[int]]:
        """Return what passes and commits since the last call took, in milliseconds, and the rows of
        each pass."""
        taken = self.ms, self.rows
        self.ms, self.rows = 0.0, []
        return taken

    def advance(self, n: int) -> None:
        """Keep the first n scratch rows."""
        self.require(self.length + n)
        self.length += n
        self.drop()

    def commit(self, rows: Sequence[int]) -> None:
        began = time.perf_counter()
        if self.config.rebuilds_cache:
            positions = torch.arange(self.length, self.length + len(rows))
            self.run(self.tokens[list(rows)], positions, None, n_last=1)
            self.length += len(rows)
        else:
            super().commit(rows)
        self.drop()
        self.record(began)

    def drop(self) -> None:
        """Drop the oldest tokens after the sinks if the cache is full."""
        if not self.until_drop:
            self.forget(self.config.window.sinks, self.config.window.slack)

    def forget(self, start: int, n: int) -> None:
        """Drop slots [start, start + n). The slots after them move down, and n positions back.

        A key holds its position as a rotation, so it moves by one more rotation. Each rotation
        rounds it once in the model's dtype.
        """
        kept = self.kv[:, :, :, start + n : self.length].clone()  # source and target overlap
        rotate_(kept[0, ..., : 2 * self.rotary.shape[-1]], self.rotary[n : n + 1].conj())
        self.length -= n
        self.kv[:, :, :, start : self.length] = kept


def strict_min_rows(model: "FastGPTNeoX", n: int) -> int:
    """Return how many rows every strict pass has at least, if the widest one has n.

    That is the number from which on the bits of a row do not depend on the number of rows. If there
    is none, all passes have one number of rows, at which they do not depend on a row's place. If no
    number of ROW_COUNTS has this property either, returns the largest: bits may then differ.
    """
    invariant = invariant_rows(model)
    if invariant:
        return invariant
    facts = model.strict_facts
    for count in ROW_COUNTS:
        if count < n:
            continue
        if count not in facts:
            facts[count] = all(model.shard.every(is_place_invariant(model, count)))
        if facts[count]:
            return count
    return ROW_COUNTS[-1]


def invariant_rows(model: "FastGPTNeoX") -> int | None:
    """Return min_invariant_rows of a model. It is tried once, and all ranks agree on it."""
    if model.has_fixed_shapes:
        return None
    facts = model.strict_facts
    if "min_rows" not in facts:
        found = model.shard.every(min_invariant_rows(model))
        facts["min_rows"] = None if None in found else max(found)
    return facts["min_rows"]


def new_passes(model: "FastGPTNeoX", capacity: int, config: PassConfig) -> Passes:
    """Return passes over new memory for `capacity` tokens. Raises OutOfMemory."""
    # First, because all ranks take part in it, and one rank alone may raise below
    n_slots = slots_for(model, ample_capacity(model, capacity), config)
    what = f"a cache of {capacity} tokens"
    n_bytes = cache_bytes(model, capacity, config)
    require_memory(n_bytes, model.device, what)
    # Memory that is kept must be usable outside of inference mode as well
    is_inference = torch.is_inference_mode_enabled() and not model.has_fixed_shapes
    with memory_for(f"{what}, {format_bytes(n_bytes)}"), torch.inference_mode(is_inference):
        kv, rotary = model.new_memory(n_slots)
        if model.has_fixed_shapes:
            return FixedPasses(kv, rotary, model.config.vocab_size)
        return Passes(kv, rotary)


def ample_capacity(model: "FastGPTNeoX", capacity: int) -> int:
    """Return the capacity, or if memory is kept, all positions that the model was trained for.

    Otherwise every longer request would need new memory, and graphs over old memory are never
    freed. If it takes half of the free memory or more, the draft's cache may need the room.
    """
    if not model.has_fixed_shapes:
        return capacity
    ample = max(capacity, model.config.max_position_embeddings)
    free = min(model.shard.every(free_memory(model.device)))
    return capacity if cache_bytes(model, ample) > free / 2 else ample


def find_kept(model: "FastGPTNeoX", capacity: int) -> FixedPasses | None:
    """Return what a closed cache has left, if it has room for `capacity` tokens."""
    n_slots = slots_for(model, capacity)
    return next((kept for kept in model.kept if kept.kv.shape[3] >= n_slots), None)


def slots_for(model: "FastGPTNeoX", capacity: int, config: PassConfig | None = None) -> int:
    """Return how many slots a cache needs, so that every padded pass writes inside it."""
    config = config or PassConfig()
    if model.has_fixed_shapes:
        return slot_count(capacity + ROW_COUNTS[-1])
    n_slots = capacity + max(config.min_rows, model.min_rows) - 1
    return slot_count(n_slots) if config.is_strict else n_slots  # strict attention reads blocks


def cache_bytes(model: "FastGPTNeoX", capacity: int, config: PassConfig | None = None) -> int:
    """Return the size of a cache for `capacity` tokens."""
    return model.token_bytes * slots_for(model, capacity, config)


def require_caches(needs: Sequence[tuple["FastGPTNeoX", int, PassConfig]]) -> None:
    """Raise OutOfMemory unless caches of these models and capacities fit together.

    The system gives memory when it is first written. So each cache alone could be made, and all of
    them would fail when they are filled.
    """
    n_bytes = 0
    for model, capacity, config in needs:
        if not find_kept(model, capacity):
            model.drop_kept()
            n_bytes += cache_bytes(model, capacity, config)
    sizes = " and ".join(str(capacity) for _, capacity, _ in needs)
    require_memory(n_bytes, needs[0][0].device, f"caches of {sizes} tokens")
