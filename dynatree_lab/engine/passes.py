"""The options of a model's passes over one cache, and the sizes of passes of fixed shapes.

A pass may be padded with rows whose results are dropped. There are three reasons. In half precision
on a CPU, one row takes longer than two. A method may require a minimum, so that ar rounds as a tree
does. Strict passes also need a minimum.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from dynatree_lab.engine.masks import PLAIN, Masks
from dynatree_lab.engine.scores import Ranking

# Of passes with fixed shapes. From 128 on, neighbours differ by less than a factor of two, because
# the time of a larger pass grows with its rows on a GPU too
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
SMALL_PASS = 128  # rows; passes of up to this many rows are captured before they are needed
SLOT_STEP = 256


def round_up_rows(n: int) -> int:
    """Return the smallest number of ROW_COUNTS that is at least n."""
    return next(count for count in ROW_COUNTS if count >= n)


def round_up_slots(n: int) -> int:
    """Return n, rounded up to a multiple of SLOT_STEP."""
    return -(-n // SLOT_STEP) * SLOT_STEP


@dataclass(frozen=True)
class Window:
    """The tokens of a sequence that the caches keep; by default all of them.

    These are the first tokens, the sinks, and the latest tokens (Xiao et al. 2024, StreamingLLM).
    When the cache is full, the oldest `slack` tokens after the sinks are dropped. The tokens after
    them move back by `slack` positions, so every position stays in the trained range.

    Tokens are dropped at fixed numbers of committed tokens, and no iteration commits across such a
    number. So trees and ar run over equal caches, and with one window their output is equal. It
    differs from the output with full attention.
    """

    size: int = sys.maxsize  # number of latest tokens that are always kept
    sinks: int = 0  # number of first tokens that are always kept

    def __post_init__(self) -> None:
        if self.size < 1 or self.sinks < 0:
            found = f"size {self.size} and sinks {self.sinks}"
            raise ValueError(f"the window has {found}, they must be at least 1 and 0")

    @property
    def slack(self) -> int:
        """Number of tokens that are dropped when the cache is full."""
        return max(self.size // 4, 1)

    @property
    def max_length(self) -> int:
        """Cache length at which tokens are dropped. All positions are below it."""
        return self.sinks + self.size + self.slack


FULL_ATTENTION = Window()


class PassConfig(NamedTuple):
    """The options of one model's cache and passes. A prefill in chunks uses only n_ids, ranking
    and window."""

    max_rows: int = SMALL_PASS  # rows of a pass, without padding
    min_rows: int = 1  # passes of fewer rows are padded
    n_scratch: int = SMALL_PASS  # slots after the committed ones that a mask may cover
    n_ids: int = sys.maxsize  # number of ids whose logits are returned
    ranking: Ranking = Ranking()  # the numbers that the host reads for each row
    masks: Masks = PLAIN  # those of engine/strict.py make the passes strict
    window: Window = FULL_ATTENTION
    rebuilds_cache: bool = False  # commit runs the accepted tokens again (DynaTree v2, 3.5)
    is_draft: bool = False  # a short prefill is one pass, because every tree starts with one


def buffer_rows(config: PassConfig) -> int:
    """Return the number of rows that the buffers of a generation must have room for."""
    return round_up_rows(max(config.max_rows, config.min_rows, SMALL_PASS))
