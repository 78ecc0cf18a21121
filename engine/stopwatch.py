"""Milliseconds of an iteration by part: the draft's forwards, the target's, everything else.

watch = Stopwatch(device)
with watch.draft:
    ...
watch.times()  # {"draft_ms": ..., "verify_ms": ..., "other_ms": ...}
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Moment = float | torch.cuda.Event


class Part:
    """A part of the time; `with` it, what happens belongs to it.

    On CUDA it is what the device does meanwhile, told by events on its stream. They are used again
    in every iteration: to make one costs as much as to record it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.moments: list[Moment] = []  # beginnings and ends in turn
        self.spare: list[torch.cuda.Event] = []

    def __enter__(self) -> None:
        self.note()

    def __exit__(self, *error: object) -> None:
        self.note()

    def note(self) -> None:
        """Now; on CUDA, when the device comes to it."""
        if self.device.type != "cuda":
            self.moments.append(time.perf_counter())
            return
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.moments.append(event)

    def wait(self) -> None:
        """On CUDA, until the device has come to the end; it has if something was read since."""
        if self.device.type == "cuda" and self.moments and not self.moments[-1].query():
            self.moments[-1].synchronize()

    def ms(self) -> float:
        """All of it since the restart."""
        self.wait()
        total = 0.0
        for i in range(0, len(self.moments), 2):
            total += between(self.moments[i], self.moments[i + 1])
        return total

    def restart(self) -> None:
        if self.device.type == "cuda":
            self.spare += self.moments
        self.moments.clear()


class Stopwatch:
    """Of one generation; the whole is the host's time, which reads what each pass says."""

    def __init__(self, device: torch.device):
        self.draft = Part(device)
        self.verify = Part(device)
        self.restart()

    def restart(self) -> None:
        """Forget what has passed."""
        self.draft.restart()
        self.verify.restart()
        self.start = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in a `with` of it belongs to nothing."""
        paused = time.perf_counter()
        yield
        self.start += time.perf_counter() - paused

    def ms(self) -> float:
        """All that has passed since the start."""
        self.draft.wait()
        self.verify.wait()
        return (time.perf_counter() - self.start) * 1e3

    def times(self) -> dict[str, float]:
        """The same by part, as a Step has them."""
        total = self.ms()
        draft = self.draft.ms()
        verify = self.verify.ms()
        return {"draft_ms": draft, "verify_ms": verify, "other_ms": total - draft - verify}


def between(before: Moment, after: Moment) -> float:
    """Milliseconds."""
    if isinstance(before, float):
        return (after - before) * 1e3
    return before.elapsed_time(after)
