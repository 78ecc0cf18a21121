"""Tests of Ctrl-C, SIGTERM and SIGHUP, sent to the whole process group as a terminal does.

At any time, the exit status is 130, there is no traceback, and what was written is kept.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import pytest
from conftest import ROOT, override
from test_trace import data_of

from cli.errors import Parser, run_command_line

TEXT = ["--prompt", "The ship sailed at dawn", "--max-new-tokens", "1900", "--threads", "1"]


@contextmanager
def start(*options: str, at_ctrl_c: signal.Handlers = signal.SIG_DFL) -> Iterator:
    """Run Python with a command line in its own process group, as a shell does.

    at_ctrl_c: the handler, set explicitly because this suite may itself ignore Ctrl-C, as a command
    behind a script's & does. A suite under nohup ignores SIGHUP.
    """
    command = [sys.executable, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def begin() -> None:
        signal.signal(signal.SIGINT, at_ctrl_c)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    group = {"start_new_session": True, "preexec_fn": begin}
    with subprocess.Popen(command, cwd=ROOT, **group, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_for(stream: IO[str], word: str) -> str:
    """Read lines until one has this word, and return it."""
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"there was no {word!r}")


def interrupt(process: subprocess.Popen, number: int = signal.SIGINT) -> tuple[str, str]:
    """Send a signal to a process and wait for its end. Return the rest of stdout and stderr."""
    os.killpg(process.pid, number)
    out, err = process.communicate()
    assert process.returncode in (130, -signal.SIGINT), err  # a shell reports 130 for both
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return out, err


@pytest.mark.parametrize(
    ("script", "at"), [("dynatree.py", " torch._utils"), ("bench.py", " cli.errors")]
)
def test_while_importing(script: str, at: str) -> None:
    """Interrupt the imports, which take a second. Each of their lines could end in a traceback."""
    with start("-X", "importtime", script) as process:
        wait_for(process.stderr, at)
        interrupt(process)


def test_while_loading() -> None:
    with start("dynatree.py", *TEXT, "--json") as process:
        wait_for(process.stderr, "target ")
        assert interrupt(process) == ("", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_json_and_page_are_kept(number: signal.Signals, tmp_path: Path) -> None:
    """Check Ctrl-C, and a kill where Ctrl-C is ignored. If a terminal is closed, the kernel and the
    shell each send a hang-up."""
    page = tmp_path / "page.html"
    options = ["--json", "--show-tree", "--html", str(page)]
    at_ctrl_c = signal.SIG_IGN if number == signal.SIGTERM else signal.SIG_DFL
    with start("dynatree.py", *TEXT, *options, at_ctrl_c=at_ctrl_c) as process:
        wait_for(process.stderr, "iteration 5:")
        if number == signal.SIGHUP:
            os.killpg(process.pid, number)
        out, err = interrupt(process, number)
    report = json.loads(out)
    assert report["finish_reason"] is None
    assert report["interrupted"] and 5 < len(report["token_ids"]) < 1900
    assert " tokens/s, " in err.splitlines()[-2]
    content = data_of(page.read_text())
    assert content["interrupted"] and content["token_ids"] == report["token_ids"]


def test_while_a_module_changes_it_into_another_error() -> None:
    """Check that it is still an interrupt. torch's compiler may change it while it is imported."""

    def execute(args: Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt as error:
            raise RuntimeError from error

    assert run_command_line(execute, Parser(prog="x"), []) == 130


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """Check a process that ignores Ctrl-C, as under nohup or behind a script's &."""
    words = override(TEXT, "--json", "--show-tree", "--max-new-tokens", "30")
    with start("dynatree.py", *words, at_ctrl_c=signal.SIG_IGN) as process:
        wait_for(process.stderr, "iteration 2:")
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == 0 and len(json.loads(out)["token_ids"]) == 30


def test_a_program_runs_in_a_thread() -> None:
    """Check a program that a server or a notebook calls outside of the main thread, where Python
    sets no handlers. It once ended in an error."""
    status = []
    call = partial(run_command_line, lambda args: 0, Parser(prog="x"), [])
    thread = threading.Thread(target=lambda: status.append(call()))
    thread.start()
    thread.join()
    assert status == [0]


def test_bench_keeps_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    options = ["--methods", "linear", "--columns", "exact", "--threads", "1"]
    options += ["--n-prompts", "4", "--repeats", "10", "--max-new-tokens", "250"]
    options += ["--output", str(file)]
    with start("bench.py", *options) as process:
        wait_for(process.stderr, "target ")
        while process.poll() is None and file.read_bytes().count(b"\n") < 2:
            time.sleep(0.05)
        _, err = interrupt(process)
    assert 2 <= len(file.read_text().splitlines()) < 1 + 4 * 2 * 10
    assert "--resume" in err.splitlines()[-1]
