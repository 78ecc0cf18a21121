"""What a program sees to before its imports: one line where they fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli import start

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("script", ["dynatree.py", "bench.py", "tools/enlarge.py"])
def test_packages_that_are_not_installed(script: str) -> None:
    command = [sys.executable, "-S", script]  # without site-packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "No module named" in line
    assert "pip install -r requirements.txt" in line


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError(), "too little memory"),
        (ImportError("x\nlibtorch.so: failed to map segment"), "libtorch.so: failed to map"),
    ],
)
def test_a_library_that_cannot_be_loaded(
    error: Exception,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = []
    monkeypatch.setattr(start.os, "_exit", ends.append)
    start._explain(type(error), error, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and why in line
    assert ends == [2]


def test_any_other_mistake_of_ours_shows_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start.os, "_exit", lambda status: pytest.fail("ended"))
    start._explain(KeyError, KeyError("key"), None)
    assert "KeyError: 'key'" in capsys.readouterr().err
