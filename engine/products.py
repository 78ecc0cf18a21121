"""Products with a model's matrices, each packed once, when it is loaded, for passes of a few rows.

What a product of few rows costs is the bytes of its matrix, so on a CPU a matrix is stored as
narrow as it is exactly, and in the order in which it will be read:

- FBGEMM, where every number of a matrix is one of float16, as all published Pythia weights are:
  stored in 2 bytes, multiplied and added up in float32. Half of what float32 has to fetch, the same
  numbers; with AVX-512 each row's bits are the same whatever its place and company.
- oneDNN, for all others large enough to be worth the 15 us that it takes to begin, and for large
  ones in bfloat16, which it computes with instructions of its own.
- torch's own product for the rest, and on other devices.

Which one serves is decided by `open_product` and by the matrix, never by the processor. The first
two are operators that torch has for its own compilers and quantisation; where a processor or a
build of torch refuses one, the next serves.

    product = open_product(weight, bias)
    y = product(x)  # x weight^T + bias, [n, out]

Shapes: n rows.
"""

import warnings
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.memory import is_refusal


class Product(Protocol):
    """x [n, in] -> [n, out], of x's dtype unless it says so."""

    nbytes: int  # that it reads

    def __call__(self, x: Tensor) -> Tensor: ...


SMALL = 2**18  # numbers of a matrix that one thread multiplies sooner than it calls another
WORTH_PACKING = 2**19  # bytes of a matrix for oneDNN


class HalfProduct:
    """A matrix stored in float16, and a product in float32, by FBGEMM."""

    def __init__(self, weight: Tensor, bias: Tensor):
        """weight: [out, in], exact in float16. bias: [out]. Raises RuntimeError, AttributeError
        where there is no FBGEMM."""
        weight = weight.float().contiguous()
        self.bias = bias.float()
        self.n_in = weight.shape[1]
        self.nbytes = 2 * weight.numel() + self.bias.nbytes
        self.is_small = weight.numel() <= SMALL
        with warnings.catch_warnings():  # torch calls the first two deprecated, once
            warnings.simplefilter("ignore")
            if self.is_small:
                self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            else:
                self.packed = torch.ops.quantized.linear_prepack_fp16(weight, self.bias)
            self(weight[:1])  # so that one that fails does so here

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_small:
            y = torch.fbgemm_linear_fp16_weight_fp32_activation(x.float(), self.packed, self.bias)
        else:
            y = torch.ops.quantized.linear_dynamic_fp16.default(x.float(), self.packed)
        return y.to(x.dtype)


class PackedProduct:
    """A matrix in oneDNN's own order."""

    def __init__(self, weight: Tensor, bias: Tensor):
        """weight: [out, in]. bias: [out]. Raises RuntimeError, AttributeError where there is no
        oneDNN, or none for this dtype."""
        self.bias = bias
        self.nbytes = weight.nbytes + bias.nbytes
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self(weight[:1])

    def __call__(self, x: Tensor) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise.default
        return linear(x, self.packed, self.bias, "none", [], "")


class PlainProduct:
    """A matrix as the checkpoint has it."""

    def __init__(self, weight: Tensor, bias: Tensor):
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class WideProduct:
    """A matrix of 16-bit numbers on CUDA, and a product in float32: what is added up there is not
    rounded to 16 bits, in which many logits would be equal."""

    def __init__(self, weight: Tensor):
        """weight: [out, in]."""
        self.weight = weight.t()
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight, out_dtype=torch.float32)


def open_product(weight: Tensor, bias: Tensor | None) -> Product:
    """x [n, in] -> x weight^T + bias [n, out], by what is fastest for this matrix [out, in]."""
    if bias is None:
        bias = weight.new_zeros(len(weight))
    kinds: list[type] = []
    if weight.device.type == "cpu":
        is_large = weight.nbytes >= WORTH_PACKING
        if not (is_large and weight.dtype == torch.bfloat16) and is_exact_in_half(weight):
            kinds.append(HalfProduct)
        if is_large and weight.dtype != torch.float16:
            kinds.append(PackedProduct)
    for kind in kinds:
        try:
            return kind(weight, bias)
        except (RuntimeError, AttributeError) as error:
            if is_refusal(error):  # of memory, not of the kind
                raise
    return PlainProduct(weight, bias)


def is_exact_in_half(weight: Tensor) -> bool:
    """Whether float16 has every number of it."""
    return weight.dtype == torch.float16 or torch.equal(weight.half().to(weight.dtype), weight)
