"""Claim: a target split over ranks writes on devices what one process writes on the CPU, with
graphs and without, and asks no more of rank 0's device.

Each rank is a process with a pretended device of its own. What one rank does and another does not
would be a process that waits for ever; here that is an error.
"""

import json
import zlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import TINY, generate
from test_ranks import on_ranks
from test_torchrun import errors, launched
from torch import Tensor

from cli.metrics import token_ids
from cli.models import load_model
from dynatree import DynaTree
from engine import caches
from engine.caches import require_caches
from engine.checkpoint import DTYPES
from engine.cuda_graphs import KEPT, Shape, ShapedPasses
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX
from engine.passes import Use
from gpt_neox import Scores
from methods import METHODS
from methods.static import Alone
from parallel.led import follow
from parallel.ranks import Ranks, RanksError

from .counts import Counts, count_iterations, load_pair

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
SPLIT = ("ar", "linear", "dynatree")
N_TOKENS = 16
LONGER = 14  # so many prompts need graphs over more slots
Watch = Callable[[Ranks, list], None]  # a change to a rank; it may keep what both must do alike
Work = Callable[[FastGPTNeoX], object]  # what rank 0 does with the target


def watch_nothing(ranks: Ranks, done: list) -> None:
    pass


def on_devices(
    work: Work, dtype: torch.dtype = torch.float32, watch: Watch = watch_nothing
) -> tuple[object, list]:
    """What rank 0's work returns, and what both ranks have done alike."""
    found = on_ranks(2, compute, work, dtype, watch)
    for of_rank in found:
        if isinstance(of_rank, Exception):
            raise of_rank
    (answer, done), (_, done_by_other) = found
    assert done == done_by_other
    return answer, done


def compute(ranks: Ranks, work: Work, dtype: torch.dtype, watch: Watch) -> tuple[object, list]:
    """One rank's part: what work returned, or what this rank raised; and of the split target the
    slots of each cache, what watch kept, then the kernels of each graph."""
    done = []
    make_memory = FastGPTNeoX.make_memory

    def make(model: FastGPTNeoX, n_slots: int) -> tuple[Tensor, Tensor]:
        if model.gpt_neox.share.count > 1:
            done.append(n_slots)
        return make_memory(model, n_slots)

    FastGPTNeoX.make_memory = make  # in a process of its own, as all that is changed here
    watch(ranks, done)
    answer = None
    try:
        with torch.inference_mode():
            if ranks.index:
                follow(ranks)
            else:
                answer = work(load_model(TINY / "target", CUDA, dtype, ranks))
    except (OutOfMemory, RanksError) as error:
        answer = error
    return answer, done + [graph.nodes for graph in KEPT if graph.nodes["nccl all_gather"]]


def write(
    target: FastGPTNeoX,
    draft: FastGPTNeoX | None,
    prompt: list[int],
    method: str,
    graphs: bool = True,
) -> list[int]:
    settings = METHODS[method]()
    return token_ids(generate(target, draft, prompt, settings, N_TOKENS, graphs=graphs))


def write_all(target: FastGPTNeoX) -> tuple[dict[str, list[int]], dict[str, Counts]]:
    """Texts with graphs, over more slots, after a request that was refused, and without graphs; and
    what an iteration asks of the device."""
    _, draft, prompt = load_pair("cuda")
    found = {method: write(target, draft, prompt, method) for method in SPLIT}
    found["dynatree longer"] = write(target, draft, prompt * LONGER, "dynatree")
    counts = {name: count_iterations((target, draft, prompt), name) for name in ("ar", "dynatree")}
    with pytest.raises(OutOfMemory):
        require_caches([(target.pool, 10**9, Use())])  # what is kept is too small, and dropped
    found["linear again"] = write(target, draft, prompt, "linear")
    for method in SPLIT:
        found[f"{method} eager"] = write(target, draft, prompt, method, graphs=False)
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


def keep_hashed(to: list[int], logits: Tensor) -> None:
    """Every row of them."""
    to.extend(zlib.crc32(row.numpy().tobytes()) for row in logits.cpu())


def hash_passes(ranks: Ranks, done: list) -> None:
    """Each pass's scores are done alike."""
    forward = FastGPTNeoX.forward

    def hashing(model: FastGPTNeoX, *arguments: object, **options: object) -> Scores:
        scores = forward(model, *arguments, **options)
        if model.gpt_neox.share.count > 1:
            keep_hashed(done, scores.logits)
        return scores

    FastGPTNeoX.forward = hashing


def write_in_half(target: FastGPTNeoX) -> dict[str, tuple[list[int], list[int]]]:
    """A text, in bfloat16 also strict ones, with what its tokens were chosen from."""
    _, draft, prompt = load_pair("cuda")
    texts = {"plain": (DynaTree(), False)}
    if target.dtype == torch.bfloat16:
        texts |= {"tree": (DynaTree(), True), "alone": (Alone(rows=64), True)}
    found = {}
    for name, (settings, strict) in texts.items():
        logits: list[int] = []
        options = {"strict": strict, "inspect": partial(keep_hashed, logits)}
        steps = generate(target, draft, prompt, settings, N_TOKENS, **options)
        found[name] = token_ids(steps), logits
    return found


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_precisions(dtype: torch.dtype) -> None:
    """All ranks have the same scores, bit for bit; strict ones are ar's."""
    found, done = on_devices(write_in_half, dtype, hash_passes)
    assert len(done) > 5
    assert all(len(ids) == N_TOKENS for ids, _ in found.values())
    if dtype == torch.bfloat16:
        assert found["tree"] == found["alone"] and len(found["alone"][1]) == N_TOKENS


def run_out(ranks: Ranks, done: list) -> None:
    """Rank 1 has room for a short cache, and for two graphs and some of a third."""
    run_pass, n_captured = ShapedPasses.run_pass, 0

    def run_some(passes: ShapedPasses, shape: Shape) -> Tensor | None:
        nonlocal n_captured
        n_captured += torch.cuda.is_current_stream_capturing()
        result = run_pass(passes, shape)
        if n_captured > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    if ranks.index:
        caches.free_memory = lambda device: 10_000_000
        ShapedPasses.run_pass = run_some


def write_linear(target: FastGPTNeoX) -> None:
    _, draft, prompt = load_pair("cuda")
    write(target, draft, prompt, "linear")


def test_what_one_rank_lacks_memory_for() -> None:
    """Caches are alike. Rank 0 says what another has no graphs for."""
    found = on_ranks(2, compute, write_linear, torch.float32, run_out)
    assert [done[0] for _, done in found] == [256, 256]
    said = "no room for the CUDA graphs of 45 tokens; --no-graphs does without"
    assert [str(answer) for answer, _ in found] == [f"rank 1: {said}", "None"]
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
    assert report["graphs"]["n"] > 0 and len(report["token_ids"]) == 8
