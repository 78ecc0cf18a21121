"""Two drafts as one gpt_neox.Model: the mean of their next-token distributions."""

import torch
from torch import Tensor

from gpt_neox import KVCache, Model


class MixtureCache(KVCache):
    """The caches of the drafts, which run and commit the same rows."""

    def __init__(self, caches: list[KVCache]):
        self.caches = caches

    @property
    def length(self) -> int:
        return self.caches[0].length

    @length.setter
    def length(self, length: int) -> None:
        for cache in self.caches:
            cache.length = length

    def commit(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.commit(rows)


class Mixture:
    def __init__(self, *drafts: Model):
        self.drafts, self.config, self.device = drafts, drafts[0].config, drafts[0].device

    def new_cache(self, capacity: int) -> MixtureCache:
        return MixtureCache([draft.new_cache(capacity) for draft in self.drafts])

    def prefill(self, tokens: list[int], cache: MixtureCache) -> Tensor:
        parts = zip(self.drafts, cache.caches, strict=True)
        return mean([draft.prefill(tokens, own) for draft, own in parts])

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: MixtureCache, mask: Tensor | None = None
    ) -> Tensor:
        parts = zip(self.drafts, cache.caches, strict=True)
        return mean([draft.forward(tokens, positions, own, mask) for draft, own in parts])


def mean(logits: list[Tensor]) -> Tensor:
    """Return logits [n, V] of the mean of the distributions of several logits [n, V]."""
    return torch.stack([each.log_softmax(dim=-1) for each in logits]).logsumexp(dim=0)
