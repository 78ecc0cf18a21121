"""Commands under torchrun, started and ended as users do it, and nothing left running."""

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
    """A command on several ranks, in a group of its own, as a shell starts it."""

    def __init__(self, count: int, words: list[str]):
        port = free_port()
        self.mark = f"MASTER_PORT={port}"  # in the environment of its ranks alone
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        run += ["--master-port", str(port), *words]
        how = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(run, start_new_session=True, **how)

    def kill(self, *ranks: int) -> int:
        """Those that still run; returns how many."""
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

    def ended(self) -> tuple[int, str, list[str]]:
        """The exit status, stdout, and the lines of stderr, torchrun's own among them."""
        out, err = self.process.communicate(timeout=600)
        assert not self.kill(0, 1, 2)
        assert "forcefully exiting" not in err  # torchrun, out of patience with a rank
        return self.process.returncode, out, err.splitlines()


def errors(lines: list[str]) -> list[str]:
    """Those that a command of ours ends with."""
    return [line for line in lines if line.startswith("error: ")]


@contextmanager
def launched(count: int, *words: str) -> Iterator[Launch]:
    launch = Launch(count, list(words))
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.kill(0, 1, 2)
        launch.process.communicate()


def test_a_table_that_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """Rank 0 alone keeps and shows what there is, and names the command that goes on; at the end
    every text is ar's, a strict one and one over a window too."""
    file = tmp_path / "results.jsonl"
    file_lines: list[str] = []
    methods = "ar,dynatree,linear strict,graft rebuild window=64"
    words = ["--methods", methods, "--columns", "predicted,exact", "--n-prompts", "2"]
    words += ["--new-tokens", "60", "--threads", "1", "--output", str(file)]
    with launched(2, "bench.py", *words) as launch:
        while launch.process.poll() is None and len(file_lines) < 3:
            time.sleep(0.05)
            file_lines = file.read_text().splitlines() if file.exists() else []
        os.killpg(launch.process.pid, signal.SIGINT)
        _, out, lines = launch.ended()
    assert "UNFINISHED" in out and not errors(lines), lines
    (last,) = [line for line in lines if line.startswith("results in ")]
    resume = f"bench.py --resume={file}"
    assert last.endswith(f" texts are lacking; to go on: torchrun --nproc-per-node 2 {resume}")
    with launched(2, *resume.split()) as launch:
        status, out, lines = launch.ended()
    assert status == 0 and len(lines) == 2, lines
    assert "; 2 ranks on cpu, float32" in lines[0]
    assert "Every greedy text is ar's" in out and out.count("2/2") == 3
    assert [other.name for other in tmp_path.iterdir()] == ["results.jsonl"]
    assert json.loads(file_lines[0])["head"]["machine"]["ranks"] == 2


@pytest.mark.parametrize("is_killed", [False, True], ids=["Ctrl-C", "a rank is killed"])
def test_what_was_written_is_kept(is_killed: bool) -> None:
    """Of a rank that has gone rank 0 says so, unless torchrun's SIGTERM is there before that."""
    words = [*TEXT, "--max-new-tokens", "1900", "--show-tree"]
    with launched(2, "dynatree.py", *words) as launch:
        wait_for(launch.process.stderr, "iteration 5")
        if is_killed:
            assert launch.kill(1) == 1
        else:
            os.killpg(launch.process.pid, signal.SIGINT)
        status, out, lines = launch.ended()
    report = json.loads(out)
    assert report["interrupted"] and 5 < len(report["token_ids"]) < 1900
    if is_killed:
        gone = "error: rank 1 has gone; torchrun says how that one ended"
        assert status == 1 and set(errors(lines)) <= {gone}
    else:
        assert any(" tokens/s, " in line for line in lines) and not errors(lines)


def test_a_mistake_is_said_once() -> None:
    with launched(3, "dynatree.py", *TEXT) as launch:
        status, out, lines = launch.ended()
    assert status == 1 and out == ""
    (line,) = errors(lines)
    assert "cannot be split evenly over 3 ranks" in line
