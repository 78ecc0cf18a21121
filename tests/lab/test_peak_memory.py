"""Tests of the peak memory of one text (test_measure.py: in a process of its own)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from small import TINY

from dynatree import Step
from dynatree_lab import request
from dynatree_lab.benchmark import memory
from dynatree_lab.benchmark.cases import Case
from dynatree_lab.benchmark.memory import measure_in_new_process, measure_memory
from dynatree_lab.benchmark.plan import build_parser
from dynatree_lab.engine.passes import Window
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.methods.static import Chain, PaddedAutoregressive

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
ARGS = ["--target", str(TINY / "draft"), "--draft", str(TINY / "draft"), "--threads", "1"]


def test_memory_is_measured_as_the_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the generation config of a strict row and of a row over a window and without a
    draft."""
    real, seen = request.generate, []

    def generate(*args: object, **how: object) -> Iterator[Step]:
        seen.append((args[1] is not None, args[3]))
        return real(*args, **how)

    monkeypatch.setattr(request, "generate", generate)
    for text, n in (("ar window=8", 20), ("linear strict", 3)):
        case = Case(text, "builtin", 3, n, 0.0)
        metrics, ids = measure_memory(build_parser().parse_args(ARGS), case, [3, 1, 4], 0)
        assert len(ids) == n and metrics["peak_mb"] > 1
    assert seen == [
        (False, GenerationConfig(PaddedAutoregressive(), window=Window(8, 4))),
        (True, GenerationConfig(Chain(), strict=True)),
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed"),
    ],
)
def test_errors_of_the_process(code: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, case = build_parser().parse_args(ARGS), Case("ar", "builtin", 3, 4, 0.0)
    monkeypatch.setattr(memory, "COMMAND", [memory.COMMAND[0], "-c", code])
    with pytest.raises(UsageError, match=f"^ar: .* failed: {reason}"):
        measure_in_new_process(args, case, [3, 1, 4], seed=0)
