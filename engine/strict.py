"""Strict passes: attention whose bits depend only on a row's position and its keys.

In half precision, rounding often decides which of two logits is higher, and a tree's pass rounds
differently than ar's. It has more rows, and the keys of a row's ancestors are in other slots, so
sums are grouped differently. Strict passes are batch-invariant:

- Every pass after the prompt has a minimum number of rows. From this number on, a row's results
  depend neither on its place nor on the other rows. Trials find it (`min_invariant_rows`). If there
  is none, all passes have the same number of rows.
- A row at position p reads its keys in two parts. Only p decides where the second part begins:

    position   0 ................. p - 15 ................. p
    slot       equal to the position      anywhere
               old: blocks in place       recent: gathered in order of position

In a tree of depth 15 or less, all ancestors within the tree are recent. So old keys are committed,
and their slots are equal to their positions. Old keys are read in blocks of 256 slots. Each block
is one product of a fixed shape, and the products are added up in order. Masked slots add exactly 0,
so the number of blocks does not matter. Recent keys have 16 places in order of position, with the
empty places last. Everything is computed in float32.

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
N_RECENT = 16  # positions whose keys are gathered, including the row's own
MAX_DEPTH = N_RECENT - 1  # of a tree in strict passes
# Of a pass. Trials of more rows would take long, and the recent keys of 1,024 rows of Pythia-2.8B
# would take 168 MB in each layer
MAX_STRICT_ROWS = 128
# For the trials of min_invariant_rows and is_place_invariant
TRIAL_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, MAX_STRICT_ROWS)
TRIAL_LENGTH = 270  # committed tokens
MAX_INVARIANT_ROWS = 8  # padding every pass to more rows would cost too much


class StrictMask(NamedTuple):
    """The slots that the rows of a strict pass attend to."""

    old_mask: Tensor  # [m, S] float32: 0 for slots of old keys, else -inf
    recent_slots: Tensor  # [m * N_RECENT] int64, in order of position, 0 in empty places
    recent_mask: Tensor  # [m, N_RECENT] float32: 0, or -inf in empty places


def first_recent(positions: Tensor) -> Tensor:
    """Return the first recent position of each row [m]."""
    return (positions - MAX_DEPTH).clamp(min=0)


def recent_slots(positions: Tensor, mask: Tensor | None, length: int = 0) -> Tensor:
    """Return the slots [m, N_RECENT] of each row's recent positions, 0 in empty places.

    mask: [m, s] bool over the slots from `length` on, in which a row's ancestors are in order of
    depth. Every row attends to all older slots. None: each row's slot is its position.
    """
    first = first_recent(positions).unsqueeze(1)  # [m, 1]
    if mask is None:
        slots = first + torch.arange(N_RECENT)
        return slots.where(slots <= positions.unsqueeze(1), 0)
    start = int(first.min())
    mask = F.pad(mask, (length - start, 0), value=True)  # from slot `start` on
    place = mask.cumsum(dim=1) - 1 + start - first  # among the recent keys; negative for old keys
    rows, columns = (mask & (place >= 0)).nonzero(as_tuple=True)
    slots = torch.zeros(len(positions), N_RECENT, dtype=torch.int64)
    slots[rows, place[rows, columns]] = start + columns
    return slots


def build_strict_mask(positions: Tensor, recent: Tensor, n_slots: int) -> StrictMask:
    """Return the mask of rows at these positions [m].

    recent: [m, N_RECENT], from recent_slots. n_slots: a multiple of BLOCK that covers all old keys.
    """
    first = first_recent(positions).unsqueeze(1)  # [m, 1]
    n_recent = positions.unsqueeze(1) - first + 1
    device = positions.device
    old_mask = to_additive(torch.arange(n_slots, device=device) < first)
    recent_mask = to_additive(torch.arange(N_RECENT, device=device) < n_recent)
    return StrictMask(old_mask, recent.flatten(), recent_mask)


def to_additive(mask: Tensor) -> Tensor:
    """Return a float32 mask: 0 where the bool mask is True, else -inf."""
    return torch.full(mask.shape, -math.inf, device=mask.device).masked_fill_(mask, 0.0)


def attend_by_position(q: Tensor, k: Tensor, v: Tensor, mask: StrictMask) -> Tensor:
    """Return softmax attention [H, m, D] of q [H, m, D] over a cache's k, v [H, S or more, D]."""
    n_heads, m, size = q.shape
    shape = (n_heads, m, N_RECENT, size)
    recent_keys = k.index_select(1, mask.recent_slots).view(shape).float()
    recent_values = v.index_select(1, mask.recent_slots).view(shape).float()
    scaled = q.float() * size**-0.5
    weights = (recent_keys * scaled.unsqueeze(2)).sum(dim=3) + mask.recent_mask  # [H, m, N_RECENT]
    highest = weights.amax(dim=2, keepdim=True)
    blocks = []  # [H, m, BLOCK] each
    for start in range(0, mask.old_mask.shape[1], BLOCK):
        keys = k[:, start : start + BLOCK].float().transpose(1, 2)
        block = torch.baddbmm(mask.old_mask[:, start : start + BLOCK], scaled, keys)
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
    """Return the smallest row count from which on strict passes are batch-invariant.

    Then a row's bits depend neither on the number of rows nor on its place among them. Returns None
    if there is no such count up to MAX_INVARIANT_ROWS, and on a GPU, where no trials are run.
    """
    if model.device.type != "cpu":
        return None
    counts = [min_equal_rows(compute, rows) for compute, rows in make_trials(model)]
    return None if None in counts else max(counts)


def is_place_invariant(model: nn.Module, n: int) -> bool:
    """Whether the bits of a row in a strict pass of n rows do not depend on its place.

    A library may compute the last few rows of a product differently. FBGEMM without AVX-512 does so
    for 32 rows and not for 64. Returns True on a GPU, where no trials are run.
    """
    if model.device.type != "cpu":
        return True
    for compute, rows in make_trials(model):
        moved = compute(rows[:n].roll(1, 0))
        if not torch.equal(moved, compute(rows[:n]).roll(1, 0)):
            return False
    return True


@torch.inference_mode()
def make_trials(model: nn.Module) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Return the functions that decide a strict row's bits, each with input rows for its trial.

    Batch invariance depends on the libraries and the processor, so only trials can find it. They
    run the first layer with the output head, attention, and each FBGEMM product. Attention and
    products run in float32, because half precision hides most differences. All rows of a trial have
    one position and attend to the same 270 keys and their own.
    """
    weight = model.gpt_neox.embed_in.weight
    config, layer = model.config, model.gpt_neox.layers[0]
    generator = torch.Generator().manual_seed(0)
    n_heads = layer.n_attended // config.head_size
    shape = (2, n_heads, 2 * BLOCK, config.head_size)
    kv = torch.randn(shape, generator=generator).to(weight.dtype)
    # `attend` writes no keys, so every row finds the same key and value in its own slot
    kv[:, :, TRIAL_LENGTH:] = kv[:, :, TRIAL_LENGTH : TRIAL_LENGTH + 1]
    rotary = torch.ones(1, config.rotary_dims // 2, dtype=torch.complex64)  # angles of 0
    n = TRIAL_ROW_COUNTS[-1]
    rows = torch.randn(n, weight.shape[1], generator=generator).to(weight.dtype)
    queries = torch.randn(n, n_heads, config.head_size, generator=generator)

    @torch.inference_mode()
    def run(x: Tensor) -> Tensor:
        x = layer(x.clone(), rotary, kv, TRIAL_LENGTH, make_trial_mask(len(x)))
        return torch.cat([x, model.embed_out(x)], dim=1)

    @torch.inference_mode()
    def attend(q: Tensor) -> Tensor:
        keys, values = kv.float()
        mask = make_trial_mask(len(q))
        return attend_by_position(q.transpose(0, 1), keys, values, mask).transpose(0, 1)

    trials = [(attend, queries), (run, rows)]  # `run` comes second because it writes to kv
    for linear in [*layer.linears, model.embed_out.linear]:
        if isinstance(linear, FbgemmLinear):
            x = torch.randn(n, linear.in_features, generator=generator)
            trials.append((linear, x))
    return trials


def make_trial_mask(n: int) -> StrictMask:
    """Return the mask of n rows at position TRIAL_LENGTH, each with a slot of its own."""
    positions = torch.full((n,), TRIAL_LENGTH)
    recent = recent_slots(positions, None)
    recent[:, -1] = TRIAL_LENGTH + torch.arange(n)
    return build_strict_mask(positions, recent, 2 * BLOCK)


def min_equal_rows(compute: Callable[[Tensor], Tensor], rows: Tensor) -> int | None:
    """Return the smallest row count from which on every count gives a row the same bits, or None if
    it is above MAX_INVARIANT_ROWS."""
    expected = compute(rows)
    min_rows = None
    for n in reversed(TRIAL_ROW_COUNTS):
        n_whole = len(rows) // n * n  # rows in complete groups of n
        results = torch.cat([compute(group) for group in rows[:n_whole].split(n)])
        if not torch.equal(results, expected[:n_whole]):
            break
        min_rows = n
    return min_rows if min_rows and min_rows <= MAX_INVARIANT_ROWS else None
