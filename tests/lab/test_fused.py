"""Tests of fused layers against the reference model, and of the linear layer of each matrix.

Also checks on this machine that passes of strict_rows or more are batch-invariant.
The oracle is the reference model of gpt_neox.py, which the golden files test.
"""

import platform
import random
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from small import GOLDEN, TINY, assert_close, prefilled, random_config, random_tensors, run_tree
from torch import Tensor
from trees import make_tree, random_tree

from dynatree_lab.engine.checkpoint import CheckpointError, load_tensors
from dynatree_lab.engine.invariance import strict_rows
from dynatree_lab.engine.layers import Affine, fold
from dynatree_lab.engine.linear import FbgemmLinear, Linear, OneDnnLinear, make_linear
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.engine.strict import STRICT
from gpt_neox import Config, GPTNeoX, read_config

Weights = tuple[Config, dict[str, Tensor]]
CPU = torch.device("cpu")
ROW_COUNTS = (1, 2, 3, 8, 33, 128)
# The largest allowed differences between logits: of the fused layers from the reference, and of
# either from the reference in float32. In half precision they are relative to the largest logit.
# Measured differences are half of these or less: 2.7e-5; 0.012 and 0.022; 0.0015 and 0.0025
BOUNDS = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (0.024, 0.044),
    torch.float16: (0.003, 0.005),
}
on_x86_linux = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="torch's product may be used"
)


def load_weights(folder: Path) -> Weights:
    """Return a checkpoint's weights, which are all exact in float16."""
    config = read_config(folder)
    return config, dict(load_tensors(folder, config, CPU, torch.float32))


def load_inexact_weights(folder: Path) -> Weights:
    """Return a checkpoint's weights, scaled so that they are not exact in float16."""
    config, tensors = load_weights(folder)
    return config, {name: 1.01 * tensor for name, tensor in tensors.items()}


def random_weights(**changes: object) -> Weights:
    config = random_config(**changes)
    return config, random_tensors(config, 3)


SOURCES: dict[str, Callable[[], Weights]] = {
    folder.name: partial(load_weights, folder) for folder in [*GOLDEN, TINY / "draft"]
}
SOURCES |= {
    "inexact target": partial(load_inexact_weights, TINY / "target"),
    "odd and without bias": partial(random_weights, intermediate_size=63, attention_bias=False),
    "sequential and tied": partial(
        random_weights, use_parallel_residual=False, tie_word_embeddings=True
    ),
}


def build(
    weights: Weights, dtype: torch.dtype = torch.float32, kind: type[GPTNeoX] = FastGPTNeoX
) -> GPTNeoX:
    """Return a model with its own copy of the weights."""
    config, tensors = weights
    copies = {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}
    return kind.from_tensors(config, copies)


@torch.inference_mode()
def all_logits(model: GPTNeoX) -> Tensor:
    """Return the logits [rows, V] of a prompt, and of trees of all ROW_COUNTS after it."""
    rng = random.Random(0)
    n_ids = model.config.vocab_size
    prompt = [rng.randrange(n_ids) for _ in range(40)]
    cache = model.new_cache(len(prompt) + ROW_COUNTS[-1])
    found = [model.prefill(prompt, cache)]
    for n in ROW_COUNTS:
        found.append(run_tree(model, cache, random_tree(rng, n, n_ids)))
    return torch.cat(found)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_fused_layers_compute_what_plain_ones_do(source: Callable[[], Weights]) -> None:
    weights = source()
    exact = all_logits(build(weights, kind=GPTNeoX))
    for dtype, (apart, off) in BOUNDS.items():
        plain = all_logits(build(weights, dtype, GPTNeoX))
        fused = all_logits(build(weights, dtype))
        unit = 1.0 if dtype == torch.float32 else float(exact.abs().max())
        for one, other, bound in ((fused, plain, apart), (fused, exact, off), (plain, exact, off)):
            difference = float((one - other).abs().max()) / unit
            assert difference <= bound, dtype  # False also if one is nan


def test_tf32_is_off_once_a_model_is_made() -> None:
    """Check the precision of float32 products on CUDA. Some environments enable TF32, which keeps
    10 bits."""
    torch.set_float32_matmul_precision("high")
    build(random_weights())
    assert torch.get_float32_matmul_precision() == "highest"


KINDS = [  # dtype, whether it is exact in float16, [out, in] near the size limits, expected class
    (torch.float32, True, (96, 64), FbgemmLinear),
    (torch.float32, True, (512, 512), FbgemmLinear),
    (torch.float32, True, (513, 512), FbgemmLinear),
    (torch.float16, True, (512, 512), FbgemmLinear),
    (torch.float16, True, (513, 512), FbgemmLinear),
    (torch.float32, False, (255, 512), Linear),
    (torch.float32, False, (256, 512), OneDnnLinear),
    (torch.bfloat16, True, (511, 512), FbgemmLinear),
    (torch.bfloat16, False, (511, 512), Linear),
    (torch.bfloat16, True, (512, 512), OneDnnLinear),
]


@on_x86_linux
@pytest.mark.parametrize(("dtype", "is_exact", "shape", "kind"), KINDS, ids=str)
def test_each_matrix_has_its_linear_layer(
    dtype: torch.dtype, is_exact: bool, shape: tuple[int, int], kind: type
) -> None:
    """Check the class, because any other one would also be right, only slower."""
    weight = torch.ones(shape, dtype=dtype)
    if not is_exact:
        weight[0, 0] = 1e-9
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kind = Linear if kind is OneDnnLinear else kind
    assert type(make_linear(weight, None)) is kind


PACKING = ["fbgemm_pack_gemm_matrix_fp16", "ops.quantized.linear_prepack_fp16"]
PACKING += ["ops.mkldnn._reorder_linear_weight"]
MULTIPLYING = ["fbgemm_linear_fp16_weight_fp32_activation", "ops.quantized.linear_dynamic_fp16"]
MULTIPLYING += ["ops.mkldnn._linear_pointwise"]


@pytest.mark.parametrize("refused", [PACKING, MULTIPLYING], ids=["packing", "multiplying"])
@pytest.mark.parametrize("source", [load_weights, load_inexact_weights])
def test_refused_operators_are_replaced_by_torchs_product(
    source: Callable[[Path], Weights], refused: list[str], monkeypatch: MonkeyPatch
) -> None:
    """Simulate a processor or a build of torch that has none of the operators."""

    def refuse(*_: object) -> None:
        raise RuntimeError("not on this processor")

    refuse.default = refuse
    weights = source(TINY / "draft")  # small matrices, and a large head
    expected = all_logits(build(weights))
    for name in refused:
        owner, _, operator = f"torch.{name}".rpartition(".")
        monkeypatch.setattr(attrgetter(owner.removeprefix("torch."))(torch), operator, refuse)
    model = build(weights)
    linears = [each for layer in model.gpt_neox.layers for each in layer.linears]
    assert {type(linear) for linear in [model.embed_out.linear, *linears]} == {Linear}
    assert_close(all_logits(model), expected)


def test_a_norm_is_folded_into_the_matrix_after_it() -> None:
    """Compare the folded matrix, which a GPU uses, with norm and matrix. float16 can overflow."""
    generator = torch.Generator().manual_seed(0)
    norm = Affine(*torch.randn(2, 32, generator=generator))
    after = Affine(torch.randn(48, 32, generator=generator), torch.randn(48, generator=generator))
    x = F.layer_norm(torch.randn(5, 32, generator=generator), [32])
    assert_close(F.linear(x, *fold(norm, after)), F.linear(x * norm.weight + norm.bias, *after))
    large = Affine(200 * after.weight.half(), after.bias.half())
    fold(norm, large)
    with pytest.raises(CheckpointError, match="overflows torch.float16 when its layer norm"):
        fold(Affine(400 * norm.weight, norm.bias), large)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_are_equal_at_every_batch_invariant_count(dtype: torch.dtype) -> None:
    """Compare the bits of rows in passes of different sizes, after a prompt longer than one block
    of strict attention. The matrices are stored in float16 or, for bfloat16, packed."""
    model = build(load_weights(TINY / "draft"), dtype)
    rng = random.Random(0)
    prompt = [rng.randrange(4096) for _ in range(300)]
    pass_config = PassConfig(128, strict_rows(model, 128), masks=STRICT)
    cache = prefilled(model, prompt, 428, pass_config)
    tokens = rng.sample(range(4096), 127)  # siblings

    def of_children(rows: list[int]) -> Tensor:
        tree = make_tree([0] + [tokens[row] for row in rows], [-1] + [0] * len(rows))
        return run_tree(model, cache, tree)[1:]

    whole = of_children(list(range(127)))
    for n in (*range(1, 20), 31, 32, 33, 63, 64, 65, 126):  # few rows are padded to min_rows
        rows = rng.sample(range(127), n)
        assert torch.equal(of_children(rows), whole[rows]), n
