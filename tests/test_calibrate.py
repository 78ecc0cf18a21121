"""profile_iteration.py and calibrate.py of tools/, on the CPU; and gpu_check.sh around a program
that stands in for Python: what it refuses, and what it leaves."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, Captured, error_line

from benchmark.step_times import StepTimes
from cli.errors import UsageError
from cli.options import parse_settings
from draft_tree import lone
from dynatree import Step
from methods.sequoia import Sequoia
from tools import calibrate, profile_iteration

DRAFT = str(TINY / "draft")
PAIR = ["--target", str(TINY / "target"), "--draft", DRAFT]


def test_a_profile_is_a_table_and_a_trace(capsys: Captured, tmp_path: Path) -> None:
    """It stays where it cannot be printed, too: minutes of measuring were lost to `| head`."""
    folder = tmp_path / "made"
    options = ["--method", "linear", "--set", "K=2", "--iterations", "2", *PAIR]
    assert profile_iteration.main([str(folder), *options]) == 0
    table = (folder / "table.txt").read_text()
    assert table == capsys.readouterr().out and "linear: " in table and "aten::" in table
    assert json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["FOLDER/new", "--iterations", "0"], "--iterations 0"),
        (["FOLDER/new", "--method", "hf-ar"], "unknown method 'hf-ar'"),
        (["FOLDER/new", "--set", "K=2"], "no 'K'"),
        (["FOLDER/new", "--method", "ar", "--iterations", "300"], "too few for so many"),
        (["FOLDER/earlier"], "earlier exists already"),
        (["FOLDER/file/new", "--iterations", "1"], "cannot be written"),
    ],
)
def test_a_profile_that_cannot_be_made(
    options: list[str], message: str, capsys: Captured, tmp_path: Path
) -> None:
    (tmp_path / "earlier").mkdir()
    (tmp_path / "file").write_text("mine")
    words = [word.replace("FOLDER", str(tmp_path)) for word in options]
    options = words + ["--target", DRAFT, "--draft", DRAFT]
    assert message in error_line(capsys, profile_iteration.main, options)
    assert {file.name for file in tmp_path.iterdir()} == {"earlier", "file"}


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
    monkeypatch.setattr(calibrate, "MAX_DEPTH", 4)
    short = ["--n-prompts", "2", "--prompt-tokens", "30", "--new-tokens", "20"]
    assert calibrate.main(short + PAIR + ["--temperature", "0.6"]) == 0
    lines = capsys.readouterr().out.splitlines()
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
    assert message in error_line(capsys, calibrate.main, PAIR + arguments)


# gpu_check.sh


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A folder with the script, earlier results and something of the user's; programs/ has a
    `python` that does what the file `does` beside it says, and logs how it is called.

    Ctrl-C reaches what the test starts even where the suite runs in the background, which ignores
    it and would pass that on.
    """
    for name in ("tools", "results", "models/grown", "programs"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "gpu_check.sh", tmp_path / "tools")
    (tmp_path / "models" / "grown" / "mine").write_text("mine")
    (tmp_path / "results" / "gpu_some_h100.json").write_text("earlier")
    (tmp_path / "results" / "gpu_some_h100_2.json").symlink_to("nowhere")
    python = tmp_path / "programs" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    signal.signal(signal.SIGINT, before)


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


def start_waiting(checkout: Path, at: str, first: str, *arguments: str) -> subprocess.Popen:
    """The script, once a command like this runs, which does something first and then waits."""
    waiting = f"{first}; sleep 300 & echo $$ >{checkout}/there; wait"
    process = start(checkout, CHOICE + f'case "$*" in *{at}*) {waiting} ;; esac\n', *arguments)
    while not (checkout / "there").exists():
        assert process.poll() is None
        time.sleep(0.01)
    return process


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
    log = (checkout / "programs" / "log").read_text().replace("/models/../", "/")
    assert f"--target {checkout}/models/a b --draft {checkout}/models/c" in log
    assert "enlarge" not in log


FAILING_COPY = "#!/bin/sh\nexit 1\n"
KILLED_COPY = '#!/bin/sh\nhead -c 4 <"$1" >"$2"\nkill -9 $PPID\n'


@pytest.mark.parametrize("copy", [FAILING_COPY, KILLED_COPY, ""], ids=["copy", "killed", "bench"])
def test_gpu_check_keeps_what_it_measured_whatever_fails(copy: str, checkout: Path) -> None:
    """And the pair that it was measured with, as bench.py says how to go on with it. A table has
    its final name once it is whole."""
    does = CHOICE
    if copy:
        (checkout / "programs" / "cp").write_text(copy)
        (checkout / "programs" / "cp").chmod(0o755)
    else:
        does += 'case "$*" in *--output*) exit 2 ;; esac\n'
    process = start(checkout, does)
    out, err = process.communicate(timeout=120)
    assert process.returncode == (128 + signal.SIGKILL if copy == KILLED_COPY else 1)
    if process.returncode == 1:
        assert "FAILED" in out and "have failed" in out and "/pair" in err
    assert (measured(checkout) / "every.json").read_text() == "measured\n"
    assert (measured(checkout) / "pair" / "target").is_dir()
    assert (checkout / "results" / "gpu_some_h100_3.json").exists() == (not copy)
    require_untouched(checkout)


@pytest.mark.parametrize(("at", "status"), [("--output*/every.json", 130), ("-m?pytest", 2)])
def test_gpu_check_stops_at_ctrl_c_and_keeps_what_it_measured(
    at: str, status: int, checkout: Path
) -> None:
    """As a terminal sends it, to all. It went on to the next step if pytest was stopped."""
    process = start_waiting(checkout, at, f"trap 'kill $!; exit {status}' INT")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    if status == 130:
        assert (measured(checkout) / "every.json").read_text() == "measured\n"
        assert (measured(checkout) / "pair" / "draft").is_dir() and "rm -r" in err
    else:
        assert "bench.py" not in (checkout / "programs" / "log").read_text()
    assert str(measured(checkout)) in err
    require_untouched(checkout)


@pytest.mark.parametrize(
    ("number", "arguments"), [(signal.SIGTERM, []), (signal.SIGHUP, ["--dry"])]
)
def test_gpu_check_ends_with_all_that_it_runs(
    number: int, arguments: list[str], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed alone, it went on for minutes behind the prompt, in a folder that was gone."""
    monkeypatch.setenv("TMPDIR", str(checkout / "models"))
    process = start_waiting(checkout, "--output*/every.json", ":", *arguments)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)  # nothing is left that could write
    assert process.returncode == 128 + number
    if arguments:
        assert "leaves nothing" in err and not list(checkout.glob("models/tmp*"))
    else:
        assert (measured(checkout) / "every.json").read_text() == "measured\n" and "rm -r" in err
    assert not list(checkout.glob("results/gpu_some_h100_3.json"))
    require_untouched(checkout)
