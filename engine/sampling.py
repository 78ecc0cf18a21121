"""Temperature and top-p, and drawing from what they leave, from one seed.

Both models' distributions are warped alike, unless the draft has a temperature of its own. Greedy
text is argmax and never comes here, but its guesses do if they are to be drawn.

    sampler = Sampling(temperature=0.8, top_p=0.95, seed=0).sampler(device)
    probs = sampler.warp(logits)  # [n, V]
    ids, chances = sampler.draw(probs, 3)  # [n, 3] each, without replacement
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from engine.scores import FEW, few_best, tempered

ONE = 2**40  # the probability 1 in whole numbers
LAST_SEED = 2**63 - 1
MANY = 256  # ids among which a top-p set is looked for first
FLOAT32 = torch.finfo(torch.float32)  # in which logits are divided and probabilities added up


@dataclass(frozen=True)
class Sampling:
    """How to sample; the same settings and seed on the same machine give the same text."""

    temperature: float  # divides the target's logits; 0: greedy text, by a draft of its own
    top_p: float = 1.0  # in (0, 1]; the likeliest tokens that together reach it are kept
    seed: int = 0
    # Divides the draft's logits; None: the target's if guesses are drawn, 1 if they are ranked
    draft_temperature: float | None = None
    is_drawn: bool = False  # guesses of greedy text are, too, by methods that draw

    def __post_init__(self) -> None:
        if self.temperature or self.draft_temperature is None:
            require_float32("temperature", self.temperature)
        if self.draft_temperature is not None:
            require_float32("draft-temperature", self.draft_temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is outside (0, 1]")
        require_float32("top-p", self.top_p)
        if not 0 <= self.seed <= LAST_SEED:
            raise ValueError(f"seed {self.seed} is outside 0 to 2^63 - 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def draws(self) -> bool:
        """Whether methods that draw do so: their guesses are the likeliest else."""
        return self.is_drawn or not self.is_greedy

    def sampler(self, device: torch.device, tried: "Tried | None" = None) -> "Sampler":
        """A fresh sampler, for one generation. tried: told of each child that acceptance tries."""
        generator = torch.Generator(device).manual_seed(self.seed)
        coins = Random(LAST_SEED - self.seed)
        return Sampler(self, generator, coins, tried)


def require_float32(name: str, value: float) -> None:
    """Raise ValueError unless the value is a positive number in float32, too."""
    if not FLOAT32.tiny <= value <= FLOAT32.max:
        raise ValueError(f"{name} {value} is not a positive number of float32")


# tried(row, chance, coin, left): a row of the tree, its chance of acceptance, the coin, which is
# below that if it was accepted, and how much of the target's distribution a rejection leaves
Tried = Callable[[int, float, float, float], None]


@dataclass(frozen=True)
class Sampler:
    """The settings with the only sources of chance in a generation."""

    settings: Sampling
    generator: torch.Generator  # on the models' device
    coins: Random  # on the host: a coin is no reason to wait for the device
    tried: Tried | None = None  # who watches

    def warp(self, logits: Tensor) -> Tensor:
        """The target's logits [n, V] -> probabilities [n, V] float32, 0 outside the top-p set."""
        return self.warp_at(self.settings.temperature, logits)

    def warp_draft(self, logits: Tensor) -> Tensor:
        """The same of the draft's logits."""
        return self.warp_at(self.settings.draft_temperature or self.settings.temperature, logits)

    def warp_at(self, temperature: float, logits: Tensor) -> Tensor:
        probs = torch.softmax(tempered(logits, temperature), dim=-1)
        if self.settings.top_p == 1:
            return probs
        # Ranking a few is a tenth of the work; on CUDA to ask whether they do would be a wait
        kept = self.cut(probs, probs.shape[1] if probs.is_cuda else MANY)
        return kept / kept.sum(dim=-1, keepdim=True)

    def cut(self, probs: Tensor, n_ranked: int) -> Tensor:
        """Probabilities [n, V], 0 outside the top-p set; it is looked for among the n_ranked
        likeliest first."""
        ranked, order = likeliest(probs, n_ranked)  # [n, n_ranked] each
        # A token stays if those above it have not reached top_p yet; the first always does. Whole
        # numbers add up to the same in any order, in which CUDA's sums differ from run to run
        parts = (ranked * ONE).long()
        above = parts.cumsum(dim=-1) - parts
        stays = above < max(round(self.settings.top_p * ONE), 1)
        kept = torch.zeros_like(probs).scatter_(-1, order, ranked * stays)
        if n_ranked < probs.shape[1]:
            least = ranked.masked_fill(~stays, math.inf).amin(dim=-1)
            is_sure = least > ranked[:, -1]  # else more may stay, or others that are as likely
            if not is_sure.all():
                kept[~is_sure] = self.cut(probs[~is_sure], probs.shape[1])
        return kept

    def draw(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """k tokens of each row of probs [n, V], in draw order, without replacement: ids [n, k], and
        the probability of each, [n, k].

        Each draw is from what the earlier ones leave, renormalised. A row with fewer than k
        possible tokens ends in some of probability 0.
        """
        return self.race(probs, k) if probs.is_cuda else self.pick(probs, k)

    def race(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The first k to arrive of an exponential race, in which each runs at rate p: on a GPU, few
        launches and no read."""
        times = torch.empty_like(probs).exponential_(generator=self.generator)
        times.clamp_min_(torch.finfo(times.dtype).tiny)  # 0 / 0 would win
        speeds = probs / times
        if k <= FEW:
            ids = torch.cat([ids for _, ids in few_best(speeds, k)], dim=1)
        else:
            ids = speeds.topk(k, dim=-1).indices
        return ids, probs.gather(1, ids)

    def pick(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Points on a line, of which each id has as much as it is likely: on a CPU, where a random
        number for each id would take the time."""
        ends = probs.cumsum(dim=1, dtype=torch.float64).numpy()  # of each id's part of the line
        ids, chances = [], []
        for line, row_probs in zip(ends, probs.numpy(), strict=True):
            drawn: dict[int, tuple[float, float]] = {}  # where its part begins, how long it is
            left = line.item(-1)
            while len(drawn) < k:
                point = self.coins.random() * left
                for begin, length in sorted(drawn.values()):
                    if point >= begin:  # what has been drawn is skipped
                        point += length
                id = min(int(line.searchsorted(point, side="right")), len(line) - 1)
                if id in drawn:  # nothing is left, but for rounding
                    break
                begin = line.item(id - 1) if id else 0.0
                drawn[id] = begin, line.item(id) - begin
                left -= drawn[id][1]
            none = [0] * (k - len(drawn))
            ids.append([*drawn, *none])
            chances.append([*map(row_probs.item, drawn), *none])
        return torch.tensor(ids), torch.tensor(chances, dtype=torch.float32)

    def propose(self, logits: Tensor, k: int) -> tuple[ndarray, ndarray, Tensor]:
        """k tokens drawn from each row of the draft's logits [n, V]: ids [n, k] int64 in draw order
        and log-probabilities [n, k] float32, on the host by one read; and what they were drawn
        from, [n, V]."""
        probs = self.warp_draft(logits)
        drawn, chances = self.draw(probs, min(k, probs.shape[1]))
        if probs.device.type == "cpu":
            ids, chances = drawn.numpy(), chances.numpy()
        else:  # an id below 2^24 is exact in float32
            ids, chances = torch.stack((drawn.float(), chances)).cpu().numpy()
        with numpy.errstate(divide="ignore"):
            return ids.astype(numpy.int64, copy=False), numpy.log(chances), probs

    def coin(self) -> float:
        """Uniform on [0, 1)."""
        return self.coins.random()

    def tell(self, row: int, chance: float, coin: float, left: float) -> None:
        """Tell who watches that a child was tried."""
        if self.tried:
            self.tried(row, chance, coin, left)


def likeliest(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row of probs [n, V], or all of fewer, and their ids [n, k]: the highest
    first, of equals the first."""
    if k >= probs.shape[1]:
        return probs.sort(dim=-1, descending=True, stable=True)
    ids = probs.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, places = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ranked, ids.gather(1, places)


def value_draws(logprobs: ndarray, above: ndarray) -> ndarray:
    """Log values [n, k] of drawn candidates, each known before it is drawn (DySpec, Eq. 9 and 11).

    The chance that the path is accepted and every elder sibling is not, if the draft is right: the
    path's probability, times what the elder siblings have left undrawn. logprobs: [n, k], of each
    candidate, -inf if it cannot be drawn. above: [n, 2], log p(u) and value of the rows.
    """
    probs = numpy.exp(logprobs)
    elder = numpy.zeros_like(probs)
    elder[:, 1:] = probs[:, :-1].cumsum(axis=1)  # without its own, even in rounding
    with numpy.errstate(divide="ignore"):
        values = above[:, :1] + numpy.log((1 - elder).clip(min=0))
    # What is left may round up: nothing is worth more than its parent or its elder sibling
    values = numpy.minimum.accumulate(numpy.minimum(values, above[:, 1:]), axis=1)
    return numpy.where(probs > 0, values, -math.inf)
