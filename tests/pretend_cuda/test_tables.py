"""Claim: the benchmark's tables and tools/gpu_check.sh run on a CUDA device; every text is exact.

The figures mean nothing here; that they are there does. A process of its own, as the memory table
takes for each method, pretends too.
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
TABLES = {
    "main": [],
    "steps": [],
    "memory": ["--methods", "ar"],  # a process each
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.jsonl"
    arguments = ["--table", table, "--output", str(file)] + TINY + TABLES[table]
    assert main(arguments) == 0, capsys.readouterr().err
    results = load(file)
    assert len(results.texts) == len(results.head.cases)
    assert not text_frame(results).is_different.any()
    for text in results.texts.values():
        assert all(math.isfinite(value) for value in text.values() if isinstance(value, float))
        assert table != "memory" or text["pools_mb"] > 0
    if table == "steps":
        assert results.step_times.target_ms


def test_gpu_check(tmp_path: Path) -> None:
    """Dry: every step is taken, one of the tests among them, and what it measured is kept."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    command = ["bash", "tools/gpu_check.sh", "--dry", "--keep", str(tmp_path), "--seconds", "3000"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout and "error: " not in done.stdout
    names = {"pair", "facts", "strict", "eager", "main", "memory"}
    assert {file.stem for file in tmp_path.glob("*.json*")} == names
    main_table = load(tmp_path / "main.jsonl")
    assert {case.row for case in main_table.head.cases} == {*METHODS, CONTROL}
    assert not main_table.n_lacking
    assert main_table.head.machine["processor"] == "NVIDIA Pretended H100"
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [record["rows"] for record in facts["passes"]] == [1, 32] * 2


def test_another_attention_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: cuDNN's is allowed, as where choose_kernels is not called. All is measured before
    that is said."""
    file = tmp_path / "facts.json"
    arguments = [*TINY[:6], "--dry", "--output", str(file)]
    assert gpu_facts.main(arguments) == 0
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert gpu_facts.main(arguments) == 1
    assert "error: attention is not EFFICIENT_ATTENTION everywhere" in capsys.readouterr().err
    assert json.loads(file.read_text())["passes"]
