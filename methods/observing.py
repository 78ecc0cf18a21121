"""Targets that pass their best tokens to a rule, or their hidden states to a drafter.

compose.py puts an ObservedModel around the target of a rule with `reads_prompt` or `target_top_k`
(methods/rules.py), and a HiddenModel around that of a HiddenDrafter.
"""

import torch
from torch import Tensor

from dynatree import Drafter
from gpt_neox import PREFILL_CHUNK, GPTNeoX, KVCache, Model
from methods.rules import MethodRule


class ObservedModel:
    """A target that passes the prompt to a rule, and the best tokens of each of its passes."""

    def __init__(self, model: Model, rule: MethodRule):
        self.model, self.rule, self.config = model, rule, model.config

    def new_cache(self, capacity: int) -> KVCache:
        # The loop's capacity covers rule.max_rows; retrieved rows come on top of that
        return self.model.new_cache(capacity + self.rule.max_verified)

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        """Run the prompt; by `forward` if the rule observes the target's tokens."""
        self.rule.start(tokens)
        if not self.rule.target_top_k:
            return self.model.prefill(tokens, cache)
        return prefill_by_forward(self, tokens, cache)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        logits = self.model.forward(tokens, positions, cache, mask)
        if k := self.rule.target_top_k:
            top = logits.topk(min(k, logits.shape[1])).indices
            self.rule.observe_target(tokens.tolist(), top.cpu().numpy())
        return logits


def prefill_by_forward(model: Model, tokens: list[int], cache: KVCache) -> Tensor:
    """Run and commit the prompt by `forward`, and return the logits [1, V] after its last token.

    The result is nan if the logits after any token hold nan or +inf.
    """
    is_finite = True
    for ids in torch.tensor(tokens).split(PREFILL_CHUNK):
        positions = torch.arange(cache.length, cache.length + len(ids))
        logits = model.forward(ids, positions, cache)
        is_finite &= bool((logits < torch.inf).all())  # False for nan, too
        cache.commit(range(len(ids)))
    return logits[-1:] if is_finite else torch.full_like(logits[-1:], torch.nan)


class HiddenDrafter(Drafter):
    """A drafter that reads the target's last hidden states, such as EagleDrafter (eagle.py)."""

    def observe_hidden(self, hidden: Tensor) -> None:
        """Receive the states [n, hidden] of one pass of the target, on the target's device.

        They are the states before the final norm, of the next n tokens of the prompt or of the rows
        of a tree. A later pass may overwrite the tensor.
        """
        raise NotImplementedError


class HiddenModel:
    """A target of gpt_neox.py that passes its last hidden states to a drafter."""

    def __init__(self, model: GPTNeoX, drafter: HiddenDrafter):
        self.model, self.drafter = model, drafter
        self.config, self.new_cache = model.config, model.new_cache

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        return prefill_by_forward(self, tokens, cache)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        x = self.model.hidden(tokens, positions, cache, mask)
        self.drafter.observe_hidden(x)
        return self.model.logits(x)
