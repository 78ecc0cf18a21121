"""What a generation asks of its passes, and the passes over one cache.

A pass runs the rows that it is given. Some passes need more rows than that: one row takes longer
than two, ar must be rounded as a tree is, or the pass is strict. Then rows are added, and their
results are dropped. engine/cuda_graphs.py has the passes of CUDA.

    scores = Passes(kv, rotary).forward(model, tokens, positions, mask, start, 1, PassConfig())

Shapes: n rows given, m rows run (m >= n), S cache slots, V vocabulary.
"""

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.scores import Ranking, Scores, scores_of
from engine.strict import StrictMask, build_strict_mask, first_recent, recent_slots
from gpt_neox import GPTNeoX

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
SLOT_STEP = 256


def row_count(n: int) -> int:
    """Return the least row count of ROW_COUNTS that is at least n."""
    return next(count for count in ROW_COUNTS if count >= n)


def slot_count(n: int) -> int:
    """Return n slots, rounded up to a multiple of SLOT_STEP."""
    return -(-n // SLOT_STEP) * SLOT_STEP


@dataclass(frozen=True)
class Window:
    """How many tokens of the sequence the cache keeps; by default all.

    Keeps the first tokens, the sinks, and the latest ones (Xiao et al. 2024, StreamingLLM). When
    the cache is full, the oldest `slack` tokens after the sinks are dropped at once. The tokens
    after them move back by as many positions, so every position stays in the trained range.

    Tokens are dropped at fixed counts of committed tokens, and no iteration commits across such a
    count. So a tree sees the cache that ar has over the same window, and writes ar's text. This is
    not the text of full attention.
    """

    size: int = sys.maxsize  # latest tokens that are always kept
    sinks: int = 0  # first tokens

    def __post_init__(self) -> None:
        if self.size < 1 or self.sinks < 0:
            found = f"size {self.size} and sinks {self.sinks}"
            raise ValueError(f"a window has {found}, they must be at least 1 and 0")

    @property
    def slack(self) -> int:
        """Number of tokens that are dropped at once."""
        return max(self.size // 4, 1)

    @property
    def full(self) -> int:
        """Number of cached tokens at which some are dropped. No position reaches it."""
        return self.sinks + self.size + self.slack


WHOLE_TEXT = Window()


class PassConfig(NamedTuple):
    """What a generation asks of one model's cache and passes. A prefill in chunks uses only n_ids,
    ranking, window and shows_prompt."""

    max_rows: int = ROW_COUNTS[-1]  # of a pass
    min_rows: int = 1
    n_scratch: int = ROW_COUNTS[-1]  # slots above the committed ones that a mask may cover
    n_ids: int = sys.maxsize  # logits of ids from here on are dropped
    ranking: Ranking = Ranking()  # what the host reads of each row's logits
    is_strict: bool = False  # a row's bits depend only on its position and its keys
    window: Window = WHOLE_TEXT
    rebuilds_cache: bool = False  # commit runs the accepted tokens again (DynaTree v2, 3.5)
    is_draft: bool = False  # every tree starts with a prefill of few tokens: it is one pass
    shows_prompt: bool = False  # the logits after every token of the prompt are computed


def causal_mask(n: int) -> Tensor:
    """Return the bool mask [n, n] of rows that attend to the rows before them and to themselves."""
    return torch.ones(n, n, dtype=torch.bool).tril_()


def additive_causal_mask(n: int, start: int, like: Tensor) -> Tensor:
    """Return the mask [n, start + n], 0 or -inf, of n rows after `start` slots. Its device and
    dtype are those of `like`."""
    return blocked(n, start + n, like).triu_(start + 1)


def additive_mask(mask: Tensor, length: int, like: Tensor) -> Tensor:
    """Return a mask [n, length + m], 0 or -inf, on the device and in the dtype of `like`.

    mask: [n, m] bool over the slots from `length` on. Every row attends to all older slots.
    """
    n, n_slots = mask.shape
    added = blocked(n, length + n_slots, like)
    added[:, :length] = 0.0
    added[:, length:].masked_fill_(mask.to(like.device, non_blocking=True), 0.0)
    return added


def blocked(n: int, n_slots: int, like: Tensor) -> Tensor:
    """Return [n, S] of -inf."""
    aligned = -(-n_slots // 8) * 8  # CUDA's attention copies other masks in every layer
    return like.new_full((n, aligned), -math.inf)[:, :n_slots]


class Passes:
    """The passes over one cache, whose memory it holds."""

    def __init__(self, kv: Tensor, rotary: Tensor):
        """kv: [2, L, H, slots, D]. rotary: [slots, R / 2] complex64."""
        self.kv, self.rotary = kv, rotary

    def forward(
        self,
        model: GPTNeoX,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        start: int,
        n_last: int,
        config: PassConfig,
    ) -> Scores:
        """Run GPTNeoX.forward for rows that are written to the slots from `start` on. Returns the
        scores of the last n_last rows.

        Rows that are added have token 0. Their mask is not empty, because softmax over nothing is
        nan.
        """
        n = len(tokens)
        m = max(n, config.min_rows)
        length = start if mask is None else start + n - mask.shape[1]  # slots below the mask
        if config.is_strict:
            most = max(config.max_rows, config.min_rows)
            if m > most:
                raise ValueError(f"a strict pass has {n} rows, it must have at most {most}")
            added = strict_mask(positions, mask, length, m, self.kv.device)
        elif m == n and mask is None:
            added = additive_causal_mask(n, start, self.kv)
        elif m == n:
            added = additive_mask(mask, length, self.kv)
        else:
            mask = F.pad(causal_mask(n) if mask is None else mask, (0, 0, 0, m - n))
            mask[n:, 0] = True
            added = additive_mask(mask, length, self.kv)
        if m > n:
            tokens, positions = (F.pad(ids, (0, m - n)) for ids in (tokens, positions))
        x = self.hidden(model, tokens, positions, start, added)  # [m, hidden]
        first = max(min(n - n_last, m - config.min_rows), 0)  # the head needs min_rows as well
        logits = model.embed_out(x[first:])
        logits = logits[n - n_last - first : n - first, : config.n_ids].float()
        return scores_of(x[n - n_last : n], logits, config.ranking)

    def prefill(self, model: GPTNeoX, tokens: Tensor, start: int) -> Tensor:
        """Run the next tokens [n] of the sequence. Returns their last hidden states [n, hidden]."""
        n = len(tokens)
        mask = additive_causal_mask(n, start, self.kv)
        return self.hidden(model, tokens, torch.arange(start, start + n), start, mask)

    def hidden(
        self,
        model: GPTNeoX,
        tokens: Tensor,
        positions: Tensor,
        start: int,
        mask: Tensor | StrictMask,
    ) -> Tensor:
        """Run these rows and return their last hidden states [n, hidden]."""
        device = self.kv.device
        rotary = self.rotary.index_select(0, positions.to(device, non_blocking=True))
        tokens = tokens.to(device, non_blocking=True)
        return model.gpt_neox(tokens, rotary, self.kv, start, mask)


def strict_mask(
    positions: Tensor, mask: Tensor | None, length: int, m: int, device: torch.device
) -> StrictMask:
    """Return the mask of a strict pass of m rows, of which the first n are given."""
    recent = recent_slots(positions, mask, length)
    n_old = slot_count(int(first_recent(positions).max()))
    padding = m - len(positions)
    recent = F.pad(recent, (0, 0, 0, padding)).to(device)
    return build_strict_mask(F.pad(positions, (0, padding)).to(device), recent, n_old)
