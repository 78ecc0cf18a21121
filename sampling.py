"""Sampled text: temperature and top-p, drawing, and which drafted tokens are kept.

Both models' distributions are warped alike, unless the draft has a temperature of its own. Greedy
text is argmax and never comes here, but its guesses do if they are to be drawn.

    sampler = Sampling(temperature=0.8, top_p=0.95, seed=0).sampler(device)
    probs = sampler.warp(logits)  # [n, V]
    ids, chances = sampler.draw(probs, 3)  # [n, 3] each, without replacement
    path, tokens = accept_by_token(tree, logits, sampler)

Why the law holds: each text is as likely as from the target alone, whatever was drafted. At a row,
let R be what the target says comes after it, and x a child, drawn from d (Leviathan et al. 2023;
DySpec, Algorithm 3):

1  x is drawn and kept with chance d(x) min(R(x) / d(x), 1) = min(R, d)(x)
2  else R becomes max(R - d, 0), normalised: just what min(R, d) has left of R
3  so to keep x, or to go on with what is left, is to draw from R

The next child was drawn from what the draw of x has left of d, and is tried in the same way; the
bonus token is drawn from what all children leave. A child that was not drawn, ranked or retrieved,
counts as drawn from a distribution of probability 1 on itself. All this asks of a tree that no row
depends on draws after its own. Two other acceptances are in methods/acceptances.py.

Shapes: n rows, N tree rows, V vocabulary, k candidates per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from draft_tree import Tree

LAST_SEED = 2**63 - 1
FLOAT32 = torch.finfo(torch.float32)  # in which logits are divided

# tried(row, chance, coin, left): a row of the tree, its chance of acceptance, the coin, which is
# below that if it was accepted, and how much of the target's distribution a rejection leaves
Tried = Callable[[int, float, float, float], None]


@dataclass(frozen=True)
class Sampling:
    """How to sample; the same settings and seed on the same machine give the same text.

    Raises ValueError naming what is out of range.
    """

    temperature: float = 0.0  # divides the target's logits; 0 is greedy
    top_p: float = 1.0  # in (0, 1]; the likeliest tokens that together reach it are kept
    seed: int = 0
    # Divides the draft's logits; None: the target's if guesses are drawn, 1 if they are ranked
    draft_temperature: float | None = None
    is_drawn: bool = False  # of greedy text, too: rules that can draw their guesses do so

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
        if self.is_drawn and not self.temperature and self.draft_temperature is None:
            raise ValueError("drawn guesses of greedy text need a draft-temperature")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def draws(self) -> bool:
        """Whether rules that can draw their guesses do so; else those are the likeliest."""
        return self.is_drawn or not self.is_greedy

    @property
    def ranked_at(self) -> float:
        """The draft's temperature where its guesses are the likeliest."""
        return self.draft_temperature or 1.0

    def sampler(self, device: torch.device, tried: Tried | None = None) -> "Sampler":
        """A fresh sampler, for one generation. tried: told of each child that acceptance tries."""
        generator = torch.Generator(device).manual_seed(self.seed)
        return Sampler(self, generator, Random(LAST_SEED - self.seed), tried)


def require_number(name: str, value: float) -> None:
    """Raise ValueError unless the value is a positive number, in float32 too."""
    if not isinstance(value, float | int) or not FLOAT32.tiny <= value <= FLOAT32.max:
        raise ValueError(f"{name} {value!r} is not a positive number of float32")


GREEDY = Sampling()


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
        """Logits [n, V] -> probabilities [n, V] at a temperature."""
        # Shifted first: a tiny temperature may send all but the best to -inf, never to nan
        shifted = logits - logits.amax(dim=-1, keepdim=True)
        probs = torch.softmax(shifted / temperature, dim=-1)
        if self.settings.top_p == 1:
            return probs
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        # A token stays if those above it have not reached top_p yet; the first always does
        stays = ranked.cumsum(dim=-1) - ranked < self.settings.top_p
        kept = torch.zeros_like(probs).scatter_(-1, order, ranked * stays)
        return kept / kept.sum(dim=-1, keepdim=True)

    def draw(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """k tokens of each row of probs [n, V], in draw order, without replacement: ids [n, k], and
        the probability of each, [n, k].

        Each draw is from what the earlier ones leave, renormalised: the first k to arrive of an
        exponential race, in which each id runs at rate p. A row with fewer than k possible tokens
        ends in some of probability 0.
        """
        times = torch.empty_like(probs).exponential_(generator=self.generator)
        times.clamp_min_(torch.finfo(times.dtype).tiny)  # 0 / 0 would win
        ids = (probs / times).topk(k, dim=-1).indices
        return ids, probs.gather(1, ids)

    def propose(self, logits: Tensor, k: int) -> tuple[ndarray, ndarray, Tensor]:
        """k tokens drawn from each row of the draft's logits [n, V]: ids [n, k] int64 in draw order
        and log-probabilities [n, k] float32, on the host; and what they were drawn from, [n, V]."""
        probs = self.warp_draft(logits)
        ids, chances = self.draw(probs, min(k, probs.shape[1]))
        with numpy.errstate(divide="ignore"):
            return ids.cpu().numpy(), numpy.log(chances.cpu().numpy()), probs

    def coin(self) -> float:
        """Uniform on [0, 1)."""
        return self.coins.random()

    def tell(self, row: int, chance: float, coin: float, left: float) -> None:
        """Tell who watches that a child was tried."""
        if self.tried:
            self.tried(row, chance, coin, left)


# acceptance(tree, logits [N, V] of the target, sampler) -> the accepted rows of the tree, the root
# first, and the token that follows each of them, the bonus token last
Acceptance = Callable[[Tree, Tensor, Sampler], tuple[list[int], list[int]]]


def accept_by_token(tree: Tree, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
    """The Acceptance that goes from the root down, child by child in their order.

    A child's chance is R(x) / d(x), where DySpec's coin N(0, 1) is a misprint.
    """
    target_probs = sampler.warp(logits)  # [N, V]
    path = [0]
    residual = target_probs[0]  # R: what is left to draw from after the path
    draft_probs = draft_probs_of(tree, 0, residual)  # d: what the next child was drawn from
    for row in range(1, len(tree)):  # a node's children stand after it, in their order
        if tree.parents[row] != path[-1]:
            continue
        drawn_from = None if tree.are_retrieved[row] else draft_probs
        ratio, rest, mass = try_child(tree.tokens[row], residual, drawn_from)
        # If nothing else is possible, only rounding keeps the ratio from 1
        chance = min(ratio, 1.0) if mass else 1.0
        if toss(sampler, row, chance, mass):
            path.append(row)
            residual = target_probs[row]
            draft_probs = draft_probs_of(tree, row, residual)
        else:
            residual = rest / mass
            if drawn_from is not None:
                draft_probs = without(tree.tokens[row], drawn_from)
    return path, tokens_of(tree, path, residual, sampler)


def draft_probs_of(tree: Tree, row: int, like: Tensor) -> Tensor | None:
    """What a row's children were drawn from, [V], 0 for ids that the draft has not; None if it has
    no drawn ones."""
    slot = tree.draft_slots[row]
    if slot < 0 or not tree.drawn_from:
        return None
    probs = tree.drawn_from[slot]
    n_unknown = like.shape[-1] - len(probs)
    return F.pad(probs, (0, n_unknown)) if n_unknown else probs


def try_child(
    token: int, residual: Tensor, drawn_from: Tensor | None
) -> tuple[float, Tensor, float]:
    """R(x) / d(x) of a child; what its rejection leaves of R [V], not normalised, and how much that
    is; one copy to the host.

    residual: R, [V]. drawn_from: d, [V]; None for a child that was not drawn.
    """
    if drawn_from is None:
        ratio = residual[token]
        rest = residual.clone()
        rest[token].zero_()
    else:
        ratio = residual[token] / drawn_from[token]
        rest = (residual - drawn_from).clamp_(min=0.0)
    ratio, mass = torch.stack((ratio, rest.sum())).tolist()
    return ratio, rest, mass


def without(token: int, draft_probs: Tensor) -> Tensor:
    """What the next sibling was drawn from: what the draw of a token has left."""
    rest = draft_probs.clone()
    rest[token].zero_()
    return rest / rest.sum()


def toss(sampler: Sampler, row: int, chance: float, left: float) -> bool:
    """Whether a row's coin keeps it; who watches is told."""
    coin = sampler.coin()
    sampler.tell(row, chance, coin, left)
    return coin < chance


def tokens_of(tree: Tree, path: list[int], residual: Tensor, sampler: Sampler) -> list[int]:
    """A path's tokens and the bonus, drawn from the residual [V]."""
    bonus = int(sampler.draw(residual.unsqueeze(0), 1)[0])
    return [tree.tokens[row] for row in path[1:]] + [bonus]
