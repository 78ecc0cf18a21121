"""Tests that peak memory is measured for one text, in a process that ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from benchmark.cases import Case
from benchmark.memory import measure_memory, run_in_new_process
from benchmark.options import build_parser
from cli import models
from dynatree import Step
from engine.generation_config import GenerationConfig
from engine.memory import OutOfMemory
from engine.passes import Window
from methods.static import Chain, PaddedAutoregressive


def kill_self() -> dict:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_measured_process_that_is_killed() -> None:
    with pytest.raises(OutOfMemory, match="was killed"):
        run_in_new_process(kill_self)


def sleep_long(file: Path) -> dict:
    """Check that Ctrl-C does not end this process, write its id to a file, and sleep."""
    os.kill(os.getpid(), signal.SIGINT)
    file.write_text(str(os.getpid()))
    time.sleep(60)
    return {}


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_measured_process_ends_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    """Check both signals, because SIGTERM once left the child at work for minutes."""
    file = tmp_path / "number"
    code = "from pathlib import Path; import signal\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # behind & it is ignored
    code += "from test_peak_memory import sleep_long, run_in_new_process\n"
    code += f"run_in_new_process(sleep_long, Path({str(file)!r}))"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    pipe = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=pipe) as parent:
        while parent.poll() is None and not (file.exists() and file.read_text()):
            time.sleep(0.01)
        child = int(file.read_text())
        assert is_running(child)
        parent.send_signal(number)
    deadline = time.monotonic() + 300
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_memory_is_measured_as_the_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the generation config of a strict row, a row over a window and a row without a draft.
    The caches of a window have the same size however long the text is."""
    real = models.generate
    seen = []

    def generate(*args: object, **how: object) -> Iterator[Step]:
        seen.append((args[1] is not None, args[3]))
        return real(*args, **how)

    monkeypatch.setattr(models, "generate", generate)
    needed = []
    args = build_parser().parse_args([])
    for text, n in (("ar window=8", 20), ("ar window=8", 40), ("linear strict", 3)):
        case = Case(text, "builtin", 3, n, 0.0)
        metrics, ids = measure_memory(args, case, [3, 1, 4], 0, 0)
        needed.append(metrics["weights_and_caches_mb"])
        assert len(ids) == n
    assert needed[0] == needed[1] < needed[2]
    assert seen[1:] == [
        (False, GenerationConfig(PaddedAutoregressive(), window=Window(8, 4))),
        (True, GenerationConfig(Chain(), strict=True)),
    ]
