"""Settings of sampling, and a sampler that can also draw candidates.

All random numbers of a text come from one seed.

    sampling = Sampling(temperature=0.8, top_p=0.95, seed=0)
    sampler = sampling.sampler(device)
    probs = sampler.draft_distribution(logits)  # [n, V]
    ids, probabilities = sampler.draw_several(probs, 3)  # [n, 3] each, without replacement

Shapes: n rows, k candidates per row, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import numpy
import torch
from torch import Tensor

from draft_tree import Candidates, Tree, number
from dynatree_lab.methods.overflow import cut_path, finite_rows
from sampling import Sampler, is_in_top_p, require_positive, tempered
from verify import walk

MAX_SEED = 2**63 - 1
NO_TOKEN = -1  # no row holds it
N_SORTED = 256  # number of likeliest ids that are searched for the top-p set first
# The exponential race is faster for more draws per row: from 32 on at 4,096 ids, from 127 on at
# 50,304 (measured on a CPU)
MAX_CDF_DRAWS = 64
SMALL_K = 8  # up to this k, repeated maxima are faster than topk

# on_trial(row, probability, uniform, remaining_mass): a row of the tree is accepted if the uniform
# number is below the probability. remaining_mass: of the residual if the row is rejected
OnTrial = Callable[[int, float, float, float], None]


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling; on one machine, equal settings and seeds give equal texts. None is a
    setting's default.

    Raises ValueError naming a setting that is out of range.
    """

    temperature: float = 0.0  # divides the target's logits; 0 is greedy
    top_p: float = 1.0  # only the likeliest tokens are drawn, as many as reach this probability
    seed: int = 0
    draft_temperature: float | None = None  # of the draft's logits; None: Method.draft_temperature
    draws_greedy: bool = False  # rules that can draw candidates also do so for greedy text
    top_k: int = 0  # only the top_k likeliest tokens are drawn, and equally likely ones; 0: all
    min_p: float = 0.0  # only tokens at least min_p times as likely as the likeliest one are drawn

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            value = f.default if value is None else value
            if f.type is not bool and value is not None:
                kind = int if f.type is int else float
                object.__setattr__(self, f.name, number(f.name, value, kind))
        if self.temperature != 0:
            require_positive("temperature", self.temperature)
        if self.draft_temperature is not None:
            require_positive("draft_temperature", self.draft_temperature)
        require_positive("top_p", self.top_p, 1)
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, it must be at least 0")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, it must be between 0 and 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}, it must be from 0 to 2^63 - 1")
        if self.draws_greedy and not self.temperature and self.draft_temperature is None:
            raise ValueError("drawing candidates for greedy text needs a draft_temperature")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def draws_candidates(self) -> bool:
        """Whether rules that can draw candidates do so; otherwise they get the top k."""
        return self.draws_greedy or not self.is_greedy

    def sampler(self, device: torch.device) -> "DrawingSampler":
        """Return a new sampler, for one text."""
        return DrawingSampler(self, device)


GREEDY = Sampling()


class DrawingSampler(Sampler):
    """The Acceptance of sampled text, which also draws the candidates of methods that want it."""

    def __init__(self, settings: Sampling, device: torch.device):
        super().__init__(settings.temperature or 1.0, settings.top_p, settings.seed)
        self.settings = settings
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        # A DrawnAcceptance (acceptances.py); None if no candidate is drawn
        self.accept: Callable | None = None
        # By draft slot of the current tree: the distribution [V] of the row's candidates
        self.draft_probs: list[Tensor] = []
        self.on_trial: OnTrial | None = None

    def __call__(
        self, tree: Tree, logits: Tensor, is_finite: list[bool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return what Sampler does. Drawn candidates need `accept` in place of its walk. is_finite:
        finite_rows of the logits, if known."""
        is_finite = is_finite or finite_rows(logits.amax(dim=-1))  # nan if any is nan
        if not all(is_finite):  # the path is cut before such a row, so its numbers do not matter
            logits = logits.clone()
            logits[[row for row, finite in enumerate(is_finite) if not finite]] = 0.0
        probs = self.target_distribution(logits)
        if self.accept:
            path, tokens = self.accept(tree, probs, self, self.draft_probs)
        else:
            path, tokens = walk(tree, partial(self.draw_after, probs, is_finite))
        return cut_path(path, tokens, is_finite)

    def draw_after(self, probs: Tensor, is_finite: list[bool], row: int) -> int:
        """Draw the token after a row of a tree. A row that overflowed has none, and uses no random
        number, so number i still draws token i."""
        return self.draw(probs[row]) if is_finite[row] else NO_TOKEN

    def target_distribution(self, logits: Tensor) -> Tensor:
        """Return the target's distributions [n, V], 0 for tokens that are not drawn."""
        return self.distribution(logits, self.temperature)

    def draft_distribution(self, logits: Tensor) -> Tensor:
        """Return the draft's distributions [n, V], from which candidates are drawn."""
        return self.distribution(logits, self.settings.draft_temperature or self.temperature)

    def distribution(self, logits: Tensor, temperature: float) -> Tensor:
        """Return probabilities [n, V] that sum to 1, after temperature, top-k, top-p and min-p, in
        the order of transformers: each looks at what the one before has kept."""
        logits, top_k = tempered(logits, temperature), self.settings.top_k
        if 0 < top_k < logits.shape[1]:
            lowest = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        probs = torch.softmax(logits, dim=-1)
        if self.top_p < 1:
            # Sorting only N_SORTED ids takes a tenth of the time. CUDA sorts all, because the check
            # whether N_SORTED suffice would wait for the device
            kept = self.keep_top_p(probs, probs.shape[1] if probs.is_cuda else N_SORTED)
            probs = kept / kept.sum(dim=-1, keepdim=True)
        if self.settings.min_p:
            lowest = self.settings.min_p * probs.amax(dim=-1, keepdim=True)
            kept = probs.masked_fill(probs < lowest, 0.0)
            probs = kept / kept.sum(dim=-1, keepdim=True)
        return probs

    def keep_top_p(self, probs: Tensor, n_sorted: int) -> Tensor:
        """Return probabilities [n, V], 0 outside the top-p set, which is searched for among the
        n_sorted likeliest ids first."""
        sorted_probs, order = stable_top_k(probs, n_sorted)  # [n, n_sorted] each
        stays = is_in_top_p(sorted_probs, self.top_p)
        kept = torch.zeros_like(probs).scatter_(-1, order, sorted_probs * stays)
        if n_sorted < probs.shape[1]:
            lowest = sorted_probs.masked_fill(~stays, math.inf).amin(dim=-1)
            # Otherwise more tokens may stay, or an equally likely one with a lower id
            is_sure = lowest > sorted_probs[:, -1]
            if not is_sure.all():
                kept[~is_sure] = self.keep_top_p(probs[~is_sure], probs.shape[1])
        return kept

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw k tokens of each row of probs [n, V] without replacement: ids [n, k] in draw order,
        and the probability of each, [n, k].

        A row with fewer than k possible tokens ends in tokens of probability 0.
        """
        if probs.is_cuda or k > MAX_CDF_DRAWS:
            return self.draw_by_exponential_race(probs, k)
        return self.draw_by_inverse_cdf(probs, k)

    def draw_by_exponential_race(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw the first k ids of an exponential race, in which an id's rate is its probability.

        On a GPU this takes few kernel launches and no copy to the host. Its time hardly depends on
        k.
        """
        times = torch.empty_like(probs).exponential_(generator=self.generator)
        times.clamp_min_(torch.finfo(times.dtype).tiny)  # 0 / 0 is nan, which max prefers
        speeds = probs / times
        if k <= SMALL_K:
            ids = torch.cat([ids for _, ids in top_k_by_repeated_max(speeds, k)], dim=1)
        else:
            ids = speeds.topk(k, dim=-1).indices
        return ids, probs.gather(1, ids)

    def draw_by_inverse_cdf(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw uniform points on a line on which an id's interval is as long as its probability.

        On a CPU this is faster than a random number for each id if k is small. Each draw skips all
        earlier ones, so the time is quadratic in k.
        """
        ends = probs.cumsum(dim=1, dtype=torch.float64).numpy()  # of the intervals, [n, V]
        ids, drawn_probs = [], []
        for line, row_probs in zip(ends, probs.numpy(), strict=True):
            drawn: dict[int, tuple[float, float]] = {}  # start and length of each id's interval
            length_left = line.item(-1)
            while len(drawn) < k:
                point = self.random.random() * length_left
                for start, length in sorted(drawn.values()):
                    if point >= start:  # skip the intervals that are drawn already
                        point += length
                id = min(int(line.searchsorted(point, side="right")), len(line) - 1)
                if id in drawn:  # no other id is possible, up to rounding
                    break
                start = line.item(id - 1) if id else 0.0
                drawn[id] = start, line.item(id) - start
                length_left -= drawn[id][1]
            padding = [0] * (k - len(drawn))
            ids.append([*drawn, *padding])
            drawn_probs.append([*map(row_probs.item, drawn), *padding])
        return torch.tensor(ids), torch.tensor(drawn_probs, dtype=torch.float32)

    def propose(self, probs: Tensor, k: int, entropy: Tensor | None = None) -> Candidates:
        """Draw k tokens of each row, in draw order. One copy brings them, their log-probabilities
        and the entropy [n] of the rows to the host."""
        ids, drawn = self.draw_several(probs, min(k, probs.shape[1]))  # [n, k] each
        rest = [] if entropy is None else [entropy.unsqueeze(1)]
        # float32 holds every id below 2^24 exactly
        found = torch.cat([ids.float(), drawn, *rest], dim=1).cpu().numpy()
        k = ids.shape[1]
        with numpy.errstate(divide="ignore"):
            logprobs = numpy.log(found[:, k : 2 * k])
        tokens = found[:, :k].astype(numpy.int64)
        return Candidates(tokens, logprobs, found[:, -1] if rest else None)

    def uniform(self) -> float:
        """Draw a number from [0, 1) on the host, without waiting for the device."""
        return self.random.random()

    def accepts(self, row: int, probability: float, remaining_mass: float) -> bool:
        """Draw whether a row is accepted, and report the trial to `on_trial`."""
        uniform = self.uniform()
        if self.on_trial:
            self.on_trial(row, probability, uniform, remaining_mass)
        return uniform < probability


def stable_top_k(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of each row of probs [n, V] and their ids, [n, k] each, highest first.

    Of equal ones the lowest id comes first. Returns all V if k is larger.
    """
    if k >= probs.shape[1]:
        return probs.sort(dim=-1, descending=True, stable=True)
    ids = probs.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    sorted_probs, order = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return sorted_probs, ids.gather(1, order)


def top_k_by_repeated_max(values: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """Return the k highest of each row of values [n, V], as k pairs of values and ids, [n, 1] each.

    The highest comes first; of equal ones the lowest id. Overwrites all of them but the last in
    `values`. Each takes two kernels, while topk of a vocabulary takes more than twenty.
    """
    found = [values.max(dim=-1, keepdim=True)]
    while len(found) < k:
        values.scatter_(1, found[-1].indices, -torch.inf)
        found.append(values.max(dim=-1, keepdim=True))
    return found
