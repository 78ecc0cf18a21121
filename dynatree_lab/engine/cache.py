"""The KV cache of the fast model: its memory and its passes.

Each generation makes a cache for its own length. CUDA graphs work only on the memory over which
they were captured. So on CUDA, a closed cache leaves its memory and graphs to the next cache. For
the same reason, memory is allocated for all positions of the model if there is room. On a CPU,
closing a cache frees its memory.

    with model.new_cache(500, PassConfig(max_rows=64)) as cache:
        cache.prefill([5, 7, 9])

Shapes: n rows given, m rows run (m >= n, with padding), L layers, H heads, D head size, R rotary
dimensions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dynatree_lab.engine.layers import rotate_
from dynatree_lab.engine.masks import Mask, additive_causal_mask, causal_mask
from dynatree_lab.engine.memory import memory_for, require_memory
from dynatree_lab.engine.passes import (
    SLOT_STEP,
    SMALL_PASS,
    PassConfig,
    buffer_rows,
    round_up_rows,
    round_up_slots,
)
from dynatree_lab.engine.scores import Scores, make_scores
from gpt_neox import PREFILL_CHUNK, KVCache

if TYPE_CHECKING:
    from dynatree_lab.engine.model import FastGPTNeoX


class FastCache(KVCache):
    """The cache of one generation, made by FastGPTNeoX.new_cache. It keeps the scores of its last
    pass."""

    def __init__(self, model: "FastGPTNeoX", capacity: int, config: PassConfig):
        """Allocate memory for `capacity` tokens. Raises OutOfMemory."""
        with memory_for(f"a cache of {capacity} tokens"):
            super().__init__(*model.new_memory(count_slots(model, capacity, config)), capacity)

    def begin(self, model: "FastGPTNeoX", capacity: int, config: PassConfig) -> None:
        """Begin a text with no tokens."""
        self.model, self.config = model, config
        self.capacity, self.length = capacity, 0
        self.max_length = config.window.max_length
        self.tokens = torch.empty(0, dtype=torch.int64)  # tokens of the last pass, for `commit`
        self.scores: Scores | None = None  # of the last pass; on CUDA the next one overwrites them
        self.n_dropped = 0  # tokens that the window has dropped
        # If not None, the last hidden states [n, hidden] of the committed tokens, of each pass. A
        # short prefill of a draft adds none
        self.states: list[Tensor] | None = None

    def capture(self, shortest: int) -> None:
        """Prepare the passes for all lengths from `shortest` on. Only CUDA has something to do."""

    def close(self) -> None:
        """Leave the memory to the next cache, on CUDA."""

    def __enter__(self) -> "FastCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def n_until_drop(self) -> int:
        """Number of tokens that may be committed before the window drops some, at least 1."""
        return self.max_length - self.length

    @property
    def max_commit(self) -> int:
        """Maximum number of tokens that one iteration may commit, not across a drop."""
        return min(self.n_until_drop, self.config.masks.max_path)

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
        """Run n rows as GPTNeoX.forward does. Return and keep the scores of the last n_last rows,
        by default of all."""
        n = len(tokens)
        self.require(self.length + n)
        self.tokens = tokens
        self.model.before_pass(self, tokens, positions, mask)
        mask = causal_mask(n) if mask is None else mask
        self.scores = self.run(tokens, positions, mask, n_last or n)
        return self.scores

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor, n_last: int) -> Scores:
        """Run n rows and return the scores of the last n_last. Padding rows have token 0."""
        n, config = len(tokens), self.config
        m = max(n, config.min_rows)
        masks = config.masks.build(positions, mask, self.length, m, self.kv)
        if m > n:
            tokens, positions = (F.pad(ids, (0, m - n)) for ids in (tokens, positions))
        x = self.hidden(tokens, positions, masks)  # [m, hidden]
        first = max(min(n - n_last, m - config.min_rows), 0)  # the head also runs min_rows rows
        logits = self.model.embed_out(x[first:])
        logits = logits[n - n_last - first : n - first, : config.n_ids].float()
        return make_scores(x[n - n_last : n], logits, config.ranking)

    def hidden(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """Run n rows and return their last hidden states [n, hidden]."""
        device = self.kv.device
        rotary = self.rotary.index_select(0, positions.to(device, non_blocking=True))
        tokens = tokens.to(device, non_blocking=True)
        return self.model.gpt_neox(tokens, rotary, self.kv, self.length, mask)

    def prefill(self, tokens: list[int]) -> Tensor:
        """Run and commit the next tokens of the sequence as GPTNeoX.prefill does. A chunk also ends
        where the window drops tokens. Returns the logits [1, V] after the last token."""
        n = len(tokens)
        if self.config.is_draft and n <= min(SMALL_PASS, self.max_commit):
            positions = torch.arange(self.length, self.length + n)
            scores = self.forward(torch.tensor(tokens), positions, n_last=1)
            self.advance(n)
            return scores.logits
        ids, is_finite = torch.tensor(tokens), torch.tensor(True, device=self.kv.device)
        while len(ids):
            chunk, ids = ids.tensor_split([min(PREFILL_CHUNK, self.n_until_drop)])
            x = self.prefill_chunk(chunk)  # [n, hidden]
            is_finite &= x.isfinite().all()
        x = x[-1:].masked_fill(~is_finite, torch.nan)
        self.scores = self.model.score(x, self.config)
        return self.scores.logits

    def prefill_chunk(self, tokens: Tensor) -> Tensor:
        """Run and commit tokens [n]. Return their last hidden states [n, hidden]."""
        n = len(tokens)
        self.require(self.length + n)
        self.model.before_pass(self, tokens)
        mask = Mask(additive_causal_mask(n, self.length, self.kv))
        x = self.hidden(tokens, torch.arange(self.length, self.length + n), mask)
        if self.states is not None:
            self.states.append(x)
        self.advance(n)
        return x

    def advance(self, n: int) -> None:
        """Commit the first n scratch rows."""
        self.require(self.length + n)
        self.length += n
        self.drop_oldest()

    def commit(self, rows: Sequence[int]) -> None:
        if self.states is not None:
            self.states.append(self.scores.hidden[list(rows)])
        if self.config.rebuilds_cache:
            positions = torch.arange(self.length, self.length + len(rows))
            self.forward(self.tokens[list(rows)], positions, None, n_last=1)
            self.length += len(rows)
        else:
            super().commit(rows)
        self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the oldest tokens after the sinks if the cache is full."""
        if not self.n_until_drop:
            self.remove_slots(self.config.window.sinks, self.config.window.slack)
            self.n_dropped += self.config.window.slack

    def remove_slots(self, start: int, n: int) -> None:
        """Drop slots [start, start + n), and move the tokens after them down by n slots and n
        positions.

        A key encodes its position as a rotation, so it is rotated back. Each rotation rounds the
        key once in the model's dtype.
        """
        moved = self.kv[:, :, :, start + n : self.length].clone()  # source and destination overlap
        rotate_(moved[0, ..., : 2 * self.rotary.shape[-1]], self.rotary[n : n + 1].conj())
        self.length -= n
        self.kv[:, :, :, start : self.length] = moved


def count_slots(model: "FastGPTNeoX", capacity: int, config: PassConfig) -> int:
    """Return how many slots a cache needs, including those that padding rows write to."""
    if model.has_fixed_shapes:
        # Padding to a number of ROW_COUNTS adds fewer than half of its rows, and fewer than 256
        n_padding = min(buffer_rows(config) // 2, SLOT_STEP)
        return round_up_slots(capacity + max(round_up_rows(config.min_rows), n_padding))
    step = config.masks.slot_step
    return -(-(capacity + max(config.min_rows, model.min_rows) - 1) // step) * step


def cache_bytes(model: "FastGPTNeoX", capacity: int, config: PassConfig | None = None) -> int:
    """Return the size in bytes of a cache for `capacity` tokens."""
    return model.bytes_per_token * count_slots(model, capacity, config or PassConfig())


def require_caches(needs: Sequence[tuple["FastGPTNeoX", int, PassConfig]]) -> None:
    """Raise OutOfMemory unless caches of these models and capacities fit into memory together.

    On a CPU, the system provides memory only when it is first written. So each cache could be made,
    although all of them together do not fit.
    """
    n_bytes = 0
    for model, capacity, config in needs:
        if not model.find_reusable(capacity, config):
            model.reusable.clear()
            n_bytes += cache_bytes(model, capacity, config)
    sizes = " and ".join(str(capacity) for _, capacity, _ in needs)
    require_memory(n_bytes, needs[0][0].device, f"caches of {sizes} tokens")
