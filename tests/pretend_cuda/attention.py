"""scaled_dot_product_attention, counted as the kernel that a GPU would choose.

The rules are those of torch's sdp_utils.cpp for compute capability 9.0, without dropout and
gradients. The host's own function computes the values in every case.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .dispatch import Operation, run
from .efficient import require_aligned
from .operators import list_operator
from .tensors import CudaTensor
from .timeline import project_line

host_attention = torch.nn.functional.scaled_dot_product_attention
host_choice = torch._fused_sdp_choice
MATH = Operation("attention by single operations", n_kernels=8)
BACKENDS = {MATH.name: SDPBackend.MATH, "attention by cuDNN": SDPBackend.CUDNN_ATTENTION}
OPERATORS = {
    SDPBackend.MATH: "aten::_scaled_dot_product_attention_math",
    SDPBackend.CUDNN_ATTENTION: "aten::_scaled_dot_product_cudnn_attention",
    SDPBackend.EFFICIENT_ATTENTION: "aten::_scaled_dot_product_efficient_attention",
}


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: object
) -> Tensor:
    given = (query, key, value, attn_mask)
    n_ours = sum(isinstance(tensor, CudaTensor) for tensor in given)
    if n_ours == 0:
        return host_attention(*given, **options)
    if n_ours < 4 - (attn_mask is None):
        raise RuntimeError(f"Expected all tensors to be on the same device, at {project_line()}")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        raise RuntimeError("Expected attn_mask dtype to be bool or to match query dtype")
    operation = choose(*given)
    list_operator(OPERATORS[backend_of(operation)], given[:n_ours])
    return run(attend_on_host, operation, given, options)


def attend_on_host(*given: Tensor | None, **options: object) -> Tensor:
    """Run the host's own function, also where the program allows only a kernel that CPUs lack."""
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        return host_attention(*given, **options)


def backend_of(operation: Operation) -> SDPBackend:
    return BACKENDS.get(operation.name, SDPBackend.EFFICIENT_ATTENTION)


def fused_sdp_choice(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> int:
    """Return the number of an SDPBackend, as torch._fused_sdp_choice does."""
    if not isinstance(query, CudaTensor):
        return host_choice(query, key, value, attn_mask)
    return int(backend_of(choose(query, key, value, attn_mask)))


def choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Operation:
    """Return the first kernel that is enabled and takes these tensors."""
    backends = torch.backends.cuda
    is_half = query.dtype != torch.float32
    if backends.cudnn_sdp_enabled() and is_half and query.shape[2] > 1:
        return Operation("attention by cuDNN")
    is_fitting = query.shape[:2] == key.shape[:2]
    for tensor in (query, key, value):
        is_aligned = tensor.shape[-1] * tensor.dtype.itemsize % 16 == 0
        is_fitting = is_fitting and tensor.ndim == 4 and tensor.stride(-1) == 1 and is_aligned
    is_fitting = is_fitting and (mask is None or mask.stride(-1) == 1)
    if not backends.mem_efficient_sdp_enabled() or not is_fitting:
        return MATH
    if mask is None or not any(stride % 8 for stride in mask.stride()[:-1]):
        is_converted = mask is None or mask.dtype == torch.bool  # then torch makes a new tensor
        require_aligned(query, key, value, None if is_converted else mask)
        return Operation("memory-efficient attention")
    require_aligned(query, key, value)
    return Operation("memory-efficient attention, mask copied", n_kernels=3)
