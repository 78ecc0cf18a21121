"""A checkpoint's folder: reading its config, loading and checking its tensors.

Published Pythia and newer saves, sharded or not, old files with buffers that nothing needs; all
else is an error that names what is missing, foreign or misshapen.

    folder = Path("models/tiny/target")
    config = read_config(folder)
    tensors = load_tensors(folder, config, torch.device("cpu"), torch.float32)
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
import torch.nn.functional as F
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.foreign import ForeignFile, read_json, require_file
from engine.shares import WHOLE, Share, split_axis
from gpt_neox import Config, GPTNeoX

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EMBED_IN, EMBED_OUT = "gpt_neox.embed_in.weight", "embed_out.weight"
ALIASES = {"lm_head.weight": EMBED_OUT}  # a stored name: the published one
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")  # as safetensors names them
LEGACY_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
OTHER_WEIGHTS = {  # what weights of another kind are, by a pattern of the file's name
    r"\.gguf$": "is GGUF, for llama.cpp: use the model's safetensors",
    r"-of-\d+\.safetensors$": "is one of several: the index is needed too",
    r"(gptq|awq|\dbit).*\.safetensors$": "is quantised: use the float weights",
    r"\.safetensors$": "is named otherwise: rename it if it holds all weights",
    r"\.(bin|pt|pth)$": "has to be converted to safetensors",
}
JSON_BYTES = 2**22  # of a config or an index, of which the largest have some hundred thousand
CheckpointError = ForeignFile  # what cannot be found, read or used; one line for the user


def parse_config(raw: dict, generation: dict | None = None) -> Config:
    """Return the Config of a parsed config.json and generation_config.json. Raises
    CheckpointError."""
    try:
        return Config.from_json(raw, generation or {})
    except ValueError as error:
        raise CheckpointError(str(error)) from error


class Index(Struct):
    """Of a checkpoint in several files."""

    weight_map: dict[str, str]  # the file of each tensor, by name


def read_config(folder: Path) -> Config:
    """Return the Config of a checkpoint folder. Raises CheckpointError."""
    raw = read_json(folder / "config.json", dict, JSON_BYTES)
    generation = {}
    if os.path.lexists(folder / GENERATION):
        generation = read_json(folder / GENERATION, dict, JSON_BYTES)
    try:
        return parse_config(raw, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def load_tensors(
    folder: Path, config: Config, device: torch.device, dtype: torch.dtype, share: Share = WHOLE
) -> "StoredTensors":
    """Return all tensors of a checkpoint, by published name, each read when it is asked for.

    Raises CheckpointError: a tensor is missing, extra or misshapen, a file is truncated.
    """
    shapes, files = published_shapes(config), {}
    for file in weight_files(folder):
        with _opened(file) as shard:
            for name, stored in _wanted(shard, shapes, file):
                if name in files:
                    raise CheckpointError(f"{file} has the tensor {name} a second time")
                files[name] = file, stored
    for name in shapes:
        if name not in files:
            raise CheckpointError(f"{folder} lacks the tensor {name}")
    return StoredTensors(files, device, dtype, share)


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


@dataclass(frozen=True)
class StoredTensors(Mapping):
    """Tensors on the device in the wanted dtype, read anew at each look at one, so that memory has
    no more of them than whoever looks keeps; of a share, nothing else is read."""

    files: dict[str, tuple[Path, str]]  # by published name: the file, and the name there
    device: torch.device
    dtype: torch.dtype
    share: Share

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError if it cannot be read, or is not finite."""
        file, stored = self.files[name]
        with _opened(file) as shard:  # each time: what is read of an open file counts as memory
            # A copy, as the file's own memory begins anywhere, and products round by alignment
            tensor = _read(shard, stored, self.share).to(self.device, self.dtype, copy=True)
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
        raise CheckpointError(f"{line}; delete {file.resolve()} and fetch it again") from error


def _read(shard: safe_open, name: str, share: Share) -> Tensor:
    """A tensor, or a rank's part of it; zeros where the vocabulary has ended."""
    axis = split_axis(ALIASES.get(name, name))
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


def _wanted(
    shard: safe_open, shapes: Mapping[str, tuple[int, ...]], file: Path
) -> Iterator[tuple[str, str]]:
    """Published and stored names to load; raises CheckpointError on a foreign one, or its type or
    shape."""
    shapes = {EMBED_OUT: shapes[EMBED_IN], **shapes}  # a tied head may be stored as well
    for name in shard.keys():
        published = ALIASES.get(name, name)
        if LEGACY_BUFFERS.search(name):
            continue
        if published not in shapes:
            raise CheckpointError(f"{file} has a tensor that GPT-NeoX does not: {name}")
        dtype = shard.get_slice(name).get_dtype()
        if dtype not in FLOATS:
            raise CheckpointError(f"{file}: {name} is {dtype}; only floating types load")
        shape = tuple(shard.get_slice(name).get_shape())
        if shape != shapes[published]:
            asked = tuple(shapes[published])
            raise CheckpointError(f"{file}: {name} is {shape}, config.json asks for {asked}")
        yield published, name


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index lists. Raises CheckpointError."""
    if os.path.lexists(folder / SINGLE):
        files = [folder / SINGLE]
    elif os.path.lexists(folder / INDEX):
        files = [folder / name for name in shard_names(folder / INDEX)]
    else:
        found = describe_weights(os.listdir(folder))
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}{found}")
    for file in files:
        require_file(file)
    return files


def describe_weights(names: Sequence[str]) -> str:
    """Return what one of these files is and what to do with it; empty if none holds weights."""
    for pattern, what in OTHER_WEIGHTS.items():
        for name in sorted(names):
            if re.search(pattern, name, re.IGNORECASE):
                return f"; {name} {what}"
    return ""


def shard_names(index: Path) -> list[str]:
    """Return the files that an index lists, all in its folder. Raises CheckpointError."""
    names = sorted(set(read_json(index, Index, JSON_BYTES).weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors") or PurePath(name).name != name:
            what = f"{name[:100]!r}, which is no safetensors file in its folder"
            raise CheckpointError(f"{index} lists {what}")
    return names


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
