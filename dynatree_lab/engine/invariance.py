"""The number of rows from which on strict passes (engine/strict.py) are batch-invariant.

It depends on the libraries and the processor, so only trials can find it.

    PassConfig(64, strict_rows(model, 64), masks=STRICT)

Shapes: n rows, H heads, D head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.linear import SMALL_MATRIX, FbgemmLinear
from dynatree_lab.engine.masks import Mask
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import ROW_COUNTS
from dynatree_lab.engine.streamed import StoredLinear, StoredPair
from dynatree_lab.engine.strict import BLOCK, MAX_STRICT_ROWS, STRICT

TRIAL_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, MAX_STRICT_ROWS)
TRIAL_LENGTH = 290  # committed tokens
# For a small StoredLinear: 4 of 2,560 products of two rows were reported to have other bits in
# bfloat16, at hidden size 32 (not reproduced with AVX2)
N_STORED_ROWS = 1024
# Padding every pass to more rows would cost too much. With AVX-512, products of up to 8 rows over a
# target streamed in float32 differ from those of 13 and more (16 shapes tried)
MAX_INVARIANT_ROWS = 16


def strict_rows(model: FastGPTNeoX, max_rows: int) -> int:
    """Return the number of rows from which on strict passes are batch-invariant. max_rows: of a
    pass, without padding.

    If there is none, all passes have the same number of rows, for which a row's bits do not depend
    on its place. If ROW_COUNTS has no such number either, bits may differ.
    """
    if minimum := invariant_rows(model):
        return minimum
    for n in ROW_COUNTS:
        is_allowed = max(max_rows, model.min_rows) <= n <= MAX_STRICT_ROWS
        if is_allowed and is_place_invariant(model, n):
            return n
    return MAX_STRICT_ROWS


@torch.inference_mode()
def invariant_rows(model: FastGPTNeoX) -> int | None:
    """Return the smallest row count from which on strict passes are batch-invariant on all ranks.

    Then a row's bits depend neither on the number of rows nor on its place among them. Returns None
    if there is no such count up to MAX_INVARIANT_ROWS, and for fixed shapes, where none is tried.
    """
    if model.has_fixed_shapes:
        return None
    results = model.invariance_results
    if "min_rows" not in results:
        own = [min_equal_rows(compute, rows) for compute, rows in make_trials(model)]
        counts = [count for counts in model.gather(own) for count in counts]
        results["min_rows"] = None if None in counts else max(counts)
    return results["min_rows"]


@torch.inference_mode()
def is_place_invariant(model: FastGPTNeoX, n: int) -> bool:
    """Whether the bits of a row in a strict pass of n rows do not depend on its place, on any rank.

    A library may compute the last few rows of a product differently. FBGEMM without AVX-512 does so
    for 32 rows and not for 64. Returns True on a GPU, where no trials are run.
    """
    results = model.invariance_results
    if n not in results:
        trials = make_trials(model) if model.device.type == "cpu" else []
        own = [
            compute(rows[:n].roll(1, 0)).equal(compute(rows[:n]).roll(1, 0))
            for compute, rows in trials
        ]
        results[n] = all(model.gather(all(own)))
    return results[n]


def make_trials(model: FastGPTNeoX) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Return the functions that decide a strict row's bits, each with input rows for its trial.

    They run the first layer with the output head, attention, and each FBGEMM product. Attention and
    products run in float32, because half precision hides most differences. Small stored matrices
    have no float32 product, so they get more rows. All rows of a trial have one position and attend
    to the same 290 keys and their own.
    """
    weight = model.gpt_neox.embed_in.weight
    config, layer = model.config, model.gpt_neox.layers[0]
    generator = torch.Generator().manual_seed(0)
    shape = (2, model.n_heads, 2 * BLOCK, config.head_size)
    kv = torch.randn(shape, generator=generator).to(weight.dtype)
    # `attend` writes no keys, so every row finds the same key and value in its own slot
    kv[:, :, TRIAL_LENGTH:] = kv[:, :, TRIAL_LENGTH : TRIAL_LENGTH + 1]
    rotary = torch.ones(1, config.rotary_dims // 2, dtype=torch.complex64)  # angles of 0
    n = TRIAL_ROW_COUNTS[-1]
    rows = torch.randn(n, weight.shape[1], generator=generator).to(weight.dtype)
    queries = torch.randn(n, model.n_heads, config.head_size, generator=generator)

    def run(x: Tensor) -> Tensor:
        x = layer(x.clone(), rotary, kv, TRIAL_LENGTH, trial_mask(len(x)))
        return torch.cat([x, model.embed_out(x)], dim=1)

    def attend(q: Tensor) -> Tensor:
        keys, values = kv.float()
        return trial_mask(len(q)).attend(q.transpose(0, 1), keys, values).transpose(0, 1)

    trials = [(attend, queries), (run, rows)]  # `run` comes second because it writes to kv
    for linear in [*layer.linears, model.embed_out.linear]:
        if isinstance(linear, FbgemmLinear):
            x = torch.randn(n, linear.in_features, generator=generator)
            trials.append((linear, x))
        if isinstance(linear, StoredLinear | StoredPair) and linear.n_elements <= SMALL_MATRIX:
            x = torch.randn(N_STORED_ROWS, linear.in_features, generator=generator)
            trials.append((linear, x.to(weight.dtype)))
    return trials


def trial_mask(n: int) -> Mask:
    """Return the mask of n rows at position TRIAL_LENGTH, each with a slot of its own."""
    positions = torch.full((n,), TRIAL_LENGTH)
    inputs = PassInputs(positions, positions, torch.eye(n).bool(), TRIAL_LENGTH, n_last=n)
    return STRICT.build(inputs, n, positions)


def min_equal_rows(compute: Callable[[Tensor], Tensor], rows: Tensor) -> int | None:
    """Return the smallest row count from which on every count gives a row the same bits, or None if
    it is above MAX_INVARIANT_ROWS."""
    expected = torch.cat([compute(group) for group in rows.split(TRIAL_ROW_COUNTS[-1])])
    min_rows = None
    for n in reversed(TRIAL_ROW_COUNTS):
        n_whole = len(rows) // n * n  # rows in complete groups of n
        results = torch.cat([compute(group) for group in rows[:n_whole].split(n)])
        if not torch.equal(results, expected[:n_whole]):
            break
        min_rows = n
    return min_rows if min_rows and min_rows <= MAX_INVARIANT_ROWS else None
