"""Claim: a target split over ranks writes on devices what one process writes on the CPU, with
graphs and without, and asks no more of rank 0's device.

Each rank is a process with a pretended device of its own. What one rank does and another does not
would be a process that waits for ever; here that is an error.
"""

import json
import zlib
from collections.abc import Callable

import pytest
import torch
from conftest import TINY
from test_ranks import on_ranks
from test_torchrun import errors, launched
from torch import Tensor

from cli.metrics import token_ids
from cli.models import load_target
from draft_tree import Settings
from dynatree import DynaTree, generate
from engine import caches, cuda_graphs
from engine.caches import require_caches
from engine.checkpoint import DTYPES
from engine.cuda_graphs import KEPT
from engine.memory import OutOfMemory
from engine.passes import Use
from engine.scores import Scores
from gpt_neox import GPTNeoX
from methods import METHODS
from methods.static import Alone
from parallel.ranks import Ranks, RanksError

from .counts import Counts, count_iterations, load_pair

pytestmark = pytest.mark.cuda
Prepare = Callable[[int, list], None]  # changes a rank's process; may add to what it has done
CUDA = torch.device("cuda")
SPLIT = ("ar", "linear", "dynatree")
N_TOKENS = 16
LONGER = 14  # so many prompts need graphs over more slots


def on_devices(
    work: Callable, dtype: torch.dtype = torch.float32, prepare: Prepare | None = None
) -> tuple[object, list]:
    """What rank 0's work(target) returns, and what both ranks have done alike."""
    found = on_ranks(2, compute, work, dtype, prepare)
    for of_rank in found:
        if isinstance(of_rank, Exception):
            raise of_rank
    (answer, done), (_, done_by_other) = found
    assert done == done_by_other
    return answer, done


def compute(
    ranks: Ranks, work: Callable, dtype: torch.dtype, prepare: Prepare | None
) -> tuple[object, list]:
    """One rank's part: what work returned or raised; and of the split target the slots of each
    cache, then the kernels of each graph."""
    done = []
    make_memory = GPTNeoX.make_memory

    def make(model: GPTNeoX, n_slots: int) -> tuple[Tensor, Tensor]:
        if model.gpt_neox.share.count > 1:
            done.append(n_slots)
        return make_memory(model, n_slots)

    GPTNeoX.make_memory = make  # in a process of its own, as all that is changed here
    if prepare:
        prepare(ranks.index, done)
    answer = None
    try:
        with torch.inference_mode():
            answer = work(load_target(TINY / "target", CUDA, dtype, ranks))
    except (OutOfMemory, RanksError) as error:
        answer = error
    done += [graph.nodes for graph in KEPT if graph.nodes["nccl all_gather"]]
    return answer, done


def draft_of(target: GPTNeoX) -> tuple[GPTNeoX | None, list[int]]:
    """The draft, which rank 0 alone has, and the prompt."""
    _, draft, prompt = load_pair("cuda")
    return None if target.share.index else draft, prompt


def write(target: GPTNeoX, draft: GPTNeoX | None, prompt: list[int], method: str) -> list[int]:
    return token_ids(generate(target, draft, prompt, METHODS[method](), N_TOKENS))


def write_all(target: GPTNeoX) -> tuple[dict[str, list[int]], dict[str, Counts]]:
    """Texts with graphs, over more slots, after a request that was refused, and without graphs; and
    what an iteration asks of the device."""
    draft, prompt = draft_of(target)
    found = {method: write(target, draft, prompt, method) for method in SPLIT}
    found["dynatree longer"] = write(target, draft, prompt * LONGER, "dynatree")
    counts = {name: count_iterations((target, draft, prompt), name) for name in ("ar", "dynatree")}
    with pytest.raises(OutOfMemory):
        require_caches([(target.pool, 10**9, Use())])  # what is kept is too small, and dropped
    found["linear again"] = write(target, draft, prompt, "linear")
    for model in filter(None, (target, draft)):
        model.pool.has_graphs = False
    for method in SPLIT:
        found[f"{method} eager"] = write(target, draft, prompt, method)
    return found, counts


def test_texts_and_counts() -> None:
    (found, counts), done = on_devices(write_all)
    n_slots = [made for made in done if isinstance(made, int)]
    assert len(n_slots) == 2 and min(n_slots) > 2048  # one for all texts, until it was dropped
    target, draft, prompt = load_pair("cpu")
    for name, ids in found.items():
        method, _, way = name.partition(" ")
        assert ids == write(target, draft, prompt * (LONGER if way == "longer" else 1), method)
    alone = load_pair("cuda")
    for method, of_split in counts.items():
        of_one = count_iterations(alone, method)
        for kind in ("kernel", "replay", "sync", "h2d"):
            assert of_split.of_each(kind) == of_one.of_each(kind), (method, kind)


def hash_scores(rank: int, done: list) -> None:
    """Also keep of each pass what every rank must have alike."""
    forward = GPTNeoX.forward

    def hashing(model: GPTNeoX, *arguments: object, **options: object) -> Scores:
        scores = forward(model, *arguments, **options)
        if model.gpt_neox.share.count > 1:
            done.append(zlib.crc32(scores.logits.cpu().numpy().tobytes()))
        return scores

    GPTNeoX.forward = hashing


def write_in_half(target: GPTNeoX) -> dict[str, tuple[list[int], list[bytes]]]:
    """A text, in bfloat16 also strict ones, with what its tokens were chosen from."""
    draft, prompt = draft_of(target)
    found = {"plain": inspected(target, draft, prompt, DynaTree(), strict=False)}
    if target.dtype == torch.bfloat16:
        for settings in (DynaTree(), Alone(rows=64)):
            found[type(settings).__name__] = inspected(target, draft, prompt, settings, True)
    return found


def inspected(
    target: GPTNeoX, draft: GPTNeoX | None, prompt: list[int], settings: Settings, strict: bool
) -> tuple[list[int], list[bytes]]:
    logits: list[bytes] = []

    def keep(rows: Tensor) -> None:
        logits.extend(row.numpy().tobytes() for row in rows.cpu())

    steps = generate(target, draft, prompt, settings, N_TOKENS, strict=strict, inspect=keep)
    return token_ids(steps), logits


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_precisions(dtype: torch.dtype) -> None:
    """All ranks have the same scores, bit for bit; strict ones are ar's."""
    found, done = on_devices(write_in_half, dtype, prepare=hash_scores)
    assert len(done) > 5
    assert all(len(ids) == N_TOKENS for ids, _ in found.values())
    if dtype == torch.bfloat16:
        assert found["DynaTree"] == found["Alone"] and len(found["Alone"][1]) == N_TOKENS


def lack_memory(rank: int, done: list) -> None:
    """Rank 1 has room for a short cache, and for two graphs and some of a third."""
    if rank == 0:
        return
    record, n_captured = cuda_graphs.record, 0
    caches.free_memory = lambda device: 10_000_000

    def failing(run: Callable, *rest: object) -> cuda_graphs.Captured:
        nonlocal n_captured
        n_captured += 1

        def run_out() -> None:
            run()
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return record(run_out if n_captured > 2 else run, *rest)

    cuda_graphs.record = failing


def write_linear(target: GPTNeoX) -> None:
    draft, prompt = draft_of(target)
    write(target, draft, prompt, "linear")


def test_what_one_rank_lacks_memory_for() -> None:
    """Caches are alike. Without memory for its graphs a rank ends; the other says so at once."""
    found = on_ranks(2, compute, write_linear, torch.float32, lack_memory)
    assert [done[0] for _, done in found] == [256, 256]
    said = "no room for the CUDA graphs of 45 tokens; --no-graphs does without"
    assert [str(answer) for answer, _ in found] == [f"rank 1: {said}", said]
    assert len(found[0][1]) > len(found[1][1])


def test_under_torchrun() -> None:
    """As users start and end it: nothing is left waiting for graphs that are still there."""
    words = ["--device", "cuda", "--dtype", "float32", "--target", str(TINY / "target"), "--json"]
    words += ["--method", "ar", "--prompt", "The ship sailed at dawn", "--max-new-tokens", "8"]
    with launched(2, "dynatree.py", *words) as launch:
        status, out, lines = launch.ended()
    report = json.loads(out)
    assert status == 0 and not errors(lines), lines
    assert "2 ranks on cuda:0, float32" in lines[0]
    assert report["graphs"]["n"] == 2 and len(report["token_ids"]) == 8
