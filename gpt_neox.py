"""GPT-NeoX (Pythia): embedding, layers of attention and MLP, logits, over an explicit KV cache.

The modules have the published names, so a checkpoint's tensors load by name, and they are the
architecture as its papers have it: x + Attn(LN1(x)) + MLP(LN2(x)). One forward serves prefill, a
decode step, a draft level and a tree: the caller says at which position each row stands, to which
cache slot it is written, and which slots it may attend. The cache's whole state is one number, so
taking back a rejected tree means moving that number.

This model is for reading, and is what every faster one is held against. engine/model.py has one
that is two to three times as fast: both are a `Model`, and the loop cannot tell them apart.

Architecture: Black et al. 2022 (GPT-NeoX-20B); Biderman et al. 2023 (Pythia).
Shapes: n new rows, S cache slots, L layers, H heads, D head size, R rotary dims, V vocabulary;
* is nothing, or where a draft is trained (tools/distil.py) a batch of texts, without a cache.

    model = GPTNeoX.from_pretrained("models/tiny/target")
    cache = model.new_cache(capacity=256)
    scores = model.prefill(prompt_ids, cache)  # of the last token
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from numpy import ndarray
from safetensors import safe_open
from torch import Tensor, nn

PREFILL_CHUNK = 512  # rows; bounds the [n, S] mask and the activations of a long prompt
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}  # F.gelu's approximate=
PUBLISHED = {  # config.json's names of what Config calls otherwise
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "rotary_fraction": "rotary_pct",
    "rotary_base": "rotary_emb_base",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "is_parallel": "use_parallel_residual",
    "is_tied": "tie_word_embeddings",
    "has_attention_bias": "attention_bias",
    "eos_ids": "eos_token_id",
}


@dataclass(frozen=True)
class Config:
    """What config.json says of a model. Raises ValueError for what no model can be."""

    vocab_size: int  # V, rows of the embedding; may be padded beyond the tokenizer
    hidden_size: int
    n_layers: int  # L
    n_heads: int  # H
    intermediate_size: int  # of the MLP's inside
    max_positions: int  # trained; longer works, worse
    rotary_fraction: float  # of each head that is rotated
    rotary_base: float
    activation: str = "gelu"
    norm_eps: float = 1e-5
    is_parallel: bool = True  # x + attention(x) + mlp(x), else one after the other
    is_tied: bool = False  # the output is the embedding
    has_attention_bias: bool = True
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.hidden_size % self.n_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.n_heads} heads"
            )
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary fraction {self.rotary_fraction} is outside (0, 1]")
        if self.rotary_dims < 2 or self.rotary_dims % 2 or self.head_size % 2:
            dims = f"{self.rotary_dims} rotary dims of {self.head_size}"
            raise ValueError(f"{dims} cannot be rotated in pairs")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"hidden_act {self.activation!r}: there are {', '.join(ACTIVATIONS)}")

    @property
    def head_size(self) -> int:  # D
        return self.hidden_size // self.n_heads

    @property
    def rotary_dims(self) -> int:  # R
        return int(self.head_size * self.rotary_fraction)

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> "Config":
        """Of a parsed config.json, as published or as newer saves have it. Raises ValueError."""
        if raw.get("model_type") != "gpt_neox":
            raise ValueError(f"it has model_type {raw.get('model_type')!r:.100}, not 'gpt_neox'")
        said = dict(raw)
        rope = said.get("rope_parameters")
        if rope:  # newer saves
            said["rotary_pct"] = rope.get("partial_rotary_factor")
            said["rotary_emb_base"] = rope.get("rope_theta")
        if isinstance(said.get("eos_token_id"), int):
            said["eos_token_id"] = [said["eos_token_id"]]
        values = {}
        for f in fields(cls):
            key = PUBLISHED.get(f.name, f.name)
            if said.get(key) is not None:
                values[f.name] = said[key]
            elif f.default is MISSING:
                raise ValueError(f"it lacks {key}")
        values["eos_ids"] = tuple(values.get("eos_ids", ()))
        return cls(**values)


class KVCache:
    """Preallocated keys and values; the state is one number, `length`.

    Slots [0, length) hold committed tokens, slots above are scratch that the next forward may
    overwrite. Never holds anything non-finite: a masked slot enters attention as 0 x value. `with`
    it: a cache whose memory is lent gives it back at the end.
    """

    most = sys.maxsize  # tokens that one step may commit; fewer where old ones are dropped

    def __init__(self, kv: Tensor, turns: Tensor, capacity: int):
        self.kv = kv  # [2, L, H, slots, D], keys, then values
        self.turns = turns  # complex64 [positions, R / 2], the rotary table
        self.capacity = capacity
        self.length = 0

    def __enter__(self) -> "KVCache":
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to give back."""

    def require(self, need: int) -> None:
        """Raise ValueError if `need` slots would not fit."""
        if need > self.capacity:
            raise ValueError(f"the KV cache has {self.capacity} slots, {need} are needed")

    def advance(self, n: int) -> None:
        """Keep the next n scratch rows where they are: a causal block that was run in place."""
        self.require(self.length + n)
        self.length += n

    def rewind(self, length: int) -> None:
        """Forget everything from slot `length` on. What lies below stays as it is."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind from {self.length} to {length}")
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


class Scores:
    """What a pass says of the token after each of its n rows."""

    def __init__(self, logits: Tensor):
        self.logits = logits  # [n, V] float32, where the model is

    def argmax(self) -> list[int]:
        """The likeliest id after each row."""
        return self.logits.argmax(dim=-1).tolist()

    def best(self, k: int) -> ndarray:
        """The k likeliest ids after each row, best first: [n, k] int64."""
        return self.logits.topk(min(k, self.logits.shape[1])).indices.cpu().numpy()

    def finite(self) -> ndarray:
        """[n] bool: whether all of a row's logits are numbers."""
        return self.logits.isfinite().all(dim=-1).cpu().numpy()

    def top(
        self, k: int, temperature: float = 1.0, n_ids: int | None = None
    ) -> tuple[ndarray, ndarray]:
        """The k likeliest of the first n_ids ids after each row, best first: [n, k] int64, and
        their log-probabilities at a temperature, [n, k] float32."""
        logits = self.logits[:, :n_ids]
        shifted = logits - logits.amax(dim=-1, keepdim=True)  # else a tiny temperature gives nan
        logprobs = torch.log_softmax(shifted / temperature, dim=-1)
        found = logprobs.topk(min(k, logprobs.shape[1]))
        return found.indices.cpu().numpy(), found.values.cpu().numpy()


class Model(Protocol):
    """All that the loop knows of a model. GPTNeoX is one; its methods say what arguments are."""

    config: Config
    device: torch.device

    def new_cache(self, capacity: int) -> KVCache: ...

    def prefill(
        self,
        tokens: list[int],
        cache: KVCache,
        read: Callable[[list[int], Scores], None] | None = None,
    ) -> Scores: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None = None,
        start: int | None = None,
        n_last: int | None = None,
    ) -> Scores: ...


class Attention(nn.Module):
    """Causal self-attention over what the cache has and what the pass writes to it."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, has_bias = config.hidden_size, config.has_attention_bias
        self.n_heads = config.n_heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden, has_bias)  # out: [H, 3, D]
        self.dense = nn.Linear(hidden, hidden, has_bias)

    def forward(
        self, x: Tensor, turns: Tensor, past: Tensor | None, start: int, seen: Tensor | None
    ) -> Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (self.n_heads, 3, -1))  # [*, n, H, 3, D]
        q, k, v = qkv.transpose(-4, -3).unbind(-2)  # [*, H, n, D] each
        q, k = rotate(q, turns), rotate(k, turns)
        if past is not None:  # [2, *, H, slots, D]
            new = torch.stack((k, v))  # [2, *, H, n, D]
            # Nothing undefined may enter the cache: a masked slot counts as 0 x its value, and
            # 0 x nan is nan. Only the row that overflowed is undefined, and so are its logits
            past[..., start : start + x.shape[-2], :] = new.nan_to_num()
            has_overflowed = ~new.isfinite().all(dim=0).all(dim=-1, keepdim=True)
            q = q.masked_fill(has_overflowed, torch.nan)
            k, v = past[..., : seen.shape[-1], :]  # [*, H, S, D] each
        attended = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
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
        self, x: Tensor, turns: Tensor, past: Tensor | None, start: int, seen: Tensor | None
    ) -> Tensor:
        attended = self.attention(self.input_layernorm(x), turns, past, start, seen)
        if self.is_parallel:  # both read the same x
            return x + attended + self.mlp(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Everything but the logits."""

    def __init__(self, config: Config):
        super().__init__()
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        if not embedding.is_meta:  # where there are shapes alone, and drawing takes a second
            embedding.normal_(std=0.02)
        self.embed_in = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        tokens: Tensor,
        turns: Tensor,
        kv: Tensor | None = None,
        start: int = 0,
        seen: Tensor | None = None,
    ) -> Tensor:
        """x [*, n, hidden] of tokens [*, n] int64; not finite where it overflowed.

        turns: complex64 [n, R / 2], by position. kv: [2, L, *, H, slots, D], of which slots
        [start, start + n) are written. seen: [n, S] bool, which slots a row may attend. Without
        both, as in training, a text is read from its beginning, each token attending those before.
        """
        x = self.embed_in(tokens)
        for i, layer in enumerate(self.layers):
            past = None if kv is None else kv[:, i]
            x = layer(x, turns, past, start, seen)
        return self.final_layer_norm(x)


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
        folder: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "GPTNeoX":
        """Load a folder of config.json and safetensors, one file or several.

        To read by and to test with: engine/model.py has the one that is fast and finds models on
        the hub. Raises OSError, ValueError for what is missing or misshapen, and SafetensorError.
        """
        folder = Path(folder)
        config = Config.from_json(json.loads((folder / "config.json").read_text()))
        tensors = {}
        for name in weight_files(folder):
            with safe_open(folder / name, "pt", str(device)) as file:
                tensors |= {name: file.get_tensor(name).to(dtype) for name in file.keys()}
        return cls.from_tensors(config, tensors)

    @classmethod
    def from_tensors(cls, config: Config, tensors: Mapping[str, Tensor]) -> "GPTNeoX":
        """A model of these weights, by their published names; what it has no place for, as the
        buffers of old files, is left. Raises ValueError naming what is missing or misshapen."""
        tensors = dict(tensors)
        with torch.device("meta"):  # no memory: the weights have theirs
            model = cls(config)
        for name, weight in model.named_parameters():
            if name not in tensors:
                raise ValueError(f"the checkpoint lacks the tensor {name}")
            found, asked = tuple(tensors[name].shape), tuple(weight.shape)
            if found != asked:
                raise ValueError(f"{name} is {found}, config.json asks for {asked}")
        model.load_state_dict(tensors, strict=False, assign=True)
        if config.is_tied:
            model.embed_out.weight = model.gpt_neox.embed_in.weight
        return model.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.gpt_neox.embed_in.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.gpt_neox.embed_in.weight.dtype

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` tokens."""
        config = self.config
        shape = (2, config.n_layers, config.n_heads, capacity, config.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return KVCache(kv, rotary_table(config, capacity, self.device), capacity)

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
        slots [start, start + n); start defaults to cache.length, which does not move. n_last: the
        scores of so many rows at the end are wanted, None for all.
        """
        start = cache.length if start is None else start
        x = self.hidden(tokens, positions, cache, mask, start)
        return self.score(x if n_last is None else x[-n_last:])

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, start: int
    ) -> Tensor:
        """x [n, hidden] after each row, before the logits."""
        n = len(tokens)
        length = cache.length
        if mask is None:
            length, mask = start, torch.ones(n, n, dtype=torch.bool).tril()
        n_slots = length + mask.shape[1]
        cache.require(n_slots)
        if start + n > n_slots:
            raise ValueError(f"a mask up to slot {n_slots}, and rows up to {start + n}")
        seen = F.pad(mask, (length, 0), value=True).to(self.device)  # all see what is committed
        turns = cache.turns[positions.to(self.device)]
        return self.gpt_neox(tokens.to(self.device), turns, cache.kv, start, seen)

    def score(self, x: Tensor) -> Scores:
        """What follows each of the rows x [n, hidden]."""
        return Scores(self.embed_out(x).float())

    def prefill(
        self,
        tokens: list[int],
        cache: KVCache,
        read: Callable[[list[int], Scores], None] | None = None,
    ) -> Scores:
        """Append tokens to the cache in chunks and return the last one's scores.

        Its logits are nan if any of the tokens overflowed: what reads one that did is worth
        nothing. read: called with every chunk's ids and their scores.
        """
        is_finite = torch.tensor(True, device=self.device)
        for ids in torch.tensor(tokens).split(PREFILL_CHUNK):
            positions = torch.arange(cache.length, cache.length + len(ids))
            x = self.hidden(ids, positions, cache, None, cache.length)
            is_finite &= x.isfinite().all()
            if read:
                read(ids.tolist(), self.score(x))
            cache.advance(len(ids))
        return self.score(x[-1:].masked_fill(~is_finite, torch.nan))


def weight_files(folder: Path) -> list[str]:
    """model.safetensors, or the shards that its index lists. Raises FileNotFoundError."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return ["model.safetensors"]
    index = json.loads(index.read_text())
    return sorted(set(index["weight_map"].values()))
