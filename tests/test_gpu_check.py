"""tools/gpu_check.py around parts that stand in for its own: what it refuses, cuts off and leaves.

That its own parts run is shown by its dry run, on a pretended device and by CI on the CPU.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY
from torch.profiler import ProfilerActivity, profile

from tools import gpu_check, gpu_facts
from tools.gpu_check import SECONDS, Part, Worker, ask_all, schedule
from tools.gpu_facts import Lab, Record, Setup, Wrong

ROOT = TINY.parent.parent
Captured = pytest.CaptureFixture[str]


# What stands in for parts; a process of its own imports them from here


def well(lab: Lab, n: int) -> Iterator[Record]:
    yield {"n": n, "pid": os.getpid()}


def finding(lab: Lab) -> Iterator[Record]:
    yield {"rows": 1}
    raise Wrong("a finding")


def failing(lab: Lab) -> int:
    raise RuntimeError("an illegal access\nsomewhere")


def dying(lab: Lab) -> int:
    os._exit(3)


def hanging(lab: Lab) -> Iterator[Record]:
    yield {"begun": True}
    time.sleep(600)


def refusing(lab: Lab) -> int:
    return 2


def setup_in(folder: Path, **changes: object) -> Setup:
    setup = Setup("a process", 4, folder, "target", "draft", "cpu", "float32")
    return replace(setup, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "torch sees no GPU"),
        (["--dry", "tests"], "tests is no checkpoint folder"),
        (["--dry", str(TINY / "draft")], "two folders"),
        (["--dry", "--seconds", "0"], "--seconds 0"),
        (["--dry", "--seconds", "soon"], "--seconds"),
        (["--dry", "--keep", "README.md"], "README.md cannot be made"),
        (["--dry", "--keep="], "is empty"),
        (["--dyr"], "--dyr"),
    ],
)
def test_refused_in_one_line(arguments: list[str], message: str, capsys: Captured) -> None:
    before = set(ROOT.glob("results/*"))
    assert gpu_check.main(arguments) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line and not out
    assert set(ROOT.glob("results/*")) == before


def test_a_python_that_is_not_there() -> None:
    environment = os.environ | {"PYTHON": "python-of-nobody"}
    command = ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--dry"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and "python-of-nobody" in line


@pytest.mark.parametrize("is_dry", [False, True])
def test_all_parts_fit_by_design(is_dry: bool, tmp_path: Path) -> None:
    """Each process's stand together: apart, the pair would be loaded once more."""
    setup = setup_in(tmp_path, name="the pair", seconds=20, device="cuda:0")
    parts = schedule(setup, ["float16", "bfloat16"], is_dry, is_enlarged=True)
    befores = [None, *(part.setup for part in parts)]
    costs = [part.cost(before) for part, before in zip(parts, befores, strict=False)]
    assert sum(costs) <= SECONDS - 10
    changes = [
        part.setup for part, before in zip(parts, befores, strict=False) if part.setup != before
    ]
    assert len(changes) == len(set(changes))
    assert len({part.name for part in parts}) == len(parts)


class Pretended:
    """A worker that takes as long as each part's first argument says, by a clock of the test's."""

    now = 0.0
    limits: list[float] = []
    n_begun = 0

    def __init__(self, setup: Setup):
        self.setup = setup
        Pretended.n_begun += 1

    def ask(self, part: Part, limit: float) -> tuple[str, bool]:
        Pretended.limits.append(limit)
        (seconds,) = part.arguments
        Pretended.now += min(seconds, limit)
        return ("cut off", False) if seconds > limit else ("", True)

    def end(self) -> None:
        """There is no process."""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    monkeypatch.setattr(gpu_check, "Worker", Pretended)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: Pretended.now)
    Pretended.now, Pretended.limits, Pretended.n_begun = 0.0, [], 0
    return Pretended


def parts_of(setups: list[Setup], taken: list[float]) -> list[Part]:
    """Of 10 s each, which take what the second list says."""
    numbered = enumerate(zip(setups, taken, strict=True))
    return [Part(f"part {i}", 10, setup, well, (seconds,)) for i, (setup, seconds) in numbered]


def test_a_part_may_take_what_earlier_ones_left_and_no_later_one_needs(
    pretended: type[Pretended], tmp_path: Path
) -> None:
    """The last part always has its share: the first hangs, then the second takes little."""
    one, other = setup_in(tmp_path), setup_in(tmp_path, name="another")
    parts = parts_of([one, one, other], [99.0, 2.0, 9.0])
    outcomes = ask_all(parts, 50.0, lambda: None)
    assert outcomes == {"part 0": "cut off", "part 1": "", "part 2": ""}
    assert pretended.limits == [26.0, 14.0, 22.0]  # of 50 s, 10 + 14 s and then 14 s are others'
    assert pretended.n_begun == 3  # a new one after what was cut off
    assert pretended.now <= 50.0


def test_what_would_not_fit_is_skipped(
    pretended: type[Pretended], tmp_path: Path, capsys: Captured
) -> None:
    setup = setup_in(tmp_path)
    outcomes = ask_all(parts_of([setup] * 3, [9.0, 9.0, 1.0]), 25.0, lambda: None)
    assert pretended.limits == [14.0, 10.0] and pretended.now <= 25.0
    assert outcomes["part 2"].startswith("skipped") and not outcomes["part 1"]
    assert "== part 2: skipped" in capsys.readouterr().out


def test_no_part_can_stop_another(tmp_path: Path, capfd: Captured) -> None:
    """Whatever becomes of it; what it measured before is there, and the device is not trusted."""
    setup = setup_in(tmp_path)
    asked = [(well, (1,)), (finding, ()), (refusing, ()), (well, (2,))]
    asked += [(failing, ()), (dying, ()), (well, (3,))]
    parts = [
        Part(f"{i} {ask.__name__}", 100, setup, ask, rest) for i, (ask, rest) in enumerate(asked)
    ]
    n_ended = []
    outcomes = ask_all(parts, 10_000, lambda: n_ended.append(len(list(tmp_path.iterdir()))))
    assert list(outcomes.values()) == [
        "",
        "a finding",
        "status 2",
        "",
        "RuntimeError: an illegal access",
        "its process ended with 3",
        "",
    ]
    first, second, third = (record["pid"] for record in json.loads(read(tmp_path / "well.json")))
    assert first == second != third, "a finding is no reason for a new process"
    assert json.loads(read(tmp_path / "finding.json")) == [{"rows": 1}]
    assert n_ended == [1, 2, 2, 2, 2, 2, 2]
    assert "FAILED: a finding" in capfd.readouterr().out


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def test_a_part_that_hangs_is_cut_off(tmp_path: Path) -> None:
    setup = setup_in(tmp_path)
    worker = Worker(setup)
    assert worker.ask(Part("well", 1, setup, well, (1,)), 300) == ("", True)
    assert worker.ask(Part("hanging", 1, setup, hanging), 1.0) == ("cut off after 1 s", False)
    worker.end()
    assert worker.process.exitcode == -signal.SIGKILL
    assert json.loads(read(tmp_path / "hanging.json")) == [{"begun": True}]


# What it leaves

PROGRAM = """
import sys, test_gpu_check
from tools import gpu_check
gpu_check.schedule = test_gpu_check.parts_that_{}
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def parts_that_end(setup: Setup, *_: object) -> list[Part]:
    return [Part("the first", 60, setup, well, (1,)), Part("another", 60, setup, refusing)]


def parts_that_hang(setup: Setup, *_: object) -> list[Part]:
    return [Part("the first", 60, setup, well, (1,)), Part("another", 60, setup, hanging)]


def start(name: str, keep: Path) -> subprocess.Popen:
    """A dry run of other parts, in a group of its own."""
    paths = [str(ROOT), str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(name), "--dry", "--keep", str(keep)],
        env=environment | {"TMPDIR": str(keep.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_files_and_the_log_are_kept_to_the_end(tmp_path: Path) -> None:
    out, err = start("end", tmp_path / "kept").communicate(timeout=300)
    assert "1 of 2 parts are done" in out and "error: another: status 2" in out and not err
    kept = {file.name: read(file) for file in (tmp_path / "kept").iterdir()}
    assert kept.keys() == {"log.txt", "well.json"}
    assert kept["log.txt"] == out
    assert [file.name for file in tmp_path.iterdir()] == ["kept"], "a dry run leaves nothing"


@pytest.mark.parametrize(("number", "is_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_keeps_what_was_measured(number: int, is_group: bool, tmp_path: Path) -> None:
    """And nothing is left that runs."""
    process = start("hang", tmp_path / "kept")
    while not list(tmp_path.glob("gpu_check_*/hanging.json")):
        assert process.poll() is None
        time.sleep(0.05)
    pid = json.loads(read(tmp_path / "kept" / "well.json"))[0]["pid"]
    (os.killpg if is_group else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    kept = {file.name for file in (tmp_path / "kept").iterdir()}
    assert kept == {"log.txt", "well.json", "hanging.json"}
    assert "== another" in out and "Traceback" not in out


def test_a_table_is_published_beside_earlier_ones(tmp_path: Path) -> None:
    table, results = tmp_path / "every.json", tmp_path / "results"
    results.mkdir()
    table.write_text('{"machine": {"processor": "NVIDIA H100 80GB HBM3"}}')
    (results / "gpu_h100_80gb_hbm3.json").write_text("earlier")
    (results / "gpu_h100_80gb_hbm3_2.json").symlink_to("nowhere")
    gpu_check.publish(table, results)
    assert read(results / "gpu_h100_80gb_hbm3_3.json") == read(table)
    assert read(results / "gpu_h100_80gb_hbm3.json") == "earlier"
    assert os.readlink(results / "gpu_h100_80gb_hbm3_2.json") == "nowhere"


def test_a_profile_without_kernels_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second session of a process may see none, and its table shows nothing but the host."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(100).sum()
    assert gpu_facts.kernels(found)["aten::sum"] == 1
    monkeypatch.setattr(gpu_facts, "profiled_kind", lambda: ProfilerActivity.CUDA)
    with pytest.raises(Wrong, match="no kernel"):
        gpu_facts.kernels(found)
