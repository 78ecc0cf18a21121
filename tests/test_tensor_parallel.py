"""A target that several processes compute: the same numbers and texts, and what each reads."""

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
from test_ranks import on_ranks
from torch import Tensor

import engine.cache
from cli.metrics import token_ids
from cli.models import load_model
from draft_tree import Settings
from dynatree import DynaTree
from engine.cache import FastCache, cache_bytes
from engine.checkpoint import CheckpointError, load_tensors, read_config
from engine.driver import OF_CACHE, OF_MODEL, run_worker
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX, weight_bytes
from engine.passes import PassConfig
from engine.ranks import MESSAGE_BYTES, Ranks, RanksError
from engine.scores import Ranking, Scores
from engine.tensor_parallel import Shard
from gpt_neox import PREFILL_CHUNK, GPTNeoX, KVCache
from methods.static import Alone, Chain

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
SHAPES = [
    (2, {}),
    (4, {"tie_word_embeddings": True, "vocab_size": 98, "intermediate_size": 72}),
    (2, {"use_parallel_residual": False, "vocab_size": 97}),
    (4, {"attention_bias": False, "hidden_act": "gelu_new"}),
]
Work = Callable[[FastGPTNeoX, Path], object]  # what rank 0 does with the target, and its folder


def small(folder: Path, **changes: object) -> Path:
    """A random model of four heads."""
    config = random_config(num_attention_heads=4, hidden_size=64, intermediate_size=128)
    config = replace(config, **changes)
    return write_checkpoint(folder, config, random_tensors(config, 0))


def compute(
    ranks: Ranks, folder: Path, work: Work, dtype: torch.dtype, device: torch.device
) -> object:
    """What rank 0 returns; the others make the target's calls."""
    if ranks.rank:
        with suppress(RanksError):  # of a rank 0 that ends in the midst of a pass
            run_worker(ranks)
        return None
    with torch.inference_mode():
        return work(load_model(folder, device, dtype, ranks), folder)


def with_ranks(
    count: int,
    folder: Path,
    work: Work,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> object:
    """What work returns, of a target that so many ranks compute."""
    return on_ranks(count, compute, folder, work, dtype, device)[0]


def fail_within(target: FastGPTNeoX, folder: Path) -> list[str]:
    """What the next calls say after one that failed here and not on the other rank."""

    def fail(tokens: list[int], scores: Scores) -> None:
        raise KeyboardInterrupt

    said = []
    cache = target.new_cache(64, PassConfig(shows_prompt=True))
    cache.on_pass.append(fail)
    with suppress(KeyboardInterrupt), cache:
        target.prefill(PROMPT, cache)
    for call in (lambda: append(target, [9], cache), lambda: target.new_cache(64)):
        with pytest.raises(RanksError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_ranks_out_of_step_say_so(tmp_path: Path) -> None:
    """They would wait for each other for ever."""
    line = "the ranks are out of step: an earlier call on rank 0 has failed"
    assert with_ranks(2, small(tmp_path), fail_within) == [line] * 2


def write_at_once(target: FastGPTNeoX, folder: Path) -> list[list[int]]:
    """Four texts by one and by four threads; a copy of the target makes the same calls."""
    draft = FastGPTNeoX.from_pretrained(folder)

    def text(settings: Settings) -> list[int]:
        with torch.inference_mode():
            return write(copy.copy(target), draft, settings)

    ways = [DynaTree(), Chain(K=3), Alone(), DynaTree(B_max=2)]
    with ThreadPoolExecutor(4) as threads:
        return [[text(way) for way in ways], list(threads.map(text, ways))]


def test_threads_take_turns(tmp_path: Path) -> None:
    one, four = with_ranks(2, small(tmp_path), write_at_once)
    assert one == four


def write(
    target: FastGPTNeoX, draft: FastGPTNeoX | None, settings: Settings, **way: object
) -> list[int]:
    return token_ids(generate(target, draft, PROMPT, settings, max_new_tokens=20, **way))


def logits_of(target: FastGPTNeoX, folder: Path) -> list[ndarray]:
    """What the target likes after each token of a prompt, then the logits of all that a loop may
    ask of it, and what its cache does between."""
    found = []
    cache = target.new_cache(64, PassConfig(ranking=Ranking(4), shows_prompt=True))
    cache.on_pass.append(lambda ids, scores: found.append(scores.best(4)))
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
    small(tmp_path, **changes)
    expected = logits_of(FastGPTNeoX.from_pretrained(tmp_path), tmp_path)
    found = with_ranks(count, tmp_path, logits_of)
    assert len(found) == len(expected) == 5
    for actual, right in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(actual, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [2, 4])
def test_each_has_its_share_alone(count: int, tmp_path: Path) -> None:
    """Of heads and of all that is large; the last rank lacks some of its ids."""
    config = read_config(small(tmp_path, vocab_size=97))
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
    """Of trees and of ar beside them, strict."""
    draft = FastGPTNeoX.from_pretrained(folder, target.device, torch.bfloat16)
    found = []
    for settings in (DynaTree(), Alone(rows=64)):
        logits: list[Tensor] = []
        ids = write(target, draft, settings, strict=True, inspect=logits.append)
        found.append((ids, torch.cat(logits).tolist()))
    return found


def test_strict_holds_bit_for_bit(tmp_path: Path) -> None:
    trees, ar = with_ranks(4, small(tmp_path), strict_logits, torch.bfloat16)
    assert trees == ar


def sum_of_equal_rows(ranks: Ranks) -> ndarray:
    generator = torch.Generator().manual_seed(ranks.rank)
    row = torch.randn(64, generator=generator, dtype=torch.bfloat16)
    return ranks.shard(CPU).sum(row.repeat(64, 1), in_order=True).float().numpy()


def test_a_sum_in_order_does_not_depend_on_the_row() -> None:
    """Added up by gloo itself, each quarter of the rows begins with another rank's."""
    for total in on_ranks(4, sum_of_equal_rows):
        assert (total == total[:1]).all()


def count_letters(target: FastGPTNeoX, folder: Path) -> tuple[list[int], int]:
    """The lengths of the broadcasts of some iterations, and how many iterations."""
    draft = FastGPTNeoX.from_pretrained(folder)
    steps = generate(target, draft, PROMPT, DynaTree(), max_new_tokens=60)
    next(steps)
    sizes = []
    broadcast = dist.broadcast

    def counting(buffer: Tensor, **options: object) -> None:
        sizes.append(len(buffer))
        broadcast(buffer, **options)

    dist.broadcast = counting  # in a process of its own
    n_steps = len(list(steps))
    return sizes, n_steps


def test_an_iteration_is_two_broadcasts(tmp_path: Path) -> None:
    """Of a pass and its commit; the last of all gives the cache back."""
    sizes, n_steps = with_ranks(2, small(tmp_path), count_letters)
    assert n_steps > 5 and sizes == [MESSAGE_BYTES] * (2 * n_steps + 1)


def find_overflow(target: FastGPTNeoX, folder: Path) -> list[float]:
    """The best logits where token 1 is the second of three rows, and in an earlier chunk."""
    cache = target.new_cache(PREFILL_CHUNK + 10)
    rows = torch.tensor([2, 1, 3])
    target.forward(rows, torch.arange(3), cache)
    of_rows = cache.scores.highest[0].tolist()
    prompt = [2, 1] + [3] * PREFILL_CHUNK
    target.prefill(prompt, cache)
    return [*of_rows, cache.scores.highest[0].item()]


def test_what_overflows_on_another_rank_is_seen(tmp_path: Path) -> None:
    """Token 1 overflows a value of the last head, rank 1's, in float16; rank 0 finds nan in rank
    1's part of the scores."""
    config = read_config(small(tmp_path))
    tensors = random_tensors(config, 0)
    tensors["gpt_neox.embed_in.weight"][1, 5] = 100.0
    qkv = tensors["gpt_neox.layers.0.attention.query_key_value.weight"]
    qkv.view(4, 3, 16, 64)[3, 2, 7] = 0.0
    qkv.view(4, 3, 16, 64)[3, 2, 7, 5] = 20_000.0
    write_checkpoint(tmp_path, config, tensors)
    found = with_ranks(2, tmp_path, find_overflow, torch.float16)
    assert numpy.isnan(found).tolist() == [False, True, False, True]


def refuse_once(ranks: Ranks, folder: Path) -> object:
    """Rank 1 has no room for a long text."""
    require = engine.cache.require_memory

    def require_memory(n_bytes: int, device: torch.device, what: str) -> None:
        if ranks.rank and n_bytes > 200_000:
            raise OutOfMemory(f"{what} do not fit")
        require(n_bytes, device, what)

    engine.cache.require_memory = require_memory
    return compute(ranks, folder, write_long_and_short, torch.float32, CPU)


def write_long_and_short(target: FastGPTNeoX, folder: Path) -> list[int]:
    """What is said of a text that does not fit, and what is written after that."""
    with pytest.raises(OutOfMemory, match="^rank 1: a cache of 1012 tokens do not fit"):
        list(generate(target, None, PROMPT, Alone(), max_new_tokens=1000))
    return write(target, None, Alone())


def test_no_memory_on_another_rank_is_said_and_survived(tmp_path: Path) -> None:
    """As --compare asks for room that need not be there."""
    text, _ = on_ranks(2, refuse_once, small(tmp_path))
    assert text == write(FastGPTNeoX.from_pretrained(tmp_path), None, Alone())


def test_what_cannot_be_split(tmp_path: Path) -> None:
    folder = small(tmp_path, intermediate_size=126)
    with pytest.raises(CheckpointError, match="126 columns of the MLP's inside cannot be split"):
        FastGPTNeoX.from_pretrained(folder, shard=Shard(0, 4))


def test_fewer_devices_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first, second = (Ranks(index, 2, index, None) for index in range(2))
    assert first.own_device(torch.device("cuda")) == torch.device("cuda", 0)
    with pytest.raises(RanksError, match="there are 1 CUDA devices, and each rank needs one"):
        second.own_device(torch.device("cuda"))


# Public methods that no rank but the calling one needs: they make no pass and move no length, or
# only others in the list call them
UNREPEATED = {
    "from_pretrained",
    "from_tensors",
    "new_memory",
    "logits",
    "score",
    "prefill_chunk",
    "run",
    "show",
    "record",
    "take_passes",
    "forget",
    "require",
    "drop",
}


def test_every_method_that_makes_a_pass_or_moves_a_length_is_repeated() -> None:
    """A new method must be named in one of the two lists."""
    found = set()
    for kind in (FastGPTNeoX, GPTNeoX, FastCache, KVCache):
        found |= {name for name, value in vars(kind).items() if isroutine(value)}
    public = {name for name in found if not name.startswith("_")}
    assert public == OF_MODEL | OF_CACHE | UNREPEATED
    assert not UNREPEATED & (OF_MODEL | OF_CACHE)
