"""--compare: a method's run beside ar's on the same prompt, and what explains a difference.

comparison = compare(request, tally(steps), digests=None)
print(comparison.line())
"""

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from torch import Tensor

from cli.metrics import Tally, tally
from cli.models import Pair, Request
from draft_tree import Settings
from engine.memory import OutOfMemory
from engine.passes import Use, row_count
from engine.streaming import WHOLE_TEXT, Window
from methods.static import Alone

TIE = 1e-4  # a top-2 gap below it, in float32, is decided by rounding


@dataclass(frozen=True)
class Comparison:
    """A method's run against ar's on the same prompt."""

    ar_throughput: float
    speedup: float
    exact: bool | None  # None if sampled: then no two texts need agree
    first_difference: int | None = None  # index into token_ids
    top2_gap: float | None = None  # the target's there, in float32; None if it does not fit
    is_strict: bool = False  # then no gap, and ar's passes have as many rows
    logits_difference: int | None = None  # if strict, the first token whose logits differ in a bit

    @property
    def is_tie(self) -> bool:
        return is_tie(self.top2_gap)

    @property
    def is_wrong(self) -> bool:
        """They differ, and rounding does not explain it: under strict it explains nothing."""
        return self.logits_difference is not None or (self.exact is False and not self.is_tie)

    def line(self) -> str:
        ar = "strict ar" if self.is_strict else "ar"
        speed = f"{self.ar_throughput:.1f} tokens/s, so {self.speedup:.2f}x"
        return f"{ar}: {speed}; the ids {self.verdict()}"

    def verdict(self) -> str:
        """What is to be said of the ids."""
        ids = equal_or_not(self.first_difference)
        if self.exact is None:
            return "are sampled, not compared"
        if self.is_strict and self.is_wrong:
            return f"{ids}, the logits {equal_or_not(self.logits_difference)}"
        if self.is_strict:
            return "and logits are equal, bit for bit"
        if self.exact:
            return ids
        if self.top2_gap is None:
            return f"{ids} (no room for the float32 model that would tell the top-2 gap)"
        kind = "a tie" if self.is_tie else "not a tie"
        return f"{ids} (top-2 gap {self.top2_gap:.1e} in float32: {kind})"


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


def reference_of(request: Request) -> Request:
    """The same text by the ar that it is held against."""
    way = request.way
    ar = strict_reference(way.settings) if way.strict else Alone()
    return replace(request, way=replace(way, settings=ar, acceptance=None))


def strict_reference(settings: Settings) -> Alone:
    """The ar that a strict run is held against: with as many rows a pass, where that matters."""
    rule = settings.make_rule()
    return Alone(rows=row_count(max(rule.max_verified, rule.min_rows)))


def compare(request: Request, written: Tally, digests: Digests | None) -> Comparison:
    """Run ar and hold what was written against it (metrics `speedup` and `exact`).

    digests: of a strict run's logits, to be compared bit for bit.
    """
    way = request.way
    of_ar = Digests()
    reference = tally(reference_of(request).decode(of_ar if way.strict else None))
    ar = reference.metrics().throughput
    speedup = written.metrics().throughput / ar if ar else 1.0
    found = Comparison(ar, speedup, exact=None, is_strict=way.strict)
    if not way.sampling.is_greedy:
        return found
    theirs = reference.ids.tolist()
    at = first_difference(written.ids.tolist(), theirs)
    found = replace(found, exact=at is None, first_difference=at)
    if way.strict:
        return replace(found, logits_difference=first_difference(digests.found, of_ar.found))
    if at is None:
        return found
    gap = top2_gap(request.pair, request.prompt + theirs[:at], way.window)
    return replace(found, top2_gap=gap)


def is_tie(gap: float | None) -> bool:
    """Whether rounding decides at a top-2 gap; None is not known."""
    return gap is not None and gap < TIE


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """The first index at which two lists part, the shorter one's end included; None if equal."""
    if ours == theirs:
        return None
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return i
    return min(len(ours), len(theirs))


def top2_gap(pair: Pair, ids: list[int], window: Window = WHOLE_TEXT) -> float | None:
    """How far the target's best next token leads the second, in float32 whatever its dtype.

    None if there is no room for the float32 model.
    """
    try:
        target = pair.float32_target
        with closing(target.new_cache(min(len(ids), window.full), Use(window=window))) as cache:
            best, second = target.prefill(ids, cache).logits[0].topk(2).values.tolist()
    except OutOfMemory:
        return None
    return best - second
