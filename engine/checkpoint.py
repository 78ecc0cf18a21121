"""A checkpoint's folder: reading its config, loading and checking its tensors.

Published Pythia and newer saves, sharded or not, old files with buffers that nothing needs; all
else is an error that names what is missing, foreign or misshapen.

    folder = Path("models/tiny/target")
    config = read_config(folder)
    tensors = load_tensors(folder, config, torch.device("cpu"), torch.float32)
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}  # F.gelu's approximate=
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
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
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LEGACY_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")


class CheckpointError(Exception):
    """A checkpoint that cannot be found, read or used; the message is one line for the user."""


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


def read_config(folder: Path) -> Config:
    """The Config of a checkpoint folder. Raises CheckpointError."""
    try:
        return Config.from_json(read_json(folder / "config.json"))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_tensors(
    folder: Path, config: Config, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by published name, on the device in the wanted dtype.

    One at a time, so that no second copy of all ever exists. Raises CheckpointError: a tensor is
    missing, extra, misshapen or not finite, a file is truncated.
    """
    shapes = expected_shapes(config)
    tensors = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt", device=str(device)) as shard:
                for name in _wanted(shard, shapes, file):
                    # A copy, as the file's own memory begins anywhere, and MKL rounds by alignment
                    tensors[name] = shard.get_tensor(name).to(dtype, copy=True)
                    if not tensors[name].isfinite().all():
                        raise CheckpointError(f"{file}: {name} is not finite in {dtype}")
        except (SafetensorError, OSError) as error:
            raise _damaged(file, f"cannot be read: {first_line(error)}") from error
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


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index lists. Raises CheckpointError."""
    require_safetensors([f.name for f in folder.iterdir()], folder)
    if (single := folder / SINGLE).exists():
        return [single]
    files = [folder / name for name in shard_names(folder)]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{folder / INDEX} lists {file.name}, which is not there")
    return files


def shard_names(folder: Path) -> list[str]:
    """The files that the folder's index lists. Raises CheckpointError."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} lists {name}, which is not safetensors")
    return names


def require_safetensors(files: Iterable[str], where: str | Path) -> None:
    """Raise CheckpointError unless the file names hold a safetensors checkpoint."""
    if not {SINGLE, INDEX} & set(files):
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
        raise _damaged(file, f"is not JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return content


def _damaged(file: Path, what: str) -> CheckpointError:
    """The line for a file that is not as it should be."""
    line = f"{file} {what}"
    if file.is_symlink():  # in the hub client's cache, which fetches nothing that is there
        line += f"; delete {file.resolve()} and the next run fetches it again"
    return CheckpointError(line)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
