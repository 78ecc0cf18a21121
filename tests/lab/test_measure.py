"""Tests of the benchmark: a table end to end, fairness, exactness, resuming, and error messages."""

import io
import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import pytest
from fast import override, random_model
from small import ROOT, TINY, Captured, error_line
from test_results import make_head, rows_of, write_results

from draft_tree import Tree
from dynatree_lab.benchmark import measure as bench
from dynatree_lab.benchmark.cases import CONTROL, Case
from dynatree_lab.benchmark.measure import Job, TableRun, main
from dynatree_lab.benchmark.plan import Plan, build_parser, make_plan
from dynatree_lab.benchmark.report import is_exact, text_frame, text_report
from dynatree_lab.benchmark.results import Line, Results, key_of, load
from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.eagle import EagleHead
from dynatree_lab.pair import Pair
from dynatree_lab.request import Request

DRAFT, HEAD = str(TINY / "draft"), str(TINY / "eagle")
QUICK = ["--n-prompts", "2", "--prompt-tokens", "12", "--max-new-tokens", "6", "--threads", "1"]
QUICK += ["--target", DRAFT, "--draft", DRAFT]  # the smaller model for both; any text will do
BRIEF = [*QUICK, "--methods", "ar,linear", "--device", "cpu"]
ROWS = ["ar", "dynatree", "linear rebuild", "recycle", "linear strict", "linear window=64 sinks=2"]


def run_bench(file: Path, words: Sequence[str], *later: str) -> tuple[Results, str]:
    """Run the benchmark, which must succeed, and return its results and what it printed. The later
    options replace those of the same names."""
    with redirect_stdout(io.StringIO()) as printed:
        assert main(override(words, *later, "--output", str(file))) == 0
    return load(file), printed.getvalue()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str, Path]:
    """Return the results of two rounds of ROWS, what it printed, and the file."""
    file = tmp_path_factory.mktemp("measured") / "r.jsonl"
    options = ["--methods", ",".join(ROWS), "--columns", "computed, exact", "--repeats", "2"]
    options += ["--prices", "0.9:0.1:0.3"]
    return *run_bench(file, BRIEF, *options), file


def test_a_table_has_every_text(measured: tuple[Results, str, Path], capsys: Captured) -> None:
    """Check that each text is there, and equal to its own ar's, and that --show prints the table
    again. Prices do not describe strict passes and windows."""
    results, printed, file = measured
    assert len(results.texts) == len(results.cases) * 2 * 2 and not results.n_missing
    assert not results.differences and all(len(line) <= 80 for line in printed.splitlines())
    assert results.head["machine"]["commit"]
    for text in results.texts.values():
        assert len(results.ids[text["ids_digest"]]) == 6 and text["setup_s"] > 0
        assert all(math.isfinite(value) for value in text.values() if isinstance(value, float))
    cells = {row[0]: row[1:] for row in rows_of(results, "computed", "exact")[1:]}
    assert list(cells) == [case.row for case in results.cases]
    assert all(label in printed for label in cells)
    assert [cells[row][1] for row in ROWS] == ["", *["4/4"] * 5]
    assert [row for row in cells if cells[row][0]] == ROWS[:4]
    assert "A strict row is compared" in printed and "A row with a window is compared" in printed
    assert main(["--show", str(file)]) == 0 and capsys.readouterr().out == printed


def test_cases_take_turns(measured: tuple[Results, str, Path]) -> None:
    """Check that every case runs on one prompt before the next prompt, and that each time another
    one comes first."""
    results, *_ = measured
    rows = [case.row for case in results.cases]
    order = [(text["round"], text["prompt"], text["row"]) for text in results.texts.values()]
    for i, place in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        part = order[i * len(rows) : (i + 1) * len(rows)]
        assert part == [(*place, row) for row in rows[i:] + rows[:i]]


def test_rows_over_a_head_and_over_the_draft_model(tmp_path: Path) -> None:
    """Check that the rows of one table use their own drafts, and that a head as --draft is
    named. Prices do not describe the passes of a row with the word head."""
    options = ["--target", str(TINY / "target"), "--methods", "linear,linear head"]
    plan = make_plan(build_parser().parse_args(override(BRIEF, *options)))
    table = TableRun(plan, Results(plan.head), tmp_path / "a.jsonl")
    drafts = [table.pair_of(case).draft for case in table.results.cases]
    assert [isinstance(draft, EagleHead) for draft in drafts] == [False, False, True]
    texts = [table.generate(Job(case, 0, 0)) for case in table.results.cases[1:]]
    of_draft, of_head = ([step.tree.tokens for step in text] for text in texts)
    assert of_draft[1][0] == of_head[1][0] and of_draft[1] != of_head[1]
    assert [bench.has_priced_passes(case) for case in table.results.cases] == [True, True, False]
    assert text_report(table.results, [], 999).count("models/tiny/draft and models/tiny/eagle") == 1
    options = ["--target", str(TINY / "target"), "--draft", HEAD, "--n-prompts", "1"]
    options += ["--table", "deagle-2", "--temperature", "0", "--dataset", "builtin"]
    _, printed = run_bench(tmp_path / "b.jsonl", BRIEF, *options)
    assert "here: models/tiny/eagle, WikiText-2" in " ".join(printed.split())


def test_a_draft_is_loaded_and_a_control_added_where_needed() -> None:
    """Check that a row that drafts needs a draft, and that a table in half precision has a row that
    shows what rounding changes."""
    for row, has_draft in (("ar", False), ("ar,linear", True)):
        words = override(BRIEF, "--methods", row)
        assert (make_plan(build_parser().parse_args(words)).pair.draft is not None) == has_draft
    for dtype, has_control in (("float32", False), ("bfloat16", True)):
        words = [*QUICK, "--table", "ablation", "--dtype", dtype]
        cases = make_plan(build_parser().parse_args(words)).head["cases"]
        assert (CONTROL in [case["row"] for case in cases]) == has_control


def test_peak_memory_is_that_of_a_process_per_text(tmp_path: Path) -> None:
    words = ["--table", "memory", "--n-prompts", "1", "--methods", "ar"]
    results, _ = run_bench(tmp_path / "r.jsonl", QUICK, *words)
    (text,) = results.texts.values()
    assert text["peak_mb"] > 50 and "setup_s" not in text and len(text["ids"]) == 6


def test_every_sampled_text_has_a_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check that the seed depends on prompt and round, not on the case. Only ids that are compared
    are stored, so none of drawn candidates."""
    seeds = []

    def note(pair: Pair, prompt: list[int], config: GenerationConfig, n: int) -> Request:
        seeds.append(config.sampling.seed)
        return Request(pair, prompt, config, n)

    monkeypatch.setattr(bench, "Request", note)
    options = ["--temperature", "1", "--seed", "7", "--repeats", "2"]
    rows = override(BRIEF, "--methods", "ar,linear K=2,recycle")
    results, _ = run_bench(tmp_path / "r.jsonl", rows, *options)
    assert seeds[3:] == [seed for seed in (7, 8, 9, 10) for _ in range(3)]  # after the warm-up's
    has_ids = {text["row"]: "ids_digest" in text for text in results.texts.values()}
    assert has_ids == {"ar": True, "linear K=2": False, "recycle": True}
    assert not any("calibration" in text for text in results.texts.values())
    assert is_exact(results) and text_frame(results).is_compared.sum() == 4  # of recycle


def end_at(n: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the n-th text of a table raise an error."""
    real = TableRun.measure_text

    def measure(self: TableRun, job: Job) -> Line:
        if len(self.results.texts) == n - 1:
            raise error
        return real(self, job)

    monkeypatch.setattr(TableRun, "measure_text", measure)


def test_an_interrupted_table_keeps_its_results(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that an interrupted table is shown, and that the printed command resumes it, also after
    a crash that left half a line, and in another folder."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "One text"}\n{"prompt": "Another text"}')
    file = tmp_path / "-my results.jsonl"
    options = [*BRIEF, "--repeats", "2", "--prompts", "p.jsonl"]
    with monkeypatch.context() as patch:
        end_at(6, KeyboardInterrupt(), patch)
        assert main([*options, f"--output={file.name}"]) == 130
    captured = capsys.readouterr()
    assert re.search("interrupted\nresults in .*; 3 texts are missing", captured.err)
    resume = f"--resume={file.name}"
    assert f"; resume with: python -m dynatree_lab.benchmark '{resume}' -" in captured.err
    assert "UNFINISHED" in captured.out
    done = list(load(file).texts.values())
    assert len(done) == 5
    with file.open("a") as stream:
        stream.write('{"row":"lin')
    words = shlex.split(captured.err.rpartition("resume with: ")[2])
    assert words == [*"python -m dynatree_lab.benchmark".split(), resume, "--prompts=p.jsonl"]
    assert load(file).head["options"]["prompts"] == "p.jsonl"
    Path("below").mkdir()
    monkeypatch.chdir("below")
    line = error_line(capsys, main, [f"--resume={file}"])
    assert "p.jsonl is not there; use --prompts to say where it is now" in line
    assert main([f"--resume={file}", "--prompts", "../p.jsonl"]) == 0
    resumed = load(file)
    monkeypatch.chdir(tmp_path)
    whole, _ = run_bench(tmp_path / "whole.jsonl", options)
    assert list(resumed.texts.values())[:5] == done and resumed.ids == whole.ids
    assert list(resumed.texts) == list(whole.texts)
    assert main([f"--resume={file}"]) == 0 and load(file) == resumed, "a text was measured again"


def test_a_table_without_a_text_leaves_no_file(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end_at(1, OutOfMemory("too large"), monkeypatch)
    line = error_line(capsys, main, [*BRIEF, "--output", str(tmp_path / "r.jsonl")])
    assert "error: too large; these lower it: a 16-bit --dtype" in line
    assert not list(tmp_path.iterdir())


def test_resume_refuses_other_conditions(
    measured: tuple[Results, str, Path], capsys: Captured, tmp_path: Path
) -> None:
    results, head = measured[0], measured[0].head
    for message, changed in (
        ("torch was 1.0 and is", {"machine": head["machine"] | {"torch": "1.0"}}),
        ("the prompts have changed", {"prompts_sha256": "0"}),
        ("the columns have changed", {"columns": ["speedup"]}),
        ("the cases have changed", {"cases": [asdict(results.cases[0])]}),
    ):
        file = write_results(tmp_path / "r.jsonl", [], head | changed)
        before = file.read_bytes()
        line = error_line(capsys, main, ["--resume", str(file)])
        assert f"--resume: {message}" in line and "; use the same conditions" in line
        assert file.read_bytes() == before


def test_a_text_that_differs_from_its_reference(
    measured: tuple[Results, str, Path], capsys: Captured, tmp_path: Path
) -> None:
    """Check that a difference is recorded once, with its gap, and ends in status 1. test_results.py
    has the differences that are none: ties, and those of rounding in half precision."""
    results = measured[0]
    lines = [line | {"ids": results.ids[line["ids_digest"]]} for line in results.texts.values()]
    (text,) = [line for line in lines if key_of(line)[::5] == ("dynatree", 1) and line["round"]]
    text["ids"] = [*text["ids"][:2], text["ids"][2] + 1, *text["ids"][3:]]
    text["ids_digest"] = "another"
    file = write_results(tmp_path / "r.jsonl", lines, results.head)
    for _ in range(2):
        assert main(["--resume", str(file)]) == 1
        printed = " ".join(capsys.readouterr().out.split())
        where = "on 1 of 4 texts (first prompt: 1, earliest token: 2, gap in float32: at most"
        assert f"dynatree differs from ar {where}" in printed and "3/4" in printed
        ((key, difference),) = load(file).differences.items()
        assert key == key_of(text) and difference["at"] == 2 and difference["gap"] > 0
    assert file.read_text().count('"difference":') == 1, "the gap was measured twice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--table none", "--table is 'none', it must be one of main, "),
        ("--table dyspec-5", "is not available: it needs an attention kernel"),
        ("--output /dev/null", "/dev/null exists already; use another name, or --resume"),
        (f"--methods ar --output none/{'x' * 300}", "cannot be written: File name too long"),
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
        ("--dataset none", "--dataset is 'none', it must be one of builtin, wikitext2"),
        ("--prompts x --dataset pg19", "argument --dataset: not allowed with argument --prompts"),
        ("--pair pythia --draft b", "--pair excludes --target and --draft"),
        (f"--table v2-fig8 --prompts {ROOT}/LICENSE", "no prompt of 1000 tokens or more"),
        ("--max-new-tokens 0", "--max-new-tokens: 0 is not a whole number of at least 1"),
        ("--max-new-tokens 999999999999", "these lower it: a 16-bit --dtype, fewer --max-new-toke"),
        ("--n-prompts x", "--n-prompts: x is not a whole number of at least 1"),
        ("--temperature nan", "ar: temperature is nan, it must be"),
        ("--top-p 0.5", "top_p needs a temperature above 0"),
        ("--threads 0", "--threads is 0, it must be from 1 to 1024"),
        ("--hf --temperature 1", "only greedy text; use temperature 0"),
        ("--show none.jsonl --repeats 2 --max-new-tokens 3", "--max-new-tokens, --repeats: no eff"),
        ("--resume none.jsonl", "none.jsonl cannot be read: No such file"),
        (f"--show {ROOT}/LICENSE", "LICENSE is no results file: it does not begin with a head"),
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
    plan = Plan(args, head, pair, None, {"builtin": [[3, 1]]}, False)
    table = TableRun(plan, Results(head), tmp_path / "r.jsonl")
    table.warm_up(cases)
    ar, linear, hf = table.setup_s.values()
    assert 20 <= hf < 50 <= ar < 100 <= linear
    text = table.measure_text(Job(cases[2], 0, 0))
    assert text["ids"] == [3] * 4 and text["throughput"] == 1000 and text["setup_s"] == hf
    unknown = {"drafted_per_iter", "acceptance_rate", "draft_ms", "top1_match"}
    assert not unknown & text.keys()


def test_a_tables_line_in_a_log_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a log file of both streams, which shows every progress line of an interrupted bar. The
    table once began on the rest of the bar."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(bench, "LOG_S", 0.0)
    jobs = [Job(Case("ar", "", 1, 1, 0.0), n, 0) for n in range(3)]
    with pytest.raises(KeyboardInterrupt), bench.progress_bar(jobs) as bar:
        for _ in bar:
            raise KeyboardInterrupt
    assert "text" in log.getvalue() and log.getvalue().endswith("\n")


def test_notes_before_a_table(capsys: Captured) -> None:
    """Check two notes: too few prompts that reach every length, and more tokens than the target was
    trained for."""
    options = ["--n-prompts", "13", "--prompt-tokens", "4,20", "--max-new-tokens", "3000"]
    plan = make_plan(build_parser().parse_args(override(BRIEF, *options)))
    said = capsys.readouterr().err
    assert "note: builtin has 12 prompts of 20 tokens or more, not 13\n" in said
    assert "warning: 3020 tokens in all; the target was trained" in said
    assert plan.head["n_prompts"] == {"builtin": 12} and plan.head["prompts"] == "builtin"
    assert [len(prompt) for prompt in plan.prompts["builtin"]] == [20] * 12
    assert json.loads(json.dumps(plan.head)) == plan.head


def test_tables_and_columns_are_listed(capsys: Captured) -> None:
    assert main(["--tables"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in ("ablation", "v2-1", "dyspec-5", "computed"))
