"""A new checkpoint's folder: where it may go, what it takes over, and all of it or nothing.

folder = new_folder("my-draft")
write_checkpoint(folder, tensors, read_unchanged(source) | {"config.json": b"{}"})
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cli.errors import UsageError
from engine.checkpoint import first_line, read_bytes

TOKENIZER = "tokenizer.json"
UNCHANGED = (TOKENIZER, "tokenizer_config.json", "generation_config.json")
LARGEST = torch.finfo(torch.float16).max


def new_folder(text: str) -> Path:
    """Where a checkpoint goes. Raises UsageError for what is there already."""
    folder = Path(text).absolute()
    if os.path.lexists(folder):
        raise UsageError(f"{text} exists already, and stays; name a new folder")
    part = unfinished(folder)
    if os.path.lexists(part):
        raise UsageError(f"{part} is another run's; if none is at work, it was killed: delete it")
    return folder


def unfinished(folder: Path) -> Path:
    """What is to become this folder, as long as it is being written."""
    return folder.with_name(f"{folder.name}.unfinished")


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]
) -> None:
    """Weights by published name, and files by name, config.json among them; nothing is left of what
    fails. Raises UsageError."""
    part = unfinished(folder)
    try:
        part.mkdir(parents=True)
        try:
            save_file(dict(tensors), part / "model.safetensors", metadata={"format": "pt"})
            for name, content in files.items():
                (part / name).write_bytes(content)
            shutil.copymode(part / "config.json", part / "model.safetensors")  # else its owner's
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be written: {first_line(error)}") from error


def read_unchanged(source: Path) -> dict[str, bytes]:
    """What a checkpoint takes over of its source as it is, by file name. Raises CheckpointError."""
    names = [name for name in UNCHANGED if name == TOKENIZER or (source / name).exists()]
    return {name: read_bytes(source / name) for name in names}


def halved(name: str, large: Tensor) -> Tensor:
    """In float16. Raises UsageError if that is infinite somewhere."""
    most = float(torch.linalg.vector_norm(large, torch.inf))
    if not most <= LARGEST:  # nor nan
        raise UsageError(f"{name} would reach {most:.3g}, float16 ends at {LARGEST:.0f}")
    return large.half()
