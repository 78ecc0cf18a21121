"""What one pass reads and writes: its rows, the mask as numbers to add, and its part of the cache.

    rows = tight_rows(tokens, positions, mask, start=12, min_rows=1, like=model.embed_in)
    written, slots = open_slots(cache.kv, rows)
    slots[layer].write(keys_and_values)

Shapes: n rows asked for, m rows run (padded, so m >= n), S cache slots, L layers, H heads, D head
size.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda_graphs import Inputs, Shape, slot_count
from engine.strict import Sight, first_near, near_slots, open_sight


class Rows(NamedTuple):
    """The rows of one pass."""

    tokens: Tensor  # [m] int64
    positions: Tensor  # [m] int64
    sight: Tensor | Sight  # [m or 1, S], 0 where a row may attend, else -inf, in the model's dtype
    start: int | Tensor  # the first slot to write; a tensor [1] where it must not shape the pass


def tight_rows(
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    start: int,
    min_rows: int,
    like: Tensor,
) -> Rows:
    """As many rows and slots as are wanted, or min_rows; arguments as of GPTNeoX.forward.

    like: a tensor of the model, for device and dtype. Rows added are of token 0 and see the first
    slot, as every row must see some.
    """
    device = like.device
    n = len(tokens)
    m = max(n, min_rows)
    tokens = tokens.to(device, non_blocking=True)
    positions = positions.to(device, non_blocking=True)
    if m > n:
        tokens = F.pad(tokens, (0, m - n))
        positions = F.pad(positions, (0, m - n))
    if mask is None and n == 1:
        return Rows(tokens, positions, like.new_zeros(1, start + 1), start)
    if mask is None:
        mask = torch.ones(n, start + n, dtype=torch.bool, device=device).tril_(start)
    n_slots = mask.shape[1]
    aligned = -(-n_slots // 8) * 8  # CUDA's attention copies, layer by layer, a mask that is not
    bias = like.new_full((n, aligned), -math.inf)[:, :n_slots]
    bias.masked_fill_(mask.to(device, non_blocking=True), 0.0)
    if m > n:
        bias = F.pad(bias, (0, 0, 0, m - n), value=-math.inf)
        bias[n:, 0] = 0.0
    return Rows(tokens, positions, bias, start)


def strict_rows(
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    start: int,
    n_rows: int,
    like: Tensor,
) -> Rows:
    """The same, for attention by position: always n_rows."""
    near = near_slots(positions, mask)
    n_far = slot_count(int(first_near(positions).max()))
    padding = n_rows - len(tokens)
    assert padding >= 0, f"{len(tokens)} rows in a strict pass of {n_rows}"
    near = F.pad(near, (0, 0, 0, padding)).to(like.device)
    tokens = F.pad(tokens, (0, padding)).to(like.device)
    positions = F.pad(positions, (0, padding)).to(like.device)
    return Rows(tokens, positions, open_sight(positions, near, n_far), start)


def fixed_rows(inputs: Inputs, shape: Shape, like: Tensor) -> Rows:
    """The same of a pass of a fixed shape: no shape depends on a value, nothing is read back."""
    if shape.is_strict:
        sight = open_sight(inputs.positions, inputs.seen, shape.n_slots)
    else:
        sight = like.new_full(inputs.seen.shape, -math.inf).masked_fill_(inputs.seen, 0.0)
    return Rows(inputs.tokens, inputs.positions, sight, inputs.start)


class LayerSlots(NamedTuple):
    """One layer's part of the cache in one pass."""

    keys: Tensor  # [1, H, S, D], those that the pass may attend
    values: Tensor  # [1, H, S, D]
    written: Tensor  # [2, H, m, D], the pass's own keys, then values
    stored: Tensor  # [2, H, slots, D], where `place` counts
    place: Tensor | None  # [m], where `written` belongs in there; None if it lies there already

    def write(self, kv: Tensor, mark: float) -> None:
        """Keep the pass's keys and values [2, H, m, D]; `mark` stands for what is not finite."""
        torch.nan_to_num(kv, nan=mark, posinf=mark, neginf=-mark, out=self.written)
        if self.place is not None:
            self.stored.index_copy_(2, self.place, self.written)  # rows added may lie beyond S


def open_slots(kv: Tensor, rows: Rows) -> tuple[Tensor, list[LayerSlots]]:
    """A cache [2, L, H, slots, D] for one pass: all that it writes [2, L, H, m, D], and by layer.

    Views of all layers at once: on a CPU a view of each costs as much as a small product.
    """
    m = len(rows.tokens)
    seen = kv  # [2, L, H, S, D]
    if isinstance(rows.sight, Tensor):
        seen = kv[:, :, :, : rows.sight.shape[1]]
    keys, values = seen[:, :, None]  # [L, 1, H, S, D] each
    if isinstance(rows.start, int):
        place = None
        written = kv[:, :, :, rows.start : rows.start + m]
        parts = stored = written.unbind(1)
    else:
        place = torch.arange(m, device=kv.device) + rows.start
        written = seen.new_empty(*seen.shape[:3], m, seen.shape[4])
        parts = written.unbind(1)
        stored = kv.unbind(1)
    layers = zip(keys.unbind(), values.unbind(), parts, stored, strict=True)
    return written, [LayerSlots(k, v, part, all_, place) for k, v, part, all_ in layers]
