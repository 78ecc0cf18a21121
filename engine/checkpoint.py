"""A checkpoint's folder: finding or fetching it, reading its config, loading and checking tensors.

Supported are published Pythia checkpoints and newer saves, in one file or in shards, and old files
with unused buffers. For all others, the error names what is missing, extra or misshapen. The files
are untrusted input, so types, sizes, encodings and nesting are checked.

    folder = find_checkpoint("models/tiny/target")
    config = read_config(folder)
    tensors = load_tensors(folder, config, torch.device("cpu"), torch.float32)

The hub's own client fetches repositories of the hub into its cache, so HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE work as usual. Only safetensors and JSON files are fetched, one after
the other. snapshot_download is not used, because Ctrl-C would not end its threads at once.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.tensor_parallel import UNSHARDED, Shard, split_axis
from gpt_neox import EMBEDDING, OUTPUT_HEAD, Config, GPTNeoX

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALIASES = {"lm_head.weight": OUTPUT_HEAD}  # stored names and the published names they stand for
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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
FLOAT_TYPES = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")  # as safetensors names them
LEGACY_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # ends of names of weight files
HEAD_TYPE = "eagle_head"  # model_type of an EAGLE head (engine/eagle_head.py)
OTHER_HEADS = re.compile("eagle|medusa|hydra|speculator", re.IGNORECASE)  # words in config.json
MAX_FILE_BYTES = 2**26  # limit for any file that is read whole
MAX_JSON_BYTES = 2**22  # limit for a config or index; the largest have some hundred thousand bytes
# The hub's client also raises these: for answers of other servers, and ImportError for a package
# that a proxy needs
CLIENT_ERRORS = (TypeError, LookupError, AttributeError, ImportError)


class InvalidFile(ValueError):
    """A file that cannot be read or used. The message is one line for the user."""

    def __init__(self, line: str):
        super().__init__(printable(line))


CheckpointError = InvalidFile


class HubUnreachable(CheckpointError):
    """A repository that cannot be fetched and is not complete in the hub client's cache."""


def printable(text: str) -> str:
    """Return untrusted text on one line, with its control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def find_checkpoint(
    name_or_path: str | Path, announce: Callable[[str], None] = lambda line: None
) -> Path:
    """Return the folder of a checkpoint, given a folder or a hub repository NAME or NAME@REVISION.

    A repository is downloaded. announce: called with a line about the download before it starts.
    Raises CheckpointError.
    """
    text = str(name_or_path)
    if text and os.path.isdir(text):
        require_checkpoint(Path(text))
        return Path(text)
    if os.path.isfile(text):
        raise CheckpointError(f"{text!r} is a file, not a folder")
    name, _, revision = text.partition("@")
    is_path = not name or name.startswith((".", "/", "~")) or os.path.lexists(text)
    if is_path:
        raise CheckpointError(f"{text!r} is neither a folder nor a hub name")
    with convert_hub_errors(f"{text!r} is not a folder, and"):
        return fetch(name, revision or None, announce)


def require_checkpoint(folder: Path) -> None:
    """Raise CheckpointError unless a folder has a GPT-NeoX or an EAGLE head, with safetensors."""
    if (folder / "snapshots").is_dir():  # models--ORG--NAME
        name = folder.resolve().name.removeprefix("models--").replace("--", "/")
        raise CheckpointError(f"{folder} is the cache folder of {name}; use {name}")
    if os.path.lexists(folder / "config.json") and not is_head(folder):
        read_config(folder)
    weight_files(folder)


def fetch(name: str, revision: str | None, announce: Callable[[str], None]) -> Path:
    """Fetch the files of a repository that a run reads, and return their folder in the cache."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    commit = HfApi().resolve_revision(name, revision=revision)
    folder = Path(hf_hub_download(name, "config.json", revision=commit)).parent
    with suppress(EntryNotFoundError):  # most repositories have none
        hf_hub_download(name, GENERATION_CONFIG, revision=commit)
    if not is_head(folder):
        read_config(folder)  # reject other models before their weights are fetched
        hf_hub_download(name, "tokenizer.json", revision=commit)
    weights = []
    for file in weight_names(name, commit, folder):
        weights.append(hf_hub_download(name, file, revision=commit, dry_run=True))
    n_bytes = sum(file.file_size for file in weights if file.will_download)
    if n_bytes:
        announce(f"fetching {name}: {n_bytes / 1e6:,.1f} MB into {folder.parents[2]}")
    for file in weights:
        hf_hub_download(name, file.filename, revision=commit)
    return folder


def weight_names(name: str, commit: str, folder: Path) -> list[str]:
    """Return the names of a repository's weight files: model.safetensors, or the shards of its
    index, which is fetched to the folder. Raises CheckpointError if there is neither."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if not (folder / INDEX).exists():
        try:
            hf_hub_download(name, SINGLE, revision=commit, dry_run=True)
            return [SINGLE]
        except RemoteEntryNotFoundError:
            pass
        try:
            hf_hub_download(name, INDEX, revision=commit)
        except RemoteEntryNotFoundError as error:
            raise CheckpointError(f"{name} has neither {SINGLE} nor {INDEX}") from error
    return shard_names(folder / INDEX)


@contextmanager
def convert_hub_errors(what: str) -> Iterator[None]:
    """Raise CheckpointError, with the client's message on one line, if the block cannot fetch.

    what: the start of the message. The client is imported here, because its import takes half a
    second and only hub names need it.
    """
    try:
        from httpx2 import HTTPError, InvalidURL
        from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError
    except ImportError as error:
        line = f"{what} cannot be fetched: {error}; pip install -r requirements.txt"
        raise CheckpointError(line) from error
    unreachable = (LocalEntryNotFoundError, RevisionResolutionError)
    try:
        # By its full name, because the client prints a failure of its lazy imports
        import huggingface_hub.hf_api  # noqa: F401

        yield
    except CheckpointError:
        raise
    # Invalid variables, proxies and answers of other servers raise errors of many types
    except (*unreachable, HTTPError, InvalidURL, OSError, ValueError, *CLIENT_ERRORS) as error:
        message = re.sub(r"//[^/@\s]*@", "//", " ".join(str(error).split()))  # hides passwords
        kind = HubUnreachable if isinstance(error, unreachable) else CheckpointError
        raise kind(f"{what} cannot be fetched: {message or type(error).__name__}") from error


def is_head(folder: Path) -> bool:
    """Whether a folder has an EAGLE head. Raises CheckpointError, also for a head of another
    format."""
    raw = read_json(folder / "config.json", MAX_JSON_BYTES)
    kind = raw.get("model_type")
    if kind not in ("gpt_neox", HEAD_TYPE) and OTHER_HEADS.search(json.dumps(raw)):
        why = "only this project's EAGLE heads load"
        raise CheckpointError(f"{folder} is a head of another format; {why}")
    return kind == HEAD_TYPE


def read_config(folder: Path) -> Config:
    """Return the Config of a GPT-NeoX's folder. Raises CheckpointError."""
    if is_head(folder):
        raise CheckpointError(f"{folder} is an EAGLE head: use it as --draft")
    raw = read_json(folder / "config.json", MAX_JSON_BYTES)
    generation = {}
    if os.path.lexists(folder / GENERATION_CONFIG):
        generation = read_json(folder / GENERATION_CONFIG, MAX_JSON_BYTES)
    try:
        return parse_config(raw, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def parse_config(raw: dict, generation: dict | None = None) -> Config:
    """Return the Config of a parsed config.json and generation_config.json. Raises
    CheckpointError."""
    try:
        return Config.from_json(raw, generation or {})
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def unused_settings(folder: Path) -> list[str]:
    """Return the names of the settings in generation_config.json that are not used here, but change
    transformers' text. Raises CheckpointError."""
    if not os.path.lexists(folder / GENERATION_CONFIG):
        return []
    raw = read_json(folder / GENERATION_CONFIG, MAX_JSON_BYTES)
    defaults = dict(UNUSED)
    if raw.get("do_sample"):
        defaults |= UNUSED_SAMPLING
    if raw.get("num_beams") not in (None, 1):
        defaults |= UNUSED_BEAMS
    return [name for name, default in defaults.items() if raw.get(name) not in (None, default)]


def published_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint must have, by its published name.

    Raises CheckpointError for sizes that no tensor can have.
    """
    try:
        with torch.device("meta"):
            model = GPTNeoX(config)
    except RuntimeError as error:
        raise CheckpointError(f"the tensor sizes are impossible: {first_line(error)}") from error
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def load_tensors(
    folder: Path,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard = UNSHARDED,
) -> "StoredTensors":
    """Return a shard of a checkpoint's tensors by published name; each lookup reads the file.

    Raises CheckpointError if a tensor is missing, extra or misshapen, or if a file is truncated.
    """
    shapes = published_shapes(config)
    # A tied head may be stored as well
    allowed = {OUTPUT_HEAD: shapes[EMBEDDING], **shapes}
    return StoredTensors(find_tensors(folder, shapes, allowed), device, dtype, shard)


def find_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], allowed: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Path, str]]:
    """Return the file and the stored name of each tensor of a folder, by published name.

    shapes: of the tensors that must be there; allowed: of all that may be there. Raises
    CheckpointError.
    """
    files = {}
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            for name, stored_name in check_tensors(tensors, allowed, file):
                if name in files:
                    raise CheckpointError(f"{file}: the tensor {name} is stored a second time")
                files[name] = file, stored_name
    for name in shapes:
        if name not in files:
            raise CheckpointError(f"{folder} has no tensor {name}")
    return files


@dataclass(frozen=True)
class StoredTensors(Mapping):
    """The tensors of a shard, on a device and in a dtype.

    Each lookup reads the file, so memory holds only the tensors that the caller keeps.
    """

    files: dict[str, tuple[Path, str]]  # by published name: the file, and the name in the file
    device: torch.device
    dtype: torch.dtype
    shard: Shard

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError if the tensor cannot be read or is not finite."""
        file, stored_name = self.files[name]
        with open_tensors(file) as tensors:  # not kept open, because its pages count as memory
            tensor = read_shard(tensors, stored_name, self.shard)
            # A copy is aligned. A file's memory may not be, and the rounding of products depends
            # on alignment
            tensor = tensor.to(self.device, self.dtype, copy=True)
        if not tensor.isfinite().all():
            raise CheckpointError(f"{file}: {name} is not finite in {self.dtype}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@contextmanager
def open_tensors(file: Path) -> Iterator[safe_open]:
    """Open a safetensors file. Raises CheckpointError."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        line = f"{file} cannot be read: {first_line(error)}"
        raise CheckpointError(f"{line}; delete {file.resolve()} and fetch it again") from error


def read_shard(tensors: safe_open, name: str, shard: Shard) -> Tensor:
    """Return a tensor, or a rank's part of it. Ids after the vocabulary's end get zeros."""
    axis = split_axis(ALIASES.get(name, name))
    if shard is UNSHARDED or axis is None:
        return tensors.get_tensor(name)
    whole = tensors.get_slice(name)
    n = whole.get_shape()[axis]
    start, end = shard.bounds(n)
    if axis == 1:
        return whole[:, start:end]
    part = whole[start:end]
    n_missing = shard.size(n) - len(part)
    return F.pad(part, (0, 0, 0, n_missing)) if n_missing else part


def check_tensors(
    tensors: safe_open, shapes: Mapping[str, tuple[int, ...]], file: Path
) -> Iterator[tuple[str, str]]:
    """Yield the published and the stored name of each tensor to load. Raises CheckpointError if a
    tensor is unknown, or if its type or shape is wrong."""
    for name in tensors.keys():
        published = ALIASES.get(name, name)
        if LEGACY_BUFFERS.search(name):
            continue
        if published not in shapes:
            raise CheckpointError(f"{file} has the tensor {name}, which GPT-NeoX does not have")
        dtype = tensors.get_slice(name).get_dtype()
        if dtype not in FLOAT_TYPES:
            raise CheckpointError(f"{file}: {name} is {dtype}; only floating types load")
        shape = tuple(tensors.get_slice(name).get_shape())
        if shape != shapes[published]:
            expected = tuple(shapes[published])
            raise CheckpointError(f"{file}: {name} is {shape}, by config.json {expected}")
        yield published, name


def weight_files(folder: Path) -> list[Path]:
    """Return model.safetensors, or the shards that the index lists. Raises CheckpointError."""
    if os.path.lexists(folder / SINGLE):
        files = [folder / SINGLE]
    elif os.path.lexists(folder / INDEX):
        files = [folder / name for name in shard_names(folder / INDEX)]
    else:
        found = ", ".join(sorted(n for n in os.listdir(folder) if n.lower().endswith(WEIGHTS)))
        others = f"; it has {found:.100}; use a whole model's float safetensors" if found else ""
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{others}")
    for file in files:
        require_file(file)
    return files


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists. They must be in the index's folder. Raises
    CheckpointError."""
    weight_map = read_json(index, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors") or PurePath(name).name != name:
            what = f"{name[:100]!r}, which is not a safetensors file in its folder"
            raise CheckpointError(f"{index} lists {what}")
    return names


def read_json(file: Path, max_bytes: int = MAX_FILE_BYTES) -> dict:
    """Return the object in a JSON file. Raises InvalidFile."""
    return parse_json(read_text(file, max_bytes), str(file))


def parse_json(text: str, where: str) -> dict:
    """Return the object in a JSON text. where: its source, for errors. Raises InvalidFile."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{where} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidFile(f"{where} is not a JSON object")
    return content


def read_text(file: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a UTF-8 file. Raises InvalidFile."""
    try:
        return read_bytes(file, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidFile(f"{file} is not UTF-8: {error}") from error


def read_bytes(file: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return a regular file's content. Raises InvalidFile, also if it is larger than max_bytes."""
    if require_file(file) > max_bytes:
        raise InvalidFile(
            f"{file} is larger than {max_bytes / 1e6:,.1f} MB, the limit for such a file"
        )
    try:
        return file.read_bytes()
    except OSError as error:
        raise read_error(file, error) from error


def require_file(file: Path) -> int:
    """Return the size in bytes of a regular file that can be opened. Raises InvalidFile."""
    try:
        found = os.stat(file)
        if stat.S_ISREG(found.st_mode):
            open(file, "rb").close()  # safetensors reports a file without permission as missing
    except (OSError, ValueError) as error:
        raise read_error(file, error) from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise InvalidFile(f"{file} is {kind}, not a file")
    return found.st_size


def read_error(file: Path, error: OSError | ValueError) -> InvalidFile:
    """Return the InvalidFile for a path that cannot be opened."""
    if isinstance(error, ValueError):  # a null character, or half of a surrogate pair
        return InvalidFile(f"{str(file)!r} is not a valid file name")
    if error.errno == errno.ENOENT and os.path.islink(file):
        return InvalidFile(f"{file} is a link to {os.readlink(file)}, which does not exist")
    if error.errno == errno.ENOENT:
        return InvalidFile(f"{file} does not exist")
    return InvalidFile(f"{file} cannot be read: {error.strerror}")
