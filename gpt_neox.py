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
    scores = model.prefill(prompt_ids, cache)  # of the last token
"""

import weakref
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
    load_tensors,
    read_config,
    weight_bytes,
)
from engine.cuda_graphs import FixedPasses, Inputs, Shape, Use, row_count, settle_kernels
from engine.hub import find_checkpoint
from engine.memory import OutOfMemory, memory_for, require_memory
from engine.passes import LayerSlots, Rows, fixed_rows, open_slots, strict_rows, tight_rows
from engine.products import Affine, Layout, fastest_rows, gelu
from engine.rotary import FIRST_POSITIONS, rotary_table, rotate_
from engine.scores import Scores
from engine.shares import WHOLE, Share
from engine.strict import Sight, attend_by_position

PREFILL_CHUNK = 512  # rows; bounds the [n, S] mask and the activations of a long prompt


class KVCache:
    """Preallocated keys and values; the state is one number, `length`.

    Slots [0, length) hold committed tokens, slots above are scratch that the next forward may
    overwrite. Never holds anything non-finite: a masked slot enters attention as 0 x value.
    """

    def __init__(self, storage: Storage, capacity: int, use: Use):
        self.storage = storage  # with the rotary table that its graphs, if any, were captured with
        self.kv = storage.kv  # [2, L, H, slots, D], keys, then values
        self.passes = storage.passes  # in fixed shapes; None where a pass has the shape it needs
        self.capacity, self.use = capacity, use
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
        for slot, row in enumerate(rows, start=first):
            if slot != first + row:  # no row left to move lies at or below this slot
                self.kv[:, :, :, slot] = self.kv[:, :, :, first + row]
        self.length = end


class GPTNeoX:
    """A causal language model over an explicit cache; batch 1, no batch axis."""

    def __init__(self, config: Config, tensors: dict[str, Tensor], share: Share = WHOLE):
        """Consumes `tensors`, checkpoint name -> tensor; `expected_shapes(config)` lists them.

        share: what of the model is here, and what of each tensor. Raises CheckpointError if a
        product of two tensors overflows.
        """
        self.config = config
        self.share = share
        self.gelu = ACTIVATIONS[config.activation]
        self.layout = Layout(config, share)
        self.embed_out = self.layout.take_head(tensors)  # from x to scores
        self.embed_in = tensors.pop(EMBED_IN)  # [V, hidden], or this share's ids
        self.device, self.dtype = self.embed_in.device, self.embed_in.dtype
        settle_kernels(self.device, self.dtype)
        self.layers = [self.layout.take_layer(tensors, i) for i in range(config.n_layers)]
        self.final_norm = Affine(tensors[f"{FINAL_NORM}.weight"], tensors[f"{FINAL_NORM}.bias"])
        n_positions = min(config.max_positions, FIRST_POSITIONS)
        self.turns = rotary_table(config, n_positions, self.device)
        # Stands in the cache for a key or value that overflowed in float16: its largest number
        self.overflow_mark = torch.finfo(self.dtype).max if self.dtype == torch.float16 else 0.0
        token_bytes = 2 * config.n_layers * self.layout.n_attended * self.dtype.itemsize
        min_rows = fastest_rows(self.embed_out, config.hidden_size)
        self.pool = CachePool(token_bytes, self.device, config.max_positions, min_rows)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        share: Share = WHOLE,
    ) -> "GPTNeoX":
        """Load a folder, or a hub repository `NAME` or `NAME@REVISION`; of a share, no more.

        Raises CheckpointError (nothing there, not GPT-NeoX, a tensor missing, extra or misshapen,
        a truncated file) and OutOfMemory.
        """
        folder = find_checkpoint(name_or_path)
        device = torch.device(device)
        what = f"the weights of {name_or_path}"
        with memory_for(what):
            config = read_config(folder)
            require_memory(weight_bytes(config, dtype, share), device, what)
            return cls(config, load_tensors(folder, config, device, dtype, share), share)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        start: int | None = None,
        n_last: int | None = None,
    ) -> Scores:
        """Run n rows against the cache, write their keys and values, say what follows each.

        tokens, positions: [n] int64. mask: [n, S] bool, True = may attend, start + n <= S <=
        capacity; None means causal with S = start + n. All three are on the host. The rows are
        written to slots [start, start + n); start defaults to cache.length, which does not move.
        n_last: the scores of so many rows at the end are wanted, None for all. On CUDA the next
        pass over this cache may overwrite them.
        """
        if start is None:
            start = cache.length
        cache.require(start + len(tokens))
        n, use = len(tokens), cache.use
        n_last = n_last or n
        if cache.passes and n <= use.n_rows:
            return cache.passes.forward(tokens, positions, mask, start, use)[-n_last:]
        if use.is_strict:
            rows = strict_rows(tokens, positions, mask, start, use.min_rows, self.embed_in)
            x = self._run(rows, cache.kv, cache.storage.turns)  # [min_rows, hidden], all scored
            return Scores(self._scores(x).float()[n - n_last : n, : use.n_ids])
        x = self._run_tight(tokens, positions, cache, mask, start)[-n_last:]  # [n_last, hidden]
        return Scores(self._scores(x).float()[:, : use.n_ids])

    def _run_tight(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, start: int
    ) -> Tensor:
        """The layers for as many rows and slots as are wanted, [n, hidden]."""
        rows = tight_rows(tokens, positions, mask, start, cache.use.min_rows, self.embed_in)
        return self._run(rows, cache.kv, cache.storage.turns)[: len(tokens)]

    def _run(self, rows: Rows, kv: Tensor, turns: Tensor) -> Tensor:
        """Embedding and layers, x [n, hidden]; not finite where it overflowed."""
        config, layout, share = self.config, self.layout, self.share
        in_order = isinstance(rows.sight, Sight)  # strict: no sum may depend on a row's place
        x = share.embed(rows.tokens, self.embed_in)  # [n, hidden]
        turns = turns.index_select(0, rows.positions)  # [n, R / 2], how far each row is rotated
        written, layer_slots = open_slots(kv, rows)
        space = layout.workspace(x)  # x in blocks, and where what is added to it is put together
        for layer, slots in zip(self.layers, layer_slots, strict=True):
            if config.is_parallel:
                # x + attention(norm(x)) + mlp(norm(x)): one product into both, one out of both
                qkv, inside = layout.split(layer.into(self._norm(x)))  # [3, H, n, D], [B, n, width]
                space.attended.copy_(self._attention(qkv, turns, slots, rows.sight))  # [H, n, D]
                gelu(inside, self.gelu, space.active)  # [B, n, width]
                space.x.add_(share.sum(layer.out_of(space.both), in_order))  # [B, n, width], x
            else:
                # x + attention(norm(x)), then x + mlp(norm(x))
                qkv = layout.heads(layer.qkv(self._norm(x)))  # [3, H, n, D]
                space.attended.copy_(self._attention(qkv, turns, slots, rows.sight))  # [H, n, D]
                attended = layer.attention_out(space.attended_rows)
                space.x.add_(share.sum(attended, in_order))  # [B, n, width]
                gelu(layer.mlp_in(self._norm(x)), self.gelu, space.active)  # [B, n, width]
                space.x.add_(share.sum(layer.mlp_out(space.active_rows), in_order))
        if self.overflow_mark:
            has_overflowed = written.abs().amax(dim=(0, 1, 2, 4)) == self.overflow_mark  # [n]
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x

    def _norm(self, x: Tensor) -> Tensor:
        """x with mean 0 and variance 1; a LayerNorm's scale and shift are in the next product."""
        return torch.layer_norm(x, x.shape[-1:], None, None, self.config.norm_eps)

    def _attention(
        self, qkv: Tensor, turns: Tensor, slots: LayerSlots, sight: Tensor | Sight
    ) -> Tensor:
        """Attended values [H, n, D] of queries, keys and values [3, H, n, D]."""
        rotate_(qkv[:2, ..., : self.config.rotary_dims], turns)  # queries and keys, in place
        # Nothing non-finite may enter the cache: it would leak through the mask (0 x nan is nan)
        # into rows that may not see it. The row itself still gets non-finite logits: float16 can
        # overflow here alone, so there a mark is left; elsewhere only a broken residual gets here.
        slots.write(qkv[1:], self.overflow_mark)  # keys and values, to the cache
        return attend(qkv[:1], slots.keys, slots.values, sight)

    def _scores(self, x: Tensor) -> Tensor:
        """Logits [n, V] of rows [n, hidden], in the model's dtype."""
        x = torch.layer_norm(x, x.shape[-1:], *self.final_norm, self.config.norm_eps)
        blocks = self.embed_out(x)  # [B, n, width]
        logits = blocks.transpose(0, 1).flatten(1)  # [n, V and padding]
        here = logits[:, : len(self.embed_in)]  # of a share's ids
        return self.share.gather(here)[:, : self.config.vocab_size]

    def prefill(
        self,
        tokens: list[int],
        cache: KVCache,
        read: Callable[[Tensor, Scores], None] | None = None,
    ) -> Scores:
        """Append tokens to the cache in chunks and return the last one's scores.

        Its logits are nan if any of the tokens overflowed: what reads one that did is worth
        nothing. read: called with the ids [n] and the scores of every chunk.
        """
        is_finite = torch.tensor(True, device=self.device)
        for ids in torch.tensor(tokens).split(PREFILL_CHUNK):
            cache.require(cache.length + len(ids))
            positions = torch.arange(cache.length, cache.length + len(ids))
            x = self._run_tight(ids, positions, cache, None, cache.length)  # [n, hidden]
            is_finite &= x.isfinite().all()
            if read:
                read(ids, Scores(self._scores(x).float()))
            cache.advance(len(ids))
        last = x[-1:].masked_fill(~is_finite, torch.nan)  # and so are its logits, of every share
        return Scores(self._scores(last).float()[:, : cache.use.n_ids])

    def append(self, tokens: list[int], cache: KVCache) -> Scores:
        """prefill() of few tokens in one pass: on CUDA of a fixed shape, as every pass of the loop.

        Returns the last one's scores; they do not tell if another token overflowed.
        """
        n = len(tokens)
        positions = torch.arange(cache.length, cache.length + n)
        scores = self.forward(torch.tensor(tokens), positions, cache, n_last=1)
        cache.advance(n)
        return scores

    def forget(self, cache: KVCache, start: int, n: int) -> None:
        """Drop slots [start, start + n); what follows moves down to them, n positions back.

        A key carries its position as a rotation, so turning it by n positions more moves it; each
        turn rounds it once in the model's dtype.
        """
        kept = cache.kv[:, :, :, start + n : cache.length].clone()  # read, then write: they overlap
        rotate_(kept[0, ..., : self.config.rotary_dims], self.turns[n].conj())
        cache.rewind(cache.length - n)
        cache.kv[:, :, :, start : cache.length] = kept

    def new_cache(self, capacity: int, use: Use | None = None) -> KVCache:
        """An empty cache for `capacity` tokens. Raises OutOfMemory if it would not fit."""
        use = use or Use()
        min_rows = max(use.min_rows, self.pool.min_rows)
        if use.is_strict:
            min_rows = row_count(max(use.n_rows, min_rows))  # and no pass has more
        use = use._replace(min_rows=min_rows)
        storage = self.pool.lend(capacity, use, self._make_storage)
        return KVCache(storage, capacity, use)

    def _make_storage(self, n_slots: int) -> Storage:
        """For the pool: memory of n_slots, and positions for all of them."""
        config = self.config
        if n_slots > len(self.turns):
            self.turns = rotary_table(config, n_slots, self.device)
        shape = (2, config.n_layers, self.layout.n_heads, n_slots, config.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        if not self.pool.is_fixed:
            return Storage(kv, self.turns, None)
        # The pool keeps this; a reference that counts would keep the model with it, and its weights
        run = partial(type(self)._run_fixed, weakref.proxy(self), kv, self.turns)
        passes = FixedPasses(run, n_slots, config.vocab_size, self.device)
        return Storage(kv, self.turns, passes)

    def _run_fixed(
        self, kv: Tensor, turns: Tensor, inputs: Inputs, shape: Shape, logits: Tensor
    ) -> None:
        """A whole pass of a fixed shape, for FixedPasses; its logits go to the last argument."""
        rows = fixed_rows(inputs, shape, self.embed_in)
        logits.copy_(self._scores(self._run(rows, kv, turns)))


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Tensor | Sight) -> Tensor:
    """Softmax attention [H, n, D] of q [1, H, n, D] over k, v [1, H, S, D].

    sight: [n or 1, S], 0 or -inf; or a Sight, where the result is to be the same bit for bit
    wherever a row's ancestors lie.
    """
    if isinstance(sight, Sight):
        return attend_by_position(q[0], k[0], v[0], sight)
    if q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[2] >= 16:
        # Torch's own kernel takes up to twice the time of two products here (measured).
        scores = torch.baddbmm(sight, q[0], k[0].transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), v[0])  # [H, n, S] times [H, S, D]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sight)[0]
