"""A target that several processes compute: the same numbers and texts, and what each reads."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import (
    append,
    generate,
    random_config,
    random_settings,
    random_tensors,
    write_checkpoint,
)
from numpy import ndarray
from test_ranks import on_ranks
from torch import Tensor

from cli.models import load_model
from draft_tree import Settings
from dynatree import DynaTree
from engine import caches
from engine.checkpoint import CheckpointError, load_tensors, read_config
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX, published_shapes, weight_bytes
from engine.passes import Use
from engine.scores import Ranking
from engine.shares import Share, split_axis
from engine.streaming import Window
from gpt_neox import PREFILL_CHUNK, Scores
from methods import METHODS
from methods.static import Alone
from parallel.led import follow
from parallel.ranks import LETTER, Ranks, RanksError
from sampling import Sampling

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
SHAPES = [
    (2, {}),
    (4, {"is_tied": True, "vocab_size": 98, "intermediate_size": 72}),
    (2, {"is_parallel": False, "vocab_size": 97}),
    (4, {"has_attention_bias": False, "activation": "gelu_new"}),
]


def small(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A random model of four heads."""
    config = random_config(n_heads=4, hidden_size=64, intermediate_size=128)
    config = replace(config, **changes)
    return write_checkpoint(folder, config, random_tensors(config, seed))


def compute(ranks: Ranks, folder: Path, dtype: torch.dtype, work: Callable) -> object:
    """What work(target, folder) returns on rank 0; the others make the target's calls."""
    if ranks.index:
        follow(ranks)
        return None
    with torch.inference_mode():
        return work(load_model(folder, CPU, dtype, ranks), folder)


def with_ranks(count: int, folder: Path, dtype: torch.dtype, work: Callable) -> object:
    """What work(target, folder) returns on rank 0, of so many; raises what it raises."""
    found = on_ranks(count, compute, folder, dtype, work)
    for of_rank in found:
        if isinstance(of_rank, Exception):
            raise of_rank
    return found[0]


def everything(target: FastGPTNeoX, folder: Path) -> list[ndarray]:
    """What the target likes after each token of a prompt, then the logits of all that a loop may
    ask of it, and what its cache does between."""
    found = []

    def read(ids: list[int], scores: Scores) -> None:
        candidates = scores.best(4)
        assert ids == PROMPT and candidates.shape == (len(PROMPT), 4)
        found.append(candidates)

    def keep(scores: Scores) -> None:
        found.append(scores.logits.numpy())

    cache = target.new_cache(64, Use(ranking=Ranking(4)))
    keep(target.prefill(PROMPT, cache, read))
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    tree = (torch.tensor([5, 6, 7, 8]), torch.tensor([11, 12, 12, 13]))
    keep(target.forward(*tree, cache, mask))
    cache.commit([0, 2, 3])
    keep(append(target, [9, 10], cache))
    cache.rewind(15)
    keep(append(target, [11], cache))
    keep(append(target, [12, 13], cache))
    cache.__exit__()
    other = target.new_cache(30)
    keep(target.prefill(PROMPT[:4], other))
    return found


@pytest.mark.parametrize(("count", "changes"), SHAPES)
def test_logits_are_those_of_one_process(
    count: int, changes: dict[str, object], tmp_path: Path
) -> None:
    small(tmp_path, **changes)
    expected = everything(FastGPTNeoX.from_pretrained(tmp_path), tmp_path)
    found = with_ranks(count, tmp_path, torch.float32, everything)
    assert len(found) == len(expected) == 7
    for actual, right in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(actual, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [2, 4])
def test_each_has_its_slices_alone(count: int, tmp_path: Path) -> None:
    """All that is large is there once in all; of the last rank's ids some are not there."""
    config = read_config(small(tmp_path, vocab_size=97))
    shapes = published_shapes(config)
    whole = load_tensors(tmp_path, shapes, CPU, torch.float32)
    shares = [Share(index, count) for index in range(count)]
    parts = [dict(load_tensors(tmp_path, shapes, CPU, torch.float32, share)) for share in shares]
    for share, part in zip(shares, parts, strict=True):
        n_bytes = sum(tensor.nbytes for tensor in part.values())
        assert n_bytes == weight_bytes(config, torch.float32, share)
        model = FastGPTNeoX.from_pretrained(tmp_path, CPU, torch.float32, share)
        assert model.new_cache(10).kv.shape[2] == 4 // count
        assert model.pool.bytes(10) == model.new_cache(10).kv.nbytes
    for name, tensor in whole.items():
        axis = split_axis(name)
        of_all = [part[name] for part in parts]
        if axis is None:
            assert all(torch.equal(part, tensor) for part in of_all)
        else:
            found = torch.cat(of_all, axis)
            assert torch.equal(found.narrow(axis, 0, tensor.shape[axis]), tensor)
            assert found.shape[axis] == count * shares[0].size(tensor.shape[axis])


WAYS = [{}, {"commit": "rebuild"}, {"window": Window(16, 2)}, {"strict": True}]


def draft_of(folder: Path, dtype: torch.dtype) -> FastGPTNeoX:
    """The same model, which rank 0 alone has; its logits are the target's but for rounding."""
    return FastGPTNeoX.from_pretrained(folder, dtype=dtype)


def write_all(target: FastGPTNeoX, folder: Path) -> list[tuple]:
    """Of every method a text, and ar's; in four ways to write one, in turn."""
    draft = draft_of(folder, torch.float32)
    rng = random.Random(0)
    of_ar = [write_one(target, None, Alone(), way) for way in WAYS]
    found = []
    for i, method in enumerate(METHODS):
        way = i % len(WAYS)
        text = write_one(target, draft, random_settings(method, rng), WAYS[way])
        found.append((method, WAYS[way], text, of_ar[way]))
    return found


def write_one(
    target: FastGPTNeoX, draft: FastGPTNeoX | None, settings: Settings, way: dict[str, object]
) -> list[int]:
    steps = generate(target, draft, PROMPT, settings, max_new_tokens=20, **way)
    return [token for step in steps for token in step.tokens]


def test_every_method_writes_ars_text(tmp_path: Path) -> None:
    found = with_ranks(2, small(tmp_path), torch.float32, write_all)
    assert len(found) == len(METHODS)
    for method, way, text, of_ar in found:
        assert len(text) == 20 and text == of_ar, (method, way)


def strict_logits(target: FastGPTNeoX, folder: Path) -> list[tuple]:
    """Of trees and of ar beside them, strict."""
    draft = draft_of(folder, torch.bfloat16)
    found = []
    for settings in (DynaTree(), Alone(rows=64)):
        logits: list[bytes] = []

        def keep(rows: Tensor, logits: list[bytes] = logits) -> None:
            logits.extend(row.numpy().tobytes() for row in rows)

        options = {"max_new_tokens": 20, "strict": True, "inspect": keep}
        steps = list(generate(target, draft, PROMPT, settings, **options))
        found.append(([token for step in steps for token in step.tokens], logits))
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_strict_holds_bit_for_bit(count: int, tmp_path: Path) -> None:
    trees, ar = with_ranks(count, small(tmp_path), torch.bfloat16, strict_logits)
    assert trees == ar and len(ar[1]) == 20


def sum_of_equal_rows(ranks: Ranks) -> bool:
    """Whether 64 rows that are equal on each rank are so in the sum of all."""
    generator = torch.Generator().manual_seed(ranks.index)
    row = torch.randn(64, generator=generator, dtype=torch.bfloat16)
    total = ranks.share(CPU).sum(row.repeat(64, 1), in_order=True)
    return torch.equal(total, total[:1].expand(64, -1))


def test_a_sum_in_order_does_not_depend_on_the_row() -> None:
    """Added up by gloo itself, each quarter of the rows begins with another rank's."""
    assert on_ranks(4, sum_of_equal_rows) == [True] * 4


def write_sampled(target: FastGPTNeoX, folder: Path) -> list[int]:
    draft = draft_of(folder, torch.float32)
    options = {"max_new_tokens": 30, "sampling": Sampling(temperature=0.9, seed=3)}
    steps = generate(target, draft, PROMPT, METHODS["linear"](), **options)
    return [token for step in steps for token in step.tokens]


def test_a_seed_writes_the_text_of_one_process(tmp_path: Path) -> None:
    folder = small(tmp_path)
    expected = write_sampled(FastGPTNeoX.from_pretrained(folder), folder)
    assert with_ranks(2, folder, torch.float32, write_sampled) == expected


def count_letters(target: FastGPTNeoX, folder: Path) -> tuple[list[int], int]:
    """The lengths of the broadcasts of some iterations, and how many iterations."""
    draft = draft_of(folder, torch.float32)
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
    sizes, n_steps = with_ranks(2, small(tmp_path), torch.float32, count_letters)
    assert n_steps > 5 and sizes == [LETTER] * (2 * n_steps + 1)


def write_overflowing(folder: Path) -> Path:
    """Token 1 overflows a value of the last head in float16, which nothing else reads."""
    config = random_config(n_heads=4, hidden_size=64, intermediate_size=128)
    tensors = random_tensors(config, 0)
    embedding = tensors["gpt_neox.embed_in.weight"]
    embedding[:, 5] = 0.0
    embedding[1] = 0.0
    embedding[1, 5] = 1.0
    attention = "gpt_neox.layers.0.attention"
    values = tensors[f"{attention}.query_key_value.weight"].view(4, 3, 16, 64)[3, 2]
    values[7] = 0.0
    values[7, 5] = 20_000.0
    tensors["gpt_neox.layers.0.input_layernorm.weight"].fill_(1.0)
    tensors[f"{attention}.dense.weight"][:, 3 * 16 + 7] = 0.0
    return write_checkpoint(folder, config, tensors)


def find_overflow(target: FastGPTNeoX, folder: Path) -> list[list[float]]:
    """The best logits where token 1 is the second of three rows, and in an earlier chunk."""
    cache = target.new_cache(PREFILL_CHUNK + 10)
    rows = torch.tensor([2, 1, 3])
    of_rows = target.forward(rows, torch.arange(3), cache).read.highest.tolist()
    prompt = [2, 1] + [3] * PREFILL_CHUNK
    after = [target.prefill(prompt, cache).read.highest.item()]
    return [of_rows, after]


def test_what_overflows_on_another_rank_is_seen(tmp_path: Path) -> None:
    """Rank 1 has the head that overflows; rank 0 finds nan in rank 1's part of the scores."""
    folder = write_overflowing(tmp_path)
    alone = find_overflow(FastGPTNeoX.from_pretrained(folder, dtype=torch.float16), folder)
    found = with_ranks(2, folder, torch.float16, find_overflow)
    for of_rows, after in (alone, found):
        assert [value != value for value in of_rows] == [False, True, False]
        assert after[0] != after[0]


def refuse_once(ranks: Ranks, folder: Path) -> object:
    """Rank 1 has no room for a long text."""
    require = caches.require_memory

    def require_memory(n_bytes: int, device: torch.device, what: str) -> None:
        if ranks.index and n_bytes > 200_000:
            raise OutOfMemory(f"{what} do not fit")
        require(n_bytes, device, what)

    caches.require_memory = require_memory
    return compute(ranks, folder, torch.float32, write_long_and_short)


def write_long_and_short(target: FastGPTNeoX, folder: Path) -> tuple[str, list[int]]:
    """What is said of a text that does not fit, and what is written after that."""
    try:
        list(generate(target, None, PROMPT, Alone(), max_new_tokens=1000))
        said = ""
    except OutOfMemory as error:
        said = str(error)
    return said, write_one(target, None, Alone(), {})


def test_no_memory_on_another_rank_is_said_and_survived(tmp_path: Path) -> None:
    """As --compare asks for room that need not be there."""
    folder = small(tmp_path)
    (said, text), _ = on_ranks(2, refuse_once, folder)
    assert said == "rank 1: a cache of 1012 tokens do not fit"
    expected = write_one(FastGPTNeoX.from_pretrained(folder), None, Alone(), {})
    assert text == expected


@pytest.mark.parametrize(
    ("count", "changes", "said"),
    [
        (3, {}, "4 heads cannot be split evenly over 3 ranks"),
        (4, {"intermediate_size": 126}, "126 columns of the MLP's inside cannot be split evenly"),
    ],
)
def test_what_cannot_be_split(
    count: int, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        FastGPTNeoX.from_pretrained(small(tmp_path, **changes), share=Share(0, count))


def test_fewer_devices_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first, second = (Ranks(index, 2, index, None) for index in range(2))
    assert first.own_device(torch.device("cuda")) == torch.device("cuda", 0)
    with pytest.raises(RanksError, match="there are 1 CUDA devices, and each rank needs one"):
        second.own_device(torch.device("cuda"))
