"""Tests of the list of operators that ran on the pretended device."""

import json
from pathlib import Path

import pytest
import torch

from engine.masks import attend

from .operators import VARIABLE, has_kernel, main
from .test_device import zeros

pytestmark = pytest.mark.cuda


def test_the_list_has_operators_and_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a matrix product, which torch.nn.functional.linear is composed of, a copy to the host,
    and attention, which is listed as its kernel's operator."""
    file = tmp_path / "operators"
    x = zeros(2, 2, 8).half()
    monkeypatch.setenv(VARIABLE, str(file))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    for _ in range(2):
        torch.nn.functional.linear(x[0], x[0])
        x.index_select(0, zeros(1).long()).cpu()
        attend(x, x, x, zeros(2, 2).half())
    listed = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(listed) == len({tuple(line) for line in listed}), "each line once"
    for line in (
        ["aten::mm", "torch.float16"],
        ["aten::index_select", "torch.float16", "torch.int64"],
        ["aten::_to_copy", "torch.float16"],
        ["aten::_scaled_dot_product_efficient_attention", "torch.float16"],
    ):
        assert line in listed


def test_operators_without_a_kernel_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check with a torch that has no kernels for CUDA, but runs composite operators everywhere."""
    file = tmp_path / "operators"
    file.write_text('["aten::empty_like", "torch.int64"]\n["aten::mm", "torch.float16"]\n' * 2)
    assert main([str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "aten::mm torch.float16" and lines[1].startswith("1 of 2 operators")
    assert has_kernel("aten::linear") and not has_kernel("aten::not_an_operator")
    file.write_text('["aten::empty_like", "torch.int64"]\n')
    assert main([str(file)]) == 0
