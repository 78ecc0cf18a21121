"""Tests of programs started by a shell: missing packages, and output that is closed or full.

A program writes what can still be written. A failure is one line and an exit status, never one of
Python's own messages.
"""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Captured, source_files

from cli.main import main
from cli.models import Request
from cli.start import run_program
from cli.tokens import load_tokenizer
from engine.generate import Step

TEXT = (
    "--prompt 'The ship sailed at dawn' --max-new-tokens 100 --ignore-eos --threads 1 --method ar"
)


def run(command: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a command line of bash, in which `python` is this interpreter."""
    shell = ["bash", "-o", "pipefail", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {command}']
    found = {"cwd": ROOT, "capture_output": True, "text": True, "env": os.environ | variables}
    return subprocess.run(shell, **found)


@pytest.mark.parametrize(
    ("command", "status", "n_lines", "words"),
    [
        (f"python dynatree.py {TEXT} | head -c 20", 1, 1, "target models"),
        (f"python dynatree.py {TEXT} --show-tree 2>&1 >/dev/null | head -2 >&2", 0, 2, "iteration"),
        (f"python dynatree.py {TEXT} <&- >&-", 0, 2, " tokens/s, "),
        (f"python dynatree.py {TEXT} --json 2>&- | python -m json.tool", 0, 0, ""),
        (f"python dynatree.py {TEXT} >/dev/full", 2, 2, "error: [Errno 28] No space left"),
    ],
)
def test_output_that_ends_early(command: str, status: int, n_lines: int, words: str) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    done = run(command)
    assert done.returncode == status and words in done.stderr
    assert len(done.stderr.splitlines()) == n_lines, done.stderr


def test_a_page_is_written_even_if_the_report_has_no_reader(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = run(f"python dynatree.py {TEXT} --json --html {file} | true")
    assert done.returncode == 1 and " tokens/s, " in done.stderr
    assert len(done.stderr.splitlines()) == 3  # the last one names the page's file
    assert file.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("option", "status"), [("--method=x", 2), ("--method=ar", 0)])
def test_a_full_stderr_ends_no_run(
    option: str, status: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["--prompt", "a", "--max-new-tokens", "8", option]) == status
    assert bool(capsys.readouterr().out) == (status == 0)


def test_a_character_that_the_output_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an output in ASCII, as an old locale has it. Such a text once ended in an error."""
    ids = load_tokenizer(TINY / "target").encode("naïve").ids
    monkeypatch.setattr(Request, "decode", lambda *_: iter([Step(ids, verify_ms=1.0)]))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["--prompt", "a", "--method", "ar"]) == 0
    assert out.buffer.getvalue() == b"na?ve\n"


HEAD = "    from cli.start import run_program\n"
PROGRAMS = [file for file in source_files() if HEAD in file.read_text()]


@pytest.mark.parametrize("program", [str(file.relative_to(ROOT)) for file in PROGRAMS])
def test_packages_that_are_not_installed(program: str) -> None:
    command = f"python -S -m {program[:-3].replace('/', '.')}"  # without site-packages
    done = run(command)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: No module named ")
    assert "pip install -r requirements.txt" in line


@pytest.mark.parametrize("name", ["numpy", "huggingface_hub", "engine.typo", "torch.typo", "typo"])
def test_only_what_is_required_is_said_to_be_missing(
    name: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check required and other modules. A typo in a fork's own file keeps its traceback."""
    line = f"raise ModuleNotFoundError({name!r}, name={name!r})\n"
    (tmp_path / "some_program.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    with pytest.raises(ModuleNotFoundError if "typo" in name else SystemExit) as ended:
        run_program("some_program")
    if "typo" not in name:
        assert ended.value.code == 2
        line = f"error: {name}; pip install -r requirements.txt installs all\n"
        assert capsys.readouterr().err == line


def test_huge_pages_are_asked_for_unless_the_user_has_chosen(tmp_path: Path) -> None:
    show = "import os\nmain = lambda: print(os.environ['THP_MEM_ALLOC_ENABLE'])\n"
    (tmp_path / "some_program.py").write_text(show)
    command = "python -c 'from cli.start import run_program; run_program(\"some_program\")'"
    path = {"PYTHONPATH": str(tmp_path)}
    assert run(command, **path).stdout == "1\n"
    assert run(command, THP_MEM_ALLOC_ENABLE="0", **path).stdout == "0\n"


def test_an_import_changes_nothing_of_the_process() -> None:
    """Check that a program which imports this project keeps its own signals, hooks, environment and
    garbage collector."""
    look = "def look():\n  return sys.excepthook, signal.getsignal(2), dict(os.environ), "
    look += "gc.get_freeze_count(), gc.get_threshold()\n"
    program = f"import gc, os, signal, sys, torch\n{look}before = look()\n"
    program += "import cli.start, cli.main, bench\nassert look() == before\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
