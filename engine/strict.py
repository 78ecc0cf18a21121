"""Strict passes: attention whose bits depend only on a row's position and its keys.

In half precision two logits often differ by so little that rounding decides between them, and a
tree's pass rounds differently than ar's. It has more rows, and the keys of a row's ancestors lie at
other slots, so sums are grouped in another way. Strict passes are batch-invariant:

- Every pass after the prompt has so many rows that a row's products depend neither on its place nor
  on the other rows. This number is found by trial (`min_invariant_rows`). If there is none, all
  passes have the same number of rows.
- A row at position p reads its keys in two parts, which p alone decides:

    position   0 ................. p - 15 ................. p
    slot       equal to the position      anywhere
               old: blocks in place       recent: gathered in order of position

In a tree of depth 15 or less, all ancestors of the tree are recent, so old keys are committed and
their slots are their positions. Old keys are read in blocks of 256 slots, each block one product of
a fixed shape, added up in order. Masked slots count exactly 0, so the number of blocks does not
matter. Recent keys have 16 places in order of position, empty places last. Everything is computed
in float32.

    recent = recent_slots(positions, mask, length)  # on the host
    mask = build_strict_mask(positions, recent, n_slots)
    attended = attend_by_position(q, k, v, mask)

Shapes: m rows, S cache slots, H heads, D head size.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.linear import FbgemmLinear

BLOCK = 256  # slots
RECENT = 16  # positions, the row's own included, whose keys are gathered
MAX_DEPTH = RECENT - 1  # of a tree
# For the trials of min_invariant_rows and is_place_invariant
PROBED = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, 128)  # rows of a pass
N_OLD = 270  # tokens before them
MAX_INVARIANT = 8  # rows; to pad every pass to more would cost too much


class StrictMask(NamedTuple):
    """What the rows of a pass attend to."""

    old: Tensor  # [m, S] float32, 0 or -inf, over the slots before the recent ones
    recent: Tensor  # [m * RECENT] int64, slots in order of position, 0 in empty places
    is_recent: Tensor  # [m, RECENT] float32, 0 or -inf in empty places


def first_recent(positions: Tensor) -> Tensor:
    """Return the first of each row's recent positions [m]."""
    return (positions - MAX_DEPTH).clamp(min=0)


def recent_slots(positions: Tensor, mask: Tensor | None, length: int = 0) -> Tensor:
    """Return the slots [m, RECENT] of each row's recent positions, then zeros.

    mask: [m, s] bool over the slots from `length` on, a row's ancestors in order of depth. Every
    row attends to all older slots. None: each row's slot is its position.
    """
    first = first_recent(positions).unsqueeze(1)  # [m, 1]
    if mask is None:
        slots = first + torch.arange(RECENT)
        return slots.where(slots <= positions.unsqueeze(1), 0)
    start = int(first.min())
    mask = F.pad(mask, (length - start, 0), value=True)  # from slot `start` on
    place = mask.cumsum(dim=1) - 1 + start - first  # among the recent ones; below 0: it is old
    rows, columns = (mask & (place >= 0)).nonzero(as_tuple=True)
    slots = torch.zeros(len(positions), RECENT, dtype=torch.int64)
    slots[rows, place[rows, columns]] = start + columns
    return slots


def build_strict_mask(positions: Tensor, recent: Tensor, n_slots: int) -> StrictMask:
    """Return the mask of rows at these positions [m]. recent: [m, RECENT]. n_slots: of all blocks
    that may hold an old key."""
    first = first_recent(positions).unsqueeze(1)  # [m, 1]
    n_recent = positions.unsqueeze(1) - first + 1
    device = positions.device
    old = additive(torch.arange(n_slots, device=device) < first)
    return StrictMask(
        old, recent.flatten(), additive(torch.arange(RECENT, device=device) < n_recent)
    )


def additive(mask: Tensor) -> Tensor:
    """Return 0 where a bool mask is True, else -inf."""
    return torch.full(mask.shape, -math.inf, device=mask.device).masked_fill_(mask, 0.0)


def attend_by_position(q: Tensor, k: Tensor, v: Tensor, mask: StrictMask) -> Tensor:
    """Return softmax attention [H, m, D] of q [H, m, D] over a cache's k, v [H, S or more, D]."""
    n_heads, m, size = q.shape
    shape = (n_heads, m, RECENT, size)
    recent_keys = k.index_select(1, mask.recent).view(shape).float()
    recent_values = v.index_select(1, mask.recent).view(shape).float()
    scaled = q.float() * size**-0.5
    weights = (recent_keys * scaled.unsqueeze(2)).sum(dim=3) + mask.is_recent  # [H, m, RECENT]
    highest = weights.amax(dim=2, keepdim=True)
    blocks = []  # [H, m, BLOCK] each
    for start in range(0, mask.old.shape[1], BLOCK):
        keys = k[:, start : start + BLOCK].float().transpose(1, 2)
        block = torch.baddbmm(mask.old[:, start : start + BLOCK], scaled, keys)
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


def min_invariant_rows(model: nn.Module) -> int | None:
    """Return from how many rows on the bits of a strict row depend neither on the number of rows
    nor on its place among them. None if there is no such number up to MAX_INVARIANT, and on a GPU,
    where it is not tried."""
    if model.device.type != "cpu":
        return None
    found = [min_equal_rows(compute, rows) for compute, rows in trials(model)]
    return None if None in found else max(found)


def is_place_invariant(model: nn.Module, n: int) -> bool:
    """Whether in a pass of n rows the bits of a strict row do not depend on its place among them.

    A library may compute the last few rows of a product in another way. FBGEMM without AVX-512 does
    so for 32 rows and not for 64. True on a GPU, where it is not tried.
    """
    if model.device.type != "cpu":
        return True
    for compute, rows in trials(model):
        moved = compute(rows[:n].roll(1, 0))
        if not torch.equal(moved, compute(rows[:n]).roll(1, 0)):
            return False
    return True


@torch.inference_mode()
def trials(model: nn.Module) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Return the functions that decide a strict row's bits, each with rows to try it on.

    Which rows have equal bits depends on libraries and processor, so it is tried: on the first
    layer with the head, on attention, and on each FBGEMM product. The products are tried in
    float32, because half precision hides most differences. Every row of a trial is at one position,
    over the same 270 keys and its own.
    """
    weight = model.gpt_neox.embed_in.weight
    config, layer = model.config, model.gpt_neox.layers[0]
    generator = torch.Generator().manual_seed(0)
    n_heads = layer.n_attended // config.head_size
    shape = (2, n_heads, 2 * BLOCK, config.head_size)
    kv = torch.randn(shape, generator=generator).to(weight.dtype)
    kv[:, :, N_OLD:] = kv[:, :, N_OLD : N_OLD + 1]  # the own key of a row that writes none
    rotary = torch.ones(1, config.rotary_dims // 2, dtype=torch.complex64)  # by an angle of 0
    rows = torch.randn(PROBED[-1], weight.shape[1], generator=generator).to(weight.dtype)
    queries = torch.randn(PROBED[-1], n_heads, config.head_size, generator=generator)

    @torch.inference_mode()
    def run(x: Tensor) -> Tensor:
        x = layer(x.clone(), rotary, kv, N_OLD, mask_of_trial(len(x)))
        return torch.cat([x, model.embed_out(x)], dim=1)

    @torch.inference_mode()
    def attend(q: Tensor) -> Tensor:
        keys, values = kv.float()
        mask = mask_of_trial(len(q))
        return attend_by_position(q.transpose(0, 1), keys, values, mask).transpose(0, 1)

    found = [(attend, queries), (run, rows)]  # `run` comes second because it writes to kv
    for linear in [*layer.linears, model.embed_out.linear]:
        if isinstance(linear, FbgemmLinear):
            found.append((linear, torch.randn(PROBED[-1], linear.n_in, generator=generator)))
    return found


def mask_of_trial(n: int) -> StrictMask:
    """Return the mask of n rows that all follow N_OLD tokens directly."""
    positions = torch.full((n,), N_OLD)
    recent = recent_slots(positions, None)
    recent[:, -1] = N_OLD + torch.arange(n)
    return build_strict_mask(positions, recent, 2 * BLOCK)


def min_equal_rows(compute: Callable[[Tensor], Tensor], rows: Tensor) -> int | None:
    """Return the least row count from which on a row's result has equal bits at every count."""
    whole = compute(rows)
    least = None
    for n in reversed(PROBED):
        n_all = len(rows) // n * n
        parts = torch.cat([compute(part) for part in rows[:n_all].split(n)])
        if not torch.equal(parts, whole[:n_all]):
            break
        least = n
    return least if least and least <= MAX_INVARIANT else None
