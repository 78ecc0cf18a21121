"""GPT-NeoX (Pythia): embedding, layers of attention and MLP, logits, over an explicit KV cache.

The modules have the published names, so a checkpoint's tensors load by name, and they are the
architecture as its papers have it: x + Attn(LN1(x)) + MLP(LN2(x)). One forward serves prefill, a
decode step, a draft level and a tree: the caller says at which position each row stands, to which
cache slot it is written, and which slots it may attend. The cache's whole state is one number, so
taking back a rejected tree means moving that number.

This model is for reading, and is what every faster one is held against. engine/model.py has one
that is two to three times as fast: both are a `Model`, and the loop cannot tell them apart.

Architecture: Black et al. 2022 (GPT-NeoX-20B); Biderman et al. 2023 (Pythia).
A checkpoint's folder is untrusted: whatever is wrong with one is a CheckpointError of one line.
Shapes: n new rows, S cache slots, L layers, H heads, D head size, R rotary dims, V vocabulary;
* is nothing, or where a draft is trained (tools/distil.py) a batch of texts, without a cache.

    model = GPTNeoX.from_pretrained("models/tiny/target")
    cache = model.new_cache(capacity=256)
    scores = model.prefill(prompt_ids, cache)  # of the last token
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Protocol

import torch
import torch.nn.functional as F
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

PREFILL_CHUNK = 512  # rows; bounds the [n, S] mask and the activations of a long prompt
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}  # F.gelu's approximate=
EMBED_IN, EMBED_OUT = "gpt_neox.embed_in.weight", "embed_out.weight"
LM_HEAD = "lm_head.weight"  # EMBED_OUT's name in transformers since 5.14
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_JSON = 2**22  # bytes that are read; the largest index has some hundred thousand
FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")  # as safetensors names them
LEGACY_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
OTHER_WEIGHTS = {  # by pattern of a file's name
    r"\.gguf$": "is GGUF, for llama.cpp: use the model's safetensors",
    r"-of-\d+\.safetensors$": "is one of several: the index is needed too",
    r"(gptq|awq|\dbit).*\.safetensors$": "is quantised: use the float weights",
    r"\.safetensors$": "is named otherwise: rename it if it holds all weights",
    r"\.(bin|pt|pth)$": "has to be converted to safetensors",
}
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
MAX_LAYERS = 1000
LIMITS = {  # by type of a value: lowest, highest, and how to say it
    bool: (False, True, "true or false"),
    int: (1, 2**29, "an integer from 1 to 2^29"),  # then no weight has 2^63 bytes
    float: (1e-37, 1e18, "a number from 1e-37 to 1e18"),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read or used; the message is one line for the user."""

    def __init__(self, line: str):
        super().__init__(shown(line))


def shown(text: str) -> str:
    """Return text of unknown origin on one line, with nothing in it that a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Config:
    """Sizes and settings of a model, by default those of transformers' GPTNeoXConfig.

    Raises CheckpointError for a value that no model can have.
    """

    vocab_size: int = 50432  # V, rows of the embedding; may be padded beyond the tokenizer
    hidden_size: int = 6144
    n_layers: int = 44  # L
    n_heads: int = 64  # H
    intermediate_size: int = 24576  # of the MLP's inside
    max_positions: int = 2048  # trained; longer works, worse
    rotary_fraction: float = 0.25  # of each head that is rotated
    rotary_base: float = 10000.0
    activation: str = "gelu"
    norm_eps: float = 1e-5
    is_parallel: bool = True  # x + attention(x) + mlp(x), else one after the other
    is_tied: bool = False  # the output is the embedding
    has_attention_bias: bool = True
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in LIMITS:
                key = PUBLISHED.get(field.name, field.name)
                require_number(key, getattr(self, field.name), field.type)
        if self.n_layers > MAX_LAYERS:
            raise CheckpointError(f"num_hidden_layers is {self.n_layers}, it must be at most 1000")
        if self.hidden_size % self.n_heads:
            raise CheckpointError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.n_heads} heads"
            )
        if self.rotary_fraction > 1:
            raise CheckpointError(f"rotary_pct is {self.rotary_fraction}, it must be at most 1")
        if self.rotary_dims < 2 or self.rotary_dims % 2 or self.head_size % 2:
            dims = f"{self.rotary_dims} rotary dims of {self.head_size}"
            raise CheckpointError(f"{dims} cannot be rotated in pairs")
        if self.activation not in tuple(ACTIVATIONS):
            names = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"hidden_act is {self.activation!r:.100}, it must be in {names}")

    @property
    def head_size(self) -> int:  # D
        return self.hidden_size // self.n_heads

    @property
    def rotary_dims(self) -> int:  # R
        return int(self.head_size * self.rotary_fraction)

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> "Config":
        """Return the Config that a parsed config.json describes, as published or as newer saves
        have it. Raises CheckpointError."""
        if raw.get("model_type") != "gpt_neox":
            kind = f"{raw.get('model_type')!r:.100}"
            raise CheckpointError(f"config.json has model_type {kind}, it must be 'gpt_neox'")
        if raw.get("quantization_config"):
            raise CheckpointError("the weights are quantised; use the checkpoint in float weights")
        said = dict(raw) | parse_rotary(raw) | {"eos_token_id": parse_eos_ids(raw)}
        values = {}
        for field in fields(cls):
            key = PUBLISHED.get(field.name, field.name)
            if said.get(key) is not None:
                values[field.name] = said[key]
        return cls(**values)


def require_number(key: str, value: object, kind: type) -> None:
    """Raise CheckpointError unless a value of config.json is of this type and within its limits."""
    low, high, allowed = LIMITS[kind]
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds or not low <= value <= high:
        raise CheckpointError(f"{key} is {value!r:.100}, it must be {allowed}")


def parse_rotary(raw: Mapping[str, object]) -> dict[str, object]:
    """Return what newer saves say of the rotary embedding. Raises CheckpointError if scaled."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"rope_parameters is {rope!r:.100}, it must be an object")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise CheckpointError(f"rope_type is {kind!r:.100}, it must be 'default' (not scaled)")
    names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    return {key: rope[name] for key, name in names.items() if name in rope}


def parse_eos_ids(raw: Mapping[str, object]) -> tuple[int, ...]:
    """Return the EOS ids of config.json or generation_config.json. Raises CheckpointError."""
    ids = raw.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"eos_token_id is {ids!r:.100}, it must be an integer or several")
    return tuple(ids)


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
        the hub. Raises CheckpointError naming what is missing, invalid or damaged.
        """
        folder = Path(folder)
        config = read_config(folder)
        tensors = {}
        for name, (file, stored_name) in locate_tensors(folder, config).items():
            with open_shard(file, str(device)) as shard:
                tensors[name] = shard.get_tensor(stored_name).to(dtype=dtype)
        return cls.from_tensors(config, tensors)

    @classmethod
    def from_tensors(cls, config: Config, tensors: Mapping[str, Tensor]) -> "GPTNeoX":
        """A model of these weights, by their published names; what it has no place for, as the
        buffers of old files, is left. Raises CheckpointError for what is missing or misshapen."""
        tensors = dict(tensors)
        config = cls.keep_stored_head(config, tensors)
        with torch.device("meta"):  # no memory: the weights have theirs
            model = cls(config)
        for name, weight in model.named_parameters():
            if name not in tensors:
                raise CheckpointError(f"the checkpoint lacks the tensor {name}")
            found, asked = tuple(tensors[name].shape), tuple(weight.shape)
            if found != asked:
                raise CheckpointError(f"{name} is {found}, config.json asks for {asked}")
        model.load_state_dict(tensors, strict=False, assign=True)
        if config.is_tied:
            model.embed_out.weight = model.gpt_neox.embed_in.weight
        return model.requires_grad_(False)

    @staticmethod
    def published_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that a checkpoint must hold, by its published name."""
        with torch.device("meta"):
            model = GPTNeoX(config)
        return {name: tuple(weight.shape) for name, weight in model.named_parameters()}

    @staticmethod
    def keep_stored_head(config: Config, tensors: Mapping[str, Tensor]) -> Config:
        """Return the config, untied and with a warning if the tensors hold another output matrix.

        Transformers keeps such a matrix too.
        """
        if not config.is_tied or EMBED_OUT not in tensors:
            return config
        if torch.equal(tensors[EMBED_OUT], tensors[EMBED_IN]):
            return config
        why = "is stored and differs from the embedding, so it is kept"
        warnings.warn(f"tie_word_embeddings is true, but {EMBED_OUT} {why}", stacklevel=3)
        return replace(config, is_tied=False)

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


def read_config(folder: Path) -> Config:
    """Return a folder's Config, with generation_config.json's EOS ids. Raises CheckpointError."""
    raw, generation = read_json(folder / "config.json"), folder / "generation_config.json"
    more = read_json(generation) if os.path.lexists(generation) else {}
    try:
        config = Config.from_json(raw)
        ids = dict.fromkeys(config.eos_ids + parse_eos_ids(more))  # each once
    except (CheckpointError, RecursionError) as error:  # the latter: a value nested too deeply
        raise CheckpointError(f"{folder}: {error}") from error
    return replace(config, eos_ids=tuple(ids))


def read_json(file: Path) -> dict[str, object]:
    """Return the object that a JSON file holds. Raises CheckpointError."""
    require_file(file)
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return content


def require_file(file: Path) -> None:
    """Raise CheckpointError unless this is a regular file, or a link to one, that may be read."""
    if not os.path.isfile(file):  # a pipe or a device would never end
        raise CheckpointError(f"{file} is not there, or not a file")
    if not os.access(file, os.R_OK):
        raise CheckpointError(f"{file} cannot be read: permission denied")


def weight_files(folder: Path) -> list[Path]:
    """Return model.safetensors, or the shards that its index lists. Raises CheckpointError."""
    if os.path.lexists(folder / SINGLE):
        return [folder / SINGLE]
    if os.path.lexists(folder / INDEX):
        return [folder / name for name in shard_names(folder / INDEX)]
    found = describe_weights(os.listdir(folder))
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{found}")


def describe_weights(names: Sequence[str]) -> str:
    """Return what one of these files is and what to do with it; empty if none holds weights."""
    for pattern, what in OTHER_WEIGHTS.items():
        for name in sorted(names):
            if re.search(pattern, name, re.IGNORECASE):
                return f"; {name} {what}"
    return ""


def shard_names(index: Path) -> list[str]:
    """Return the files that an index lists, all in its folder. Raises CheckpointError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map")
    names = set()
    for name in weight_map.values():
        if not isinstance(name, str):
            raise CheckpointError(f"{index}: weight_map must name a file for each tensor")
        if PurePath(name).name != name or not name.endswith(".safetensors"):
            what = f"{name[:100]!r}, which is no safetensors file in its folder"
            raise CheckpointError(f"{index} lists {what}")
        names.add(name)
    return sorted(names)


def locate_tensors(folder: Path, config: Config) -> dict[str, tuple[Path, str]]:
    """Return the file of each weight and its name there, by published name.

    Raises CheckpointError naming a tensor that is missing, extra or misshapen.
    """
    asked = GPTNeoX.published_shapes(config)
    shapes = {EMBED_OUT: asked[EMBED_IN]} | asked  # a tied model may store both
    found = {}
    for file in weight_files(folder):
        with open_shard(file) as shard:
            for stored_name in shard.keys():
                name = EMBED_OUT if stored_name == LM_HEAD else stored_name
                if LEGACY_BUFFERS.search(name):
                    continue
                if name in found:
                    raise CheckpointError(f"{file} has the tensor {name} a second time")
                require_tensor(shard, stored_name, shapes.get(name), file)
                found[name] = file, stored_name
    for name in asked:
        if name not in found:
            raise CheckpointError(f"{folder} lacks the tensor {name}")
    return found


@contextmanager
def open_shard(file: Path, device: str = "cpu") -> Iterator[safe_open]:
    """Open a safetensors file. Raises CheckpointError for a damaged one."""
    require_file(file)
    try:
        with safe_open(file, "pt", device) as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        line = f"{file} cannot be read: {error}; delete {file.resolve()} and fetch it again"
        raise CheckpointError(line) from error


def require_tensor(shard: safe_open, name: str, shape: tuple[int, ...] | None, file: Path) -> None:
    """Raise CheckpointError unless a stored tensor has this shape and a floating type.

    shape: None if GPT-NeoX has no such tensor.
    """
    if shape is None:
        raise CheckpointError(f"{file} has a tensor that GPT-NeoX does not: {name}")
    stored = shard.get_slice(name)
    if stored.get_dtype() not in FLOATS:
        raise CheckpointError(f"{file}: {name} is {stored.get_dtype()}; only floating types load")
    found = tuple(stored.get_shape())
    if found != shape:
        raise CheckpointError(f"{file}: {name} is {found}, config.json asks for {shape}")
