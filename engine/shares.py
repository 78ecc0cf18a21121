"""What one of several ranks has of a model, and how their parts become whole.

Each rank has some heads of every layer, some columns of every MLP's inside and some ids of the
vocabulary, and computes with them exactly as one process does with all of them. Only where a layer
leads back to x are the parts added up: in a GPT-NeoX with parallel residual, whose attention and
MLP are added to x together, that is one sum per layer where most other models need two.

    share = Share(1, 2, reduce, collect, gather_objects)
    start, end = share.bounds(50304)  # this rank's rows of the embedding
    x.add_(share.sum(layer.out_of(both)))

WHOLE is the share of a process that has all of it: nothing is split, and nobody is asked.

Shapes: n rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

# By rows, weights and biases: a head's queries, keys and values lie together. By columns what leads
# out of heads and inside, as each rank has some of these
BY_ROWS = ("attention.query_key_value", "mlp.dense_h_to_4h", "embed_in", "embed_out")
BY_COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


def split_axis(name: str) -> int | None:
    """The axis of a tensor along which ranks split it; None if each has all of it."""
    if name.endswith(BY_COLUMNS):
        return 1
    return 0 if name.rpartition(".")[0].endswith(BY_ROWS) else None


@dataclass(frozen=True)
class Share:
    """Of one rank."""

    index: int = 0
    count: int = 1
    reduce: Callable[[Tensor], None] | None = None  # a tensor to the sum of all ranks', in place
    collect: Callable[[list[Tensor], Tensor], None] | None = None  # all ranks' tensors, by rank
    gather_objects: Callable[[object], list] | None = None  # every rank's value, by rank

    def every(self, value: object) -> list:
        """What each rank has for a value, by rank."""
        return [value] if self.count == 1 else self.gather_objects(value)

    def bounds(self, n: int) -> tuple[int, int]:
        """The first of n things that are this rank's, and the one after the last."""
        size = self.size(n)
        return min(self.index * size, n), min((self.index + 1) * size, n)

    def size(self, n: int) -> int:
        """How many of n things every rank has room for; the last may have fewer."""
        return -(-n // self.count)

    def sum(self, x: Tensor, in_order: bool = False) -> Tensor:
        """The sum of all ranks' x [n, hidden], in place.

        in_order: by rank in each element. Else it may be added up in an order that depends on where
        an element lies, which three or more numbers tell.
        """
        if self.count == 1:
            return x
        if in_order and self.count > 2:
            parts = self.parts(x)
            x.copy_(parts[0])
            for part in parts[1:]:
                x.add_(part)
        else:
            self.reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' columns: of [n, m] here, [n, m * count]."""
        if self.count == 1:
            return x
        return self.parts(x.contiguous()).transpose(0, 1).flatten(1)

    def parts(self, x: Tensor) -> Tensor:
        """What every rank has for x, by rank in front."""
        found = x.new_empty(self.count, *x.shape)
        self.collect(list(found.unbind()), x)
        return found

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of an embedding [n, hidden] of which `table` has those of this rank.

        Exact: all but one of the numbers that are added up are 0.
        """
        if self.count == 1:
            return F.embedding(tokens, table)
        ids = tokens - self.index * len(table)
        is_here = (ids >= 0) & (ids < len(table))  # [n]
        x = F.embedding(ids.where(is_here, 0), table)
        return self.sum(x.masked_fill_(~is_here[:, None], 0.0))


WHOLE = Share()
