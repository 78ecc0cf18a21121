"""--compare: a method's run beside ar's on the same prompt, and what explains a difference.

comparison = compare(request, steps)
print(comparison.line())
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cli.metrics import measure, token_ids
from cli.models import Pair, Request
from draft_tree import Settings
from dynatree import Step
from engine.cuda_graphs import row_count
from engine.memory import OutOfMemory
from engine.streaming import WHOLE_TEXT, Window
from methods.static import Alone

TIE = 1e-4  # a top-2 gap below it, in float32, is decided by rounding
CONTROL_ROWS = 16  # of ar's passes, where it shows what rounding alone changes


@dataclass(frozen=True)
class Comparison:
    """A method's run against ar's on the same prompt."""

    ar_throughput: float
    speedup: float
    exact: bool | None  # None if sampled: then no two texts need agree
    first_difference: int | None = None  # index into token_ids
    top2_gap: float | None = None  # the target's there, in float32; None if it does not fit
    control: dict | None = None  # in half precision: ar against itself at CONTROL_ROWS rows

    @property
    def is_tie(self) -> bool:
        return self.top2_gap is not None and self.top2_gap < TIE

    @property
    def is_wrong(self) -> bool:
        """The ids differ, and rounding does not explain it."""
        return self.exact is False and not self.is_tie

    def line(self) -> str:
        start = f"ar: {self.ar_throughput:.1f} tokens/s, so {self.speedup:.2f}x; the ids "
        if self.exact is None:
            return f"{start}are sampled, not compared"
        if self.exact:
            return f"{start}are equal"
        start += f"differ from token {self.first_difference} on "
        if self.top2_gap is None:
            return f"{start}(no room for the float32 model that would tell the top-2 gap)"
        kind = "a tie" if self.is_tie else "not a tie"
        return f"{start}(top-2 gap {self.top2_gap:.1e} in float32: {kind})"

    def control_line(self) -> str:
        at = self.control["first_difference"]
        result = "the ids are equal" if at is None else f"the ids differ from token {at} on"
        return f"control: ar with {self.control['rows']} rows a pass, nothing drafted; {result}"


def compare(request: Request, steps: Sequence[Step]) -> Comparison:
    """Run ar and hold the given steps against it (metrics `speedup` and `exact`)."""
    reference = list(request.decode(Alone()))
    ours = token_ids(steps)
    theirs = token_ids(reference)
    ar = measure(reference).throughput
    speedup = measure(steps).throughput / ar if ar else 1.0
    if request.options.get("sampling"):
        return Comparison(ar, speedup, exact=None)
    gap = None
    at = first_difference(ours, theirs)
    if at is not None:
        window = request.options.get("window", WHOLE_TEXT)
        gap = top2_gap(request.pair, request.prompt + theirs[:at], window)
    control = None
    if request.pair.target.dtype != torch.float32:
        padded = token_ids(request.decode(Alone(rows=CONTROL_ROWS)))
        control = {"rows": CONTROL_ROWS, "first_difference": first_difference(padded, theirs)}
    return Comparison(ar, speedup, at is None, at, gap, control)


def strict_reference(settings: Settings) -> Alone:
    """The ar that a strict run is held against: its passes have as many rows."""
    rule = settings.rule()
    return Alone(rows=row_count(max(rule.max_rows, rule.min_rows)))


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The first index at which two texts part, the shorter one's end included; None if equal."""
    if ours == theirs:
        return None
    n_both = min(len(ours), len(theirs))
    for i in range(n_both):
        if ours[i] != theirs[i]:
            return i
    return n_both


def top2_gap(pair: Pair, ids: list[int], window: Window = WHOLE_TEXT) -> float | None:
    """How far the target's best next token leads the second, in float32 whatever its dtype.

    None if there is no room for the float32 model.
    """
    try:
        target = pair.float32_target
        cache = target.new_cache(min(len(ids), window.full))
        best, second = window.prefill(target, list(ids), cache).logits[0].topk(2).values.tolist()
        target.pool.take_back(cache.storage)
    except OutOfMemory:
        return None
    return best - second
