"""Ctrl-C, sent as a terminal sends it: to the whole group of processes, at any time, any number.

Whenever it comes, the status is 130, there is no traceback, and what was written is kept.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from cli import interrupts
from cli.interrupts import CtrlC

ROOT = Path(__file__).parent.parent
TEXT = ["--prompt", "The ship sailed at dawn"]
AR = ["--method", "ar", "--threads", "1"]  # a second thread would only wait, see conftest.py


@contextmanager
def started(*options: str, stdout: int = subprocess.PIPE) -> Iterator:
    """Python with a command line, in a group of its own, as a shell starts it."""
    command = [sys.executable, "-u", *options]
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def press(process: subprocess.Popen, times: int = 1) -> None:
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.002)  # or several arrive as one


def wait_for(stream: IO[str], word: str) -> str:
    """Read lines until one has this word."""
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"there was no {word!r}")


def ended(process: subprocess.Popen) -> tuple[str, str]:
    """What is left of stdout and stderr, of an interrupted process."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return out, err


@pytest.mark.parametrize("script", ["dynatree.py", "bench.py"])
def test_while_importing(script: str) -> None:
    """A second's work, of which each line could end in a traceback."""
    with started("-X", "importtime", script) as process:
        wait_for(process.stderr, " torch._utils")
        press(process)
        ended(process)


def test_while_loading() -> None:
    with started("dynatree.py", *TEXT, "--json") as process:
        wait_for(process.stderr, "target ")
        press(process, 2)
        out, err = ended(process)
    assert out == err == ""


def test_while_reading_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("in the beginning " * 20_000)
    options = ["--prompt-file", str(file), "--window", "1000", "--json"]
    with started("dynatree.py", *options, *AR) as process:
        wait_for(process.stderr, "not the text of full attention")
        press(process)
        out, err = ended(process)
    assert out == err == ""


def test_while_writing() -> None:
    with started("dynatree.py", *TEXT, "--max-new-tokens", "1900", *AR) as process:
        start = process.stdout.read(20)
        press(process, 2)
        out, err = ended(process)
    assert start and out.endswith("\n")
    assert " tokens/s, " in err.splitlines()[-1]


def test_ten_while_writing_keep_the_json() -> None:
    """The second was raised where the first was being handled, and the object was lost."""
    options = ["--json", "--show-tree", "--max-new-tokens", "1900", "--threads", "1"]
    with started("dynatree.py", *TEXT, *options) as process:
        wait_for(process.stderr, "iteration 5")
        press(process, 10)
        out, err = ended(process)
    report = json.loads(out)
    assert report["interrupted"] and 5 < len(report["token_ids"]) < 1900
    assert " tokens/s, " in err.splitlines()[-1]


@contextmanager
def narrow_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is full long before a report is written."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    try:
        yield reader, writer
    finally:
        os.close(reader)


@pytest.mark.parametrize("pause", [0.0, 1.2])
@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="narrows a pipe as Linux can")
def test_while_the_report_is_written(pause: float) -> None:
    """One waits until it is written, as another at once does; a later one does not. With python -u
    a signal cut the object off where the pipe was full."""
    options = ["--json", "--max-new-tokens", "400", "--target", "models/tiny/draft", *AR]
    with narrow_pipe() as (reader, writer):
        with started("dynatree.py", *TEXT, *options, stdout=writer) as process:
            os.close(writer)
            wait_for(process.stderr, " tokens/s, ")
            time.sleep(0.1)
            press(process)
            time.sleep(pause)
            press(process)
            if pause:
                ended(process)
            with open(reader, closefd=False) as pipe:
                out = pipe.read()
            if not pause:
                ended(process)
                report = json.loads(out)
                assert len(report["token_ids"]) == 400 and not report["interrupted"]


def n_records(file: Path) -> int:
    """Of a results file that may not be there yet."""
    if not file.exists():
        return 0
    return len(json.loads(file.read_text())["records"])


def test_bench_keeps_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--methods", "linear", "--columns", "exact", "--threads", "1"]
    options += ["--n-prompts", "4", "--new-tokens", "250", "--output", str(file)]
    with started("bench.py", *options) as process:
        wait_for(process.stderr, "target ")
        while process.poll() is None and not n_records(file):
            time.sleep(0.05)
        press(process, 3)
        _, err = ended(process)
    assert 1 <= n_records(file) < 8
    assert "--resume" in err.splitlines()[-1]


def test_the_second_is_the_first_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    times = iter([10.0, 10.01, 10.9, 11.1])
    monkeypatch.setattr(interrupts.os, "_exit", ends.append)
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: next(times))
    handler = CtrlC()
    handler.is_raising = True
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGINT, None)
    for expected in ([], [], [130]):
        handler(signal.SIGINT, None)
        assert ends == expected


def test_it_waits_where_it_must() -> None:
    reached = []
    before = signal.getsignal(signal.SIGINT)
    with interrupts.handling_interrupts():
        with pytest.raises(KeyboardInterrupt):
            with interrupts.interrupts(raised=True):
                with interrupts.interrupts(raised=False):
                    signal.raise_signal(signal.SIGINT)
                    reached.append("written")
                reached.append("not reached")
    assert reached == ["written"]
    assert signal.getsignal(signal.SIGINT) is before


def test_one_that_is_ignored_stays_so() -> None:
    """As under nohup, or behind a script's &."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.end_quietly()
        with interrupts.handling_interrupts(), interrupts.interrupts(raised=True):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_is_left_to_end_when_all_is_written() -> None:
    """A status of 130, or of a process killed, would say of a whole text that it is not."""
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupts.end_quietly()
        with interrupts.handling_interrupts():
            assert isinstance(signal.getsignal(signal.SIGINT), CtrlC)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_is_told_from_ctrl_c_where_it_is_heeded() -> None:
    """It waits as Ctrl-C does, and raises what it stands for, by default the same."""
    before = signal.getsignal(signal.SIGTERM)
    for number, own, expected in (
        (signal.SIGTERM, [lambda: OSError("ended")], OSError),
        (signal.SIGTERM, [], KeyboardInterrupt),
        (signal.SIGINT, [lambda: OSError("ended")], KeyboardInterrupt),
    ):
        reached = []
        with interrupts.handling_interrupts():
            interrupts.heed_termination(*own)
            with pytest.raises((OSError, KeyboardInterrupt)) as caught:
                with interrupts.interrupts(raised=True):
                    with interrupts.interrupts(raised=False):
                        signal.raise_signal(number)
                        reached.append("written")
                    reached.append("not reached")
        assert caught.type is expected and reached == ["written"]
        assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_is_heeded_where_ctrl_c_is_ignored() -> None:
    """As nohup and a script's & leave it; by a kill a long run lost what it had not saved."""
    before = signal.getsignal(signal.SIGTERM)
    at_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)
    reached = []
    try:
        with interrupts.handling_interrupts(), interrupts.interrupts(raised=True):
            interrupts.heed_termination()
            with pytest.raises(KeyboardInterrupt):
                with interrupts.interrupts(raised=False):
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGTERM)
                    reached.append("written")
                reached.append("not reached")
        assert reached == ["written"] and signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, at_ctrl_c)
