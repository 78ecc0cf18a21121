"""The results of a pass that the host reads: each row's best token, and a few candidates.

The logits stay on the model's device. On a CPU, they are ranked when results are needed. On a GPU,
every read waits for the device. So the pass also ranks its logits, by `rank_logits` in its CUDA
graph, and the host reads the few numbers that it needs at once.

    scores = make_scores(hidden, logits, Ranking(3, are_logprobs=True))
    ids, logprobs, _ = scores.top_candidates(Ranking(3))  # [n, 3] each

Shapes: n rows, V vocabulary, k candidates per row.
"""

from functools import cached_property
from typing import NamedTuple

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from draft_tree import Candidates
from dynatree_lab.methods.overflow import finite_rows
from dynatree_lab.methods.sampler import SMALL_K, top_k_by_repeated_max
from sampling import tempered


class Ranking(NamedTuple):
    """The numbers that the host reads for each row of a pass."""

    k: int = 0  # number of candidates
    are_logprobs: bool = False  # the candidates' values are log-probabilities, not logits
    is_read: bool = True  # False: the host reads nothing, because the device draws the candidates
    temperature: float = 1.0  # of the log-probabilities
    has_entropy: bool = False  # also the entropy of the distribution


class Scores:
    """The last hidden states [n, hidden], None if unknown, and the logits [n, V] of a pass."""

    def __init__(self, hidden: Tensor | None, logits: Tensor):
        self.hidden, self.logits = hidden, logits

    @cached_property
    def highest(self) -> tuple[ndarray, ndarray]:
        """Each row's highest logit [n] and its id [n], the first of equal ones. The logit is not
        finite if the row contains +inf or nan, or only -inf."""
        values, ids = top_k_by_argmax(self.logits.cpu().numpy(), 1)
        return values[:, 0], ids[:, 0]

    def argmax(self) -> list[int]:
        """Return each row's best id."""
        return self.highest[1].tolist()

    def finite_rows(self) -> list[bool]:
        """Return what methods.overflow.finite_rows returns. Raises as it does."""
        return finite_rows(torch.from_numpy(self.highest[0]))

    def top_ids(self, k: int) -> ndarray:
        """Return the k best ids of each row [n, k], best first; all V if k is larger."""
        k = min(k, self.logits.shape[1])
        if k > SMALL_K or self.logits.device.type != "cpu":
            return self.logits.topk(k).indices.cpu().numpy()
        return top_k_by_argmax(self.logits.numpy().copy(), k)[1]

    def top_candidates(self, ranking: Ranking, n_ids: int | None = None) -> Candidates:
        """Return the likeliest of the first n_ids ids after each row."""
        logprobs = log_probabilities(self.logits[:, :n_ids], ranking.temperature)
        entropy = entropies(logprobs).cpu().numpy() if ranking.has_entropy else None
        k = min(ranking.k, logprobs.shape[1])
        if k > SMALL_K or logprobs.device.type != "cpu":
            found = logprobs.topk(k)
            return Candidates(found.indices.cpu().numpy(), found.values.cpu().numpy(), entropy)
        values, ids = top_k_by_argmax(logprobs.numpy(), k)
        return Candidates(ids, values, entropy)


class RankedScores(Scores):
    """Scores whose ranking the host has read. The next pass over the same cache may overwrite the
    tensors."""

    def __init__(self, hidden: Tensor, logits: Tensor, ranked: Tensor, ranking: Ranking):
        """Unpack `ranked`, the result of rank_logits for these logits, on the host."""
        super().__init__(hidden, logits)
        found, k = ranked.numpy(), ranking.k
        n_found = (found.shape[1] - 2) // 2  # make_shape may have rounded k up
        values, ids = found[:, 2 : 2 + n_found], found[:, 2 + n_found : 2 + 2 * n_found]
        self.ranking = ranking
        self.highest = found[:, 0], found[:, 1].astype(numpy.int64)
        entropy = found[:, -1] if ranking.has_entropy else None
        self.candidates = Candidates(ids[:, :k].astype(numpy.int64), values[:, :k], entropy)

    def top_ids(self, k: int) -> ndarray:
        return self.candidates.tokens if self.ranking.k == k else super().top_ids(k)

    def top_candidates(self, ranking: Ranking, n_ids: int | None = None) -> Candidates:
        if self.ranking == ranking and (n_ids is None or self.logits.shape[1] <= n_ids):
            return self.candidates
        return super().top_candidates(ranking, n_ids)


def make_scores(hidden: Tensor, logits: Tensor, ranking: Ranking) -> Scores:
    """Return the scores of a pass that has not ranked its logits."""
    if logits.device.type == "cpu" or not ranking.is_read:
        return Scores(hidden, logits)
    return RankedScores(hidden, logits, rank_logits(logits, ranking).cpu(), ranking)


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities [n, V] of logits [n, V] at a temperature."""
    return torch.log_softmax(tempered(logits, temperature), dim=-1)


class TokenLogprob(NamedTuple):
    """The target's log-probability of a written token, at temperature 1 and before `process`."""

    id: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest ids with their log-probabilities, best first


def token_logprobs(logits: Tensor, tokens: list[int], k: int) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens [n], each chosen from a row of logits [n, V], and of
    the k likeliest ids of each row."""
    logprobs = log_probabilities(logits, 1.0)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    top = logprobs.topk(min(k, logprobs.shape[1]))
    rows = zip(tokens, own[:, 0].tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, list(zip(ids, values, strict=True)))
        for token, logprob, ids, values in rows
    ]


def entropies(logprobs: Tensor) -> Tensor:
    """Return the entropy [n] of log-probabilities [n, V], in nats."""
    return torch.special.entr(logprobs.exp()).sum(dim=-1)


def top_k_by_argmax(values: ndarray, k: int) -> tuple[ndarray, ndarray]:
    """Return the k highest of each row of values [n, V], and their ids, [n, k] each.

    The highest come first, and of equal ones the lowest id. Overwrites the first k - 1 of each row
    in `values`.
    """
    rows = numpy.arange(len(values))
    found = numpy.empty((len(values), k), numpy.float32)
    ids = numpy.empty((len(values), k), numpy.int64)
    for i in range(k):
        ids[:, i] = values.argmax(axis=1)  # torch's argmax takes ten times as long
        found[:, i] = values[rows, ids[:, i]]
        if i + 1 < k:
            values[rows, ids[:, i]] = -numpy.inf
    return found, ids


def rank_logits(logits: Tensor, ranking: Ranking) -> Tensor:
    """Return the numbers that the host reads of logits [n, V], in one float32 tensor [n, 2 + 2 k]
    or with the entropy [n, 3 + 2 k].

    They are the highest value and its id (the first of equal ones), then the values of k candidates
    and their ids, then the entropy. Values are logits or log-probabilities. float32 is exact for
    ids below 2^24.
    """
    k = min(ranking.k, logits.shape[1])
    values, rest = logits, []
    if ranking.are_logprobs:
        values = log_probabilities(logits, ranking.temperature)
    if ranking.has_entropy:  # before top_k_by_repeated_max overwrites the values
        rest.append(entropies(values).unsqueeze(1))
    if k > SMALL_K:  # of equal values topk may take any, but the first id is needed
        parts = [*top_k_by_repeated_max(values, 1), values.topk(k)]
    else:
        if k > 1 and values is logits:
            values = values.clone()  # top_k_by_repeated_max overwrites its argument
        parts = top_k_by_repeated_max(values, max(k, 1))
        parts = parts[:1] + parts[:k]
    (highest, *candidates), ids = zip(*parts, strict=True)
    ids = torch.cat(ids, dim=1).float()
    return torch.cat([highest, ids[:, :1], *candidates, ids[:, 1:], *rest], dim=1)
