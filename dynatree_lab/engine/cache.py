"""The KV cache of the fast model: its memory and its passes.

Each generation makes a cache for its own length. CUDA graphs work only on the memory over which
they were captured. So on CUDA, a cache that is released leaves its memory and graphs to the next
one (engine/cuda_graphs.py).

    cache = model.new_cache(500, PassConfig(max_rows=64))
    model.prefill([5, 7, 9], cache)

Shapes: n rows given, m rows run (m >= n, with padding), L layers, H heads, D head size, R rotary
dimensions.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.layers import FusedTransformer, Head, rotate_
from dynatree_lab.engine.masks import PLAIN, causal_mask
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.engine.scores import Scores, make_scores
from gpt_neox import PREFILL_CHUNK, KVCache


class FastCache(KVCache):
    """The cache of one generation, made by FastGPTNeoX.new_cache. It takes a pass from the model to
    the layers: it makes the mask, adds padding rows, and returns the scores."""

    def begin(
        self, transformer: FusedTransformer, head: Head, capacity: int, config: PassConfig
    ) -> None:
        """Begin a text with no tokens."""
        self.transformer, self.head, self.config = transformer, head, config
        self.capacity, self.length = capacity, 0
        self.max_length = config.window.max_length
        self.is_replaying = False  # in a FixedCache, from `capture` on
        self.inputs: PassInputs | None = None  # of the last pass
        self.scores: Scores | None = None  # of the last pass; on CUDA the next one overwrites them
        self.n_dropped = 0  # tokens that the window has dropped
        # If not None, the last hidden states [n, hidden] of the committed tokens, of each pass. A
        # short prefill of a draft adds none
        self.states: list[Tensor] | None = None

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

    def place(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, n_last: int
    ) -> PassInputs:
        """Return and keep the inputs of a pass whose rows go to the slots from `length` on. mask:
        None is causal. Raises IndexError if the cache is too small."""
        n = len(tokens)
        self.require(self.length + n)
        mask = causal_mask(n) if mask is None else mask
        self.inputs = PassInputs(tokens, positions, mask, self.length, n_last)
        return self.inputs

    def run(self, inputs: PassInputs) -> Scores:
        """Run a pass and return the scores of its last rows. Padding rows have token 0."""
        n, config = len(inputs.tokens), self.config
        m = max(n, config.min_rows)
        mask = config.masks.build(inputs, m, self.kv)
        tokens, positions = inputs.tokens, inputs.positions
        if m > n:
            tokens, positions = (F.pad(ids, (0, m - n)) for ids in (tokens, positions))
        tokens, rotary = self.look_up(tokens, positions)
        x = self.transformer(tokens, rotary, self.kv, inputs.start, mask)  # [m, hidden]
        wanted = n - inputs.n_last
        first = max(min(wanted, m - config.min_rows), 0)  # the head also runs min_rows rows
        logits = self.head(x[first:])
        logits = logits[wanted - first : n - first, : config.n_ids].float()
        return make_scores(x[wanted:n], logits, config.ranking)

    def run_chunk(self, inputs: PassInputs) -> Tensor:
        """Run rows such as a chunk of a prompt, without padding and never strict, and return their
        last hidden states [n, hidden]."""
        mask = PLAIN.build(inputs, len(inputs.tokens), self.kv)
        tokens, rotary = self.look_up(inputs.tokens, inputs.positions)
        return self.transformer(tokens, rotary, self.kv, inputs.start, mask)

    def look_up(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [m], and the rotary embeddings [m, R / 2] of positions [m], on the device
        of the cache."""
        device = self.kv.device
        rotary = self.rotary.index_select(0, positions.to(device, non_blocking=True))
        return tokens.to(device, non_blocking=True), rotary

    def chunks(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield the chunks of a prompt [n]. One also ends where the window drops tokens. The caller
        commits each chunk before it takes the next one."""
        while len(tokens):
            chunk, tokens = tokens.tensor_split([min(PREFILL_CHUNK, self.n_until_drop)])
            yield chunk

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
            self.run(self.place(self.inputs.tokens[list(rows)], positions, None, n_last=1))
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
        back = self.rotary[n : n + 1].conj()  # by n positions
        rotate_(moved[0, ..., : 2 * self.rotary.shape[-1]], back)
        self.length -= n
        self.kv[:, :, :, start : self.length] = moved
