"""bench.py: every table end to end, fairness, exactness, resuming, and mistakes."""

import functools
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Captured, error_line, random_model
from test_observing import Watching

import bench
from bench import Bench, Text, main
from benchmark import enlarged
from benchmark.opening import open_table
from benchmark.report import table_cells
from benchmark.results import FORMAT, Options, Results, key_of
from benchmark.rows import choose_runs, parse_run, way_of
from benchmark.step_times import measure_step_times
from benchmark.tables import TABLES, Part, Table, with_controls
from cli.errors import UsageError
from cli.metrics import token_ids
from cli.models import Pair
from engine.checkpoint import read_config
from engine.decoding import Step
from engine.files import locked
from engine.memory import OutOfMemory
from engine.streaming import Window
from engine.way import Way
from methods.sampler import Sampling
from methods.static import Chain

DRAFT = str(TINY / "draft")
QUICK = ["--n-prompts", "2", "--prompt-tokens", "12", "--new-tokens", "6"]
QUICK += ["--target", DRAFT, "--draft", DRAFT]  # where the text is of no matter
BRIEF = QUICK + ["--columns", "exact", "--methods", "ar,linear"]


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single forwards are timed once; what is made of the times, more often, is tested apart."""
    quick = functools.partial(measure_step_times, n_rounds=1)
    monkeypatch.setattr("benchmark.counts.measure_step_times", quick)


def run_bench(capsys: Captured, file: Path, *arguments: str) -> tuple[Results, str]:
    """A table that must be measured: its results and what was printed."""
    status = main(list(arguments) + ["--output", str(file)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return Results.load(file), captured.out


SEVERAL = "linear,dynatree,dyspec,recycle,auto"
SMALL = {  # what makes a table quick, beside QUICK
    "main": ["--target", str(TINY / "target")],
    "steps": ["--n-prompts", "1"],
    "length": ["--new-tokens", "4,9", "--methods", SEVERAL],
    "prompt": ["--prompt-tokens", "4,9", "--methods", SEVERAL],
    "sampling": ["--n-prompts", "1"],
    "sweep": ["--methods", ",".join(TABLES["sweep"].parts[0].rows[::20])],  # some of the hundred
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
            ids = results.token_ids[record["ids_at"]]
            assert len(ids) == (0 if row.run.temperature else row.run.new_tokens)
            assert all(math.isfinite(value) for value in record["metrics"].values())
    assert all(len(line) <= 80 for line in printed.splitlines())
    if table == "steps":
        assert results.step_times.rows == [1, 2, 4, 8, 16, 32, 64, 128]
    if hasattr(os, "getloadavg"):
        assert f"load {results.load_before:.2f} as it began" in " ".join(printed.split())
    assert results.machine["commit"] and bool(results.setup_s) == (table not in ("steps", "memory"))
    assert main(["--show", str(file)]) == 0
    assert capsys.readouterr().out == printed


def test_runs_take_turns_and_every_text_has_a_seed(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All runs on a prompt before the next, each time another one first; the seed is another for
    every prompt and round, and the same for every method and call. Of sampled texts no ids
    are kept, as none is held against another."""
    written = []

    def note(steps: list[Step]) -> list[int]:
        written.append(token_ids(steps))
        return written[-1]

    monkeypatch.setattr(bench, "token_ids", note)
    few = QUICK + ["--methods", "ar,linear,fixed", "--temperature", "1", "--columns", "exact"]
    results, _ = run_bench(capsys, tmp_path / "a.json", *few, "--repeats", "2")
    order = [f"{r['repeat']} {r['prompt']} {r['run']}" for r in results.records]
    assert order == [
        *("0 0 ar", "0 0 linear", "0 0 fixed"),
        *("0 1 linear", "0 1 fixed", "0 1 ar"),
        *("1 0 fixed", "1 0 ar", "1 0 linear"),
        *("1 1 ar", "1 1 linear", "1 1 fixed"),
    ]
    of_ar = {str(written[i]) for i, text in enumerate(order) if text.endswith(" ar")}
    assert len(of_ar) == 4, "two prompts, two rounds"
    assert results.token_ids == [[]] and "calibration" not in results.records[1]
    run_bench(capsys, tmp_path / "b.json", *few)
    assert written[12:] == written[:6]
    run_bench(capsys, tmp_path / "c.json", *few, "--seed", "7")
    assert written[18:] != written[:6]


@pytest.mark.parametrize(
    ("n", "error", "status", "said"),
    [
        (6, KeyboardInterrupt(), 130, "interrupted\nresults in .*; 3 texts are lacking"),
        (3, OutOfMemory("too large"), 2, "error: too large; these lower it: a 16-bit --dtype"),
        (1, OutOfMemory("too large"), 2, "error: too large"),
    ],
)
def test_what_ends_a_table_keeps_what_is_done(
    n: int,
    error: BaseException,
    status: int,
    said: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It is shown, and the command that is printed goes on with it, whatever the file's name."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "-my results.json"
    options = BRIEF + ["--repeats", "2"]
    real = Bench.measure

    def measure(self: Bench, text: Text) -> dict:
        if len(self.results.records) == n - 1:
            raise error
        return real(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "measure", measure)
        assert main(options + [f"--output={file.name}"]) == status
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and "Traceback" not in captured.err
    assert ("exact" in captured.out) == file.exists() == (n > 1)
    if n == 1:
        assert list(tmp_path.iterdir()) == [], "nothing was measured, and nothing is left"
        return
    done = Results.load(file).records
    assert len(done) == n - 1
    line = next(line for line in captured.err.splitlines() if "to go on: " in line)
    python, script, *words = shlex.split(line.partition("to go on: ")[2])
    assert python == "python" and Path(script).resolve() == Path(bench.__file__).resolve()
    assert main(words) == 0
    resumed = Results.load(file)
    whole, _ = run_bench(capsys, tmp_path / "whole.json", *options)
    assert resumed.records[: n - 1] == done and resumed.token_ids == whole.token_ids
    assert [key_of(r) for r in resumed.records] == [key_of(r) for r in whole.records]
    assert main(words) == 0 and Results.load(file) == resumed, "nothing is measured again"


def test_a_table_goes_on_in_another_folder(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was refused there, as its prompts and models were named from the first one."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "One text"}\n')
    models = ["--target", os.path.relpath(DRAFT), "--draft", os.path.relpath(DRAFT)]
    file = tmp_path / "r.json"
    run_bench(capsys, file, *BRIEF, *models, "--prompts", "p.jsonl")
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert main(["--resume", str(file)]) == 0
    assert Results.load(file).machine["draft"] == str(Path("models", "tiny", "draft"))


def test_a_full_disk_keeps_the_file_and_shows_the_table(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [os.replace] * 2

    def replace(draft: Path, place: Path) -> None:
        if not left:
            raise OSError(28, "No space left on device")
        left.pop()(draft, place)

    monkeypatch.setattr(os, "replace", replace)
    line = "r.json cannot be written: No space left on device\n"
    assert main(BRIEF + ["--output", str(tmp_path / "r.json")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1 and captured.err.endswith(line)
    assert "1/1" in captured.out and len(Results.load(tmp_path / "r.json").records) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_one_file_is_written_by_one_run(capsys: Captured, tmp_path: Path) -> None:
    """Two with one --output, or two that go on with one, left what one of them had measured."""
    file = tmp_path / "r.json"
    with locked(file):
        line = error_line(capsys, main, [*BRIEF, f"--output={file}"])
    assert "is being written by another run" in line
    run_bench(capsys, file, *BRIEF)
    with locked(file):
        assert "is being written by another run" in error_line(capsys, main, [f"--resume={file}"])
    assert "exists already" in error_line(capsys, main, [*BRIEF, f"--output={file}"])


def test_resume_goes_on_under_the_same_conditions_alone(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    finished, _ = run_bench(capsys, file, *BRIEF, "--n-prompts", "1")
    changes = {
        "torch was 1.0": {"machine": finished.machine | {"torch": "1.0"}},
        "the prompts were others": {"prompts": finished.prompts | {"sha256": "0"}},
        "the columns were others": {"columns": ["speedup"]},
    }
    for message, changed in changes.items():
        replace(finished, **changed).save(file)
        before = file.read_bytes()
        line = error_line(capsys, main, ["--resume", str(file)])
        assert line.endswith(f"--resume would mix two conditions: {message}")
        assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("difference", "label", "dtype", "status"),
    [
        (None, "linear", "float32", 1),
        ({"at": 2, "gap": 1e-5, "is_tie": True}, "linear", "float32", 0),
        (None, "linear", "bfloat16", 0),
        ({"at": 2, "gap": 1e-5, "is_tie": True}, "linear strict", "bfloat16", 1),
    ],
)
def test_a_text_that_is_not_its_references(
    difference: dict | None, label: str, dtype: str, status: int, capsys: Captured, tmp_path: Path
) -> None:
    """In float32 an error, unless the target's own choice was a near-tie; of a strict row, whose
    reference is strict ar, an error whatever the precision and the gap."""
    file = tmp_path / "r.json"
    results, _ = run_bench(capsys, file, *BRIEF, "--methods", label, "--dtype", dtype)
    (record,) = [r for r in results.records if r["run"] == label and r["prompt"] == 1]
    ids = list(results.token_ids[record["ids_at"]])
    ids[2] += 1
    record["ids_at"] = results.place_of(ids)
    record |= {"difference": difference} if difference else {}
    results.save(file)
    assert main(["--resume", str(file)]) == status
    printed = " ".join(capsys.readouterr().out.split())
    reference = "ar strict rows=8" if "strict" in label else "ar"
    where = "on 1 of 2 texts, the first on prompt 1, from token 2 at the earliest"
    assert f"{label} differs from {reference} {where}" in printed and "1/2" in printed
    (row,) = [row for row in Results.load(file).rows() if row.run.label == label]
    ((record, _),) = row.differing()
    assert record["difference"]["at"] == 2
    assert difference in (None, record["difference"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "none"], "unknown table 'none'; there are main, "),
        (["--table", "dyspec-4"], "is not here: it needs 768 rows a tree, and MAX_ROWS is 128"),
        (["--output", "/dev/null"], "/dev/null exists already; name another, or go on with it"),
        (["--output", "none/" + "x" * 300], "cannot be written: File name too long"),
        (["--methods", "none"], "unknown method 'none'; there are ar, "),
        (["--methods", "ar,,fixed"], "a part of the list is empty"),
        (["--methods", "fixed,fixed"], "names a row twice"),
        (["--methods", "fixed X=1"], "has no 'X'"),
        (["--methods", "hf-ar D=1"], "hf-ar takes no settings"),
        (["--methods", "linear window=5"], "linear window=5: window=5: 6 to 816"),
        (["--methods", "linear block"], "linear block: greedy text has one acceptance"),
        (["--baseline", " "], "unknown method ''"),
        (["--columns", "none"], "unknown column 'none'; there are throughput, "),
        (["--dataset", "none"], "unknown dataset 'none'; there are builtin, wikitext2"),
        (["--prompts", "none.txt", "--dataset", "wikitext2"], "either --dataset or --prompts"),
        (
            ["--table", "prompt", "--prompts", str(ROOT / "LICENSE")],
            "no prompt of 1000 tokens or more",
        ),
        (["--new-tokens", "0"], "Expected `int` >= 1, at --new-tokens"),
        (["--new-tokens", "9" * 12], "these lower it: a 16-bit --dtype, fewer --new-tokens"),
        (["--prompt-tokens", "5,5"], "'5,5' names one twice"),
        (["--seed", "1"], "--seed needs a --temperature above 0"),
        (["--table", "steps", "--methods", "ar"], "runs no methods"),
        (["--peers", "--temperature", "1"], "measured for speed alone, at temperature 0"),
        (["--show", "none.json", "--repeats", "2"], "--repeats has no effect beside --show"),
        (["--resume", "none.json"], "none.json is not there"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line(capsys, main, arguments)


def test_what_the_memory_table_has_beside_on_a_gpu() -> None:
    memory = with_controls(TABLES["memory"], is_cuda=True, is_half=False)
    assert memory.columns[-2:] == ("pools", "context")


def test_memory_is_measured_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--table memory is measured by one process"):
        open_table(Options(table="memory"))


def test_peers_need_transformers(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = error_line(capsys, main, [*QUICK, "--peers"])
    assert "hf-ar, hf-assisted, hf-lookup need transformers: pip install transformers" in line


def test_set_up_is_told_apart_by_what_a_method_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for transformers, which repeats the prompt's first id."""

    class Repeating:
        def __init__(self, pair: Pair):
            self.load_s = 20.0

        def decode(self, name: str, prompt: list[int], n_new: int, n_steps: int | None) -> list:
            return [Step([prompt[0]], verify_ms=1.0) for _ in range(n_steps or n_new)]

    monkeypatch.setattr(bench, "Peers", Repeating)
    load_s = {"target": 50.0, "draft": 100.0}
    pair = Pair(random_model(0), random_model(1), None, Path(), None, load_s)
    part = Part(("ar", "linear", "hf-ar"), "own", prompt_tokens=(2,), new_tokens=(4,))
    runs = choose_runs(Table("", (), (part,)), Options())
    results = Results(FORMAT, "", [], Options(), {}, {}, {}, runs)
    table = Bench(results, pair, {"own": [[3, 1]]}, Path())
    table.warm_up()
    ar, linear, peer = results.setup_s.values()
    assert 20 <= peer < 50 <= ar < 100 <= linear
    record = table.measure(Text(runs[2], 0, 0))
    assert results.token_ids == [[3] * 4] and record["metrics"]["throughput"] == 1000


def test_a_table_over_a_drafter_that_is_no_model(tmp_path: Path) -> None:
    """Its draft has no forwards that could be timed alone, so nothing is predicted."""
    pair = Pair(random_model(0), Watching(), None, Path(), None, {"target": 1.0, "draft": 0.0})
    part = Part(("ar", "linear", "dynatree"), "own", prompt_tokens=(2,), new_tokens=(9,))
    runs = choose_runs(Table("", (), (part,)), Options())
    results = Results(FORMAT, "", ["predicted", "exact"], Options(), {}, {}, {}, runs)
    Bench(results, pair, {"own": [[3, 1]]}, tmp_path / "results.json").measure_all()
    assert [record["ids_at"] for record in results.records] == [0, 0, 0]
    assert not any("predicted_ms" in record for record in results.records)


def test_what_strict_rows_and_rows_over_a_window_are_held_against() -> None:
    """Strict ar at as many rows a pass, ar over that window: added once for each, after ar."""
    methods = "dynatree,dynatree strict,linear K=3 strict,linear window=64,ar rows=4 strict"
    runs = choose_runs(Table("", (), (Part((), new_tokens=(4, 8)),)), Options(methods=methods))
    assert [(run.label, run.reference) for run in runs[:7]] == [
        ("ar T=4", "ar T=4"),
        ("ar strict rows=64 T=4", "ar strict rows=64 T=4"),
        ("ar strict rows=4 T=4", "ar strict rows=4 T=4"),
        ("ar window=64 T=4", "ar window=64 T=4"),
        ("dynatree T=4", "ar T=4"),
        ("dynatree strict T=4", "ar strict rows=64 T=4"),
        ("linear K=3 strict T=4", "ar strict rows=4 T=4"),
    ]
    assert runs[7].reference == runs[3].label and runs[8].reference == runs[2].label
    assert {run.baseline for run in runs} == {"ar T=4", "ar T=8"}


def test_what_speedups_are_over() -> None:
    """Any row, told as --methods has it, and added if there is none such: at each size its own.
    Texts are held against ar's all the same."""
    part = Part(("ar", "linear"), new_tokens=(4, 8))
    runs = choose_runs(Table("", (), (part,)), Options(baseline="hf-ar"))
    labels = [f"{name} T={size}" for size in (4, 8) for name in ("ar", "hf-ar", "linear")]
    assert [run.label for run in runs] == labels
    assert [run.baseline for run in runs] == ["hf-ar T=4"] * 3 + ["hf-ar T=8"] * 3
    assert [run.reference for run in runs] == ["ar T=4"] * 3 + ["ar T=8"] * 3
    strict = choose_runs(TABLES["main"], Options(methods="ar", baseline="linear K=3 strict"))
    assert [run.label for run in strict] == ["ar", "ar strict rows=4", "linear K=3 strict"]


def test_what_a_row_says_is_how_its_text_is_written() -> None:
    """Strict or not, over a window, rebuilt, sampled and accepted."""

    def written(row: str, top_p: float | None = None, **changes: object) -> Way:
        return way_of(replace(parse_run(row), **changes), Options(top_p=top_p), seed=7)

    assert written("linear strict") == Way(Chain(), strict=True)
    assert written("linear window=16 sinks=2") == Way(Chain(), window=Window(16, 2))
    by_traversal = Way(Chain(K=3), commit="rebuild", acceptance="traversal")
    assert written("linear K=3 rebuild traversal") == by_traversal
    hot = written("linear", 0.9, temperature=0.8, draft_temperature=0.6)
    assert hot.sampling == Sampling(0.8, 0.9, 7, 0.6, False)
    drawn = written("linear", 0.9, is_drawn=True, draft_temperature=0.6)
    assert drawn.sampling == Sampling(0.0, 1.0, 7, 0.6, True)


def test_rows_of_several_kinds_stand_in_one_table(capsys: Captured, tmp_path: Path) -> None:
    """Each held against its own ar; predicted is what is written as forwards are timed, plainly."""
    options = ["--methods", "linear,linear strict,linear window=64 sinks=2,linear rebuild"]
    options += ["--columns", "speedup,predicted,exact", "--n-prompts", "1"]
    results, printed = run_bench(capsys, tmp_path / "r.json", *QUICK, *options)
    cells = {row[0]: row[1:] for row in table_cells(results)[1]}
    assert all(cells[label][2] == "1/1" for label in cells if label.startswith("linear"))
    assert {label for label in cells if cells[label][1]} == {"linear", "linear rebuild"}
    assert "A strict row is held" in printed and "A row over a window is held" in printed


def test_the_enlarged_pair_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    """Here the draft alone; what is there stays, and what fails is said."""
    monkeypatch.setattr(enlarged, "FOLDER", tmp_path / "enlarged")
    monkeypatch.setattr(enlarged, "SHAPES", {"draft": (256, 2)})
    monkeypatch.setattr(enlarged, "VOCABULARY", 4100)
    (folder,) = enlarged.enlarged_pair()
    assert read_config(Path(folder)).hidden_size == 256
    assert enlarged.enlarged_pair() == [folder]
    assert capfd.readouterr().err.count("making the enlarged pair") == 1
    monkeypatch.setattr(enlarged, "SHAPES", {"target": (641, 6)})
    with pytest.raises(UsageError, match="could not be made; the line above says why"):
        enlarged.enlarged_pair()


def test_notes_before_a_table(capsys: Captured) -> None:
    """Too few prompts, our own written on where lengths are compared, more than was trained for."""
    sizes = {"n_prompts": 13, "prompt_tokens": (4, 80), "new_tokens": (3000,)}
    options = Options(table="prompt", methods="ar", target=DRAFT, draft=DRAFT, **sizes)
    results, _, prompts = open_table(options)
    said = capsys.readouterr().err
    assert "note: builtin has 12 prompts, not 13\n" in said
    assert "note: the target writes our own prompts on, to 80 tokens\n" in said
    assert "warning: 3080 tokens with the prompt, and the target was trained" in said
    assert results.prompts["n"] == 12
    assert results.prompts["dataset"] == "builtin, written on by the target"
    assert [len(prompt) for prompt in prompts["builtin"]] == [80] * 12


def test_what_can_be_asked_for_is_listed(capsys: Captured) -> None:
    assert main(["--tables"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in ("ablation", "v2-1", "dyspec-5", "predicted"))
