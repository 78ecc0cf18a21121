"""Milliseconds of an iteration by part: the draft's passes, the target's, everything else.

watch = Stopwatch()
with watch.draft:
    ...
watch.times()  # {"draft_ms": ..., "verify_ms": ..., "other_ms": ...}

All of it is the host's clock: what a pass says is read with it, so a device has come to its end.
"""

import time


class Part:
    """A part of the time; `with` it, what happens belongs to it."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.began = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.ms += (time.perf_counter() - self.began) * 1e3


class Stopwatch:
    """Of one generation."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what has passed."""
        self.draft = Part()
        self.verify = Part()
        self.nobodys = Part()  # of what belongs to no iteration
        self.began = time.perf_counter()

    def ms(self) -> float:
        """All that has passed since the start."""
        return (time.perf_counter() - self.began) * 1e3 - self.nobodys.ms

    def times(self) -> dict[str, float]:
        """The same by part, as a Step has them."""
        draft, verify = self.draft.ms, self.verify.ms
        return {"draft_ms": draft, "verify_ms": verify, "other_ms": self.ms() - draft - verify}
