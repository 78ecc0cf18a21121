"""bench.py: every table end to end, fairness, exactness, resuming, and mistakes."""

import functools
import json
import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, random_config, random_model, random_tensors

import bench
from bench import Bench, main
from benchmark import enlarged
from benchmark.memory import in_own_process, measure_memory
from benchmark.options import build_parser, name_file, open_table, warn_of_positions
from benchmark.peers import PEERS, Peers, check_vocabularies
from benchmark.report import table_cells
from benchmark.results import Results, Run
from benchmark.rows import choose_runs, parse_run, settings_of
from benchmark.step_times import (
    StepTimes,
    copy_bandwidth,
    interpolate,
    measure_step_times,
    predict_text_ms,
    step_bytes,
)
from benchmark.tables import TABLES, Part, Table, choose_parts, with_controls
from benchmark.turns import Turn, Turns, take_turns
from cli import models
from cli.errors import UsageError
from cli.models import Pair
from draft_tree import DynaTree, Settings
from dynatree import Step
from engine.checkpoint import read_config
from engine.files import locked
from engine.memory import OutOfMemory
from engine.streaming import WHOLE_TEXT, Window
from gpt_neox import GPTNeoX
from methods import METHODS
from methods.static import Alone, Chain, Fixed

Captured = pytest.CaptureFixture[str]
MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc"}
PROMPTS = {"dataset": "builtin", "n": 1}
SIZES = {"prompt_tokens": [150], "new_tokens": [64], "temperature": [0.0]}
LICENSE = Path(__file__).parent.parent / "LICENSE"
FEW = ["--n-prompts", "2", "--prompt-tokens", "12", "--new-tokens", "6"]
TARGET = str(TINY / "target")
DRAFT = str(TINY / "draft")
QUICK = FEW + ["--target", DRAFT, "--draft", DRAFT]  # where the text is of no matter


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single forwards are timed once; what is made of the times, more often, is tested apart."""
    quick = functools.partial(measure_step_times, n_rounds=1)
    monkeypatch.setattr(bench, "measure_step_times", quick)


def run_bench(capsys: Captured, file: Path, *arguments: str) -> tuple[Results, str]:
    """A table that must be measured: its results and what was printed."""
    status = main(list(arguments) + ["--output", str(file)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return Results.load(file), captured.out


def error_line(capsys: Captured, *arguments: str) -> str:
    """The message of a call that must fail as every mistake does."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert captured.out == "" and "Traceback" not in captured.err and last.startswith("error: ")
    return last


SEVERAL = "linear,dynatree,dyspec,recycle,auto"
SMALL = {  # what makes a table quick, beside QUICK
    "main": ["--target", TARGET],
    "steps": ["--n-prompts", "1"],
    "length": ["--new-tokens", "4,9", "--methods", SEVERAL],
    "prompt": ["--prompt-tokens", "4,9", "--methods", SEVERAL],
    "sampling": ["--n-prompts", "1"],
    "sweep": ["--methods", ",".join(TABLES["sweep"].parts[0].methods[::20])],  # some of the hundred
    "memory": ["--n-prompts", "1", "--methods", "ar", "--threads", "1"],  # a process each
}


@pytest.mark.parametrize("table", TABLES)
def test_every_table(table: str, capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = ["--table", table] + QUICK + SMALL.get(table, [])
    results, printed = run_bench(capsys, file, *options)
    assert len(results.records) == len(results.runs) * results.prompts["n"]
    for row in results.rows():
        assert len(row.records) == results.prompts["n"] and row.run.label in printed
        assert row.differing() == []
        for record in row.records.values():
            assert len(record["token_ids"]) == row.run.new_tokens
            assert all(math.isfinite(value) for value in record["metrics"].values())
    header, body = table_cells(results)
    assert all(len(cells) == len(header) for cells in body)
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert main(["--show", str(file)]) == 0
    assert capsys.readouterr().out == printed


def test_the_main_table_in_markdown(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = FEW + ["--methods", "linear K=2, dynatree tau=0.1 rebuild"]
    options += ["--columns", "throughput,exact", "--format", "markdown"]
    results, printed = run_bench(capsys, file, *options)
    ar, linear, dynatree = results.runs
    assert (ar.label, linear.label) == ("ar", "linear K=2")
    assert dynatree.label == "dynatree tau=0.1 rebuild"
    assert dynatree.commit == "rebuild" and dynatree.settings == ("tau=0.1",)
    assert "| linear K=2 | " in printed and "token for token" in printed
    assert set(results.setup_s) == {run.label for run in results.runs}
    assert results.machine["commit"] and not results.step_times
    columns = ["--columns", "speedup,peak", "--format", "markdown"]
    assert main(["--show", str(file)] + columns) == 0
    assert "| method | x ar | peak MB |" in capsys.readouterr().out


def test_sampled_runs_have_a_seed_for_every_prompt(capsys: Captured, tmp_path: Path) -> None:
    few = QUICK + ["--methods", "linear", "--temperature", "1", "--new-tokens", "8"]
    few += ["--n-prompts", "1", "--columns", "exact"]

    def texts(*options: str) -> list[list[int]]:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        results, _ = run_bench(capsys, file, *few, *options)
        return [r["token_ids"] for r in results.records if r["run"] == "linear"]

    (text,) = texts()
    assert texts() == [text]
    assert texts("--seed", "7") != [text]
    first, second = texts("--repeats", "2")
    assert first == text and second != text


@pytest.mark.parametrize("table", TABLES.values())
def test_every_row_of_a_table_is_a_valid_run(table: Table) -> None:
    runs = choose_runs(table)
    for run in runs:
        settings_of(run)
    if table.parts[0].methods:
        assert runs[0].method == "ar"
    else:
        assert runs == []


def test_runs_take_turns_prompt_by_prompt() -> None:
    runs = choose_runs(TABLES["main"], "ar,linear,fixed")
    turns = take_turns(runs, {"builtin": range(2)}, 2)
    order = [(turn.repeat, turn.prompt, turn.run.label) for turn in turns]
    assert order == [
        (0, 0, "ar"),
        (0, 0, "linear"),
        (0, 0, "fixed"),
        (0, 1, "linear"),
        (0, 1, "fixed"),
        (0, 1, "ar"),
        (1, 0, "fixed"),
        (1, 0, "ar"),
        (1, 0, "linear"),
        (1, 1, "ar"),
        (1, 1, "linear"),
        (1, 1, "fixed"),
    ]


def stop_after(n: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the n-th measured text after the warm-up raise."""
    real = Bench.measure
    turns = []

    def measure(self: Bench, turn: Turn) -> dict:
        turns.append(turn)
        if len(turns) == n:
            raise error
        return real(self, turn)

    monkeypatch.setattr(Bench, "measure", measure)


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    options = QUICK + ["--repeats", "2", "--columns", "speedup,exact", "--methods", "ar,linear"]
    whole, _ = run_bench(capsys, tmp_path / "whole.json", *options)
    with monkeypatch.context() as patch:
        stop_after(6, KeyboardInterrupt(), patch)
        assert main(options + ["--output", str(file)]) == 130
    captured = capsys.readouterr()
    assert "python bench.py --resume" in captured.err and "x ar" in captured.out
    done = Results.load(file).records
    assert len(done) == 5
    assert main(["--resume", str(file)]) == 0
    capsys.readouterr()
    resumed = Results.load(file)
    assert resumed.records[:5] == done

    def texts(results: Results) -> list[tuple]:
        return [(r["repeat"], r["prompt"], r["run"], r["token_ids"]) for r in results.records]

    assert texts(resumed) == texts(whole) and len(texts(whole)) == 2 * 2 * 2
    assert main(["--resume", str(file)]) == 0  # complete: nothing is run again
    assert Results.load(file).records == resumed.records


def test_an_error_half_way_keeps_what_is_done(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_after(3, OutOfMemory("too large"), monkeypatch)
    file = tmp_path / "r.json"
    assert main(QUICK + ["--columns", "exact", "--output", str(file)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: too large; these lower it: a 16-bit --dtype")
    assert len(Results.load(file).records) == 2


def test_nothing_measured_leaves_no_file(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_after(1, OutOfMemory("too large"), monkeypatch)
    file = tmp_path / "made" / "r.json"
    options = QUICK + ["--columns", "exact", "--output", str(file)]
    assert "too large" in error_line(capsys, *options)
    assert not list((tmp_path / "made").iterdir())


BRIEF = QUICK + ["--columns", "exact", "--methods", "ar,linear"]


def begun(capsys: Captured, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """A results file that was begun and not measured, as a run that was killed leaves it."""
    with monkeypatch.context() as patch:
        stop_after(1, KeyboardInterrupt(), patch)
        patch.setattr("benchmark.options.remove_unless_begun", lambda file: None)
        assert main(BRIEF + ["--output", str(file)]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n") and file.exists()


def test_an_interrupted_resume_keeps_a_file_that_was_only_begun(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was deleted, as one is that this very run began."""
    file = tmp_path / "r.json"
    begun(capsys, monkeypatch, file)
    with monkeypatch.context() as patch:
        stop_after(1, KeyboardInterrupt(), patch)
        assert main(["--resume", str(file)]) == 130
    assert "interrupted\n" in capsys.readouterr().err and file.exists()
    assert main(["--resume", str(file)]) == 0 and len(Results.load(file).records) == 4


@pytest.mark.parametrize("where", ["cut_all", "Results.save", "Bench"])
def test_an_interrupted_set_up_leaves_no_file_and_is_told(
    where: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    module = "bench" if where == "Bench" else "benchmark.options"
    monkeypatch.setattr(f"{module}.{where}", interrupt)
    assert main(BRIEF + ["--output", str(tmp_path / "r.json")]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_the_table_is_shown(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everything is measured and saved, and still the status tells of it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "show", interrupt)
    assert main(BRIEF + ["--output", str(tmp_path / "r.json")]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert len(Results.load(tmp_path / "r.json").records) == 4


def test_a_run_that_is_stopped_deletes_nothing_that_another_wrote(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    other, _ = run_bench(capsys, tmp_path / "other.json", *BRIEF)

    def replace_and_stop(self: Bench) -> None:
        os.replace(tmp_path / "other.json", file)
        raise OutOfMemory("too large")

    monkeypatch.setattr(Bench, "set_up", replace_and_stop)
    assert main(BRIEF + ["--output", str(file)]) == 2
    assert Results.load(file) == other


def test_one_file_is_written_by_one_run(capsys: Captured, tmp_path: Path) -> None:
    """Two with one --output, or two that go on with one, left what one of them had measured."""
    pytest.importorskip("fcntl")
    file = tmp_path / "r.json"
    with locked(file):
        line = error_line(capsys, *BRIEF, "--output", str(file))
        assert "r.json is being written by another run" in line and not file.exists()
    run_bench(capsys, file, *BRIEF)
    (tmp_path / "link.json").symlink_to("r.json")
    before = file.read_bytes()
    with locked(file):
        for name in ("r.json", "link.json"):
            line = error_line(capsys, "--resume", str(tmp_path / name))
            assert f"{name} is being written by another run" in line
    assert file.read_bytes() == before
    assert main(["--resume", str(tmp_path / "link.json")]) == 0
    assert (tmp_path / "link.json").is_symlink()


def test_runs_of_one_second_have_files_of_their_own() -> None:
    args = build_parser().parse_args([])
    assert name_file(args) != name_file(args)


def test_a_full_disk_keeps_the_file_and_shows_the_table(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    real = os.replace
    n_left = [3]

    def replace(draft: Path, place: Path) -> None:
        n_left[0] -= 1
        if n_left[0] < 0:
            raise OSError(28, "No space left on device")
        real(draft, place)

    monkeypatch.setattr(os, "replace", replace)
    assert main(BRIEF + ["--output", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1
    assert captured.err.endswith("r.json cannot be written: No space left on device\n")
    assert "results in" not in captured.err and "1/1" in captured.out, "the last text, too"
    assert len(Results.load(file).records) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_how_to_go_on_can_be_pasted(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the folder one stands in, whatever the name of the file."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "-my results.json"
    stop_after(2, KeyboardInterrupt(), monkeypatch)
    assert main(BRIEF + [f"--output={file.name}"]) == 130
    command = shlex.split(capsys.readouterr().err.splitlines()[-1].partition("to go on: ")[2])
    assert command[0] == "python" and command[2:] == ["--resume", "./-my results.json"]
    assert Path(command[1]).resolve() == Path(bench.__file__).resolve()


def test_a_plan_of_any_length_is_no_list() -> None:
    """A thousand million rounds took all memory before the first text."""
    runs = choose_runs(TABLES["main"], "ar,linear")
    results = Results("main", [], {"repeats": 10**9}, {}, {}, {}, runs)
    turns = Turns(results, {"builtin": [[3], [1], [4]]})
    for prompt in range(2):
        turns.add([{"repeat": 0, "prompt": prompt, "run": "ar"}])
    assert turns.n_missing() == 6 * 10**9 - 2 and turns.is_missing_some()
    found = [(turn.prompt, turn.run.label) for turn in islice(turns.missing(), 3)]
    assert found == [(0, "linear"), (1, "linear"), (2, "ar")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a results file says of one text."""
    file = tmp_path_factory.mktemp("finished") / "r.json"
    options = FEW + ["--n-prompts", "1", "--methods", "ar", "--columns", "exact"]
    assert main(options + ["--device", "cpu", "--output", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"threads": [1]}}, "argument --threads: invalid int value"),
        ({"options": {"threads": 2.5}}, "argument --threads: invalid int value"),
        ({"options": {"target": True}}, "argument --target: expected one argument"),
        ({"options": {"strict": "yes"}}, "argument --strict: ignored explicit argument"),
        ({"options": {"help": True}}, "there is no option 'help'"),
        ({"options": {"output": "x"}}, "mix two conditions: columns was"),
        ({"columns": ["none"]}, "mix two conditions: columns was ['none']"),
        ({"sizes": {"prompt_tokens": [], "new_tokens": [], "temperature": []}}, "sizes was"),
        ({"runs": []}, "speaks of 'ar', which is no run of it"),
        ({"runs": [], "records": []}, "the rows were others"),
    ],
)
def test_resume_believes_nothing(
    changes: dict, message: str, finished: dict, capsys: Captured, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(finished | changes))
    assert message in error_line(capsys, "--resume", str(file))


@pytest.mark.parametrize(("key", "value"), [("prompt", 1), ("repeat", 1), ("token_ids", [4096])])
def test_resume_takes_no_record_of_another_table(
    key: str, value: object, finished: dict, capsys: Captured, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    (record,) = finished["records"]
    file.write_text(json.dumps(finished | {"records": [record | {key: value}]}))
    assert "record 0 is of another table" in error_line(capsys, "--resume", str(file))


@pytest.mark.parametrize(("gap", "status"), [(0.3, 1), (1e-5, 0), (None, 1)])
def test_a_text_that_is_not_ars_is_reported(
    gap: float | None,
    status: int,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In float32 a difference is an error, unless the target's own choice was a near-tie."""
    real = models.generate

    def wrong(*args: object, **options: object) -> list[Step]:
        steps = list(real(*args, **options))
        if not isinstance(args[3], Alone):
            steps[1].tokens[0] += 1
        return steps

    monkeypatch.setattr(models, "generate", wrong)
    monkeypatch.setattr(bench, "top2_gap", lambda *_: gap)
    file = tmp_path / "r.json"
    options = QUICK + ["--methods", "linear", "--columns", "exact", "--output", str(file)]
    assert main(options) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert "linear differs from ar on prompt 0 from token 1 on (top-2 gap" in printed
    assert ("a tie" in printed) == (status == 0)
    record = Results.load(file).records[1]
    assert record["difference"] == {"at": 1, "gap": gap, "is_tie": status == 0}


def test_resume_refuses_other_conditions(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    run_bench(capsys, file, *QUICK, "--methods", "ar", "--columns", "throughput")
    content = json.loads(file.read_text())
    content["machine"]["torch"] = "1.0"
    file.write_text(json.dumps(content))
    assert "torch was 1.0" in error_line(capsys, "--resume", str(file))
    assert "exists already" in error_line(capsys, "--output", str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "none"], "unknown table 'none'; there are main, "),
        (["--output", "/"], "/ is there and is no file"),
        (["--output", "/dev/null"], "/dev/null is there and is no file"),
        (["--methods", "none"], "unknown method 'none'; there are ar, "),
        (["--methods", "ar,,fixed"], "a part of the list is empty"),
        (["--methods", "fixed,fixed"], "names a row twice"),
        (["--methods", "fixed D=0"], "D=0 is outside 1 to 127"),
        (["--methods", "fixed X=1"], "has no 'X'"),
        (["--methods", "hf-ar D=1"], "hf-ar takes no settings"),
        (["--methods", "ar eager", "--device", "cpu"], '"eager" has no effect on cpu'),
        (["--columns", "none"], "unknown column 'none'; there are throughput, "),
        (["--dataset", "none"], "unknown dataset 'none'; there are builtin, wikitext2"),
        (["--prompts", "none.txt"], "none.txt is not there"),
        (["--prompts", "none.txt", "--dataset", "wikitext2"], "either --dataset or --prompts"),
        (["--new-tokens", "0"], "whole numbers of 1 or more"),
        (["--new-tokens", "9" * 10], "whole numbers of 1 or more"),
        (["--prompt-tokens", "5,5"], "names a size twice"),
        (["--temperature", "0,0"], "names one twice"),
        (["--temperature", "nan"], "temperature nan is not a positive number"),
        (["--temperature", "0.5", "--top-p", "2"], "top-p 2.0 is outside (0, 1]"),
        (["--seed", "1"], "--seed needs a --temperature above 0"),
        (["--draft-temperature", "1"], "--draft-temperature needs a --temperature above 0"),
        (["--temperature", "0,1", "--draft-temperature", "1"], "no guess of fixed t=1.0 is drawn"),
        (["--n-prompts", "0"], "at least 1"),
        (["--repeats", "0"], "--repeats 0: 1 to 1000000000000"),
        (["--repeats", "1" + "0" * 400], ": 1 to 1000000000000"),
        (["--table", "prompt", "--prompts", str(LICENSE)], "no prompt of 1000 tokens or more"),
        (["--table", "steps", "--methods", "ar"], "runs no methods"),
        (["--table", "steps", "--new-tokens", "4,5"], "at one length"),
        (["--table", "memory", "--methods", "hf-ar"], "does not measure hf-ar"),
        (["--peers", "--temperature", "1"], "at temperature 0 only"),
        (["--methods", "fixed D=3 D=4"], "'fixed D=3 D=4' says something twice"),
        (["--output", ""], "--output"),
        (["--output", "none/" + "x" * 300], "cannot be written: File name too long"),
        (["--temperature", "1", "--seed", str(2**63 - 8)], "the last would have 92"),
        (
            ["--temperature", "1", "--repeats", str(10**12), "--seed", str(2**63 - 10**12)],
            "the last would have 92",
        ),
        (["--show", "none.json"], "none.json is not there"),
        (["--show", "none.json", "--repeats", "2"], "--repeats has no effect beside --show"),
        (["--resume", "none.json"], "none.json is not there"),
        (["--resume", "none.json", "--table", "steps"], "--table has no effect beside --resume"),
        (["--docs", "none.json", "--seed", "1"], "--seed has no effect beside --docs"),
        (["--docs", "none.json"], "none.json is not there"),
        (["--target", "none/none"], "--target also needs --draft"),
        (["--window", "63"], "fixed window=63: --window 63: 64 to 1635"),
        (["--methods", "linear window=5"], "linear window=5: --window 5: 6 to 1635"),
        (["--methods", "linear window=x"], "'linear window=x': window takes a whole number"),
        (["--methods", "linear sinks=4"], "'linear sinks=4': sinks need a window"),
        (["--sinks", "4"], "sinks need a window"),
        (["--window", "64", "--peers"], "hf-lookup have no --window"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: Captured) -> None:
    assert message in error_line(capsys, *arguments)


def test_what_a_table_shows_beside_on_a_gpu_and_in_half_precision() -> None:
    (main_part,) = with_controls(TABLES["main"], True, True, True).parts
    assert main_part.methods == tuple(METHODS) + ("ar rows=16", "ar eager")
    assert with_controls(TABLES["main"], False, False, False) == TABLES["main"]
    memory = with_controls(TABLES["memory"], True, True, True)
    assert memory.columns[-2:] == ["pools", "context"]
    assert with_controls(TABLES["steps"], True, True, True) == TABLES["steps"]
    runs = choose_runs(TABLES["main"], "ar eager,dynatree tau=0.1 rebuild eager")
    assert [run.is_eager for run in runs] == [False, True, True]
    assert runs[2].settings == ("tau=0.1",) and runs[2].commit == "rebuild"


def test_half_precision_on_the_cpu(capsys: Captured, tmp_path: Path) -> None:
    """The control is a row of its own; a text that differs is no error there."""
    few = ["--n-prompts", "1", "--prompt-tokens", "8", "--new-tokens", "3"]
    few += ["--dtype", "bfloat16", "--columns", "exact"]
    results, printed = run_bench(capsys, tmp_path / "r.json", *few)
    assert [run.label for run in results.runs] == list(METHODS) + ["ar rows=16"]
    assert "ar rows=16" in printed


def test_peers_need_transformers(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = error_line(capsys, *QUICK, "--peers")
    assert "hf-ar, hf-assisted, hf-lookup need transformers: pip install transformers" in line


def test_each_peer_asks_for_its_own_way() -> None:
    """Of a model that only notes what it was asked for; all of them greedily."""
    asked = []

    def note(prompt: torch.Tensor, **options: object) -> None:
        asked.append(options)

    peers = SimpleNamespace(target=SimpleNamespace(generate=note), draft="draft", device="cpu")
    for name in PEERS:
        Peers.decode(peers, name, [3, 1], 4)
    ways = []
    for options in asked:
        assert not options.pop("do_sample")
        assert options.pop("max_new_tokens") == 4
        del options["streamer"]
        ways.append(options)
    assert ways == [{}, {"assistant_model": "draft"}, {"prompt_lookup_num_tokens": 10}]


def test_a_warning_past_the_trained_positions(pair: Pair, capsys: Captured) -> None:
    part = Part(("ar",), prompt_tokens=(5, 28), new_tokens=(100,))
    runs = choose_runs(Table("", [], (part,)))
    warn_of_positions(pair, runs)
    longer = replace(runs[-1], new_tokens=101)
    warn_of_positions(pair, runs + [replace(longer, window=64)])
    assert capsys.readouterr().err == ""
    warn_of_positions(pair, runs + [longer])
    assert "warning: up to 129 tokens" in capsys.readouterr().err


def test_interpolation() -> None:
    at = {0: 0.0, 1: 10.0, 1.5: 15.0, 2: 20.0, 3: 25.0, 4: 30.0, 8: 50.0}
    for x, y in at.items():
        assert interpolate([1, 2, 4], [10.0, 20.0, 30.0], x) == y


def test_predicted_time_is_the_forwards_alone() -> None:
    times = StepTimes(200, [1, 2, 4], [10.0, 20.0, 30.0], [1.0, 2.0, 3.0], 0, 0, 1.0)
    assert times.predict_ms({1: 3, 2: 1}, {3: 2}) == 3 * 1.0 + 2.0 + 2 * 25.0


def test_step_bytes_are_every_matrix_but_the_input_embedding() -> None:
    """As it is stored: of a float32 model, numbers that float16 has take two bytes."""
    hidden = 32
    wide = 64
    n_ids = 96
    layer = (hidden + 1) * (3 * hidden + wide) + (hidden + wide + 1) * hidden
    head = (hidden + 1) * n_ids
    cache = 2 * 2 * 10 * hidden  # keys and values, layers, tokens
    model = random_model(0)
    assert step_bytes(model, 10) == 4 * (2 * layer + head + cache)
    model.pool.is_shaped = True  # then a cache has slots to spare, which no step reads
    assert step_bytes(model, 10) == 4 * (2 * layer + head + cache)
    tensors = {name: t.half().float() for name, t in random_tensors(random_config(), 0).items()}
    n_biases = 2 * (3 * hidden + wide + hidden) + n_ids
    half = 2 * (2 * layer + head + n_biases) + 4 * cache
    assert step_bytes(GPTNeoX.from_tensors(random_config(), tensors), 10) == half


def test_no_memory_for_the_copy_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest thing that the main table takes, and the one that can be left out."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(OutOfMemory, match="268.4 MB .for table steps and column predicted"):
        copy_bandwidth(torch.device("cpu"))


def test_measured_step_times_cover_every_width() -> None:
    times = measure_step_times(random_model(0), random_model(1), context=5)
    assert times.rows[-1] == 128 and len(times.draft_ms) == len(times.target_ms) == 8
    assert min(times.draft_ms + times.target_ms + [times.copy_gb_s]) > 0


def test_predicted_passes_are_padded_as_each_models_own_are(pair: Pair, tmp_path: Path) -> None:
    """The draft's were padded as the target's. Here a forward takes a millisecond a row."""
    run = replace(choose_runs(TABLES["main"], "linear K=2")[1], prompt_tokens=5, new_tokens=9)
    results = Results("main", [], {"repeats": 1, "seed": 0}, {}, {}, {}, [run])
    times = StepTimes(5, [1, 128], [1.0, 128.0], [1.0, 128.0], 0, 0, 1.0)
    pair.target.pool.min_rows = 4
    pair.draft.pool.min_rows = 16
    one = Bench(results, pair, {"builtin": [[3, 1, 4, 1, 5]]}, tmp_path / "r.json")
    steps = one.decode(Turn(0, 0, run))
    rows = [n for step in steps for n in step.draft_rows]
    assert len(rows) > 4 and max(rows) < 16
    expected = 4 * (len(steps) - 1) + 16 * len(rows)
    assert predict_text_ms(times, run, pair, steps) == pytest.approx(expected)


def kill_oneself() -> dict:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_measured_process_that_is_killed() -> None:
    with pytest.raises(OutOfMemory, match="was killed"):
        in_own_process(kill_oneself)


def sleep_long(file: Path) -> dict:
    """Tell one's own number, and that Ctrl-C is not for this process."""
    os.kill(os.getpid(), signal.SIGINT)
    file.write_text(str(os.getpid()))
    time.sleep(60)
    return {}


def interrupt_when_there(file: Path) -> None:
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_measured_process_does_not_outlive_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "number"
    threading.Thread(target=interrupt_when_there, args=(file,), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        in_own_process(sleep_long, file)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_ctrl_c_while_a_process_is_started_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ignored there, and the table went on."""
    started = []
    real = BaseProcess.start

    def start(self: BaseProcess) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(self)
        started.append(self)

    monkeypatch.setattr(BaseProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        in_own_process(time.sleep, 60)
    assert [process.exitcode for process in started] == [-signal.SIGKILL]


def test_peers_of_several_vocabularies(pair: Pair) -> None:
    """Pythia-12B with 70M ended in a traceback of transformers, after other rows were measured."""
    check_vocabularies(list(PEERS), pair)
    pair = replace(pair, draft=random_model(1, vocab_size=97))
    check_vocabularies(["ar", "hf-ar", "hf-lookup"], pair)
    with pytest.raises(UsageError, match="one vocabulary size, not 96 and 97; leave it out"):
        check_vocabularies(list(PEERS), pair)


@pytest.fixture
def pair() -> Pair:
    load_s = {"target": 0.5, "draft": 0.25}
    return Pair(random_model(0), random_model(1), None, Path(), None, load_s)


def test_set_up_is_told_apart_from_speed(pair: Pair, tmp_path: Path) -> None:
    """Loading and warming up, by what the method needs; no record comes of it."""
    runs = []
    for run in choose_runs(TABLES["main"], "ar,linear"):
        runs.append(replace(run, prompt_tokens=5, new_tokens=4, baseline="ar"))
    results = Results("main", ["throughput"], {"repeats": 1, "seed": 0}, {}, {}, {}, runs)
    one = Bench(results, pair, {"builtin": [[3, 1, 4, 1, 5]]}, tmp_path / "r.json")
    one.set_up()
    before = dict(results.setup_s)
    pair.load_s["draft"] += 100
    one.set_up()
    assert results.setup_s["linear"] > before["linear"] + 90
    assert results.setup_s["ar"] < before["ar"] + 90 and results.records == []


def test_peers_are_loaded_in_their_own_set_up_and_take_turns(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a stand-in for transformers, which repeats the prompt's first id."""

    class Repeating:
        def __init__(self, pair: Pair):
            time.sleep(0.1)

        def decode(self, name: str, prompt: list[int], max_new_tokens: int) -> list[Step]:
            return [Step([prompt[0]], verify_ms=1.0) for _ in range(max_new_tokens)]

    monkeypatch.setattr(bench, "Peers", Repeating)
    results = Results("main", ["exact"], {"repeats": 1, "seed": 0}, MACHINE, PROMPTS, SIZES, [])
    for name in ("ar", "hf-ar"):
        results.runs.append(Run(name, name, (), "keep", 2, 4, 0.0, "ar", dataset="own"))
    one = Bench(results, pair, {"own": [[3, 1, 4]]}, tmp_path / "r.json")
    one.measure_all()
    assert results.setup_s["hf-ar"] >= 0.1
    ar, peer = Results.load(tmp_path / "r.json").records
    assert peer["token_ids"] == [3] * 4 and len(ar["token_ids"]) == 4
    assert "depths" in ar and "depths" not in peer
    assert not one.is_exact()


def test_a_run_is_what_its_label_says() -> None:
    run = parse_run("fixed D=3  B=4 rebuild window=64 sinks=2")
    label = "fixed D=3 B=4 rebuild window=64 sinks=2"
    expected = Run(label, "fixed", ("D=3", "B=4"), "rebuild", 0, 0, 0.0, "", window=64, sinks=2)
    assert run == expected and settings_of(run) == Fixed(D=3, B=4)
    assert parse_run("linear K=3 strict").is_strict and parse_run("ar eager").is_eager


def test_strict_rows_are_held_against_strict_ar() -> None:
    """At as many rows a pass: added once for each number of rows, after ar; plain rows are not."""
    methods = "dynatree,dynatree strict,linear K=3 strict,fixed strict rebuild,ar rows=4 strict"
    runs = choose_runs(Table("", [], (Part((), new_tokens=(4, 8)),)), methods)
    assert [(run.label, run.reference) for run in runs[:7]] == [
        ("ar T=4", "ar T=4"),
        ("ar strict rows=64 T=4", "ar strict rows=64 T=4"),
        ("ar strict rows=4 T=4", "ar strict rows=4 T=4"),
        ("dynatree T=4", "ar T=4"),
        ("dynatree strict T=4", "ar strict rows=64 T=4"),
        ("linear K=3 strict T=4", "ar strict rows=4 T=4"),
        ("fixed strict rebuild T=4", "ar strict rows=64 T=4"),
    ]
    assert runs[7].reference == runs[2].label and len(runs) == 16
    assert {run.baseline for run in runs} == {"ar T=4", "ar T=8"}
    assert [run.is_strict for run in runs[:5]] == [False, True, True, False, True]
    asked = choose_runs(TABLES["main"], "linear K=3 strict,ar strict rows=4,ar strict")
    labels = ["ar", "linear K=3 strict", "ar strict rows=4", "ar strict"]
    assert [run.label for run in asked] == labels


def test_a_whole_table_can_be_strict(capsys: Captured, tmp_path: Path) -> None:
    runs = choose_runs(TABLES["main"], "ar,linear K=3,fixed strict,hf-ar", everywhere=["strict"])
    labels = ["ar", "ar strict rows=4", "ar strict rows=64", "ar strict", "linear strict K=3"]
    assert [run.label for run in runs] == labels + ["fixed strict", "hf-ar"]
    options = ["--methods", "linear", "--columns", "exact", "--strict"]
    results, _ = run_bench(capsys, tmp_path / "r.json", *QUICK, *options)
    assert [run.label for run in results.runs] == ["ar", "ar strict rows=8", "linear strict"]


def test_what_a_draft_temperature_is_for(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sampled runs; ar draws from no draft, and greedy runs draw nothing."""
    real = models.generate
    seen = {}

    def generate(*args: object, **options: object) -> Iterator[Step]:
        sampling = options["sampling"]
        seen[type(args[3]), sampling is None] = sampling
        return real(*args, **options)

    monkeypatch.setattr(models, "generate", generate)
    options = QUICK + ["--methods", "linear", "--temperature", "0,0.8", "--columns", "exact"]
    options += ["--draft-temperature", "0.5"]
    results, _ = run_bench(capsys, tmp_path / "r.json", *options)
    assert [run.draft_temperature for run in results.runs] == [None, None, None, 0.5]
    sampling = seen[Chain, False]
    assert (sampling.temperature, sampling.draft_temperature) == (0.8, 0.5)
    assert len(seen) == 4


def spy_on_strict(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, bool]]:
    """What every text is generated with from now on."""
    real = models.generate
    seen = []

    def generate(*args: object, **options: object) -> Iterator[Step]:
        seen.append((args[3], options["strict"]))
        return real(*args, **options)

    monkeypatch.setattr(models, "generate", generate)
    return seen


def test_the_enlarged_pair_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    """Under the embedded pair's cost here; what is there stays, and what fails is said."""
    monkeypatch.setattr(enlarged, "FOLDER", tmp_path / "enlarged")
    monkeypatch.setattr(enlarged, "SHAPES", {"target": (640, 6), "draft": (256, 2)})
    monkeypatch.setattr(enlarged, "VOCABULARY", 4100)
    folders = enlarged.enlarged_pair()
    assert [read_config(Path(folder)).hidden_size for folder in folders] == [640, 256]
    times = [os.stat(Path(folder) / "config.json").st_mtime_ns for folder in folders]
    assert enlarged.enlarged_pair() == folders
    assert times == [os.stat(Path(folder) / "config.json").st_mtime_ns for folder in folders]
    assert capfd.readouterr().err.count("making the enlarged pair") == 1
    monkeypatch.setattr(enlarged, "FOLDER", tmp_path / "other")
    monkeypatch.setattr(enlarged, "SHAPES", {"target": (641, 6)})
    with pytest.raises(UsageError, match="could not be made; the line above says why"):
        enlarged.enlarged_pair()
    assert "can be enlarged to two or more times hidden size 320" in capfd.readouterr().err


def test_a_strict_row_is_generated_strictly(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = spy_on_strict(monkeypatch)
    options = QUICK + ["--methods", "linear,linear strict"]
    options += ["--columns", "speedup,predicted,exact"]
    results, printed = run_bench(capsys, tmp_path / "r.json", *options, "--dtype", "bfloat16")
    expected = {(Alone(), False), (Alone(rows=8), True), (Chain(), False), (Chain(), True)}
    assert set(seen) == expected
    cells = {row[0]: row[1:] for row in table_cells(results)[1]}
    assert cells["ar strict rows=8"][0].endswith("x") and cells["linear strict"][0].endswith("x")
    assert cells["ar strict rows=8"][2] == "" and cells["linear strict"][2] == "2/2"
    assert cells["linear strict"][1] == "", "single forwards are timed without it"
    assert "A strict row is held against strict ar with as many rows a pass." in printed


def test_memory_of_a_strict_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy_on_strict(monkeypatch)
    options = {name: None for name in ("target", "draft", "device", "dtype", "threads")}
    options |= {"draft_dtype": None, "no_graphs": False}
    for run in choose_runs(TABLES["memory"], "ar strict,dynatree"):
        measure_memory(options, replace(run, new_tokens=3), [3, 1, 4], None, 0)
    assert seen == [(Alone(), False), (Alone(), True), (DynaTree(), False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_strict_text_that_differs_is_wrong_whatever_the_gap(
    dtype: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain ar's text is of no matter to it, nor that the target's choice was a tie."""
    real = models.generate
    wrong = set()

    def generate(*args: object, **options: object) -> list[Step]:
        steps = list(real(*args, **options))
        if (args[3], options["strict"]) in wrong:
            steps[1].tokens[0] += 1
        return steps

    monkeypatch.setattr(models, "generate", generate)
    monkeypatch.setattr(bench, "top2_gap", lambda *_: 1e-6)
    options = QUICK + ["--methods", "linear strict", "--columns", "exact", "--dtype", dtype]
    wrong.add((Alone(), False))
    assert main(options + ["--output", str(tmp_path / "right.json")]) == 0
    assert "Every greedy text is ar's" in capsys.readouterr().out
    wrong.add((Chain(), True))
    assert main(options + ["--output", str(tmp_path / "wrong.json")]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "linear strict differs from ar strict rows=8 on " in printed


def test_files_from_before_there_was_strict(capsys: Captured, tmp_path: Path) -> None:
    """Each run's reference is its baseline."""
    file = tmp_path / "r.json"
    _, printed = run_bench(capsys, file, *QUICK, "--methods", "linear", "--columns", "exact")
    content = json.loads(file.read_text())
    for run in content["runs"]:
        del run["is_strict"], run["reference"]
    del content["options"]["strict"]
    file.write_text(json.dumps(content))
    assert main(["--show", str(file)]) == 0 and capsys.readouterr().out == printed
    assert main(["--resume", str(file)]) == 0 and "2/2" in printed


TWO_PARTS = Table(
    "two datasets",
    ["throughput", "speedup", "exact"],
    (
        Part(("ar", "linear K=2"), n_prompts=2, prompt_tokens=(8,), new_tokens=(4, 6)),
        Part(("ar", "linear K=3"), "wikitext2", 1, prompt_tokens=(12,), new_tokens=(5,)),
    ),
)


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of two datasets, "two", and texts for any of them without a network."""

    def load(dataset: str, *_: object) -> list[str]:
        return [f"{dataset} is what text {n} of it begins with, and so it goes on" for n in "abc"]

    monkeypatch.setitem(TABLES, "two", TWO_PARTS)
    monkeypatch.setattr("benchmark.options.load_prompts", load)


def test_a_table_of_two_datasets(two_parts: None, capsys: Captured, tmp_path: Path) -> None:
    """Each part has its own rows, sizes, prompts and baseline; a label says whose it is."""
    file = tmp_path / "r.json"
    results, printed = run_bench(capsys, file, "--table", "two")
    small = ["ar on builtin T=4", "linear K=2 on builtin T=4"]
    large = ["ar on builtin T=6", "linear K=2 on builtin T=6"]
    others = ["ar on wikitext2", "linear K=3 on wikitext2"]
    assert [run.label for run in results.runs] == small + large + others
    held_against = [small[0]] * 2 + [large[0]] * 2 + [others[0]] * 2
    assert [run.baseline for run in results.runs] == held_against
    assert [run.reference for run in results.runs] == held_against
    counts = [len(row.records) for row in results.rows()]
    assert counts == [2, 2, 2, 2, 1, 1] and len(results.records) == 10
    assert results.prompts["n"] == 3 and results.prompts["dataset"] == "2 builtin, 1 wikitext2"
    assert "3 prompts (2 builtin, 1 wikitext2) of up to 8 / 12 tokens, 4 / 6 / 5 new" in printed
    texts = {record["run"]: record["token_ids"] for record in results.records}
    assert texts["ar on builtin T=4"] != texts["ar on wikitext2"][:4]
    assert main(["--resume", str(file)]) == 0
    assert Results.load(file).records == results.records


def test_turns_go_from_dataset_to_dataset() -> None:
    """And in each another row begins every prompt, from round to round."""
    part = Part(("ar", "linear"))
    parts = (part, replace(part, dataset="pg19"))
    prompts = {"builtin": range(1), "pg19": range(2)}
    turns = take_turns(choose_runs(Table("", [], parts)), prompts, 2)
    order = [f"{turn.repeat} {turn.prompt} {turn.run.label}" for turn in turns]
    assert order == [
        "0 0 ar on builtin",
        "0 0 linear on builtin",
        "0 0 ar on pg19",
        "0 0 linear on pg19",
        "0 1 linear on pg19",
        "0 1 ar on pg19",
        "1 0 linear on builtin",
        "1 0 ar on builtin",
        "1 0 ar on pg19",
        "1 0 linear on pg19",
        "1 1 linear on pg19",
        "1 1 ar on pg19",
    ]


def test_options_change_every_part(two_parts: None, capsys: Captured, tmp_path: Path) -> None:
    options = ["--table", "two", "--new-tokens", "3", "--n-prompts", "1", "--methods", "fixed"]
    results, _ = run_bench(capsys, tmp_path / "r.json", *options)
    labels = ["ar on builtin", "fixed on builtin", "ar on wikitext2", "fixed on wikitext2"]
    assert [run.label for run in results.runs] == labels
    assert [(run.prompt_tokens, run.new_tokens) for run in results.runs[1:3]] == [(8, 3), (12, 3)]
    assert len(results.records) == 4


def test_which_parts_a_dataset_keeps() -> None:
    first, second = TWO_PARTS.parts
    assert choose_parts(TWO_PARTS, None, None) == (first, second)
    assert choose_parts(TWO_PARTS, "wikitext2", None) == (second,)
    assert choose_parts(TWO_PARTS, "pg19", None) == (replace(first, dataset="pg19"),)
    assert choose_parts(TWO_PARTS, None, "a/b.txt") == (replace(first, dataset="b.txt"),)


def test_files_from_before_there_were_datasets(capsys: Captured, tmp_path: Path) -> None:
    """Its runs are on the one dataset that the file names, and it is gone on with there."""
    file = tmp_path / "r.json"
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "The ship sailed at dawn"}\n')
    options = QUICK + ["--n-prompts", "1", "--prompts", str(prompts), "--methods", "linear"]
    results, _ = run_bench(capsys, file, *options, "--columns", "exact")
    content = json.loads(file.read_text())
    del content["is_memory"], content["title"], content["records"][1]
    content["options"]["dataset"] = "builtin"
    for name in ("window", "sinks"):
        del content["options"][name]
    for run in content["runs"]:
        for name in ("dataset", "window", "sinks", "draft_temperature", "published"):
            del run[name]
    file.write_text(json.dumps(content))
    assert main(["--resume", str(file)]) == 0 and "1/1" in capsys.readouterr().out
    resumed = Results.load(file)
    assert resumed.records[1]["token_ids"] == results.records[1]["token_ids"]
    assert [run.dataset for run in resumed.runs] == ["own.jsonl"] * 2


def test_as_many_prompts_as_there_are(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = QUICK + ["--n-prompts", "13", "--new-tokens", "1", "--methods", "ar"]
    assert main(options + ["--columns", "exact", "--output", str(file)]) == 0
    captured = capsys.readouterr()
    assert "note: builtin has 12 prompts, not 13\n" in captured.err
    assert Results.load(file).prompts["n"] == 12 and "12 prompts (builtin)" in captured.out


def test_our_own_prompts_are_written_on(capsys: Captured, tmp_path: Path) -> None:
    """Where a table compares prompt lengths, each is as long as it says, and the caption tells."""
    file = tmp_path / "r.json"
    options = QUICK + ["--table", "prompt", "--prompt-tokens", "4,200", "--new-tokens", "2"]
    options += ["--n-prompts", "1", "--methods", "ar", "--columns", "exact"]
    assert main(options + ["--output", str(file)]) == 0
    captured = capsys.readouterr()
    assert "note: the target writes our own prompts on, to 200 tokens\n" in captured.err
    assert Results.load(file).prompts["dataset"] == "builtin, written on by the target"
    args = build_parser().parse_args(["--resume", str(file)])
    with ExitStack() as held:
        _, _, prompts, _ = open_table(args, held)
    assert [len(prompt) for prompt in prompts["builtin"]] == [200]


@pytest.mark.parametrize("table", ["memory", "main"])
def test_a_file_of_memory_from_before_is_one(table: str, tmp_path: Path) -> None:
    """It had only its table's name; going on with it must not measure speed."""
    file = tmp_path / "r.json"
    results = Results(table, [], {}, MACHINE, PROMPTS, SIZES, [])
    results.save(file)
    content = json.loads(file.read_text())
    del content["is_memory"]
    file.write_text(json.dumps(content))
    assert Results.load(file).is_memory == (table == "memory")


def windows(monkeypatch: pytest.MonkeyPatch) -> list[Window]:
    """The window of every text that is generated from now on."""
    real = models.generate
    seen = []

    def generate(*args: object, **options: object) -> Iterator[Step]:
        seen.append(options["window"])
        return real(*args, **options)

    monkeypatch.setattr(models, "generate", generate)
    return seen


LONG = ["--n-prompts", "1", "--prompt-tokens", "40", "--new-tokens", "60"]


def test_a_row_over_a_window_is_held_against_ar_over_it(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which is not plain ar's text: after 62 tokens the window has dropped some."""
    seen = windows(monkeypatch)
    times = StepTimes(100, [1, 2], [1.0, 1.0], [1.0, 1.0], 1, 1, 1.0)
    monkeypatch.setattr(bench, "measure_step_times", lambda *_: times)
    methods = "linear K=3,linear K=3 window=48 sinks=2,linear K=2 window=48 sinks=2 strict"
    columns = ["--columns", "speedup,predicted,exact"]
    results, _ = run_bench(capsys, tmp_path / "r.json", *LONG, "--methods", methods, *columns)
    labels = ["ar", "ar window=48 sinks=2", "ar strict rows=4 window=48 sinks=2"]
    assert [run.label for run in results.runs[:3]] == labels
    assert [run.reference for run in results.runs[3:]] == labels
    assert {run.baseline for run in results.runs} == {"ar"}
    texts = {row.run.label: row.records[0, 0]["token_ids"] for row in results.rows()}
    assert texts["ar"] != texts["ar window=48 sinks=2"], "no token was dropped"
    assert set(seen) == {WHOLE_TEXT, Window(48, 2)}
    cells = {row[0]: row[1:] for row in table_cells(results)[1]}
    assert cells["linear K=3 window=48 sinks=2"][1] == "", "forwards are timed over a whole text"
    assert [cells[run.label][2] for run in results.runs[3:]] == ["1/1"] * 3


def test_where_a_text_over_a_window_parts_is_looked_at_over_it(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the target chose from there is what its window shows it, not the whole text."""
    real = models.generate
    seen = []

    def wrong(*args: object, **options: object) -> list[Step]:
        steps = list(real(*args, **options))
        if not isinstance(args[3], Alone):
            steps[1].tokens[0] += 1
        return steps

    monkeypatch.setattr(models, "generate", wrong)
    monkeypatch.setattr(bench, "top2_gap", lambda pair, ids, window: seen.append(window))
    options = QUICK + ["--n-prompts", "1", "--columns", "exact"]
    options += ["--methods", "linear,linear window=64", "--output", str(tmp_path / "r.json")]
    assert main(options) == 1
    assert seen == [WHOLE_TEXT, Window(64, 4)]
    printed = " ".join(capsys.readouterr().out.split())
    assert "linear window=64 differs from ar window=64 on prompt 0 from token 1 on" in printed
    assert "A row over a window is held against ar over it" in printed


def test_a_whole_table_over_a_window(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The baseline, too."""
    seen = windows(monkeypatch)
    options = ["--window", "64", "--methods", "linear,fixed sinks=1", "--columns", "speedup,exact"]
    results, _ = run_bench(capsys, tmp_path / "r.json", *QUICK, *options)
    labels = ["ar window=64", "ar window=64 sinks=1", "linear window=64", "fixed window=64 sinks=1"]
    assert [run.label for run in results.runs] == labels
    assert {run.baseline for run in results.runs} == {"ar window=64"}
    assert set(seen) == {Window(64, 4), Window(64, 1)}


def test_memory_of_a_row_over_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its floor has the cache that the window fills, however long the text."""
    seen = windows(monkeypatch)
    options = {name: None for name in ("target", "draft", "device", "dtype", "threads")}
    options |= {"draft_dtype": None, "no_graphs": False}
    floors = []
    for n in (20, 40):
        run = replace(parse_run("ar window=8"), new_tokens=n)
        floors.append(measure_memory(options, run, [3, 1, 4], None, 0)["metrics"]["floor_mb"])
    assert floors[0] == floors[1] and set(seen) == {Window(8, 4)}
