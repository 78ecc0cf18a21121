"""Tensor parallelism: a target that several ranks (engine/ranks.py) compute together.

Every rank holds some heads of each layer, some columns of each MLP's inner dimension and some ids
of the vocabulary. It computes with them as one process does with all of them. An all-reduce adds up
the ranks' results where a layer adds to x. In a GPT-NeoX with parallel residual, attention and MLP
are added to x together, so a layer needs one all-reduce. Most other models need two.

    target = ShardedGPTNeoX.from_pretrained("models/tiny/target")  # on every rank

No other file knows the shards: this one gives the model other weights and another embedding, each
layer a sum, and the output matrix a way to join the ranks' logits.

Shapes: n rows.
"""

import zlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.checkpoint import CheckpointError, StoredTensors
from dynatree_lab.engine.inputs import PassInputs
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.ranks import RanksError, gather, rank, run_collective, world_size
from gpt_neox import Config

# Weights and biases split along the output axis. A head's query, key and value rows are adjacent
COLUMN_PARALLEL = ("attention.query_key_value", "mlp.dense_h_to_4h", "embed_in", "embed_out")
# Weights split along the input axis, which is the output axis of the layers above. Rank 0 adds
# their biases
ROW_PARALLEL = ("attention.dense", "mlp.dense_4h_to_h")


class ShardedGPTNeoX(FastGPTNeoX):
    """One rank's shard of a FastGPTNeoX."""

    n_ranks = staticmethod(world_size)
    gather = staticmethod(gather)

    @classmethod
    def from_tensors(cls, config: Config, tensors: StoredTensors) -> "ShardedGPTNeoX":
        """Make this rank's shard from all weights. Raises CheckpointError if the ranks cannot split
        heads and inner columns evenly."""
        heads, inner = config.num_attention_heads, config.intermediate_size
        for what, n in {"heads": heads, "columns of the MLP's inside": inner}.items():
            if n % world_size():
                raise CheckpointError(
                    f"{n} {what} cannot be split evenly over {world_size()} ranks"
                )
        own = ShardedTensors(tensors.files, tensors.device, tensors.dtype)
        model = super().from_tensors(config, own)
        model.gpt_neox.embed_in = ShardedEmbedding(model.gpt_neox.embed_in.weight)
        model.embed_out.gather_ids = partial(gather_ids, n_ids=config.vocab_size)
        for layer in model.gpt_neox.layers:
            layer.sum_ranks = sum_ranks
        return model

    def before_pass(self, cache: FastCache, inputs: PassInputs) -> None:
        """Raise RanksError on all ranks unless their inputs, which are on the host, are equal.

        The ranks compare checksums in a collective of a fixed size. Without it, ranks with
        different trees would add up tensors of different sizes.
        """
        checksum = 0
        for tensor in (inputs.tokens, inputs.positions, inputs.mask):
            checksum = zlib.crc32(tensor.contiguous().numpy(), checksum)
        lowest = torch.tensor([checksum, -checksum])
        run_collective(dist.all_reduce, lowest, op=dist.ReduceOp.MIN)
        if lowest.sum():  # the lowest checksum and the highest one differ
            raise RanksError("the ranks run different tokens; use equal machines and equal files")


class ShardedTensors(StoredTensors):
    """This rank's parts of tensors. Each lookup reads the whole tensor."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        layer, _, part = name.rpartition(".")
        if layer.endswith(COLUMN_PARALLEL):
            return own_part(tensor, 0)
        if layer.endswith(ROW_PARALLEL):
            return own_part(tensor, 1) if part == "weight" else tensor * (rank() == 0)
        return tensor


def own_part(tensor: Tensor, axis: int) -> Tensor:
    """Return this rank's part of a tensor. Ids after the vocabulary's end get zeros."""
    n = tensor.shape[axis]
    size = -(-n // world_size())
    start, end = min(rank() * size, n), min((rank() + 1) * size, n)
    part, n_missing = tensor.narrow(axis, start, end - start), size - (end - start)
    return F.pad(part, (0, 0, 0, n_missing)) if n_missing else part.contiguous()


class ShardedEmbedding(nn.Module):
    """An embedding of which each rank has some rows."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [n, hidden] of tokens [n]. The sum is exact, because only one rank
        has a token's embedding and the others add 0."""
        ids = tokens - rank() * len(self.weight)
        is_here = (ids >= 0) & (ids < len(self.weight))  # [n]
        x = F.embedding(ids.where(is_here, 0), self.weight)
        return sum_ranks(x.masked_fill_(~is_here[:, None], 0.0))


def sum_ranks(x: Tensor) -> Tensor:
    """Replace x [n, hidden] by the sum of all ranks' x, and return it. Three or more ranks are
    added in order, because in an all-reduce the order may depend on the place of the element."""
    if world_size() == 2:
        run_collective(dist.all_reduce, x)
        return x
    first, *others = gather_tensors(x)
    x.copy_(first)
    for part in others:
        x.add_(part)
    return x


def gather_ids(logits: Tensor, n_ids: int) -> Tensor:
    """Return the logits [n, n_ids] of all ids, from those of each rank's own."""
    return gather_tensors(logits).transpose(0, 1).flatten(1)[:, :n_ids]


def gather_tensors(x: Tensor) -> Tensor:
    """Return every rank's x, stacked by rank."""
    stacked = x.new_empty(world_size(), *x.shape)
    run_collective(dist.all_gather, list(stacked.unbind()), x.contiguous())
    return stacked
