"""Tests that tools/gpu_check.sh keeps its time limit, and that a failing or hanging step neither
stops the other steps nor loses their results.

The steps are run by a stand-in for Python. The real steps are run by the dry run: all of them in
tests/pretend_cuda, and in CI those that need no GPU.
"""

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, TINY

STEPS = ["tests marked cuda", "the target, enlarged", "the draft, enlarged", "table pair"]
STEPS += ["table strict", "facts", "table eager", "table main", "table memory"]
PYTHON = """#!/usr/bin/env bash
[[ $1 != -c && ${2-} != --version ]] || { echo True && exit; }
for word; do
  [[ ${before-} != --output ]] || echo '{}' >"$word"
  before=$word
done
[[ "$*" != *facts.py* ]] || exit 3
[[ "$*" != *$HANGING* ]] || exec sleep 600
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
    monkeypatch.setenv("HANGING", "what no command has in it")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "torch sees no GPU"),
        ("--dry tests", "tests is no checkpoint folder"),
        (f"--dry {TINY}/draft", "two folders"),
        ("--dry --seconds 0", "--seconds '0'"),
        ("--dry --keep README.md", "--keep 'README.md'"),
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


@pytest.mark.parametrize("lacking", ["pytest", "tqdm"])
def test_a_missing_package_is_named(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = f'raise ModuleNotFoundError("no {lacking}", name="{lacking}")'
    (tmp_path / f"{lacking}.py").write_text(error)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start(ROOT, "--dry")
    _, line = process.communicate()
    assert process.returncode == 2 and line.startswith("error: ") and f"no {lacking}" in line


def run(project: Path, *words: str) -> tuple[list[str], list[str]]:
    """Run the script with the stand-in, and return the steps that were run and the errors."""
    process = start(project, *words, python="./python")
    lines = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 1
    steps = [line[3:].partition(" (")[0] for line in lines if line.startswith("== ")]
    return steps, [line for line in lines if line.startswith("error: ")]


def test_no_step_can_stop_another(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGING", "pytest")
    steps, errors = run(project, "--seconds", "4")
    assert steps == STEPS
    assert errors == ["error: tests marked cuda: ended after 2 s", "error: facts: failed"]
    (folder,) = (project / "results").glob("run_gpu_*")
    tables = {f"{table}.jsonl" for table in ("pair", "strict", "eager", "main", "memory")}
    assert {file.name for file in folder.iterdir()} == tables | {"facts.json", "log.txt"}
    assert (folder / "log.txt").read_text().endswith("error: facts: failed\n")
    assert not list((project / "models").iterdir()), "the enlarged pair, 6 GB, was not deleted"


def test_steps_without_time_left_are_skipped(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGING", "")
    steps, errors = run(project, "--dry", "--seconds", "3")
    assert 1 < len(steps) < len(STEPS)
    assert errors[-1] == "error: table memory: skipped, there was no time left"


def test_ctrl_c_keeps_what_was_measured(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that no process goes on: it would keep the output open, so communicate would time
    out."""
    monkeypatch.setenv("HANGING", "eager.jsonl")
    process = start(project, "--dry", "--keep", "kept", python="./python")
    while "== table eager" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    names = {file.name for file in (project / "kept").iterdir()}
    assert names >= {"pair.jsonl", "facts.json", "log.txt"}
