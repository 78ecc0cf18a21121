"""A checkpoint's folder: finding or fetching it, and reading its config and its tensors.

Supported are published Pythia checkpoints and newer saves, in one file or in shards, and old files
with buffers. A note names other tensors that nothing uses. An error names a weight that is missing
or misshapen.

    found = find_checkpoint("models/tiny/target")
    tensors = load_tensors(found.folder, found.config, torch.device("cpu"), torch.float32)

The hub's own client fetches repositories of the hub into its cache, so HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE work as usual. Only safetensors and JSON files are fetched, one after
the other. snapshot_download is not used, because Ctrl-C would not end its threads at once.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import gpt_neox
from gpt_neox import EMBEDDING, INCOMPLETE, INDEX, OUTPUT_HEAD, SINGLE, Config, GPTNeoX, shard_names

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALIASES = {"lm_head.weight": OUTPUT_HEAD}  # stored names and the published names they stand for
GENERATION_CONFIG = "generation_config.json"
# Settings of generation_config.json that change transformers' text, with their defaults there: in
# any case, only if do_sample is true, and only if num_beams is above 1
UNUSED = {"do_sample": False, "num_beams": 1, "guidance_scale": 1, "max_time": None}
UNUSED |= {"repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0}
UNUSED |= {"encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0}
UNUSED |= {"bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": []}
UNUSED |= {"sequence_bias": [], "stop_strings": [], "forced_eos_token_id": None}
UNUSED |= {"exponential_decay_length_penalty": None, "watermarking_config": None}
UNUSED_SAMPLING = {"temperature": 1, "top_k": 50, "top_p": 1, "min_p": 0, "typical_p": 1}
UNUSED_SAMPLING |= {"epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
UNUSED_BEAMS = {"length_penalty": 1, "early_stopping": False}
LEGACY_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias)$|\brotary_emb\.\w+$")
HEAD_TYPE = "eagle_head"  # model_type of an EAGLE head (engine/eagle_head.py)
OFFLINE = "; without a network use the embedded pair: --pair embedded"


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, fetched or used. The message is one line for the user."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Checkpoint:
    """A folder with a GPT-NeoX or an EAGLE head, whose config is read once. Raises CheckpointError
    for any other model."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.is_head = read_json(folder / "config.json").get("model_type") == HEAD_TYPE
        with reading(folder):
            self.model_config = None if self.is_head else gpt_neox.read_config(folder)

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def config(self) -> Config:
        """The Config of a GPT-NeoX. Raises CheckpointError for a head."""
        if self.model_config is None:
            raise CheckpointError(f"{self.folder} is an EAGLE head: use it as --draft")
        return self.model_config


def find_checkpoint(
    name_or_path: str | Path | Checkpoint, announce: Callable[[str], None] = lambda line: None
) -> Checkpoint:
    """Return the checkpoint of a folder, or of a hub repository NAME or NAME@REVISION.

    A repository is downloaded. announce: called with a line about the download before it starts.
    Raises CheckpointError.
    """
    if isinstance(name_or_path, Checkpoint):
        return name_or_path
    text = str(name_or_path)
    if os.path.isdir(text):
        found = Checkpoint(Path(text))
        weight_files(found.folder)
        return found
    name, _, revision = text.partition("@")
    if not name or name.startswith((".", "/", "~")) or os.path.exists(text):
        raise CheckpointError(f"{text!r} is neither a folder nor a hub name")
    with convert_hub_errors(f"{text!r} is not a folder, and", OFFLINE):
        return fetch(name, revision or None, announce)


def fetch(name: str, revision: str | None, announce: Callable[[str], None]) -> Checkpoint:
    """Fetch the files of a repository that a run reads. They are in a folder of the cache."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    commit = HfApi().resolve_revision(name, revision=revision)
    get = partial(hf_hub_download, name, revision=commit)
    folder = Path(get("config.json")).parent
    with suppress(EntryNotFoundError):  # most repositories have none
        get(GENERATION_CONFIG)
    found = Checkpoint(folder)  # refuses other models before their weights are fetched
    if not found.is_head:
        get("tokenizer.json")
    try:
        files = [get(SINGLE, dry_run=True)]
    except EntryNotFoundError:
        files = [get(shard, dry_run=True) for shard in shard_names(Path(get(INDEX)))]
    n_bytes = sum(file.file_size for file in files if file.will_download)
    if n_bytes:
        announce(f"fetching {name}: {n_bytes / 1e6:,.1f} MB into {folder.parents[2]}")
    for file in files:
        get(file.filename)
    return found


@contextmanager
def convert_hub_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Raise CheckpointError, with the client's message on one line, if the block cannot fetch.

    what, remedy: the start and the end of the line. The client is imported here, because its import
    takes half a second and only hub names need it.
    """
    from httpx2 import HTTPError
    from huggingface_hub.errors import RevisionResolutionError

    try:
        yield
    except CheckpointError:
        raise
    except (HTTPError, OSError, ValueError, RevisionResolutionError) as error:
        message = " ".join(str(error).split())
        raise CheckpointError(f"{what} cannot be fetched: {message}{remedy}") from error


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise CheckpointError, with the file's name, if the block cannot read or use the file."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {first_line(error)}: {INCOMPLETE}") from error
    except (OSError, ValueError) as error:
        line = first_line(error)
        raise CheckpointError(line if str(file) in line else f"{file}: {line}") from error


def read_json(file: Path) -> dict:
    """Return the object that a JSON file holds. Raises CheckpointError."""
    with reading(file):
        return gpt_neox.read_json(file)


def unused_settings(folder: Path) -> list[str]:
    """Return the names of the settings in generation_config.json that are not used here, but change
    transformers' text. Raises CheckpointError."""
    if not (folder / GENERATION_CONFIG).exists():
        return []
    raw = read_json(folder / GENERATION_CONFIG)
    defaults = dict(UNUSED)
    if raw.get("do_sample"):
        defaults |= UNUSED_SAMPLING
    if raw.get("num_beams") not in (None, 1):
        defaults |= UNUSED_BEAMS
    return [name for name, default in defaults.items() if raw.get(name) not in (None, default)]


def published_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint must have, by its published name."""
    with torch.device("meta"):
        model = GPTNeoX(config)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def load_tensors(
    folder: Path, config: Config, device: torch.device, dtype: torch.dtype
) -> "StoredTensors":
    """Return a checkpoint's tensors by published name; each lookup reads the file.

    Raises CheckpointError if a tensor is missing or misshapen, or if a file is truncated.
    """
    shapes = published_shapes(config)
    # A tied head may be stored as well
    allowed = {OUTPUT_HEAD: shapes[EMBEDDING], **shapes}
    return StoredTensors(find_tensors(folder, shapes, allowed), device, dtype)


def find_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], allowed: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Path, str]]:
    """Return the file and the stored name of each tensor of a folder, by published name.

    shapes: of the tensors that must be there; allowed: of all that are used. Warns once of all
    others, except buffers. Raises CheckpointError.
    """
    files, unused = {}, []
    for file in weight_files(folder):
        with reading(file), safe_open(file, "pt") as tensors:
            for stored_name in tensors.keys():
                if LEGACY_BUFFERS.search(stored_name):
                    continue
                name = ALIASES.get(stored_name, stored_name)
                if name not in allowed:
                    unused.append(stored_name)
                    continue
                shape = tuple(tensors.get_slice(stored_name).get_shape())
                if shape != allowed[name]:
                    raise ValueError(f"{name} is {shape}, by config.json {allowed[name]}")
                if name in files:
                    raise ValueError(f"{name} is stored a second time, as in {files[name][0]}")
                files[name] = file, stored_name
    for name in shapes:
        if name not in files:
            raise CheckpointError(f"{folder} has no tensor {name}")
    if unused:
        names = f"{', '.join(unused):.200}"
        warnings.warn(f"{folder} has tensors that nothing uses: {names}", stacklevel=2)
    return files


@dataclass(frozen=True)
class StoredTensors(Mapping):
    """Tensors on a device and in a dtype.

    Each lookup reads the file, so memory holds only the tensors that the caller keeps.
    """

    files: dict[str, tuple[Path, str]]  # by published name: the file, and the name in the file
    device: torch.device
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError if the tensor cannot be read, holds integers or is not finite."""
        file, stored_name = self.files[name]
        # Not kept open, because a file's pages count as memory
        with reading(file), safe_open(file, "pt") as tensors:
            tensor = tensors.get_tensor(stored_name)
            if not tensor.is_floating_point():
                raise ValueError(f"{name} is {tensor.dtype}; only floating types load")
            # A copy is aligned. A file's memory may not be, and the rounding of products depends
            # on alignment
            tensor = tensor.to(self.device, self.dtype, copy=True)
            if not tensor.isfinite().all():
                raise ValueError(f"{name} is not finite in {self.dtype}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights. Raises CheckpointError."""
    with reading(folder):
        return gpt_neox.weight_files(folder)
