"""Tests that mistakes planted in the engine, which a GPU would punish, fail on this device."""

from collections.abc import Callable

import pytest
import torch
from fast import generate
from small import TINY, random_config, random_tensors

from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.streamed import load_streamed
from dynatree_lab.methods.lookup import Lookup
from dynatree_lab.metrics import token_ids

from .graphs import CUDAGraph
from .streams import DEFAULT_STREAM, Stream

pytestmark = pytest.mark.cuda


def make_model() -> FastGPTNeoX:
    config = random_config(intermediate_size=62, max_position_embeddings=256)
    tensors = {name: tensor.cuda() for name, tensor in random_tensors(config, 3).items()}
    return FastGPTNeoX.from_tensors(config, tensors)


def write(model: FastGPTNeoX) -> list[int]:
    return token_ids(generate(model, None, [5, 7, 9, 5, 7], Lookup(K=1), 8))


def test_pinned_memory_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check inputs that are overwritten before their copy is done, and results that are read
    before."""
    model = make_model()
    expected = write(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Event", lambda: None)
        with pytest.raises(RuntimeError, match="written to before its copy"):
            write(make_model())
    monkeypatch.setattr(Stream, "synchronize", lambda stream: None)
    with pytest.raises(RuntimeWarning, match="invalid value"):  # nan instead of an id
        write(model)
    monkeypatch.undo()
    assert write(model) == expected


def test_queries_that_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a linear layer whose rows are not padded to whole 16 bytes."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "pad", lambda x, _: x)
        model = make_model()
    with pytest.raises(RuntimeError, match=r"query is not correctly aligned \(strideM\)"):
        write(model)


def skip_wait(monkeypatch: pytest.MonkeyPatch, is_default: bool) -> None:
    """Let the default stream, or all others, not wait for the other stream."""
    wait: Callable[[Stream, Stream], None] = Stream.wait_stream

    def skip(stream: Stream, other: Stream) -> None:
        if (stream is DEFAULT_STREAM) != is_default:
            wait(stream, other)

    monkeypatch.setattr(Stream, "wait_stream", skip)


@pytest.mark.parametrize(
    ("is_default", "message"), [(True, "still be written to by"), (False, "still be read by")]
)
def test_a_streamed_layer_that_is_not_waited_for(
    is_default: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a layer that runs before its copy has ended, and a copy into a buffer in use."""
    model = load_streamed(TINY / "target", torch.device("cuda"), torch.float32, 40_000_000)
    expected = write(model)
    with monkeypatch.context() as patch:
        skip_wait(patch, is_default)
        with pytest.raises(RuntimeError, match=message):
            write(model)
    assert write(model) == expected


@pytest.mark.parametrize("k", [0, 20])
def test_a_capture_without_memory(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the error, and that the model can then generate. k: operation of the capture that
    finds no memory."""
    model, n_operations = make_model(), iter(range(1000))
    record: Callable[..., None] = CUDAGraph.record

    def fail(graph: CUDAGraph, *arguments: object) -> None:
        if next(n_operations) == k:
            raise torch.OutOfMemoryError("planted")
        record(graph, *arguments)

    expected = write(make_model())
    with monkeypatch.context() as patch:
        patch.setattr(CUDAGraph, "record", fail)
        with pytest.raises(OutOfMemory, match="use --no-graphs$"):
            write(model)
    assert write(model) == expected
