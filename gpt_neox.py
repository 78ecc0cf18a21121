"""GPT-NeoX (Pythia): embedding, layers of attention and MLP, scores, over an explicit KV cache.

One forward serves prefill, a decode step, a draft level and a tree: the caller says at which
position each row stands, to which cache slot it is written, and which slots it may attend. The
cache's whole state is one number, so taking back a rejected tree means moving that number.

How matrices are laid out, how passes are padded and captured on CUDA, and where a cache's memory
comes from is in engine/. All that shows here is that products give their outputs in B blocks of
`width` columns, [B, n, width], and that a layer's results are put together in one workspace, whose
views have the shapes that are wanted.

Architecture: Black et al. 2022 (GPT-NeoX-20B); Biderman et al. 2023 (Pythia).
Shapes: n new rows, S cache slots, L layers, H heads, D head size, R rotary dims, V vocabulary,
B blocks of columns.

    model = GPTNeoX.from_pretrained("models/tiny/target", "cpu", torch.float32)
    cache = model.new_cache(capacity=256)
    logits = model.prefill(prompt_ids, cache)  # [V]
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.caches import CachePool, Storage
from engine.checkpoint import (
    ACTIVATIONS,
    EMBED_IN,
    FINAL_NORM,
    Config,
    find_checkpoint,
    load_tensors,
    read_config,
    weight_bytes,
)
from engine.cuda_graphs import ROW_COUNTS, FixedPasses
from engine.memory import OutOfMemory, require_memory
from engine.passes import LayerSlots, Rows, fixed_rows, open_slots, tight_rows
from engine.products import Affine, Layout, fastest_rows, gelu
from engine.rotary import rotary_table, rotate_

PREFILL_CHUNK = 512  # rows; bounds the [n, S] mask and the activations of a long prompt


class KVCache:
    """Preallocated keys and values; the state is one number, `length`.

    Slots [0, length) hold committed tokens, slots above are scratch that the next forward may
    overwrite. Never holds anything non-finite: a masked slot enters attention as 0 x value.
    """

    def __init__(self, storage: Storage, capacity: int, min_rows: int):
        """min_rows: to which every pass over it is padded at least."""
        self.storage = storage  # with the rotary table that its graphs, if any, were captured with
        self.kv = storage.kv  # [2, L, H, slots, D], keys, then values
        self.passes = storage.passes  # in fixed shapes; None where a pass has the shape it needs
        self.capacity, self.min_rows = capacity, min_rows
        self.length = 0

    def require(self, need: int) -> None:
        """Raise OutOfMemory if `need` slots would not fit."""
        if need > self.capacity:
            raise OutOfMemory(f"the cache holds {self.capacity} tokens, {need} are needed")

    def advance(self, n: int) -> None:
        """Keep the next n scratch rows where they are: a causal block that was run in place."""
        self.require(self.length + n)
        self.length += n

    def rewind(self, length: int) -> None:
        """Forget everything from slot `length` on. What lies below stays as it is."""
        assert 0 <= length <= self.length, f"cannot rewind from {self.length} to {length}"
        self.length = length

    def commit(self, rows: Sequence[int]) -> None:
        """Move scratch rows to the front of the scratch region and keep them.

        rows: relative to `length`, strictly rising; the i-th goes to slot length + i.
        """
        first = self.length
        end = first + len(rows)
        self.require(end)
        if list(rows) != list(range(len(rows))):  # else in place: a first child's first child ...
            source = torch.tensor(rows).to(self.kv.device, non_blocking=True) + first
            moved = self.kv.index_select(3, source)  # copied before written: they overlap
            self.kv[:, :, :, first:end] = moved
        self.length = end


class GPTNeoX:
    """A causal language model over an explicit cache; batch 1, no batch axis."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]):
        """Consumes `tensors`, checkpoint name -> tensor; `expected_shapes(config)` lists them.

        Raises CheckpointError if a product of two tensors overflows.
        """
        self.config = config
        self.gelu = ACTIVATIONS[config.activation]
        self.layout = Layout(config)
        self.embed_out = self.layout.take_head(tensors)  # from x to scores
        self.embed_in = tensors.pop(EMBED_IN)  # [V, hidden]
        self.device, self.dtype = self.embed_in.device, self.embed_in.dtype
        self.layers = [self.layout.take_layer(tensors, i) for i in range(config.n_layers)]
        self.final_norm = Affine(tensors[f"{FINAL_NORM}.weight"], tensors[f"{FINAL_NORM}.bias"])
        self.turns = rotary_table(config, config.max_positions, self.device)
        # Stands in the cache for a key or value that overflowed in float16: its largest number
        self.overflow_mark = torch.finfo(self.dtype).max if self.dtype == torch.float16 else 0.0
        token_bytes = 2 * config.n_layers * config.hidden_size * self.dtype.itemsize
        min_rows = fastest_rows(self.embed_out, config.hidden_size)
        self.pool = CachePool(self._make_storage, token_bytes, self.device, min_rows)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "GPTNeoX":
        """Load a folder, or a hub repository `NAME` or `NAME@REVISION`.

        Raises CheckpointError (nothing there, not GPT-NeoX, a tensor missing, extra or misshapen,
        a truncated file) and OutOfMemory.
        """
        folder = find_checkpoint(name_or_path)
        config = read_config(folder)
        device = torch.device(device)
        require_memory(weight_bytes(config, dtype), device, f"the weights of {name_or_path}")
        return cls(config, load_tensors(folder, config, device, dtype))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        start: int | None = None,
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """Run n rows against the cache, write their keys and values, return logits.

        tokens, positions: [n] int64. mask: [n, S] bool, True = may attend, start + n <= S <=
        capacity; None means causal with S = start + n. The rows are written to slots
        [start, start + n); start defaults to cache.length, which does not move. logits_rows: [m]
        int64, the rows whose logits are wanted, None for all. All tensors may be on the host.
        Returns float32 [m or n, V]; on CUDA the next pass over this cache may overwrite them.
        """
        if start is None:
            start = cache.length
        if logits_rows is not None:
            logits_rows = logits_rows.to(self.device, non_blocking=True)
        cache.require(start + len(tokens))
        if cache.passes and len(tokens) <= cache.passes.n_rows:
            logits = cache.passes.forward(tokens, positions, mask, start, cache.min_rows)  # [n, V]
            return logits if logits_rows is None else logits.index_select(0, logits_rows)
        x = self._run_tight(tokens, positions, cache, mask, start)  # [n, hidden]
        if logits_rows is not None:
            x = x.index_select(0, logits_rows)
        return self._scores(x).float()

    def _run_tight(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, start: int
    ) -> Tensor:
        """The layers for as many rows and slots as are wanted, [n, hidden]."""
        rows = tight_rows(tokens, positions, mask, start, cache.min_rows, self.embed_in)
        return self._run(rows, cache.kv, cache.storage.turns)[: len(tokens)]

    def _run(self, rows: Rows, kv: Tensor, turns: Tensor) -> Tensor:
        """Embedding and layers, x [n, hidden]; not finite where it overflowed."""
        config, layout = self.config, self.layout
        x = F.embedding(rows.tokens, self.embed_in)  # [n, hidden]
        turns = turns.index_select(0, rows.positions)  # [n, R / 2], how far each row is rotated
        written, layer_slots = open_slots(kv, rows)
        space = layout.workspace(
            x
        )  # x in blocks, and where what a layer adds to it is put together
        for layer, slots in zip(self.layers, layer_slots, strict=True):
            if config.is_parallel:
                # x + attention(norm(x)) + mlp(norm(x)): one product into both, one out of both
                qkv, inside = layout.split(layer.into(self._norm(x)))  # [3, H, n, D], [B, n, width]
                space.attended.copy_(self._attention(qkv, turns, slots, rows.bias))  # [H, n, D]
                gelu(inside, self.gelu, space.active)  # [B, n, width]
                space.x.add_(layer.out_of(space.both))  # [B, n, width], which is x
            else:
                # x + attention(norm(x)), then x + mlp(norm(x))
                qkv = layout.heads(layer.qkv(self._norm(x)))  # [3, H, n, D]
                space.attended.copy_(self._attention(qkv, turns, slots, rows.bias))  # [H, n, D]
                space.x.add_(layer.attention_out(space.attended_rows))  # [B, n, width]
                gelu(layer.mlp_in(self._norm(x)), self.gelu, space.active)  # [B, n, width]
                space.x.add_(layer.mlp_out(space.active_rows))  # [B, n, width]
        if self.overflow_mark:
            has_overflowed = written.abs().amax(dim=(0, 1, 2, 4)) == self.overflow_mark  # [n]
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x

    def _norm(self, x: Tensor) -> Tensor:
        """x with mean 0 and variance 1; a LayerNorm's scale and shift are in the next product."""
        return torch.layer_norm(x, x.shape[-1:], None, None, self.config.norm_eps)

    def _attention(self, qkv: Tensor, turns: Tensor, slots: LayerSlots, bias: Tensor) -> Tensor:
        """Attended values [H, n, D] of queries, keys and values [3, H, n, D]."""
        rotate_(qkv[:2, ..., : self.config.rotary_dims], turns)  # queries and keys, in place
        # Nothing non-finite may enter the cache: it would leak through the mask (0 x nan is nan)
        # into rows that may not see it. The row itself still gets non-finite logits: float16 can
        # overflow here alone, so there a mark is left; elsewhere only a broken residual gets here.
        slots.write(qkv[1:], self.overflow_mark)  # keys and values, to the cache
        return attend(qkv[:1], slots.keys, slots.values, bias)

    def _scores(self, x: Tensor) -> Tensor:
        """Logits [n, V] of rows [n, hidden], in the model's dtype."""
        x = torch.layer_norm(x, x.shape[-1:], *self.final_norm, self.config.norm_eps)
        blocks = self.embed_out(x)  # [B, n, width]
        logits = blocks.transpose(0, 1).flatten(1)  # [n, V and padding]
        return logits[:, : self.config.vocab_size]

    def prefill(
        self,
        tokens: list[int],
        cache: KVCache,
        read: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Append tokens to the cache in chunks and return the last one's logits, float32 [V].

        They are nan if any of the tokens overflowed: what reads one that did is worth nothing.
        read: called with the ids [n] and the logits [n, V] of every chunk.
        """
        is_finite = torch.tensor(True, device=self.device)
        for ids in torch.tensor(tokens, device=self.device).split(PREFILL_CHUNK):
            cache.require(cache.length + len(ids))
            positions = torch.arange(cache.length, cache.length + len(ids), device=self.device)
            x = self._run_tight(ids, positions, cache, None, cache.length)  # [n, hidden]
            is_finite &= x.isfinite().all()
            if read:
                read(ids, self._scores(x).float())
            cache.advance(len(ids))
        return self._scores(x[-1:])[0].float().masked_fill(~is_finite, torch.nan)

    def append(self, tokens: list[int], cache: KVCache) -> Tensor:
        """prefill() of few tokens in one pass: on CUDA of a fixed shape, as every pass of the loop.

        Returns the last one's logits, float32 [V]; they do not tell if another token overflowed.
        """
        n = len(tokens)
        positions = torch.arange(cache.length, cache.length + n)
        ids = torch.tensor(tokens)
        last = torch.tensor([n - 1])
        logits = self.forward(ids, positions, cache, logits_rows=last)  # [1, V]
        cache.advance(n)
        return logits[0]

    def forget(self, cache: KVCache, start: int, n: int) -> None:
        """Drop slots [start, start + n); what follows moves down to them, n positions back.

        A key carries its position as a rotation, so turning it by n positions more moves it; each
        turn rounds it once in the model's dtype.
        """
        kept = cache.kv[:, :, :, start + n : cache.length].clone()  # read, then write: they overlap
        rotate_(kept[0, ..., : self.config.rotary_dims], self.turns[n].conj())
        cache.rewind(cache.length - n)
        cache.kv[:, :, :, start : cache.length] = kept

    def new_cache(self, capacity: int, n_rows: int = ROW_COUNTS[-1], min_rows: int = 1) -> KVCache:
        """An empty cache for `capacity` tokens. Raises OutOfMemory if it would not fit.

        n_rows: of the widest pass beside prefill. min_rows: to which every pass is padded at least.
        """
        min_rows = max(min_rows, self.pool.min_rows)
        storage = self.pool.lend(capacity, max(n_rows, min_rows), min_rows)
        return KVCache(storage, capacity, min_rows)

    def _make_storage(self, n_slots: int, n_rows: int) -> Storage:
        """For the pool: memory of n_slots, and positions for all of them."""
        config = self.config
        if n_slots > len(self.turns):
            self.turns = rotary_table(config, n_slots, self.device)
        shape = (2, config.n_layers, config.n_heads, n_slots, config.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        if not self.pool.is_fixed:
            return Storage(kv, self.turns, None)
        run = partial(self._run_fixed, kv, self.turns)
        passes = FixedPasses(run, n_rows, n_slots, config.vocab_size, self.device)
        return Storage(kv, self.turns, passes)

    def _run_fixed(
        self,
        kv: Tensor,
        turns: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        start: Tensor,
        logits: Tensor,
    ) -> None:
        """A whole pass of a fixed shape, for FixedPasses; its logits go to the last argument."""
        rows = fixed_rows(tokens, positions, mask, start, self.embed_in)
        logits.copy_(self._scores(self._run(rows, kv, turns)))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention [H, n, D] of q [1, H, n, D] over k, v [1, H, S, D].

    bias: [n or 1, S], 0 or -inf.
    """
    if q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[2] >= 16:
        # Torch's own kernel takes up to twice the time of two products here (measured).
        scores = torch.baddbmm(bias, q[0], k[0].transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), v[0])  # [H, n, S] times [H, S, D]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0]
