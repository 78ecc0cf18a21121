"""The small operations of a layer as functions for torch.compile. A trial.

In float16, engine/kernels.py takes five kernels to rotate and store, and two to combine. The
functions here are meant to be one kernel each. In the code that Inductor makes for a CPU, each is
one loop:

- They are real, because Inductor leaves complex numbers to eager torch.
- A partner in a rotary pair and a part of a row are found by index arithmetic. When the functions
  stacked or concatenated, every part became a loop of its own.
- Keys and values are two arguments. When they were one, Inductor copied the layer's cache instead
  of writing to it.

Nobody has measured yet whether this is faster on a GPU, so it is not the default (the word compiled
of engine/generation_config.py). Each function is compiled when it first runs, for all numbers of
rows. It is compiled again for another dtype, for a single row, and if the first number of rows
equals another size, such as the number of heads. CUDA graphs record it afterwards, because every
shape runs once before its capture. The check for overflow at the end of a pass stays eager: it is
one kernel of a pass and not of a layer.

    kernels = compiled_kernels()  # an argument of FusedTransformer.forward

Shapes: n rows, H heads, D head size, R rotary dimensions.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import Kernels, overflow_value


@cache
def compiled_kernels() -> Kernels:
    """Return the compiled functions, which all models of the process share."""
    # Whole graphs: where a function cannot be compiled, torch raises instead of running it eagerly
    options = {"dynamic": True, "fullgraph": True}
    store = torch.compile(rotate_and_store, **options)

    def rotate_and_store_complex(qkv: Tensor, rotary: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
        return store(qkv, torch.view_as_real(rotary), kv[0], kv[1], slots)

    return Kernels(rotate_and_store_complex, torch.compile(combine, **options))


def rotate_and_store(
    qkv: Tensor, angles: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Do what kernels.rotate_and_store does.

    Args:
        qkv: [3, H, n, D].
        angles: cos and sin, [n, R / 2, 2] float32.
        keys, values: of the cache, [H, capacity, D] each.
        slots: [n] int64.
    """
    limit = overflow_value(keys.dtype)
    rotated = rotate(qkv[1], angles)
    keys.index_copy_(1, slots, torch.nan_to_num(rotated, limit, limit, -limit))
    values.index_copy_(1, slots, torch.nan_to_num(qkv[2], limit, limit, -limit))
    return rotate(qkv[0], angles)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [H, n, D] with its first R dimensions rotated by angles [n, R / 2, 2]."""
    size, n_pairs = x.shape[-1], angles.shape[1]
    dims = torch.arange(size, device=x.device)
    pair = (dims // 2).clamp(max=n_pairs - 1)
    cos, sin = angles.index_select(1, pair).unbind(2)  # [n, D]
    partner = x.index_select(2, (dims ^ 1).clamp(max=size - 1)).float()
    sign = torch.where(dims % 2 == 0, -1.0, 1.0)
    rotated = x.float() * cos + sign * partner * sin
    return torch.where(dims < 2 * n_pairs, rotated.to(x.dtype), x)


def combine(attended: Tensor, inner: Tensor, approximate: str) -> Tensor:
    """Do what kernels.combine does."""
    flat = attended.transpose(0, 1).flatten(1)  # [n, H * D]
    n_attended = flat.shape[1]
    columns = torch.arange(n_attended + inner.shape[1], device=inner.device)
    left = flat.index_select(1, columns.clamp(max=n_attended - 1)).to(inner.dtype)
    right = inner.index_select(1, (columns - n_attended).clamp(min=0))
    return torch.where(columns < n_attended, left, F.gelu(right, approximate=approximate))
