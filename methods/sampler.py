"""How text is sampled, and the one source of randomness of a text.

    sampling = Sampling(temperature=0.8, top_p=0.95, seed=0)
    sampler = sampling.sampler(device)
    probs = sampler.draft_distribution(logits)  # [n, V]
    ids, probabilities = sampler.draw_several(probs, 3)  # [n, 3] each, without replacement

Shapes: n rows, k candidates per row, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from draft_tree import Candidates
from dynatree import ModelDrafter
from gpt_neox import Model
from sampling import Sampler, probabilities

LAST_SEED = 2**63 - 1
FLOAT32 = torch.finfo(torch.float32)  # in which logits are divided

# on_trial(row, probability, number, remaining_mass): a row of the tree, the probability with which
# it is accepted, the random number, which is below that if it is accepted, and how much of the
# target's distribution a rejection leaves
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
    """The core's sampler, which draws candidates as well: by an exponential race on the device."""

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
        probs = probabilities(logits, temperature, self.top_p)
        return probs if self.top_p == 1 else probs / probs.sum(dim=-1, keepdim=True)

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Draw k tokens of each row of probs [n, V] without replacement: ids [n, k] in draw order,
        and the probability of each, [n, k].

        They are the first k to arrive in an exponential race, in which each id runs at rate p. A
        row with fewer than k possible tokens ends in tokens of probability 0.
        """
        times = torch.empty_like(probs).exponential_(generator=self.generator)
        times.clamp_min_(torch.finfo(times.dtype).tiny)  # 0 / 0 would win
        ids = (probs / times).topk(k, dim=-1).indices
        return ids, probs.gather(1, ids)

    def propose(self, probs: Tensor, k: int) -> tuple[ndarray, ndarray]:
        """Draw k tokens of each row: ids [n, k] int64 in draw order and log-probabilities [n, k]
        float32, on the host."""
        ids, drawn = self.draw_several(probs, min(k, probs.shape[1]))
        with numpy.errstate(divide="ignore"):
            return ids.cpu().numpy(), numpy.log(drawn.cpu().numpy())

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


class TemperedDrafter(ModelDrafter):
    """A draft model whose log-probabilities are taken at a temperature."""

    def __init__(self, model: Model, temperature: float):
        super().__init__(model)
        self.temperature = temperature

    def choose(self, logits: Tensor, k: int) -> Candidates:
        shifted = logits - logits.amax(dim=-1, keepdim=True)  # else a tiny temperature gives nan
        return super().choose(shifted / self.temperature, k)
