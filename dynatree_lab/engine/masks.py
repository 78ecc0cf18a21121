"""The masks of a pass, from the host's bool mask to attention.

A bool mask [n, s] on the host says which of the newest s slots each row attends to. Every row
attends to all older slots. `Masks` makes a Mask of it, with which the layers compute attention. A
pass of a fixed shape (engine/cuda_graphs.py) gets the bool mask as bits, and makes the Mask of them
on the device. Strict passes have Masks of their own (engine/strict.py).

    inputs = PassInputs(tokens, torch.arange(3), causal_mask(3), start=0, n_last=3)
    attended = PLAIN.build(inputs, 3, kv).attend(q, kv[0], kv[1])

Shapes: n rows given, m rows run (m >= n, with padding), s slots that a bool mask covers, S cache
slots, H heads, D head size.
"""

import math
import sys
from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from dynatree_lab.engine.inputs import DeviceInputs, PassInputs

# On a CPU in float32, two products take 4/5 of scaled_dot_product_attention's time for 1 row, the
# same time for 128, and twice for 512 (measured with 4 to 32 heads over 500 and 1,500 slots)
SDPA_ROWS = 128
ROW_BYTES = 128  # minimum room for a row in the buffers of fixed shapes, enough for every Masks


@dataclass(frozen=True)
class Mask:
    """The slots that the m rows of a pass attend to."""

    additive: Tensor  # [m, S], 0 or -inf, on the model's device

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax attention [H, m, D] of q [H, m, D] over k, v [H, S or more, D]."""
        n_slots = self.additive.shape[1]
        k, v = k[:, :n_slots], v[:, :n_slots]
        if q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[1] < SDPA_ROWS:
            scores = torch.baddbmm(self.additive, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
            return torch.bmm(scores.softmax(-1), v)  # [H, m, S] times [H, S, D]
        return F.scaled_dot_product_attention(q[None], k[None], v[None], self.additive)[0]


class Masks:
    """The masks of all passes over a cache."""

    max_path = sys.maxsize  # number of rows that an iteration may commit
    slot_step = 1  # a cache has a multiple of this many slots

    def build(self, inputs: PassInputs, m: int, like: Tensor) -> Mask:
        """Return the Mask of a pass of m rows, of which the inputs have n.

        Padding rows attend to at least one slot, because softmax over no slot is nan.

        like: a tensor with the device and dtype of the result.
        """
        n, mask = len(inputs.mask), inputs.mask
        if m > n:
            mask = F.pad(mask, (0, 0, 0, m - n))
            mask[n:, 0] = True
        return Mask(additive_mask(mask, inputs.n_older, like))

    def row_bytes(self, n_scratch: int) -> int:
        """Return the bytes of a row's mask in the inputs of a fixed shape."""
        return (n_scratch + 2 + 7) // 8  # 2 bits for other slots, as in `pack`

    def pack(self, inputs: PassInputs, m: int, n_scratch: int) -> ndarray:
        """Return the masks of n rows and of m - n padding rows in bits, [m, row_bytes] uint8.

        A row's first bit stands for all committed slots, the next n_scratch bits for the slots
        after them, and one more bit for all other slots. A bit is 1 if the row attends to the slot.
        Padding rows attend to all but the other slots, because softmax over no slot is nan.
        """
        n, n_masked = inputs.mask.shape
        attends = numpy.zeros((m, n_scratch + 2), dtype=bool)
        attends[:n, 0] = True
        attends[:n, 1 : 1 + n_masked] = inputs.mask.numpy()
        attends[n:, :-1] = True
        return numpy.packbits(attends, axis=1, bitorder="little")

    def unpack(
        self, inputs: DeviceInputs, slots: Tensor, n_scratch: int, byte_masks: Tensor
    ) -> Mask:
        """Return the Mask of packed masks, without waiting for the device.

        slots: [S] int64, from 0 on. byte_masks: of additive_bits.
        """
        columns = (slots - inputs.last).clamp_(0, n_scratch + 1)
        unpacked = F.embedding(inputs.mask.int(), byte_masks)  # [m, bytes, 8]
        return Mask(unpacked.flatten(1).index_select(1, columns))  # [m, S]


PLAIN = Masks()


def causal_mask(n: int) -> Tensor:
    """Return the causal mask [n, n], bool: a row attends to itself and the rows before it."""
    return torch.ones(n, n, dtype=torch.bool).tril_()


def additive_mask(mask: Tensor, length: int, like: Tensor) -> Tensor:
    """Return a mask [n, length + s], 0 or -inf, on the device and in the dtype of `like`.

    mask: [n, s] bool over the slots from `length` on. Every row attends to all older slots.
    """
    n, n_slots = mask.shape[0], length + mask.shape[1]
    aligned = -(-n_slots // 8) * 8  # CUDA's attention copies unaligned masks in every layer
    additive = like.new_full((n, aligned), -math.inf)[:, :n_slots]
    additive[:, :length] = 0.0
    additive[:, length:].masked_fill_(mask.to(like.device, non_blocking=True), 0.0)
    return additive


def additive_bits(like: Tensor) -> Tensor:
    """Return the additive mask of each byte [256, 8], lowest bit first: 0 for a bit that is 1, else
    -inf. It has the device and dtype of `like`."""
    all_bytes = numpy.arange(256, dtype=numpy.uint8)[:, None]
    attends = torch.from_numpy(numpy.unpackbits(all_bytes, axis=1, bitorder="little")).bool()
    return torch.full((256, 8), -torch.inf).masked_fill_(attends, 0.0).to(like)
