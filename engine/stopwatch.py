"""Milliseconds of an iteration by part: the draft's forwards, the target's, everything else.

watch = Stopwatch(device)
with watch.draft:
    ...
watch.times()  # {"draft_ms": ..., "verify_ms": ..., "other_ms": ...}
"""

import time

import torch

Moment = float | torch.cuda.Event


class Part:
    """A part of the time; `with` it, what happens belongs to it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spans: list[tuple[Moment, Moment]] = []

    def __enter__(self) -> None:
        self.begin = moment(self.device)

    def __exit__(self, *error: object) -> None:
        self.spans.append((self.begin, moment(self.device)))


class Stopwatch:
    """By the host's clock or, on CUDA, the device's, which costs no waiting until it is read.

    There the parts follow one another on the device; while it waits for the host, the part that it
    waits for goes on.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.draft = Part(device)
        self.verify = Part(device)
        self.restart()

    def restart(self) -> None:
        """Forget what has passed."""
        self.draft.spans.clear()
        self.verify.spans.clear()
        self.start = moment(self.device)

    def ms(self) -> float:
        """All that has passed since the start."""
        now = moment(self.device)
        if self.device.type == "cuda":
            now.synchronize()
        return between(self.start, now)

    def times(self) -> dict[str, float]:
        """The same by part, as a Step has them."""
        total = self.ms()
        draft = sum(between(*span) for span in self.draft.spans)
        verify = sum(between(*span) for span in self.verify.spans)
        return {"draft_ms": draft, "verify_ms": verify, "other_ms": total - draft - verify}


def moment(device: torch.device) -> Moment:
    """Now; on CUDA, when the device comes to it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(before: Moment, after: Moment) -> float:
    """Milliseconds."""
    if isinstance(before, float):
        return (after - before) * 1e3
    return before.elapsed_time(after)
