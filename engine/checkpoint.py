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
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.foreign import ForeignFile, convert, read_json, require_file
from engine.shares import WHOLE, Share, split_axis
from gpt_neox import ACTIVATIONS, Config

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


class Published(Struct):
    """config.json: what its keys may say. Which must be there says gpt_neox.Config."""

    vocab_size: Size | None = None
    hidden_size: Size | None = None
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1000)] | None = None
    num_attention_heads: Size | None = None
    intermediate_size: Size | None = None
    max_position_embeddings: Size | None = None
    rotary_pct: float | None = None
    rotary_emb_base: Positive | None = None
    hidden_act: Literal[*ACTIVATIONS] | None = None
    layer_norm_eps: Positive | None = None
    use_parallel_residual: bool | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    eos_token_id: int | list[int] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: None = None


def parse_config(raw: dict) -> Config:
    """A parsed config.json, of either style. Raises CheckpointError naming what is missing or
    foreign."""
    if raw.get("model_type") == "gpt_neox":  # else that is what is wrong
        convert(raw, "config.json", Published)
    try:
        return Config.from_json(raw)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


class Index(Struct):
    """Of a checkpoint in several files."""

    weight_map: dict[str, str]  # the file of each tensor, by name


def read_config(folder: Path) -> Config:
    """The Config of a checkpoint folder. Raises CheckpointError."""
    raw = read_json(folder / "config.json", dict, JSON_BYTES)
    try:
        return parse_config(raw)
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
