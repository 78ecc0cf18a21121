"""Tests that tools/gpu_check.sh keeps its time limit, and that a failing or hanging step neither
stops the other steps nor loses their results.

The steps are run by a stand-in for Python. tests/pretend_cuda/test_gpu_tools.py runs them for real.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, TINY

WORKSPACE = "products with a workspace of 32 MiB"
STEPS = ["versions", "first pass", "facts", "profile", WORKSPACE, "tests of strict passes"]
STEPS += ["tests of attention", "tests of graphs", "the target, enlarged", "the draft, enlarged"]
STEPS += ["table pair", "table main", "table memory", "report"]
PYTHON = """#!/usr/bin/env bash
[[ $1 != -c ]] || exit 0
echo "ran $* ${CUDA_LAUNCH_BLOCKING+blocking}"
for word; do
  [[ ${before-} != --output ]] || echo '{}' >"$word"
  before=$word
done
if [[ "$*" == *$FAILING* ]]; then
  echo "tests/test_cuda.py::test_x[1] $RESULT"
  exit 3
fi
[[ "$*" != *$HANGING* || ${2-} == --version ]] || exec sleep 600
"""


def start(folder: Path, *words: str, python: str = sys.executable) -> subprocess.Popen:
    command = ["bash", "tools/gpu_check.sh", *words]
    own = os.environ | {"PYTHON": python}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"cwd": folder, "env": own, "start_new_session": True} | pipes
    # The script must react to Ctrl-C even if this process ignores it
    reset_sigint = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, preexec_fn=reset_sigint, **how)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project folder that has only the script and the stand-in for Python."""
    for room in ("tools", "results", "models"):
        (tmp_path / room).mkdir()
    shutil.copy(ROOT / "tools" / "gpu_check.sh", tmp_path / "tools")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("HANGING", "FAILING"):
        monkeypatch.setenv(name, "what no command has in it")
    monkeypatch.setenv("RESULT", "FAILED [50%]")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dry tests", "tests is no checkpoint folder"),
        (f"--dry {TINY}/draft", "two folders"),
        ("--dry --seconds 0", "--seconds '0'"),
        ("--dyr", "--dyr"),
    ],
)
def test_refused_in_one_line(words: str, message: str) -> None:
    places = [ROOT / "results", ROOT / "models"]
    before = [set(place.iterdir()) for place in places]
    process = start(ROOT, *words.split())
    out, line = process.communicate()
    assert process.returncode == 2 and not out and line.count("\n") == 1
    assert line.startswith("error: ") and message in line
    assert before == [set(place.iterdir()) for place in places]


def test_a_dry_run_needs_a_gpu_or_a_torch_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = "class version:\n cuda = '13.0'\nclass cuda:\n is_available = lambda: False\n"
    (tmp_path / "torch.py").write_text(fake)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start(ROOT, "--dry")
    out, line = process.communicate()
    assert process.returncode == 2 and not out and line.count("\n") == 1
    assert line.startswith("error: --dry: this torch is built for a GPU")


def test_without_a_gpu_the_versions_say_why() -> None:
    process = start(ROOT)
    out, error = process.communicate()
    assert process.returncode == 2 and not out
    *versions, line = error.splitlines()
    assert line == "error: torch sees no GPU: docs/cuda.md, Installing"
    assert any(each.startswith("torch ") for each in versions)


@pytest.mark.parametrize(
    ("keep", "message"),
    [("python", "is no folder that can be made"), ("tools", "is not empty; use a new folder")],
)
def test_results_need_a_new_folder(keep: str, message: str, project: Path) -> None:
    process = start(project, "--keep", keep, python="./python")
    out, line = process.communicate()
    assert process.returncode == 2 and not out and line == f"error: --keep '{keep}' {message}\n"
    assert not list((project / "models").iterdir())


def run(project: Path, *words: str, status: int = 1) -> list[str]:
    """Run the script with the stand-in, and return the lines that it prints."""
    process = start(project, *words, python="./python")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == status
    return out.splitlines()


def steps_of(lines: list[str]) -> list[str]:
    return [line[3:].partition(" (")[0] for line in lines if line.startswith("== ")]


def errors_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("error: ")]


def test_a_missing_package_is_found_after_the_versions(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING", "bench.py --version")
    assert steps_of(run(project, status=2)) == ["versions"]


def test_no_step_can_stop_another(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGING", "pytest")
    monkeypatch.setenv("FAILING", "facts.py")
    lines = run(project, "--seconds", "20")
    errors = errors_of(lines)
    assert steps_of(lines) == STEPS
    failed = ["facts", "profile", WORKSPACE, *STEPS[5:8]]
    assert [line.split(": ")[1] for line in errors] == failed
    assert [line for line in errors if "ended after" in line] == errors[3:6]
    (folder,) = (project / "results").glob("run_gpu_*/")
    tables = {f"{table}.jsonl" for table in ("pair", "main", "memory")}
    logs = {f"tests_{name}.txt" for name in ("strict_passes", "attention", "graphs")}
    facts = {f"{name}.json" for name in ("first_pass", "facts", "profile", "workspace")}
    found = {file.name for file in folder.iterdir()}
    assert found == tables | logs | facts | {"log.txt"}
    assert (folder / "log.txt").read_text().endswith(f"{errors[-1]}\n")
    with tarfile.open(f"{folder}.tar.gz") as archive:
        assert {Path(name).name for name in archive.getnames()} >= found
        log = archive.extractfile("./log.txt").read().decode()
    assert log.endswith(f"{errors[-1]}\n")
    assert not list((project / "models").iterdir()), "the enlarged pair, 6 GB, was not deleted"


@pytest.mark.parametrize("result", ["FAILED [50%]", ""], ids=["failed", "crashed"])
def test_a_failed_test_runs_again_alone(
    result: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the first failed test of each group runs again, with each launch waiting. After a
    crash it has a name and no result."""
    monkeypatch.setenv("FAILING", "-k attention")
    monkeypatch.setenv("RESULT", result)
    again = [line for line in run(project) if line.endswith(" blocking")]
    assert len(again) == 1 and again[0].endswith(" tests/test_cuda.py::test_x[1] blocking")


def test_the_tiny_pair_is_used_if_enlarging_fails(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING", "enlarge.py")
    tables = [line for line in run(project) if line.startswith("ran bench.py --target")]
    pair = "--target models/tiny/target --draft models/tiny/draft"
    assert len(tables) == 3 and all(pair in line for line in tables)


def test_steps_without_time_left_are_skipped(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the report comes all the same."""
    monkeypatch.setenv("HANGING", " tests/test_cuda.py")
    lines = run(project, "--dry", "--seconds", "3")
    steps = steps_of(lines)
    assert steps[-1] == "report" and len(steps) < len(STEPS)
    assert errors_of(lines)[-1] == "error: table memory: skipped, there was no time left"


def test_ctrl_c_keeps_what_was_measured(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that no process goes on: it would keep the output open, so communicate would time
    out. The signal comes when the process of a step has begun, because one that begins later does
    not get it."""
    monkeypatch.setenv("HANGING", "main.jsonl")
    process = start(project, "--dry", "--keep", "kept", python="./python")
    while not re.match("ran bench.py .*main.jsonl", process.stdout.readline()):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    names = {file.name for file in (project / "kept").iterdir()}
    assert names >= {"pair.jsonl", "facts.json", "log.txt"}
