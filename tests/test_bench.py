"""Tests of bench.py: every table end to end, fairness, exactness, resuming, and error messages."""

import argparse
import functools
import io
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Captured, error_line, override, random_model
from safetensors.torch import load_file
from test_observing import Watching
from test_results import make_difference, make_head, write_results

import bench
from bench import Bench, Job, has_timed_passes, main
from benchmark import enlarged
from benchmark.cases import TABLES, Case, Part, choose_cases, labels
from benchmark.options import build_parser
from benchmark.prepare import PreparedTable, prepare_table, with_columns
from benchmark.report import table_cells, text_frame
from benchmark.results import Line, Results, digest_of, key_of, load
from benchmark.step_times import measure_step_times
from cli.errors import UsageError
from cli.metrics import token_ids
from cli.models import Pair
from draft_tree import Tree
from engine.checkpoint import read_config
from engine.generate import Step
from engine.generation_config import GenerationConfig
from engine.memory import OutOfMemory
from engine.passes import Window
from methods.sampler import Sampling
from methods.static import Chain

DRAFT = str(TINY / "draft")
HEAD = TINY / "eagle"
QUICK = ["--n-prompts", "2", "--prompt-tokens", "12", "--max-new-tokens", "6"]
QUICK += ["--target", DRAFT, "--draft", DRAFT]  # the smaller model for both; any text will do
BRIEF = QUICK + ["--columns", "exact", "--methods", "ar,linear"]


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


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def cases_of(part: Part, *words: str) -> list[Case]:
    return choose_cases([part], parse(*words))


def make_bench(
    pair: Pair, cases: list[Case], prompts: list[list[int]], folder: Path, *columns: str
) -> Bench:
    """Return a Bench that is ready to measure these cases."""
    head = make_head(cases, n_prompts=len(prompts), columns=list(columns))
    table = PreparedTable(
        head, parse(), pair, {"builtin": prompts}, pass_context=2, is_memory_table=False
    )
    file = folder / "r.jsonl"
    file.touch()
    return Bench(table, Results(head), file)


SEVERAL = "linear,dynatree,dyspec,recycle,auto"
SMALL = {  # options that make a table quick, in addition to QUICK
    "main": ["--target", str(TINY / "target")],
    "steps": ["--n-prompts", "1"],
    "length": ["--max-new-tokens", "4,9", "--methods", SEVERAL],
    "prompt": ["--prompt-tokens", "4,9", "--methods", SEVERAL],
    "sampling": ["--n-prompts", "1"],
    "sweep": ["--methods", ",".join(TABLES["sweep"].parts[0].rows[::20])],  # of a hundred rows
    "memory": ["--n-prompts", "1", "--methods", "ar", "--threads", "1"],  # one process per text
    "heads": ["--n-prompts", "1", "--target", str(TINY / "target")],
}


@pytest.mark.parametrize("table", TABLES)
def test_every_table(table: str, capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    options = override(QUICK, "--table", table, *SMALL.get(table, []))
    results, printed = run_bench(capsys, file, options)
    head = results.head
    assert len(results.texts) == head.n_texts == len(head.cases) * sum(head.n_prompts.values())
    if results.texts:
        texts = text_frame(results)
        assert all(label in printed for label in texts.label) and not texts.is_different.any()
    for text in results.texts.values():
        ids = results.ids.get(text.get("ids_digest"), [])
        assert len(ids) == (0 if text["temperature"] else text["new_tokens"])
        assert ("setup_s" in text) == (table != "memory")
        assert all(math.isfinite(value) for value in text.values() if isinstance(value, float))
    assert all(len(line) <= 80 for line in printed.splitlines())
    if table == "steps":
        assert results.step_times.rows == [1, 2, 4, 8, 16, 32, 64, 128]
    if hasattr(os, "getloadavg"):
        assert f"load average {head.load_before:.2f} at the start" in " ".join(printed.split())
    assert head.machine["commit"]
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
    few = QUICK + ["--methods", "ar,linear,fixed", "--temperature", "1", "--columns", "exact"]
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
    """Check that an interrupted table is shown, and that the printed command resumes it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "-my results.jsonl"
    options = BRIEF + ["--repeats", "2"]
    real = Bench.measure_text

    def measure(self: Bench, turn: Job) -> Line:
        if len(self.results.texts) == n - 1:
            raise error
        return real(self, turn)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "measure_text", measure)
        assert main(options + [f"--output={file.name}"]) == status
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and "Traceback" not in captured.err
    assert ("exact" in captured.out) == file.exists() == (n > 1)
    if n == 1:
        assert list(tmp_path.iterdir()) == [], "a file is left although nothing was measured"
        return
    done = list(load(file).texts.values())
    assert len(done) == n - 1
    line = next(line for line in captured.err.splitlines() if "resume with: " in line)
    python, script, *words = shlex.split(line.partition("resume with: ")[2])
    assert python == "python" and Path(script).resolve() == Path(bench.__file__).resolve()
    assert main(words) == 0
    resumed = load(file)
    whole, _ = run_bench(capsys, tmp_path / "whole.jsonl", options)
    assert list(resumed.texts.values())[: n - 1] == done and resumed.ids == whole.ids
    assert list(resumed.texts) == list(whole.texts)
    assert main(words) == 0 and load(file) == resumed, "a text was measured again"


def test_ctrl_c_just_after_a_line_is_written(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that the table has the line, although the results in memory lack it."""
    file = tmp_path / "r.jsonl"
    real, added = Results.add, []

    def add(self: Results, line: Line) -> None:
        added.append(line)
        if len(added) == 1:
            raise KeyboardInterrupt
        real(self, line)

    monkeypatch.setattr(Results, "add", add)
    assert main([*BRIEF, "--output", str(file)]) == 130
    captured = capsys.readouterr()
    assert "UNFINISHED, 1 of 4 texts" in captured.out
    assert re.search("interrupted\nresults in .*; 3 texts are missing", captured.err)


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


def test_a_table_resumes_in_another_folder(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that relative paths of prompts and models are resolved from the first folder. The table
    was once refused in any other folder."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "One text"}\n')
    models = ["--target", os.path.relpath(DRAFT), "--draft", os.path.relpath(DRAFT)]
    file = tmp_path / "r.jsonl"
    run_bench(capsys, file, BRIEF, *models, "--prompts", "p.jsonl")
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert main(["--resume", str(file)]) == 0
    assert load(file).head.machine["draft"] == str(Path("models", "tiny", "draft"))


def test_a_full_disk_keeps_the_file_and_shows_the_table(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that half a line, written before the disk was full, is removed by --resume."""
    file = tmp_path / "r.jsonl"
    real = Path.open

    class Disk(io.BytesIO):
        def write(self, content: bytes) -> int:
            is_full = file.read_bytes().count(b"\n") == 3
            with real(file, "ab") as place:
                place.write(content[: len(content) // 2] if is_full else content)
            if is_full:
                raise OSError(28, "No space left on device")
            return len(content)

    def open_file(path: Path, mode: str = "r", **how: object) -> io.IOBase:
        return Disk() if path == file and mode == "ab" else real(path, mode, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_file)
        assert main([*BRIEF, "--output", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1
    assert captured.err.endswith("r.jsonl cannot be written: No space left on device\n")
    assert len(load(file).texts) == 2 and "UNFINISHED, 2 of 4 texts" in captured.out
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
    assert main([f"--resume={file}"]) == 0
    assert len(load(file).texts) == 4 and len(file.read_text().splitlines()) == 5


def test_one_file_is_written_by_one_run(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that a second run on one file is refused, with --output and with --resume. Two runs
    once lost the results of one of them."""
    file = tmp_path / "r.jsonl"
    run_bench(capsys, file, BRIEF)
    assert "exists already" in error_line(capsys, main, [*BRIEF, f"--output={file}"])
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]))
    real = Bench.measure_text

    def measure(self: Bench, turn: Job) -> Line:
        if len(self.results.texts) == 1:
            with file.open("a") as other:  # as if another run wrote a line
                other.write(lines[2])
        return real(self, turn)

    monkeypatch.setattr(Bench, "measure_text", measure)
    assert main([f"--resume={file}"]) == 2
    assert f"error: {file}: another run writes to it; use --resume" in capsys.readouterr().err
    assert file.read_text() == "".join(lines[:3])


def change_head(file: Path, change: Callable[[dict], None]) -> None:
    first, *lines = file.read_text().splitlines(keepends=True)
    found = json.loads(first)
    change(found["head"])
    file.write_text("".join([json.dumps(found), "\n", *lines]))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("torch was 1.0 and is .*", lambda head: head["machine"].update(torch="1.0")),
        ("the prompts have changed", lambda head: head.update(prompts_sha256="0")),
        ("the columns have changed", lambda head: head.update(columns=["speedup"])),
        ("the cases have changed", lambda head: head["cases"][0].update(is_drawn=True)),
    ],
)
def test_resume_refuses_other_conditions(
    message: str, change: Callable[[dict], None], capsys: Captured, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    run_bench(capsys, file, BRIEF, "--n-prompts", "1")
    change_head(file, change)
    before = file.read_bytes()
    line = error_line(capsys, main, ["--resume", str(file)])
    assert re.search(f"--resume: {message}; use the same conditions", line)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("the target has no id 9999", lambda lines: lines[1].update(ids_of([9999]))),
        ("--seed needs a --temperature", lambda lines: options_in(lines).update(seed=1)),
        ("argument --top-p: invalid float", lambda lines: options_in(lines).update(top_p="x")),
        ("have an unknown --resume", lambda lines: options_in(lines).update(resume="x")),
        ("--table is 'x', it must be one of", lambda lines: options_in(lines).update(table="x")),
        ("--n-prompts: 0 is not a whole", lambda lines: options_in(lines).update(n_prompts=0)),
    ],
)
def test_resume_refuses_an_invalid_file(
    message: str, change: Callable[[list], None], capsys: Captured, tmp_path: Path
) -> None:
    """Check that the options in a file are validated like those of the command line."""
    file = tmp_path / "r.jsonl"
    run_bench(capsys, file, BRIEF, "--n-prompts", "1", "--methods", "ar")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert message in error_line(capsys, main, ["--resume", str(file)])


def options_in(lines: list[dict]) -> dict:
    return lines[0]["head"]["options"]


def ids_of(ids: list[int]) -> Line:
    return {"ids": ids, "ids_digest": digest_of(ids)}


@pytest.mark.parametrize(
    ("row", "dtype", "gap", "status"),
    [
        ("linear", "float32", None, 1),
        ("linear", "float32", 1e-5, 0),
        ("linear", "bfloat16", None, 0),
        ("linear strict", "bfloat16", 1e-5, 1),
    ],
)
def test_a_text_that_differs_from_its_reference(
    row: str, dtype: str, gap: float | None, status: int, capsys: Captured, tmp_path: Path
) -> None:
    """Check that a difference is an error in float32, unless the target's choice was a near-tie.
    A difference of a strict row is an error at any precision and gap.

    gap: the gap that the file has already; None: it is measured.
    """
    file = tmp_path / "r.jsonl"
    results, _ = run_bench(capsys, file, BRIEF, "--methods", row, "--dtype", dtype)
    lines = list(results.texts.values())
    (text,) = [text for text in lines if text["row"] == row and text["prompt"] == 1]
    for line in lines:
        line["ids"] = list(results.ids[line["ids_digest"]])
    text["ids"][2] += 1
    text |= ids_of(text["ids"])
    if gap is not None:
        lines.append(make_difference(text, gap=gap))
    write_results(file, lines, results.head)
    assert main(["--resume", str(file)]) == status
    printed = " ".join(capsys.readouterr().out.split())
    reference = "ar strict rows=8" if "strict" in row else "ar"
    where = "on 1 of 2 texts (first prompt: 1, earliest token: 2,"
    assert f"{row} differs from {reference} {where}" in printed and "1/2" in printed
    ((key, difference),) = load(file).differences.items()
    assert key == key_of(text) and difference["at"] == 2
    assert gap in (None, difference["gap"])
    assert main(["--resume", str(file)]) == status
    assert len(load(file).differences) == 1, "the gap was measured twice"


def test_a_text_without_its_ids(capsys: Captured, tmp_path: Path) -> None:
    """Check the error if the line with a text's ids was removed from the file."""
    file = tmp_path / "r.jsonl"
    results, _ = run_bench(capsys, file, BRIEF)
    lines = list(results.texts.values())
    lines[-1]["ids_digest"] = "0"
    write_results(file, lines, results.head)
    assert main(["--resume", str(file)]) == 2
    assert f"error: {file} has no line with the ids of digest 0\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "none"], "--table is 'none', it must be one of main, "),
        (["--table", "dyspec-5"], "is not available: it needs an attention kernel"),
        (["--output", "/dev/null"], "/dev/null exists already; use another name, or --resume"),
        (["--output", "none/" + "x" * 300], "cannot be written: File name too long"),
        (["--methods", "none"], "method is 'none', it must be one of ar, "),
        (["--methods", "ar,,fixed"], "an item of the list is empty"),
        (["--methods", "fixed,fixed"], "names a row twice"),
        (["--methods", "fixed X=1"], "has no 'X'"),
        (["--methods", "hf-ar D=1"], "hf-ar takes no settings"),
        (["--methods", "linear window=5"], "linear window=5: window is 5, it must be from 6 to"),
        (["--methods", "lookup head"], "lookup head': lookup uses no draft model; remove head"),
        (["--methods", "linear head head"], "linear head head"),
        (["--head", "none"], "--head none has no effect: no row has the word head"),
        (["--methods", "linear head", *QUICK], "need --head FOLDER, a head of the target"),
        (["--methods", "linear head", "--head", DRAFT], "is no folder of an EAGLE head"),
        (["--methods", "linear token"], "linear token: greedy text has only one acceptance"),
        (["--baseline", " "], "argument --baseline: is empty"),
        (["--columns", "exact,exact"], "'exact,exact' names a column twice"),
        (["--seed", "1000000000001"], "--seed: 1000000000001 is not a whole number from 0 to"),
        (["--columns", "none"], "column is 'none', it must be one of throughput, "),
        (["--columns", "exact,draft_nodes"], "'draft_nodes' was renamed; use drafted_per_iter"),
        (["--columns", "spread"], "column 'spread' was renamed; use speedup"),
        (["--seed", "1", "--seed=2"], "--seed is given 2 times, it takes one value"),
        (["--n", "4"], "unrecognized arguments: --n 4"),
        (["--dataset", "none"], "--dataset is 'none', it must be one of builtin, wikitext2"),
        (["--prompts", "none.txt", "--dataset", "wikitext2"], "--prompts exclude each other"),
        (
            ["--table", "prompt", "--prompts", str(ROOT / "LICENSE")],
            "no prompt of 1000 tokens or more",
        ),
        (
            ["--max-new-tokens", "0"],
            "--max-new-tokens: 0 is not a whole number from 1 to 1,000,000,000,000",
        ),
        (
            ["--n-prompts", "-1"],
            "--n-prompts: -1 is not a whole number from 1 to 1,000,000,000,000",
        ),
        (["--repeats", "0"], "--repeats: 0 is not a whole number from 1 to 10,000"),
        (["--temperature", "nan"], "--temperature: nan is not a number from 0 to 1,000,000"),
        (
            ["--max-new-tokens", "x"],
            "--max-new-tokens: x is not a whole number from 1 to 1,000,000,000,000",
        ),
        (
            ["--max-new-tokens", "9" * 12],
            "these lower it: a 16-bit --dtype, fewer --max-new-tokens",
        ),
        (["--prompt-tokens", "5,5"], "'5,5' has a number twice"),
        (["--seed", "1"], "--seed needs a --temperature above 0"),
        (
            ["--table", "steps", "--methods", "ar"],
            "--methods and --hf have no effect with --table steps",
        ),
        (["--hf", "--temperature", "1"], "only greedy speed; use temperature 0"),
        (["--show", "none.jsonl", "--repeats", "2"], "--repeats has no effect with --show"),
        (["--resume", "none.jsonl"], "none.jsonl does not exist"),
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


def test_the_memory_table_has_more_columns_on_a_gpu() -> None:
    memory = with_columns(TABLES["memory"], None, is_cuda=True)
    assert memory.columns[-2:] == ["pools", "cuda_context"]


def test_memory_is_measured_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--table memory needs a single process"):
        prepare_table(parse("--table", "memory"))


def test_setup_time_counts_only_the_models_that_a_method_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Use a stand-in for transformers that repeats the prompt's first id. Its steps have no draft,
    so its texts have no draft metrics."""

    class Repeating:
        def __init__(self, pair: Pair):
            self.load_s = 20.0

        def decode(self, name: str, prompt: list[int], n_new: int, n_steps: int | None) -> list:
            return [
                Step([prompt[0]], Tree.from_root(0), [0], verify_ms=1.0)
                for _ in range(n_steps or n_new)
            ]

    monkeypatch.setattr(bench, "HuggingFace", Repeating)
    load_s = {"target": 50.0, "draft": 100.0}
    pair = Pair(random_model(0), random_model(1), None, Path(), None, load_s)
    cases = cases_of(Part(("ar", "linear", "hf-ar"), prompt_tokens=(2,), new_tokens=(4,)))
    table = make_bench(pair, cases, [[3, 1]], tmp_path)
    table.warm_up(cases)
    ar, linear, hf = table.setup_s.values()
    assert 20 <= hf < 50 <= ar < 100 <= linear
    text = table.measure_text(Job(cases[2], 0, 0))
    assert text["ids"] == [3] * 4 and text["throughput"] == 1000 and text["setup_s"] == hf
    assert not {"drafted_per_iter", "acceptance_rate", "draft_ms", "top1_match"} & text.keys()


def test_a_table_over_a_drafter_that_is_no_model(tmp_path: Path) -> None:
    """Check that nothing is predicted, because such a drafter has no passes that can be timed."""
    pair = Pair(random_model(0), Watching(), None, Path(), None, {"target": 1.0, "draft": 0.0})
    rows = ("ar", "linear", "dynatree")
    cases = cases_of(Part(rows, prompt_tokens=(2,), new_tokens=(9,)))
    table = make_bench(pair, cases, [[3, 1]], tmp_path, "predicted", "exact")
    table.measure_all()
    texts = table.results.texts.values()
    assert len({text["ids_digest"] for text in texts}) == 1 and len(texts) == 3
    assert not any("predicted_ms" in text for text in texts)


def test_rows_over_a_head_and_over_the_draft_model(capsys: Captured, tmp_path: Path) -> None:
    """Check that the rows of one table use their own drafts, and that memory counts the head."""
    options = [
        "--columns",
        "draft_pass,exact,predicted",
        "--n-prompts",
        "1",
        "--max-new-tokens",
        "30",
    ]
    pair = ["--draft", DRAFT, "--methods", "linear K=4,linear K=4 head"]
    results, printed = run_bench(capsys, tmp_path / "a.jsonl", options, *pair)
    swapped = ["--draft", str(HEAD), "--methods", "linear K=4"]
    alone, _ = run_bench(capsys, tmp_path / "b.jsonl", options, *swapped)
    own, of_head = [t["iterations"] for t in results.texts.values() if t["row"] != "ar"]
    assert own != of_head == next(t["iterations"] for t in alone.texts.values() if t["draft_ms"])
    assert "models/tiny/draft and models/tiny/eagle" in " ".join(printed.split())
    cells = {row[0]: row[1:] for row in table_cells(results)[1]}
    assert cells["ar"][0] == "" and float(cells["linear K=4 head"][0]) > 0
    assert cells["linear K=4"][2] and not cells["linear K=4 head"][2]


def test_memory_counts_the_weights_of_a_head(capsys: Captured, tmp_path: Path) -> None:
    """Compare with the sizes: the embedding and output matrix, one layer and fc, in float32."""
    options = ["--table", "memory", "--threads", "1", "--n-prompts", "1", "--max-new-tokens", "4"]
    options += ["--prompt-tokens", "4", "--methods", "linear K=1,linear K=1 head"]
    found, _ = run_bench(capsys, tmp_path / "c.jsonl", options, "--draft", DRAFT)
    _, by_draft, by_head = [t["weights_and_caches_mb"] for t in found.texts.values()]
    n_own = sum(tensor.numel() for tensor in load_file(HEAD / "model.safetensors").values())
    n_head = n_own + 2 * 4096 * 320 + 2 * 320  # and the target's final norm
    n_draft = sum(tensor.numel() for tensor in load_file(f"{DRAFT}/model.safetensors").values())
    assert by_head - by_draft == pytest.approx(4e-6 * (n_head - n_draft), abs=0.05)


def test_passes_of_a_head_are_timed(capsys: Captured, tmp_path: Path) -> None:
    """Check that tables can time and predict a head's passes, which need states."""
    few = ["--n-prompts", "1", "--max-new-tokens", "8", "--draft", str(HEAD)]
    steps, _ = run_bench(capsys, tmp_path / "a.jsonl", few, "--table", "steps")
    assert min(steps.step_times.draft_ms) > 0
    options = ["--methods", "linear", "--columns", "predicted,exact"]
    results, _ = run_bench(capsys, tmp_path / "b.jsonl", few, *options)
    assert all(text["predicted_ms"] > 0 for text in results.texts.values())


def test_a_table_over_a_head_names_it(capsys: Captured, tmp_path: Path) -> None:
    options = ["--table", "deagle-2", "--draft", str(HEAD), "--methods", "beam k=2 N_max=4 D_max=2"]
    options += ["--dataset", "builtin", "--n-prompts", "1", "--max-new-tokens", "8"]
    _, printed = run_bench(capsys, tmp_path / "r.jsonl", options, "--temperature", "0")
    assert "here: the EAGLE head models/tiny/eagle, WikiText-2" in " ".join(printed.split())


def test_references_of_strict_rows_and_rows_over_a_window() -> None:
    """Check the references: strict ar with as many rows per pass, and ar over the same window. Each
    is added once, after ar."""
    methods = "dynatree,dynatree strict,linear K=3 strict,linear window=64,ar rows=4 strict"
    cases = cases_of(Part(new_tokens=(4, 8)), "--methods", methods)
    assert [(case.row, case.reference, case.new_tokens) for case in cases[:7]] == [
        ("ar", "ar", 4),
        ("ar strict rows=64", "ar strict rows=64", 4),
        ("ar strict rows=4", "ar strict rows=4", 4),
        ("ar window=64", "ar window=64", 4),
        ("dynatree", "ar", 4),
        ("dynatree strict", "ar strict rows=64", 4),
        ("linear K=3 strict", "ar strict rows=4", 4),
    ]
    assert cases[7].reference == cases[3].row and cases[8].reference == cases[2].row
    assert [case.new_tokens for case in cases] == [4] * 9 + [8] * 9


def test_the_baseline_of_speedups() -> None:
    """Check that any row can be the baseline, and is added at every size if it is missing. Texts
    are still compared with ar's."""
    cases = cases_of(Part(("ar", "linear"), new_tokens=(4, 8)), "--baseline", "hf-ar")
    assert labels(cases) == [f"{row} T={n}" for n in (4, 8) for row in ("ar", "hf-ar", "linear")]
    assert {case.reference for case in cases} == {"ar"}
    strict = cases_of(Part(), "--methods", "ar", "--baseline", "linear  K=3 strict")
    assert labels(strict) == ["ar", "ar strict rows=4", "linear K=3 strict"]


def test_the_generation_config_of_a_row() -> None:
    def config_of(row: str, top_p: float | None = None, **changes: object) -> GenerationConfig:
        return Case(row, "", 1, 1, **({"temperature": 0.0} | changes)).generation_config(
            top_p, seed=7
        )

    assert config_of("linear strict") == GenerationConfig(Chain(), strict=True)
    assert config_of("linear window=16 sinks=2") == GenerationConfig(Chain(), window=Window(16, 2))
    by_traversal = GenerationConfig(Chain(K=3), commit="rebuild", acceptance="traversal")
    assert config_of("linear K=3 rebuild traversal") == by_traversal
    assert config_of("linear K=3 rebuild", acceptance="traversal") == by_traversal
    hot = config_of("linear", 0.9, temperature=0.8, draft_temperature=0.6)
    assert hot.sampling == Sampling(0.8, 0.9, 7, 0.6, False)
    drawn = config_of("linear", 0.9, is_drawn=True, draft_temperature=0.6)
    assert drawn.sampling == Sampling(0.0, 1.0, 7, 0.6, True)


def test_rows_whose_passes_are_timed() -> None:
    rows = ("ar", "linear", "linear strict", "linear window=64", "linear head")
    timed = {row for row in rows if has_timed_passes(Case(row, "", 1, 1, 0.0))}
    assert timed == {"ar", "linear"}


def test_one_table_has_rows_of_several_kinds(capsys: Captured, tmp_path: Path) -> None:
    """Check that each row is compared with its own ar. Only rows without strict and window have a
    prediction, because passes are timed without them."""
    options = ["--methods", "linear,linear strict,linear window=64 sinks=2,linear rebuild"]
    options += ["--columns", "speedup,predicted,exact", "--n-prompts", "1"]
    results, printed = run_bench(capsys, tmp_path / "r.jsonl", QUICK, *options)
    cells = {row[0]: row[1:] for row in table_cells(results)[1]}
    assert all(cells[label][2] == "1/1" for label in cells if label.startswith("linear"))
    assert {label for label in cells if cells[label][1]} == {"linear", "linear rebuild"}
    assert "A strict row is compared" in printed and "A row with a window is compared" in printed


def test_the_enlarged_pair_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    """Check, with the draft only, that existing files are reused and that a failure is reported."""
    monkeypatch.setattr(enlarged, "FOLDER", tmp_path / "enlarged")
    monkeypatch.setattr(enlarged, "SHAPES", {"draft": (256, 2)})
    monkeypatch.setattr(enlarged, "VOCABULARY", 4100)
    (folder,) = enlarged.enlarged_pair()
    assert read_config(Path(folder)).hidden_size == 256
    assert enlarged.enlarged_pair() == [folder]
    assert capfd.readouterr().err.count("making the enlarged pair") == 1
    monkeypatch.setattr(enlarged, "SHAPES", {"target": (641, 6)})
    with pytest.raises(UsageError, match="could not be made; see the line above"):
        enlarged.enlarged_pair()


def test_notes_before_a_table(capsys: Captured) -> None:
    """Check three notes: too few prompts, prompts extended by the target to compare lengths, and
    more tokens than the target was trained for."""
    sizes = ["--n-prompts", "13", "--prompt-tokens", "4,80", "--max-new-tokens", "3000"]
    words = ["--table", "prompt", "--methods", "ar", "--target", DRAFT, "--draft", DRAFT]
    table = prepare_table(parse(*words, *sizes))
    said = capsys.readouterr().err
    assert "note: builtin has 12 prompts, not 13\n" in said
    assert "note: the target extends the builtin prompts to 80 tokens\n" in said
    assert "warning: 3080 tokens in all; the target was trained" in said
    assert table.head.n_prompts == {"builtin": 12}
    assert table.head.prompts == "builtin, extended by the target"
    assert [len(prompt) for prompt in table.prompts["builtin"]] == [80] * 12


def test_tables_and_columns_are_listed(capsys: Captured) -> None:
    assert main(["--tables"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in ("ablation", "v2-1", "dyspec-5", "predicted"))
