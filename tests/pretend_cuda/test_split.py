"""Claim: a target split over ranks writes on devices what one process writes on the CPU, with
graphs and without, and asks no more of rank 0's device.

Each rank is a process with a pretended device of its own. What one rank does and another does not
would be a process that waits for ever; here that is an error.
"""

from pathlib import Path

import pytest
import torch
from conftest import TINY, generate
from test_ranks import on_ranks
from test_tensor_parallel import compute, strict_logits, with_ranks
from torch import Tensor

import engine.cache
from cli.metrics import token_ids
from engine.cache import require_caches
from engine.cuda_graphs import FixedPasses, Shape
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
LONGER = 14  # so many prompts need graphs over more slots


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
    """Texts with graphs, over more slots, after a request that was refused, and without graphs; and
    what an iteration asks of the device."""
    _, draft, prompt = load_pair("cuda")
    found = {method: write(target, draft, prompt, method) for method in SPLIT}
    found["dynatree longer"] = write(target, draft, prompt * LONGER, "dynatree")
    counts = {name: count_iterations((target, draft, prompt), name) for name in ("ar", "dynatree")}
    with pytest.raises(OutOfMemory):
        require_caches([(target, 10**9, PassConfig())])  # what is kept is too small, and dropped
    found["linear again"] = write(target, draft, prompt, "linear")
    for method in SPLIT:
        found[f"{method} eager"] = write(target, draft, prompt, method, graphs=False)
    return found, counts


def test_texts_and_counts() -> None:
    found, counts = with_ranks(2, TARGET, write_all, device=CUDA)
    target, draft, prompt = load_pair("cpu")
    for name, ids in found.items():
        method, _, way = name.partition(" ")
        assert ids == write(target, draft, prompt * (LONGER if way == "longer" else 1), method)
    alone = load_pair("cuda")
    for method, of_split in counts.items():
        of_one = count_iterations(alone, method)
        for kind in ("kernel", "replay", "sync", "h2d"):
            assert of_split.of_each(kind) == of_one.of_each(kind), (method, kind)


def test_strict_holds_bit_for_bit() -> None:
    trees, ar = with_ranks(2, TARGET, strict_logits, torch.bfloat16, CUDA)
    assert trees == ar


def run_out(ranks: Ranks) -> object:
    """Rank 1 has room for a short cache, and for two graphs and some of a third."""
    run, n_captured = FixedPasses.run, 0

    def run_some(passes: FixedPasses, model: FastGPTNeoX, shape: Shape) -> Results:
        nonlocal n_captured
        n_captured += torch.cuda.is_current_stream_capturing()
        result = run(passes, model, shape)
        if n_captured > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    if ranks.rank:
        engine.cache.free_memory = lambda device: 10_000_000
        FixedPasses.run = run_some
    return compute(ranks, TARGET, write_refused, torch.float32, CUDA)


def write_refused(target: FastGPTNeoX, folder: Path) -> int:
    """The slots that the target's cache has."""
    _, draft, prompt = load_pair("cuda")
    said = "^rank 1: no room for the CUDA graphs of 45 tokens; --no-graphs does without"
    with pytest.raises(OutOfMemory, match=said):
        write(target, draft, prompt, "linear")
    return target.kept[0].kv.shape[3]


def test_what_one_rank_lacks_memory_for() -> None:
    """Rank 0's cache is no larger. It says what another has no graphs for."""
    assert on_ranks(2, run_out) == [256, None]
