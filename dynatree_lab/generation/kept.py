"""A cache that is kept from one text to the next, so their common beginning is not run again.

Every text has new caches (run.py). A KeptCache copies the one of the last text, and gives the next
one its first tokens: those with which both texts begin. All else is that of a fresh run.

    kept = KeptCache(), KeptCache()  # of the target and of the draft
    for prompt in prompts:
        steps = list(generate(target, draft, prompt, config, 64, kept=kept))

A tree rounds a token's keys and values otherwise than a prompt does. In float32 the ids are equal.
Strict texts must have equal bits, so they get only whole chunks of a prompt, and none after the
window has dropped tokens.

Shapes: L layers, H heads, S slots in use, D head size, n tokens.
"""

from itertools import takewhile
from operator import eq

import torch
from torch import Tensor

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.memory import memory_for
from dynatree_lab.engine.passes import FULL_ATTENTION, SMALL_PASS, PassConfig
from gpt_neox import PREFILL_CHUNK


class KeptCache:
    """A copy of a cache after a text; empty while a text is written."""

    def __init__(self) -> None:
        self.ids: list[int] = []  # of the n tokens that were run, also of dropped ones
        self.kv: Tensor | None = None  # [2, L, H, S, D]
        self.states: Tensor | None = None  # a target's last hidden states [n, hidden]
        self.n_dropped, self.window = 0, FULL_ATTENTION
        self.n_prefilled = 0  # first tokens that were run as a fresh run of a prompt runs them

    def restore(self, cache: FastCache, text: list[int], is_strict: bool) -> int:
        """Give an empty cache the tokens with which it may begin, and return their number.

        text: the prompt without its last token, which is always run.
        """
        n = self.count_usable(text, cache.config, is_strict)
        if n:
            cache.length, cache.n_dropped = n - self.n_dropped, self.n_dropped
            cache.kv[:, :, :, : cache.length] = self.kv[:, :, :, : cache.length]
        if not cache.config.is_draft:
            cache.states = [self.states[:n]] if n else []
        self.n_prefilled = len(text) if is_strict or not n else min(self.n_prefilled, n)
        self.ids, self.kv, self.states = [], None, None
        return n

    def count_usable(self, text: list[int], config: PassConfig, is_strict: bool) -> int:
        """Return how many of the kept tokens a cache of this config may have for a text."""
        n, window = sum(takewhile(bool, map(eq, self.ids, text))), config.window
        if self.n_dropped:
            n_at_drop = self.n_dropped + window.max_length - window.slack
            is_usable = window == self.window and n >= n_at_drop and not is_strict
            return n if is_usable else 0
        n = min(n, window.max_length - 1)  # a full cache drops tokens
        if is_strict:
            # A draft runs the last SMALL_PASS tokens in another kind of pass (FastGPTNeoX.prefill)
            n_run = SMALL_PASS if config.is_draft else 0
            n = max(min(n, self.n_prefilled, len(text) - n_run), 0)
            n -= n % PREFILL_CHUNK
        return n

    @torch.inference_mode()
    def save(self, cache: FastCache, text: list[int]) -> None:
        """Keep a copy of a cache, whose tokens are the first ones of a text. Raises OutOfMemory."""
        with memory_for("a copy of the cache for the next text"):
            self.kv = cache.kv[:, :, :, : cache.length].clone()
            self.states = torch.cat(cache.states) if cache.states else None
        self.n_dropped, self.window = cache.n_dropped, cache.config.window
        self.ids = text[: self.n_dropped + cache.length]
        self.n_prefilled = min(self.n_prefilled, len(self.ids))
