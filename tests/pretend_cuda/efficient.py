"""Memory-efficient attention: the alignment that torch's CUDA kernel requires, and its operator.

The rules are those of kernel_forward.h and attention.cu of torch 2.13, for compute capability 8.0
and newer. The kernel reads 16 bytes at a time. A GPU's allocations begin at multiples of 512 bytes,
so the place of a tensor in its storage tells whether its pointer is aligned.

Shapes: B sequences, H heads, n queries, S keys, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .tensors import poison
from .timeline import project_line

ALIGNMENT = 16  # bytes
LSE_STEP = 32  # the kernel pads log_sumexp to a multiple of this
AXES = ((-2, "M"), (-3, "H"), (-4, "B"))  # axes of [B, H, n, D] with the letters in torch's errors


def require_aligned(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> None:
    """Raise RuntimeError if the kernel cannot read query [B, H, n, D], key or value [B, H, S, D],
    or bias [..., n, S]. torch itself does not check value, nor B: a GPU would read at a misaligned
    address."""
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_bias", bias)):
        if tensor is None:
            continue
        size = tensor.dtype.itemsize
        faults = ["pointer"] if tensor.storage_offset() * size % ALIGNMENT else []
        for axis, letter in AXES[: tensor.ndim - 1]:
            # torch checks M and H of the three even if there is only one row or head
            is_read = tensor.shape[axis] > 1 or (letter in "MH" and tensor is not bias)
            if is_read and tensor.stride(axis) * size % ALIGNMENT:
                faults.append(f"stride{letter}")
        if faults:
            raise RuntimeError(
                f"{name} is not correctly aligned ({', '.join(faults)}), at {project_line()}"
            )


def require_shapes(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    """Raise RuntimeError if the operator does not take these shapes, types or innermost strides.
    It does not expand the bias, as scaled_dot_product_attention does."""
    tensors = [query, key, value] + ([] if bias is None else [bias])
    n_bytes = query.shape[-1] * query.dtype.itemsize
    is_fitting = query.shape[:2] == key.shape[:2] and key.shape == value.shape
    is_fitting = is_fitting and query.shape[-1] == key.shape[-1] and n_bytes % ALIGNMENT == 0
    is_fitting = is_fitting and (bias is None or bias.shape == query.shape[:3] + key.shape[2:3])
    is_fitting = is_fitting and {tensor.dtype for tensor in tensors} == {query.dtype}
    if not is_fitting or any(tensor.stride(-1) != 1 for tensor in tensors):
        given = [(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in tensors]
        raise RuntimeError(f"memory-efficient attention does not take {given}")


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute aten::_scaled_dot_product_efficient_attention on the host, without dropout.

    A row whose bias is -inf everywhere gives nan. torch 2.13 gives 0 there, but does not document
    it.
    """
    assert not dropout_p and not is_causal, (
        "the pretended device has no dropout or causal mask here"
    )
    require_shapes(query, key, value, attn_bias)
    require_aligned(query, key, value, attn_bias)
    scores = query.float() @ key.float().mT  # [B, H, n, S]
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if attn_bias is not None:
        scores += attn_bias
    output = (scores.softmax(-1) @ value.float()).to(query.dtype)
    output = output.transpose(1, 2).contiguous().transpose(1, 2)  # laid out as [B, n, H, D]
    log_sumexp = scores.new_empty(*scores.shape[:2], 0)
    if compute_log_sumexp:
        log_sumexp = scores.logsumexp(-1)
        log_sumexp.masked_fill_(log_sumexp.isneginf(), torch.nan)
        log_sumexp = F.pad(log_sumexp, (0, -query.shape[2] % LSE_STEP), value=torch.inf)
    seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))
    poison(seed)  # the kernel writes to seed and offset only with dropout
    poison(offset)
    return output, log_sumexp, seed, offset
