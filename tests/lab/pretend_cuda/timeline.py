"""The host's requests to the device, in order, and how many of them the host has waited for.

Every request is carried out at once, while a GPU would lag behind. So the order is recorded: `now`
counts the requests, and `done` those that are known to be done. A transfer of pinned memory stays
open until `done` has reached it.

    timeline.wait("synchronize")   # done = now
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .copies import PendingTransfer
    from .graphs import CUDAGraph


class Timeline:
    """The timeline of the only device."""

    def __init__(self) -> None:
        self.now = 0
        self.done = 0
        self.open: list[PendingTransfer] = []
        self.capture: CUDAGraph | None = None  # the graph that records operations, if one does
        self.loaded: set[object] = set()  # kernels that have run outside captures

    def submit(self) -> int:
        """Count a request to the device and return its moment."""
        self.now += 1
        return self.now

    def wait(self, what: str, moment: int | None = None) -> None:
        """Wait for the device: for all requests, or those up to a moment."""
        self.forbid_capture(what)
        self.settle(moment)

    def forbid_capture(self, what: str) -> None:
        """Raise torch.AcceleratorError if there is a capture, which then fails."""
        if self.capture is not None:
            self.capture.is_spoiled = True
            raise torch.AcceleratorError(
                f"CUDA error: operation not permitted when stream is capturing: {what}"
            )

    def settle(self, moment: int | None = None) -> None:
        """Complete all requests, or those up to a moment."""
        self.done = max(self.done, self.now if moment is None else moment)
        settled = [transfer for transfer in self.open if transfer.moment <= self.done]
        self.open = [transfer for transfer in self.open if transfer.moment > self.done]
        for transfer in settled:
            transfer.settle()


timeline = Timeline()
