"""profile_iteration.py, kernel_times.py and calibrate.py of tools/, on the CPU."""

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from torch.autograd import DeviceType

from benchmark.step_times import StepTimes, measure_step_times
from cli.errors import UsageError
from cli.options import parse_settings
from draft_tree import lone
from dynatree import Step
from engine.cuda_graphs import ROW_COUNTS
from gpt_neox import GPTNeoX, attend
from methods.sequoia import Sequoia
from tools import calibrate, kernel_times, profile_iteration

DRAFT = str(TINY / "draft")
Captured = pytest.CaptureFixture[str]


def test_a_profile_is_a_table_and_a_trace_for_each_method(capsys: Captured, tmp_path: Path) -> None:
    models = ["--target", str(TINY / "target"), "--draft", DRAFT]
    arguments = [str(tmp_path / "made"), "--methods", "ar,linear K=2", "--iterations", "2"]
    assert profile_iteration.main(arguments + models) == 0
    printed = capsys.readouterr().out
    for name in ("ar", "linear_K=2"):
        text = (tmp_path / "made" / f"{name}.txt").read_text()
        assert text in printed and " ms an iteration, the profiler off" in text
        assert "  on the host\n" in text and "aten::" in text
        trace = gzip.decompress((tmp_path / "made" / f"{name}.json.gz").read_bytes())
        assert json.loads(trace)["traceEvents"]


def event(key: str, count: int, device_us: float, cpu_us: float, on_device: bool) -> object:
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    times = {"self_device_time_total": device_us, "self_cpu_time_total": cpu_us}
    return SimpleNamespace(key=key, count=count, device_type=kind, **times)


def test_a_profile_tells_kernels_from_what_the_host_asks_and_computes() -> None:
    """By hand: two iterations; an operator's kernels are counted where they run, not twice."""
    events = [
        event("small kernel", 2, 3.0, 0.0, True),
        event("large kernel" + "x" * 200, 4, 100.0, 0.0, True),
        event("cudaGraphLaunch", 6, 0.0, 50.0, False),
        event("aten::addmm", 4, 100.0, 7.0, False),
    ]
    kernels, asked, computed = profile_iteration.describe(events, 2).split("\n\n")
    long_name = ("large kernel" + "x" * 200)[: profile_iteration.WIDTH]
    assert kernels.splitlines() == [
        "   times         us  on the device",
        f"     2.0       50.0  {long_name}",
        "     1.0        1.5  small kernel",
        "     3.0       51.5  all 2",
    ]
    assert asked.splitlines()[1:] == [
        "     3.0       25.0  cudaGraphLaunch",
        "     3.0       25.0  all 1",
    ]
    assert computed.splitlines()[1] == "     2.0        3.5  aten::addmm"


def test_a_text_too_short_to_profile_is_one_line(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile_iteration, "N_TOKENS", 9)
    models = ["--target", DRAFT, "--draft", DRAFT, "--methods", "ar"]
    assert profile_iteration.main([str(tmp_path / "made")] + models) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "error: 9 tokens are too few for so many --iterations"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--iterations", "0"], "--iterations 0"),
        (["--iterations", "-3"], "--iterations -3"),
        (["--methods", "ar,linear K=2,linear  K=2"], "twice"),
        (["--methods", "hf-ar"], "hf-ar has no iterations"),
        (["--methods", "dynatree,ar"], "ar.txt exists already"),
        (["--methods", "auto"], "auto.json.gz exists already"),
    ],
)
def test_a_profile_that_cannot_be_made(
    options: list[str], message: str, capsys: Captured, tmp_path: Path
) -> None:
    """It once wrote over an earlier one, and ended in a ZeroDivisionError or a KeyError."""
    (tmp_path / "ar.txt").write_text("earlier")
    (tmp_path / "auto.json.gz").symlink_to("nowhere")
    assert profile_iteration.main([str(tmp_path)] + options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert (tmp_path / "ar.txt").read_text() == "earlier" and len(list(tmp_path.iterdir())) == 2


def test_a_profile_that_cannot_be_written_was_printed(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def export(self: object, file: str) -> None:
        Path(file).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile_iteration.profile, "export_chrome_trace", export)
    models = ["--target", DRAFT, "--draft", DRAFT, "--methods", "ar", "--iterations", "1"]
    assert profile_iteration.main([str(tmp_path)] + models) == 2
    printed = capsys.readouterr()
    assert " ms an iteration" in printed.out and not list(tmp_path.iterdir())
    assert printed.err.splitlines()[-1].endswith("cannot be written: No space left on device")


@pytest.mark.parametrize("options", [["--copies", "0"], ["--copies", "-1"], []])
def test_kernel_times_that_cannot_be_measured(
    options: list[str], capsys: Captured, tmp_path: Path
) -> None:
    """The last for a config of a size that nothing holds: it was the allocator's RuntimeError."""
    config = json.loads((TINY / "draft" / "config.json").read_text())
    config["vocab_size"] = 10**12
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kernel_times.main([str(tmp_path), "--device", "cpu"] + options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert (" ".join(options) or "128,000,000,000,000 elements") in line


def test_kernel_times_have_a_line_for_every_shape(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_times, "SLOTS", (40, 64))
    monkeypatch.setattr(kernel_times, "ROW_COUNTS", (1, 2))
    assert kernel_times.main([DRAFT, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shapes = [line.split()[:2] for line in lines[3:9]]
    assert shapes == [
        ["40", "1"],
        ["40", "8"],
        ["40", "32"],
        ["64", "1"],
        ["64", "8"],
        ["64", "32"],
    ]
    assert "into 896 x 128 us" in lines[10] and "out of 128 x 640 us" in lines[10]
    assert [line.split()[0] for line in lines[11:13]] == ["1", "2"]


@pytest.mark.parametrize("n", [1, 8, 32])
def test_both_ways_of_attention_are_right(n: int) -> None:
    """And the error that is printed beside them would show it if they were not."""
    torch.manual_seed(n)
    q = torch.randn(1, 2, n, 16)
    kv = torch.randn(2, 1, 2, 40, 16)
    seen = torch.ones(n, 40, dtype=torch.bool).tril(40 - n)
    bias = torch.full((n, 40), -torch.inf).masked_fill_(seen, 0.0)
    for way in (attend, kernel_times.two_products):
        assert kernel_times.largest_error(way, q, kv, bias) < 1e-5
    wrong = torch.zeros(n, 40)
    wrong[:, 0] = -torch.inf
    at_odds = kernel_times.two_products(q, kv[0], kv[1], wrong)
    assert kernel_times.largest_error(lambda *_: at_odds, q, kv, bias) > 1e-3


def times_of(target_ms: list[float], draft_ms: list[float]) -> StepTimes:
    """Of passes of 1, 8 and 128 rows."""
    return StepTimes(200, [1, 8, 128], target_ms, draft_ms, 1, 1, 1.0)


def test_ranks_are_counted_by_the_row_that_was_accepted() -> None:
    """A step without a level, prefill's or the last one's, says nothing."""
    tree = SimpleNamespace(depth=1)
    steps = [
        Step([5]),
        Step([1, 2], tree, path=(0, 1)),
        Step([1, 2], tree, path=(0, 3)),
        Step([1], tree, path=(0,)),
        Step([1], tree, path=(0, 3)),
        Step([1], lone(torch.tensor([4])), path=(0,)),
    ]
    counts = calibrate.count_ranks(steps)
    assert counts == {0: 1, 2: 2, calibrate.N_RANKS: 1}
    assert calibrate.chances_of(counts) == (0.25, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(UsageError, match="not finite"):
        calibrate.chances_of(Counter())


def test_draft_passes_are_the_levels_with_children() -> None:
    shape = [[1, 2, 3], [4, 5], [6], [], [], [7], [], []]
    assert calibrate.draft_passes(shape, int) == {1: 2, 2: 1}
    assert calibrate.draft_passes(shape, lambda n: 4) == {4: 3}
    assert calibrate.draft_passes([[]], int) == {}


def test_the_tree_that_promises_most_tokens_for_its_time() -> None:
    """Free rows and levels: the largest. Dear rows: a chain. A dear draft: ar."""
    chances = (0.5, 0.2)
    best, alone = calibrate.choose_tree(chances, times_of([10.0] * 3, [0.0] * 3))
    assert (best.n_rows, alone.tokens, alone.ms) == (128, 1.0, 10.0)
    best, _ = calibrate.choose_tree(chances, times_of([10.0, 17.0, 137.0], [0.1] * 3))
    assert (best.n_rows, best.depth) == (4, 2)  # 1.95 tokens in 13.2 ms; one row more: 2.075, 14.3
    best, alone = calibrate.choose_tree(chances, times_of([10.0] * 3, [9.0] * 3))
    assert best == alone


def test_a_calibration_ends_with_the_settings_to_use(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = []

    def measure_once(target: GPTNeoX, draft: GPTNeoX, context: int) -> StepTimes:
        contexts.append(context)
        return measure_step_times(target, draft, context, n_rounds=1)

    monkeypatch.setattr(calibrate, "measure_step_times", measure_once)
    monkeypatch.setattr(calibrate, "MAX_DEPTH", 4)
    short = ["--n-prompts", "2", "--prompt-tokens", "30", "--new-tokens", "20"]
    models = ["--target", str(TINY / "target"), "--draft", DRAFT]
    assert calibrate.main(short + models + ["--temperature", "0.6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert contexts == [40] and lines[2].split() == ["rows", *[str(n) for n in ROW_COUNTS]]
    settings = parse_settings(Sequoia, lines[-1].split("--set ")[1:])
    assert lines[0].startswith("chances of ") and lines[0].endswith(f" trees: {settings.p}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new-tokens", "2"], "--new-tokens 3"),
        (["--n-prompts", "0"], "--n-prompts and --prompt-tokens are at least 1"),
        (["--prompts", "none.txt"], "none.txt cannot be read"),
        (["--seed", "1"], "--seed needs a --temperature"),
    ],
)
def test_a_calibration_that_cannot_be_made(
    arguments: list[str], message: str, capsys: Captured
) -> None:
    models = ["--target", str(TINY / "target"), "--draft", DRAFT]
    assert calibrate.main(models + arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and message in last
