"""Tests that a model can generate after a capture of one of its passes has failed."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from conftest import generate, random_config, random_tensors

from cli.metrics import token_ids
from draft_tree import Settings
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX
from methods.lookup import Lookup
from methods.static import PaddedAutoregressive

from .graphs import CUDAGraph
from .runtime import DEFAULT_STREAM, Stream

pytestmark = pytest.mark.cuda
record = CUDAGraph.record
PROMPT = [5, 7, 9]
# The first has two graphs, captured before the first pass. The second has one, of more rows, which
# is captured after its first pass
SETTINGS = [Lookup(K=1), PaddedAutoregressive(rows=192)]


def fail_at(k: int, error: RuntimeError) -> Callable[..., None]:
    """Return a CUDAGraph.record that raises an error at the k-th operation, counted from 0. An
    out-of-memory error of the allocator does not break the capture, other errors do."""
    operations = count()

    def record_or_fail(graph: CUDAGraph, *arguments: object) -> None:
        if next(operations) == k:
            graph.is_spoiled = not isinstance(error, torch.OutOfMemoryError)
            raise error
        record(graph, *arguments)

    return record_or_fail


def make_model() -> FastGPTNeoX:
    config = random_config(num_hidden_layers=1, max_position_embeddings=256)
    tensors = {name: tensor.cuda() for name, tensor in random_tensors(config, 3).items()}
    return FastGPTNeoX.from_tensors(config, tensors)


def write(model: FastGPTNeoX, settings: Settings, graphs: bool = True) -> list[int]:
    return token_ids(generate(model, None, PROMPT, settings, 3, graphs=graphs))


def count_operations(model: FastGPTNeoX) -> int:
    """Return the number of operations in the graphs of the model's closed caches."""
    graphs = [graph for passes in model.reusable for graph, _ in passes.captured.values()]
    return sum(len(graph.operations) for graph in graphs)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
@pytest.mark.parametrize("settings", SETTINGS, ids=["before the first pass", "after a pass"])
def test_a_capture_may_fail_at_any_operation(
    settings: Settings, kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the error of each failure, the current stream, and the ids of a second generation."""
    model = make_model()
    expected = write(model, settings, graphs=False)
    assert write(model, settings) == expected
    n_operations = count_operations(model)
    assert 20 < n_operations < 80
    for k in range(n_operations):
        model.free_reusable()
        error = kind("planted")
        with monkeypatch.context() as patch:
            patch.setattr(CUDAGraph, "record", fail_at(k, error))
            with pytest.raises((OutOfMemory, torch.AcceleratorError)) as caught:
                write(model, settings)
        if kind is torch.OutOfMemoryError:
            assert str(caught.value).endswith("use --no-graphs") and caught.value.__cause__ is error
        else:
            assert caught.value is error
        assert Stream.current is DEFAULT_STREAM
        assert write(model, settings) == expected
        assert count_operations(model) == n_operations, f"after a failure at {k}"
