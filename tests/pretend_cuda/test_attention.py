"""Tests of memory-efficient attention on the pretended device: its alignment and its operator."""

from collections.abc import Callable

import pytest
import torch
from conftest import assert_close
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .test_device import warm_up_and_capture, zeros

pytestmark = pytest.mark.cuda
operator = torch.ops.aten._scaled_dot_product_efficient_attention


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # the host needs MATH
        torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def attend_directly(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> None:
    operator(query, key, value, bias, True)


NAMES = ["query", "key", "value", "attn_bias"]


def aligned_inputs() -> dict[str, Tensor]:
    """Return zeros in float16: two sequences, two heads, three queries, 16 keys, head size 8."""
    query, keys = zeros(2, 2, 3, 8).half(), zeros(2, 2, 16, 8).half()
    return dict(zip(NAMES, (query, keys, keys, zeros(2, 2, 3, 16).half()), strict=True))


def misalign(tensor: Tensor, what: str) -> Tensor:
    """Return zeros of a tensor's shape, 8 bytes from an aligned place or with one stride of an odd
    multiple of 8 bytes."""
    if what == "pointer":
        return zeros(tensor.numel() + 4).half()[4:].view(tensor.shape)
    stride = list(tensor.stride())
    axis = "BHM".index(what[-1])
    stride[axis] += 4
    return zeros(2 * tensor.numel()).half().as_strided(tensor.shape, stride)


@pytest.mark.parametrize("what", ["pointer", "strideM", "strideH", "strideB"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", [attend, attend_directly])
def test_attention_reads_only_aligned_memory(
    call: Callable[..., None], name: str, what: str
) -> None:
    """Check every tensor. scaled_dot_product_attention copies a mask with other strides, but not
    one with another pointer."""
    inputs = aligned_inputs()
    call(*inputs.values())
    inputs[name] = misalign(inputs[name], what)
    if call is attend and name == "attn_bias" and what != "pointer":
        call(*inputs.values())
        return
    with pytest.raises(RuntimeError, match=rf"{name} is not correctly aligned \(.*{what}"):
        call(*inputs.values())


def test_a_bool_mask_may_begin_anywhere() -> None:
    """Check that only an additive mask must be aligned, because torch makes one of a bool mask."""
    *inputs, bias = aligned_inputs().values()
    attend(*inputs, zeros(bias.numel() + 1).bool()[1:].view(bias.shape))


def test_one_row_must_be_aligned_too() -> None:
    """Check that torch asks for an aligned stride of queries and keys even if there is one row."""
    query = zeros(64).half().as_strided((1, 1, 1, 8), (8, 8, 4, 1))
    with pytest.raises(RuntimeError, match=r"query is not correctly aligned \(strideM\)"):
        attend(query, *(zeros(1, 1, 1, 8).half() for _ in range(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5, 32])
def test_efficient_attention_computes_what_float64_does(n: int, dtype: torch.dtype) -> None:
    """Compare output and log_sumexp, also of a replay, and the padding of log_sumexp."""
    generator = torch.Generator().manual_seed(n)
    shapes = (2, 3, n, 8), (2, 3, 16, 8), (2, 3, 16, 8), (2, 3, n, 16)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    drawn[3][..., 1:4] = -torch.inf
    query, key, value, bias = (tensor.double() for tensor in drawn)
    scores = query @ key.mT * 0.5 + bias
    inputs = [tensor.cuda() for tensor in drawn]
    results = []

    def run() -> None:
        results.append(operator(*inputs, True, scale=0.5))

    warm_up_and_capture(run).replay()
    for output, log_sumexp, seed, offset in results:
        error = (output.cpu().double() - scores.softmax(-1) @ value).abs().max()
        assert error < 8 * torch.finfo(dtype).eps
        assert output.dtype == dtype and output.transpose(1, 2).is_contiguous()
        assert_close(log_sumexp.cpu()[..., :n].double(), scores.logsumexp(-1))
        assert log_sumexp.shape == (2, 3, 32) and log_sumexp[..., n:].isposinf().all()
        assert seed.dtype == offset.dtype == torch.int64 and seed.shape == offset.shape == ()


def test_a_query_without_keys_gives_nan() -> None:
    """Check the output and log_sumexp, because what a GPU gives is not documented."""
    query, key, value, bias = aligned_inputs().values()
    bias[0, 0, 1] = -torch.inf
    output, log_sumexp, *_ = operator(query, key, value, bias, True)
    assert output.isnan().any(-1).nonzero().tolist() == [[0, 0, 1]]
    assert log_sumexp.isnan().nonzero().tolist() == [[0, 0, 1]]
    assert operator(query, key, value, bias, False)[1].shape == (2, 2, 0)
