"""GPT-NeoX (Pythia), a causal language model over an explicit KV cache.

The modules are named as in published checkpoints, so tensors load by name. One method, `forward`,
runs one token, one level of a draft tree, or a whole tree. The cache is a list of slots. A pass
writes its n rows to the slots from the cache's length on. The caller gives each row's position, and
a mask over the newest slots: the pass's own. While a draft tree grows, the mask also covers the
tree's earlier rows. Every row attends to all older slots.

    model = GPTNeoX.from_pretrained("models/tiny/target")
    cache = model.new_cache(capacity=256)
    logits = model.prefill([510, 1453], cache)  # [1, V], after the last token

Shapes: n rows of a pass, S = cache.length + n slots that a pass reads, L layers, H heads, D head
size, R rotary dimensions, V vocabulary.
Architecture: Black et al. 2022 (GPT-NeoX-20B); Biderman et al. 2023 (Pythia).
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

PREFILL_CHUNK = 512  # rows of one pass over a prompt; bounds the [n, S] mask
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}  # F.gelu(approximate=...)
OUTPUT_HEAD, EMBEDDING = "embed_out.weight", "gpt_neox.embed_in.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INCOMPLETE = "the file is incomplete or a Git LFS pointer; fetch it again"
ROPE_TYPES = (None, "default")  # supported; None: config.json names no type
IS_VALID = {  # what config.json may hold: a check for each type of a field in Config
    int: lambda value: type(value) is int and value > 0,
    float: lambda value: type(value) in (int, float) and 0 < value < math.inf,
    bool: lambda value: type(value) is bool,
    str: lambda value: type(value) is str and value in ACTIVATIONS,  # hidden_act is the only str
    tuple[int, ...]: lambda value: all(type(token) is int for token in value),
}


@dataclass(frozen=True)
class Config:
    """The hyperparameters of a model, under their names in config.json. The defaults are those of
    transformers' GPTNeoXConfig. Raises ValueError naming a value that is not supported."""

    vocab_size: int = 50432  # V, rows of the embedding; may be larger than the tokenizer's
    hidden_size: int = 6144
    num_hidden_layers: int = 44  # L
    num_attention_heads: int = 64  # H
    intermediate_size: int = 24576  # width of the MLP
    max_position_embeddings: int = 2048  # length of the training texts; longer ones work, but worse
    rotary_pct: float = 0.25  # the part of each head that is rotated
    rotary_emb_base: float = 10000.0
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True  # x + Attn(x) + MLP(x), see Layer
    tie_word_embeddings: bool = False  # the output matrix is the embedding
    attention_bias: bool = True
    eos_ids: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        for f in fields(self):
            value, is_valid = getattr(self, f.name), IS_VALID[f.type]
            if not is_valid(value):
                shown = f"{value!r:.80}"  # cut to 80 characters
                raise ValueError(f"{f.name} is {shown}, which GPT-NeoX cannot have")
        sizes = f"hidden_size {self.hidden_size}, {self.num_attention_heads} heads"
        if self.hidden_size % self.num_attention_heads or self.head_size % 2:
            raise ValueError(f"{sizes}: the size of a head must be an even whole number")
        if not 0 < self.rotary_dims <= self.head_size or self.rotary_dims % 2:
            rotated = f"rotary_pct {self.rotary_pct} gives {self.rotary_dims} rotary dimensions"
            raise ValueError(f"{sizes}, {rotated}: it must be even, from 2 to the head size")

    @property
    def head_size(self) -> int:  # D
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dims(self) -> int:  # R
        return int(self.head_size * self.rotary_pct)

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> "Config":
        """Return the Config of a parsed config.json. Raises ValueError."""
        if raw.get("model_type") != "gpt_neox":
            raise ValueError(f"model_type is {raw.get('model_type')!r:.80}, it must be 'gpt_neox'")
        if raw.get("quantization_config"):
            raise ValueError("the weights are quantised: use the checkpoint in float weights")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # transformers 5 or 4
        if not isinstance(rope, dict):
            raise ValueError(f"rope_parameters or rope_scaling is {rope!r:.80}, not an object")
        if rope.get("rope_type", rope.get("type")) not in ROPE_TYPES:  # the new key or the old one
            raise ValueError(f"scaled rotary embeddings (rope) are not supported: {rope!r:.80}")
        values = {f.name: raw.get(f.name) for f in fields(cls)}
        values["rotary_pct"] = rope.get("partial_rotary_factor", raw.get("rotary_pct"))
        values["rotary_emb_base"] = rope.get("rope_theta", raw.get("rotary_emb_base"))
        # A missing or null value gives the default; of EOS ids, null means that there is none
        eos_ids = raw.get("eos_token_id", list(cls.eos_ids))  # an id, a list, or None
        eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
        values["eos_ids"] = tuple(token for token in eos_ids if token is not None)
        return cls(**{name: value for name, value in values.items() if value is not None})


def find_checkpoint(name: str | Path) -> Path:
    """Return a checkpoint's folder. A name that is no folder is a hub repository's, such as
    EleutherAI/pythia-70m; it is downloaded unless the hub's cache has it. Raises OSError."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # here, because it takes half a second

    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(f"{name} is no folder, and cannot be downloaded: {reason}") from error


def read_config(folder: Path) -> Config:
    """Return the Config of a checkpoint. If generation_config.json exists, it alone decides on EOS
    ids, as in transformers. Raises OSError, and ValueError naming the folder."""
    raw = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    if generation_file.exists():
        raw["eos_token_id"] = read_json(generation_file).get("eos_token_id")
    try:
        return Config.from_json(raw)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def read_json(file: Path) -> dict:
    """Return the object that a JSON file holds. Raises OSError and ValueError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights: model.safetensors if it is there, else the files
    that the index lists, else all safetensors. Raises OSError and ValueError."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        return [folder / name for name in shard_names(folder / INDEX)]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    has = ", ".join(sorted(file.name for file in folder.iterdir()))
    raise ValueError(f"{folder} has no safetensors, but only {has:.200}")


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists. Raises OSError and ValueError."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(type(name) is str for name in files.values()):
        raise ValueError(f"{index} has no weight_map that gives each tensor's file")
    return sorted(set(files.values()))


def read_tensors(folder: Path, device: str) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by their stored names. Raises OSError and ValueError."""
    tensors, files = {}, {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt", device) as file:
                found = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}: {INCOMPLETE}") from error
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"{files[min(twice)]} and {path} both have the tensor {min(twice)}")
        tensors |= found
        files |= dict.fromkeys(found, path)
    return tensors


class KVCache:
    """The keys and values of a sequence. `length` is the number of slots in use.

    Slots [0, length) hold the committed tokens. While a draft tree grows, they also hold its levels
    so far, until `rewind`. Slots from `length` on are scratch: a pass writes its rows there,
    `commit` keeps some of them, and the next pass overwrites the others.
    """

    def __init__(self, kv: Tensor, rotary: Tensor, capacity: int):
        self.kv = kv  # [2, L, H, capacity, D], keys and values
        self.rotary = rotary  # complex64 [capacity, R / 2], rotary_table of positions [0, capacity)
        self.capacity = capacity
        self.length = 0

    def rewind(self, length: int) -> None:
        """Make the slots from `length` on scratch again."""
        self.length = length

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these scratch rows, in rising order. Scratch row i is in slot length + i."""
        first = self.length
        # Rows move down in rising order, so none is overwritten before it has moved
        for slot, row in enumerate(rows, start=first):
            if slot != first + row:  # otherwise it is in place already
                self.kv[:, :, :, slot] = self.kv[:, :, :, first + row]
        self.length = first + len(rows)


class Model(Protocol):
    """The interface of a target or draft model. GPTNeoX explains the methods."""

    config: Config

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, capacity: int) -> KVCache: ...

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor: ...

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor: ...


class Attention(nn.Module):
    """Attention of a pass's n rows over S slots of the cache, of which the last n are theirs."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, has_bias = config.hidden_size, config.attention_bias
        self.n_heads = config.num_attention_heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden, has_bias)  # out: [H, 3, D]
        self.dense = nn.Linear(hidden, hidden, has_bias)

    def forward(self, x: Tensor, rotary: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """Return [n, hidden] for x [n, hidden]. kv: [2, H, capacity, D], this layer's part of the
        cache. rotary, mask: as for Transformer.forward."""
        qkv = self.query_key_value(x).unflatten(-1, (self.n_heads, 3, -1))  # [n, H, 3, D]
        q, k, v = qkv.transpose(0, 1).unbind(2)  # [H, n, D] each
        q, k = rotate(q, rotary), rotate(k, rotary)
        n, n_slots = mask.shape
        kv[:, :, n_slots - n : n_slots] = torch.stack((k, v))
        k, v = kv[:, :, :n_slots]  # [H, S, D] each
        attended = F.scaled_dot_product_attention(q, k, v, mask)
        return self.dense(attended.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.approximation = ACTIVATIONS[config.hidden_act]  # of GELU: "none" or "tanh"
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate=self.approximation))


class Layer(nn.Module):
    """x + Attn(LN1(x)) + MLP(LN2(x)), or with y = x + Attn(LN1(x)): y + MLP(LN2(y))."""

    def __init__(self, config: Config):
        super().__init__()
        self.use_parallel_residual = config.use_parallel_residual
        size, eps = config.hidden_size, config.layer_norm_eps
        self.input_layernorm = nn.LayerNorm(size, eps)  # LN1
        self.post_attention_layernorm = nn.LayerNorm(size, eps)  # LN2, even if both are parallel
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention(self.input_layernorm(x), rotary, kv, mask)
        if self.use_parallel_residual:
            return x + attended + self.mlp(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """The embedding, the layers, and the final norm, which GPTNeoX.logits applies."""

    def __init__(self, config: Config):
        super().__init__()
        # Uniform weights, because a normal draw on the meta device, which from_tensors uses,
        # imports for seconds
        embedding = torch.empty(config.vocab_size, config.hidden_size).uniform_(-0.02, 0.02)
        self.embed_in = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, tokens: Tensor, rotary: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """Return the last hidden states [n, hidden] of tokens [n], before the final norm.

        Args:
            rotary: [n, R / 2], of the rows' positions.
            kv: [2, L, H, capacity, D]; slots [S - n, S) are written, slots [0, S) are read.
            mask: [n, S] bool, which slots a row attends to.
        """
        x = self.embed_in(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, kv[:, i], mask)
        return x


def rotary_table(config: Config, n_positions: int, device: torch.device) -> Tensor:
    """Return the rotary embedding of each position, cos + i sin per pair of dimensions: complex64
    [n_positions, R / 2]. So a cache has one table."""
    dims = torch.arange(0, config.rotary_dims, 2, device=device).float()  # [R / 2]
    frequencies = config.rotary_emb_base ** -(dims / config.rotary_dims)
    angles = torch.arange(n_positions, device=device).float()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary embeddings [n, R / 2] to queries or keys [H, n, D] (Su et al. 2021). Dimensions
    i and R / 2 + i are a pair; the dimensions from R on stay as they are."""
    n_pairs = rotary.shape[-1]
    first, second, rest = x.split([n_pairs, n_pairs, x.shape[-1] - 2 * n_pairs], dim=-1)
    cos, sin = rotary.real, rotary.imag
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


class GPTNeoX(nn.Module):
    """A causal language model over an explicit cache; one sequence, no batch axis."""

    def __init__(self, config: Config):
        """Make a model of random weights; from_pretrained and from_tensors load a checkpoint."""
        super().__init__()
        self.config = config
        self.gpt_neox = Transformer(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.embed_out.weight = self.gpt_neox.embed_in.weight

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "GPTNeoX":
        """Load config.json and the safetensors of a folder or a hub repository. Raises OSError and
        ValueError for what is missing, invalid or truncated."""
        folder = find_checkpoint(name)
        config, tensors = read_config(folder), read_tensors(folder, str(device))
        for name in tensors:
            if tensors[name].is_floating_point():  # from_tensors refuses weights of other types
                tensors[name] = tensors[name].to(dtype)
        return cls.from_tensors(config, tensors)

    @classmethod
    def from_tensors(cls, config: Config, tensors: Mapping[str, Tensor]) -> "GPTNeoX":
        """Make a model of these weights, by their published names; other tensors are ignored.
        Raises ValueError naming a weight that is missing or has another shape."""
        tensors = dict(tensors)
        if "lm_head.weight" in tensors:  # the output head's name in newer transformers
            tensors.setdefault(OUTPUT_HEAD, tensors["lm_head.weight"])
        config = untied_if_head_differs(config, tensors)
        with torch.device("meta"):  # shapes without memory; the tensors bring theirs
            model = cls(config)
        for name, weight in model.named_parameters():  # lists a tied head once, as the embedding
            found = tuple(tensors[name].shape) if name in tensors else "missing"
            if found != tuple(weight.shape):
                raise ValueError(f"{name} is {found}, it must be {tuple(weight.shape)}")
            if not tensors[name].is_floating_point():
                raise ValueError(f"{name} is {tensors[name].dtype}, only floating types load")
        model.load_state_dict(tensors, strict=False, assign=True)
        if config.tie_word_embeddings:  # tie again, because loading gave embed_in a new parameter
            model.embed_out.weight = model.gpt_neox.embed_in.weight
        return model.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.gpt_neox.embed_in.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.gpt_neox.embed_in.weight.dtype

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache of `capacity` slots, for the text and the largest tree together."""
        c = self.config
        shape = (2, c.num_hidden_layers, c.num_attention_heads, capacity, c.head_size)
        kv = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return KVCache(kv, rotary_table(c, capacity, self.device), capacity)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        """Run n rows, write their keys and values to slots [length, length + n), and return their
        logits [n, V] in float32. The cache's length does not change: `commit` keeps rows.

        Args:
            tokens, positions: [n] int64.
            mask: [n, m] bool over the newest m slots; the last n are these rows' own. Every row
                attends to all older slots. None: each row attends to the rows before it and to
                itself. A level of a draft tree has m > n, because the mask also has columns for
                the rows that the draft ran before, the root first.

        Raises IndexError if the cache is too small.
        """
        return self.logits(self.hidden(tokens, positions, cache, mask))

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        """Run n rows as `forward` does and return their last hidden states [n, hidden], before the
        final norm. `prefill` needs them of all rows, but the logits of one."""
        n = len(tokens)
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool).tril()
        n_slots = cache.length + n  # S
        if n_slots > cache.capacity:
            raise IndexError(f"the cache has {cache.capacity} slots, {n_slots} are needed")
        n_older = n_slots - mask.shape[1]  # slots before those of the mask
        mask = F.pad(mask, (n_older, 0), value=True).to(self.device)  # [n, S]
        rotary = cache.rotary[positions.to(self.device)]
        return self.gpt_neox(tokens.to(self.device), rotary, cache.kv, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of last hidden states [n, hidden]. Raises NonFiniteLogits."""
        return finite(self.embed_out(self.gpt_neox.final_layer_norm(hidden)).float())

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        """Run and keep the next tokens of the sequence, in chunks, and return the logits [1, V]
        after the last one, which attends to all others, so it raises if one overflowed."""
        for ids in torch.tensor(tokens).split(PREFILL_CHUNK):
            positions = torch.arange(cache.length, cache.length + len(ids))
            x = self.hidden(ids, positions, cache)
            cache.commit(range(len(ids)))
        return self.logits(x[-1:])


class NonFiniteLogits(Exception):
    """A model's logits hold nan or +inf, so no token can be chosen."""


def finite(logits: Tensor) -> Tensor:
    """Return the logits [n, V] of a pass. Raises NonFiniteLogits if any is nan or +inf.

    One row that overflows may spoil the others: a masked slot adds 0 times its value to attention,
    and 0 x nan is nan. So no row of such a pass can be used.
    """
    if not (logits < torch.inf).all():  # False for nan, too
        raise NonFiniteLogits(
            "the logits are nan or inf: the model overflows, or a weight is nan; small Pythia "
            "models overflow in float16, so use bfloat16 or float32"
        )
    return logits


def untied_if_head_differs(config: Config, tensors: Mapping[str, Tensor]) -> Config:
    """Return the config. If it ties the output head to the embedding, but another head is stored,
    warn and return it untied, as transformers does."""
    embedding = tensors.get(EMBEDDING)
    if not config.tie_word_embeddings or OUTPUT_HEAD not in tensors or embedding is None:
        return config
    if torch.equal(tensors[OUTPUT_HEAD], embedding):
        return config
    why = f"{OUTPUT_HEAD} is stored and differs from the embedding, so it is kept"
    warnings.warn(f"tie_word_embeddings is true, but {why}", stacklevel=2)
    return replace(config, tie_word_embeddings=False)
