"""--compare: a method's run beside ar's on the same prompt, and what explains a difference.

comparison = compare(request, settings, tally(steps))
print(comparison.line())
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cli.metrics import Tally, tally
from cli.models import Pair, Request
from draft_tree import Settings
from engine.memory import OutOfMemory
from engine.passes import row_count
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
    is_strict: bool = False  # then none of the last two, and ar's passes have as many rows
    logits_difference: int | None = None  # if strict, the first token whose logits differ in a bit

    @property
    def is_tie(self) -> bool:
        return self.top2_gap is not None and self.top2_gap < TIE

    @property
    def is_wrong(self) -> bool:
        """They differ, and rounding does not explain it: under strict it explains nothing."""
        if self.is_strict and self.logits_difference is not None:
            return True
        return self.exact is False and not self.is_tie

    def line(self) -> str:
        ar = "strict ar" if self.is_strict else "ar"
        speed = f"{self.ar_throughput:.1f} tokens/s, so {self.speedup:.2f}x"
        return f"{ar}: {speed}; the ids {self.verdict()}"

    def verdict(self) -> str:
        """What is to be said of the ids."""
        if self.exact is None:
            return "are sampled, not compared"
        if self.is_strict:
            if self.exact and self.logits_difference is None:
                return "and logits are equal, bit for bit"
            logits = equal_or_not(self.logits_difference)
            return f"{equal_or_not(self.first_difference)}, the logits {logits}"
        if self.exact:
            return "are equal"
        why = "no room for the float32 model that would tell the top-2 gap"
        if self.top2_gap is not None:
            kind = "a tie" if self.is_tie else "not a tie"
            why = f"top-2 gap {self.top2_gap:.1e} in float32: {kind}"
        way_out = "; with --strict they would not" if self.control else ""
        return f"{equal_or_not(self.first_difference)} ({why}){way_out}"

    def control_line(self) -> str:
        result = equal_or_not(self.control["first_difference"])
        rows = self.control["rows"]
        return f"control: ar with {rows} rows a pass, nothing drafted; the ids {result}"


def equal_or_not(first_difference: int | None) -> str:
    if first_difference is None:
        return "are equal"
    return f"differ from token {first_difference} on"


class Digests:
    """Of the logits that each token of a text was chosen from: one such object is `inspect`."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    def __call__(self, logits: Tensor) -> None:
        for row in logits.cpu().numpy():
            self.found.append(hashlib.blake2b(row.tobytes()).digest())


def reference_of(request: Request, settings: Settings) -> Alone:
    """The ar that a run with these settings is held against."""
    if request.options.get("strict"):
        return strict_reference(settings)
    return Alone()


def compare(
    request: Request, settings: Settings, written: Tally, digests: Digests | None = None
) -> Comparison:
    """Run ar and hold what was written against it (metrics `speedup` and `exact`).

    digests: of a strict run's logits, to be compared bit for bit.
    """
    of_ar = Digests() if digests else None
    reference = tally(request.decode(reference_of(request, settings), of_ar))
    ours = written.ids.tolist()
    theirs = reference.ids.tolist()
    ar = reference.metrics().throughput
    speedup = written.metrics().throughput / ar if ar else 1.0
    if request.options.get("sampling"):
        return Comparison(ar, speedup, exact=None, is_strict=bool(request.options.get("strict")))
    gap = None
    at = first_difference(ours, theirs)
    if digests:
        of_logits = first_difference(digests.found, of_ar.found)
        return Comparison(ar, speedup, at is None, at, is_strict=True, logits_difference=of_logits)
    if at is not None:
        window = request.options.get("window", WHOLE_TEXT)
        gap = top2_gap(request.pair, request.prompt + theirs[:at], window)
    control = None
    if request.pair.target.dtype != torch.float32:
        padded = tally(request.decode(Alone(rows=CONTROL_ROWS))).ids.tolist()
        control = {"rows": CONTROL_ROWS, "first_difference": first_difference(padded, theirs)}
    return Comparison(ar, speedup, at is None, at, gap, control)


def strict_reference(settings: Settings) -> Alone:
    """The ar that a strict run is held against: with as many rows a pass, where that matters."""
    rule = settings.rule()
    return Alone(rows=row_count(max(rule.max_rows, rule.min_rows)))


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """The first index at which two lists part, the shorter one's end included; None if equal."""
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
        logits = window.read_prompt(target, list(ids), cache).logits[0]
        best, second = logits.topk(2).values.tolist()
        target.pool.take_back(cache.storage)
    except OutOfMemory:
        return None
    return best - second
