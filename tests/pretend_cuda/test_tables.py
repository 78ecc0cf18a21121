"""Tests that the benchmark's memory table and tools/gpu_check.sh run on a CUDA device.

The figures of a pretended device mean nothing, so only their presence is tested. The other tables
are tested as steps of the GPU check.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import main
from benchmark.cases import CONTROL
from benchmark.report import text_frame
from benchmark.results import load
from methods import METHODS
from tools import gpu_facts

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parent.parent.parent
TINY = ["--target", "models/tiny/target", "--draft", "models/tiny/draft"]
TINY += ["--device", "cuda", "--dtype", "float32", "--n-prompts", "1"]
TINY += ["--prompt-tokens", "12", "--new-tokens", "6"]


def test_the_memory_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the figures of the table, which starts a process with a pretended device for each
    method."""
    file = tmp_path / "table.jsonl"
    arguments = ["--table", "memory", "--methods", "ar", "--output", str(file), *TINY]
    assert main(arguments) == 0, capsys.readouterr().err
    results = load(file)
    assert len(results.texts) == len(results.head.cases)
    assert not text_frame(results).is_different.any()
    for text in results.texts.values():
        assert all(math.isfinite(value) for value in text.values() if isinstance(value, float))
        assert text["pools_mb"] > 0


def test_gpu_check(tmp_path: Path) -> None:
    """Check that a dry run does every step, one of the tests among them, and keeps its results."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    command = ["bash", "tools/gpu_check.sh", "--dry", "--keep", str(tmp_path), "--seconds", "3000"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout and "error: " not in done.stdout
    names = {"pair", "facts", "strict", "eager", "main", "memory"}
    assert {file.stem for file in tmp_path.glob("*.json*")} == names
    main_table = load(tmp_path / "main.jsonl")
    assert {case.row for case in main_table.head.cases} == {*METHODS, CONTROL}
    assert not main_table.n_missing
    assert main_table.head.machine["processor"] == "NVIDIA Pretended H100"
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [record["rows"] for record in facts["passes"]] == [1, 32] * 2


def test_another_attention_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Allow cuDNN's attention, as if choose_kernels had not been called. The error comes after all
    measurements, so that they are not lost."""
    file = tmp_path / "facts.json"
    arguments = [*TINY[:6], "--dry", "--output", str(file)]
    assert gpu_facts.main(arguments) == 0
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert gpu_facts.main(arguments) == 1
    assert "it must use only EFFICIENT_ATTENTION" in capsys.readouterr().err
    assert json.loads(file.read_text())["passes"]
