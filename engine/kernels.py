"""The small operations of a layer between its products and attention.

A pass runs them as separate kernels of torch. engine/compiled.py has other functions that compute
the same and are meant to be one kernel each. `Kernels` says which of the two a pass uses.

    q = EAGER.rotate_and_store(qkv, rotary, kv, start)
    combined = EAGER.combine(attended, inner, approximate)

Shapes: n rows, H heads, D head size, R rotary dimensions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernels(NamedTuple):
    """The functions that a pass uses. Their signatures are those of EAGER's."""

    rotate_and_store: Callable[[Tensor, Tensor, Tensor, int | Tensor], Tensor]
    combine: Callable[[Tensor, Tensor, str], Tensor]


def overflow_value(dtype: torch.dtype) -> float:
    """Return the number that the cache stores in place of a non-finite one.

    This is float16's largest number. Other dtypes store 0, because their keys and values overflow
    only if x overflows.
    """
    return torch.finfo(dtype).max if dtype == torch.float16 else 0.0


def rotate_and_store(qkv: Tensor, rotary: Tensor, kv: Tensor, start: int | Tensor) -> Tensor:
    """Rotate queries and keys. Write keys and values to the cache, and return the queries
    [H, n, D].

    Args:
        qkv: [3, H, n, D], may be overwritten.
        rotary: [n, R / 2] complex64.
        kv: [2, H, capacity, D].
        start: the first slot to write, or all slots to write, [n] int64.
    """
    rotate_(qkv[:2, ..., : 2 * rotary.shape[1]], rotary)
    # A non-finite number in the cache would reach every row, because attention multiplies the
    # values of a masked slot by 0, and 0 x nan is nan
    value = overflow_value(kv.dtype)
    replacements = {"nan": value, "posinf": value, "neginf": -value}
    if isinstance(start, Tensor):
        kv.index_copy_(2, start, torch.nan_to_num(qkv[1:], **replacements))
    else:
        torch.nan_to_num(qkv[1:], **replacements, out=kv[:, :, start : start + qkv.shape[2]])
    return qkv[0]


def rotate_(x: Tensor, rotary: Tensor) -> None:
    """Rotate x [..., n, R] in place by rotary [n or 1, R / 2]. Adjacent dimensions are a pair."""
    pairs = x.float().view(torch.complex64)  # shares x's memory if x is float32
    pairs.mul_(rotary)
    if x.dtype != torch.float32:
        x.copy_(pairs.view(torch.float32))


def combine(attended: Tensor, inner: Tensor, approximate: str) -> Tensor:
    """Return the input of the joined output product, [n, H * D + inner]: attention's output and the
    GELU of the MLP's inside.

    attended: [H, n, D]. inner: [n, inner], may be overwritten.
    """
    n_heads, n, size = attended.shape
    n_attended = n_heads * size
    combined = inner.new_empty(n, n_attended + inner.shape[1])
    columns = combined[:, :n_attended]  # [n, H * D]
    columns.view(n, n_heads, size).copy_(attended.transpose(0, 1))
    gelu(inner, approximate, combined[:, n_attended:])
    return combined


def gelu(x: Tensor, approximate: str, out: Tensor) -> None:
    """Write GELU(x) to `out`; both are [n, inner]. May overwrite x."""
    if x.device.type != "cpu":
        F.gelu(x, approximate=approximate, out=out)
    elif x.numel() % 2:  # oneDNN cannot write to an `out` that is not contiguous
        out.copy_(F.gelu(x, approximate=approximate))
    else:
        halves = x.view(2, -1).t()  # not contiguous, to avoid oneDNN, whose calls start slowly
        F.gelu(halves, approximate=approximate, out=halves)
        out.copy_(x)  # writing to `out` directly is not vectorised


EAGER = Kernels(rotate_and_store, combine)
