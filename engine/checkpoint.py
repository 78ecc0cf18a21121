"""A checkpoint's folder: reading its config, loading and checking its tensors.

Published Pythia and newer saves, sharded or not, old files with buffers that nothing needs; all
else is an error that names what is missing, foreign or misshapen.

    folder = Path("models/tiny/target")
    config = read_config(folder)
    tensors = load_tensors(folder, shapes, torch.device("cpu"), torch.float32)
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine import foreign
from engine.foreign import (
    Either,
    ForeignFile,
    List,
    Map,
    Number,
    Object,
    Optional,
    Switch,
    Word,
    checked,
    require_file,
    short,
    unreadable,
)
from engine.shares import WHOLE, Share, split_axis

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}  # F.gelu's approximate=
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EMBED_IN, EMBED_OUT = "gpt_neox.embed_in.weight", "embed_out.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")  # as safetensors names them
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
        """Read a parsed config.json. Raises CheckpointError naming what is missing or foreign."""
        if raw.get("model_type") != "gpt_neox":
            raise CheckpointError(f"model_type is {short(raw.get('model_type'))}, not 'gpt_neox'")
        rope = raw.get("rope_parameters")
        rope_type = rope.get("rope_type") if isinstance(rope, dict) else None
        scaling = raw.get("rope_scaling") or rope_type
        if scaling not in (None, "default"):
            raise CheckpointError(f"rope scaling {short(scaling)} is not supported")
        try:
            found = checked(raw, NEWER if rope else PUBLISHED, "config.json")
        except ForeignFile as error:
            raise CheckpointError(str(error)) from error
        if rope:
            fraction = found["rope_parameters"]["partial_rotary_factor"]
            base = found["rope_parameters"]["rope_theta"]
        else:
            fraction = found["rotary_pct"]
            base = found["rotary_emb_base"]
        eos = found["eos_token_id"]
        return cls(
            vocab_size=found["vocab_size"],
            hidden_size=found["hidden_size"],
            n_layers=found["num_hidden_layers"],
            n_heads=found["num_attention_heads"],
            intermediate_size=found["intermediate_size"],
            max_positions=found["max_position_embeddings"],
            rotary_fraction=float(fraction),
            rotary_base=float(base),
            activation=found["hidden_act"],
            norm_eps=float(found["layer_norm_eps"]),
            is_parallel=found["use_parallel_residual"],
            is_tied=found["tie_word_embeddings"],
            has_attention_bias=found["attention_bias"],
            eos_ids=tuple(eos if isinstance(eos, list) else [eos]),
        )


SIZE = Number(int, 1, 10**15)
POSITIVE = Number(float, 1e-37, 3e38)  # in float32, too
SHARED = {  # by both styles of config.json
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": Number(int, 1, 1_000),  # the tensors of each are named one by one
    "num_attention_heads": SIZE,
    "intermediate_size": SIZE,
    "max_position_embeddings": SIZE,
    "hidden_act": Optional(Word(tuple(ACTIVATIONS)), Config.activation),
    "layer_norm_eps": Optional(POSITIVE, Config.norm_eps),
    "use_parallel_residual": Optional(Switch(), Config.is_parallel),
    "tie_word_embeddings": Optional(Switch(), Config.is_tied),
    "attention_bias": Optional(Switch(), Config.has_attention_bias),
    "eos_token_id": Optional(Either(List(Number(int)), Number(int)), []),
}
ROPE = {"partial_rotary_factor": Number(float), "rope_theta": POSITIVE}
PUBLISHED = SHARED | {"rotary_pct": Number(float), "rotary_emb_base": POSITIVE}
NEWER = SHARED | {"rope_parameters": Object(ROPE)}
WEIGHT_MAP = {"weight_map": Map(Word())}  # of an index: the file of each tensor


def read_config(folder: Path) -> Config:
    """The Config of a checkpoint folder. Raises CheckpointError."""
    try:
        return Config.from_json(read_json(folder / "config.json"))
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
        raise _damaged(file, f"{file} cannot be read: {first_line(error)}") from error


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
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise CheckpointError(str(unreadable(folder, error))) from error
    require_safetensors(names, folder)
    if SINGLE in names:
        return [_weight_file(folder, SINGLE)]
    return [_weight_file(folder, name) for name in shard_names(folder)]


def _weight_file(folder: Path, name: str) -> Path:
    try:
        require_file(folder / name)
    except ForeignFile as error:
        listed = "" if name == SINGLE else f"{folder / INDEX} lists {name}, but "
        raise CheckpointError(f"{listed}{error}") from error
    return folder / name


def shard_names(folder: Path) -> list[str]:
    """The files that the folder's index lists, all inside of it. Raises CheckpointError."""
    index = folder / INDEX
    try:
        weight_map = checked(read_json(index), WEIGHT_MAP, str(index))["weight_map"]
    except ForeignFile as error:
        raise CheckpointError(str(error)) from error
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} lists {name}, which is not safetensors")
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise CheckpointError(f"{index} lists {name}, which lies outside its folder")
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
        return checked(foreign.read_json(file), {}, str(file))
    except ForeignFile as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, line: str) -> CheckpointError:
    """The line for a file that is not as it should be."""
    if os.path.islink(file) and os.path.isfile(file):
        # In the hub client's cache, which fetches what is not there
        line += f"; delete {file.resolve()} and the next run fetches it again"
    return CheckpointError(line)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
