"""Tests that a replay computes what the CPU computes, whatever was replayed before it.

They compare logits, because greedy text hides errors: with a wrong end of the mask, sixty tokens
came out the same.
"""

import pytest
import torch
from fast import generate
from small import assert_close, random_config, random_tensors
from torch import Tensor

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.sampler import Sampling

pytestmark = pytest.mark.cuda
PREFIX = [i % 90 for i in range(260)]


def make_model(device: str) -> FastGPTNeoX:
    config = random_config(max_position_embeddings=600)
    tensors = {name: tensor.to(device) for name, tensor in random_tensors(config, 3).items()}
    return FastGPTNeoX.from_tensors(config, tensors)


def open_cache(model: FastGPTNeoX, config: PassConfig | None = None) -> FastCache:
    """Return a cache that holds PREFIX; on CUDA its passes are captured."""
    cache = model.new_cache(400, config)
    model.prefill(PREFIX, cache)
    model.capture(cache, 10)
    return cache


def run_tree(model: FastGPTNeoX, cache: FastCache, n: int) -> Tensor:
    """Return the logits of n rows: two below the last token, all others below the first of them."""
    mask = torch.eye(n, dtype=torch.bool)
    mask[2:, 0] = True
    depths = torch.ones(n, dtype=torch.int64)
    depths[2:] = 2
    tokens = torch.arange(n) % 90
    return model.forward(tokens, depths + cache.length, cache, mask).cpu()


def test_a_pass_sees_nothing_of_the_one_before_it() -> None:
    """Compare long and short, wide and narrow passes with those of the CPU."""
    on_cuda = make_model("cuda")
    on_cpu = make_model("cpu")
    captured = open_cache(on_cuda)
    plain = open_cache(on_cpu)
    for length, n in ((260, 60), (255, 3), (250, 1), (20, 1), (20, 7), (10, 128), (5, 1)):
        captured.rewind(length)
        plain.rewind(length)
        assert_close(run_tree(on_cuda, captured, n), run_tree(on_cpu, plain, n))


def test_a_draft_is_ranked_at_its_temperature() -> None:
    """Check that graphs are captured for the temperature, because each ranks at only one."""
    target, draft = make_model("cuda"), make_model("cuda")
    cold = Sampling(0.0, draft_temperature=0.6)
    list(generate(target, draft, PREFIX[:20], DySpec(), 10, sampling=cold))
    for model, temperature in ((target, 1.0), (draft, 0.6)):
        shapes = model.reusable[0].captured
        assert {shape.ranking.temperature for shape in shapes} == {temperature}
