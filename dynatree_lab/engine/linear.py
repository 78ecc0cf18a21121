"""Linear layers y = x weight^T + bias over packed matrices, for passes of a few rows.

A product with few rows takes as long as it takes to read the matrix. So on a CPU, each matrix is
stored in the narrowest exact format, and in the order in which it is read:

- FBGEMM, if float16 can represent every element exactly, as for all published Pythia weights. An
  element takes 2 bytes, which halves the bytes to read. Products and sums are in float32. With
  AVX-512 a row's bits do not depend on the other rows.
- oneDNN, for large bfloat16 matrices, because it uses bfloat16 instructions. Also for other
  matrices that are large enough to be worth the 15 us that a call takes.
- torch's linear layer, for all others and on other devices.

`make_linear` chooses by the matrix, not by the processor. FBGEMM and oneDNN are called through
operators that torch has for its compilers and for quantisation. If the processor or the build of
torch does not support one, the next is used.

    linear = make_linear(weight, bias)
    y = linear(x)  # [n, out]

Shapes: n rows.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dynatree_lab.engine.memory import is_out_of_memory

SMALL_MATRIX = 2**18  # elements up to which one thread is faster than two
MIN_ONEDNN_BYTES = 2**19  # oneDNN's calls cost too much for a smaller matrix


class Linear:
    """A linear layer whose matrix is stored as in the checkpoint. Subclasses pack it."""

    nbytes: int  # bytes of weights that a call reads

    def __init__(self, weight: Tensor, bias: Tensor):
        """Store weight [out, in] and bias [out]."""
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return [n, out] for x [n, in], in x's dtype."""
        return F.linear(x, self.weight, self.bias)


class FbgemmLinear(Linear):
    """A linear layer in FBGEMM: the matrix in float16, products and sums in float32."""

    def __init__(self, weight: Tensor, bias: Tensor):
        """Pack a weight that float16 represents exactly. Raises RuntimeError or AttributeError if
        this torch has no FBGEMM."""
        weight = weight.float().contiguous()
        self.bias = bias.float()
        self.in_features = weight.shape[1]
        self.nbytes = 2 * weight.numel() + self.bias.nbytes
        self.is_small = weight.numel() <= SMALL_MATRIX
        with warnings.catch_warnings():  # torch warns that these functions are deprecated
            warnings.simplefilter("ignore")
            if self.is_small:
                self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            else:
                self.packed = torch.ops.quantized.linear_prepack_fp16(weight, self.bias)
                self.operator = without_wrapper(torch.ops.quantized.linear_dynamic_fp16.default)
            self(weight[:1])  # raise here, not in the first pass

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self(x.float()).to(x.dtype)
        if self.is_small:
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)
        return self.operator(x, self.packed)


class OneDnnLinear(Linear):
    """A linear layer in oneDNN, with the matrix in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor):
        """Pack a weight. Raises RuntimeError or AttributeError if this torch has no oneDNN for its
        dtype."""
        self.bias = bias
        self.nbytes = weight.nbytes + bias.nbytes
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.operator = without_wrapper(torch.ops.mkldnn._linear_pointwise.default)
        self(weight[:1])

    def __call__(self, x: Tensor) -> Tensor:
        return self.operator(x, self.packed, self.bias, "none", [], "")


class MixedLinear(Linear):
    """A linear layer on CUDA with a 16-bit matrix and a float32 result. In 16 bits, many logits
    would tie."""

    def __init__(self, weight: Tensor):
        """Store weight [out, in]."""
        self.weight = weight.t()
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [n, out] in float32 for x [n, in], in `out` if it is given."""
        return torch.mm(x, self.weight, out_dtype=torch.float32, out=out)


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the fastest exact Linear for a matrix [out, in] on its device."""
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
            if is_out_of_memory(error):  # otherwise this kind is not supported here
                raise
    return Linear(weight, bias)


def without_wrapper(operator: Callable) -> Callable:
    """Return the function of torch's dispatcher that an operator of torch.ops wraps, because the
    wrapper takes 7 us per call (measured). A torch without it gives the operator."""
    return getattr(operator, "_op", operator)


def is_exact_in_half(weight: Tensor) -> bool:
    """Whether float16 can represent every element of a matrix exactly."""
    return weight.dtype == torch.float16 or torch.equal(weight.half().to(weight.dtype), weight)
