"""Tests that the report of tools/gpu_check.sh names what failed and what is slow, and why."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, Captured

from benchmark.results import load
from tools import gpu_report
from tools.gpu_report import kernels_of, read_results
from tools.random_models import PYTHIA, describe_shapes

PLACE = {"model": "target", "slots": 512, "rows": 32}
GEMM = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm>(Params)"
PROFILE = [
    PLACE | {"kernel": GEMM, "count": 65, "us": 5100.0},
    PLACE | {"kernel": "fmha_cutlassF_f16(Kernel::Params)", "count": 32, "us": 350.0},
    PLACE | {"kernel": "all", "count": 402, "us": 5900.0},
]


def write_facts(
    folder: Path,
    device_ms: float,
    shapes: str = describe_shapes(PYTHIA),
    copy_gb_s: float = 3000.0,
) -> None:
    measured = PLACE | {"device_ms": device_ms, "spread": 0.01, "floor_ms": 1.6}
    facts = {"shapes": shapes, "passes": [{"copy_gb_s": copy_gb_s}, measured]}
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / "profile.json").write_text(json.dumps({"shapes": shapes, "profile": PROFILE}))
    (folder / "versions.json").write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3"}))


def run_report(folder: Path, capsys: Captured) -> list[str]:
    assert gpu_report.main([str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_slow_pass_is_named_with_its_kernels(tmp_path: Path, capsys: Captured) -> None:
    write_facts(tmp_path, device_ms=6.1)
    (line,) = [line for line in run_report(tmp_path, capsys) if line.startswith("slow")]
    assert line == (
        "slow: target, 32 rows, 512 slots: 6.10 ms, estimated 3.0; its 402 kernels take 5.90 ms: "
        "5.10 ms in 65 of cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161, "
        "0.35 ms in 32 of fmha_cutlassF_f16(Kernel::Params)"
    )


@pytest.mark.parametrize(
    ("device_ms", "shapes"), [(3.2, describe_shapes(PYTHIA)), (6.1, "target 2 x 160, draft 1 x 8")]
)
def test_no_other_pass_is_slow(
    device_ms: float, shapes: str, tmp_path: Path, capsys: Captured
) -> None:
    """Check a pass near its estimate, and models that the estimates are not for."""
    write_facts(tmp_path, device_ms, shapes)
    assert not [line for line in run_report(tmp_path, capsys) if line.startswith("slow")]


def test_a_profile_without_passes(tmp_path: Path, capsys: Captured) -> None:
    """Check the report if the step that times passes was ended before its first result."""
    write_facts(tmp_path, 3.0)
    (tmp_path / "facts.json").unlink()
    assert not [line for line in run_report(tmp_path, capsys) if line.startswith("slow")]


def test_a_table_without_texts(tmp_path: Path, capsys: Captured) -> None:
    """Check the file of a table that was ended before its first text, and one that is no table."""
    head, _ = (ROOT / "results" / "main_cpu.jsonl").read_text().split("\n", 1)
    (tmp_path / "pair.jsonl").write_text(head + "\n")
    (tmp_path / "memory.jsonl").write_text("{}\n")
    lines = run_report(tmp_path, capsys)
    assert any(line.startswith("pair: ") for line in lines)
    assert any(line.startswith("failed: table memory: ") for line in lines)


def test_a_failed_step_is_named(tmp_path: Path, capsys: Captured) -> None:
    step = {"step": "replay", "model": "draft", "dtype": "float16", "rows": 8}
    steps = [step | {"ms": 1.0, "error": "LogitsDiffer: 1 of 9 logits differ"}, step | {"ms": 1.0}]
    (tmp_path / "first_pass.json").write_text(json.dumps(steps))
    lines = run_report(tmp_path, capsys)
    failed = [line for line in lines if line.startswith("failed")]
    error = "LogitsDiffer: 1 of 9 logits differ"
    assert failed == [f"failed: first pass replay draft float16 8: {error}"]


def test_all_results_are_in_one_file(tmp_path: Path, capsys: Captured) -> None:
    write_facts(tmp_path, 3.0)
    (tmp_path / "pair.jsonl").write_bytes((ROOT / "results" / "main_cpu.jsonl").read_bytes())
    lines = run_report(tmp_path, capsys)
    written = json.loads((tmp_path / "gpu_h100_80gb_hbm3.json").read_text())
    assert written == read_results(tmp_path)
    assert len(written["pair"]["rows"]) == len(load(tmp_path / "pair.jsonl").head.cases)
    assert any("dynatree" in line for line in lines) and len(max(lines[:-1], key=len)) <= 80


def test_unusable_folders_are_refused(tmp_path: Path, capsys: Captured) -> None:
    assert gpu_report.main([str(tmp_path)]) == 2
    (tmp_path / "facts.json").write_text("{")
    assert gpu_report.main([str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "has no results" in first and "facts.json is no JSON" in second


def test_estimates_follow_the_speed_of_a_copy(tmp_path: Path, capsys: Captured) -> None:
    """Check a pass of 4 ms on a device that copies 1.5 times as fast, and so should take 2 ms."""
    write_facts(tmp_path, 4.0, copy_gb_s=4500.0)
    (line,) = [line for line in run_report(tmp_path, capsys) if line.startswith("slow")]
    assert "4.00 ms, estimated 2.0;" in line


@pytest.mark.parametrize("profile", [[], PROFILE[:1], [{"error": "no CUPTI"}]])
def test_a_pass_without_a_whole_profile(profile: list[dict]) -> None:
    assert kernels_of(profile, ("target", 512, 32)) == "not profiled"
