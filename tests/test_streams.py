"""A program as a shell starts it: what it imports first, and what becomes of its output.

What can still be written is; what cannot is one line and a status, never Python's own complaint.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, source_files

from cli.main import main
from cli.models import Request
from cli.tokens import load_tokenizer
from engine.decoding import Step

TEXT = (
    "--prompt 'The ship sailed at dawn' --max-new-tokens 100 --ignore-eos --threads 1 --method ar"
)


def run(command: str, **variables: str) -> subprocess.CompletedProcess:
    """A command line of bash, whose python is ours."""
    shell = ["bash", "-o", "pipefail", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {command}']
    found = {"cwd": ROOT, "capture_output": True, "text": True, "env": os.environ | variables}
    return subprocess.run(shell, **found)


@pytest.mark.parametrize(
    ("command", "status", "n_lines", "told"),
    [
        (f"python dynatree.py {TEXT} | head -c 20", 1, 1, "target models"),
        (f"python dynatree.py {TEXT} --json | true", 1, 2, " tokens/s, "),
        (f"python dynatree.py {TEXT} --show-tree 2>&1 >/dev/null | head -2 >&2", 0, 2, "iteration"),
        (f"python dynatree.py {TEXT} 2>/dev/full", 0, 0, ""),
        (f"python dynatree.py {TEXT} >&-", 0, 2, " tokens/s, "),
        (f"python dynatree.py {TEXT} --json 2>&- | python -m json.tool", 0, 0, ""),
        ("python dynatree.py --prompt-file - <&-", 2, 2, "error: the prompt is empty"),
        ("python dynatree.py --method x 2>&-", 2, 0, ""),
        ("python dynatree.py --help | head -2", 0, 0, ""),
        (f"python dynatree.py {TEXT} >/dev/full", 2, 2, "error: [Errno 28] No space left"),
    ],
)
def test_output_that_ends_early(command: str, status: int, n_lines: int, told: str) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    done = run(command)
    assert done.returncode == status and told in done.stderr
    assert len(done.stderr.splitlines()) == n_lines, done.stderr


def test_a_page_outlives_the_reader_of_the_object(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert run(f"python dynatree.py {TEXT} --json --page {file} | true").returncode == 1
    assert file.read_text().startswith("<!doctype html>")


def test_a_character_that_the_output_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text ended in an error where the locale is an old one."""
    ids = load_tokenizer(TINY / "target").encode("naïve").ids
    monkeypatch.setattr(Request, "decode", lambda *_: iter([Step(ids, verify_ms=1.0)]))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["--prompt", "a", "--method", "ar"]) == 0
    assert out.buffer.getvalue() == b"na?ve\n"


PROGRAMS = [file for file in source_files() if "\n    sys.exit(main())" in file.read_text()]


@pytest.mark.parametrize("program", [str(file.relative_to(ROOT)) for file in PROGRAMS])
def test_packages_that_are_not_installed(program: str) -> None:
    command = f"python -S -m {program[:-3].replace('/', '.')}"  # without site-packages
    done = run(command)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: No module named ")
    assert "pip install -r requirements.txt" in line


def test_huge_pages_are_asked_for_unless_the_user_has_chosen() -> None:
    program = "import os, cli.start; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    assert run(f'python -c "{program}"').stdout == "1\n"
    assert run(f'python -c "{program}"', THP_MEM_ALLOC_ENABLE="0").stdout == "0\n"
