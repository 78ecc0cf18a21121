"""Tests of the GPU check: a dry run, and a planted mistake."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from small import ROOT
from torch import Tensor

from dynatree_lab.benchmark.report import text_frame
from dynatree_lab.benchmark.results import load
from dynatree_lab.engine.layers import Head
from tools.gpu_first_pass import DRY_ROWS, DRY_SHAPES, check_model

pytestmark = pytest.mark.cuda


def test_gpu_check(tmp_path: Path) -> None:
    """Check that all steps run on the pretended device, and that their results are packed. It takes
    a minute, because it starts Python seven times."""
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["bash", "tools/gpu_check.sh", "--dry"]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all replays are equal") == 2 and "2 passed" in done.stdout
    name = "gpu_NVIDIA_Pretended_H100"
    for table in ("main", "strict"):
        results = load(tmp_path / f"{name}_{table}.jsonl")
        assert results.texts and not text_frame(results).is_different.any()
    with tarfile.open(tmp_path / f"{name}.tar.gz") as archive:
        found = {Path(member).suffix for member in archive.getnames()}
    assert found == {".txt", ".jsonl"}


def test_a_replay_that_differs_in_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the error if captured passes change one logit by the smallest possible amount."""
    write_logits = Head.write_logits

    def flip(head: Head, x: Tensor, out: Tensor) -> None:
        write_logits(head, x, out)
        bits = out[1:2, 5:6].view(torch.int32)
        bits.bitwise_xor_(int(torch.cuda.is_current_stream_capturing()))

    monkeypatch.setattr(Head, "write_logits", flip)
    (config,) = DRY_SHAPES.values()
    with pytest.raises(ValueError, match="a replay of 4 rows gives other logits, first in row 1"):
        check_model(config, torch.float16, DRY_ROWS)
