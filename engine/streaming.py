"""Streaming: text of any length over a cache of constant size (Xiao et al. 2024, StreamingLLM).

The cache keeps the first tokens, the sinks that every head leans on, and a window of the latest.
Whenever it has filled up, the oldest `slack` tokens after the sinks are dropped in one move and
those after them step back by as many positions, so that positions stay inside the trained range
however long the text. What is written is no longer the text of full attention.

A drop happens at fixed counts of committed tokens, and no iteration commits across one. So a tree
decodes over exactly the cache that ar has, and its text is ar's over the same window. The drop
itself is engine.model.FastCache's.
"""

import sys
from dataclasses import dataclass

DEFAULT_SINKS = 4  # the paper's number


@dataclass(frozen=True)
class Window:
    """How much of the text the cache keeps; by default all of it."""

    size: int = sys.maxsize  # of the latest tokens, those that are always there
    sinks: int = 0  # of the first tokens

    def __post_init__(self) -> None:
        """Raise ValueError for a window of nothing."""
        if self.size < 1 or self.sinks < 0:
            raise ValueError(f"a window of {self.size} tokens, {self.sinks} sinks: 1 and 0 or more")

    @property
    def slack(self) -> int:
        """Tokens dropped at once: rarely enough to cost little, few enough to need little room."""
        return max(self.size // 4, 1)

    @property
    def full(self) -> int:
        """Cached tokens at which a drop is due; no position ever reaches it."""
        return self.sinks + self.size + self.slack


WHOLE_TEXT = Window()
