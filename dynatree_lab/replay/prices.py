"""Prices of an iteration, a row and a draft pass, and the speed that follows from them.

They say what passes cost on a machine, in iterations of ar. An iteration of ar has one row, so the
first two add up to 1. The numbers of a text's passes and rows are free of hardware; with the
prices, its speed follows. Prices are fitted to measured texts, because single passes lack the time
between them.

    prices = Prices.parse("0.92:0.08:0.31")
    x_ar(prices, {"new_tokens": 65, "target_rows": {"5": 20}, "draft_rows": {"1": 80}})  # 1.25
    fit(texts).prices  # of the machine that measured these lines of a results file
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from operator import mul

import numpy

from dynatree_lab.methods.costs import MIN_COST

ROUNDING = 0.005  # of iteration + row
# Smallest singular value of the counts of iterations and rows that are fitted, with columns of
# length 1. Below it, the prices would have more than ten times the noise of the texts
MIN_SINGULAR = 0.1


@dataclass(frozen=True)
class Prices:
    """What the parts of a text cost, in iterations of ar. Raises ValueError for prices below 0, or
    an iteration and a row that do not add up to 1."""

    iteration: float  # beside its rows and draft passes
    row: float
    draft_pass: float

    def __post_init__(self) -> None:
        if not all(0 <= price < math.inf for price in astuple(self)):
            raise ValueError(f"prices are {self}, each must be 0 or more")
        if abs(self.iteration + self.row - 1) > ROUNDING:
            both = f"an iteration costs {self.iteration:g} and a row {self.row:g}"
            raise ValueError(f"{both}, they must add up to 1, an iteration of ar")

    @classmethod
    def parse(cls, word: str) -> "Prices":
        """Return the prices of a word iteration:row:draft_pass, as str() writes it. Raises
        ValueError."""
        try:
            numbers = list(map(float, word.split(":")))
        except ValueError:
            numbers = []
        if len(numbers) != 3:
            raise ValueError(f"prices are {word!r}, they must be iteration:row:draft_pass")
        return cls(*numbers)

    def __str__(self) -> str:
        return ":".join(f"{price:.3g}" for price in astuple(self))

    @property
    def costs(self) -> str:
        """The word of the setting `costs`. Its unit is a pass of one row, so the first row costs
        nothing more, and neither does a tree or the first draft pass."""
        costs = 0.0, self.row, 0.0, self.draft_pass
        return ":".join(f"{max(cost, MIN_COST):.3g}" for cost in costs)


def x_ar(prices: Prices, text: Mapping) -> float:
    """Return the speedup over ar of a text, which is a line of a results file; nan if its passes
    were not counted. The pass over the prompt gives the first token."""
    if not text.get("target_rows"):
        return math.nan
    return (text["new_tokens"] - 1) / sum(map(mul, count_parts(text), astuple(prices)))


def count_parts(text: Mapping) -> tuple[int, int, int]:
    """Return a text's numbers of target passes, of their rows, and of draft passes."""
    of_target, of_draft = text["target_rows"], text["draft_rows"]  # passes by number of rows
    n_rows = sum(int(rows) * n for rows, n in of_target.items())
    return sum(of_target.values()), n_rows, sum(of_draft.values())


@dataclass(frozen=True)
class Fit:
    """Prices that were fitted to texts."""

    prices: Prices
    errors: dict[str, float]  # by row, the median of computed / measured time - 1

    def describe_errors(self) -> str:
        worst = max(self.errors, key=lambda row: abs(self.errors[row]))
        middle = statistics.median(map(abs, self.errors.values()))
        return (
            f"computed times differ from measured ones by {middle:.0%} in the median row, and by "
            f"{self.errors[worst]:+.0%} at most ({worst})"
        )


def fit(texts: Iterable[Mapping]) -> Fit:
    """Return the prices that fit measured texts, which are lines of a results file, by least
    squares of relative errors. Raises ValueError if they do not tell the prices apart.

    The price of a draft pass is fitted to the time of drafting, the others to the whole time,
    because a streamed target's passes have more noise than a draft pass has time.
    """
    known = [text for text in texts if text.get("target_rows") and text.get("throughput")]
    ms = numpy.array([(text["new_tokens"] - 1) / text["throughput"] * 1e3 for text in known])
    drafting = numpy.array([text["draft_ms"] * text["iterations"] for text in known]) / ms
    parts = numpy.array([count_parts(text) for text in known]).reshape(-1, 3) / ms[:, None]
    target, draft = parts[:, :2], parts[:, 2]
    lengths = numpy.linalg.norm(target, axis=0)
    if numpy.linalg.matrix_rank(target / lengths, MIN_SINGULAR) < 2 or not draft.any():
        raise ValueError(
            f"{len(known)} texts with counted passes do not tell the prices of an iteration, a row "
            "and a draft pass apart; use texts of ar, linear K=4 and dyspec N=16, for example"
        )
    (draft_pass,) = solve(draft[:, None], drafting)
    fitted = numpy.append(solve(target, 1 - draft_pass * draft), draft_pass)  # milliseconds [3]
    errors: dict[str, list[float]] = {}
    for text, error in zip(known, parts @ fitted - 1, strict=True):
        errors.setdefault(text["row"], []).append(float(error))
    prices = Prices(*map(float, fitted / sum(fitted[:2])))
    return Fit(prices, {row: statistics.median(found) for row, found in errors.items()})


def solve(parts: numpy.ndarray, shares: numpy.ndarray) -> numpy.ndarray:
    """Return the least-squares milliseconds of each part [k]: those with which a text's parts per
    millisecond [n, k] take its share of the time [n]. None is below 0."""
    found, positive = numpy.zeros(parts.shape[1]), list(range(parts.shape[1]))
    while (solved := numpy.linalg.lstsq(parts[:, positive], shares)[0]).min() < 0:
        del positive[solved.argmin()]
    found[positive] = solved
    return found
