"""Tests of strict passes: the logits of a tree's rows are ar's, bit for bit, in every dtype.

test_exactness.py tests the strict texts of every method.
"""

import random
from pathlib import Path

import pytest
import torch
from fast import append, generate, random_model
from small import prefilled, random_config, random_tensors, run_tree, write_checkpoint
from torch import Tensor
from trees import path_to, random_tree

from dynatree_lab.engine import invariance, strict
from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.invariance import invariant_rows, strict_rows
from dynatree_lab.engine.masks import Mask
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.engine.streamed import Budget, StoredLinear, load_streamed
from dynatree_lab.engine.strict import MAX_STRICT_ROWS
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.methods.static import Chain
from gpt_neox import OUTPUT_HEAD

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around the number of recent positions, the ends of blocks, and where old slots fill a block
LENGTHS = [1, 14, 15, 16, 17, 31, 33, 48, 254, 256, 257, 270, 271, 272, 512, 527]
SHAPES = [  # head sizes 16, 32, 64, 80, 256
    {"hidden_size": 32},
    {"hidden_size": 64, "use_parallel_residual": False},
    {"hidden_size": 128, "rotary_pct": 0.25},
    {"hidden_size": 160, "rotary_pct": 0.25},
    {"hidden_size": 256, "num_attention_heads": 1, "use_parallel_residual": False},
]
WIDE = {"hidden_size": 320, "intermediate_size": 1280, "num_attention_heads": 4, "vocab_size": 4096}


def decode(model: FastGPTNeoX, cache: FastCache, tokens: list[int]) -> Tensor:
    """Return the logits [n, V] after each token. Each has a pass of its own, as in ar."""
    return torch.cat([append(model, [token], cache).clone() for token in tokens])


@torch.inference_mode()
def assert_rows_are_their_paths(
    model: FastGPTNeoX, length: int, n_rows: int, rng: random.Random
) -> None:
    """Compare some paths of a random tree with the same tokens decoded one by one. Logits, and keys
    and values in the cache, must have equal bits."""
    prompt = [rng.randrange(90) for _ in range(length)]
    pass_config = PassConfig(n_rows, strict_rows(model, n_rows), masks=strict.STRICT)
    cache = prefilled(model, prompt, length + 140, pass_config)
    tree = random_tree(rng, n_rows, max_depth=strict.MAX_DEPTH)
    for leaf in (n_rows - 1, rng.randrange(n_rows)):
        cache.rewind(length)
        logits = run_tree(model, cache, tree)
        path = path_to(tree, leaf)
        cache.commit(path)
        committed = cache.kv[:, :, :, length : cache.length].clone()
        cache.rewind(length)
        alone = decode(model, cache, [tree.tokens[row] for row in path])
        assert torch.equal(alone, logits[path])
        assert torch.equal(cache.kv[:, :, :, length : cache.length], committed)


# Each head size with one dtype, and each dtype with fixed shapes and without
CASES = [
    (changes, dtype, i % 2 == 1)
    for i, (changes, dtype) in enumerate(zip([*SHAPES, SHAPES[0]], DTYPES * 2, strict=True))
]


@pytest.mark.parametrize(("changes", "dtype", "is_shaped"), CASES, ids=str)
def test_a_row_is_its_path_bit_for_bit(
    changes: dict[str, object], dtype: torch.dtype, is_shaped: bool
) -> None:
    model = random_model(7, dtype, max_position_embeddings=700, **changes)
    model.has_fixed_shapes = is_shaped
    rng = random.Random(f"{changes} {dtype}")
    for length in rng.sample(LENGTHS, 3):
        assert_rows_are_their_paths(model, length, rng.choice([2, 8, 32]), rng)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_two_threads(dtype: torch.dtype) -> None:
    """Check linear layers of the embedded target's sizes in a few passes, because each one may wait
    for another process. The trial of row counts is skipped, because it makes hundreds of passes."""
    torch.set_num_threads(2)
    model = random_model(7, dtype, max_position_embeddings=700, **WIDE)
    model.invariance_results["min_rows"] = None
    assert_rows_are_their_paths(model, 30, 4, random.Random(2))


def test_trials_find_the_rare_rows_of_a_stored_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let products of up to 7 rows have other bits in 2 of 1,000 rows, as a library's had in
    bfloat16. Trials of 128 rows missed them."""
    config = random_config(hidden_size=64)
    tensors = random_tensors(config, 1)
    tensors[OUTPUT_HEAD][0, 0] = 1e-9  # not exact in float16, so the head is not FBGEMM's
    monkeypatch.setattr(Budget, "n_resident", lambda *_: 0)
    write_checkpoint(tmp_path, config, tensors)
    model = load_streamed(tmp_path, torch.device("cpu"), torch.bfloat16, 10**9)
    multiply = StoredLinear.__call__

    def with_rare_rows(linear: StoredLinear, x: Tensor) -> Tensor:
        y = multiply(linear, x)
        is_changed = linear.order is not None and len(x) <= 7  # of queries, keys and values
        return y + (x[:, 11:12] > 2.9) if is_changed else y

    monkeypatch.setattr(StoredLinear, "__call__", with_rare_rows)
    assert invariant_rows(model) in (8, 13, 16, None)


def test_attention_is_tried_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention of up to 7 rows have other bits, which products in bfloat16 hide."""
    attend = strict.StrictMask.attend

    def with_other_bits(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(mask, q, k, v) + (q.shape[1] <= 7 and q.dtype == torch.float32)

    monkeypatch.setattr(strict.StrictMask, "attend", with_other_bits)
    assert invariant_rows(random_model(1, torch.bfloat16)) in (8, 13, 16, None)


@pytest.mark.parametrize(
    ("n_different", "expected"), [(0, 1), (1, 2), (7, 8), (8, 13), (13, 16), (16, None)]
)
def test_the_row_count_from_which_on_bits_are_equal(
    n_different: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let products of up to n_different rows have other bits: none are known on this processor, up
    to 8 were found with AVX-512. Without a count, a pass has the rows that its method needs."""

    def multiply(x: Tensor) -> Tensor:
        return x + (len(x) <= n_different)

    monkeypatch.setattr(invariance, "make_trials", lambda model: [(multiply, torch.ones(128, 1))])
    model = random_model(1)
    assert invariant_rows(model) == expected
    assert [strict_rows(model, n) for n in (1, 30)] == [expected or 1, expected or 32]


def test_trees_are_no_deeper_than_the_recent_positions() -> None:
    target = random_model(7)
    _, *steps = generate(target, target, [3, 1, 4], Chain(K=30), 60, strict=True)
    assert max(max(step.tree.depths) for step in steps) == strict.MAX_DEPTH


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strict_attention_is_as_exact_as_torchs(dtype: torch.dtype) -> None:
    """Compare both with float64, over contexts of one block and of four."""
    generator = torch.Generator().manual_seed(0)
    for length in (200, 1000):
        q = torch.randn(4, 16, 40, generator=generator).to(dtype)
        k, v = (2 * torch.randn(2, 4, 1024, 40, generator=generator)).to(dtype)
        positions = torch.full((16,), length)
        is_attended = torch.arange(1024) <= length
        bias = torch.zeros(1024).masked_fill_(~is_attended, -torch.inf)
        scores = q.double() @ k.double().transpose(1, 2) * 40**-0.5 + bias.double()
        expected = scores.softmax(-1) @ v.double()
        attends = torch.ones(16, length + 1, dtype=torch.bool)
        inputs = PassInputs(positions, positions, attends, length + 1 - 16, n_last=16)
        recent = strict.recent_slots(inputs)
        ours = strict.make_mask(positions, recent, 1024).attend(q, k, v).double()
        plain = Mask(bias.to(dtype).expand(16, -1)).attend(q, k, v).double()
        assert (ours - expected).abs().mean() <= 1.1 * (plain - expected).abs().mean()


@pytest.mark.parametrize("method", ["dyspec N=129", "ar rows=192", "beam N_max=256"])
def test_strict_passes_of_many_rows_are_refused(method: str) -> None:
    GenerationConfig.parse(*method.split())
    GenerationConfig.parse("dyspec", f"N={MAX_STRICT_ROWS}", "strict")
    with pytest.raises(ValueError, match=f"it must have at most {MAX_STRICT_ROWS}; use a smaller"):
        GenerationConfig.parse(*method.split(), "strict")
