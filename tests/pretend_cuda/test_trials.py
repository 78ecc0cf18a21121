"""Tests of the trials of CUDA passes: split keys, and the functions that torch would compile.

The device's attention of a chunk gives nan for a row that attends to none of its keys. On a GPU
the result of such a row is undefined.
"""

import random

import pytest
import torch
from conftest import assert_close, generate, random_config, random_tensors, random_tree, run_tree
from test_fused import BOUNDS
from torch import Tensor

from cli.metrics import token_ids
from engine.layers import attend
from engine.model import FastGPTNeoX
from engine.passes import PassConfig
from engine.split_keys import MIN_CHUNK, SplitMask, attend_in_chunks, count_chunks, split_mask
from methods import METHODS

from .counts import load_pair, make_settings
from .timeline import timeline

pytestmark = pytest.mark.cuda
Pair = tuple[FastGPTNeoX, FastGPTNeoX, list[int]]  # target, draft and a prompt
LENGTHS = (511, 512, 513, 700, 1000)  # committed tokens, also on both sides of a chunk's end
OPERATOR = "_scaled_dot_product_efficient_attention"
on_cuda = pytest.fixture(lambda: load_pair("cuda"), scope="module", name="on_cuda")
on_cpu = pytest.fixture(lambda: load_pair("cpu"), scope="module", name="on_cpu")


def test_chunks_are_merged_to_the_whole() -> None:
    """Check rows that attend to all chunks, to some, and to one slot of the last one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 16, generator=generator).cuda() for n in (5, 512, 512))
    may_attend = torch.rand(5, 512, generator=generator) < 0.3
    may_attend[2, 100:300] = False
    may_attend[3, 128:] = False
    may_attend[4, :511] = False
    may_attend[4, 511] = True
    mask = torch.full((5, 512), -torch.inf).masked_fill_(may_attend, 0.0).cuda()
    expected = attend(q, k, v, mask)
    split = split_mask(mask, 4, 2)
    assert isinstance(split, SplitMask) and split.bias.stride(1) == 0, "one bias for all heads"
    assert_close(attend_in_chunks(q, k, v, split).cpu(), expected.cpu())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_pass_computes_what_it_does_without_chunks(dtype: torch.dtype) -> None:
    """Compare the logits of trees of several sizes after several lengths, replayed."""
    config = random_config(max_position_embeddings=1200)
    tensors = random_tensors(config, 3)
    model = FastGPTNeoX.from_tensors(
        config, {name: t.cuda().to(dtype) for name, t in tensors.items()}
    )
    found: list[list[Tensor]] = []
    for split_keys in (False, True):
        cache = model.new_cache(1200, PassConfig(split_keys=split_keys))
        model.prefill([i % 90 for i in range(1000)], cache)
        cache.capture(500)
        assert {shape.split_keys for shape in cache.passes.captured} == {split_keys}
        rng = random.Random(0)
        found.append([])
        for length in reversed(LENGTHS):
            cache.rewind(length)
            for n in (1, 2, 8, 60, 128):
                found[-1].append(run_tree(model, cache, random_tree(rng, n)).cpu())
    unit = 1.0 if dtype == torch.float32 else float(found[0][0].abs().max())
    for plain, split in zip(*found, strict=True):
        assert float((plain - split).abs().max()) / unit <= BOUNDS[dtype][0]


def test_short_passes_are_shared_with_those_without_chunks() -> None:
    """Check passes over fewer than 512 slots, and that longer ones use the chunks."""
    config = random_config(max_position_embeddings=1200)
    tensors = {name: tensor.cuda() for name, tensor in random_tensors(config, 3).items()}
    model = FastGPTNeoX.from_tensors(config, tensors)
    for n_slots, n_calls in ((256, 0), (512, config.num_hidden_layers)):
        cache = model.new_cache(600, PassConfig(split_keys=True))
        model.prefill([5] * (n_slots - 1), cache)
        with timeline.traced() as sites:
            model.forward(torch.tensor([5]), torch.tensor([cache.length]), cache)
        assert sum(n for site, n in sites.items() if site[1] == OPERATOR) == n_calls


WORDS = [(method, ("split_keys", "compiled")) for method in METHODS]
WORDS += [(method, (word,)) for method in ("ar", "dynatree") for word in WORDS[0][1]]


@pytest.mark.parametrize(("method", "trials"), WORDS)
def test_the_ids_are_those_of_the_cpu(
    method: str, trials: tuple[str, ...], on_cuda: Pair, on_cpu: Pair
) -> None:
    """Check a prompt of more than 512 tokens, so that the passes of both models have chunks. The
    device runs the functions of engine/compiled.py without compiling them."""
    written = []
    for (target, draft, prompt), words in ((on_cpu, ()), (on_cuda, trials)):
        prompt = prompt * 30
        assert len(prompt) > 512
        options = dict.fromkeys(words, True)
        steps = generate(target, draft, prompt, make_settings(method), 20, **options)
        written.append(token_ids(steps))
    assert written[0] == written[1]


def test_the_number_of_chunks() -> None:
    """Check that the blocks of all heads, groups of 64 rows and chunks are at least ENOUGH_BLOCKS
    if the chunks allow it, and no more than needed."""
    assert count_chunks(512, 8, 32) == 4 == 512 // MIN_CHUNK, "128 blocks"
    assert count_chunks(1024, 8, 32) == 4, "as many blocks, and no more chunks"
    assert count_chunks(2304, 64, 32) == 6, "18 chunks of 128 slots are not 4 or 5 equal ones"
    assert count_chunks(2304, 128, 32) == 2
    assert count_chunks(2304, 8, 8) == 18, "of a draft model"
    assert count_chunks(2304, 1024, 32) == 1, "so many rows need no chunks"
