"""The folder of a new checkpoint, written whole or not at all.

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
    """Return the absolute path of a new checkpoint. Raises UsageError if it exists already."""
    folder = Path(text).absolute()
    if os.path.lexists(folder):
        raise UsageError(f"{text} exists already; use a new folder")
    part = unfinished(folder)
    if os.path.lexists(part):
        raise UsageError(f"{part} belongs to another run; delete it if that run has ended")
    return folder


def unfinished(folder: Path) -> Path:
    """Return the path at which a folder is written until it is complete."""
    return folder.with_name(f"{folder.name}.unfinished")


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]
) -> None:
    """Write tensors by published name and files by name, which include config.json. Leaves nothing
    if it fails. Raises UsageError."""
    part = unfinished(folder)
    try:
        part.mkdir(parents=True)
        try:
            save_file(dict(tensors), part / "model.safetensors", metadata={"format": "pt"})
            for name, content in files.items():
                (part / name).write_bytes(content)
            # safetensors makes its file readable by its owner only
            shutil.copymode(part / "config.json", part / "model.safetensors")
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be written: {first_line(error)}") from error


def read_unchanged(source: Path) -> dict[str, bytes]:
    """Return the files to copy from a source checkpoint, by name. Raises CheckpointError."""
    names = [name for name in UNCHANGED if name == TOKENIZER or (source / name).exists()]
    return {name: read_bytes(source / name) for name in names}


def to_half(name: str, large: Tensor) -> Tensor:
    """Return a tensor in float16. Raises UsageError if a value overflows."""
    largest = float(torch.linalg.vector_norm(large, torch.inf))
    if not largest <= LARGEST:  # also true for nan
        raise UsageError(f"{name} would reach {largest:.3g}, the largest float16 is {LARGEST:.0f}")
    return large.half()
