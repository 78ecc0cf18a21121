"""Tests of the functions for torch.compile against those that a pass runs by default."""

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import run_and_get_code

from engine import compiled
from engine.kernels import EAGER, Kernels

H, D, CAPACITY = 3, 16, 300  # heads, head size, slots
# One unit in the last place of values around 4, and of their rounding to 16 bits
BOUNDS = {torch.float32: 5e-7, torch.bfloat16: 2**-6, torch.float16: 2**-9}
ROTARY_DIMS = (4, 16)  # a quarter of the head, and all of it


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Return the functions as they are given to torch.compile."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return compiled.compiled_kernels.__wrapped__()


def make_inputs(n: int, n_rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return qkv [3, H, n, D] as a layer gives it, angles, a cache of two layers and slots."""
    generator = torch.Generator().manual_seed(n)
    joined = torch.randn(n, 3 * H * D + 40, generator=generator).to(dtype)
    qkv = joined[:, : 3 * H * D].view(n, 3, H, D).permute(1, 2, 0, 3)
    turns = torch.rand(n, n_rotary // 2, generator=generator) * 6
    kv = torch.randn(2, 2, H, CAPACITY, D, generator=generator).to(dtype)
    return qkv, torch.polar(torch.ones_like(turns), turns), kv, torch.arange(n) + 7


def store(kernels: Kernels, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the queries and the cache after the second layer has been stored."""
    qkv, rotary, kv, slots = (tensor.clone() for tensor in inputs)
    return kernels.rotate_and_store(qkv, rotary, kv[:, 1], slots), kv


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Check that values differ by rounding only, and that both have nan in the same places."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = BOUNDS[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=bound, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("n_rotary", ROTARY_DIMS)
def test_queries_keys_and_values(n_rotary: int, dtype: torch.dtype, uncompiled: Kernels) -> None:
    for n in (1, 2, 33):
        inputs = make_inputs(n, n_rotary, dtype)
        for actual, expected in zip(store(uncompiled, inputs), store(EAGER, inputs), strict=True):
            assert_equal(actual, expected)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_what_overflows(dtype: torch.dtype, uncompiled: Kernels) -> None:
    """Check non-finite keys and values in rotated and in other dimensions. Rounding may decide the
    sign of what replaces them."""
    inputs = make_inputs(4, 4, dtype)
    for part, row, dim, value in (
        (1, 0, 1, torch.inf),
        (1, 1, 9, -torch.inf),
        (2, 2, 5, torch.nan),
    ):
        inputs[0][part, 1, row, dim] = value
    actual, expected = store(uncompiled, inputs)[1], store(EAGER, inputs)[1]
    assert actual.isfinite().all()
    assert_equal(actual.abs(), expected.abs())


@pytest.mark.parametrize("attended_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_input_of_the_output_product(
    approximate: str, dtype: torch.dtype, attended_dtype: torch.dtype | None, uncompiled: Kernels
) -> None:
    """Check also attention's output in float32, as split keys give it."""
    for n in (1, 2, 33):
        attended = torch.randn(H, n, D).to(attended_dtype or dtype)
        inner = torch.randn(n, 3 * D).to(dtype)
        found = [
            kernels.combine(attended, inner.clone(), approximate) for kernels in (uncompiled, EAGER)
        ]
        assert_equal(*found)
        assert found[0].is_contiguous()


def require_compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"torch.compile needs a C++ compiler on a CPU: {error}")


@torch.inference_mode()
@pytest.mark.filterwarnings("default")  # of torch's own code
def test_compiled_functions(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile both functions by Inductor on the CPU. Each must be one loop that makes only its
    result, so the cache is not copied, and one compilation must serve all numbers of rows. The code
    has no vector instructions, because these and its loops depend on the processor."""
    require_compiler()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kernels = compiled.compiled_kernels.__wrapped__()

    def compare_all() -> None:
        for n in (64, 2, 33):
            inputs = make_inputs(n, 4, torch.float16)
            found = store(kernels, inputs)
            for actual, expected in zip(found, store(EAGER, inputs), strict=True):
                assert_equal(actual, expected)
            rows = torch.randn(H, n, D).half(), torch.randn(n, 3 * D).half()
            combined = kernels.combine(*rows, "none")
            assert_equal(combined, EAGER.combine(*rows, "none"))
            assert found[0].stride(2) == 1 and combined.is_contiguous(), "as attention needs it"

    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        _, codes = run_and_get_code(compare_all)
    assert len(codes) == 2
    for code in codes:
        call = code[code.index("def call(") :]
        assert call.count("= empty_strided_cpu(") == 1
        assert code.count("for(int64_t x0=") == 1
