"""profile_iteration.py, kernel_times.py and calibrate.py of tools/, on the CPU; and gpu_check.sh
around a program that stands in for Python: what it refuses, and what it leaves."""

import ast
import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import TINY
from torch.autograd import DeviceType

from benchmark.step_times import StepTimes, measure_step_times
from cli.errors import UsageError
from cli.options import parse_settings
from draft_tree import lone
from dynatree import Step
from engine.fused import attend
from engine.passes import ROW_COUNTS
from gpt_neox import GPTNeoX
from methods.sequoia import Sequoia
from tools import calibrate, kernel_times, profile_iteration

ROOT = TINY.parent.parent
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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_profile_that_cannot_be_printed_is_kept(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Minutes of measuring were lost to `| head`."""
    models = ["--target", DRAFT, "--draft", DRAFT, "--methods", "ar", "--iterations", "1"]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert profile_iteration.main([str(tmp_path)] + models) == 2
    assert "standard output cannot be written" in capsys.readouterr().err.splitlines()[-1]
    assert " ms an iteration" in (tmp_path / "ar.txt").read_text()
    assert (tmp_path / "ar.json.gz").exists() and len(list(tmp_path.iterdir())) == 2


def test_a_profile_made_meanwhile_stays(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def export(self: object, file: str) -> None:
        (tmp_path / "ar.json.gz").write_text("another's")

    monkeypatch.setattr(profile_iteration.profile, "export_chrome_trace", export)
    models = ["--target", DRAFT, "--draft", DRAFT, "--methods", "ar", "--iterations", "1"]
    assert profile_iteration.main([str(tmp_path)] + models) == 2
    assert "ar.json.gz exists already" in capsys.readouterr().err.splitlines()[-1]
    (file,) = tmp_path.iterdir()
    assert file.read_text() == "another's"


@pytest.mark.parametrize(
    ("tool", "step"),
    [(kernel_times, "copy_bandwidth"), (calibrate, "open_pair"), (profile_iteration, "open_pair")],
)
def test_memory_that_a_limit_refuses_is_one_line(
    tool: ModuleType, step: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of ulimit -v: it was the allocator's RuntimeError, which nobody foresaw."""

    def refuse(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to\nallocate 9")

    monkeypatch.setattr(tool, step, refuse)
    arguments = {kernel_times: [DRAFT], profile_iteration: [str(tmp_path)]}
    assert tool.main(arguments.get(tool, [])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: there is no memory for ")


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
    q = torch.randn(2, n, 16)
    kv = torch.randn(2, 2, 40, 16)
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
        Step([1, 2], tree, path=[0, 1]),
        Step([1, 2], tree, path=[0, 3]),
        Step([1], tree, path=[0]),
        Step([1], tree, path=[0, 3]),
        Step([1], lone(4), path=[0]),
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
        (["--prompts", "none.txt"], "none.txt is not there"),
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


def test_prompts_are_read_before_models_are_loaded(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have to be fetched first."""
    monkeypatch.setattr(calibrate, "open_pair", lambda *_: pytest.fail("for nothing"))
    assert calibrate.main(["--prompts", "none.txt"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: --prompts: none.txt is not there"


def first_lines(file: Path) -> list[str]:
    """What a command line imports before Ctrl-C is quiet."""
    found = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and "guard_imports()" in ast.unparse(node):
            return found + [ast.unparse(node.body[0])]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(ast.unparse(node))
    raise AssertionError(f"{file} never is")


QUICK = {"import os", "import sys", "from pathlib import Path"}
QUICK |= {"from cli.start import guard_imports"}


def test_ctrl_c_is_quiet_before_anything_slow_is_imported() -> None:
    """It was a traceback in the second that torch takes."""
    checked = []
    for file in sorted(ROOT.rglob("*.py")):
        lines = file.read_text(encoding="utf-8").splitlines()
        if "tests" not in file.parts and lines[-1:] == ["    sys.exit(main())"]:
            assert set(first_lines(file)) <= QUICK, file
            checked.append(file.stem)
    assert {"bench", "plot", "enlarge", "calibrate", "kernel_times"} <= set(checked)


# gpu_check.sh


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, earlier results and something of the user's; programs/ has a
    `python` that does what the file `does` beside it says, and logs how it is called."""
    for name in ("tools", "results", "models/grown", "programs"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "gpu_check.sh", tmp_path / "tools")
    (tmp_path / "models" / "grown" / "mine").write_text("mine")
    (tmp_path / "results" / "gpu_some_h100.json").write_text("earlier")
    (tmp_path / "results" / "gpu_some_h100_2.json").symlink_to("nowhere")
    python = tmp_path / "programs" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path


STAND_IN = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$*" >>"$here/log"
case "$*" in
  *enlarge.py*) for folder in "$@"; do case $folder in */pair/*) mkdir -p "$folder" ;; esac; done ;;
  *every.json*--columns*) echo "the table" ;;
  *--output*/every.json*) echo measured >"${@: -1}" ;;
esac
source "$here/does"
"""
CHOICE = 'case $1 in -c) echo "a warning" >&2; echo "cuda some_h100 ar,dynatree float16" ;; esac\n'
NO_GPU = 'echo "cpu some_cpu ar,dynatree float32"\n'
NO_TORCH = "echo \"Traceback\nModuleNotFoundError: No module named 'torch'\" >&2; exit 1\n"


def start(checkout: Path, does: str, *arguments: str) -> subprocess.Popen:
    """The script in a process group of its own, from a folder that is not the checkout's."""
    (checkout / "programs" / "does").write_text(does)
    path = f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [shutil.which("bash"), "../tools/gpu_check.sh", *arguments],
        cwd=checkout / "models",
        env=os.environ | {"PATH": path if does else str(checkout / "nothing")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def measured(checkout: Path) -> Path:
    """The folder of the only run."""
    (found,) = checkout.glob("results/run_gpu_some_h100_*")
    return found


def require_untouched(checkout: Path) -> None:
    assert (checkout / "models" / "grown" / "mine").read_text() == "mine"
    assert (checkout / "results" / "gpu_some_h100.json").read_text() == "earlier"
    assert os.readlink(checkout / "results" / "gpu_some_h100_2.json") == "nowhere"


@pytest.mark.parametrize(
    ("does", "arguments", "message"),
    [
        (NO_GPU, [], "torch sees no GPU"),
        (NO_TORCH, [], "No module named 'torch'"),
        (NO_TORCH, ["--dry"], "pip install -r requirements.txt"),
        ("", ["--dry"], "there is no python"),
        (CHOICE, ["grown", "grown"], "grown is no checkpoint folder"),
        (CHOICE, ["one"], "two folders"),
        (CHOICE, ["--dry", "--dry"], "twice"),
        (CHOICE, ["--dyr"], "--dyr"),
    ],
)
def test_gpu_check_refuses_in_one_line(
    does: str, arguments: list[str], message: str, checkout: Path
) -> None:
    out, err = start(checkout, does, *arguments).communicate()
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line and not out
    assert not list(checkout.glob("results/run_*"))
    require_untouched(checkout)


def test_gpu_check_helps_and_does_nothing_else(checkout: Path) -> None:
    process = start(checkout, CHOICE, "--help")
    out, err = process.communicate()
    assert process.returncode == 0 and out.startswith("usage: ") and not err
    assert not (checkout / "programs" / "log").exists()
    assert not list(checkout.glob("results/run_*"))


def test_gpu_check_leaves_earlier_results_and_a_third(checkout: Path) -> None:
    """The results of the last run on this device were overwritten."""
    process = start(checkout, CHOICE)
    out, err = process.communicate()
    assert process.returncode == 0 and not err
    assert (checkout / "results" / "gpu_some_h100_3.json").read_text() == "measured\n"
    assert "results/gpu_some_h100_3.json" in out and "the table" in out
    assert {file.name for file in measured(checkout).iterdir()} >= {"log.txt", "every.json"}
    assert not (measured(checkout) / "pair").exists()
    require_untouched(checkout)


def test_gpu_check_takes_folders_from_where_one_stands(checkout: Path) -> None:
    for name in ("a b", "c"):
        (checkout / "models" / name).mkdir()
        (checkout / "models" / name / "config.json").write_text("{}")
    process = start(checkout, CHOICE, "a b", "../models/c")
    process.communicate()
    assert process.returncode == 0
    log = (checkout / "programs" / "log").read_text()
    models = checkout / "models"
    assert f"--target {models}/a b --draft {models}/c" in log.replace("/models/../", "/")
    assert "enlarge" not in log


@pytest.mark.parametrize("failing", ["cp", "bench"])
def test_gpu_check_keeps_what_it_measured_whatever_fails(failing: str, checkout: Path) -> None:
    """And the pair that it was measured with, as bench.py says how to go on with it."""
    does = CHOICE
    if failing == "bench":
        does += 'case "$*" in *--output*) exit 2 ;; esac\n'
    else:
        (checkout / "programs" / "cp").write_text("#!/bin/sh\nexit 1\n")
        (checkout / "programs" / "cp").chmod(0o755)
    process = start(checkout, does)
    out, err = process.communicate()
    assert process.returncode == 1 and "FAILED" in out and "have failed" in out
    assert (measured(checkout) / "every.json").read_text() == "measured\n"
    assert (measured(checkout) / "pair" / "target").is_dir() and "/pair" in err
    assert (checkout / "results" / "gpu_some_h100_3.json").exists() == (failing == "bench")
    require_untouched(checkout)


@pytest.mark.parametrize(("at", "status"), [("--output*/every.json", 130), ("-m?pytest", 2)])
def test_gpu_check_stops_at_ctrl_c_and_keeps_what_it_measured(
    at: str, status: int, checkout: Path
) -> None:
    """As a terminal sends it, to all. It went on to the next step if pytest was stopped."""
    process = start_waiting(checkout, at, f"trap 'kill $!; exit {status}' INT")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    if status == 130:
        assert (measured(checkout) / "every.json").read_text() == "measured\n"
        assert (measured(checkout) / "pair" / "draft").is_dir() and "rm -r" in err
    else:
        assert "bench.py" not in (checkout / "programs" / "log").read_text()
    assert str(measured(checkout)) in err
    require_untouched(checkout)


def start_waiting(checkout: Path, at: str, first: str, *arguments: str) -> subprocess.Popen:
    """The script, once a command like this runs, which does something first and then waits."""
    waiting = f"{first}; sleep 20 & echo $$ >{checkout}/there; wait"
    process = start(checkout, CHOICE + f'case "$*" in *{at}*) {waiting} ;; esac\n', *arguments)
    while not (checkout / "there").exists():
        assert process.poll() is None
        time.sleep(0.01)
    return process


def require_ended(process: int) -> None:
    """It is there until the system has seen that it ended, which it may be busy for."""
    for _ in range(500):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} goes on")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("arguments", [[], ["--dry"]])
def test_gpu_check_ends_with_all_that_it_runs(
    number: int, arguments: list[str], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed alone, it went on for minutes behind the prompt, in a folder that was gone."""
    monkeypatch.setenv("TMPDIR", str(checkout / "models"))
    process = start_waiting(checkout, "--output*/every.json", ":", *arguments)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)  # nothing is left that could write
    assert process.returncode == 128 + number
    require_ended(int((checkout / "there").read_text()))
    if arguments:
        assert "leaves nothing" in err and not list(checkout.glob("models/tmp*"))
    else:
        assert (measured(checkout) / "every.json").read_text() == "measured\n" and "rm -r" in err
    assert not list(checkout.glob("results/gpu_some_h100_3.json"))
    require_untouched(checkout)


def test_gpu_check_publishes_a_table_whole_or_not_at_all(checkout: Path) -> None:
    """Killed while it copied, it left half of one under its final name."""
    copy = checkout / "programs" / "cp"
    copy.write_text('#!/bin/sh\nhead -c 4 <"$1" >"$2"\nkill -9 $PPID\n')
    copy.chmod(0o755)
    process = start(checkout, CHOICE)
    process.communicate(timeout=10)
    assert process.returncode != 0
    assert not (checkout / "results" / "gpu_some_h100_3.json").exists()
    assert (measured(checkout) / "every.json").read_text() == "measured\n"
    require_untouched(checkout)
