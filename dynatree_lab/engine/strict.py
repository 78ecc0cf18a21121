"""Strict passes: attention whose bits depend only on a row's position and its keys.

In half precision, rounding often decides which of two logits is higher, and a tree's pass rounds
differently than ar's. It has more rows, and the keys of a row's ancestors are in other slots, so
sums are grouped differently. Strict passes are batch-invariant:

- Every pass after the prompt has a minimum number of rows. From this number on, a row's results
  depend neither on its place nor on the other rows. Trials find it
  (engine/invariance.py). If there is none, all passes have the same number of rows.
- A row at position p reads its keys in two parts. Only p decides where the second part begins:

    position   0 ................. p - 15 ................. p
    slot       equal to the position      anywhere
               old: blocks in place       recent: gathered in order of position

In a tree of depth 15 or less, all ancestors within the tree are recent. So old keys are committed,
and their slots are equal to their positions. Old keys are read in blocks of 256 slots. Each block
is one product of a fixed shape, and the products are added up in order. Masked slots add exactly 0,
so the number of blocks does not matter. Recent keys have 16 places in order of position, with the
empty places last. Everything is computed in float32.

    GenerationConfig(DynaTree(), strict=True)  # its target's cache gets the masks STRICT

Shapes: n rows given, m rows run (m >= n, with padding), S cache slots, H heads, D head size.
"""

import math
from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from dynatree_lab.engine.inputs import DeviceInputs, PassInputs
from dynatree_lab.engine.masks import Mask, Masks

BLOCK = 256  # slots
N_RECENT = 16  # positions whose keys are gathered, including the row's own
MAX_DEPTH = N_RECENT - 1  # of a tree in strict passes
# Of a pass. Trials of more rows would take long, and the recent keys of 1,024 rows of Pythia-2.8B
# would take 168 MB in each layer
MAX_STRICT_ROWS = 128


@dataclass(frozen=True)
class StrictMask(Mask):
    """The mask of a strict pass. `additive` [m, S], float32, is 0 only for slots of old keys."""

    recent_slots: Tensor  # [m * N_RECENT] int64, in order of position, 0 in empty places
    recent_mask: Tensor  # [m, N_RECENT] float32: 0, or -inf in empty places

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_heads, m, size = q.shape
        shape = (n_heads, m, N_RECENT, size)
        recent_keys = k.index_select(1, self.recent_slots).view(shape).float()
        recent_values = v.index_select(1, self.recent_slots).view(shape).float()
        scaled = q.float() * size**-0.5
        weights = (recent_keys * scaled.unsqueeze(2)).sum(dim=3) + self.recent_mask  # [H, m, 16]
        highest = weights.amax(dim=2, keepdim=True)
        blocks = []  # [H, m, BLOCK] each
        for start in range(0, self.additive.shape[1], BLOCK):
            keys = k[:, start : start + BLOCK].float().transpose(1, 2)
            block = torch.baddbmm(self.additive[:, start : start + BLOCK], scaled, keys)
            highest = torch.maximum(highest, block.amax(dim=2, keepdim=True))
            blocks.append(block)
        weights = (weights - highest).exp_()
        total = weights.sum(dim=2, keepdim=True)
        attended = (weights.unsqueeze(3) * recent_values).sum(dim=2)  # [H, m, D]
        for i, block in enumerate(blocks):
            block.sub_(highest).exp_()
            total += block.sum(dim=2, keepdim=True)
            attended.baddbmm_(block, v[:, i * BLOCK : (i + 1) * BLOCK].float())
        return (attended / total).to(q.dtype)


class StrictMasks(Masks):
    """The masks of strict passes."""

    max_path = N_RECENT
    slot_step = BLOCK

    def build(self, inputs: PassInputs, m: int, like: Tensor) -> Mask:
        n, positions = len(inputs.positions), inputs.positions
        recent = F.pad(recent_slots(inputs), (0, 0, 0, m - n))
        n_old = int(first_recent(positions).max())
        n_slots = -(-n_old // BLOCK) * BLOCK
        positions = F.pad(positions, (0, m - n))
        return make_mask(positions.to(like.device), recent.to(like.device), n_slots)

    def row_bytes(self, n_scratch: int) -> int:
        return 8 * N_RECENT

    def pack(self, inputs: PassInputs, m: int, n_scratch: int) -> ndarray:
        recent = numpy.zeros((m, N_RECENT), numpy.int64)
        recent[: len(inputs.mask)] = recent_slots(inputs).numpy()
        return recent.view(numpy.uint8)

    def unpack(
        self, inputs: DeviceInputs, slots: Tensor, n_scratch: int, byte_masks: Tensor
    ) -> Mask:
        return make_mask(inputs.positions, inputs.mask.view(torch.int64), len(slots))


STRICT = StrictMasks()


def first_recent(positions: Tensor) -> Tensor:
    """Return the first recent position of each row."""
    return (positions - MAX_DEPTH).clamp(min=0)


def recent_slots(inputs: PassInputs) -> Tensor:
    """Return the slots [n, N_RECENT] of each row's recent positions, 0 in empty places. In the
    mask, a row's ancestors are in order of depth."""
    positions, mask, length = inputs.positions, inputs.mask, inputs.n_older
    first = first_recent(positions).unsqueeze(1)  # [n, 1]
    start = min(first.flatten().tolist(), default=length)
    mask = F.pad(mask, (length - start, 0), value=True)  # from slot `start` on
    place = mask.cumsum(dim=1) - 1 + start - first  # among the recent keys; negative for old keys
    rows, columns = (mask & (place >= 0)).nonzero(as_tuple=True)
    slots = torch.zeros(len(positions), N_RECENT, dtype=torch.int64)
    slots[rows, place[rows, columns]] = start + columns
    return slots


def make_mask(positions: Tensor, recent: Tensor, n_slots: int) -> StrictMask:
    """Return the mask of rows at these positions [m].

    recent: [m, N_RECENT], from recent_slots. n_slots: a multiple of BLOCK that covers all old keys.
    """
    first = first_recent(positions).unsqueeze(1)  # [m, 1]
    n_recent = positions.unsqueeze(1) - first + 1
    is_old = torch.arange(n_slots, device=positions.device) < first
    is_recent = torch.arange(N_RECENT, device=positions.device) < n_recent
    return StrictMask(to_additive(is_old), recent.flatten(), to_additive(is_recent))


def to_additive(mask: Tensor) -> Tensor:
    """Return a float32 mask: 0 where the bool mask is True, else -inf."""
    return torch.full(mask.shape, -math.inf, device=mask.device).masked_fill_(mask, 0.0)
