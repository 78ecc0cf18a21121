"""Strict passes: attention whose bits depend only on a row's position and its keys.

In half precision, rounding often decides which of two logits is higher, and a tree's pass rounds
differently than ar's. It has more rows, and the keys of a row's ancestors are in other slots, so
sums are grouped differently. Strict passes are batch-invariant:

- Every pass after the prompt has a minimum number of rows. From this number on, a row's results
  depend neither on its place nor on the other rows. Trials find it (`invariant_rows`). If there is
  none, all passes have the same number of rows.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from dynatree_lab.engine.linear import FbgemmLinear
from dynatree_lab.engine.masks import Mask, Masks
from dynatree_lab.engine.passes import ROW_COUNTS, PassConfig

if TYPE_CHECKING:
    from dynatree_lab.engine.cuda_graphs import FixedCache, PassInputs, PassShape
    from dynatree_lab.engine.model import FastGPTNeoX

BLOCK = 256  # slots
N_RECENT = 16  # positions whose keys are gathered, including the row's own
MAX_DEPTH = N_RECENT - 1  # of a tree in strict passes
# Of a pass. Trials of more rows would take long, and the recent keys of 1,024 rows of Pythia-2.8B
# would take 168 MB in each layer
MAX_STRICT_ROWS = 128
TRIAL_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, MAX_STRICT_ROWS)
TRIAL_LENGTH = 290  # committed tokens
MAX_INVARIANT_ROWS = 8  # padding every pass to more rows would cost too much


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

    def min_rows(self, model: "FastGPTNeoX", config: PassConfig) -> int:
        """Return the number of rows from which on passes are batch-invariant.

        If there is none, all passes have the same number of rows, for which a row's bits do not
        depend on its place. If ROW_COUNTS has no such number either, bits may differ.
        """
        n = max(config.max_rows, super().min_rows(model, config))
        counts = [count for count in ROW_COUNTS if n <= count <= MAX_STRICT_ROWS]
        place_invariant = (count for count in counts if is_place_invariant(model, count))
        return invariant_rows(model) or next(place_invariant, MAX_STRICT_ROWS)

    def build(self, positions: Tensor, mask: Tensor, start: int, m: int, like: Tensor) -> Mask:
        n, n_masked = mask.shape
        recent = F.pad(recent_slots(positions, mask, start + n - n_masked), (0, 0, 0, m - n))
        n_old = int(first_recent(positions).max())
        n_slots = -(-n_old // BLOCK) * BLOCK
        positions = F.pad(positions, (0, m - n))
        return make_mask(positions.to(like.device), recent.to(like.device), n_slots)

    def row_bytes(self, n_scratch: int) -> int:
        return 8 * N_RECENT

    def pack(self, positions: Tensor, mask: Tensor, length: int, shape: "PassShape") -> ndarray:
        recent = numpy.zeros((shape.n_rows, N_RECENT), numpy.int64)
        recent[: len(mask)] = recent_slots(positions, mask, length).numpy()
        return recent.view(numpy.uint8)

    def unpack(self, cache: "FixedCache", inputs: "PassInputs", shape: "PassShape") -> Mask:
        return make_mask(inputs.positions, inputs.mask.view(torch.int64), shape.n_slots)


STRICT = StrictMasks()


def first_recent(positions: Tensor) -> Tensor:
    """Return the first recent position of each row."""
    return (positions - MAX_DEPTH).clamp(min=0)


def recent_slots(positions: Tensor, mask: Tensor, length: int) -> Tensor:
    """Return the slots [n, N_RECENT] of each row's recent positions, 0 in empty places.

    mask: [n, s] bool over the slots from `length` on, in which a row's ancestors are in order of
    depth. Every row attends to all older slots.
    """
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


@torch.inference_mode()
def invariant_rows(model: "FastGPTNeoX") -> int | None:
    """Return the smallest row count from which on strict passes are batch-invariant on all ranks.

    Then a row's bits depend neither on the number of rows nor on its place among them. Returns None
    if there is no such count up to MAX_INVARIANT_ROWS, and for fixed shapes, where none is tried.
    """
    if model.has_fixed_shapes:
        return None
    results = model.invariance_results
    if "min_rows" not in results:
        own = [min_equal_rows(compute, rows) for compute, rows in make_trials(model)]
        counts = [count for counts in model.gather(own) for count in counts]
        results["min_rows"] = None if None in counts else max(counts)
    return results["min_rows"]


@torch.inference_mode()
def is_place_invariant(model: "FastGPTNeoX", n: int) -> bool:
    """Whether the bits of a row in a strict pass of n rows do not depend on its place, on any rank.

    A library may compute the last few rows of a product differently. FBGEMM without AVX-512 does so
    for 32 rows and not for 64. Returns True on a GPU, where no trials are run.
    """
    results, is_equal = model.invariance_results, True
    if n not in results:
        for compute, rows in make_trials(model) if model.device.type == "cpu" else ():
            moved = compute(rows[:n].roll(1, 0))
            is_equal &= torch.equal(moved, compute(rows[:n]).roll(1, 0))
        results[n] = all(model.gather(is_equal))
    return results[n]


def make_trials(model: "FastGPTNeoX") -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Return the functions that decide a strict row's bits, each with input rows for its trial.

    Batch invariance depends on the libraries and the processor, so only trials can find it. They
    run the first layer with the output head, attention, and each FBGEMM product. Attention and
    products run in float32, because half precision hides most differences. All rows of a trial have
    one position and attend to the same 290 keys and their own.
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

    def run(x: Tensor) -> Tensor:
        x = layer(x.clone(), rotary, kv, TRIAL_LENGTH, trial_mask(len(x)))
        return torch.cat([x, model.embed_out(x)], dim=1)

    def attend(q: Tensor) -> Tensor:
        keys, values = kv.float()
        return trial_mask(len(q)).attend(q.transpose(0, 1), keys, values).transpose(0, 1)

    trials = [(attend, queries), (run, rows)]  # `run` comes second because it writes to kv
    for linear in [*layer.linears, model.embed_out.linear]:
        if isinstance(linear, FbgemmLinear):
            x = torch.randn(n, linear.in_features, generator=generator)
            trials.append((linear, x))
    return trials


def trial_mask(n: int) -> Mask:
    """Return the mask of n rows at position TRIAL_LENGTH, each with a slot of its own."""
    positions = torch.full((n,), TRIAL_LENGTH)
    return STRICT.build(positions, torch.eye(n).bool(), TRIAL_LENGTH, n, positions)


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
