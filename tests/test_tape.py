"""Tests that tape.py finds the errors that a CUDA graph would make."""

import pytest
import tape
import torch
from conftest import fix_shapes, generate, pretend_capture, random_model
from torch import Tensor

from cli.metrics import token_ids
from engine.cuda_graphs import FixedPasses, PassResult, PassShape
from engine.model import FastGPTNeoX
from methods.static import Chain

PROMPT = [3, 14, 15, 92, 65]


def test_a_replay_reads_tensors_anew_and_keeps_pythons_values() -> None:
    x, factor = torch.ones(3), [2.0]

    def run() -> tuple[Tensor, None]:
        return x * factor[0] + 1, None

    graph, (found, _) = tape.record(run)
    x.fill_(5.0)
    factor[0] = 7.0
    graph.replay()
    assert found.tolist() == [11.0] * 3


RUN = FixedPasses.run


def read_by_the_host(passes: FixedPasses, model: FastGPTNeoX, shape: PassShape) -> PassResult:
    int(shape.view_inputs(passes.buffer).start)
    return RUN(passes, model, shape)


def write_where_the_capture_wrote(
    passes: FixedPasses, model: FastGPTNeoX, shape: PassShape
) -> PassResult:
    start = shape.view_inputs(passes.staging).start.numpy()[0].item()
    shape.view_inputs(passes.buffer).start.fill_(start)
    return RUN(passes, model, shape)


def write(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the token ids of a text whose passes are replayed."""
    pretend_capture(monkeypatch)
    target, draft = random_model(1), random_model(2)
    fix_shapes(target, draft)
    return token_ids(generate(target, draft, PROMPT, Chain(K=3), 30))


def test_a_pass_that_the_host_reads_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedPasses, "run", read_by_the_host)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        write(monkeypatch)


def test_a_value_that_a_graph_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = token_ids(generate(random_model(1), random_model(2), PROMPT, Chain(K=3), 30))
    assert write(monkeypatch) == expected
    monkeypatch.setattr(FixedPasses, "run", write_where_the_capture_wrote)
    assert write(monkeypatch) != expected
