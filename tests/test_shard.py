"""--shard prompts: several ranks write what one would, and one that dies costs only its prompt."""

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
from conftest import pretend_one_gpu

import bench
from bench import Bench, main
from benchmark import shard
from benchmark.columns import COLUMNS, TIMED, TIMES
from benchmark.options import build_parser, restarted
from benchmark.report import caption
from benchmark.results import Results
from benchmark.shard import on_own_device
from benchmark.sharing import require_alike
from benchmark.turns import Turn
from cli.errors import UsageError
from engine.memory import OutOfMemory

ROOT = Path(__file__).parent.parent
UNTIMED = ["--columns", "tokens_per_iter,acceptance,exact"]
SHORT = UNTIMED + ["--methods", "linear", "--prompt-tokens", "12", "--threads", "1"]
FEW = SHORT + ["--n-prompts", "5", "--new-tokens", "8", "--repeats", "2"]


def texts(file: Path) -> list[tuple]:
    """Of which turns a file has texts, and the texts, in its order."""
    return [
        (r["repeat"], r["prompt"], r["run"], r["token_ids"]) for r in Results.load(file).records
    ]


def without_ranks(file: Path) -> dict:
    """What several ranks and one must say alike: all but ranks, times and the ids, whose place
    here their number takes."""
    content = json.loads(file.read_text())
    del content["shared_by"], content["setup_s"]
    for record in content["records"]:
        record.pop("rank", None)
        record["metrics"] = sorted(set(record["metrics"]) - set(TIMES))
        record["token_ids"] = len(record["token_ids"])
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
            process.join(60)
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
    for record in results.records:
        assert results.shared_by[record["rank"]]["device"] == "cpu"
        assert not set(record["metrics"]) & set(TIMES)
    assert "shared out over 3 ranks." in " ".join(printed.split()) and "10/10" in printed
    assert "token for token" in printed and printed.count("results in") == 1


def hurt(index: int) -> None:
    """Rank 1 is killed at its second text, rank 2 fails at its first; rank 0 lets them come there,
    and does not wait for long."""
    shard.BEAT_S = 0.2
    shard.LOST_S = 2.0
    measure = Bench.measure
    n_texts = [0]

    def hurting(self: Bench, turn: Turn) -> dict:
        n_texts[0] += 1
        if index == 1 and n_texts[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2:
            raise OutOfMemory("there is none")
        if index == 0 and n_texts[0] == 1:
            while self.shard.store.add("taken", 0) < 3:
                time.sleep(0.01)
        return measure(self, turn)

    bench.Bench.measure = hurting


def test_a_rank_that_dies_costs_its_prompt(
    alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others write all else, rank 0 says what is lacking, and one process makes it good."""
    file = tmp_path / "r.json"
    statuses, printed = share(3, tmp_path, *FEW, "--output", str(file), change=hurt)
    assert statuses == [2, -signal.SIGKILL, 0], printed
    lines = printed.splitlines()
    assert lines[-1].startswith("error: rank 1: not heard of for 2 s; rank 2: there is none; these")
    assert "; 3 texts are lacking (builtin " in printed
    again = printed.partition("; to go on: ")[2]
    assert again.startswith("torchrun --nproc-per-node 3 bench.py --resume "), printed
    assert again.splitlines()[0].endswith(" --shard prompts")
    lacking = set(tuple(text[:2]) for text in texts(alone) if text not in texts(file))
    assert len(lacking) == 2 and len(texts(file)) == len(texts(alone)) - 3
    before = Results.load(file).records
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun --nproc-per-node 1
    assert main(["--resume", str(file), "--shard", "prompts"]) == 0
    assert texts(file) == texts(alone) and without_ranks(file) == without_ranks(alone)
    assert all(record in Results.load(file).records for record in before)
    assert len(Results.load(file).shared_by) == 3


def end_one(index: int) -> None:
    """Rank 1 is ended from outside in its second text, once rank 0 has one to go on with."""
    measure = Bench.measure
    n_texts = [0]

    def ending(self: Bench, turn: Turn) -> dict:
        n_texts[0] += 1
        while index == 0 and self.shard.store.add("taken", 0) < 2:
            time.sleep(0.01)
        if index == 1 and n_texts[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, turn)

    bench.Bench.measure = ending


def test_sigterm_is_no_ctrl_c(alone: Path, tmp_path: Path) -> None:
    """A rank that is ended by it, as some watch over memory does, costs its prompt like any that
    fails, and torchrun must not end the others for it. It was taken for Ctrl-C, with status 130."""
    file = tmp_path / "r.json"
    statuses, printed = share(2, tmp_path, *FEW, "--output", str(file), change=end_one)
    assert statuses == [2, 0], printed
    last = printed.splitlines()[-1]
    assert last.startswith("error: rank 1: ended by SIGTERM") and "interrupted" not in printed
    assert len(texts(file)) == len(texts(alone)) - 1


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGTERM, 2, "error: ended by SIGTERM (torchrun sends it if a rank has gone)"),
        (signal.SIGINT, 130, "interrupted"),
    ],
)
def test_rank_0_that_is_ended_says_by_what(
    number: signal.Signals, status: int, said: str, tmp_path: Path
) -> None:
    """What there is of the table is saved and shown."""
    file = tmp_path / "r.json"
    change = functools.partial(end_rank_0, number)
    statuses, printed = share(2, tmp_path, *FEW, "--output", str(file), change=change)
    assert statuses[0] == status, printed
    lines = printed.splitlines()
    assert [line for line in lines if line in (said, "interrupted")] == [said]
    assert sum("error" in line for line in lines) == (status == 2)
    assert len(texts(file)) >= 2 and "texts are lacking (builtin " in printed
    assert "tok/iter" in printed and not list(tmp_path.glob(".*.lock"))


def end_rank_0(number: int, index: int) -> None:
    """Send rank 0 a signal in its third text."""
    measure = Bench.measure
    n_texts = [0]

    def ending(self: Bench, turn: Turn) -> dict:
        n_texts[0] += 1
        if index == 0 and n_texts[0] == 3:
            os.kill(os.getpid(), number)
        while index == 1 and self.shard.store.add("taken", 0) < 3:
            time.sleep(0.01)
        return measure(self, turn)

    bench.Bench.measure = ending


def test_without_rank_0_the_others_end(alone: Path, tmp_path: Path) -> None:
    """It is killed, and torchrun's store with it, as where rank 0 keeps that. They have nobody to
    write for, nor to tell of it: status 70 said that nobody foresaw this. What it had is there to
    go on with, and its lock keeps nobody out."""
    start = time.monotonic()
    change = functools.partial(end_rank_0, signal.SIGKILL)
    file = tmp_path / "r.json"
    statuses, printed = share(3, tmp_path, *FEW, "--output", str(file), change=change)
    assert statuses == [-signal.SIGKILL, 2, 2] and "error" not in printed
    assert time.monotonic() - start < 30 and 2 <= len(texts(file)) < len(texts(alone))
    assert main(["--resume", str(file)]) == 0
    assert texts(file) == texts(alone) and not list(tmp_path.glob(".*.lock"))


def rank_of(process: int) -> str:
    """The rank of a process that torchrun has started, from its environment; "" as yet."""
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    found = [word for word in variables if word.startswith(b"RANK=")]
    return found[0].decode() if found else ""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a rank as on Linux")
def test_under_torchrun(tmp_path: Path) -> None:
    """As users start it. A rank is killed and torchrun ends the other: what was written is kept;
    then it starts both again: they go on with it. They found what the first had left in torchrun's
    store, took other prompts for finished, and texts were lacking."""
    file = tmp_path / "r.json"
    table = SHORT + ["--n-prompts", "4", "--new-tokens", "100"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [
        "--max-restarts",
        "1",
        "bench.py",
        "--shard",
        "prompts",
        *table,
        "--output",
        str(file),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            while process.poll() is None and not (file.exists() and texts(file)):
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for child in children.split():
                if rank_of(int(child)) == "RANK=1":
                    os.kill(int(child), signal.SIGKILL)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == ["error: ended by SIGTERM (torchrun sends it if a rank has gone)"], err
    assert "interrupted" not in err and err.count("texts are lacking (builtin ") == 1, err
    assert out.count("tok/iter") == 2 and out.count("4/4") == 1, out
    assert [text[1] for text in texts(file)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "exact,speedup,draft"], "each other's times (speedup, draft); without"),
        (["--table", "steps"], "--table steps is measured by one process"),
        (["--table", "memory"], "--table memory is measured by one process"),
        (["--device", "cuda:0"], "--device cuda:0: with --shard each rank has a device"),
        (["--show", "r.json"], "--shard has no effect beside --show"),
    ],
)
def test_what_cannot_be_shared(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if "--device" in words:
        pretend_one_gpu(monkeypatch)
    assert main(["--shard", "prompts", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["--shard", "prompts"]) == 2
    assert "as torchrun starts them: torchrun --nproc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": {"torch": "2", "device": "cuda:1"}}, "rank 1 has torch 2, rank 0 1"),
        ({"prompts": {"n": 2}}, "rank 1 has other prompts"),
        ({"problem": "there is no disk"}, "rank 1: there is no disk"),
    ],
)
def test_ranks_that_differ(change: dict, message: str) -> None:
    first = {"machine": {"torch": "1", "device": "cuda:0", "processor": "A"}, "prompts": {"n": 1}}
    with pytest.raises(UsageError, match=message):
        require_alike([first, first | change], has_times=True)
    other = first | {"machine": first["machine"] | {"device": "cuda:1", "processor": "B"}}
    require_alike([first, other], has_times=False)
    with pytest.raises(UsageError, match="processor B"):
        require_alike([first, other], has_times=True)


def test_torchrun_that_starts_all_again_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    args = build_parser().parse_args(["--shard", "prompts", "--output", str(file)])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restarted(args) is args
    file.touch()
    again = restarted(args)
    assert (again.resume, again.output, again.shard) == (str(file), None, "prompts")


def test_columns_of_times_are_those_that_times_are_needed_for(alone: Path) -> None:
    results = Results.load(alone)
    for record in results.records:
        record["predicted_ms"] = 1.0
    empty = [{name for name in COLUMNS if not COLUMNS[name].cell(results.rows()[1])}]
    results.setup_s = {}
    for record in results.records:
        for name in TIMES:
            del record["metrics"][name]
    empty.append({name for name in COLUMNS if not COLUMNS[name].cell(results.rows()[1])})
    assert empty[1] - empty[0] == set(TIMED)


def test_a_file_says_whose_each_text_is(alone: Path, tmp_path: Path) -> None:
    content = json.loads(alone.read_text())
    rank = {"rank": 0, "node": 0, "device": "cpu", "processor": "A"}
    content["shared_by"] = [rank, rank | {"rank": 1, "processor": "B"}]
    content["records"][0]["rank"] = 1
    file = tmp_path / "r.json"
    file.write_text(json.dumps(content))
    assert "shared out over 2 ranks on A and B." in caption(Results.load(file))
    content["records"][0]["rank"] = 2
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="is of a rank that is not described"):
        Results.load(file)


def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_one_gpu(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for words, device in (([], "cuda:3"), (["--device", "cpu"], "cpu")):
        args = build_parser().parse_args(["--shard", "prompts", *words])
        assert on_own_device(args).device == device
    assert on_own_device(build_parser().parse_args([])).device is None
