"""What a program sees to before its imports: one line where they fail."""

import resource
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
    ("error", "why", "status"),
    [
        (MemoryError(), "too little memory", 2),
        (ImportError("x\nlibtorch.so: failed to map segment"), "libtorch.so: failed to map", 2),
        (RuntimeError("std::bad_alloc"), "cannot load what it needs: std::bad_alloc", 2),
        (KeyError("key"), "KeyError: 'key'; nobody foresaw this, --debug shows where", 70),
    ],
)
def test_what_ends_the_imports_is_one_line(
    error: Exception,
    why: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = []
    monkeypatch.setattr(start.os, "_exit", ends.append)
    start._explain(type(error), error, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and why in line
    assert ends == [status]


@pytest.mark.parametrize(("chosen", "found"), [(None, "1"), ("0", "0")])
def test_huge_pages_are_asked_for_unless_the_user_has_chosen(
    chosen: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "end_quietly", lambda: None)
    monkeypatch.setattr(start.sys, "argv", ["dynatree.py", "--debug"])
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", chosen or "")
    if chosen is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    start.guard_imports()
    assert start.os.environ["THP_MEM_ALLOC_ENABLE"] == found


def test_less_memory_than_imports_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 620 MB torch did not fail, it hung."""
    ends = []
    monkeypatch.setattr(start, "end_quietly", lambda: None)
    monkeypatch.setattr(start.sys, "argv", ["dynatree.py", "--debug"])
    monkeypatch.setattr(start.os, "_exit", ends.append)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    for allowed in (resource.RLIM_INFINITY, 640 * 2**20, 620 * 2**20):
        monkeypatch.setattr(resource, "getrlimit", lambda _, n=allowed: (n, n))
        start.guard_imports()
    assert ends == [2]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("ulimit -v allows 634880, and importing torch takes 655360")
