"""A repetition penalty as a logits processor (Keskar et al. 2019; repetition_penalty elsewhere)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RepetitionPenalty:
    """Makes tokens that a text already has less likely."""

    penalty: float  # above 1

    def __call__(self, logits: Tensor, texts: Sequence[list[int]]) -> Tensor:
        for row, text in enumerate(texts):
            ids = torch.tensor(sorted(set(text)), device=logits.device)
            found = logits[row, ids]
            logits[row, ids] = torch.where(found > 0, found / self.penalty, found * self.penalty)
        return logits
