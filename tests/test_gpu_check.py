"""Claim: tools/gpu_check.sh keeps to its seconds, and whatever a step does the others are taken and
what was measured stays.

Here a stand-in for Python takes the steps. That the true ones run is shown by the dry run, which CI
does without a GPU, and tests/pretend_cuda on a pretended one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY

SCRIPT = ROOT / "tools" / "gpu_check.sh"
STEPS = ["tests marked cuda", "the target, enlarged", "the draft, enlarged", "table pair"]
STEPS += ["facts", "table strict", "table eager", "table main", "table memory"]
EVERY_STEP, NO_STEP = "", "what no command has in it"
PYTHON = """#!/usr/bin/env bash
case $1 in
  -c) exit ;;
  -) echo h100_80gb && exit ;;
esac
for word; do
  [[ ${before-} != --output ]] || echo '{}' >"$word"
  before=$word
done
[[ "$*" != *$FAILING* ]] || exit 3
[[ "$*" != *$HANGING* ]] || exec sleep 600
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """One that has no more than the script, and the stand-in."""
    for room in ("tools", "results"):
        (tmp_path / room).mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def start(
    project: Path, *words: str, failing: str = NO_STEP, hanging: str = NO_STEP
) -> subprocess.Popen:
    """failing, hanging: what the commands have in them that do."""
    told = {"PYTHON": str(project / "python"), "FAILING": failing, "HANGING": hanging}
    return subprocess.Popen(
        ["bash", str(project / "tools" / "gpu_check.sh"), *words],
        env=os.environ | told,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def run(project: Path, *words: str, **how: str) -> tuple[int, str]:
    process = start(project, *words, **how)
    out, err = process.communicate(timeout=60)
    assert not err
    return process.returncode, out


def steps_of(out: str) -> list[str]:
    begun = [line for line in out.splitlines() if line.startswith("== ")]
    return [line[3:].partition(" (")[0] for line in begun]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "torch sees no GPU"),
        (["--dry", "tests"], "tests is no checkpoint folder"),
        (["--dry", str(TINY / "draft")], "two folders"),
        (["--dry", "--seconds", "0"], "--seconds '0'"),
        (["--dry", "--seconds"], "--seconds ''"),
        (["--dry", "--keep", "README.md"], "--keep 'README.md'"),
        (["--dry", "--keep"], "--keep ''"),
        (["--dyr"], "--dyr"),
    ],
)
def test_refused_in_one_line(words: list[str], message: str) -> None:
    before = names(ROOT / "results")
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and message in line
    assert not done.stdout and names(ROOT / "results") == before


@pytest.mark.parametrize("lacking", ["python", "pytest", "tqdm"])
def test_what_is_not_installed_is_named(lacking: str, tmp_path: Path) -> None:
    (tmp_path / f"{lacking}.py").write_text(f'raise ModuleNotFoundError("no {lacking}")')
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    if lacking == "python":
        environment["PYTHON"] = "python-of-nobody"
    command = ["bash", str(SCRIPT), "--dry"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and f"no {lacking}" in line


def test_all_steps_are_taken_and_kept(project: Path) -> None:
    """The main table's file is also the device's; no earlier one is touched."""
    results = project / "results"
    (results / "gpu_h100_80gb.json").write_text("earlier")
    (results / "gpu_h100_80gb_2.json").symlink_to("nowhere")
    status, out = run(project, "--keep", str(project / "kept"))
    assert status == 0 and steps_of(out) == STEPS
    (folder,) = results.glob("run_gpu_*")
    files = {f"{name}.json" for name in ("pair", "facts", "strict", "eager", "main", "memory")}
    assert names(folder) == names(project / "kept") == files | {"log.txt"}
    assert (results / "gpu_h100_80gb_3.json").samefile(folder / "main.json")
    assert (results / "gpu_h100_80gb.json").read_text() == "earlier"
    log = (project / "kept" / "log.txt").read_text()
    assert log + f"what was measured is in results/{folder.name}\n" == out


def test_no_step_can_stop_another(project: Path) -> None:
    status, out = run(project, "--seconds", "4", failing="facts.py", hanging="pytest")
    assert status == 1 and steps_of(out) == STEPS
    errors = [line for line in out.splitlines() if line.startswith("error: ")]
    assert errors == ["error: tests marked cuda: ended after 2 s", "error: facts: failed"]
    (folder,) = (project / "results").glob("run_gpu_*")
    assert (folder / "pair").exists(), "to go on with"


def test_what_no_time_is_left_for_is_skipped(project: Path) -> None:
    began = time.monotonic()
    status, out = run(project, "--dry", "--seconds", "3", hanging=EVERY_STEP)
    assert status == 1 and time.monotonic() - began < 10
    assert 1 < len(steps_of(out)) < len(STEPS)
    assert out.endswith("error: table memory: skipped, there was no time left\n")


@pytest.mark.parametrize(("number", "is_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_keeps_what_was_measured(number: int, is_group: bool, project: Path) -> None:
    """And nothing is left that runs: its output would stay open."""
    process = start(project, "--dry", "--keep", str(project / "kept"), hanging="strict.json")
    while "== table strict" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    (os.killpg if is_group else os.kill)(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert names(project / "kept") >= {"pair.json", "facts.json", "strict.json", "log.txt"}
