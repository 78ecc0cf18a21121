"""Linear layers y = x weight^T + bias over packed matrices, for passes of a few rows.

A product of few rows costs the time to read the matrix. So on a CPU each matrix is stored in the
narrowest form that is exact, and in the order in which it is read:

- FBGEMM, if float16 can hold every number of the matrix, as it can for all published Pythia
  weights. The matrix is stored in 2 bytes a number, multiplied and added up in float32. That halves
  the bytes to read. With AVX-512 each row's bits are the same whatever the other rows are.
- oneDNN, for other matrices that are large enough to be worth the 15 us that a call takes, and for
  large bfloat16 matrices, because it computes them with instructions of their own.
- torch's own product, for the rest and on other devices.

`make_linear` chooses by the matrix, never by the processor. FBGEMM and oneDNN are called through
operators that torch has for its compilers and for quantisation. If a processor or a build of torch
refuses one, the next is used.

    linear = make_linear(weight, bias)
    y = linear(x)  # [n, out]

Shapes: n rows.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.memory import is_refusal

SMALL = 2**18  # numbers of a matrix below which one thread is faster than two
MIN_ONEDNN_BYTES = 2**19


class Linear:
    """A linear layer whose matrix is stored as in the checkpoint. Subclasses store it otherwise."""

    nbytes: int  # of the weights that a call reads

    def __init__(self, weight: Tensor, bias: Tensor):
        """weight: [out, in]. bias: [out]."""
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return [n, out] for x [n, in], in x's dtype."""
        return F.linear(x, self.weight, self.bias)


class FbgemmLinear(Linear):
    """A matrix in float16, multiplied in float32 by FBGEMM."""

    def __init__(self, weight: Tensor, bias: Tensor):
        """weight: exact in float16. Raises RuntimeError or AttributeError if this torch has no
        FBGEMM."""
        weight = weight.float().contiguous()
        self.bias = bias.float()
        self.n_in = weight.shape[1]
        self.nbytes = 2 * weight.numel() + self.bias.nbytes
        self.is_small = weight.numel() <= SMALL
        with warnings.catch_warnings():  # torch warns once that two of these are deprecated
            warnings.simplefilter("ignore")
            if self.is_small:
                self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            else:
                self.packed = torch.ops.quantized.linear_prepack_fp16(weight, self.bias)
            self(weight[:1])  # fail here, not in the first pass

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_small:
            y = torch.fbgemm_linear_fp16_weight_fp32_activation(x.float(), self.packed, self.bias)
        else:
            y = torch.ops.quantized.linear_dynamic_fp16.default(x.float(), self.packed)
        return y.to(x.dtype)


class OneDnnLinear(Linear):
    """A matrix in oneDNN's own order."""

    def __init__(self, weight: Tensor, bias: Tensor):
        """Raises RuntimeError or AttributeError if this torch has no oneDNN, or none for this
        dtype."""
        self.bias = bias
        self.nbytes = weight.nbytes + bias.nbytes
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self(weight[:1])

    def __call__(self, x: Tensor) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise.default
        return linear(x, self.packed, self.bias, "none", [], "")


class MixedLinear(Linear):
    """A 16-bit matrix on CUDA with a float32 result: rounded to 16 bits, many logits would tie."""

    def __init__(self, weight: Tensor):
        """weight: [out, in]."""
        self.weight = weight.t()
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight, out_dtype=torch.float32)


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the fastest exact Linear of this matrix [out, in] on its device."""
    if bias is None:
        bias = weight.new_zeros(len(weight))
    kinds: list[type[Linear]] = []
    if weight.device.type == "cpu":
        is_large = weight.nbytes >= MIN_ONEDNN_BYTES
        if not (is_large and weight.dtype == torch.bfloat16) and is_exact_in_half(weight):
            kinds.append(FbgemmLinear)
        if is_large and weight.dtype != torch.float16:
            kinds.append(OneDnnLinear)
    for kind in kinds:
        try:
            return kind(weight, bias)
        except (RuntimeError, AttributeError) as error:
            if is_refusal(error):  # of memory, not of this kind
                raise
    return Linear(weight, bias)


def is_exact_in_half(weight: Tensor) -> bool:
    """Whether float16 can hold every number of a matrix."""
    return weight.dtype == torch.float16 or torch.equal(weight.half().to(weight.dtype), weight)
