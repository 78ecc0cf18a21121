"""Drawing in less time: the same laws as methods/sampler.py's, by means that suit the device.

sampler = FastSampling(temperature=0.8, top_p=0.95, seed=0).sampler(device)
"""

import math
from dataclasses import dataclass, fields

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from engine.scores import FEW, few_best, tempered
from methods.sampler import DrawingSampler, Sampling

ONE = 2**40  # the probability 1 in whole numbers
MANY = 256  # ids among which a top-p set is looked for first


@dataclass(frozen=True)
class FastSampling(Sampling):
    """Sampling whose sampler is a fast one."""

    @classmethod
    def of(cls, plain: Sampling) -> "FastSampling":
        """The same settings."""
        return cls(**{f.name: getattr(plain, f.name) for f in fields(Sampling)})

    def sampler(self, device: torch.device) -> "FastSampler":
        return FastSampler(self, device)


class FastSampler(DrawingSampler):
    """What methods.sampler.DrawingSampler does, in less time."""

    def distribution(self, logits: Tensor, temperature: float) -> Tensor:
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

    def draw_several(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
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
                point = self.random.random() * left
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

    def propose(self, probs: Tensor, k: int) -> tuple[ndarray, ndarray]:
        """Draw k tokens of each row of probs [n, V]: ids [n, k] int64 in draw order and their
        log-probabilities [n, k] float32, on the host by one read."""
        drawn, chances = self.draw_several(probs, min(k, probs.shape[1]))
        if probs.device.type == "cpu":
            ids, chances = drawn.numpy(), chances.numpy()
        else:  # an id below 2^24 is exact in float32
            ids, chances = torch.stack((drawn.float(), chances)).cpu().numpy()
        with numpy.errstate(divide="ignore"):
            return ids.astype(numpy.int64, copy=False), numpy.log(chances)


def likeliest(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row of probs [n, V], or all of fewer, and their ids [n, k]: the highest
    first, of equals the first."""
    if k >= probs.shape[1]:
        return probs.sort(dim=-1, descending=True, stable=True)
    ids = probs.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, places = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ranked, ids.gather(1, places)
