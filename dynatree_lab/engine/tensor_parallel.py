"""Tensor parallelism: one rank's shard of the target, and the sums that combine all shards.

Every rank holds some heads of each layer, some columns of each MLP's inner dimension and some ids
of the vocabulary. It computes with them as one process does with all of them. An all-reduce adds up
the ranks' results where a layer adds to x. In a GPT-NeoX with parallel residual, attention and MLP
are added to x together, so a layer needs one all-reduce. Most other models need two.

    shard = Shard(1, 2)
    start, end = shard.bounds(50304)  # this rank's rows of the embedding

UNSHARDED is the shard of a process that holds the whole model.

Shapes: n rows.
"""

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dynatree_lab.engine.ranks import rank, require_equal, run_collective, world_size

# Weights and biases split along the output axis. A head's query, key and value rows are adjacent
COLUMN_PARALLEL = ("attention.query_key_value", "mlp.dense_h_to_4h", "embed_in", "embed_out")
# Weights split along the input axis, which is the output axis of the layers above
ROW_PARALLEL = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


def split_axis(name: str) -> int | None:
    """Return the axis along which ranks split a tensor, or None if every rank has all of it."""
    if name.endswith(ROW_PARALLEL):
        return 1
    return 0 if name.rpartition(".")[0].endswith(COLUMN_PARALLEL) else None


@dataclass(frozen=True)
class Shard:
    """The part of a model that one rank holds."""

    rank: int = 0
    world_size: int = 1

    def bounds(self, n: int) -> tuple[int, int]:
        """Return start and end of this rank's items, of n in total."""
        size = self.size(n)
        return min(self.rank * size, n), min((self.rank + 1) * size, n)

    def size(self, n: int) -> int:
        """Return the number of items per rank, of n in total. The last ranks may have fewer."""
        return -(-n // self.world_size)

    def require_equal(self, *inputs: Tensor | None) -> None:
        """Raise RanksError on all ranks unless they have equal inputs of a pass."""
        if self.world_size > 1:
            require_equal(*inputs)

    def sum(self, x: Tensor, in_order: bool = False) -> Tensor:
        """Replace x [n, hidden] by the sum of all ranks' x, and return it.

        in_order: add in the order of ranks. In an all-reduce of three or more ranks, the order may
        depend on the place of the element.
        """
        if in_order and self.world_size > 2:
            first, *others = self.gather(x)
            x.copy_(first)
            for part in others:
                x.add_(part)
        elif self.world_size > 1:
            run_collective(dist.all_reduce, x)
        return x

    def concatenate(self, x: Tensor) -> Tensor:
        """Return the columns of all ranks, [n, m * world_size], from each rank's x [n, m]."""
        if self.world_size == 1:
            return x
        return self.gather(x.contiguous()).transpose(0, 1).flatten(1)

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, stacked by rank."""
        stacked = x.new_empty(self.world_size, *x.shape)
        run_collective(dist.all_gather, list(stacked.unbind()), x)
        return stacked

    def embed(self, tokens: Tensor, embedding: nn.Module) -> Tensor:
        """Return the embeddings [n, hidden] of tokens [n]. embedding: has this rank's rows.

        The sum is exact, because only one rank has a token's embedding and the others add 0.
        """
        if self.world_size == 1:
            return embedding(tokens)
        table = embedding.weight
        ids = tokens - self.rank * len(table)
        is_here = (ids >= 0) & (ids < len(table))  # [n]
        x = F.embedding(ids.where(is_here, 0), table)
        return self.sum(x.masked_fill_(~is_here[:, None], 0.0))


UNSHARDED = Shard()


def own_shard() -> Shard:
    """Return this rank's shard; without torchrun, UNSHARDED."""
    return UNSHARDED if world_size() == 1 else Shard(rank(), world_size())
