"""--shard prompts: several ranks write what one would, and one that dies costs only its text."""

import functools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bench
from bench import Bench, main
from benchmark.columns import COLUMNS, RATES, TIMES
from benchmark.results import Results
from benchmark.shard import require_alike
from benchmark.writer import Text
from cli.errors import UsageError

ROOT = Path(__file__).parent.parent
UNTIMED = ["--columns", "tokens_per_iter,acceptance,exact"]
SHORT = UNTIMED + ["--methods", "linear", "--prompt-tokens", "12", "--threads", "1"]
FEW = SHORT + ["--n-prompts", "5", "--new-tokens", "8", "--repeats", "2"]


def texts(file: Path) -> list[tuple]:
    """Of which turns a file has texts, and the texts."""
    records = Results.load(file).records
    return sorted((r["repeat"], r["prompt"], r["run"], r["token_ids"]) for r in records)


def without_ranks(file: Path) -> dict:
    """What several ranks and one must say alike: all but ranks, times, load and the ids, whose
    place here their number takes."""
    content = json.loads(file.read_text())
    del content["shared_by"], content["setup_s"], content["load_before"]
    for record in content["records"]:
        record.pop("rank", None)
        record["metrics"] = sorted(set(record["metrics"]) - set(RATES + TIMES))
        record["token_ids"] = len(record["token_ids"])
    content["records"].sort(key=json.dumps)
    return content


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a single process."""
    file = tmp_path_factory.mktemp("alone") / "r.json"
    assert main(FEW + ["--output", str(file)]) == 0
    return file


def take_part(
    index: int, count: int, port: int, place: Path, change: Callable, words: list
) -> None:
    """One rank, as any launcher starts it; what it prints goes to a file."""
    values = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "MASTER_PORT": port}
    for name, value in values.items():
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with open(place / f"printed_{index}", "w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    torch.set_num_threads(1)
    change(index)
    sys.exit(main(words))


def nothing(index: int) -> None:
    """Leave a rank as it is."""


def share(count: int, place: Path, *words: str, change: Callable = nothing) -> tuple[list, str]:
    """A table by so many ranks, without torchrun, which would end all with the first: their exit
    statuses, and what rank 0 printed, which must be all that is."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once
    context.set_forkserver_preload(["bench", "pytest"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for index in range(count):
        own = (index, count, port, place, change, ["--shard", "prompts", *words])
        processes.append(context.Process(target=take_part, args=own))
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
    finally:
        for process in processes:
            process.kill()
    for index in range(1, count):
        assert (place / f"printed_{index}").read_text() == ""
    printed = (place / "printed_0").read_text()
    return [process.exitcode for process in processes], printed


def test_several_write_what_one_writes(alone: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    statuses, printed = share(3, tmp_path, *FEW, "--output", str(file))
    assert statuses == [0, 0, 0], printed
    assert texts(file) == texts(alone) and without_ranks(file) == without_ranks(alone)
    results = Results.load(file)
    assert [rank["rank"] for rank in results.shared_by] == [0, 1, 2] and results.setup_s == {}
    assert all(record["rank"] == record["prompt"] % 3 for record in results.records)
    for record in results.records:
        assert results.shared_by[record["rank"]]["device"] == "cpu"
        assert not set(record["metrics"]) & set(RATES + TIMES)
    assert "shared out over 3 ranks, " in " ".join(printed.split()) and "10/10" in printed
    assert "token for token" in printed and printed.count("results in") == 1


def end_one(number: int, index: int) -> None:
    """Rank 1 is ended from outside in its third text."""
    measure = Bench.measure
    n_texts = 0

    def ending(self: Bench, text: Text) -> dict:
        nonlocal n_texts
        n_texts += 1
        if index == 1 and n_texts == 3:
            os.kill(os.getpid(), number)
        return measure(self, text)

    bench.Bench.measure = ending


def test_a_rank_that_is_killed_leaves_its_file(alone: Path, tmp_path: Path) -> None:
    """Rank 0 keeps and shows its own texts, and --resume takes up those of the other."""
    file = tmp_path / "r.json"
    change = functools.partial(end_one, signal.SIGKILL)
    statuses, printed = share(2, tmp_path, *FEW, "--output", str(file), change=change)
    assert statuses == [2, -signal.SIGKILL], printed
    last = printed.splitlines()[-1]
    assert last.startswith("error: rank 1 has gone") and " are lacking; to go on: " in printed
    before = texts(file), texts(tmp_path / "r.rank1.json")
    assert len(before[1]) == 2
    assert main(["--resume", str(file)]) == 0
    assert texts(file) == texts(alone) and all(text in texts(file) for text in sum(before, []))
    assert [other.name for other in tmp_path.glob("*.json")] == ["r.json"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank as on Linux")
def test_ctrl_c_under_torchrun(alone: Path, tmp_path: Path) -> None:
    """As users start and end it: every rank has kept what it wrote."""
    file = tmp_path / "r.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["bench.py", "--shard", "prompts", *SHORT, "--output", str(file)]
    words += ["--n-prompts", "6", "--new-tokens", "400"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    other = tmp_path / "r.rank1.json"
    with subprocess.Popen(command + words, cwd=ROOT, start_new_session=True, **pipes) as process:
        try:
            while process.poll() is None and not (file.exists() and other.exists()):
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()
    assert "interrupted" in err and " are lacking; to go on: torchrun" in err, err
    assert texts(file) and texts(other) and "tok/iter" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "exact,speedup,draft"], "each other's times (speedup, draft); without"),
        (["--table", "steps"], "--table steps is measured by one process"),
        (["--table", "memory"], "--table memory is measured by one process"),
    ],
)
def test_what_cannot_be_shared(words: list[str], message: str, tmp_path: Path) -> None:
    statuses, printed = share(2, tmp_path, *words, "--output", str(tmp_path / "r.json"))
    assert statuses == [2, 2] and message in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2", "device": "cuda:1"}, "rank 1 has torch 2, rank 0 1"),
        ({"prompts": {"n": 2}}, "rank 1 has prompts"),
        ({"processor": "B"}, "rank 1 has processor B"),
        ({"device": "cuda:1"}, ""),
    ],
)
def test_ranks_that_differ(changes: dict, message: str) -> None:
    """But in their device; and without times, in their processor."""
    machine = {"torch": "1", "device": "cuda:0", "processor": "A"}
    said = machine | {"prompts": {"n": 1}} | changes
    if message:
        with pytest.raises(UsageError, match=message):
            require_alike(1, said, ({}, machine, {"n": 1}), has_times=True)
    if changes.keys() <= {"device", "processor"}:
        require_alike(1, said, ({}, machine, {"n": 1}), has_times=False)


def test_columns_of_times_are_those_that_times_are_needed_for(alone: Path) -> None:
    results = Results.load(alone)
    for record in results.records:
        record["predicted_ms"] = 1.0
    empty = [{name for name in COLUMNS if not COLUMNS[name].cell(results.rows()[1])}]
    results.setup_s = {}
    for record in results.records:
        for name in RATES + TIMES:
            del record["metrics"][name]
    empty.append({name for name in COLUMNS if not COLUMNS[name].cell(results.rows()[1])})
    assert empty[1] - empty[0] == {name for name in COLUMNS if COLUMNS[name].is_timed}
