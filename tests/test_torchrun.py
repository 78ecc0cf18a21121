"""Commands under torchrun, started and ended as users do it, and nothing left running."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT
from test_interrupts import wait_for
from test_ranks import free_port

TEXT = ["--prompt", "The ship sailed at dawn", "--json"]
LONG = ["--max-new-tokens", "1900", "--show-tree"]

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


class Launch:
    """A command on several ranks, in a group of its own, as a shell starts it."""

    def __init__(self, count: int, words: list[str]):
        self.mark = f"OF_THIS_TEST={uuid.uuid4()}"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        name, value = self.mark.split("=")
        environment[name] = value
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        run += ["--master-port", str(free_port()), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            run, cwd=ROOT, env=environment, start_new_session=True, **pipes
        )

    def running(self) -> dict[int, str]:
        """The ranks of processes that still run, by process id; "" of torchrun itself."""
        found = {}
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = file.read_text().split("\0")
            except OSError:  # it has ended, or is another user's
                continue
            if self.mark in variables:
                ranks = [line[5:] for line in variables if line.startswith("RANK=")]
                found[int(file.parent.name)] = "".join(ranks)
        return found

    def kill(self, rank: str) -> None:
        for process, own in self.running().items():
            if own == rank:
                os.kill(process, signal.SIGKILL)

    def ended(self) -> tuple[int, str, list[str]]:
        """The exit status, stdout, and the lines of stderr, torchrun's own among them."""
        out, err = self.process.communicate(timeout=600)
        assert not self.running()
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
        for process in launch.running():
            os.kill(process, signal.SIGKILL)
        launch.process.communicate()


def test_a_table(tmp_path: Path) -> None:
    """Several methods, one strict, one over a window; every text held against ar's."""
    file = tmp_path / "results.json"
    methods = "ar,dynatree,linear strict,graft rebuild window=64"
    words = ["--methods", methods, "--columns", "predicted,exact", "--n-prompts", "1"]
    words += ["--new-tokens", "30"]
    with launched(2, "bench.py", *words, "--threads", "1", "--output", str(file)) as launch:
        status, out, lines = launch.ended()
    assert status == 0, lines
    assert "Every greedy text is ar's" in out and out.count("1/1") == 3
    assert len(lines) == 2 and "; 2 ranks on cpu, float32" in lines[0]
    assert json.loads(file.read_text())["machine"]["ranks"] == 2


def test_a_table_that_is_interrupted(tmp_path: Path) -> None:
    """Rank 0 alone keeps and shows what there is, and names the command that goes on."""
    file = tmp_path / "results.json"
    words = ["--methods", "ar,linear", "--columns", "exact", "--n-prompts", "6"]
    words += ["--new-tokens", "100", "--threads", "1", "--output", str(file)]
    with launched(2, "bench.py", *words) as launch:
        while launch.process.poll() is None and not file.exists():
            time.sleep(0.05)
        os.killpg(launch.process.pid, signal.SIGINT)
        _, out, lines = launch.ended()
    assert "UNFINISHED" in out and not errors(lines), lines
    (last,) = [line for line in lines if line.startswith("results in ")]
    command = f"to go on: torchrun --nproc-per-node 2 bench.py --resume={file}"
    assert last.endswith(f" texts are lacking; {command}")
    assert [other.name for other in tmp_path.glob("*.json")] == ["results.json"]


def test_ctrl_c() -> None:
    """torchrun passes it on; what was written is kept."""
    with launched(2, "dynatree.py", *TEXT, *LONG) as launch:
        wait_for(launch.process.stderr, "iteration 5")
        os.killpg(launch.process.pid, signal.SIGINT)
        _, out, lines = launch.ended()
    report = json.loads(out)
    assert report["interrupted"] and 5 < len(report["token_ids"]) < 1900
    assert any(" tokens/s, " in line for line in lines) and not errors(lines)


def test_a_rank_that_is_killed() -> None:
    """Rank 0 keeps what it has, whether the broken connection ends it or torchrun's SIGTERM; of
    the first it says what happened, of the second torchrun does."""
    with launched(2, "dynatree.py", *TEXT, *LONG) as launch:
        wait_for(launch.process.stderr, "iteration 5")
        launch.kill("1")
        status, out, lines = launch.ended()
    assert status == 1
    assert json.loads(out)["interrupted"]
    assert set(errors(lines)) <= {"error: rank 1 has gone; torchrun says how that one ended"}


def test_a_mistake_is_said_once() -> None:
    with launched(3, "dynatree.py", *TEXT) as launch:
        status, out, lines = launch.ended()
    assert status == 1 and out == ""
    (line,) = errors(lines)
    assert "cannot be split evenly over 3 ranks" in line
