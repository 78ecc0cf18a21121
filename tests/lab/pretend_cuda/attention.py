"""scaled_dot_product_attention: the alignment that torch's memory-efficient kernel requires.

The engine switches off cuDNN's attention, and a mask rules out flash attention, so a GPU runs this
kernel. It reads 16 bytes at a time. The rules are those of sdp_utils.cpp, attention.cu and
kernel_forward.h of torch 2.13, for compute capability 8.0 and newer. A GPU's allocations begin at
multiples of 512 bytes, so the place of a tensor in its storage tells whether its pointer is
aligned. The host's own function computes the values.

Shapes: B sequences, H heads, n queries, S keys, D head size.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .dispatch import Operation, run
from .tensors import CudaTensor

ALIGNMENT = 16  # bytes
ATTENTION = Operation("attention")
AXES = ((-2, "M"), (-3, "H"), (-4, "B"))  # axes of [B, H, n, D] with the letters in torch's errors
host_attention = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: object
) -> Tensor:
    given = (query, key, value, attn_mask)
    n_ours = sum(isinstance(tensor, CudaTensor) for tensor in given)
    if n_ours == 0:
        return host_attention(*given, **options)
    if n_ours < len(given):
        raise RuntimeError("Expected all tensors to be on the same device")
    if attn_mask.dtype not in (torch.bool, query.dtype):
        raise RuntimeError("Expected attn_mask dtype to be bool or to match query dtype")
    if query.shape[-1] * query.dtype.itemsize % ALIGNMENT == 0:  # else torch uses another kernel
        # Torch turns a bool mask into a new bias, which is aligned
        require_aligned(*(given[:3] if attn_mask.dtype == torch.bool else given))
    return run(attend_on_host, ATTENTION, given, options)


def attend_on_host(*given: Tensor, **options: object) -> Tensor:
    """Run the host's own function, also where the program allows only a kernel that CPUs lack."""
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        return host_attention(*given, **options)


def require_aligned(*given: Tensor) -> None:
    """Raise RuntimeError if the kernel cannot read query [B, H, n, D], key or value [B, H, S, D],
    or bias [n, S], given in this order.

    torch itself does not check value, nor B: a GPU would read at a misaligned address. It copies
    a bias with unaligned strides in every call, which takes time.
    """
    for name, tensor in zip(("query", "key", "value", "attn_bias"), given, strict=False):
        size = tensor.dtype.itemsize
        faults = ["pointer"] if tensor.storage_offset() * size % ALIGNMENT else []
        for axis, letter in AXES[: tensor.ndim - 1]:
            # torch checks M and H of the three even if there is only one row or head
            is_read = tensor.shape[axis] > 1 or (letter in "MH" and name != "attn_bias")
            if is_read and tensor.stride(axis) * size % ALIGNMENT:
                faults.append(f"stride{letter}")
        if faults:
            raise RuntimeError(f"{name} is not correctly aligned ({', '.join(faults)})")
