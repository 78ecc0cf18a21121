"""Standard output and error that fail: full, closed, or with a reader that has gone.

What can still be written is; what cannot is one line and a status, never Python's own complaint.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = "--prompt 'The ship sailed at dawn' --max-new-tokens 6 --method ar --threads 1"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


def run(arguments: str, around: str = "") -> subprocess.CompletedProcess:
    """dynatree.py with redirections, or a pipe behind it."""
    command = f"{sys.executable} dynatree.py {arguments} {around}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    for complaint in ("Traceback", "Exception ignored", "BrokenPipe"):
        assert complaint not in done.stderr, done.stderr
    return done


@needs_full
@pytest.mark.parametrize(
    ("arguments", "around", "why"),
    [
        (TEXT, ">/dev/full", "No space left on device"),
        (TEXT + " --json", ">&-", "Bad file descriptor"),
        ("--help", ">/dev/full", "No space left on device"),
    ],
)
def test_output_that_cannot_be_written(arguments: str, around: str, why: str) -> None:
    done = run(arguments, around)
    assert done.stderr.splitlines()[-1] == f"error: standard output cannot be written: {why}"
    assert done.returncode == 2


@needs_full
@pytest.mark.parametrize("around", ["2>/dev/full", "2>&-"])
def test_the_text_comes_without_stderr(around: str) -> None:
    """With stderr closed its lines came to stdout."""
    done = run(TEXT + " --json", around)
    assert done.returncode == 0 and done.stderr == ""
    assert len(json.loads(done.stdout)["token_ids"]) == 6


@pytest.mark.parametrize("arguments", ["--help", TEXT + " --json"])
def test_a_reader_that_has_gone(arguments: str) -> None:
    done = run(arguments, "| true")
    assert done.returncode == 1 and "error" not in done.stderr
