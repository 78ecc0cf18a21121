"""Claim: the benchmark's tables and tools/gpu_check.sh run on a CUDA device; every text is exact.

The figures mean nothing here; that they are there does. A process of its own, as the memory table
takes for each method, pretends too.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import main
from benchmark.results import Results
from engine.cuda_graphs import Shape, ShapedPasses
from methods import METHODS
from tools import gpu_facts
from tools.gpu_check import schedule
from tools.gpu_facts import Lab, Setup, Wrong

from .timeline import timeline

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
    if table == "memory":
        assert all(record["metrics"]["pools_mb"] > 0 for record in results.records)
    if table == "steps":
        assert results.step_times.target_ms


def test_gpu_check(tmp_path: Path) -> None:
    """Dry: every part is done, one of the tests among them, and what it measured is kept."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    command = ["bash", "tools/gpu_check.sh", "--dry", "--keep", str(tmp_path), "--seconds", "3000"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    setup = Setup("the pair", 20, tmp_path, "", "", "cuda:0", "float16")
    parts = schedule(setup, ["float16", "bfloat16"], is_dry=True, is_enlarged=True)
    begun = re.findall("^== (.*) \\(.* s at most", done.stdout, re.MULTILINE)
    assert begun == [part.name for part in parts]
    assert (
        "1 passed" in done.stdout and f"{len(parts)} of {len(parts)} parts are done" in done.stdout
    )
    every = Results.load(tmp_path / "every.json")
    assert {"ar eager", "ar rows=2", "dynatree rebuild", *METHODS} <= {r.label for r in every.runs}
    assert every.machine["processor"] == "NVIDIA Pretended H100"
    kept = {file.stem for file in tmp_path.glob("*.json")}
    assert kept >= {"pair", "strict", "memory", "attention", "products", "launches"}
    passes = [record for record in read(tmp_path / "times.json") if "rows" in record]
    dtypes = ["float16"] * 2 + ["bfloat16"] * 6  # of target and draft at two numbers of rows each
    assert [record["dtype"] for record in passes] == dtypes
    environments = [record["environment"] for record in read(tmp_path / "variant.json")]
    assert environments == ["as it is", "CUBLASLT_WORKSPACE_SIZE=32768"]


def read(file: Path) -> list[dict]:
    return json.loads(file.read_text())


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The embedded pair as it is, in half precision."""
    sizes = {"rows": (1, 8), "slots": (512,), "n_replays": 2}
    return Lab(Setup("the pair", 20, tmp_path, *PAIR, "cuda:0", "float16", **sizes))


def test_passes_in_half_precision_are_held_to_float32(lab: Lab) -> None:
    """And stay far from the bound."""
    records = list(gpu_facts.correctness(lab))
    assert [record["rows"] for record in records] == [1, 32, 128] * 2
    assert all(0 < record["elsewhere"] < record["bound"] / 5 for record in records)


@pytest.mark.parametrize("mistake", ["position", "ancestor", "slot"])
def test_a_wrong_pass_is_found(mistake: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in what is replayed: rows stand one position too far, do not see the root, or are
    written one slot too far."""
    upload = ShapedPasses.upload

    def mistaken(
        passes: ShapedPasses,
        shape: Shape,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        length: int,
        at: int,
    ) -> None:
        if passes.is_replaying and len(tokens) > 1:
            if mistake == "position":
                positions = positions + 1
            elif mistake == "ancestor":
                mask = mask.clone()
                mask[1:, 0] = False
            else:
                at += 1
        upload(passes, shape, tokens, positions, mask, length, at)

    monkeypatch.setattr(ShapedPasses, "upload", mistaken)
    with pytest.raises(Wrong, match="target, 32 rows: .*target, 128 rows: "):
        list(gpu_facts.correctness(lab))


def test_another_attention_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: cuDNN's is allowed, as where settle_kernels is not called."""
    assert {record["kernel"] for record in gpu_facts.attention(lab)} == {"EFFICIENT_ATTENTION"}
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    with pytest.raises(Wrong, match="target, 32 rows, 512 slots: CUDNN_ATTENTION"):
        list(gpu_facts.attention(lab))


def test_times_are_of_the_pass_that_was_uploaded(lab: Lab) -> None:
    """Each is replayed once more than it is timed, and only it; launched alone it is not."""
    assert lab.loaded
    before = timeline.counts.copy()
    (record,) = gpu_facts.variant(lab)
    assert record.keys() == {"environment", "ms_at_1", "ms_at_8"}
    n_forwards = 1 + 3  # one to warm up and a burst
    n_alone = 3 * (lab.setup.n_replays + 1)
    counts = timeline.counts - before
    assert counts["replay"] - counts["capture"] == 2 * (n_forwards + n_alone)
