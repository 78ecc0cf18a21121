"""A new checkpoint's folder: where it may go, what it takes over, and all of it or nothing.

folder = new_folder("my-draft", source)
with raising_endings(), written_whole(folder) as part:
    write_files(part, tensors, read_unchanged(source) | {"config.json": b"{}"})
"""

import os
import re
import secrets
import shutil
import signal
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from cli.errors import UsageError, say
from engine.checkpoint import CheckpointError, Config
from engine.foreign import ForeignFile, read_bytes
from gpt_neox import weight_bytes

TOKENIZER = "tokenizer.json"
UNCHANGED = (TOKENIZER, "tokenizer_config.json", "generation_config.json")
LARGEST = torch.finfo(torch.float16).max
PART = ".unfinished-"  # begins the name of a folder that is being written
ENDINGS = ("SIGTERM", "SIGHUP")  # by kill, and by a terminal that closes; not every system has both


def new_folder(text: str, source: Path) -> Path:
    """Where a checkpoint goes, links followed. Raises UsageError for what is there already and for
    a place within its source."""
    folder = Path(os.path.realpath(text))
    for place in (folder, *folder.parents):
        if os.path.exists(place) and os.path.samefile(place, source):
            raise UsageError(f"{text} is {source} or within it; name a new folder elsewhere")
    try:
        is_free = not os.path.lexists(folder) or not contents(folder)
    except OSError as error:  # no folder, or nobody may look
        raise UsageError(f"{text} cannot be written to: {error.strerror}") from error
    if not is_free:
        raise UsageError(f"{text} is not empty, and what is in it stays; name a new folder")
    return folder


def contents(folder: Path) -> list[str]:
    """The names in a folder, but for what is being written or was when it was killed. Raises
    OSError."""
    return [name for name in os.listdir(folder) if not name.startswith(PART)]


def read_unchanged(source: Path) -> dict[str, bytes]:
    """What a checkpoint takes over of its source as it is, by file name. Raises CheckpointError."""
    found = {}
    for name in UNCHANGED:
        if name != TOKENIZER and not os.path.lexists(source / name):
            continue
        try:
            found[name] = read_bytes(source / name)
        except ForeignFile as error:
            raise CheckpointError(str(error)) from error
    return found


def published_json(config: Config) -> dict:
    """The config.json of a model, as Pythia's is written."""
    first = config.eos_ids[0] if config.eos_ids else None
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "rotary_pct": config.rotary_fraction,
        "rotary_emb_base": config.rotary_base,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.is_parallel,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_attention_bias,
        "bos_token_id": first,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) > 1 else first,
        "torch_dtype": "float16",
    }


def write_files(part: Path, tensors: dict[str, Tensor], files: dict[str, bytes]) -> None:
    """A checkpoint's weights, and these files, config.json among them. Raises OSError and
    SafetensorError."""
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (part / name).write_bytes(content)
    shutil.copymode(part / "config.json", part / "model.safetensors")  # else its owner's


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write in that takes the name of this one, which is new or empty, at the end; if
    anything is raised, nothing is left. Raises OSError."""
    is_there = folder.exists()
    around = folder if is_there else folder.parent  # what is there may be a disk, or stood in
    missing = [place for place in (around, *around.parents) if not place.exists()]
    part = around / f"{PART}{secrets.token_hex(8)}"
    for other in around.glob(f"{PART}*"):
        say(f"note: {other} is another run's; if none goes on, one was killed: delete it")
    try:
        around.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        yield part
        if is_there:
            move_up(part)
        else:
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for place in missing:
            with suppress(OSError):  # the folder is in it
                place.rmdir()


def move_up(part: Path) -> None:
    """The files of a folder to the one around it, which has nothing else; all or none. Raises
    OSError."""
    for name in contents(part.parent):
        raise OSError(f"meanwhile there is {name}, which stays")
    names = sorted(os.listdir(part), reverse=True)  # config.json last: before it, no checkpoint
    try:
        for name in names:
            (part / name).rename(part.parent / name)
    except BaseException:
        for name in names:
            (part.parent / name).unlink(missing_ok=True)
        raise


@contextmanager
def raising_endings() -> Iterator[None]:
    """What asks the process to end raises SystemExit in here, so that what is half made goes."""
    before = {}
    for name in ENDINGS:
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # a shell's status for a signal


def halved(name: str, large: Tensor) -> Tensor:
    """In float16. Raises UsageError if that is infinite somewhere."""
    least, most = large.aminmax()
    most = max(-float(least), float(most))
    if most > LARGEST:
        raise UsageError(f"{name} would reach {most:.3g}, float16 ends at {LARGEST:.0f}")
    return large.half()


def file_bytes(config: Config) -> int:
    """What its weights take in float16, counted without a list of all layers. Raises
    CheckpointError for sizes that no tensor can have."""
    one_layer = weight_bytes(replace(config, n_layers=1), torch.float16)
    two_layers = weight_bytes(replace(config, n_layers=2), torch.float16)
    return one_layer + (config.n_layers - 1) * (two_layers - one_layer)


def size(text: str) -> int:
    """A whole number of at least 1, for argparse; of so few digits that sizes can be told."""
    if not re.fullmatch("[0-9]{1,15}", text) or not int(text):
        raise ArgumentTypeError(f"{text!r} is no whole number above 0 of at most 15 digits")
    return int(text)
