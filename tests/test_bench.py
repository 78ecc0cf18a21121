"""Tests of bench.py: every table end to end, fairness, exactness, resuming, and error messages."""

import functools
import io
import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Captured, error_line, override, random_model
from test_results import make_head, rows_of, write_results

import bench
from bench import Bench, Job, main
from benchmark.cases import TABLES, Case
from benchmark.plan import Plan, build_parser, make_plan
from benchmark.results import Line, Results, key_of, load
from benchmark.step_times import measure_step_times
from cli.errors import UsageError
from cli.metrics import token_ids
from cli.models import Pair
from draft_tree import Tree
from engine.generate import Step
from engine.memory import OutOfMemory

DRAFT, HEAD = str(TINY / "draft"), str(TINY / "eagle")
QUICK = ["--n-prompts", "2", "--prompt-tokens", "12", "--max-new-tokens", "6"]
QUICK += ["--target", DRAFT, "--draft", DRAFT]  # the smaller model for both; any text will do
BRIEF = [*QUICK, "--methods", "ar,linear"]


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time single passes only once, to save time."""
    quick = functools.partial(measure_step_times, n_rounds=1)
    monkeypatch.setattr(bench, "measure_step_times", quick)


def run_bench(
    capsys: Captured, file: Path, words: Sequence[str], *later: str
) -> tuple[Results, str]:
    """Run bench.py, which must succeed, and return its results and what it printed. The later
    options replace those of the same names."""
    status = main(override(words, *later, "--output", str(file)))
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return load(file), captured.out


SEVERAL = "linear,dynatree,dyspec,recycle,auto"
SMALL = {  # options that make a table quick, in addition to QUICK
    "main": ["--target", str(TINY / "target"), "--columns", "predicted,exact"],
    "length": ["--max-new-tokens", "4,9", "--methods", SEVERAL],
    "sampling": ["--methods", SEVERAL],
    "calibration": ["--methods", "dyspec N=8 calibrate=on costs=learned,auto"],
    "memory": ["--methods", "ar", "--threads", "1"],  # one process per text
    "heads": ["--target", str(TINY / "target"), "--methods", "auto,linear,linear head"],
    "trees": ["--methods", "dyspec N=150"],
}
SMALL["heads"] += ["--columns", "predicted,exact"]


@pytest.mark.parametrize("table", TABLES)
def test_every_table(table: str, capsys: Captured, tmp_path: Path) -> None:
    """Check that every text is there and exact, and that --show prints the table again. A row that
    drafts with the draft model has a prediction if its passes were timed."""
    file = tmp_path / "r.jsonl"
    words = ["--table", table, "--n-prompts", "1", *SMALL.get(table, [])]
    results, printed = run_bench(capsys, file, QUICK, *words)
    n_prompts = sum(results.head["n_prompts"].values())
    assert len(results.texts) == len(results.cases) * n_prompts and not results.n_missing
    assert not results.differences and all(len(line) <= 80 for line in printed.splitlines())
    for text in results.texts.values():
        ids = results.ids.get(text.get("ids_digest"), [])
        assert len(ids) == (0 if text["temperature"] else text["new_tokens"])
        assert ("setup_s" in text) == (table != "memory")
        assert all(math.isfinite(value) for value in text.values() if isinstance(value, float))
        is_predicted = table in ("main", "trees") or (
            table == "heads" and "head" not in text["row"]
        )
        assert ("predicted_ms" in text) == is_predicted
    if table == "steps":
        assert results.step_times.rows == [1, 2, 4, 8, 16, 32, 64, 128]
    else:
        labels = [row[0] for row in rows_of(results, "exact")[1:]]
        assert len(labels) == len(results.cases) and all(label in printed for label in labels)
    assert results.head["machine"]["commit"]
    assert main(["--show", str(file)]) == 0
    assert capsys.readouterr().out == printed


def test_passes_are_timed_up_to_the_largest_one() -> None:
    def largest(*rows: str) -> int:
        return bench.largest_pass([Case(row, "builtin", 150, 128, 0.0) for row in rows])

    assert largest("ar", "dynatree", "hf-ar") == 128
    assert largest("ar", "dyspec N=300", "fixed N_max=129") == 384
    assert largest("ar rows=513") == 768


def test_cases_take_turns_and_every_text_has_a_seed(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check the order: every case on one prompt before the next prompt, each time another one
    first. Check that the seed depends on prompt and round, not on method and call. No ids of
    sampled texts are stored, because they are not compared."""
    written = []

    def note(steps: list[Step]) -> list[int]:
        written.append(token_ids(steps))
        return written[-1]

    monkeypatch.setattr(bench, "token_ids", note)
    few = [*QUICK, "--methods", "ar,linear,fixed", "--temperature", "1"]
    results, _ = run_bench(capsys, tmp_path / "a.jsonl", few, "--repeats", "2")
    order = [f"{r['round']} {r['prompt']} {r['row']}" for r in results.texts.values()]
    assert order == [
        *("0 0 ar", "0 0 linear", "0 0 fixed"),
        *("0 1 linear", "0 1 fixed", "0 1 ar"),
        *("1 0 fixed", "1 0 ar", "1 0 linear"),
        *("1 1 ar", "1 1 linear", "1 1 fixed"),
    ]
    of_ar = {str(written[i]) for i, text in enumerate(order) if text.endswith(" ar")}
    assert len(of_ar) == 4, "two prompts, two rounds"
    kept = {name for text in results.texts.values() for name in text}
    assert not results.ids and not kept & {"ids", "ids_digest", "calibration"}
    run_bench(capsys, tmp_path / "b.jsonl", few)
    assert written[12:] == written[:6]
    run_bench(capsys, tmp_path / "c.jsonl", few, "--seed", "7")
    assert written[18:] != written[:6]


@pytest.mark.parametrize(
    ("n", "error", "status", "said"),
    [
        (6, KeyboardInterrupt(), 130, "interrupted\nresults in .*; 3 texts are missing"),
        (3, OutOfMemory("too large"), 2, "error: too large; these lower it: a 16-bit --dtype"),
        (1, OutOfMemory("too large"), 2, "error: too large"),
    ],
)
def test_an_interrupted_table_keeps_its_results(
    n: int,
    error: BaseException,
    status: int,
    said: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Check that an interrupted table is shown, and that the printed command resumes it, also after
    a crash that left half a line, and in another folder."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "One text"}\n{"prompt": "Another text"}')
    file = tmp_path / "-my results.jsonl"
    options = [*BRIEF, "--repeats", "2", "--prompts", "p.jsonl"]
    real = Bench.measure_text

    def measure(self: Bench, job: Job) -> Line:
        if len(self.results.texts) == n - 1:
            raise error
        return real(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "measure_text", measure)
        assert main([*options, f"--output={file.name}"]) == status
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and "Traceback" not in captured.err
    assert ("UNFINISHED" in captured.out) == file.exists() == (n > 1)
    if n == 1:
        assert [other.name for other in tmp_path.iterdir()] == ["p.jsonl"], "a file without a text"
        return
    done = list(load(file).texts.values())
    assert len(done) == n - 1
    with file.open("a") as stream:
        stream.write('{"row":"lin')
    line = next(line for line in captured.err.splitlines() if "resume with: " in line)
    python, script, *words = shlex.split(line.partition("resume with: ")[2])
    assert python == "python" and Path(script).resolve() == Path(bench.__file__).resolve()
    assert words == [f"--resume={file.name}"]
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert main([f"--resume={file}"]) == 0
    resumed = load(file)
    monkeypatch.chdir(tmp_path)
    whole, _ = run_bench(capsys, tmp_path / "whole.jsonl", options)
    assert list(resumed.texts.values())[: n - 1] == done and resumed.ids == whole.ids
    assert list(resumed.texts) == list(whole.texts)
    assert main([f"--resume={file}"]) == 0 and load(file) == resumed, "a text was measured again"


def test_resume_refuses_other_conditions(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    results, _ = run_bench(capsys, file, BRIEF, "--n-prompts", "1")
    texts, head = list(results.texts.values()), results.head
    for message, changed in (
        ("torch was 1.0 and is", {"machine": head["machine"] | {"torch": "1.0"}}),
        ("the prompts have changed", {"prompts_sha256": "0"}),
        ("the columns have changed", {"columns": ["speedup"]}),
        ("the cases have changed", {"cases": [asdict(results.cases[0])]}),
    ):
        before = write_results(file, texts[:1], head | changed).read_bytes()
        line = error_line(capsys, main, ["--resume", str(file)])
        assert f"--resume: {message}" in line and "; use the same conditions" in line
        assert file.read_bytes() == before


def test_a_text_that_differs_from_its_reference(capsys: Captured, tmp_path: Path) -> None:
    """Check that a difference is recorded once, with its gap, and ends in status 1. test_results.py
    has the differences that are none: ties, and those of rounding in half precision."""
    file = tmp_path / "r.jsonl"
    results, _ = run_bench(capsys, file, BRIEF)
    lines = list(results.texts.values())
    (text,) = [text for text in lines if text["row"] == "linear" and text["prompt"] == 1]
    for line in lines:
        line["ids"] = list(results.ids[line["ids_digest"]])
    text["ids"][2] += 1
    text["ids_digest"] = "another"
    write_results(file, lines, results.head)
    for _ in range(2):
        assert main(["--resume", str(file)]) == 1
        printed = " ".join(capsys.readouterr().out.split())
        where = "on 1 of 2 texts (first prompt: 1, earliest token: 2, top-2 gap in float32: at most"
        assert f"linear differs from ar {where}" in printed and "1/2" in printed
        ((key, difference),) = load(file).differences.items()
        assert key == key_of(text) and difference["at"] == 2 and difference["gap"] > 0
    assert file.read_text().count('"difference":') == 1, "the gap was measured twice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--table none", "--table is 'none', it must be one of main, "),
        ("--table dyspec-5", "is not available: it needs an attention kernel"),
        ("--output /dev/null", "/dev/null exists already; use another name, or --resume"),
        (f"--output none/{'x' * 300}", "cannot be written: File name too long"),
        ("--methods none", "method is 'none', it must be one of ar, "),
        ("--methods ar,,fixed", "--methods: a row is empty"),
        ("--methods fixed,fixed", "--methods: 'fixed,fixed' has an item twice"),
        ("--methods 'fixed X=1'", "has no 'X'"),
        ("--methods 'hf-ar D=1'", "method is 'hf-ar D=1'"),
        ("--methods 'linear window=5'", "linear window=5: window is 5, it must be from 6 to"),
        ("--methods 'lookup head'", "lookup head: lookup uses no draft model; remove head"),
        ("--methods 'linear token'", "linear token: greedy text has only one acceptance"),
        ("--head none", "--head none has no effect: no row has the word head"),
        ("--columns none", "column is 'none', it must be one of throughput, "),
        ("--seed 1 --seed=2", "--seed is given 2 times, it takes one value"),
        ("--n 4", "unrecognized arguments: --n 4"),
        ("--dataset none", "--dataset is 'none', it must be one of builtin, wikitext2"),
        (
            "--prompts none.txt --dataset wikitext2",
            "argument --dataset: not allowed with argument --prompts",
        ),
        (f"--table v2-fig8 --prompts {ROOT}/LICENSE", "no prompt of 1000 tokens or more"),
        ("--max-new-tokens 0", "--max-new-tokens: 0 is not a whole number of at least 1"),
        ("--max-new-tokens 999999999999", "these lower it: a 16-bit --dtype, fewer --max-new-toke"),
        ("--n-prompts x", "--n-prompts: x is not a whole number of at least 1"),
        ("--prompt-tokens 5,5", "'5,5' has an item twice"),
        ("--temperature nan", "ar: temperature is nan, it must be"),
        ("--seed 1", "--seed needs a --temperature above 0"),
        ("--hf --temperature 1", "only greedy speed; use temperature 0"),
        ("--show none.jsonl --repeats 2 --max-new-tokens 3", "--max-new-tokens, --repeats: no eff"),
        ("--resume none.jsonl", "none.jsonl cannot be read: No such file"),
    ],
)
def test_mistakes(
    arguments: str,
    message: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line(capsys, main, shlex.split(arguments))


def test_memory_is_measured_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--table memory needs a single process"):
        make_plan(build_parser().parse_args(["--table", "memory"]))


def test_setup_time_counts_only_the_models_that_a_method_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Use a stand-in for transformers that repeats the prompt's first id. Its steps have no draft,
    so its texts have no draft metrics."""

    class Repeating:
        def __init__(self, pair: Pair):
            self.load_s = 20.0

        def decode(self, name: str, prompt: list[int], n_new: int, n_steps: int | None) -> list:
            tree = Tree.from_root(0)
            return [Step([prompt[0]], tree, [0], verify_ms=1.0) for _ in range(n_steps or n_new)]

    monkeypatch.setattr(bench, "HuggingFace", Repeating)
    load_s = {"target": 50.0, "draft": 100.0}
    pair = Pair(random_model(0), random_model(1), None, Path(), None, load_s)
    cases = [Case(row, "builtin", 2, 4, 0.0) for row in ("ar", "linear", "hf-ar")]
    head, args = make_head(cases, 1), build_parser().parse_args([])
    plan = Plan(args, head, pair, None, {"builtin": [[3, 1]]}, 2, False)
    table = Bench(plan, Results(head), tmp_path / "r.jsonl")
    table.warm_up(cases)
    ar, linear, hf = table.setup_s.values()
    assert 20 <= hf < 50 <= ar < 100 <= linear
    text = table.measure_text(Job(cases[2], 0, 0))
    assert text["ids"] == [3] * 4 and text["throughput"] == 1000 and text["setup_s"] == hf
    assert not {"drafted_per_iter", "acceptance_rate", "draft_ms", "top1_match"} & text.keys()


def test_rows_over_a_head_and_over_the_draft_model(capsys: Captured, tmp_path: Path) -> None:
    """Check that the rows of one table use their own drafts, and that a head as --draft is timed
    and named."""
    few = ["--n-prompts", "1", "--max-new-tokens", "30", "--dataset", "builtin"]
    pair = ["--draft", DRAFT, "--methods", "linear K=4,linear K=4 head"]
    results, printed = run_bench(capsys, tmp_path / "a.jsonl", few, *pair)
    swapped = ["--draft", HEAD, "--methods", "linear K=4", "--columns", "predicted"]
    swapped += ["--table", "deagle-2", "--temperature", "0"]
    alone, of_head = run_bench(capsys, tmp_path / "b.jsonl", few, *swapped)
    (_, own), (_, by_head), (_, lone) = [
        (text["row"], text["iterations"])
        for text in [*results.texts.values(), *alone.texts.values()]
        if text["row"] != "ar"
    ]
    assert own != by_head == lone
    assert "models/tiny/draft and models/tiny/eagle" in " ".join(printed.split())
    assert "here: models/tiny/eagle, WikiText-2" in " ".join(of_head.split())
    assert min(alone.step_times.draft_ms) > 0


def test_one_table_has_rows_of_several_kinds(capsys: Captured, tmp_path: Path) -> None:
    """Check that each row is compared with its own ar. Only rows without strict and window have a
    prediction, because passes are timed without them."""
    options = ["--methods", "linear,linear strict,linear window=64 sinks=2,linear rebuild"]
    options += ["--columns", "predicted,exact", "--n-prompts", "1"]
    results, printed = run_bench(capsys, tmp_path / "r.jsonl", QUICK, *options)
    cells = {row[0]: row[1:] for row in rows_of(results, "predicted", "exact")[1:]}
    assert all(cells[label][1] == "1/1" for label in cells if label.startswith("linear"))
    assert {label for label in cells if cells[label][0]} == {"linear", "linear rebuild"}
    assert "A strict row is compared" in printed and "A row with a window is compared" in printed


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt()])
def test_a_tables_line_in_a_log_is_its_own(
    ending: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a log file of both streams, which shows every progress line of a bar. The table once
    began on the rest of the bar."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(bench, "LOG_S", 0.0)
    try:
        with bench.progress_bar([Job(Case("ar", "", 1, 1, 0.0), n, 0) for n in range(3)]) as bar:
            for _ in bar:
                if ending:
                    raise ending
    except KeyboardInterrupt:
        pass
    assert "text" in log.getvalue() and log.getvalue().endswith("\n")


def test_notes_before_a_table(capsys: Captured) -> None:
    """Check two notes: too few prompts that reach every length, and more tokens than the target was
    trained for."""
    words = ["--methods", "ar", "--target", DRAFT, "--draft", DRAFT]
    words += ["--n-prompts", "13", "--prompt-tokens", "4,20", "--max-new-tokens", "3000"]
    plan = make_plan(build_parser().parse_args(words))
    said = capsys.readouterr().err
    assert "note: builtin has 12 prompts of 20 tokens or more, not 13\n" in said
    assert "warning: 3020 tokens in all; the target was trained" in said
    assert plan.head["n_prompts"] == {"builtin": 12} and plan.head["prompts"] == "builtin"
    assert [len(prompt) for prompt in plan.prompts["builtin"]] == [20] * 12
    assert json.loads(json.dumps(plan.head)) == plan.head


def test_tables_and_columns_are_listed(capsys: Captured) -> None:
    assert main(["--tables"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in ("ablation", "v2-1", "dyspec-5", "predicted"))
