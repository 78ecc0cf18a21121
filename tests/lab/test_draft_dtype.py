"""Tests of the default device and dtypes, and of the note if a draft overflows in its dtype.

test_exactness.py tests that no dtype of the draft changes the text.
"""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fast import pretend_one_gpu
from safetensors.torch import load_file, save_file
from small import TINY, Captured

from dynatree_lab.cli.main import main
from dynatree_lab.cli.options import overflow_note
from dynatree_lab.engine.checkpoint import DTYPES
from dynatree_lab.pair import choose_device, choose_draft_dtype, choose_dtype

PROMPT = "The ship sailed at dawn"
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
OLD = (7, 5)  # the last compute capability that has no bfloat16
NEW = (8, 0)


def test_the_default_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(None) == CPU and choose_dtype(None, CPU) == torch.float32
    pretend_one_gpu(monkeypatch)
    assert choose_device(None) == CUDA and choose_dtype(None, CUDA) == torch.float16
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize(
    ("capability", "device", "target", "draft", "way_out"),
    [
        (NEW, CUDA, "float16", "bfloat16", "--draft-dtype float32"),
        (NEW, CUDA, "bfloat16", "bfloat16", "--draft-dtype float32"),
        (NEW, CUDA, "float32", "float32", "another --draft"),
        (OLD, CUDA, "float16", "float16", "--draft-dtype float32"),
        (NEW, CPU, "float16", "float16", "--draft-dtype float32"),
    ],
)
def test_the_drafts_dtype_by_default_and_what_to_try_if_it_overflows(
    capability: tuple[int, int],
    device: torch.device,
    target: str,
    draft: str,
    way_out: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check both. Pythia-70M, the default draft, overflows in the default target's float16."""
    pretend_one_gpu(monkeypatch, capability)
    dtype = choose_draft_dtype(None, DTYPES[target], device)
    assert dtype == DTYPES[draft]
    assert choose_draft_dtype("float16", DTYPES[target], device) == torch.float16
    assert overflow_note(SimpleNamespace(dtype=dtype, device=device)).endswith(f"; try {way_out}")


def test_both_dtypes_are_announced_and_reported(capsys: Captured) -> None:
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "9", "--json"]
    for options, draft_dtype in (
        ([], "float32"),
        (["--draft-dtype", "bfloat16"], "bfloat16"),
        (["--method", "ar", "--draft-dtype", "bfloat16"], None),
    ):
        assert main(arguments + options) == 0
        captured = capsys.readouterr()
        settings = json.loads(captured.out)["settings"]
        assert (settings["dtype"], settings["draft_dtype"]) == ("float32", draft_dtype)
        (line,) = [line for line in captured.err.splitlines() if "; cpu, float32" in line]
        assert line.endswith("draft bfloat16") == (draft_dtype == "bfloat16")
        assert ("ignores --draft and --draft-dtype" in captured.err) == (draft_dtype is None)


# A draft that overflows.


@pytest.fixture
def overflowing_draft(tmp_path: Path) -> str:
    """Return a copy of the embedded draft whose logits overflow only in float16."""
    folder = shutil.copytree(TINY / "draft", tmp_path / "draft")
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    tensors["embed_out.weight"] *= 2.0**14
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_an_overflow_is_reported_at_once(
    overflowing_draft: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that there is one note, on its own line, before the text generated without a draft."""
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "20", "--draft", overflowing_draft]
    arguments += ["--target", str(TINY / "target"), "--draft-dtype"]
    assert main([*arguments, "float32"]) == 0
    text = capsys.readouterr().out
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([*arguments, "float16"]) == 0
    (note,) = [line for line in terminal.getvalue().splitlines() if "not finite" in line]
    before, after = terminal.getvalue().split(f"\n{note}\n")
    first = before.splitlines()[-1]  # prefill's token
    assert first and text.startswith(first)
    assert after.startswith(text.removeprefix(first)) and len(after) > len(text)
