"""Standard output and error that fail: full, closed, or with a reader that has gone.

What can still be written is; what cannot is one line and a status, never Python's own complaint.
What is closed before Python begins, or fails as it ends, only a process of its own can show.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.errors import wait_for_streams
from cli.main import main

ROOT = Path(__file__).parent.parent
PROMPT = "The ship sailed at dawn"
TEXT = "--prompt-file - --max-new-tokens 6 --method ar --threads 1"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
NO_SPACE = "error: standard output cannot be written: No space left on device"
Captured = pytest.CaptureFixture[str]


def run(arguments: str, around: str) -> subprocess.CompletedProcess:
    """dynatree.py with redirections, or a pipe behind it; one before it brings the prompt."""
    command = f"{sys.executable} dynatree.py {arguments} {around}"
    pipes = {"input": PROMPT, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, **pipes)
    for complaint in ("Traceback", "Exception ignored", "BrokenPipe"):
        assert complaint not in done.stderr, done.stderr
    return done


@needs_full
def test_output_that_is_full() -> None:
    done = run(TEXT, ">/dev/full")
    assert done.stderr.splitlines()[-1] == NO_SPACE
    assert done.returncode == 2


@needs_full
def test_a_help_that_is_full(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 2
    assert capsys.readouterr().err == f"{NO_SPACE}\n"


def test_output_that_is_closed() -> None:
    done = run(TEXT + " --json", ">&-")
    last = done.stderr.splitlines()[-1]
    assert last == "error: standard output cannot be written: Bad file descriptor"
    assert done.returncode == 2


@needs_full
def test_the_text_comes_without_a_stderr_that_is_full(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["--prompt", PROMPT, "--max-new-tokens", "6", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 6


def test_the_text_comes_without_a_stderr_that_is_closed() -> None:
    """Its lines came to stdout."""
    done = run(TEXT + " --json", "2>&-")
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    assert len(report["token_ids"]) == 6 and report["settings"]["prompt_tokens"] == 7


def test_a_reader_that_goes_after_some_words() -> None:
    done = run(TEXT + " --max-new-tokens 300 --ignore-eos", "| head -c 20")
    assert done.returncode == 1 and "error" not in done.stderr
    assert len(done.stdout) == 20


def test_a_reader_that_was_never_there(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["--help"]) == 1
    assert capsys.readouterr().err == ""


def test_a_stream_that_another_program_told_not_to_wait() -> None:
    """A prompt that had not come yet was a TypeError; of an object longer than a pipe half came."""
    reader, writer = os.pipe()
    before = os.dup(0)
    try:
        os.set_blocking(reader, False)
        os.dup2(reader, 0)
        assert not os.get_blocking(0)
        wait_for_streams()
        assert os.get_blocking(0)
    finally:
        os.dup2(before, 0)
        for descriptor in (reader, writer, before):
            os.close(descriptor)
