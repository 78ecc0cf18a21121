"""A checkpoint's folder: reading its config, loading and checking its tensors.

Published Pythia and newer saves, sharded or not, old files with buffers that nothing needs; all
else is an error that names what is missing, foreign or misshapen.

    folder = Path("models/tiny/target")
    config = read_config(folder)
    tensors = load_tensors(folder, shapes, torch.device("cpu"), torch.float32)
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta, Struct, field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.foreign import ForeignFile, convert, read_json, require_file
from engine.shares import WHOLE, Share, split_axis

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}  # F.gelu's approximate=
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EMBED_IN, EMBED_OUT = "gpt_neox.embed_in.weight", "embed_out.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")  # as safetensors names them
LEGACY_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
NO_WEIGHTS = "no safetensors; .bin weights have to be converted to them"
JSON_BYTES = 2**22  # of a config or an index, of which the largest have some hundred thousand
CheckpointError = ForeignFile  # what cannot be found, read or used; one line for the user

Size = Annotated[int, Meta(ge=1, le=10**15)]
Positive = Annotated[float, Meta(ge=1e-37, le=3e38)]  # in float32, too


class Rope(Struct):
    """The rotary embedding, as newer saves have it."""

    partial_rotary_factor: float
    rope_theta: Positive
    rope_type: Literal["default"] | None = None


class Scaling(Struct):
    """What config.json may say of rotary embeddings beside the published keys."""

    rope_parameters: Rope | None = None
    rope_scaling: None = None


class Config(Struct, frozen=True, kw_only=True):
    """config.json: its keys, their ranges and what they are if they are absent."""

    vocab_size: Size  # V, rows of the embedding; may be padded beyond the tokenizer
    hidden_size: Size
    n_layers: Annotated[int, Meta(ge=1, le=1000)] = field(name="num_hidden_layers")  # L
    n_heads: Size = field(name="num_attention_heads")  # H
    intermediate_size: Size
    max_positions: Size = field(name="max_position_embeddings")  # trained; longer works, worse
    rotary_fraction: float = field(name="rotary_pct")  # share of each head that is rotated
    rotary_base: Positive = field(name="rotary_emb_base")
    activation: Literal[*ACTIVATIONS] = field(name="hidden_act", default="gelu")
    norm_eps: Positive = field(name="layer_norm_eps", default=1e-5)
    # x + attention(x) + mlp(x), else one after the other
    is_parallel: bool = field(name="use_parallel_residual", default=True)
    is_tied: bool = field(name="tie_word_embeddings", default=False)  # the output is the embedding
    has_attention_bias: bool = field(name="attention_bias", default=True)
    eos_ids: tuple[int, ...] = field(name="eos_token_id", default=())

    def __post_init__(self) -> None:
        if self.hidden_size % self.n_heads:
            raise CheckpointError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.n_heads} heads"
            )
        if not 0 < self.rotary_fraction <= 1:
            raise CheckpointError(f"rotary fraction {self.rotary_fraction} is outside (0, 1]")
        if self.rotary_dims < 2 or self.rotary_dims % 2 or self.head_size % 2:
            dims = f"{self.rotary_dims} rotary dims of {self.head_size}"
            raise CheckpointError(f"{dims} cannot be rotated in pairs")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.n_heads

    @property
    def rotary_dims(self) -> int:
        return int(self.head_size * self.rotary_fraction)

    @classmethod
    def from_json(cls, raw: dict) -> "Config":
        """Read a parsed config.json, of either style. Raises CheckpointError naming what is missing
        or foreign."""
        where = "config.json"
        if raw.get("model_type") != "gpt_neox":
            found = str(raw.get("model_type"))[:100]
            raise CheckpointError(f"{where} has model_type {found!r}, not 'gpt_neox'")
        said = {key: value for key, value in raw.items() if value is not None}
        rope = convert(said, where, Scaling).rope_parameters
        if rope:
            said |= {"rotary_pct": rope.partial_rotary_factor, "rotary_emb_base": rope.rope_theta}
        if "eos_token_id" in said and not isinstance(said["eos_token_id"], list):
            said["eos_token_id"] = [said["eos_token_id"]]
        return convert(said, where, cls)


class Index(Struct):
    """Of a checkpoint in several files."""

    weight_map: dict[str, str]  # the file of each tensor, by name


def read_config(folder: Path) -> Config:
    """The Config of a checkpoint folder. Raises CheckpointError."""
    raw = read_json(folder / "config.json", dict, JSON_BYTES)
    try:
        return Config.from_json(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    share: Share = WHOLE,
) -> "StoredTensors":
    """All tensors of a checkpoint, by published name, each read when it is asked for.

    shapes: that it must have, by name. Raises CheckpointError: a tensor is missing, extra or
    misshapen, a file is truncated.
    """
    files = {}
    for file in weight_files(folder):
        with _opened(file) as shard:
            for name in _wanted(shard, shapes, file):
                files[name] = file
    for name in shapes:
        if name not in files:
            raise CheckpointError(f"{folder} lacks the tensor {name}")
    return StoredTensors(files, device, dtype, share)


@dataclass(frozen=True)
class StoredTensors(Mapping):
    """Tensors on the device in the wanted dtype, read anew at each look at one, so that memory has
    no more of them than whoever looks keeps; of a share, nothing else is read."""

    files: dict[str, Path]  # by name
    device: torch.device
    dtype: torch.dtype
    share: Share

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError if it cannot be read, or is not finite."""
        file = self.files[name]
        with _opened(file) as shard:  # each time: what is read of an open file counts as memory
            # A copy, as the file's own memory begins anywhere, and products round by alignment
            tensor = _read(shard, name, self.share).to(self.device, self.dtype, copy=True)
        if not tensor.isfinite().all():
            raise CheckpointError(f"{file}: {name} is not finite in {self.dtype}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    """Raises CheckpointError."""
    try:
        with safe_open(file, "pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        line = f"{file} cannot be read: {first_line(error)}"
        if file.is_symlink():  # in the hub client's cache, which fetches what is not there
            line += f"; delete {file.resolve()} and the next run fetches it again"
        raise CheckpointError(line) from error


def _read(shard: safe_open, name: str, share: Share) -> Tensor:
    """A tensor, or a rank's part of it; zeros where the vocabulary has ended."""
    axis = split_axis(name)
    if share is WHOLE or axis is None:
        return shard.get_tensor(name)
    stored = shard.get_slice(name)
    n = stored.get_shape()[axis]
    start, end = share.bounds(n)
    if axis == 1:
        return stored[:, start:end]
    part = stored[start:end]
    lacking = share.size(n) - len(part)
    return F.pad(part, (0, 0, 0, lacking)) if lacking else part


def _wanted(shard: safe_open, shapes: Mapping[str, tuple[int, ...]], file: Path) -> Iterator[str]:
    """The names to load from a shard; raises CheckpointError on a foreign name, type or shape."""
    for name in shard.keys():
        is_tied_copy = name == EMBED_OUT and name not in shapes
        if is_tied_copy or LEGACY_BUFFERS.search(name):
            continue
        if name not in shapes:
            raise CheckpointError(f"{file} has a tensor that GPT-NeoX does not: {name}")
        dtype = shard.get_slice(name).get_dtype()
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{file}: {name} is {dtype}; only floating types load ({', '.join(FLOATS)}): "
                "convert the checkpoint to one of them"
            )
        shape = tuple(shard.get_slice(name).get_shape())
        if shape != shapes[name]:
            asked = tuple(shapes[name])
            raise CheckpointError(f"{file}: {name} is {shape}, config.json asks for {asked}")
        yield name


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index lists. Raises CheckpointError."""
    if os.path.lexists(folder / SINGLE):
        files = [folder / SINGLE]
    elif os.path.lexists(folder / INDEX):
        files = [folder / name for name in shard_names(folder)]
    else:
        raise CheckpointError(f"{folder} holds {NO_WEIGHTS}")
    for file in files:
        require_file(file)
    return files


def shard_names(folder: Path) -> list[str]:
    """The files that the folder's index lists, all inside of it. Raises CheckpointError."""
    names = sorted(set(read_json(folder / INDEX, Index, JSON_BYTES).weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors") or PurePath(name).name != name:
            what = f"{name[:100]!r}, which is no safetensors file in its folder"
            raise CheckpointError(f"{folder / INDEX} lists {what}")
    return names


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
