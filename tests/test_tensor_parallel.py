"""Tests of a target that several ranks compute: numbers, texts, messages, and the ranks' shards."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from inspect import isroutine
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import (
    append,
    generate,
    random_config,
    random_tensors,
    write_checkpoint,
)
from numpy import ndarray
from test_ranks import run_in_processes
from torch import Tensor

import engine.cache
from cli.metrics import token_ids
from cli.models import load_model
from draft_tree import Settings
from dynatree import DynaTree
from engine.cache import FastCache, cache_bytes
from engine.checkpoint import CheckpointError, load_tensors, read_config
from engine.driver import BROADCAST_METHODS, run_worker
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX, weight_bytes
from engine.passes import PassConfig
from engine.ranks import MESSAGE_BYTES, Ranks, RanksError
from engine.scores import Ranking, Scores
from engine.tensor_parallel import Shard
from gpt_neox import PREFILL_CHUNK, GPTNeoX, KVCache
from methods.static import Chain, PaddedAutoregressive

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
SHAPES = [
    (2, {}),
    (4, {"tie_word_embeddings": True, "vocab_size": 98, "intermediate_size": 72}),
    (2, {"use_parallel_residual": False, "vocab_size": 97}),
    (4, {"attention_bias": False, "hidden_act": "gelu_new"}),
]
Work = Callable[[FastGPTNeoX, Path], object]  # of rank 0, given the target and its folder


def write_small_checkpoint(folder: Path, **changes: object) -> Path:
    """Write a random model of four heads and return its folder."""
    config = random_config(num_attention_heads=4, hidden_size=64, intermediate_size=128)
    config = replace(config, **changes)
    return write_checkpoint(folder, config, random_tensors(config, 0))


def compute(ranks: Ranks, folder: Path, work: Work, dtype: torch.dtype) -> object:
    """Run `work` on rank 0 and return its result. The other ranks make the target's calls."""
    if ranks.rank:
        with suppress(RanksError):  # if rank 0 ends within a pass
            run_worker(ranks)
        return None
    with torch.inference_mode():
        return work(load_model(folder, CPU, dtype, ranks), folder)


def with_ranks(count: int, folder: Path, work: Work, dtype: torch.dtype = torch.float32) -> object:
    """Return what `work` returns for a target that `count` ranks compute."""
    return run_in_processes(count, compute, folder, work, dtype)[0]


def fail_within(target: FastGPTNeoX, folder: Path) -> list[str]:
    """Return the errors of two calls after one that has failed on rank 0 only."""

    def fail(tokens: list[int], scores: Scores) -> None:
        raise KeyboardInterrupt

    messages = []
    cache = target.new_cache(64, PassConfig(reports_prompt=True))
    cache.on_pass.append(fail)
    with suppress(KeyboardInterrupt), cache:
        target.prefill(PROMPT, cache)
    for call in (lambda: append(target, [9], cache), lambda: target.new_cache(64)):
        with pytest.raises(RanksError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_ranks_out_of_step_say_so(tmp_path: Path) -> None:
    """Check the error. Without it, the ranks would wait for each other forever."""
    line = "the ranks are out of sync: an earlier call on rank 0 has failed"
    assert with_ranks(2, write_small_checkpoint(tmp_path), fail_within) == [line] * 2


def write_at_once(target: FastGPTNeoX, folder: Path) -> list[list[int]]:
    """Write four texts in one thread and in four threads, each with a copy of the target."""
    draft = FastGPTNeoX.from_pretrained(folder)

    def text(settings: Settings) -> list[int]:
        with torch.inference_mode():
            return write(copy.copy(target), draft, settings)

    methods = [DynaTree(), Chain(K=3), PaddedAutoregressive(), DynaTree(B_max=2)]
    with ThreadPoolExecutor(4) as threads:
        return [[text(settings) for settings in methods], list(threads.map(text, methods))]


def test_threads_take_turns(tmp_path: Path) -> None:
    one, four = with_ranks(2, write_small_checkpoint(tmp_path), write_at_once)
    assert one == four


def write(
    target: FastGPTNeoX, draft: FastGPTNeoX | None, settings: Settings, **options: object
) -> list[int]:
    return token_ids(generate(target, draft, PROMPT, settings, max_new_tokens=20, **options))


def logits_of(target: FastGPTNeoX, folder: Path) -> list[ndarray]:
    """Return the target's top 4 after each token of a prompt, and the logits of each kind of pass,
    with commits and rewinds between them."""
    found = []
    cache = target.new_cache(64, PassConfig(ranking=Ranking(4), reports_prompt=True))
    cache.on_pass.append(lambda ids, scores: found.append(scores.top_ids(4)))
    found.append(target.prefill(PROMPT, cache).numpy())
    cache.on_pass.clear()
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    tree = (torch.tensor([5, 6, 7, 8]), torch.tensor([11, 12, 12, 13]))
    found.append(target.forward(*tree, cache, mask).numpy())
    cache.commit([0, 2, 3])
    found.append(append(target, [9, 10], cache).numpy())
    cache.rewind(15)
    found.append(append(target, [11, 12], cache).numpy())
    return found


@pytest.mark.parametrize(("count", "changes"), SHAPES)
def test_logits_are_those_of_one_process(
    count: int, changes: dict[str, object], tmp_path: Path
) -> None:
    write_small_checkpoint(tmp_path, **changes)
    expected = logits_of(FastGPTNeoX.from_pretrained(tmp_path), tmp_path)
    found = with_ranks(count, tmp_path, logits_of)
    assert len(found) == len(expected) == 5
    for actual, right in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(actual, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [2, 4])
def test_each_rank_holds_only_its_shard(count: int, tmp_path: Path) -> None:
    """Check the size of a rank's weights and caches. 97 ids are not divisible by the rank count."""
    config = read_config(write_small_checkpoint(tmp_path, vocab_size=97))
    whole = weight_bytes(config, torch.float32)
    for index in range(count):
        shard = Shard(index, count)
        part = dict(load_tensors(tmp_path, config, CPU, torch.float32, shard))
        n_bytes = sum(tensor.nbytes for tensor in part.values())
        assert n_bytes == weight_bytes(config, torch.float32, shard) < 1.1 * whole / count
        model = FastGPTNeoX.from_pretrained(tmp_path, shard=shard)
        assert model.new_cache(10).kv.shape[2] == 4 // count
        assert cache_bytes(model, 10) == model.new_cache(10).kv.nbytes


def strict_logits(target: FastGPTNeoX, folder: Path) -> list[tuple]:
    """Return ids and logits of strict text, by trees and by ar."""
    draft = FastGPTNeoX.from_pretrained(folder, dtype=torch.bfloat16)
    found = []
    for settings in (DynaTree(), PaddedAutoregressive(rows=64)):
        logits: list[Tensor] = []
        ids = write(target, draft, settings, strict=True, inspect=logits.append)
        found.append((ids, torch.cat(logits).tolist()))
    return found


def test_strict_holds_bit_for_bit(tmp_path: Path) -> None:
    trees, ar = with_ranks(4, write_small_checkpoint(tmp_path), strict_logits, torch.bfloat16)
    assert trees == ar


def sum_of_equal_rows(ranks: Ranks) -> ndarray:
    generator = torch.Generator().manual_seed(ranks.rank)
    row = torch.randn(64, generator=generator, dtype=torch.bfloat16)
    return ranks.shard(CPU).sum(row.repeat(64, 1), in_order=True).float().numpy()


def test_a_sum_in_order_does_not_depend_on_the_row() -> None:
    """Add up equal rows. gloo's own sum begins with another rank for each quarter of the rows."""
    for total in run_in_processes(4, sum_of_equal_rows):
        assert (total == total[:1]).all()


def count_broadcasts(target: FastGPTNeoX, folder: Path) -> tuple[list[int], int]:
    """Return the lengths of the broadcasts of some iterations, and the number of iterations."""
    draft = FastGPTNeoX.from_pretrained(folder)
    steps = generate(target, draft, PROMPT, DynaTree(), max_new_tokens=60)
    next(steps)
    sizes = []
    broadcast = dist.broadcast

    def counting(buffer: Tensor, **options: object) -> None:
        sizes.append(len(buffer))
        broadcast(buffer, **options)

    dist.broadcast = counting  # this process ends after the text
    n_steps = len(list(steps))
    return sizes, n_steps


def test_an_iteration_is_two_broadcasts(tmp_path: Path) -> None:
    """Count one broadcast for the pass and one for its commit. The last one closes the cache."""
    sizes, n_steps = with_ranks(2, write_small_checkpoint(tmp_path), count_broadcasts)
    assert n_steps > 5 and sizes == [MESSAGE_BYTES] * (2 * n_steps + 1)


def find_overflow(target: FastGPTNeoX, folder: Path) -> list[float]:
    """Return the highest logits of three rows, the second of which is token 1, and of a prompt with
    token 1 in its first chunk."""
    cache = target.new_cache(PREFILL_CHUNK + 10)
    rows = torch.tensor([2, 1, 3])
    target.forward(rows, torch.arange(3), cache)
    of_rows = cache.scores.highest[0].tolist()
    prompt = [2, 1] + [3] * PREFILL_CHUNK
    target.prefill(prompt, cache)
    return [*of_rows, cache.scores.highest[0].item()]


def test_what_overflows_on_another_rank_is_seen(tmp_path: Path) -> None:
    """Make token 1 overflow the last head in float16. Rank 1 has this head, and rank 0 must find
    nan in the scores."""
    config = read_config(write_small_checkpoint(tmp_path))
    tensors = random_tensors(config, 0)
    tensors["gpt_neox.embed_in.weight"][1, 5] = 100.0
    qkv = tensors["gpt_neox.layers.0.attention.query_key_value.weight"]
    qkv.view(4, 3, 16, 64)[3, 2, 7] = 0.0
    qkv.view(4, 3, 16, 64)[3, 2, 7, 5] = 20_000.0
    write_checkpoint(tmp_path, config, tensors)
    found = with_ranks(2, tmp_path, find_overflow, torch.float16)
    assert numpy.isnan(found).tolist() == [False, True, False, True]


def refuse_once(ranks: Ranks, folder: Path) -> object:
    """Run write_long_and_short while rank 1 has no memory for the long text."""
    require = engine.cache.require_memory

    def require_memory(n_bytes: int, device: torch.device, what: str) -> None:
        if ranks.rank and n_bytes > 200_000:
            raise OutOfMemory(f"{what} do not fit")
        require(n_bytes, device, what)

    engine.cache.require_memory = require_memory
    return compute(ranks, folder, write_long_and_short, torch.float32)


def write_long_and_short(target: FastGPTNeoX, folder: Path) -> list[int]:
    """Check the error of a text that does not fit, and return the ids of a shorter one after it."""
    with pytest.raises(OutOfMemory, match="^rank 1: a cache of 1012 tokens do not fit"):
        list(generate(target, None, PROMPT, PaddedAutoregressive(), max_new_tokens=1000))
    return write(target, None, PaddedAutoregressive())


def test_an_out_of_memory_error_of_another_rank_is_reported_and_survived(tmp_path: Path) -> None:
    """Check that later calls work. --compare goes on if a float32 model does not fit."""
    text, _ = run_in_processes(2, refuse_once, write_small_checkpoint(tmp_path))
    assert text == write(FastGPTNeoX.from_pretrained(tmp_path), None, PaddedAutoregressive())


def test_what_cannot_be_split(tmp_path: Path) -> None:
    folder = write_small_checkpoint(tmp_path, intermediate_size=126)
    with pytest.raises(CheckpointError, match="126 columns of the MLP's inside cannot be split"):
        FastGPTNeoX.from_pretrained(folder, shard=Shard(0, 4))


def test_fewer_devices_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first, second = (Ranks(index, 2, index, None) for index in range(2))
    assert first.local_device(torch.device("cuda")) == torch.device("cuda", 0)
    with pytest.raises(RanksError, match="there are 1 CUDA devices, and each rank needs one"):
        second.local_device(torch.device("cuda"))


# Public methods that only the calling rank runs. They run no pass and change no cache's length, or
# only BROADCAST_METHODS call them
LOCAL_METHODS = {
    "before_pass",
    "from_pretrained",
    "from_tensors",
    "new_memory",
    "logits",
    "score",
    "prefill_chunk",
    "run",
    "report_pass",
    "record",
    "pop_pass_stats",
    "remove_slots",
    "require",
    "drop_oldest",
}


def test_every_method_that_makes_a_pass_or_moves_a_length_is_repeated() -> None:
    """Fail for a new public method that is in neither set."""
    found = set()
    for kind in (FastGPTNeoX, GPTNeoX, FastCache, KVCache):
        found |= {name for name, value in vars(kind).items() if isroutine(value)}
    public = {name for name in found if not name.startswith("_")}
    assert public == BROADCAST_METHODS | LOCAL_METHODS
    assert not LOCAL_METHODS & BROADCAST_METHODS
