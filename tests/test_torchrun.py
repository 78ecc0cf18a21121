"""Tests of commands under torchrun, started and ended as users do. No process is left running."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT
from test_interrupts import wait_for
from test_ranks import free_port

TEXT = ["--prompt", "The ship sailed at dawn", "--json"]

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


class Launch:
    """A command on several ranks, in its own process group, as a shell starts it."""

    def __init__(self, count: int, words: list[str]):
        port = free_port()
        self.mark = f"MASTER_PORT={port}"  # in the environment of its ranks only
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        run += ["--master-port", str(port), *words]
        options = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(run, start_new_session=True, **options)

    def kill(self, *ranks: int) -> int:
        """Kill those of these ranks that still run, and return their number."""
        n_killed = 0
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = file.read_text().split("\0")
            except OSError:  # it has ended, or is another user's
                continue
            if self.mark in variables and any(f"RANK={rank}" in variables for rank in ranks):
                os.kill(int(file.parent.name), signal.SIGKILL)
                n_killed += 1
        return n_killed

    def wait(self) -> tuple[int, str, list[str]]:
        """Wait for the end. Return the exit status, stdout, and the lines of stderr."""
        out, err = self.process.communicate(timeout=600)
        assert not self.kill(0, 1, 2)
        assert "forcefully exiting" not in err  # torchrun does this if a rank does not end
        return self.process.returncode, out, err.splitlines()


def error_lines(lines: list[str]) -> list[str]:
    """Return the lines in which this project's commands report errors."""
    return [line for line in lines if line.startswith("error: ")]


@contextmanager
def launch_ranks(count: int, *words: str) -> Iterator[Launch]:
    launch = Launch(count, list(words))
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.kill(0, 1, 2)
        launch.process.communicate()


def test_a_table_that_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """Check that only rank 0 saves and prints results, and names the command that resumes. At the
    end every text is ar's, also a strict one and one over a window."""
    file = tmp_path / "results.jsonl"
    file_lines: list[str] = []
    methods = "ar,dynatree,linear strict,graft rebuild window=64"
    words = ["--methods", methods, "--columns", "predicted,exact", "--n-prompts", "2"]
    words += ["--max-new-tokens", "60", "--threads", "1", "--output", str(file)]
    with launch_ranks(2, "bench.py", *words) as launch:
        while launch.process.poll() is None and len(file_lines) < 3:
            time.sleep(0.05)
            file_lines = file.read_text().splitlines() if file.exists() else []
        os.killpg(launch.process.pid, signal.SIGINT)
        _, out, lines = launch.wait()
    assert "UNFINISHED" in out and not error_lines(lines), lines
    (last,) = [line for line in lines if line.startswith("results in ")]
    resume = f"bench.py --resume={file}"
    assert last.endswith(f" texts are missing; resume with: torchrun --nproc-per-node 2 {resume}")
    with launch_ranks(2, *resume.split()) as launch:
        status, out, lines = launch.wait()
    assert status == 0 and len(lines) == 2, lines
    assert "; 2 ranks on cpu, float32" in lines[0]
    assert "Every greedy text is identical to ar's" in out and out.count("2/2") == 3
    assert [other.name for other in tmp_path.iterdir()] == ["results.jsonl"]
    assert json.loads(file_lines[0])["head"]["machine"]["ranks"] == 2


@pytest.mark.parametrize("is_killed", [False, True], ids=["Ctrl-C", "a rank is killed"])
def test_what_was_written_is_kept(is_killed: bool) -> None:
    """Check that rank 0 reports a rank that has ended, unless torchrun's SIGTERM comes first."""
    words = [*TEXT, "--max-new-tokens", "1900", "--show-tree"]
    with launch_ranks(2, "dynatree.py", *words) as launch:
        wait_for(launch.process.stderr, "iteration 5")
        if is_killed:
            assert launch.kill(1) == 1
        else:
            os.killpg(launch.process.pid, signal.SIGINT)
        status, out, lines = launch.wait()
    report = json.loads(out)
    assert report["interrupted"] and 5 < len(report["token_ids"]) < 1900
    if is_killed:
        gone = "error: rank 1 has ended; torchrun reports why"
        assert status == 1 and set(error_lines(lines)) <= {gone}
    else:
        assert any(" tokens/s, " in line for line in lines) and not error_lines(lines)


def test_a_mistake_is_reported_once() -> None:
    with launch_ranks(3, "dynatree.py", *TEXT) as launch:
        status, out, lines = launch.wait()
    assert status == 1 and out == ""
    (line,) = error_lines(lines)
    assert "cannot be split evenly over 3 ranks" in line
