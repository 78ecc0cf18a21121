"""How text is sampled, and the one source of randomness of a text.

    sampling = Sampling(temperature=0.8, top_p=0.95, seed=0)
    sampler = sampling.sampler(device)
    probs = sampler.draft_distribution(logits)  # [n, V]
    ids, probabilities = sampler.draw_several(probs, 3)  # [n, 3] each, without replacement

Shapes: n rows, k candidates per row, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from draft_tree import Candidates
from dynatree import ModelDrafter
from gpt_neox import Model
from sampling import Sampler

LAST_SEED = 2**63 - 1
ONE = 2**40  # the probability 1 in integers
N_SORTED = 256  # ids among which the top-p set is looked for first
FEW = 8  # candidates for which repeated maxima are faster than topk
FLOAT32 = torch.finfo(torch.float32)  # in which logits are divided

# on_trial(row, probability, number, remaining_mass): a row of the tree is accepted if the random
# number is below the probability. remaining_mass: of the target's distribution after a rejection
OnTrial = Callable[[int, float, float, float], None]


@dataclass(frozen=True)
class Sampling:
    """How to sample; the same settings and seed on the same machine give the same text.

    Raises ValueError naming what is out of range.
    """

    temperature: float = 0.0  # divides the target's logits; 0 is greedy
    top_p: float = 1.0  # only the likeliest tokens that together reach it are drawn
    seed: int = 0
    # Divides the draft's logits. None: the target's temperature for drawn candidates, 1 for top-k
    draft_temperature: float | None = None
    draws_greedy: bool = False  # rules that can draw candidates do so for greedy text, too

    def __post_init__(self) -> None:
        if self.temperature != 0:
            require_number("temperature", self.temperature)
        if self.draft_temperature is not None:
            require_number("draft-temperature", self.draft_temperature)
        require_number("top-p", self.top_p)
        if self.top_p > 1:
            raise ValueError(f"top-p {self.top_p} is outside (0, 1]")
        if type(self.seed) is not int or not 0 <= self.seed <= LAST_SEED:
            raise ValueError(f"seed {self.seed} is not a whole number from 0 to 2^63 - 1")
        if self.draws_greedy and not self.temperature and self.draft_temperature is None:
            raise ValueError("drawn candidates of greedy text need a draft-temperature")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def draws_candidates(self) -> bool:
        """Whether rules that can draw their candidates do so; otherwise they get the top k."""
        return self.draws_greedy or not self.is_greedy

    @property
    def top_k_temperature(self) -> float:
        """The draft's temperature where candidates are the top k."""
        return self.draft_temperature or 1.0

    def sampler(self, device: torch.device) -> "DrawingSampler":
        """Return a new sampler, for one text."""
        return DrawingSampler(self, device)


def require_number(name: str, value: float) -> None:
    """Raise ValueError unless the value is a positive number, in float32 too."""
    if not isinstance(value, float | int) or not FLOAT32.tiny <= value <= FLOAT32.max:
        raise ValueError(f"{name} {value!r} is not a positive number of float32")


GREEDY = Sampling()


class DrawingSampler(Sampler):
    """The core's sampler, which draws candidates as well, by the fastest way on each device."""

    def __init__(self, settings: Sampling, device: torch.device):
        super().__init__(settings.temperature or 1.0, settings.top_p, LAST_SEED - settings.seed)
        self.settings = settings
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        self.on_trial: OnTrial | None = None

    def target_distribution(self, logits: Tensor) -> Tensor:
        """Return the target's distributions [n, V], 0 outside the top-p set."""
        return self.distribution(logits, self.temperature)

    def draft_distribution(self, logits: Tensor) -> Tensor:
        """Return the draft's distributions [n, V], from which candidates are drawn."""
        return self.distribution(logits, self.settings.draft_temperature or self.temperature)

    def distribution(self, logits: Tensor, temperature: float) -> Tensor:
        """Return probabilities [n, V] that sum to 1, 0 outside the top-p set."""
        probs = torch.softmax(tempered(logits, temperature), dim=-1)
        if self.top_p == 1:
            return probs
        # Sorting a few takes a tenth of the time. On CUDA, a test whether they suffice would wait
        kept = self.keep_top_p(probs, probs.shape[1] if probs.is_cuda else N_SORTED)
        return kept / kept.sum(dim=-1, keepdim=True)

    def keep_top_p(self, probs: Tensor, n_sorted: int) -> Tensor:
        """Return probabilities [n, V], 0 outside the top-p set. Looks for the set among the
        n_sorted likeliest ids first."""
        ranked, order = likeliest(probs, n_sorted)  # [n, n_sorted] each
        # A token stays if those above it have not reached top_p yet; the first one always stays.
        # Integers add up to one sum in any order, while CUDA's float sums differ from run to run
        parts = (ranked * ONE).long()
        above = parts.cumsum(dim=-1) - parts
        stays = above < max(round(self.top_p * ONE), 1)
        kept = torch.zeros_like(probs).scatter_(-1, order, ranked * stays)
        if n_sorted < probs.shape[1]:
            least = ranked.masked_fill(~stays, math.inf).amin(dim=-1)
            is_sure = least > ranked[:, -1]  # else more tokens may stay, or equally likely ones
            if not is_sure.all():
                kept[~is_sure] = self.keep_top_p(probs[~is_sure], probs.shape[1])
        return kept

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw k tokens of each row of probs [n, V] without replacement: ids [n, k] in draw order,
        and the probability of each, [n, k].

        A row with fewer than k possible tokens ends in tokens of probability 0.
        """
        return self.draw_by_race(probs, k) if probs.is_cuda else self.draw_by_points(probs, k)

    def draw_by_race(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw the first k ids to arrive in an exponential race, in which an id runs at the rate of
        its probability. On a GPU this takes few launches and reads nothing."""
        times = torch.empty_like(probs).exponential_(generator=self.generator)
        times.clamp_min_(torch.finfo(times.dtype).tiny)  # 0 / 0 would win
        speeds = probs / times
        if k <= FEW:
            ids = torch.cat([ids for _, ids in few_best(speeds, k)], dim=1)
        else:
            ids = speeds.topk(k, dim=-1).indices
        return ids, probs.gather(1, ids)

    def draw_by_points(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw points on a line on which each id has a part as long as its probability. On a CPU
        this is faster than a random number for each id."""
        ends = probs.cumsum(dim=1, dtype=torch.float64).numpy()  # of each id's part of the line
        ids, drawn_probs = [], []
        for line, row_probs in zip(ends, probs.numpy(), strict=True):
            drawn: dict[int, tuple[float, float]] = {}  # the first point and the length of its part
            left = line.item(-1)
            while len(drawn) < k:
                point = self.random.random() * left
                for first, length in sorted(drawn.values()):
                    if point >= first:  # skip the parts that are drawn already
                        point += length
                id = min(int(line.searchsorted(point, side="right")), len(line) - 1)
                if id in drawn:  # only rounding is left
                    break
                first = line.item(id - 1) if id else 0.0
                drawn[id] = first, line.item(id) - first
                left -= drawn[id][1]
            none = [0] * (k - len(drawn))
            ids.append([*drawn, *none])
            drawn_probs.append([*map(row_probs.item, drawn), *none])
        return torch.tensor(ids), torch.tensor(drawn_probs, dtype=torch.float32)

    def propose(self, probs: Tensor, k: int) -> tuple[ndarray, ndarray]:
        """Draw k tokens of each row: ids [n, k] int64 in draw order and log-probabilities [n, k]
        float32, on the host by one read."""
        ids, drawn = self.draw_several(probs, min(k, probs.shape[1]))
        if probs.device.type == "cpu":
            ids, drawn = ids.numpy(), drawn.numpy()
        else:  # float32 holds every id below 2^24 exactly
            ids, drawn = torch.stack((ids.float(), drawn)).cpu().numpy()
        with numpy.errstate(divide="ignore"):
            return ids.astype(numpy.int64, copy=False), numpy.log(drawn)

    def draw(self, probs: Tensor) -> int:
        return int(self.draw_several(probs.unsqueeze(0), 1)[0])

    def uniform(self) -> float:
        """Draw a number from [0, 1) on the host, which never waits for the device."""
        return self.random.random()

    def accepts(self, row: int, probability: float, remaining_mass: float) -> bool:
        """Draw whether a row is accepted, and report it to `on_trial`."""
        number = self.uniform()
        if self.on_trial:
            self.on_trial(row, probability, number, remaining_mass)
        return number < probability


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits [n, V] at a temperature, shifted so that a tiny one cannot give nan."""
    if temperature == 1:
        return logits
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)


def likeliest(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of each row of probs [n, V] and their ids, [n, k] each: the highest
    first, and the first of equal ones. Returns all V if k is more."""
    if k >= probs.shape[1]:
        return probs.sort(dim=-1, descending=True, stable=True)
    ids = probs.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, places = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ranked, ids.gather(1, places)


def few_best(values: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """Return the k highest of each row of values [n, V], best first and the first of equal ones: k
    pairs of values and ids, [n, 1] each. Overwrites all of them in `values` but the last.

    Each takes two kernels, while topk of a vocabulary takes more than twenty.
    """
    found = [values.max(dim=-1, keepdim=True)]
    while len(found) < k:
        values.scatter_(1, found[-1].indices, -torch.inf)
        found.append(values.max(dim=-1, keepdim=True))
    return found


class TemperedDrafter(ModelDrafter):
    """A draft model whose log-probabilities are taken at a temperature."""

    def __init__(self, model: Model, temperature: float):
        super().__init__(model)
        self.temperature = temperature

    def choose(self, logits: Tensor, k: int) -> Candidates:
        return super().choose(tempered(logits, self.temperature), k)
