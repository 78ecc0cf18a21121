"""Tests that the benchmark's memory table runs on a CUDA device.

The figures of a pretended device mean nothing, so only their presence is tested. Another table is
a step of the GPU check (test_gpu_check.py).
"""

import math
from pathlib import Path

import pytest

from dynatree_lab.benchmark.measure import main
from dynatree_lab.benchmark.report import text_frame
from dynatree_lab.benchmark.results import load

pytestmark = pytest.mark.cuda
TINY = ["--target", "models/tiny/target", "--draft", "models/tiny/draft"]
TINY += ["--device", "cuda", "--dtype", "float32", "--n-prompts", "1"]
TINY += ["--prompt-tokens", "12", "--max-new-tokens", "6"]


def test_the_memory_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the figures of the table, which starts a process with a pretended device for each
    method."""
    file = tmp_path / "table.jsonl"
    arguments = ["--table", "memory", "--methods", "ar", "--output", str(file), *TINY]
    assert main(arguments) == 0, capsys.readouterr().err
    results = load(file)
    assert len(results.texts) == len(results.cases)
    assert not text_frame(results).is_different.any()
    assert all(math.isfinite(text["peak_mb"]) for text in results.texts.values())
