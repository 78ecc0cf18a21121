"""GPT-NeoX (Pythia): embedding, layers of attention and MLP, logits, over an explicit KV cache.

The modules have the published names, so a checkpoint's tensors load by name, and they are the
architecture as its papers have it: x + Attn(LN1(x)) + MLP(LN2(x)). One forward serves prefill, a
decode step, a draft level and a tree: the caller says at which position each row stands, to which
cache slot it is written, and which slots it may attend. The cache's whole state is one number, so
taking back a rejected tree means moving that number.

How a pass is made fast is in engine/: from_pretrained replaces the layers by others of the same
signature (engine/fused.py), unless it is asked not to. To read the model, this file is enough.

Architecture: Black et al. 2022 (GPT-NeoX-20B); Biderman et al. 2023 (Pythia).
Shapes: n new rows, S cache slots, L layers, H heads, D head size, R rotary dims, V vocabulary;
* is nothing, or in training a batch of texts.

    model = GPTNeoX.from_pretrained("models/tiny/target", "cpu", torch.float32)
    cache = model.new_cache(capacity=256)
    scores = model.prefill(prompt_ids, cache)  # of the last token
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

from engine.caches import Storage
from engine.checkpoint import (
    ACTIVATIONS,
    CheckpointError,
    Config,
    first_line,
    load_tensors,
    read_config,
)
from engine.fused import fill, require_divisible
from engine.hub import find_checkpoint
from engine.memory import OutOfMemory, memory_for, require_memory
from engine.passes import Use, causal_bias, open_bias
from engine.scores import Scores, scores_of
from engine.shares import WHOLE, Share, split_axis

PREFILL_CHUNK = 512  # rows; bounds the [n, S] mask and the activations of a long prompt


class KVCache:
    """Preallocated keys and values; the state is one number, `length`.

    Slots [0, length) hold committed tokens, slots above are scratch that the next forward may
    overwrite. Never holds anything non-finite: a masked slot enters attention as 0 x value.
    """

    def __init__(self, storage: Storage, capacity: int, use: Use):
        self.storage = storage
        self.kv = storage.kv  # [2, L, H, slots, D], keys, then values
        self.turns = storage.turns  # complex64 [slots, R / 2], by position
        self.passes = storage.passes  # that are padded or have fixed shapes; None: as they come
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


class Attention(nn.Module):
    """Causal self-attention over what the cache has and what the pass writes to it."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, has_bias = config.hidden_size, config.has_attention_bias
        self.n_heads = config.n_heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden, has_bias)  # out: [H, 3, D]
        self.dense = nn.Linear(hidden, hidden, has_bias)

    def forward(
        self, x: Tensor, turns: Tensor, past: Tensor | None, start: int, bias: Tensor | None
    ) -> Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (self.n_heads, 3, -1))  # [*, n, H, 3, D]
        q, k, v = qkv.transpose(-4, -3).unbind(-2)  # [*, H, n, D] each
        q, k = rotate(q, turns), rotate(k, turns)
        if past is not None:  # [2, *, H, slots, D]
            # A masked slot counts as 0 x its value, and 0 x nan is nan
            past[..., start : start + x.shape[-2], :] = torch.stack((k, v)).nan_to_num()
            k, v = past[..., : bias.shape[-1], :]  # [*, H, S, D] each
        attended = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
        return self.dense(attended.transpose(-3, -2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gelu = ACTIVATIONS[config.activation]
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate=self.gelu))


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.is_parallel = config.is_parallel
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, turns: Tensor, past: Tensor | None, start: int, bias: Tensor | None
    ) -> Tensor:
        attended = self.attention(self.input_layernorm(x), turns, past, start, bias)
        if self.is_parallel:  # both read the same x
            return x + attended + self.mlp(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Everything but the logits."""

    def __init__(self, config: Config):
        super().__init__()
        # Not drawn at random, which on the meta device (shapes without memory) takes a second
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_in = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        tokens: Tensor,
        turns: Tensor,
        kv: Tensor | None = None,
        start: int = 0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x [*, n, hidden] of tokens [*, n] int64; not finite where it overflowed.

        turns: complex64 [n, R / 2], by position. kv: [2, L, *, H, slots, D], of which slots
        [start, start + n) are written. bias: [n, S], 0 where a row may attend, else -inf. Without
        both, as in training, a text is read from its beginning, each token attending those before.
        """
        x = self.embed_in(tokens)
        for i, layer in enumerate(self.layers):
            past = None if kv is None else kv[:, i]
            x = layer(x, turns, past, start, bias)
        return self.final_layer_norm(x)

    @staticmethod
    def rotate(x: Tensor, turns: Tensor) -> Tensor:
        return rotate(x, turns)


def rotary_table(config: Config, n_positions: int, device: torch.device) -> Tensor:
    """By how much a position turns each pair of dimensions: complex64 [n_positions, R / 2]."""
    half = torch.arange(0, config.rotary_dims, 2, device=device).float()
    frequencies = config.rotary_base ** -(half / config.rotary_dims)  # [R / 2]
    angles = torch.arange(n_positions, device=device).float()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of queries or keys x [*, H, n, D]: dimension i is turned
    together with R / 2 + i, by turns [n, R / 2]."""
    n_pairs = turns.shape[-1]
    first, second, rest = x.split([n_pairs, n_pairs, x.shape[-1] - 2 * n_pairs], dim=-1)
    cos, sin = turns.real, turns.imag
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class GPTNeoX(nn.Module):
    """A causal language model over an explicit cache; batch 1, no batch axis."""

    def __init__(self, config: Config):
        """With weights that have learned nothing; from_pretrained and from_tensors have better."""
        super().__init__()
        self.config = config
        self.gpt_neox = Transformer(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.embed_out.weight = self.gpt_neox.embed_in.weight

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        share: Share = WHOLE,
        fuse: bool = True,
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
            require_divisible(config, share)
            require_memory(weight_bytes(config, dtype, share), device, what)
            tensors = load_tensors(folder, published_shapes(config), device, dtype, share)
            return cls.from_tensors(config, tensors, share, fuse)

    @classmethod
    def from_tensors(
        cls, config: Config, tensors: Mapping[str, Tensor], share: Share = WHOLE, fuse: bool = True
    ) -> "GPTNeoX":
        """A model of these weights, by their published names. Raises CheckpointError."""
        with torch.device("meta"):  # no memory: the weights have theirs
            model = cls(config)
        fill(model, tensors, share, fuse)
        return model

    @property
    def device(self) -> torch.device:
        return self.gpt_neox.embed_in.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.gpt_neox.embed_in.weight.dtype

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        turns: Tensor,
        start: int,
        bias: Tensor,
        first: int = 0,
    ) -> Tensor:
        """A whole pass on the model's device: [n - first, V], of the rows from `first` on.

        tokens, positions: [n] int64; the others as Transformer.forward has them.
        """
        x = self.gpt_neox(tokens, turns.index_select(0, positions), kv, start, bias)
        return self.embed_out(x[first:])

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

        tokens, positions: [n] int64. mask: [n, s] bool, which of the s slots from cache.length on
        each row may attend, its own among them; all attend what is committed. None means causal,
        everything below `start` and itself. All three are on the host. The rows are written to
        slots [start, start + n); start defaults to cache.length, which does not move.
        n_last: the scores of so many rows at the end are wanted, None for all. On CUDA the next
        pass over this cache may overwrite them.
        """
        n = len(tokens)
        start = cache.length if start is None else start
        n_last = n_last or n
        cache.require(start + n)
        length = start if mask is None else cache.length
        n_seen = length + (n if mask is None else mask.shape[1])
        assert start + n <= n_seen <= cache.capacity, f"a mask up to slot {n_seen}"
        if cache.passes and cache.passes.has_room(n, mask, cache.use):
            return cache.passes.forward(tokens, positions, mask, length, start, n_last, cache.use)
        x = self.run(tokens, positions, cache, mask, start)
        return self.score(x[-n_last:], cache)

    def run(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, start: int
    ) -> Tensor:
        """x [n, hidden] of rows that are run as they come."""
        if mask is None:
            bias = causal_bias(len(tokens), start, cache.kv)
        else:
            bias = open_bias(mask, cache.length, cache.kv)
        turns = cache.turns.index_select(0, positions.to(self.device, non_blocking=True))
        tokens = tokens.to(self.device, non_blocking=True)
        return self.gpt_neox(tokens, turns, cache.kv, start, bias)

    def score(self, x: Tensor, cache: KVCache) -> Scores:
        """What follows each of the rows x [n, hidden]."""
        return scores_of(self.embed_out(x).float()[:, : cache.use.n_ids], cache.use.ranking)

    def prefill(
        self,
        tokens: list[int],
        cache: KVCache,
        read: Callable[[list[int], ndarray], None] | None = None,
    ) -> Scores:
        """Append tokens to the cache in chunks and return the last one's scores.

        Its logits are nan if any of the tokens overflowed: what reads one that did is worth
        nothing. read: called with every chunk's ids and the candidates [n, k] after each of them.
        """
        is_finite = torch.tensor(True, device=self.device)
        for ids in torch.tensor(tokens).split(PREFILL_CHUNK):
            cache.require(cache.length + len(ids))
            positions = torch.arange(cache.length, cache.length + len(ids))
            x = self.run(ids, positions, cache, None, cache.length)  # [n, hidden]
            is_finite &= x.isfinite().all()
            if read:
                read(ids.tolist(), self.score(x, cache).candidates)
            cache.advance(len(ids))
        return self.score(x[-1:].masked_fill(~is_finite, torch.nan), cache)

    def append(self, tokens: list[int], cache: KVCache) -> Scores:
        """Append few tokens to the cache in one pass, on CUDA of a fixed shape as every pass of the
        loop, and return the last one's scores; they do not tell if another one overflowed."""
        positions = torch.arange(cache.length, cache.length + len(tokens))
        scores = self.forward(torch.tensor(tokens), positions, cache, n_last=1)
        cache.advance(len(tokens))
        return scores

    def forget(self, cache: KVCache, start: int, n: int) -> None:
        """Drop slots [start, start + n); what follows moves down to them, n positions back.

        A key carries its position as a rotation, so turning it by n positions more moves it; each
        turn rounds it once in the model's dtype.
        """
        kept = cache.kv[:, :, :, start + n : cache.length].clone()  # read, then write: they overlap
        kept[0] = self.gpt_neox.rotate(kept[0], cache.turns[n : n + 1].conj())
        cache.rewind(cache.length - n)
        cache.kv[:, :, :, start : cache.length] = kept

    def new_cache(self, capacity: int, use: Use | None = None) -> KVCache:
        """An empty cache for `capacity` tokens. Raises OutOfMemory if it would not fit."""
        use = self.pool.settle(use or Use(), self)
        storage = self.pool.lend(capacity, use, self.make_memory)
        return KVCache(storage, capacity, use)

    def make_memory(self, n_slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values, and the turns of as many positions."""
        config = self.config
        shape = (2, config.n_layers, self.n_heads, n_slots, config.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return kv, rotary_table(config, n_slots, self.device)


def published_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a checkpoint must hold, by its published name.

    Raises CheckpointError for sizes that no tensor can have.
    """
    try:
        with torch.device("meta"):
            model = GPTNeoX(config)
    except RuntimeError as error:
        raise CheckpointError(f"no tensor has such sizes: {first_line(error)}") from error
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def weight_bytes(config: Config, dtype: torch.dtype, share: Share = WHOLE) -> int:
    """What all weights take in a dtype, or a share of them. Raises CheckpointError."""
    n = 0
    for name, shape in published_shapes(config).items():
        axis = split_axis(name)
        n_split = 1 if axis is None else shape[axis]
        n_here = 1 if axis is None else share.size(n_split)
        n += math.prod(shape) // n_split * n_here
    return n * dtype.itemsize
