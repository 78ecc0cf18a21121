"""The inputs of one pass: its rows on the host, or for a fixed shape in a buffer of the device.

Shapes: n rows, s slots that a mask covers.
"""

from typing import NamedTuple

from torch import Tensor


class PassInputs(NamedTuple):
    """The rows of a pass, on the host."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    mask: Tensor  # [n, s] bool, over the newest s slots; every row attends to all older ones
    start: int  # the slot of the first row
    n_last: int  # the last rows, whose scores are wanted

    @property
    def n_older(self) -> int:
        """Number of slots before those of the mask."""
        return self.start + self.mask.shape[0] - self.mask.shape[1]


class DeviceInputs(NamedTuple):
    """The rows of a pass of a fixed shape, which a CUDA graph reads. All are views of one buffer of
    bytes."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    start: Tensor  # [1] int64, the first slot to write
    last: Tensor  # [1] int64, the last slot before those of the mask, -1 if there is none
    mask: Tensor  # [n, bytes] uint8, packed by Masks.pack
