"""The mask of a pass as numbers that are added to its scores, and passes padded to more rows.

A pass over a plain cache has the rows that it was asked for. One that must have some number of them
at least, because one row costs more than two, because ar is to be rounded as a tree is, or because
it is strict, is padded here, and what was added is cut off again.

    bias = open_bias(mask, cache.length, like=model.gpt_neox.embed_in.weight)
    scores = PaddedPasses(run, kv, turns).forward(tokens, positions, mask, length, start, 1, use)

Shapes: n rows asked for, m rows run (so m >= n), S cache slots, V vocabulary.
"""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.scores import Ranking, ReadScores, scores_of
from engine.streaming import WHOLE_TEXT, Window
from engine.strict import Sight, first_near, near_slots, open_sight

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
SLOT_STEP = 256

# run(tokens, positions, kv, turns, start, bias, first) -> logits of the rows from `first` on; that
# function is asked for before each pass, as whoever keeps it must not keep its model
Run = Callable[[], Callable[..., tuple[Tensor, Tensor]]]


def row_count(n: int) -> int:
    """The rows that a pass of n is padded to."""
    return next(count for count in ROW_COUNTS if count >= n)


def slot_count(n: int) -> int:
    """The slots that a pass over n is padded to."""
    return -(-n // SLOT_STEP) * SLOT_STEP


class Use(NamedTuple):
    """What a generation asks of a cache and of the passes over it; prefill obeys n_ids alone."""

    n_rows: int = ROW_COUNTS[-1]  # of the widest
    min_rows: int = 1  # to which every pass is padded at least
    n_scratch: int = ROW_COUNTS[-1]  # slots above what is committed that a mask may speak of
    n_ids: int = sys.maxsize  # of the vocabulary, the first so many count
    ranking: Ranking = Ranking()  # what is wanted of each row
    is_strict: bool = False  # each row's bits are to depend on its position and its keys alone
    window: Window = WHOLE_TEXT  # what of the text is kept
    is_rebuilt: bool = False  # what is committed is run again, as the paper does (section 3.5)


def causal_mask(n: int) -> Tensor:
    """[n, n] bool: of its own pass each row attends what is before it, and itself."""
    return torch.ones(n, n, dtype=torch.bool).tril_()


def causal_bias(n: int, start: int, like: Tensor) -> Tensor:
    """The same as numbers to add: 0 or -inf, where the model is, and in its dtype."""
    return blocked(n, start + n, like).triu_(start + 1)


def open_bias(mask: Tensor, length: int, like: Tensor) -> Tensor:
    """0 where a row may attend, else -inf: [n, length + s] where the model is, and in its dtype.

    mask: [n, s] of the slots from `length` on; what is below all attend."""
    n, n_slots = mask.shape
    bias = blocked(n, length + n_slots, like)
    bias[:, :length] = 0.0
    bias[:, length:].masked_fill_(mask.to(like.device, non_blocking=True), 0.0)
    return bias


def blocked(n: int, n_slots: int, like: Tensor) -> Tensor:
    """-inf everywhere, [n, S]."""
    aligned = -(-n_slots // 8) * 8  # CUDA's attention copies, layer by layer, a mask that is not
    return like.new_full((n, aligned), -math.inf)[:, :n_slots]


class PaddedPasses:
    """The passes of at least so many rows over one cache."""

    def __init__(self, run: Run, kv: Tensor, turns: Tensor):
        self.run, self.kv, self.turns = run, kv, turns

    def has_room(self, n: int, mask: Tensor | None, use: Use) -> bool:
        """Whether a pass of n rows is one of these."""
        return True

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        length: int,
        start: int,
        n_last: int,
        use: Use,
    ) -> ReadScores:
        """GPTNeoX.forward of use.min_rows or more; the mask is of the slots from `length` on.

        Rows added are of token 0 and see something, as every row must.
        """
        n = len(tokens)
        m = max(n, use.min_rows)
        if use.is_strict:
            if m > max(use.n_rows, use.min_rows):
                raise ValueError(f"{n} rows in a strict pass: the rule's max_rows is {use.n_rows}")
            bias = strict_sight(positions, mask, length, m, self.kv.device)
        else:
            mask = causal_mask(n) if mask is None else mask
            mask = F.pad(mask, (0, 0, 0, m - n))
            mask[n:, 0] = True
            bias = open_bias(mask, length, self.kv)
        tokens = F.pad(tokens, (0, m - n)).to(self.kv.device)
        positions = F.pad(positions, (0, m - n)).to(self.kv.device)
        first = max(min(n - n_last, m - use.min_rows), 0)  # the head's product is one of rows, too
        x, logits = self.run()(tokens, positions, self.kv, self.turns, start, bias, first)
        rows = slice(n - n_last - first, n - first)
        return scores_of(x[rows], logits[rows, : use.n_ids].float(), use.ranking)


def strict_sight(
    positions: Tensor, mask: Tensor | None, length: int, m: int, device: torch.device
) -> Sight:
    """What m rows attend by position, of which the first n are asked for."""
    near = near_slots(positions, mask, length)
    n_far = slot_count(int(first_near(positions).max()))
    padding = m - len(positions)
    near = F.pad(near, (0, 0, 0, padding)).to(device)
    return open_sight(F.pad(positions, (0, padding)).to(device), near, n_far)
