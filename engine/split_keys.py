"""Attention of a CUDA pass that reads the keys in chunks, all at the same time. A trial.

CUDA's attention kernel runs one block of threads for each head and each 64 rows, and a block reads
all keys in order. With 32 heads, that is 32 blocks on the 132 multiprocessors of an H100. Here the
keys are cut into chunks of equal size, and each chunk has its own blocks. The chunks are the batch
axis of one call of the same kernel, without a copy of the keys. The kernel also returns the
logarithm of each sum of exponentials. So the outputs of the chunks can be merged exactly, except
for rounding (FlashDecoding, Dao et al. 2023).

The merge takes four more kernels in each layer. Nobody has measured yet whether this is faster, so
it is not the default (the word split-keys of engine/generation_config.py).

    n_chunks = count_chunks(n_slots=512, n_rows=32, n_heads=8)  # 4
    mask = torch.zeros(32, 512)
    split = split_mask(mask, n_chunks, n_heads=8)  # once per pass, for all layers

Shapes: n rows, S cache slots in C chunks of c, H heads, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MIN_SPLIT_SLOTS = 512  # with fewer slots, a block reads so few keys that the merge takes longer
MIN_CHUNK = 128  # slots; the kernel reads up to 128 keys at once, so shorter chunks save nothing
BLOCK_ROWS = 64  # rows of one block of the kernel
ENOUGH_BLOCKS = 118  # nine tenths of the 132 multiprocessors of an H100; an A100 has 108


class SplitMask(NamedTuple):
    """The mask of a pass whose keys are read in chunks."""

    bias: Tensor  # [C, H, n, c], 0 or -inf; every row attends to at least one slot of each chunk
    # [C, 1, n] float32: -inf if all slots of the chunk are masked for the row, else 0
    excluded: Tensor


def count_chunks(n_slots: int, n_rows: int, n_heads: int) -> int:
    """Return the smallest number of equal chunks that gives ENOUGH_BLOCKS, because more chunks
    would only make the merge larger. If no number does, return the largest, with chunks of
    MIN_CHUNK slots. n_slots: a multiple of MIN_CHUNK."""
    n_blocks = n_heads * -(-n_rows // BLOCK_ROWS)
    max_chunks = n_slots // MIN_CHUNK
    counts = [n for n in range(1, max_chunks) if max_chunks % n == 0]
    return next((n for n in counts if n * n_blocks >= ENOUGH_BLOCKS), max_chunks)


def split_mask(mask: Tensor, n_chunks: int, n_heads: int) -> Tensor | SplitMask:
    """Return the mask for chunks, or the mask itself if one chunk is enough. Overwrites `mask`,
    which is [n, S], 0 or -inf.

    A row may attend to no slot of a chunk, and the kernel's result is then undefined. So the row
    attends to the chunk's first slot instead, whose key and value are finite, and `excluded` gives
    the result the weight 0.
    """
    if n_chunks == 1:
        return mask
    chunks = mask.unflatten(1, (n_chunks, -1)).transpose(0, 1)  # [C, n, c]
    highest = chunks.amax(dim=2)  # [C, n]
    chunks[:, :, 0].masked_fill_(highest < 0, 0.0)
    # Not copied for each head: the kernel reads the same bias with stride 0
    bias = chunks.unsqueeze(1).expand(-1, n_heads, -1, -1)
    return SplitMask(bias, highest.unsqueeze(1).float())


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, mask: SplitMask) -> Tensor:
    """Return softmax attention [H, n, D], in float32, of q [H, n, D] over a cache's k, v
    [H, S or more, D]."""
    n_chunks, _, n, size = mask.bias.shape
    n_slots = n_chunks * size
    keys, values = (x[:, :n_slots].unflatten(1, (n_chunks, size)).transpose(0, 1) for x in (k, v))
    queries = q.expand(n_chunks, -1, -1, -1)
    # F.scaled_dot_product_attention calls this operator too, but does not return the logarithms
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    outputs, log_sums, *_ = attend(queries, keys, values, mask.bias, True)  # [C, H, n, D]
    weights = (log_sums[:, :, :n] + mask.excluded).softmax(dim=0)  # [C, H, n]
    return (weights.unsqueeze(3) * outputs).sum(dim=0)
