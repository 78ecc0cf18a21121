"""What the host asks of the device, in order, and how much of it the host has waited for.

All is carried out at once, where a GPU would lag behind. So the order is kept: `now` counts what
was asked for, `done` how much of that is known to be done, and a transfer of pinned memory stays
open until `done` has come past it.

    timeline.wait("synchronize")   # done = now
    timeline.counts["sync"]        # 1
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .copies import OpenTransfer
    from .graphs import CUDAGraph

HERE = f"{Path(__file__).parent}/"
ROOT = f"{Path(__file__).parents[2]}/"


class Timeline:
    """Of the one device that there is."""

    def __init__(self) -> None:
        self.now = 0
        self.done = 0
        self.open: list[OpenTransfer] = []
        self.capture: CUDAGraph | None = None  # what records, in place of the device
        self.loaded: set[object] = set()  # the kernels that have run outside of captures
        self.counts: Counter[str] = Counter()  # by kind
        self.sites: Counter[tuple[str, str, str]] | None = None  # by kind, what and line

    def count(self, kind: str, what: str = "", n: int = 1) -> None:
        self.counts[kind] += n
        if self.sites is not None:
            self.sites[kind, what, project_line()] += n

    def submit(self, kind: str, what: str = "", n: int = 1) -> int:
        """Something is asked of the device; returns its moment."""
        self.count(kind, what, n)
        self.now += 1
        return self.now

    def wait(self, what: str, moment: int | None = None) -> None:
        """The host waits for the device: for all, or all up to a moment."""
        self.forbid_capture(what)
        self.count("sync", what)
        self.settle(moment)

    def forbid_capture(self, what: str) -> None:
        """Raise in one, which fails then."""
        if self.capture is not None:
            self.capture.is_spoiled = True
            raise torch.AcceleratorError(
                "CUDA error: operation not permitted when stream is capturing: "
                f"{what} at {project_line()}"
            )

    def settle(self, moment: int | None = None) -> None:
        """Everything up to a moment is done, or all."""
        self.done = max(self.done, self.now if moment is None else moment)
        settled = [transfer for transfer in self.open if transfer.moment <= self.done]
        self.open = [transfer for transfer in self.open if transfer.moment > self.done]
        for transfer in settled:
            transfer.settle()

    @contextmanager
    def traced(self) -> Iterator[Counter[tuple[str, str, str]]]:
        """Also count by what was done and by the project's line."""
        self.sites = Counter()
        try:
            yield self.sites
        finally:
            self.sites = None


def project_line() -> str:
    """The innermost line of the project on the stack, the pretended device left out."""
    frame = sys._getframe(1)
    while frame:
        file = frame.f_code.co_filename
        is_device = file.startswith(HERE) and not file.startswith(f"{HERE}test_")
        if file.startswith(ROOT) and not is_device and "site-packages" not in file:
            return f"{file.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


timeline = Timeline()
