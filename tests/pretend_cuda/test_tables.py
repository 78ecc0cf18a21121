"""Claim: the benchmark's tables and tools/gpu_check.sh run on a CUDA device; every text is exact.

The figures mean nothing here; that they are there does. A process of its own, as the memory table
takes for each method, pretends too.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import main
from benchmark.results import Results

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parent.parent.parent
PAIR = ["models/tiny/target", "models/tiny/draft"]
TINY = ["--target", PAIR[0], "--draft", PAIR[1]]
TINY += ["--device", "cuda", "--dtype", "float32", "--n-prompts", "1"]
TINY += ["--prompt-tokens", "12", "--new-tokens", "6"]
TABLES = {
    "main": [],
    "steps": [],
    "memory": ["--methods", "ar"],  # a process each
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    arguments = ["--table", table, "--output", str(file)] + TINY + TABLES[table]
    assert main(arguments) == 0, capsys.readouterr().err
    results = Results.load(file)
    labels = {run.label for run in results.runs}
    assert {record["run"] for record in results.records} == labels
    for record in results.records:
        assert all(math.isfinite(value) for value in record["metrics"].values())
    for row in results.rows():
        assert not row.differing()
    if table == "main":
        assert "ar eager" in labels
    elif table == "memory":
        assert all(record["metrics"]["pools_mb"] > 0 for record in results.records)
    else:
        assert results.step_times.target_ms


def test_gpu_check() -> None:
    """Dry, with the embedded pair as it is; of the tests that it runs first, one.

    How the pair is enlarged is no matter of the device.
    """
    environment = os.environ | {"PYTEST_ADDOPTS": "-k test_two_generations_at_once"}
    environment["OMP_NUM_THREADS"] = "1"
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "tools/gpu_check.sh", "--dry", *PAIR]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "float16 on NVIDIA Pretended H100" in done.stdout
    assert "ar eager" in done.stdout
