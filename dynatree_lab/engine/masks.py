"""The masks of a pass, from the host's bool mask to attention.

A bool mask [n, m] on the host says which of the newest m slots each row attends to. Every row
attends to all older slots. `Masks` makes a Mask of it, with which the layers compute attention. A
pass of a fixed shape (engine/cuda_graphs.py) gets the bool mask as bits, and makes the Mask of them
on the device. Strict passes have Masks of their own (engine/strict.py).

    mask = PLAIN.build(torch.arange(3), torch.ones(3, 3).tril().bool(), 0, 3, kv)
    attended = mask.attend(q, kv[0], kv[1])

Shapes: n rows given, m rows run (m >= n, with padding), S cache slots, H heads, D head size.
"""

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

if TYPE_CHECKING:
    from dynatree_lab.engine.cuda_graphs import FixedCache, PassInputs, PassShape
    from dynatree_lab.engine.model import FastGPTNeoX
    from dynatree_lab.engine.passes import PassConfig

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
        return attend(q, k[:, :n_slots], v[:, :n_slots], self.additive)


class Masks:
    """The masks of all passes over a cache."""

    max_path = sys.maxsize  # number of rows that an iteration may commit
    slot_step = 1  # a cache has a multiple of this many slots

    def min_rows(self, model: "FastGPTNeoX", config: "PassConfig") -> int:
        """Return the minimum number of rows of a pass."""
        return max(config.min_rows, model.min_rows)

    def build(self, positions: Tensor, mask: Tensor, start: int, m: int, like: Tensor) -> Mask:
        """Return the Mask of a pass of m rows.

        Padding rows attend to at least one slot, because softmax over no slot is nan.

        Args:
            positions, mask: of the n rows given, on the host.
            start: the first row's slot.
            like: a tensor with the device and dtype of the result.
        """
        n = len(mask)
        length = start + n - mask.shape[1]  # slots before those of the mask
        if m > n:
            mask = F.pad(mask, (0, 0, 0, m - n))
            mask[n:, 0] = True
        return Mask(additive_mask(mask, length, like))

    def row_bytes(self, n_scratch: int) -> int:
        """Return the bytes of a row's mask in the inputs of a fixed shape."""
        return (n_scratch + 2 + 7) // 8

    def pack(self, positions: Tensor, mask: Tensor, length: int, shape: "PassShape") -> ndarray:
        """Return the masks of n rows and of padding rows, [m, row_bytes] uint8. length: slots
        before those of the mask."""
        return pack_mask(mask, shape.n_rows, shape.n_scratch)

    def unpack(self, cache: "FixedCache", inputs: "PassInputs", shape: "PassShape") -> Mask:
        """Return the Mask of packed masks, without waiting for the device."""
        columns = (cache.slots[: shape.n_slots] - inputs.last).clamp_(0, shape.n_scratch + 1)
        unpacked = F.embedding(inputs.mask.int(), cache.additive_bits)  # [m, bytes, 8]
        return Mask(unpacked.flatten(1).index_select(1, columns))  # [m, S]


PLAIN = Masks()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax attention [H, n, D] of q [H, n, D] over k, v [H, S, D]. mask: [n, S], 0 or
    -inf."""
    if q.device.type == "cpu" and q.dtype == torch.float32 and q.shape[1] < SDPA_ROWS:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), v)  # [H, n, S] times [H, S, D]
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]


def causal_mask(n: int) -> Tensor:
    """Return the causal mask [n, n], bool: a row attends to itself and the rows before it."""
    return torch.ones(n, n, dtype=torch.bool).tril_()


def additive_causal_mask(n: int, start: int, like: Tensor) -> Tensor:
    """Return the causal mask [n, start + n], 0 or -inf, of n rows after `start` slots. It has the
    device and dtype of `like`."""
    return fully_masked(n, start + n, like).triu_(start + 1)


def additive_mask(mask: Tensor, length: int, like: Tensor) -> Tensor:
    """Return a mask [n, length + m], 0 or -inf, on the device and in the dtype of `like`.

    mask: [n, m] bool over the slots from `length` on. Every row attends to all older slots.
    """
    n, n_slots = mask.shape
    additive = fully_masked(n, length + n_slots, like)
    additive[:, :length] = 0.0
    additive[:, length:].masked_fill_(mask.to(like.device, non_blocking=True), 0.0)
    return additive


def fully_masked(n: int, n_slots: int, like: Tensor) -> Tensor:
    """Return a mask [n, S] of -inf."""
    aligned = -(-n_slots // 8) * 8  # CUDA's attention copies unaligned masks in every layer
    return like.new_full((n, aligned), -math.inf)[:, :n_slots]


def pack_mask(mask: Tensor, n_rows: int, n_scratch: int) -> ndarray:
    """Return a bool mask [n, m] in bits, [n_rows, bytes] uint8, with its padding.

    A row's first bit stands for all committed slots, the next n_scratch bits for the slots after
    them, and one more bit for all other slots. A bit is 1 if the row attends to the slot. Padding
    rows attend to all but the other slots, because softmax over no slot is nan.
    """
    n, m = mask.shape
    attends = numpy.zeros((n_rows, n_scratch + 2), dtype=bool)
    attends[:n, 0] = True
    attends[:n, 1 : 1 + m] = mask.numpy()
    attends[n:, :-1] = True
    return numpy.packbits(attends, axis=1, bitorder="little")


def additive_bits(like: Tensor) -> Tensor:
    """Return the additive mask of each byte [256, 8], lowest bit first: 0 for a bit that is 1, else
    -inf. It has the device and dtype of `like`."""
    all_bytes = numpy.arange(256, dtype=numpy.uint8)[:, None]
    attends = torch.from_numpy(numpy.unpackbits(all_bytes, axis=1, bitorder="little")).bool()
    return torch.full((256, 8), -torch.inf).masked_fill_(attends, 0.0).to(like)
