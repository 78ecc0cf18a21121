"""A checkpoint's tensors, each read when it is used, and only a rank's part of it.

What a folder may hold is gpt_neox.py's to say, for the plain and the fast model alike.

    folder = Path("models/tiny/target")
    tensors = load_tensors(folder, read_config(folder), torch.device("cpu"), torch.float32)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from engine.shares import WHOLE, Share, split_axis
from gpt_neox import CheckpointError, Config, locate_tensors, open_shard

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_tensors(
    folder: Path, config: Config, device: torch.device, dtype: torch.dtype, share: Share = WHOLE
) -> "StoredTensors":
    """Return all tensors of a checkpoint, by published name, each read when it is asked for.

    Raises CheckpointError: a tensor is missing, extra or misshapen, a file is truncated.
    """
    return StoredTensors(locate_tensors(folder, config), device, dtype, share)


@dataclass(frozen=True)
class StoredTensors(Mapping):
    """Tensors on the device in the wanted dtype, read anew at each look at one, so that memory has
    no more of them than whoever looks keeps; of a share, nothing else is read."""

    places: dict[str, tuple[Path, str]]  # by name: its file, and its name there
    device: torch.device
    dtype: torch.dtype
    share: Share

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError if it cannot be read, or is not finite."""
        file, stored_name = self.places[name]
        # Opened each time: what is read of an open file counts as memory
        with open_shard(file) as shard:
            # A copy, as the file's own memory begins anywhere, and products round by alignment
            tensor = _read(shard, stored_name, split_axis(name), self.share)
            tensor = tensor.to(self.device, self.dtype, copy=True)
        if not tensor.isfinite().all():
            raise CheckpointError(f"{file}: {name} is not finite in {self.dtype}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _read(shard: safe_open, name: str, axis: int | None, share: Share) -> Tensor:
    """A tensor, or a rank's part of it along an axis; zeros where the vocabulary has ended."""
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


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
