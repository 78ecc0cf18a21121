"""One rank's shard of a model, and how the shards' results are combined.

Every rank holds some heads of each layer, some columns of each MLP's inner dimension and some ids
of the vocabulary. It computes with them as one process does with all of them. The results are added
up only where a layer adds to x. In a GPT-NeoX with parallel residual, attention and MLP are added
to x together, so each layer needs one all-reduce, where most other models need two.

    shard = Shard(1, 2, all_reduce, all_gather, gather_objects)
    start, end = shard.bounds(50304)  # this rank's rows of the embedding
    x.add_(shard.sum(layer.dense_and_out(both)))

UNSHARDED is the shard of a process that holds the whole model.

Shapes: n rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

# Split along the output axis, weights and biases. A head's query, key and value rows are adjacent
COLUMN_PARALLEL = ("attention.query_key_value", "mlp.dense_h_to_4h", "embed_in", "embed_out")
# Split along the input axis, which is the output of the layers above
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
    all_reduce: Callable[[Tensor], None] | None = None  # replaces a tensor by the sum of all ranks'
    all_gather: Callable[[list[Tensor], Tensor], None] | None = None  # fills a list, by rank
    gather_objects: Callable[[object], list] | None = None  # returns every rank's value, by rank

    def every(self, value: object) -> list:
        """Return each rank's value, by rank. All ranks must call it."""
        return [value] if self.world_size == 1 else self.gather_objects(value)

    def bounds(self, n: int) -> tuple[int, int]:
        """Return the first of n items that are this rank's, and the end of them."""
        size = self.size(n)
        return min(self.rank * size, n), min((self.rank + 1) * size, n)

    def size(self, n: int) -> int:
        """Return how many of n items a rank has room for. The last rank may have fewer."""
        return -(-n // self.world_size)

    def sum(self, x: Tensor, in_order: bool = False) -> Tensor:
        """Replace x [n, hidden] by the sum of all ranks' x, and return it.

        in_order: add by rank in every element. An all-reduce may add three or more numbers in an
        order that depends on the place of the element.
        """
        if self.world_size == 1:
            return x
        if in_order and self.world_size > 2:
            parts = self.gather(x)
            x.copy_(parts[0])
            for part in parts[1:]:
                x.add_(part)
        else:
            self.all_reduce(x)
        return x

    def concatenate(self, x: Tensor) -> Tensor:
        """Return all ranks' columns [n, m * world_size] of this rank's x [n, m]."""
        if self.world_size == 1:
            return x
        return self.gather(x.contiguous()).transpose(0, 1).flatten(1)

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, stacked by rank."""
        found = x.new_empty(self.world_size, *x.shape)
        self.all_gather(list(found.unbind()), x)
        return found

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings [n, hidden] of tokens [n]. table: this rank's rows of the matrix.

        The result is exact, because all but one of the added numbers are 0.
        """
        if self.world_size == 1:
            return F.embedding(tokens, table)
        ids = tokens - self.rank * len(table)
        is_here = (ids >= 0) & (ids < len(table))  # [n]
        x = F.embedding(ids.where(is_here, 0), table)
        return self.sum(x.masked_fill_(~is_here[:, None], 0.0))


UNSHARDED = Shard()
