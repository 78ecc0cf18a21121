"""The tensors of a model's layers in their safetensors files, read again in each pass.

The headers are read once, and the files stay open. A file that changes, shrinks or fails while it
is in use is an error that names it.

    files = LayerFiles(load_tensors(folder, config, torch.device("cpu"), torch.float32))
    files.read("gpt_neox.layers.3.attention.dense.weight", weight)
"""

import json
import os
import weakref
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from dynatree_lab.engine.checkpoint import CheckpointError, StoredTensors

STORED_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
STORED_DTYPES |= {"F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Place:
    """The place of a tensor: an open file, and the bytes from `offset` on."""

    file: FileIO
    path: Path
    offset: int
    n_bytes: int
    dtype: torch.dtype


class LayerFiles:
    """The places of all tensors of layers. The files stay open as long as this object lives."""

    def __init__(self, tensors: StoredTensors):
        """Read the headers. Raises CheckpointError for a dtype that is not supported."""
        self.places: dict[str, Place] = {}  # by published name
        self.stats: dict[Path, tuple[int, int]] = {}  # size and time of change, when opened
        files, headers = {}, {}
        for name, (path, stored_name) in tensors.files.items():
            if ".layers." not in name:
                continue
            if path not in files:
                files[path] = path.open("rb", buffering=0)
                weakref.finalize(self, files[path].close)
                self.stats[path] = file_stat(files[path])
                headers[path] = read_header(files[path])
            size, entries = headers[path]
            entry = entries[stored_name]
            if entry["dtype"] not in STORED_DTYPES:
                raise CheckpointError(f"{name} is {entry['dtype']}; only floating types load")
            start, end = entry["data_offsets"]
            dtype = STORED_DTYPES[entry["dtype"]]
            self.places[name] = Place(files[path], path, size + start, end - start, dtype)

    def layer_bytes(self, i: int) -> int:
        prefix = f"gpt_neox.layers.{i}."
        return sum(p.n_bytes for name, p in self.places.items() if name.startswith(prefix))

    def read(self, name: str, weight: Tensor) -> None:
        """Read a tensor into `weight`, contiguous and of its shape, in any dtype. Raises
        CheckpointError if the file has changed or cannot be read."""
        place = self.places[name]
        is_same = weight.dtype == place.dtype
        stored = weight if is_same else torch.empty(weight.shape, dtype=place.dtype)
        try:
            if file_stat(place.file) != self.stats[place.path]:
                raise OSError("it has changed since the run began")
            read_at(place.file, memoryview(stored.view(-1).view(torch.uint8).numpy()), place.offset)
        except OSError as error:
            line = error.strerror or error
            raise CheckpointError(f"{place.path} cannot be read: {line}") from error
        if not is_same:
            weight.copy_(stored)


def file_stat(file: FileIO) -> tuple[int, int]:
    """Return size and time of the last change of an open file."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def read_header(file: FileIO) -> tuple[int, dict]:
    """Return where the data of a safetensors file begin, and its header: a dict by stored name."""
    size = int.from_bytes(file.read(8), "little")
    return 8 + size, json.loads(file.read(size))


def read_at(file: FileIO, view: memoryview, offset: int) -> None:
    """Fill a view with the bytes of a file from an offset on. Raises OSError."""
    n_read = 0
    while n_read < len(view):
        rest, at = view[n_read:], offset + n_read
        if hasattr(os, "preadv"):
            n = os.preadv(file.fileno(), [rest], at)
        else:
            file.seek(at)
            n = file.readinto(rest)
        if not n:
            raise OSError("it is truncated")
        n_read += n
    # Without this, a file that is larger than memory pushes other programs out of it, and its own
    # pages are gone before the next pass needs them
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), offset, len(view), os.POSIX_FADV_DONTNEED)
