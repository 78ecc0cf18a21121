"""Scores: the logits of a pass on the device, and the best of them read to the host with the pass.

The logits stay where the model is. What the host needs of them is little: the best id of each row,
whether the row is finite at all, and a few candidates. It comes with the pass, by one read; on CUDA
what ranks the logits is a graph, too (engine/cuda_graphs.py).

    scores = scores_of(x, logits, Ranking(3, are_logprobs=True))
    scores.argmax()  # n ids
    ids, logprobs = scores.top(3)  # [n, 3] each

Shapes: n rows, V vocabulary, k candidates per row.
"""

from typing import NamedTuple

import numpy
import torch
from numpy import ndarray
from torch import Tensor

FEW = 8  # candidates up to which so many maxima are found sooner than by topk (CPU: measured)


class Ranking(NamedTuple):
    """What is read to the host of each row."""

    k: int = 0  # candidates
    are_logprobs: bool = False  # their values; else they are logits
    is_read: bool = True  # False: nothing, as of a draft from which candidates are drawn
    temperature: float = 1.0  # of log-probabilities: divides the logits before


class Read(NamedTuple):
    """What was read of n rows, on the host."""

    highest: ndarray  # [n] float32, each row's best value; inf or nan if it holds any
    best: ndarray  # [n] int64, its id, of equals the first
    values: ndarray  # [n, k] float32 of the candidates, the likeliest first
    candidates: ndarray  # [n, k] int64, their ids


class ReadScores:
    """Logits of which the host was told some with the pass, if it is that which is asked
    for; all else is computed when it is asked for, and read then."""

    def __init__(self, hidden: Tensor, logits: Tensor, ranking: Ranking, read: Read | None):
        """
        Args:
            hidden: last hidden states [n, hidden]. On CUDA the next pass over the same cache may
                overwrite these and the logits.
            logits: [n, V].
            read: None if the ranking wants nothing.
        """
        self.hidden, self.logits, self.ranking, self.read = hidden, logits, ranking, read

    def argmax(self) -> list[int]:
        return self.read.best.tolist() if self.read else self.logits.argmax(dim=-1).tolist()

    def best(self, k: int) -> ndarray:
        """Return the k likeliest ids of each row, best first: [n, k], or all V if k is more."""
        if self.read and self.ranking.k == k:
            return self.read.candidates
        return self.logits.topk(min(k, self.logits.shape[1])).indices.cpu().numpy()

    def finite(self) -> ndarray:
        if not self.read:
            return self.logits.isfinite().all(dim=-1).cpu().numpy()
        return numpy.isfinite(self.read.highest)  # a row that holds inf or nan has it there

    def top(
        self, k: int, temperature: float = 1.0, n_ids: int | None = None
    ) -> tuple[ndarray, ndarray]:
        is_told = self.ranking == Ranking(k, are_logprobs=True, temperature=temperature)
        if is_told and (n_ids is None or self.logits.shape[1] <= n_ids):
            return self.read.candidates, self.read.values
        logprobs = torch.log_softmax(tempered(self.logits[:, :n_ids], temperature), dim=-1)
        found = logprobs.topk(min(k, logprobs.shape[1]))
        return found.indices.cpu().numpy(), found.values.cpu().numpy()


def scores_of(hidden: Tensor, logits: Tensor, ranking: Ranking) -> ReadScores:
    """What these logits [n, V] say; no more candidates than there are ids."""
    if not ranking.is_read:
        return ReadScores(hidden, logits, ranking, None)
    if logits.device.type != "cpu":
        return read_ranked(hidden, logits, rank(logits, ranking).cpu(), ranking)
    k = min(ranking.k, logits.shape[1])
    values = values_of(logits, ranking)
    numbers = values.detach().numpy()
    n_found = max(k, 1) if k <= FEW else 1
    if n_found > 1 and not ranking.are_logprobs:
        numbers = numbers.copy()  # whoever samples wants the logits as they are
    found, ids = maxima(numbers, n_found)
    highest, best = found[:, 0], ids[:, 0]
    if k > FEW:
        found, ids = (tensor.numpy() for tensor in values.topk(k))
    return ReadScores(hidden, logits, ranking, Read(highest, best, found[:, :k], ids[:, :k]))


def values_of(logits: Tensor, ranking: Ranking) -> Tensor:
    """What the candidates of logits [n, V] are ranked by, [n, V]: these, or log-probabilities."""
    if not ranking.are_logprobs:
        return logits
    return torch.log_softmax(tempered(logits, ranking.temperature), dim=-1)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits [n, V] at a temperature.

    Shifted first: a tiny one may then send all but the best to -inf, never to nan.
    """
    if temperature == 1:
        return logits
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)


def maxima(values: ndarray, k: int) -> tuple[ndarray, ndarray]:
    """The k highest [n, k] of each row of values [n, V], best first, of equals the first, and their
    ids [n, k]. Overwrites all of them but the last."""
    rows = numpy.arange(len(values))
    found = numpy.empty((len(values), k), numpy.float32)
    ids = numpy.empty((len(values), k), numpy.int64)
    for i in range(k):
        ids[:, i] = values.argmax(axis=1)  # ten times as fast as torch's (measured)
        found[:, i] = values[rows, ids[:, i]]
        if i + 1 < k:
            values[rows, ids[:, i]] = -numpy.inf
    return found, ids


def rank(logits: Tensor, ranking: Ranking) -> Tensor:
    """float32 [n, 2 + 2 k]: the highest value, its id, of equals the first, then k values and their
    ids.

    Ids travel as float32, too, which is exact below 2^24.
    """
    k = min(ranking.k, logits.shape[1])
    values = values_of(logits, ranking)
    if k > FEW:  # topk does not say which of equals it takes
        few = [*few_best(values, 1), values.topk(k)]
    else:
        if k > 1 and not ranking.are_logprobs:
            values = values.clone()  # whoever samples wants the logits as they are
        few = few_best(values, max(k, 1))
        few = few[:1] + few[:k]
    (highest, *found), ids = zip(*few, strict=True)
    ids = torch.cat(ids, dim=1).float()
    return torch.cat([highest, ids[:, :1], *found, ids[:, 1:]], dim=1)


def few_best(values: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """The k highest of each row of values [n, V], best first, of equals the first: k times values
    and ids [n, 1], by two kernels each, where topk of a vocabulary is more than twenty. Overwrites
    all of them but the last."""
    found = [values.max(dim=-1, keepdim=True)]
    while len(found) < k:
        values.scatter_(1, found[-1].indices, -torch.inf)
        found.append(values.max(dim=-1, keepdim=True))
    return found


def read_ranked(hidden: Tensor, logits: Tensor, ranked: Tensor, ranking: Ranking) -> ReadScores:
    """The same, of what `rank` gave for these logits, on the host; the first k candidates."""
    found, k = ranked.numpy(), ranking.k
    middle = found.shape[1] // 2 + 1
    values, ids = found[:, 2:middle], found[:, middle:]  # there may be more than k, or fewer
    best, ids = (part.astype(numpy.int64) for part in (found[:, 1], ids[:, :k]))
    return ReadScores(hidden, logits, ranking, Read(found[:, 0], best, values[:, :k], ids))
