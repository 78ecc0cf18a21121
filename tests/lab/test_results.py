"""Tests of results files and the reports on them, with numbers that were computed by hand."""

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pandas
import pytest
from small import ROOT

from dynatree_lab.benchmark.cases import DEFAULT_COLUMNS, Case
from dynatree_lab.benchmark.hf import UNREPORTED_METRICS
from dynatree_lab.benchmark.report import (
    DRAWN_NOTE,
    PUBLISHED_NOTE,
    is_exact,
    notes,
    table_of,
    text_frame,
    text_report,
)
from dynatree_lab.benchmark.results import (
    FORMAT,
    KEYS,
    Line,
    Results,
    append,
    drop_partial_line,
    load,
)
from dynatree_lab.errors import UsageError
from dynatree_lab.metrics import Metrics

MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "draft_dtype": "float32"}
MACHINE |= {"processor": "P", "threads": 2, "torch": "2.13.0", "python": "3.11", "commit": "abc"}
AR = Case("ar", "builtin", 150, 64, 0.0)
CASES = [AR, replace(AR, row="fixed"), replace(AR, row="hf-assisted")]


def make_head(cases: list[Case], n_prompts: int = 3, **others: object) -> Line:
    head = {"format": FORMAT, "table": "ablation", "title": "", "columns": list(DEFAULT_COLUMNS)}
    head |= {"options": {}, "machine": MACHINE, "load_before": None, "prompts": "builtin"}
    head |= {"n_prompts": {case.dataset: n_prompts for case in cases}}
    return head | {"cases": [asdict(case) for case in cases]} | others


def make_text(case: Case, prompt: int, throughput: float, last: int = 3) -> Line:
    """Return the line of a text with the ids 1, 2 and `last`."""
    line = {field.name: 0.5 for field in fields(Metrics)} | {"throughput": throughput}
    line |= dict(zip(KEYS, (*case.key, prompt, 0), strict=True))
    line |= {"ids": [1, 2, last], "ids_digest": f"of {last}"}
    if case.is_hf:
        return {name: value for name, value in line.items() if name not in UNREPORTED_METRICS}
    return line


def make_lines(cases: list[Case] = CASES) -> list[Line]:
    """Return the lines of three prompts for ar, a method and transformers. The method is 2, 1 and
    0.5 times as fast as ar, and its last text differs from ar's."""
    ar, fixed, hf = cases
    lines = []
    for prompt, (slow, fast) in enumerate([(100.0, 200.0), (80.0, 80.0), (60.0, 30.0)]):
        lines.append(make_text(ar, prompt, slow))
        lines.append(make_text(fixed, prompt, fast, 4 if prompt == 2 else 3))
        lines.append(make_text(hf, prompt, slow / 2))
    return lines


def make_difference(text: Line, at: int = 2, gap: float | None = 0.25) -> Line:
    return {"difference": {name: text[name] for name in KEYS} | {"at": at, "gap": gap}}


def make_results(lines: list[Line], head: Line | None = None) -> Results:
    found = Results(head or make_head(CASES))
    for line in lines:
        found.add(line)
    return found


def write_results(file: Path, lines: list[Line], head: Line | None = None) -> Path:
    """Write a results file with these lines after its head, and return it."""
    every = [{"head": head or make_head(CASES)}, *lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in every))
    return file


def rows_of(results: Results, *columns: str) -> list[list[str]]:
    """Return header and rows of a table."""
    table = table_of(results, text_frame(results), columns)
    return [["method", *table.columns], *map(list, table.itertuples(name=None))]


def notes_of(results: Results, *columns: str) -> list[str]:
    return list(notes(results, text_frame(results), columns))


@pytest.fixture
def lines() -> list[Line]:
    return make_lines()


@pytest.fixture
def results(lines: list[Line]) -> Results:
    return make_results([*lines, make_difference(lines[-2])])


def test_cells_are_medians_with_quartiles_and_speedups_are_by_prompt(results: Results) -> None:
    """Check that quartiles are left out where they are printed as the same number."""
    assert rows_of(results, "throughput", "speedup", "tokens_per_iter", "exact") == [
        ["method", "tok/s", "x ar", "tok/iter", "exact"],
        ["ar", "80.0 (70.0-90.0)", "", "0.50", ""],
        ["fixed", "80.0 (55.0-140)", "1.00x (0.75-1.50)", "0.50", "2/3"],
        ["hf-assisted", "40.0 (35.0-45.0)", "0.50x", "0.50", "3/3"],
    ]
    sampled = [replace(case, temperature=0.6) for case in CASES]
    found = make_lines(sampled)
    for line in found:
        for name in ("ids_digest", "ids"):  # texts with drawn candidates have none
            line.pop(name, None)
    found = make_results(found, make_head(sampled))
    assert [row[1] for row in rows_of(found, "exact")[1:]] == [""] * 3, "drawn texts are compared"
    assert notes_of(found) == [DRAWN_NOTE]


def test_means_and_deviations_are_over_prompts(lines: list[Line]) -> None:
    """Check those that the papers print: throughputs of 100, 80 and 60 for ar; 200, 80 and 30 for
    the method. A metric that a case does not report is empty."""
    for text, value in zip(lines[1::3], (1.0, 1.0, 1.3), strict=True):
        text["code_acceptance"] = value
    columns = ("throughput_mean", "speedup_mean", "code_acceptance_mean", "acceptance_rate_mean")
    assert rows_of(make_results(lines), *columns) == [
        ["method", "tok/s mean", "x ar mean", "accept (code) mean", "accept mean"],
        ["ar", "80.0 ± 16.3", "", "", "0.50 ± 0.00"],
        ["fixed", "103 ± 71.3", "1.17x ± 0.62x", "110.0% ± 14.1%", "0.50 ± 0.00"],
        ["hf-assisted", "40.0 ± 8.2", "0.50x ± 0.00x", "", ""],
    ]
    one = rows_of(make_results(lines[:2]), *columns)
    assert one[2] == ["fixed", "200", "2.00x", "100.0%", "0.50"], "one prompt has no deviation"


def test_a_ratio_of_means_is_no_mean_of_ratios(lines: list[Line]) -> None:
    """Check the speedups that the papers' authors compute: a ratio of mean rates or of mean times.
    It includes only prompts that the baseline has, too. Pooled tokens per iteration (v2, table 3)
    are the tokens of all texts over the passes of all texts."""
    columns = ("tokens_pooled", "throughput_speedup", "wall_speedup", "more_memory")
    for prompt, (ar, fixed, n) in enumerate([(1.0, 0.5, 10), (2.0, 2.0, 30), (3.0, 0.5, 0)]):
        of_ar, of_fixed, _ = lines[3 * prompt : 3 * prompt + 3]
        of_ar |= {"wall_ms": ar, "peak_mb": 100.0 * ar, "iterations": 0}
        of_fixed |= {"wall_ms": fixed, "peak_mb": 200.0}
        of_fixed |= {"iterations": n, "tokens_per_iter": 2.0 + 2 * prompt}
    found = rows_of(make_results(lines), *columns)
    assert found[0][1:] == ["tok/iter pooled", "tok/s x ar", "wall x ar", "over ar"]
    assert found[1:3] == [["ar", "", "", "", ""], ["fixed", "3.50", "1.29x", "2.00x", "+0.0%"]]
    del lines[6]["wall_ms"]
    assert rows_of(make_results(lines), *columns)[2][3] == "", "a time is missing"
    del lines[6]  # ar's text of the third prompt
    assert rows_of(make_results(lines), *columns)[2][2:4] == ["1.56x", "1.20x"]  # 280/180, 3/2.5


def test_speedups_are_over_the_baseline_that_is_asked_for(lines: list[Line]) -> None:
    """Check that the header names the baseline. Texts are still compared with ar's."""
    found = make_results(lines, make_head(CASES, options={"baseline": "fixed"}))
    assert rows_of(found, "speedup_mean", "throughput_speedup", "exact") == [
        ["method", "x fixed mean", "tok/s x fixed", "exact"],
        ["ar", "1.17x ± 0.62x", "0.77x", ""],
        ["fixed", "", "", "2/3"],
        ["hf-assisted", "0.58x ± 0.31x", "0.39x", "3/3"],
    ]
    assert [note[:30] for note in notes_of(found)] == ["fixed differs from ar on 1 of "]


def test_speeds_are_computed_from_prices(lines: list[Line]) -> None:
    """Check column and note with prices of an option, of a file, and without any. A text whose
    passes were not counted has no speed."""
    for ar, fixed in zip(lines[::3], lines[1::3], strict=True):
        ar |= {"target_rows": {"1": 63}, "draft_rows": {}}
        fixed |= {"target_rows": {"4": 21}, "draft_rows": {"1": 42}, "drafted_per_iter": 3.0}
    columns = ("computed", "rows", "draft_passes")
    for options, speed, note in (
        ({}, ["", "", ""], "Without prices, x ar computed is empty: use --prices or --measure-pr"),
        ({"prices": "0.9:0.1:0.3"}, ["1.00x", "1.58x", ""], "prices 0.9:0.1:0.3 of an iteration, "),
        ({"prices": "0.5:0.5:0", "prices_file": "a.jsonl"}, ["1.00x", "1.20x", ""], "to a.jsonl."),
    ):
        found = make_results(lines, make_head(CASES, options=options))
        header, *rows = rows_of(found, *columns)
        assert header[1:] == ["x ar computed", "rows/tree", "passes"]
        assert [row[1] for row in rows] == speed and rows[1][2:] == ["4.0", "0.50"]
        assert rows[2][2:] == ["", ""], "transformers reports no trees"
        assert note in notes_of(found, *columns)[-1]
    assert len(notes_of(found, "speedup")) == len(notes_of(found, *columns)) - 1


def test_published_figures_are_shown_next_to_measured_ones(lines: list[Line]) -> None:
    cases = [AR, replace(CASES[1], published={"speedup_mean": "1.47x"}), CASES[2]]
    found = make_results(lines, make_head(cases))
    header, *rows = rows_of(found, "throughput_mean", "speedup_mean")
    assert header == ["method", "tok/s mean", "x ar mean", "paper x mean"]
    assert notes_of(found)[0] == PUBLISHED_NOTE and [row[-1] for row in rows] == ["", "1.47x", ""]


def test_an_unfinished_run_is_shown_as_unfinished(lines: list[Line]) -> None:
    """Check also that a case without texts, a missing ar and a missing metric are no errors, and
    that a wide table continues below with its labels."""
    assert "UNFINISHED" not in text_report(make_results(lines), DEFAULT_COLUMNS, 80)
    fixed = lines[1::3]
    assert rows_of(make_results(fixed), *DEFAULT_COLUMNS)[1:] == [
        ["fixed", "80.0 (55.0-140)", "", "0.50", "0.50", ""]
    ]
    del fixed[0]["throughput"]
    found = make_results(fixed)
    assert rows_of(found, *DEFAULT_COLUMNS)[1:] == [["fixed", "", "", "0.50", "0.50", ""]]
    report = text_report(found, ("tpot", "ttft_mean", "acceptance_rate_mean", "draft_mean"), 50)
    assert report.startswith("UNFINISHED, 3 of 9 texts. ablation: 3 prompts")
    assert report.count("\nfixed ") == 2 and max(map(len, report.splitlines())) <= 50


def test_a_note_names_different_texts(results: Results, lines: list[Line]) -> None:
    assert notes_of(results) == [
        "fixed differs from ar on 1 of 3 texts (first prompt: 2, earliest token: 2, gap in "
        "float32: at most 2.5e-01, near-ties: 0)."
    ]
    (unknown,) = notes_of(make_results(lines))  # as if interrupted before the texts were compared
    assert "earliest token: unknown, gap in float32: unknown, near-ties: 0" in unknown
    lines[-2]["ids_digest"] = "of 3"
    exact = "Every compared text is identical to ar's, token for token."
    assert notes_of(make_results(lines)) == [exact]


@pytest.mark.parametrize(
    ("row", "dtype", "gap", "expected"),
    [
        ("fixed", "float32", 0.25, False),
        ("fixed", "float32", 1e-5, True),
        ("fixed", "float32", None, False),
        ("fixed", "bfloat16", 0.25, True),
        ("fixed strict", "bfloat16", 1e-5, False),
    ],
)
def test_what_has_to_be_exact(row: str, dtype: str, gap: float | None, expected: bool) -> None:
    """Check that strict texts must be exact, and in float32 all others except near-ties."""
    cases = [AR, replace(AR, row=row), CASES[2]]
    head = make_head(cases, machine=MACHINE | {"dtype": dtype})
    lines = make_lines(cases)
    assert is_exact(make_results([*lines, make_difference(lines[-2], gap=gap)], head)) == expected


def test_a_file_holds_everything(lines: list[Line], tmp_path: Path) -> None:
    """Check that equal ids are stored once, and that an incomplete last line is ignored and then
    removed, so that the next text starts a new line."""
    file, written = tmp_path / "made" / "r.jsonl", Results(make_head(CASES))
    append(file, {"head": written.head})
    for line in lines:
        ids = line.pop("ids")
        append(file, line | written.ids_fields(ids))
        written.add(line | written.ids_fields(ids))
    assert load(file) == written and file.read_text().count('"ids":') == 2
    file.write_bytes(file.read_bytes()[:-20])
    assert load(file).n_missing == 1
    drop_partial_line(file)
    append(file, line | written.ids_fields(ids))
    assert load(file) == written
    with pytest.raises(UsageError, match="cannot be written: File exists"):
        append(file / "r.jsonl", line)
    file.write_text('{"head": {"format": 4}}\n')
    with pytest.raises(UsageError, match="r.jsonl has format 4, it must be 6"):
        load(file)


def test_pandas_reads_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python of docs/results.md and compare its speedups with the report's."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import pandas.*?)```", page, re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(code, names)
    texts, speedups = names["texts"], names["speedups"]
    found = load("results/regimes_sampled_cpu.jsonl")
    assert len(texts) == len(found.texts) and isinstance(speedups, pandas.Series)
    cells = {row[0]: row[1] for row in rows_of(found, "speedup")}
    for row, median in speedups.items():
        assert row == "ar" or cells[row].startswith(f"{median:.2f}x (")
