"""GPT-NeoX (Pythia), written out: config, rotary, KV cache, one forward, loading safetensors.

One forward serves prefill, a decode step, a draft level and a tree: the caller says at which
position each row stands, to which cache slot it is written, and which slots it may attend. The
cache's whole state is one number, so taking back a rejected tree means moving that number. When a
model is loaded its matrices are joined and laid out for passes of a few rows; a pass may be padded
to a few fixed shapes.

Architecture: Black et al. 2022 (GPT-NeoX-20B); Biderman et al. 2023 (Pythia).
Shapes: n new rows, S cache slots, L layers, H heads, D head size, R rotary dims, V vocabulary.

    model = GPTNeoX.from_pretrained("models/tiny/target", "cpu", torch.float32)
    cache = model.new_cache(capacity=256)
    logits = model.prefill(prompt_ids, cache)  # [V]
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

COLUMNS = 40  # of a matrix, at most, that are stored together on CPU
PREFILL_CHUNK = 512  # rows; bounds the [n, S] mask and the activations of a long prompt
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}  # F.gelu's approximate=
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CheckpointError(Exception):
    """A checkpoint that cannot be found, read or used; the message is one line for the user."""


class HubUnreachable(CheckpointError):
    """A hub name, but no network and nothing in the hub client's cache."""


class OutOfMemory(Exception):
    """Something that would not fit in memory; the message says what was needed and what is free."""


@dataclass(frozen=True)
class Config:
    """What config.json says, in both of its styles (published Pythia and newer saves)."""

    vocab_size: int  # V, rows of the embedding; may be padded beyond the tokenizer
    hidden_size: int
    n_layers: int  # L
    n_heads: int  # H
    intermediate_size: int
    max_positions: int  # the trained range; longer works, worse
    rotary_fraction: float  # share of each head that is rotated
    rotary_base: float
    activation: str = "gelu"
    norm_eps: float = 1e-5
    is_parallel: bool = True  # x + attention(x) + mlp(x), else one after the other
    is_tied: bool = False  # the output projection is the embedding
    has_attention_bias: bool = True
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "n_layers", "n_heads", "intermediate_size")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} is {getattr(self, name)}")
        if self.hidden_size % self.n_heads:
            raise CheckpointError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.n_heads} heads"
            )
        if not (self.rotary_base > 0 and self.norm_eps > 0):
            base, eps = self.rotary_base, self.norm_eps
            raise CheckpointError(f"rotary base {base} and layer_norm_eps {eps} must be positive")
        if not 0 < self.rotary_fraction <= 1:
            raise CheckpointError(f"rotary fraction {self.rotary_fraction} is outside (0, 1]")
        if self.rotary_dims < 2 or self.rotary_dims % 2 or self.head_size % 2:
            dims = f"{self.rotary_dims} rotary dims of {self.head_size}"
            raise CheckpointError(f"{dims} cannot be rotated in pairs")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"hidden_act {self.activation!r} is not one of {known}")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.n_heads

    @property
    def rotary_dims(self) -> int:
        return int(self.head_size * self.rotary_fraction)

    @classmethod
    def from_json(cls, raw: dict) -> "Config":
        """Read a parsed config.json. Raises CheckpointError naming what is missing or foreign."""
        if raw.get("model_type") != "gpt_neox":
            raise CheckpointError(f"model_type is {raw.get('model_type')!r}, not 'gpt_neox'")
        rope = raw.get("rope_parameters")
        rope_type = rope.get("rope_type") if isinstance(rope, dict) else None
        scaling = raw.get("rope_scaling") or rope_type
        if scaling not in (None, "default"):
            raise CheckpointError(f"rope scaling {scaling!r} is not supported")
        eos = raw.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        try:
            if rope:  # newer saves
                fraction, base = rope["partial_rotary_factor"], rope["rope_theta"]
            else:
                fraction, base = raw["rotary_pct"], raw["rotary_emb_base"]
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                n_layers=int(raw["num_hidden_layers"]),
                n_heads=int(raw["num_attention_heads"]),
                intermediate_size=int(raw["intermediate_size"]),
                max_positions=int(raw["max_position_embeddings"]),
                rotary_fraction=float(fraction),
                rotary_base=float(base),
                activation=str(raw.get("hidden_act", cls.activation)),
                norm_eps=float(raw.get("layer_norm_eps", cls.norm_eps)),
                is_parallel=bool(raw.get("use_parallel_residual", cls.is_parallel)),
                is_tied=bool(raw.get("tie_word_embeddings", cls.is_tied)),
                has_attention_bias=bool(raw.get("attention_bias", cls.has_attention_bias)),
                eos_ids=tuple(int(i) for i in eos_ids),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"config.json has a bad value: {error}") from error


@dataclass(frozen=True)
class Shapes:
    """What a pass is padded to: numbers of rows, in rising order, and a multiple of slots.

    Rows added are token 0 at position 0 and write into scratch; slots added are masked.
    """

    row_counts: tuple[int, ...] = ()
    slot_step: int = 1

    def rows(self, n: int) -> int:
        return next((count for count in self.row_counts if count >= n), n)

    def slots(self, n: int) -> int:
        return -(-n // self.slot_step) * self.slot_step

    def storage(self, capacity: int) -> int:
        """Slots that a cache needs so that every padded write stays inside."""
        gaps = [high - low - 1 for low, high in pairwise((0, *self.row_counts))]
        return self.slots(capacity + max(gaps, default=0))


TIGHT = Shapes()
PAIRED = Shapes(row_counts=(2,))
FIXED = Shapes(row_counts=(1, 2, 4, 8, 16, 32, 64, 128), slot_step=256)  # few enough to be captured


class KVCache:
    """Preallocated keys and values; the state is one number, `length`.

    Slots [0, length) hold committed tokens, slots above are scratch that the next forward may
    overwrite. Starts as zeros, because a masked slot still enters attention as 0 x value.
    """

    def __init__(
        self,
        config: Config,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Shapes,
    ):
        self.capacity, self.shapes = capacity, shapes
        self.length = 0
        shape = (2, config.n_layers, config.n_heads, shapes.storage(capacity), config.head_size)
        try:
            self.kv = torch.zeros(shape, device=device, dtype=dtype)  # keys, then values
        except RuntimeError as error:  # torch has no narrower one on CPU
            size = math.prod(shape) * dtype.itemsize / 1e9
            raise OutOfMemory(
                f"no room for a cache of {capacity} tokens, {size:,.1f} GB"
            ) from error

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


LAYER_NAMES = {  # part of a layer -> name in the checkpoint
    "attention_norm": "input_layernorm",
    "qkv": "attention.query_key_value",
    "attention_out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp_in": "mlp.dense_h_to_4h",
    "mlp_out": "mlp.dense_4h_to_h",
}
EMBED_IN, EMBED_OUT = "gpt_neox.embed_in.weight", "embed_out.weight"
FINAL_NORM = "gpt_neox.final_layer_norm"
SMALL_FILES = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
LEGACY_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")


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
        # What passes are padded to: on CPU two rows of a large product beat one (measured)
        is_large = self.embed_out.weight.ndim == 3 and config.hidden_size >= 512
        self.shapes = PAIRED if is_large else TIGHT
        # Stands in the cache for a key or value that overflowed in float16: its largest number
        self.overflow_mark = torch.finfo(self.dtype).max if self.dtype == torch.float16 else 0.0
        self.final_norm = Affine(tensors[f"{FINAL_NORM}.weight"], tensors[f"{FINAL_NORM}.bias"])
        # A parallel layer is one block, a sequential one is two.
        self.layers = [self._make_layer(tensors, i) for i in range(config.n_layers)]
        self.turns = self._rotary_table(config.max_positions)

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
        return cls(config, _load_tensors(folder, expected_shapes(config), device, dtype))

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` tokens. Raises OutOfMemory if it would not fit."""
        require_memory(self.cache_bytes(capacity), self.device, f"a cache of {capacity} tokens")
        if capacity > self.turns.shape[0]:
            self.turns = self._rotary_table(capacity)
        return KVCache(self.config, capacity, self.device, self.dtype, self.shapes)

    def cache_bytes(self, capacity: int) -> int:
        """What a cache for `capacity` tokens takes."""
        n_slots = self.shapes.storage(capacity)
        return 2 * self.config.n_layers * self.config.hidden_size * n_slots * self.dtype.itemsize

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
            positions = torch.arange(cache.length, cache.length + len(ids), device=self.device)
            x = self._run_layers(ids, positions, cache, None, cache.length)[: len(ids)]
            is_finite &= x.isfinite().all()
            if read:
                read(ids, self._logits(x))
            cache.advance(len(ids))
        return self._logits(x[-1:])[0].masked_fill(~is_finite, torch.nan)

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
        int64, the rows whose logits are wanted, None for all. Returns float32 [m or n, V].
        """
        start = cache.length if start is None else start
        x = self._run_layers(tokens, positions, cache, mask, start)
        if logits_rows is not None:
            return self._logits(x[logits_rows])
        return self._logits(x)[: len(tokens)]

    def _run_layers(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, start: int
    ) -> Tensor:
        """forward() up to the final norm, [n and padding, hidden]; not finite where it overflowed.

        Pads to the cache's shapes, so that what follows meets few different ones.
        """
        n, shapes = len(tokens), cache.shapes
        cache.require(start + n)
        n_rows, n_slots = shapes.rows(n), shapes.slots(start + n if mask is None else mask.shape[1])
        bias = self._attention_bias(n, n_rows, n_slots, start, mask)
        if n_rows > n:
            tokens, positions = (F.pad(t, (0, n_rows - n)) for t in (tokens, positions))
        place = start
        if shapes.slot_step > 1:  # where to write is no shape then, but content
            place = torch.arange(start, start + n_rows, device=self.device)
        return self._run_padded(tokens, positions, cache, bias, place)

    def _run_padded(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, bias: Tensor, place: int | Tensor
    ) -> Tensor:
        """The layers, for n rows. bias: [n or 1, S]. place: the first slot to write, or all [n].

        With all of them no shape depends on anything but n and S, and nothing is read back: this
        is what a graph can replay.
        """
        n, n_slots = len(tokens), bias.shape[1]
        turns = self.turns.index_select(0, positions)  # [n, R / 2]
        x = F.embedding(tokens, self.embed_in)  # [n, hidden]
        hidden, head_size = x.shape[1], self.config.head_size
        # Views for all layers at once: on a CPU a view per layer costs as much as a small product.
        stored = cache.kv[:, :, :, :n_slots]  # [2, L, H, S, D]
        keys, values = stored[:, :, None]  # [L, 1, H, S, D] each
        if isinstance(place, int):
            new_kv = cache.kv[:, :, :, place : place + n]  # [2, L, H, n, D]
        else:
            new_kv = stored.new_empty(*stored.shape[:3], n, head_size)
        columns = in_blocks(x, self.width)  # to add to x
        both = x.new_empty(n, hidden + self.n_inside)
        attention_part, mlp_part = both[:, :hidden], both[:, hidden:]
        attended, active = in_blocks(attention_part, head_size), in_blocks(mlp_part, self.width)
        inputs = [both] if self.config.is_parallel else [attention_part, mlp_part]
        views = zip(new_kv.unbind(1), stored.unbind(1), keys.unbind(), values.unbind(), strict=True)
        for layer, (written, kv, k, v) in zip(self.layers, views, strict=True):
            for block, mixed in zip(layer, inputs, strict=True):
                rows = multiply(self._norm(x), block.into)  # [B, n, width]
                n_qkv = 3 * block.n_attended // self.width
                qkv, inside = rows.split_with_sizes((n_qkv, rows.shape[0] - n_qkv))
                if n_qkv:
                    q = self._project(qkv, turns, written)
                    if isinstance(place, Tensor):
                        kv.index_copy_(2, place, written)
                    attended.copy_(attend(q, k, v, bias))
                if inside.shape[0]:
                    # Turned: a contiguous tensor goes to oneDNN, which takes long to begin
                    turned = inside.transpose(0, 2)
                    F.gelu(turned, approximate=self.gelu, out=turned)
                    active.copy_(inside)
                columns += multiply(mixed, block.out_of)
        if self.overflow_mark:
            has_overflowed = new_kv.abs().amax(dim=(0, 1, 2, 4)) == self.overflow_mark  # [n]
            x = x.masked_fill(has_overflowed[:, None], torch.nan)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        x = torch.layer_norm(x, x.shape[-1:], *self.final_norm, self.config.norm_eps)
        logits = multiply(x, self.embed_out).transpose(0, 1).flatten(1)  # [n, V and padding]
        return logits[:, : self.config.vocab_size].float()

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

    def _attention_bias(
        self, n: int, n_rows: int, n_slots: int, start: int, mask: Tensor | None
    ) -> Tensor:
        """The mask as 0 / -inf in the model's dtype, built once per pass: [n_rows or 1, n_slots].

        Slots added are seen by none; rows added see the first one, as every row must see some.
        """
        if mask is None:
            if n == 1 and n_slots == start + 1:
                return self.embed_in.new_zeros(1, n_slots)
            mask = torch.ones(n, start + n, dtype=torch.bool, device=self.device).tril_(start)
        bias = self.embed_in.new_full((n_rows, n_slots), -math.inf)
        if bias.shape == mask.shape:
            return bias.masked_fill_(mask, 0.0)
        bias[n:, 0] = 0.0
        bias[:n, : mask.shape[1]].masked_fill_(mask, 0.0)
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


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must hold, by its published name."""
    hidden, wide = config.hidden_size, config.intermediate_size
    sizes = {  # part of a layer -> (out, in), or (hidden,) for a LayerNorm
        "attention_norm": (hidden,),
        "qkv": (3 * hidden, hidden),
        "attention_out": (hidden, hidden),
        "mlp_norm": (hidden,),
        "mlp_in": (wide, hidden),
        "mlp_out": (hidden, wide),
    }
    shapes = {EMBED_IN: (config.vocab_size, hidden)}
    shapes |= {f"{FINAL_NORM}.{part}": (hidden,) for part in ("weight", "bias")}
    for index in range(config.n_layers):
        for field, name in LAYER_NAMES.items():
            prefix = f"gpt_neox.layers.{index}.{name}"
            shapes[f"{prefix}.weight"] = sizes[field]
            if config.has_attention_bias or field not in ("qkv", "attention_out"):
                shapes[f"{prefix}.bias"] = sizes[field][:1]
    if not config.is_tied:
        shapes[EMBED_OUT] = (config.vocab_size, hidden)
    return shapes


def weight_bytes(config: Config, dtype: torch.dtype) -> int:
    """What all weights take."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values()) * dtype.itemsize


def find_checkpoint(
    name_or_path: str | Path, announce: Callable[[str], None] = lambda line: None
) -> Path:
    """The folder of a checkpoint: itself, or a download of hub repository NAME or NAME@REVISION.

    `announce` is told the size before a download. Without a network the hub client's own cache
    may still have the files. Raises CheckpointError, HubUnreachable among them.
    """
    path, text = Path(name_or_path), str(name_or_path)
    if os.path.isdir(path):
        return path
    if os.path.exists(path) or text.startswith((".", "/", "~")):
        raise CheckpointError(f"{text!r} is not a folder")
    # Imported here: only hub names need the client, and importing it takes half a second.
    from huggingface_hub import HfApi, errors, snapshot_download

    name, _, revision = text.partition("@")
    where = {"repo_id": name, "revision": revision or None}
    try:
        info = HfApi().model_info(**where, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        _require_safetensors(sizes, text)
        read_config(Path(snapshot_download(**where, allow_patterns=SMALL_FILES)))  # may refuse
        weights = "model.safetensors" if "model.safetensors" in sizes else "model-*.safetensors"
        megabytes = sum(size for file, size in sizes.items() if fnmatch(file, weights)) / 1e6
        announce(f"fetching {text} ({megabytes:,.0f} MB, less what the hub cache already has)")
        return Path(snapshot_download(**where, allow_patterns=[weights, *SMALL_FILES]))
    except errors.HFValidationError as error:
        raise CheckpointError(f"{text!r} is neither a folder nor a hub name") from error
    except errors.HfHubHTTPError as error:  # unknown, gated, throttled, ...
        reason = f"{text!r} is not a folder, and the hub refused it"
        raise CheckpointError(f"{reason}: {_first_line(error)}") from error
    except (errors.HTTPError, OSError) as error:  # no network, or no room to store it
        try:
            return Path(snapshot_download(**where, local_files_only=True))
        except OSError:
            reason = f"{text!r} is not a folder, and cannot be fetched from the hub"
            raise HubUnreachable(f"{reason} ({_first_line(error)})") from error


def read_config(folder: Path) -> Config:
    """The Config of a checkpoint folder. Raises CheckpointError."""
    try:
        return Config.from_json(read_json(folder / "config.json"))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


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


def _load_tensors(
    folder: Path, shapes: dict[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Read, place and convert one tensor at a time, so that no second copy of all ever exists."""
    tensors = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, "pt", device=str(device)) as shard:
                for name in _wanted(shard, shapes, file):
                    tensors[name] = shard.get_tensor(name).to(dtype)
                    if not tensors[name].isfinite().all():
                        raise CheckpointError(f"{file}: {name} is not finite in {dtype}")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {_first_line(error)}") from error
    for name in shapes:
        if name not in tensors:
            raise CheckpointError(f"{folder} lacks the tensor {name}")
    return tensors


def _wanted(shard: safe_open, shapes: dict[str, tuple[int, ...]], file: Path) -> Iterator[str]:
    """The names to load from a shard; raises CheckpointError on a foreign name or shape."""
    for name in shard.keys():
        is_tied_copy = name == EMBED_OUT and name not in shapes
        if is_tied_copy or LEGACY_BUFFERS.search(name):
            continue
        if name not in shapes:
            raise CheckpointError(f"{file} has a tensor that GPT-NeoX does not: {name}")
        shape = tuple(shard.get_slice(name).get_shape())
        if shape != shapes[name]:
            raise CheckpointError(f"{file}: {name} is {shape}, config.json asks for {shapes[name]}")
        yield name


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json lists."""
    index = folder / "model.safetensors.index.json"
    _require_safetensors([f.name for f in folder.iterdir()], folder)
    if (single := folder / "model.safetensors").exists():
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    files = [folder / name for name in sorted(set(map(str, weight_map.values())))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{index} lists {file.name}, which is not there")
    return files


def _require_safetensors(files: Iterable[str], where: str | Path) -> None:
    """Raise CheckpointError unless the file names hold a safetensors checkpoint."""
    if not {"model.safetensors", "model.safetensors.index.json"} & set(files):
        has_bin = any(name.endswith(".bin") for name in files)
        found = "only .bin weights; convert them to safetensors" if has_bin else "no safetensors"
        raise CheckpointError(f"{where} holds {found}")


def read_json(file: Path) -> dict:
    """A file that must hold one JSON object. Raises CheckpointError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is not there") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
