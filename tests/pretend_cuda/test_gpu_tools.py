"""Tests of the tools that measure a GPU: what they tell of planted mistakes, and that
tools/gpu_check.sh runs every step.

The figures of a pretended device mean nothing, so only their presence is tested.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.layers
from benchmark.report import text_frame
from benchmark.results import load
from engine.cuda_graphs import FixedPasses
from engine.layers import Head
from tools import gpu_facts, gpu_first_pass
from tools.gpu_first_pass import DRY_ROWS, DTYPES

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parent.parent.parent
STEPS = ("load", "eager", "capture", "replay")


def run_first_pass(folder: Path) -> tuple[int, list[dict]]:
    """Return the exit status and the records."""
    file = folder / "first_pass.json"
    return gpu_first_pass.main(["--dry", "--output", str(file)]), json.loads(file.read_text())


def test_the_first_pass_runs_every_step(tmp_path: Path) -> None:
    status, records = run_first_pass(tmp_path)
    assert status == 0 and not [record for record in records if "error" in record]
    for model in ("target", "draft"):
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            found = [r["step"] for r in records if (r["model"], r["dtype"]) == (model, name)]
            assert found[:2] == ["make", "prefill"]
            counts = {step: found.count(step) for step in STEPS}
            n = len(DRY_ROWS)
            assert counts == {"load": n, "eager": n, "capture": n, "replay": n + 1}


def test_a_kernel_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that one failing kernel, of passes of 8 rows, stops only the steps of 8 rows."""
    gelu = engine.layers.gelu

    def broken(x: Tensor, approximate: str, out: Tensor) -> None:
        if len(x) == 8:
            raise RuntimeError("no kernel image is available")
        gelu(x, approximate, out)

    monkeypatch.setattr(engine.layers, "gelu", broken)
    status, records = run_first_pass(tmp_path)
    failed = [(r["step"], r["rows"]) for r in records if "error" in r]
    assert status == 1 and failed == [("load", 8)] * 4
    assert {r["rows"] for r in records if r["step"] == "replay"} == {1, 2}
    line = (
        "error: draft float16 load, 8 rows and 3 more: RuntimeError: no kernel image is available"
    )
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_logits_that_differ_in_one_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the error if captured passes change one logit by the smallest possible amount."""
    write_logits = Head.write_logits

    def flip(head: Head, x: Tensor, out: Tensor) -> None:
        write_logits(head, x, out)
        if torch.cuda.is_current_stream_capturing():
            out[1:2, 5:6].view(torch.int32).bitwise_xor_(1)

    monkeypatch.setattr(Head, "write_logits", flip)
    warm_up = torch.ones(1, 1, device="cuda").view(torch.int32).bitwise_xor_(1)
    assert warm_up.shape == (1, 1)
    status, records = run_first_pass(tmp_path)
    failed = [r for r in records if "error" in r]
    assert status == 1 and {r["step"] for r in failed} == {"replay"}
    assert {r["rows"] for r in failed} == {2, 8}, "one row is padded to two, so its logit is right"
    assert "1 of 768 logits differ from the eager pass, first in row 1" in capsys.readouterr().err


def test_an_error_that_breaks_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that no step follows an error after which the device refuses all work."""

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def break_device(*_: object) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", fail)
        fail()

    monkeypatch.setattr(FixedPasses, "capture_shape", break_device)
    status, records = run_first_pass(tmp_path)
    monkeypatch.undo()
    assert status == 1 and records[-1]["step"] == "capture"
    assert sum("error" in record for record in records) == 1
    line = "error: the device is unusable since draft float16 capture, 1 rows"
    assert line in capsys.readouterr().err.splitlines()


def test_another_attention_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Allow cuDNN's attention, as if choose_kernels had not been called. The error comes after all
    measurements, so that they are not lost."""
    file = tmp_path / "facts.json"
    arguments = ["--dry", "--only", "attention", "--output", str(file)]
    assert gpu_facts.main(arguments) == 0
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    assert gpu_facts.main(arguments) == 1
    assert "it must use only EFFICIENT_ATTENTION" in capsys.readouterr().err
    assert json.loads(file.read_text())["attention"]


def test_a_section_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise RuntimeError("CUPTI is missing")

    monkeypatch.setattr(torch.profiler, "profile", fail)
    file = tmp_path / "facts.json"
    arguments = ["--dry", "--only", "profile,launches", "--output", str(file)]
    assert gpu_facts.main(arguments) == 1
    assert capsys.readouterr().err.endswith("error: profile: RuntimeError: CUPTI is missing\n")
    found = json.loads(file.read_text())
    assert found["profile"] == [{"error": "RuntimeError: CUPTI is missing"}]
    assert len(found["launches"]) == 4


def test_gpu_check(tmp_path: Path) -> None:
    """Check that a dry run does every step, and keeps and packs its results. It runs in a process
    without a pretended device, and must give the steps one."""
    left_out = ("PYTHONPATH", "PYTEST_PLUGINS")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    own |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    keep = tmp_path / "kept"
    command = ["bash", "tools/gpu_check.sh", "--dry", "--keep", str(keep), "--seconds", "3000"]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == 3 and "error: " not in done.stdout
    names = ("pair", "main", "memory")
    tables = {name: load(keep / f"{name}.jsonl") for name in names}
    for table in tables.values():
        assert table.head.machine["processor"] == "NVIDIA Pretended H100"
        assert table.texts and not table.n_missing
        assert not text_frame(table).is_different.any()
    (summary,) = keep.glob("gpu_*.json")
    results = json.loads(summary.read_text())
    parts = {"facts", "profile"}
    assert results.keys() == {"versions", "first_pass", "workspace", *parts, *tables}
    sections = set().union(*(results[part] for part in parts))
    assert sections == {"shapes", *gpu_facts.SECTIONS}
    assert (tmp_path / "kept.tar.gz").stat().st_size > 1000
