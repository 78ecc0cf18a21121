"""Attention whose bits depend on a row's position and its keys, and on nothing else.

In half precision two logits often lie so close that rounding decides between them, and a tree's
pass rounds otherwise than ar's: it has more rows, and the keys of a row's ancestors lie where other
drafts left them, so sums are grouped otherwise. Here they are not. Every pass after the prompt has
so many rows at least that a product treats each row alike, whatever its place and company; from how
many on that is so is found by trial (steady_rows), and where it never is all passes have the same
number. And a row at position p reads its keys in two parts that p alone decides:

    position   0 ................. p - 15 ................. p
    slot       the same                   wherever they are
               far: in place, by blocks   near: gathered, in order of position

What is far is committed in any tree of depth 15 or less, so slot and position agree there. Blocks
are 256 slots wide, one product of a fixed shape each, added up one after the other; masked slots
count for exactly 0, so it does not matter how many blocks there are. What is near has 16 places, in
order of position, empty ones last. All of it is computed in float32.

    near = near_slots(positions, mask, length)  # on the host
    sight = open_sight(positions, near, n_slots)
    attended = attend_by_position(q, k, v, sight)

Shapes: m rows, S cache slots, H heads, D head size.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.products import HalfProduct

BLOCK = 256  # slots
NEAR = 16  # positions up to a row's own that are gathered
MAX_DEPTH = NEAR - 1  # of a tree
# Of the trials that steady_rows and is_even make
PROBED = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, 128)  # rows of a pass
FAR = 270  # tokens before them
MOST_STEADY = 8  # rows to which it is worth padding each pass, so that all have the same bits


class Sight(NamedTuple):
    """What the rows of a pass attend."""

    far: Tensor  # [m, S] float32, 0 or -inf: the slots before the near ones
    near: Tensor  # [m * NEAR] int64, slots in order of position, 0 where there is none
    is_near: Tensor  # [m, NEAR] float32, 0 or -inf


def first_near(positions: Tensor) -> Tensor:
    """The position from which a row's keys are gathered."""
    return (positions - MAX_DEPTH).clamp(min=0)


def near_slots(positions: Tensor, mask: Tensor | None, length: int = 0) -> Tensor:
    """The slots [m, NEAR] of each row's last positions up to its own, then zeros.

    mask: [m, s] bool of the slots from `length` on, below which all is seen: ancestors in order of
    depth; None if each row's slot is its position.
    """
    first = first_near(positions).unsqueeze(1)  # [m, 1]
    if mask is None:
        slots = first + torch.arange(NEAR)
        return slots.where(slots <= positions.unsqueeze(1), 0)
    start = int(first.min())
    seen = F.pad(mask, (length - start, 0), value=True)  # from slot `start` on
    place = seen.cumsum(dim=1) - 1 + start - first  # of a seen slot among the near ones, if >= 0
    rows, columns = (seen & (place >= 0)).nonzero(as_tuple=True)
    slots = torch.zeros(len(positions), NEAR, dtype=torch.int64)
    slots[rows, place[rows, columns]] = start + columns
    return slots


def open_sight(positions: Tensor, near: Tensor, n_slots: int) -> Sight:
    """The same as numbers to add. near: [m, NEAR]. n_slots: of all blocks that may hold a key."""
    first = first_near(positions).unsqueeze(1)  # [m, 1]
    n_near = positions.unsqueeze(1) - first + 1
    device = positions.device
    far = blocked(torch.arange(n_slots, device=device) < first)
    return Sight(far, near.flatten(), blocked(torch.arange(NEAR, device=device) < n_near))


def blocked(seen: Tensor) -> Tensor:
    """0 where it is seen, else -inf."""
    bias = torch.full(seen.shape, -math.inf, device=seen.device)
    return bias.masked_fill_(seen, 0.0)


def attend_by_position(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Softmax attention [H, m, D] of q [H, m, D] over a cache's k, v [H, S or more, D]."""
    n_heads, m, size = q.shape
    near = (n_heads, m, NEAR, size)
    near_keys = k.index_select(1, sight.near).view(near).float()
    near_values = v.index_select(1, sight.near).view(near).float()
    scaled = q.float() * size**-0.5
    weights = (near_keys * scaled.unsqueeze(2)).sum(dim=3) + sight.is_near  # [H, m, NEAR]
    highest = weights.amax(dim=2, keepdim=True)
    blocks = []  # [H, m, BLOCK] each
    for start in range(0, sight.far.shape[1], BLOCK):
        keys = k[:, start : start + BLOCK].float().transpose(1, 2)
        block = torch.baddbmm(sight.far[:, start : start + BLOCK], scaled, keys)
        highest = torch.maximum(highest, block.amax(dim=2, keepdim=True))
        blocks.append(block)
    weights = (weights - highest).exp_()
    total = weights.sum(dim=2, keepdim=True)
    attended = (weights.unsqueeze(3) * near_values).sum(dim=2)  # [H, m, D]
    for i, block in enumerate(blocks):
        block.sub_(highest).exp_()
        total += block.sum(dim=2, keepdim=True)
        attended.baddbmm_(block, v[:, i * BLOCK : (i + 1) * BLOCK].float())
    return (attended / total).to(q.dtype)


def steady_rows(model: nn.Module) -> int | None:
    """From how many rows of a pass on the bits of a strict row do not depend on how many there are,
    nor on its place among them; None if they always do, or on a GPU, whose passes have few row
    counts anyway."""
    if model.gpt_neox.embed_in.weight.is_cuda:
        return None
    found = [least_steady(compute, rows) for compute, rows in trials(model)]
    return None if None in found else max(found)


def is_even(model: nn.Module, n: int) -> bool:
    """Whether in a pass of n rows the bits of a strict row do not depend on its place among them.

    Where few rows that are left over have a product of their own, as FBGEMM's without AVX-512, 32
    rows do and 64 do not. True on a GPU, where that is not known.
    """
    if model.gpt_neox.embed_in.weight.is_cuda:
        return True
    for compute, rows in trials(model):
        moved = compute(rows[:n].roll(1, 0))
        if not torch.equal(moved, compute(rows[:n]).roll(1, 0)):
            return False
    return True


@torch.inference_mode()
def trials(model: nn.Module) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """What computes a strict row's bits, each with rows to try it on; on a CPU.

    What is so is a fact of libraries on a processor, so it is found by trial: on the first layer
    and the head, and on attention and those products that can be had in float32 before they are
    rounded, as half precision would hide most differences. Every row of the trial stands at one
    position, over the same 270 keys and its own.
    """
    weight = model.gpt_neox.embed_in.weight
    config, layer = model.config, model.gpt_neox.layers[0]
    chance = torch.Generator().manual_seed(0)
    n_heads = layer.n_attended // config.head_size
    shape = (2, n_heads, 2 * BLOCK, config.head_size)
    past = torch.randn(shape, generator=chance).to(weight.dtype)
    past[:, :, FAR:] = past[:, :, FAR : FAR + 1]  # what a row that writes none has for its own
    still = torch.ones(1, config.rotary_dims // 2, dtype=torch.complex64)  # no turn
    rows = torch.randn(PROBED[-1], weight.shape[1], generator=chance).to(weight.dtype)
    queries = torch.randn(PROBED[-1], n_heads, config.head_size, generator=chance)

    @torch.inference_mode()
    def read(x: Tensor) -> Tensor:
        x = layer(x.clone(), still, past, FAR, sight_of_trial(len(x)))
        return torch.cat([x, model.embed_out(x)], dim=1)

    @torch.inference_mode()
    def attend(q: Tensor) -> Tensor:
        keys, values = past.float()
        sight = sight_of_trial(len(q))
        return attend_by_position(q.transpose(0, 1), keys, values, sight).transpose(0, 1)

    found = [(attend, queries), (read, rows)]  # the second writes to the slots
    for product in [*layer.products, model.embed_out.product]:
        if isinstance(product, HalfProduct):
            found.append((product, torch.randn(PROBED[-1], product.n_in, generator=chance)))
    return found


def sight_of_trial(n: int) -> Sight:
    """Rows at one depth, after FAR tokens."""
    positions = torch.full((n,), FAR)
    near = near_slots(positions, None)
    near[:, -1] = FAR + torch.arange(n)
    return open_sight(positions, near, 2 * BLOCK)


def least_steady(compute: Callable[[Tensor], Tensor], rows: Tensor) -> int | None:
    """The least count of rows from which on a row's result has the same bits at every count."""
    whole = compute(rows)
    least = None
    for n in reversed(PROBED):
        n_all = len(rows) // n * n
        parts = torch.cat([compute(part) for part in rows[:n_all].split(n)])
        if not torch.equal(parts, whole[:n_all]):
            break
        least = n
    return least if least and least <= MOST_STEADY else None
