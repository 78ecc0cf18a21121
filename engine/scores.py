"""What the host reads of a pass's logits: each row's best token, and a few candidates.

The logits stay where the model is. On a CPU they are read when they are needed. On a GPU every
separate read waits for the device, so the few numbers that the host needs are computed in the pass
(`rank`, which is part of its CUDA graph) and read once.

    scores = scores_of(hidden, logits, Ranking(3, are_logprobs=True))
    ids, logprobs = scores.top(3)  # [n, 3] each

Shapes: n rows, V vocabulary, k candidates per row.
"""

from functools import cached_property
from typing import NamedTuple

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from methods.sampler import FEW, few_best, tempered


class Ranking(NamedTuple):
    """What the host reads of each row with a pass."""

    k: int = 0  # candidates
    are_logprobs: bool = False  # the candidates' values are log-probabilities, not logits
    is_read: bool = True  # False: nothing is read, because candidates are drawn on the device
    temperature: float = 1.0  # of log-probabilities


class Scores:
    """The last hidden states [n, hidden] and logits [n, V] of a pass."""

    def __init__(self, hidden: Tensor, logits: Tensor):
        self.hidden, self.logits = hidden, logits

    @cached_property
    def highest(self) -> tuple[ndarray, ndarray]:
        """Each row's highest logit [n] and its id [n], the first of equal ones. The logit is not
        finite if the row holds inf or nan, or only -inf."""
        values, ids = maxima(self.logits.cpu().numpy(), 1)
        return values[:, 0], ids[:, 0]

    def argmax(self) -> list[int]:
        """Return each row's best id."""
        return self.highest[1].tolist()

    def finite(self) -> list[bool]:
        """Return whether each row's highest logit is finite, so that it has a best id."""
        return numpy.isfinite(self.highest[0]).tolist()

    def best(self, k: int) -> ndarray:
        """Return the k best ids of each row [n, k], best first, or all V if k is more."""
        k = min(k, self.logits.shape[1])
        if k > FEW or self.logits.device.type != "cpu":
            return self.logits.topk(k).indices.cpu().numpy()
        return maxima(self.logits.numpy().copy(), k)[1]

    def top(
        self, k: int, temperature: float = 1.0, n_ids: int | None = None
    ) -> tuple[ndarray, ndarray]:
        """Return the k most likely of the first n_ids ids, and their log-probabilities, [n, k]
        each."""
        logprobs = log_probabilities(self.logits[:, :n_ids], temperature)
        k = min(k, logprobs.shape[1])
        if k > FEW or logprobs.device.type != "cpu":
            found = logprobs.topk(k)
            return found.indices.cpu().numpy(), found.values.cpu().numpy()
        values, ids = maxima(logprobs.numpy(), k)
        return ids, values


class ReadScores(Scores):
    """Scores of which the host has read some with the pass. The next pass over the same cache may
    overwrite the tensors."""

    def __init__(self, hidden: Tensor, logits: Tensor, ranked: Tensor, ranking: Ranking):
        """ranked: what `rank` returned for these logits, on the host."""
        super().__init__(hidden, logits)
        found, k = ranked.numpy(), ranking.k
        middle = found.shape[1] // 2 + 1
        values, ids = found[:, 2:middle], found[:, middle:]  # more or fewer than k columns
        self.ranking = ranking
        self.highest = found[:, 0], found[:, 1].astype(numpy.int64)
        self.candidates = ids[:, :k].astype(numpy.int64), values[:, :k]

    def best(self, k: int) -> ndarray:
        return self.candidates[0] if self.ranking.k == k else super().best(k)

    def top(
        self, k: int, temperature: float = 1.0, n_ids: int | None = None
    ) -> tuple[ndarray, ndarray]:
        is_read = self.ranking == Ranking(k, are_logprobs=True, temperature=temperature)
        if is_read and (n_ids is None or self.logits.shape[1] <= n_ids):
            return self.candidates
        return super().top(k, temperature, n_ids)


def scores_of(hidden: Tensor, logits: Tensor, ranking: Ranking) -> Scores:
    """Return the scores of a pass that does not rank its logits itself."""
    if logits.device.type == "cpu" or not ranking.is_read:
        return Scores(hidden, logits)
    return ReadScores(hidden, logits, rank(logits, ranking).cpu(), ranking)


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities [n, V] of logits [n, V] at a temperature."""
    return torch.log_softmax(tempered(logits, temperature), dim=-1)


def maxima(values: ndarray, k: int) -> tuple[ndarray, ndarray]:
    """Return the k highest of each row of values [n, V], and their ids, [n, k] each: the highest
    first, and the first of equal ones. Overwrites all of them in `values` but the last."""
    rows = numpy.arange(len(values))
    found = numpy.empty((len(values), k), numpy.float32)
    ids = numpy.empty((len(values), k), numpy.int64)
    for i in range(k):
        ids[:, i] = values.argmax(axis=1)  # torch takes ten times as long
        found[:, i] = values[rows, ids[:, i]]
        if i + 1 < k:
            values[rows, ids[:, i]] = -numpy.inf
    return found, ids


def rank(logits: Tensor, ranking: Ranking) -> Tensor:
    """Return what the host reads of logits [n, V], as float32 [n, 2 + 2 k]: the highest logit, its
    id (the first of equal ones), the values of k candidates, and their ids.

    float32 holds every id below 2^24 exactly.
    """
    k = min(ranking.k, logits.shape[1])
    values = logits
    if ranking.are_logprobs:
        values = log_probabilities(logits, ranking.temperature)
    if k > FEW:  # topk does not say which of equal values it takes
        few = [*few_best(values, 1), values.topk(k)]
    else:
        if k > 1 and values is logits:
            values = values.clone()  # few_best overwrites it, and the logits are still needed
        few = few_best(values, max(k, 1))
        few = few[:1] + few[:k]
    (highest, *found), ids = zip(*few, strict=True)
    ids = torch.cat(ids, dim=1).float()
    return torch.cat([highest, ids[:, :1], *found, ids[:, 1:]], dim=1)
