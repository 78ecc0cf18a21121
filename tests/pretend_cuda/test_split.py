"""Tests that a target split over ranks generates, on devices, what one process generates on a CPU,
with and without CUDA graphs. Rank 0 launches, waits and copies as often as one process does.

Each rank is a process with a pretended device of its own. A collective that not all ranks join
would make a process wait for ever; here it is an error.
"""

from pathlib import Path

import pytest
import torch
from conftest import TINY, generate
from test_ranks import run_in_processes
from test_tensor_parallel import compute, strict_logits, with_ranks
from torch import Tensor

import engine.cache
from cli.metrics import token_ids
from engine.cache import require_caches
from engine.cuda_graphs import FixedPasses, PassShape
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX
from engine.passes import PassConfig
from engine.ranks import Ranks
from methods import METHODS

from .counts import Counts, count_iterations, load_pair

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
TARGET = TINY / "target"
Results = tuple[Tensor, Tensor | None]
SPLIT = ("ar", "linear", "dynatree")
N_REPEATED = 14  # a prompt repeated 14 times needs graphs over more slots


def write(
    target: FastGPTNeoX,
    draft: FastGPTNeoX | None,
    prompt: list[int],
    method: str,
    graphs: bool = True,
) -> list[int]:
    settings = METHODS[method]()
    return token_ids(generate(target, draft, prompt, settings, 16, graphs=graphs))


def write_all(target: FastGPTNeoX, folder: Path) -> tuple[dict[str, list[int]], dict[str, Counts]]:
    """Generate texts with graphs, over more slots, after a refused request and without graphs.
    Returns the ids by case, and the counts per iteration of two methods."""
    _, draft, prompt = load_pair("cuda")
    found = {method: write(target, draft, prompt, method) for method in SPLIT}
    found["dynatree longer"] = write(target, draft, prompt * N_REPEATED, "dynatree")
    counts = {name: count_iterations((target, draft, prompt), name) for name in ("ar", "dynatree")}
    with pytest.raises(OutOfMemory):
        require_caches([(target, 10**9, PassConfig())])  # the kept cache is too small: freed
    found["linear again"] = write(target, draft, prompt, "linear")
    for method in SPLIT:
        found[f"{method} eager"] = write(target, draft, prompt, method, graphs=False)
    return found, counts


def test_texts_and_counts() -> None:
    found, counts = with_ranks(2, TARGET, write_all, device=CUDA)
    target, draft, prompt = load_pair("cpu")
    for name, ids in found.items():
        method, _, case = name.partition(" ")
        assert ids == write(target, draft, prompt * (N_REPEATED if case == "longer" else 1), method)
    pair = load_pair("cuda")
    for method, split in counts.items():
        own = count_iterations(pair, method)
        for kind in ("kernel", "replay", "sync", "h2d"):
            assert split.per_iteration(kind) == own.per_iteration(kind), (method, kind)


def test_strict_logits_are_equal_bit_for_bit() -> None:
    trees, ar = with_ranks(2, TARGET, strict_logits, torch.bfloat16, CUDA)
    assert trees == ar


def run_out_of_memory(ranks: Ranks) -> object:
    """Generate while rank 1 has memory for a short cache, and for two graphs but not a third."""
    run, n_captured = FixedPasses.run, 0

    def run_some(passes: FixedPasses, model: FastGPTNeoX, shape: PassShape) -> Results:
        nonlocal n_captured
        n_captured += torch.cuda.is_current_stream_capturing()
        result = run(passes, model, shape)
        if n_captured > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    if ranks.rank:
        engine.cache.free_memory = lambda device: 10_000_000
        FixedPasses.run = run_some
    return compute(ranks, TARGET, write_without_memory, torch.float32, CUDA)


def write_without_memory(target: FastGPTNeoX, folder: Path) -> int:
    """Check the error if there is no memory for graphs, and return the slots of the cache."""
    _, draft, prompt = load_pair("cuda")
    message = "^rank 1: no memory for the CUDA graphs of 45 tokens; use --no-graphs"
    with pytest.raises(OutOfMemory, match=message):
        write(target, draft, prompt, "linear")
    return target.reusable[0].kv.shape[3]


def test_one_rank_without_memory_for_graphs() -> None:
    """Check that rank 0's cache has only the slots that rank 1 has room for, and that rank 0
    reports the error of rank 1."""
    assert run_in_processes(2, run_out_of_memory) == [256, None]
