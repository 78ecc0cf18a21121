"""GPT-NeoX (Pythia), written out: rotary embedding, KV cache, attention, one forward.

One forward serves prefill, a decode step, a draft level and a tree: the caller says at which
position each row stands, to which cache slot it is written, and which slots it may attend. The
cache's whole state is one number, so taking back a rejected tree means moving that number. When a
model is loaded its matrices are joined and laid out for passes of a few rows. On CUDA a pass has
one of a few fixed shapes (engine/cuda_graphs.py).

Architecture: Black et al. 2022 (GPT-NeoX-20B); Biderman et al. 2023 (Pythia).
Shapes: n new rows, S cache slots, L layers, H heads, D head size, R rotary dims, V vocabulary.

    model = GPTNeoX.from_pretrained("models/tiny/target", "cpu", torch.float32)
    cache = model.new_cache(capacity=256)
    logits = model.prefill(prompt_ids, cache)  # [V]
"""

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint import (
    ACTIVATIONS,
    EMBED_IN,
    EMBED_OUT,
    FINAL_NORM,
    LAYER_NAMES,
    CheckpointError,
    Config,
    find_checkpoint,
    load_tensors,
    read_config,
    weight_bytes,
)
from engine.cuda_graphs import ROW_COUNTS, FixedPasses, row_count, slot_count

COLUMNS = 40  # of a matrix, at most, that are stored together on CPU
PREFILL_CHUNK = 512  # rows; bounds the [n, S] mask and the activations of a long prompt


class OutOfMemory(Exception):
    """Something that would not fit in memory; the message says what was needed and what is free."""


class KVCache:
    """Preallocated keys and values; the state is one number, `length`.

    Slots [0, length) hold committed tokens, slots above are scratch that the next forward may
    overwrite. Starts as zeros, because a masked slot still enters attention as 0 x value.
    """

    def __init__(self, kv: Tensor, turns: Tensor, passes: FixedPasses | None):
        self.kv = kv  # [2, L, H, slots, D], keys, then values
        self.turns = turns  # complex64 [positions, R / 2], the rotary table
        self.passes = passes  # in fixed shapes; None where a pass has the shape it needs
        self.length = 0
        self.capacity = self.min_rows = 0  # `lend` says how much of it is in use

    def lend(self, capacity: int, min_rows: int) -> "KVCache":
        """Empty, for `capacity` tokens and passes padded to at least min_rows rows."""
        self.length, self.capacity, self.min_rows = 0, capacity, min_rows
        if self.passes:
            self.passes.is_replaying = False  # until `capture` has seen to these lengths
        return self

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
        first, m = self.length, len(rows)
        self.require(first + m)
        if list(rows) != list(range(m)):  # a first child's first child ... is in place already
            source = torch.tensor(rows, device=self.kv.device) + first
            moved = self.kv.index_select(3, source)  # copied before written: they overlap
            self.kv[:, :, :, first : first + m] = moved
        self.length += m


class Affine(NamedTuple):
    """A LayerNorm, or a matrix as the checkpoint has it, [out, in], with its bias."""

    weight: Tensor
    bias: Tensor


class Product(NamedTuple):
    """A matrix laid out for multiplying by `lay_out`, and its bias."""

    weight: Tensor
    bias: Tensor
    width: int  # of the blocks of columns that the result comes in


class Block(NamedTuple):
    """x + out_of(mix(into(norm(x)))): attention, an MLP, or both beside each other.

    The norm's own scale and shift are folded into `into`. What can be one product is one: for a
    small model, and on a CPU, a product costs more than what it computes.
    """

    into: Product  # to all queries, keys and values, [3, H, D], then to the MLP's inside
    out_of: Product  # from what was attended, then from the activated inside
    n_attended: int  # columns of the former: hidden, or 0 without attention


class GPTNeoX:
    """A causal language model over an explicit cache; batch 1, no batch axis."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]):
        """Consumes `tensors`, checkpoint name -> tensor; `expected_shapes(config)` lists them.

        Matrices are taken out layer by layer, so that laying them out anew never needs a second
        copy of the model. Raises CheckpointError if a product of two tensors overflows.
        """
        self.config = config
        self.gelu = ACTIVATIONS[config.activation]
        self.embed_in = tensors.pop(EMBED_IN)  # [V, hidden]
        self.device, self.dtype = self.embed_in.device, self.embed_in.dtype
        self.width = next(w for w in range(COLUMNS, 0, -1) if config.head_size % w == 0)
        self.n_inside = -(-config.intermediate_size // self.width) * self.width  # of an MLP
        embed_out = tensors.pop(EMBED_OUT, self.embed_in)
        self.embed_out = lay_out(Affine(embed_out, embed_out.new_zeros(len(embed_out))), self.width)
        # On CPU two rows of a large product take less time than one (measured)
        is_large = self.embed_out.weight.ndim == 3 and config.hidden_size >= 512
        self.min_rows = 2 if is_large else 1
        self.is_fixed = self.has_graphs = self.device.type == "cuda"
        if self.is_fixed:
            # cuDNN's attention is reported to refuse one row, so that ar would round otherwise than
            # a tree, and to plan anew for every length of a prompt (not measured here)
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.idle: list[KVCache] = []  # of fixed shapes, with what was captured over them
        self.n_graphs, self.capture_s = 0, 0.0
        # Stands in the cache for a key or value that overflowed in float16: its largest number
        self.overflow_mark = torch.finfo(self.dtype).max if self.dtype == torch.float16 else 0.0
        self.final_norm = Affine(tensors[f"{FINAL_NORM}.weight"], tensors[f"{FINAL_NORM}.bias"])
        # A parallel layer is one block, a sequential one is two.
        self.layers = [self._make_layer(tensors, i) for i in range(config.n_layers)]
        self.turns = self._rotary_table(config.max_positions)  # complex64 [positions, R / 2]

    def _make_layer(self, tensors: dict[str, Tensor], index: int) -> list[Block]:
        def affine(field: str) -> Affine:
            name = f"gpt_neox.layers.{index}.{LAYER_NAMES[field]}"
            weight = tensors.pop(f"{name}.weight")
            return Affine(weight, tensors.get(f"{name}.bias", weight.new_zeros(len(weight))))

        def block(into: Affine, out_of: Affine, has_attention: bool) -> Block:
            n_attended = self.config.hidden_size * has_attention
            return Block(lay_out(into, self.width), lay_out(out_of, self.width), n_attended)

        qkv = fold(affine("attention_norm"), affine("qkv"))
        qkv = Affine(*(part[order_rows(self.config)] for part in qkv))
        mlp_in = fold(affine("mlp_norm"), affine("mlp_in"))
        attention_out, mlp_out = affine("attention_out"), affine("mlp_out")
        padding = self.n_inside - self.config.intermediate_size
        mlp_out = mlp_out._replace(weight=F.pad(mlp_out.weight, (0, padding)))
        if not self.config.is_parallel:
            return [block(qkv, attention_out, True), block(mlp_in, mlp_out, False)]
        into = Affine(*map(torch.cat, zip(qkv, mlp_in, strict=True)))
        weight = torch.cat([attention_out.weight, mlp_out.weight], dim=1)
        return [block(into, Affine(weight, attention_out.bias + mlp_out.bias), True)]

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

    def new_cache(self, capacity: int, n_rows: int = ROW_COUNTS[-1], min_rows: int = 1) -> KVCache:
        """An empty cache for `capacity` tokens. Raises OutOfMemory if it would not fit.

        n_rows: of the widest pass beside prefill. min_rows: to which every pass is padded at least.
        """
        min_rows = max(min_rows, self.min_rows)
        n_rows, n_slots = max(n_rows, min_rows), self._storage(capacity, min_rows)
        if cache := self.find_idle(capacity, n_rows):
            self.idle.remove(cache)
            return cache.lend(capacity, min_rows)
        self.idle.clear()  # too small
        require_memory(self.cache_bytes(capacity), self.device, f"a cache of {capacity} tokens")
        if n_slots > self.turns.shape[0]:  # n_slots, as the cache may be lent again for more tokens
            self.turns = self._rotary_table(n_slots)
        failure = RuntimeError if self.device.type == "cpu" else torch.OutOfMemoryError
        try:
            # To be lent again, it must be of use outside inference mode too
            with torch.inference_mode(torch.is_inference_mode_enabled() and not self.is_fixed):
                return self._make_cache(n_slots, n_rows).lend(capacity, min_rows)
        except failure as error:  # torch has no narrower one on CPU
            size = self.cache_bytes(capacity) / 1e9
            raise OutOfMemory(
                f"no room for a cache of {capacity} tokens, {size:,.1f} GB"
            ) from error

    def _make_cache(self, n_slots: int, n_rows: int) -> KVCache:
        config = self.config
        shape = (2, config.n_layers, config.n_heads, n_slots, config.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        if not self.is_fixed:
            return KVCache(kv, self.turns, None)
        run = partial(self._run_fixed, kv, self.turns)
        passes = FixedPasses(run, n_rows, n_slots, config.vocab_size, self.device)
        return KVCache(kv, self.turns, passes)

    def find_idle(self, capacity: int, n_rows: int) -> KVCache | None:
        """A cache that was given back and is large enough."""
        n_slots = self._storage(capacity)
        fitting = (c for c in self.idle if c.kv.shape[3] >= n_slots and c.passes.n_rows >= n_rows)
        return next(fitting, None)

    def release(self, cache: KVCache) -> None:
        """Take back a cache that is not used any more, for what was captured over it."""
        if cache.passes:
            self.idle.append(cache)

    def capture(self, cache: KVCache, shortest: int) -> None:
        """Capture the passes over a cache from a length on, unless that is done or not wanted."""
        if self.has_graphs:
            start = time.perf_counter()
            lengths = shortest, cache.capacity
            self.n_graphs += cache.passes.capture(*lengths, cache.length, cache.min_rows)
            self.capture_s += time.perf_counter() - start

    def padded(self, n: int, min_rows: int = 1) -> int:
        """The rows that a pass of n rows really has."""
        n = max(n, min_rows, self.min_rows)
        return row_count(n) if self.is_fixed and n <= ROW_COUNTS[-1] else n

    def cache_bytes(self, capacity: int) -> int:
        """What a cache for `capacity` tokens takes."""
        return self.token_bytes * self._storage(capacity)

    @property
    def token_bytes(self) -> int:
        """What one token's keys and values take."""
        return 2 * self.config.n_layers * self.config.hidden_size * self.dtype.itemsize

    def _storage(self, capacity: int, min_rows: int = 1) -> int:
        """Slots that a cache needs so that every padded write stays inside."""
        if self.is_fixed:
            return slot_count(capacity + ROW_COUNTS[-1])
        return capacity + max(min_rows, self.min_rows) - 1

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
            x = self._run_tight(ids, positions, cache, None, cache.length)
            is_finite &= x.isfinite().all()
            if read:
                read(ids, self._scores(x).float())
            cache.advance(len(ids))
        return self._scores(x[-1:])[0].float().masked_fill(~is_finite, torch.nan)

    def append(self, tokens: list[int], cache: KVCache) -> Tensor:
        """prefill() of few tokens in one pass: on CUDA of a fixed shape, as every pass of the loop.

        Returns the last one's logits, float32 [V]; they do not tell if another token overflowed.
        """
        ids, n = torch.tensor(tokens, device=self.device), len(tokens)
        positions = torch.arange(cache.length, cache.length + n, device=self.device)
        last = torch.tensor([n - 1], device=self.device)
        logits = self.forward(ids, positions, cache, logits_rows=last)
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
        int64, the rows whose logits are wanted, None for all. Returns float32 [m or n, V]; on CUDA
        the next pass over this cache may overwrite them.
        """
        start = cache.length if start is None else start
        cache.require(start + len(tokens))
        if cache.passes and len(tokens) <= cache.passes.n_rows:
            logits = cache.passes.forward(tokens, positions, mask, start, cache.min_rows)
            return logits if logits_rows is None else logits.index_select(0, logits_rows)
        x = self._run_tight(tokens, positions, cache, mask, start)
        return self._scores(x if logits_rows is None else x.index_select(0, logits_rows)).float()

    def _run_tight(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, start: int
    ) -> Tensor:
        """The layers for as many rows and slots as are wanted, [n, hidden]."""
        n = len(tokens)
        n_rows = max(n, cache.min_rows)
        bias = self._attention_bias(n, n_rows, start, mask)
        if n_rows > n:
            tokens, positions = (F.pad(t, (0, n_rows - n)) for t in (tokens, positions))
        return self._run_layers(tokens, positions, cache.kv, cache.turns, bias, start)[:n]

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
        """A whole pass for FixedPasses: no shape depends on a value, and nothing is read back."""
        bias = kv.new_full(mask.shape, -math.inf).masked_fill_(mask, 0.0)
        place = torch.arange(len(tokens), device=self.device) + start
        logits.copy_(self._scores(self._run_layers(tokens, positions, kv, turns, bias, place)))

    def _run_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        turns: Tensor,
        bias: Tensor,
        place: int | Tensor,
    ) -> Tensor:
        """forward() up to the final norm, [n, hidden]; not finite where it overflowed.

        bias: [n or 1, S], 0 or -inf. place: the first slot to write, or all of them, [n].
        """
        n, n_slots = len(tokens), bias.shape[1]
        turns = turns.index_select(0, positions)  # [n, R / 2]
        x = F.embedding(tokens, self.embed_in)  # [n, hidden]
        hidden, head_size = x.shape[1], self.config.head_size
        # Views for all layers at once: on a CPU a view per layer costs as much as a small product.
        stored = kv[:, :, :, :n_slots]  # [2, L, H, S, D]
        keys, values = stored[:, :, None]  # [L, 1, H, S, D] each
        if isinstance(place, int):
            new_kv = kv[:, :, :, place : place + n]  # [2, L, H, n, D]
        else:
            new_kv = stored.new_empty(*stored.shape[:3], n, head_size)
        columns = in_blocks(x, self.width)  # to add to x
        both = x.new_empty(n, hidden + self.n_inside)
        attention_part, mlp_part = both[:, :hidden], both[:, hidden:]
        attended, active = in_blocks(attention_part, head_size), in_blocks(mlp_part, self.width)
        inputs = [both] if self.config.is_parallel else [attention_part, mlp_part]
        views = zip(new_kv.unbind(1), kv.unbind(1), keys.unbind(), values.unbind(), strict=True)
        for layer, (written, slots, k, v) in zip(self.layers, views, strict=True):
            for block, mixed in zip(layer, inputs, strict=True):
                rows = multiply(self._norm(x), block.into)  # [B, n, width]
                n_qkv = 3 * block.n_attended // self.width
                qkv, inside = rows.split_with_sizes((n_qkv, rows.shape[0] - n_qkv))
                if n_qkv:
                    q = self._project(qkv, turns, written)
                    if isinstance(place, Tensor):
                        slots.index_copy_(2, place, written)  # rows added may lie beyond S
                    attended.copy_(attend(q, k, v, bias))
                if inside.shape[0]:
                    gelu(inside, self.gelu, active)
                columns += multiply(mixed, block.out_of)
        if self.overflow_mark:
            has_overflowed = new_kv.abs().amax(dim=(0, 1, 2, 4)) == self.overflow_mark  # [n]
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x

    def _scores(self, x: Tensor) -> Tensor:
        """Logits [n, V] of rows [n, hidden], in the model's dtype."""
        x = torch.layer_norm(x, x.shape[-1:], *self.final_norm, self.config.norm_eps)
        logits = multiply(x, self.embed_out).transpose(0, 1).flatten(1)  # [n, V and padding]
        return logits[:, : self.config.vocab_size]

    def _project(self, qkv: Tensor, turns: Tensor, new_kv: Tensor) -> Tensor:
        """Queries [1, H, n, D] of qkv [B, n, width]; the rest, turned, to new_kv [2, H, n, D]."""
        parts = qkv.unflatten(0, (3, self.config.n_heads, -1))  # [3, H, D / width, n, width]
        rows = parts.transpose(2, 3).flatten(-2)  # [3, H, n, D]
        rotate_(rows[:2, ..., : self.config.rotary_dims], turns)
        # Nothing non-finite may enter the cache: it would leak through the mask (0 x nan is nan)
        # into rows that may not see it. The row itself still gets non-finite logits: float16 can
        # overflow here alone, so there a mark is left; elsewhere only a broken residual gets here.
        mark = self.overflow_mark
        torch.nan_to_num(rows[1:], nan=mark, posinf=mark, neginf=-mark, out=new_kv)
        return rows[:1]

    def _norm(self, x: Tensor) -> Tensor:
        """x with mean 0 and variance 1; what a LayerNorm does beyond that is in the weights."""
        return torch.layer_norm(x, x.shape[-1:], None, None, self.config.norm_eps)

    def _attention_bias(self, n: int, n_rows: int, start: int, mask: Tensor | None) -> Tensor:
        """The mask as 0 / -inf in the model's dtype, built once per pass: [n_rows or 1, S].

        Rows added see the first slot, as every row must see some.
        """
        if mask is None:
            if n == 1:
                return self.embed_in.new_zeros(1, start + 1)
            mask = torch.ones(n, start + n, dtype=torch.bool, device=self.device).tril_(start)
        bias = self.embed_in.new_full((n_rows, mask.shape[1]), -math.inf)
        if n_rows == n:
            return bias.masked_fill_(mask, 0.0)
        bias[n:, 0] = 0.0
        bias[:n].masked_fill_(mask, 0.0)
        return bias

    def _rotary_table(self, n_positions: int) -> Tensor:
        """What a position turns each pair of dimensions by: complex64 [n_positions, R / 2]."""
        half = torch.arange(0, self.config.rotary_dims, 2, device=self.device).float()
        frequencies = self.config.rotary_base ** -(half / self.config.rotary_dims)  # [R / 2]
        angles = torch.arange(n_positions, device=self.device).float()[:, None] * frequencies
        return torch.polar(torch.ones_like(angles), angles)


def fold(norm: Affine, after: Affine) -> Affine:
    """A LayerNorm's scale and shift, and the matrix behind it, as one matrix and bias.

    Rounded once. Raises CheckpointError if that overflows.
    """
    weight, dtype = after.weight.float(), after.weight.dtype
    bias = (after.bias.float() + weight @ norm.bias.float()).to(dtype)
    weight = (weight * norm.weight.float()).to(dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise CheckpointError(f"a matrix times the norm before it is not finite in {dtype}")
    return Affine(weight, bias)


def lay_out(affine: Affine, width: int) -> Product:
    """A matrix [out, in] for `multiply`, with zeros up to a whole number of blocks of columns.

    On CPU it is stored block by block, weight [B, in, width] and bias [B, 1, width]: MKL multiplies
    narrow matrices as they lie, but copies a wide one first, which takes up to as long again as the
    product of 2 to 16 rows (measured). Elsewhere it is only seen as [in, out].
    """
    weight, bias = affine
    if padding := -len(weight) % width:
        weight, bias = F.pad(weight, (0, 0, 0, padding)), F.pad(bias, (0, padding))
    is_mkl = weight.device.type == "cpu" and torch.backends.mkl.is_available()
    if not is_mkl or weight.dtype != torch.float32:
        return Product(weight.t(), bias, width)
    weight = weight.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
    return Product(weight, bias.view(-1, 1, width), width)


def multiply(x: Tensor, product: Product) -> Tensor:
    """x [n, in] -> [B, n, width], the outputs in blocks of columns."""
    weight, bias, width = product
    if weight.ndim == 3:
        return torch.baddbmm(bias, x.expand(weight.shape[0], -1, -1), weight)
    return in_blocks(torch.addmm(bias, x, weight), width)


def in_blocks(x: Tensor, width: int) -> Tensor:
    """x [n, B * width] seen as [B, n, width]."""
    return x.unflatten(1, (-1, width)).transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention [H, n, D] of q [1, H, n, D] over k, v [1, H, S, D].

    bias: [n or 1, S], 0 or -inf.
    """
    if q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[2] >= 16:
        # Torch's own kernel takes up to twice the time of two products here (measured).
        scores = torch.baddbmm(bias, q[0], k[0].transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), v[0])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0]


def gelu(x: Tensor, approximate: str, out: Tensor) -> None:
    """GELU of x, which may be lost, to `out`; both [B, n, width]."""
    if x.device.type != "cpu":
        F.gelu(x, approximate=approximate, out=out)
        return
    turned = x.transpose(0, 2)  # a contiguous tensor goes to oneDNN, which takes long to begin
    F.gelu(turned, approximate=approximate, out=turned)
    out.copy_(x)  # computed there at once it is not vectorised


def rotate_(x: Tensor, turns: Tensor) -> None:
    """Rotary embedding in place: x [..., n, R] in neighbouring pairs, turns [n or none, R / 2]."""
    pairs = x.float().view(torch.complex64)  # x itself if it is float32
    pairs.mul_(turns)
    if x.dtype != torch.float32:
        x.copy_(pairs.view(torch.float32))


def order_rows(config: Config) -> Tensor:
    """Where the rows of query_key_value [H * 3 * D] come from: to [3, H, D], pairs side by side.

    The checkpoint groups them as [H, 3, D], and turns dimension i together with R / 2 + i. Any
    order of dimensions will do for attention if queries and keys share it; with pairs side by side
    a turn is one complex product.
    """
    n_heads, size, n_pairs = config.n_heads, config.head_size, config.rotary_dims // 2
    rows = torch.arange(3 * config.hidden_size).view(n_heads, 3, size).transpose(0, 1).clone()
    turned = rows[:2, :, : 2 * n_pairs].unflatten(-1, (2, n_pairs)).mT.flatten(-2)
    rows[:2, :, : 2 * n_pairs] = turned
    return rows.flatten()


def require_memory(need: int, device: torch.device, what: str) -> None:
    """Raise OutOfMemory if `need` bytes are not free on the device."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = _free_host_memory()
    if need > free:
        raise OutOfMemory(
            f"{what} would take {need / 1e9:,.1f} GB on {device}, {free / 1e9:,.1f} GB are free"
        )


def _free_host_memory() -> int:
    """Bytes that can be had without swapping, as Linux estimates it; elsewhere all there are."""
    try:
        available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        return int(available[1]) * 1024
    except (OSError, TypeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
