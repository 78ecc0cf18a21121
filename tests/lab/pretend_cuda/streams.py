"""Streams, and the check that no operation uses memory too early.

The operations of one stream run in the order of their submission. Those of two streams may run in
any order, unless one has waited for the other. So every operation checks each tensor that it uses:
another stream must have finished to write to it, and also to read it if the operation writes to it.
Waits of the host do not count.

    stream.wait_stream(other)   # what comes next runs after all that `other` has been asked for
"""

import torch

from .tensors import CudaTensor, owner_of
from .timeline import timeline


class Stream:
    """A stream, and how many operations of other streams have ended before its next one."""

    current: "Stream"

    def __init__(self, device: torch.device | None = None) -> None:
        self.n_submitted = 0
        self.ended: dict[Stream, int] = {}

    def synchronize(self) -> None:
        timeline.wait("Stream.synchronize")

    def wait_stream(self, other: "Stream") -> None:
        for stream, n in {**other.ended, other: other.n_submitted}.items():
            self.ended[stream] = max(n, self.ended.get(stream, 0))


DEFAULT_STREAM = Stream()
Stream.current = DEFAULT_STREAM


class StreamContext:
    """torch.cuda.stream: makes another stream the current one inside a `with` block."""

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        self.before = Stream.current
        Stream.current = self.stream or Stream.current

    def __exit__(self, *error: object) -> None:
        Stream.current = self.before


def record_use(read: list[CudaTensor], written: list[CudaTensor]) -> None:
    """Record an operation of the current stream. Raises RuntimeError if it may run too early."""
    if timeline.capture is not None:  # a graph is one operation of the stream that replays it
        return
    stream = Stream.current
    stream.n_submitted += 1
    for tensor in [*read, *written]:
        require_ended(owner_of(tensor).writers, "written to")
    for tensor in written:
        require_ended(owner_of(tensor).readers, "read")
        owner_of(tensor).writers[stream] = stream.n_submitted
    for tensor in read:
        owner_of(tensor).readers[stream] = stream.n_submitted


def require_ended(users: dict[Stream, int], how: str) -> None:
    """Raise RuntimeError unless the current stream has waited for these operations of others.

    users: the last operation of each stream.
    """
    for other, n in users.items():
        if other is not Stream.current and Stream.current.ended.get(other, 0) < n:
            raise RuntimeError(f"a stream uses memory that may still be {how} by another stream")
