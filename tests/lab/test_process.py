"""Tests of programs as processes: their start, a kill, a closed pipe, files that they replace."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from small import ROOT, Captured
from test_trace import data_of

import dynatree
import dynatree_lab
from dynatree_lab.benchmark import measure as bench
from dynatree_lab.cli.main import main
from dynatree_lab.cli.program import Parser, run_command_line
from dynatree_lab.cli.start import run_program

OPTIONS = ["--prompt", "The ship sailed at dawn", "--ignore-eos", "--threads", "1"]


def start(command: list[str], stdout: int | IO[str] = subprocess.PIPE) -> subprocess.Popen:
    """Start a command in its own process group, as a shell does. Python's output is buffered."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **pipes)


def wait_for(stream: IO[str], word: str) -> None:
    """Read lines until one has this word."""
    assert any(word in line for line in stream), f"there was no {word!r}"


def test_a_text_whose_reader_ends(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `| head` ends a program without a word, also when Python flushes its output."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main([*OPTIONS, "--max-new-tokens", "9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("target ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("words", [["--max-new-tokens", "9", "--json"], ["--help"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    """Check an object of --json, and a text that is shorter than Python's buffer."""
    command = [sys.executable, "-m", "dynatree_lab", *OPTIONS, *words]
    with open("/dev/full", "w") as full, start(command, stdout=full) as process:
        _, err = process.communicate()
    assert process.returncode == 2
    assert err.endswith("error: stdout cannot be written: No space left on device\n")
    assert "Traceback" not in err and err.count("error: ") == 1


def test_a_killed_text_is_kept(tmp_path: Path) -> None:
    """Check SIGTERM, which raises what Ctrl-C raises."""
    page = tmp_path / "page.html"
    more = ["--max-new-tokens", "1900", "--json", "--show-tree", "--html", str(page)]
    with start([sys.executable, "-m", "dynatree_lab", *OPTIONS, *more]) as process:
        wait_for(process.stderr, "iteration 5:")
        process.terminate()
        out, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err, err
    report, shown = json.loads(out), data_of(page.read_text())
    assert report["interrupted"] and report["finish_reason"] is None
    assert 5 < len(report["token_ids"]) < 1900
    assert shown["interrupted"] and shown["token_ids"] == report["token_ids"]
    assert " tokens/s, " in err


def test_a_start_without_the_packages() -> None:
    with start([sys.executable, "-S", "-m", "dynatree_lab"]) as process:  # without site-packages
        out, err = process.communicate()
    assert process.returncode == 2 and out == ""
    assert err.startswith("error: No module named ") and len(err.splitlines()) == 1
    assert err.endswith(f"; pip install -e '{ROOT}[lab]' installs all\n")


WITHOUT_LAB = "import sys; sys.modules['pandas'] = sys.modules['tqdm'] = None\n"
WITHOUT_LAB += "from dynatree_lab.cli import start; "


def test_the_benchmark_names_the_extra_lab() -> None:
    with start([sys.executable, "-c", f"{WITHOUT_LAB}start.run_bench()"]) as process:
        _, err = process.communicate()
    assert process.returncode == 2 and len(err.splitlines()) == 1
    assert err.startswith("error: ") and err.endswith(
        f"; pip install -e '{ROOT}[lab]' installs all\n"
    )


def test_the_full_program_does_not_need_the_extra_lab() -> None:
    words = [*OPTIONS, "--max-new-tokens", "4"]
    with start([sys.executable, "-c", f"{WITHOUT_LAB}start.run_lab()", *words]) as process:
        out, err = process.communicate()
    assert process.returncode == 0 and out, err


STARTS = [  # sys.argv[0], the program, how help, version and pages name it
    ("/usr/bin/dynatree-lab", main, "dynatree-lab"),
    ("/a/dynatree_lab/__main__.py", main, "python -m dynatree_lab"),
    ("/usr/bin/dynatree-bench", bench.main, "dynatree-bench"),
    ("/a/dynatree_lab/benchmark/__main__.py", bench.main, "python -m dynatree_lab.benchmark"),
    ("/usr/bin/dynatree", dynatree.main, "dynatree"),
]


@pytest.mark.parametrize(("start", "program", "name"), STARTS)
def test_a_program_says_how_it_was_started(
    start: str,
    program: Callable[[list[str]], int],
    name: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [start])
    with pytest.raises(SystemExit):
        program(["--help"])
    assert re.search(rf"(: |^){name} (--prompt TEXT )?\[", capsys.readouterr().out)
    if program is not dynatree.main:
        with pytest.raises(SystemExit):
            program(["--version"])
        assert capsys.readouterr().out.startswith(f"{name} {dynatree_lab.__version__}, torch ")


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run Python in a folder whose files come first, with this project behind them."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    how = {"cwd": folder, "env": variables, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *words], **how)


@pytest.mark.parametrize("name", dynatree_lab.CORE)
def test_a_file_that_hides_one_of_the_core_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an import that fails because of it, and one that fails for another reason."""

    def fail(module: str) -> None:
        raise ImportError("cannot import name 'x'")

    monkeypatch.setattr(dynatree_lab, "import_module", fail)
    with pytest.raises(ImportError, match="^cannot import name 'x'$"):
        dynatree_lab.load_pair  # noqa: B018
    (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as found:
        dynatree_lab.load_pair  # noqa: B018
    line = f"{tmp_path / name}.py is imported instead of {ROOT / name}.py; rename yours"
    assert str(found.value) == f"cannot import name 'x': {line}"


@pytest.mark.slow
def test_a_script_and_a_program_beside_such_a_file(tmp_path: Path) -> None:
    """Check a script that has such a name itself, and is run again by its import."""
    script = tmp_path / "dynatree.py"
    script.write_text("import dynatree_lab as lab\nlab.load_pair()\n")
    last = run_in(tmp_path, "dynatree.py").stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert last.count(f"{script} is imported instead of {ROOT}") == 1
    script.rename(tmp_path / "sampling.py")
    program = run_in(tmp_path, "-m", "dynatree_lab", "--help")
    (line,) = program.stderr.splitlines()
    assert program.returncode == 2 and line.startswith("error: ") and "; rename yours" in line


def test_changed_copies_of_the_core_are_used(tmp_path: Path) -> None:
    """Check that a folder of such files needs no line, and that their mistakes are shown."""
    for name in dynatree_lab.CORE:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    code = "import dynatree_lab as lab, sampling; print(lab.load_pair.__name__, sampling.__file__)"
    assert run_in(tmp_path, "-c", code).stdout == f"load_pair {tmp_path}/sampling.py\n"
    (tmp_path / "sampling.py").write_text("x = y\n")
    assert run_in(tmp_path, "-c", code).stderr.endswith("NameError: name 'y' is not defined\n")


@pytest.fixture
def some_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a module to run. The signals and variables of this process stay."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delitem(sys.modules, "some_program", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    return tmp_path / "some_program.py"


def test_a_module_that_no_package_has_is_an_error_in_code(some_program: Path) -> None:
    """Check that a typo in a fork's own file keeps its traceback."""
    some_program.write_text("raise ModuleNotFoundError('x', name='torch.typo')\n")
    with pytest.raises(ModuleNotFoundError):
        run_program("some_program")


def test_huge_pages_are_asked_for(some_program: Path) -> None:
    some_program.write_text("import os\nmain = lambda: os.environ['THP_MEM_ALLOC_ENABLE']\n")
    with pytest.raises(SystemExit) as ended:
        run_program("some_program")
    assert ended.value.code == "1"


def test_a_character_that_the_output_cannot_encode(
    some_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an output in ASCII, as an old locale has it. Such a text once ended in an error."""
    some_program.write_text("main = lambda: print('naïve')\n")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        run_program("some_program")
    out.flush()
    assert out.buffer.getvalue() == b"na?ve\n"


def test_ctrl_c_while_importing(some_program: Path) -> None:
    some_program.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(SystemExit) as ended:
        run_program("some_program")
    assert ended.value.code == 130


def test_a_program_runs_in_a_thread() -> None:
    """Check a program that a server or a notebook calls outside of the main thread, where Python
    sets no signal handlers. It once ended in an error."""
    found = []
    parser = Parser(prog="x")
    thread = threading.Thread(
        target=lambda: found.append(run_command_line(lambda args: 0, parser, []))
    )
    thread.start()
    thread.join()
    assert found == [0]
