"""Tests of results files and the reports on them, with numbers that were computed by hand."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pandas
import pytest
from conftest import ROOT

from benchmark.cases import Case
from benchmark.hf import UNREPORTED_METRICS
from benchmark.report import (
    PUBLISHED_NOTE,
    case_cells,
    is_exact,
    machine_text,
    markdown_report,
    markdown_table,
    notes,
    prompts_text,
    table_cells,
    text_report,
    text_table,
)
from benchmark.results import (
    FORMAT,
    Head,
    Json,
    Line,
    Results,
    Writer,
    digest_of,
    load,
    new_file,
)
from cli.errors import UsageError
from cli.metrics import Metrics

SHOWN = [f"results/{name}_cpu.jsonl" for name in ("main", "enlarged")]
SHOWN_COLUMNS = ["throughput", "speedup", "tokens_per_iter", "exact"]
MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc"}
COLUMNS = ["throughput", "speedup", "predicted", "tokens_per_iter", "exact"]
AR = Case("ar", "builtin", 150, 64, 0.0)
CASES = [AR, replace(AR, row="fixed"), replace(AR, row="hf-assisted")]


def make_head(cases: list[Case], n_prompts: int = 3, **others: object) -> Head:
    given = {"format": FORMAT, "table": "ablation", "title": "", "columns": COLUMNS}
    given |= {"options": {"repeats": 1}, "unfetched": [], "machine": MACHINE, "load_before": None}
    given |= {"prompts": "builtin", "prompts_sha256": "0"}
    given |= {"n_prompts": {case.dataset: n_prompts for case in cases}}
    return Head(**(given | {"cases": cases} | others))


def make_text(case: Case, prompt: int, throughput: float, predicted_ms: float, last: int) -> Line:
    """Return the line of a text with the ids 1, 2 and `last`."""
    metrics = {field.name: 0.5 for field in fields(Metrics)} | {"throughput": throughput}
    names = ("row", "dataset", "prompt_tokens", "new_tokens", "temperature")
    line = metrics | {name: getattr(case, name) for name in names}
    line |= {
        "prompt": prompt,
        "round": 0,
        "ids": [1, 2, last],
        "ids_digest": digest_of([1, 2, last]),
    }
    if case.is_hf:
        return {name: value for name, value in line.items() if name not in UNREPORTED_METRICS}
    return line | {"predicted_ms": predicted_ms}


def make_lines(cases: list[Case] = CASES) -> list[Line]:
    """Return the lines of three prompts for ar, a method and transformers. The method is 2, 1 and
    0.5 times as fast as ar, and its last text differs from ar's."""
    ar, fixed, hf = cases
    lines = []
    for prompt, (slow, fast) in enumerate([(100.0, 200.0), (80.0, 80.0), (60.0, 30.0)]):
        lines.append(make_text(ar, prompt, slow, 12.0, 3))
        lines.append(make_text(fixed, prompt, fast, 8.0, 4 if prompt == 2 else 3))
        lines.append(make_text(hf, prompt, slow / 2, 1.0, 3))
    return lines


def make_difference(text: Line, at: int = 2, gap: float | None = 0.25) -> dict[str, Json]:
    names = ("row", "dataset", "prompt_tokens", "new_tokens", "temperature", "prompt", "round")
    return {"difference": {name: text[name] for name in names} | {"at": at, "gap": gap}}


def make_results(lines: list[Json], head: Head | None = None) -> Results:
    found = Results(head or make_head(CASES))
    for line in lines:
        found.add(line)
    return found


def write_results(file: Path, lines: list[Json], head: Head | None = None) -> Path:
    """Write a results file with these lines after its head, and return it."""
    every = [{"head": asdict(head or make_head(CASES))}, *lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in every))
    return file


@pytest.fixture
def lines() -> list[Line]:
    return make_lines()


@pytest.fixture
def results(lines: list[Line]) -> Results:
    return make_results([*lines, make_difference(lines[-2])])


def test_cells_are_medians_with_quartiles_and_speedups_are_by_prompt(results: Results) -> None:
    """Check that quartiles are left out where they are printed as the same number."""
    header, body = table_cells(results)
    assert header == ["method", "tok/s", "x ar", "predicted", "tok/iter", "exact"]
    assert body == [
        ["ar", "80.0 (70.0-90.0)", "", "", "0.50", ""],
        ["fixed", "80.0 (55.0-140.0)", "1.00x (0.75-1.50)", "1.50x", "0.50", "2/3"],
        ["hf-assisted", "40.0 (35.0-45.0)", "0.50x", "", "0.50", "3/3"],
    ]
    sampled = [replace(case, temperature=0.6) for case in CASES]
    found = make_results(make_lines(sampled), make_head(sampled))
    assert [row[-1] for row in table_cells(found)[1]] == ["", "", ""], "sampled texts are compared"


def test_means_and_deviations_are_over_prompts(lines: list[Line]) -> None:
    """Check means and deviations of three prompts, which the papers print. The throughputs are 100,
    80 and 60 for ar; 200, 80 and 30 for the method. The acceptance rate of the papers' code may
    exceed 100 %. A metric that a case does not report is empty."""
    for text, value in zip(lines[1::3], (1.0, 1.0, 1.3), strict=True):
        text["code_acceptance"] = value
    columns = ["throughput_mean", "speedup_mean", "code_acceptance_mean", "acceptance_rate_mean"]
    header, body = case_cells(make_results(lines), columns)
    assert header[1:] == ["tok/s mean", "x ar mean", "accept (code) mean", "accept mean"]
    assert body == [
        ["ar", "80.0 ± 16.3", "", "", "0.50 ± 0.00"],
        ["fixed", "103.3 ± 71.3", "1.17x ± 0.62x", "110.0% ± 14.1%", "0.50 ± 0.00"],
        ["hf-assisted", "40.0 ± 8.2", "0.50x ± 0.00x", "", ""],
    ]
    one = case_cells(make_results(lines[:2]), columns)[1]
    assert one[1] == ["fixed", "200.0", "2.00x", "100.0%", "0.50"], "one prompt has no deviation"


def test_a_ratio_of_means_is_no_mean_of_ratios(lines: list[Line]) -> None:
    """Check the speedups that the papers' authors compute: a ratio of mean rates or of mean times.
    It includes only prompts that the baseline has, too. Pooled tokens per iteration (v2, table 3)
    are the tokens of all texts over the passes of all texts."""
    columns = ["tokens_pooled", "throughput_speedup", "wall_speedup", "more_memory"]
    for prompt, (ar, fixed, n) in enumerate([(1.0, 0.5, 10), (2.0, 2.0, 30), (3.0, 0.5, 0)]):
        of_ar, of_fixed, _ = lines[3 * prompt : 3 * prompt + 3]
        of_ar |= {"wall_ms": ar, "peak_mb": 100.0 * ar, "iterations": 0}
        of_fixed |= {"wall_ms": fixed, "peak_mb": 200.0}
        of_fixed |= {"iterations": n, "tokens_per_iter": 2.0 + 2 * prompt}
    header, body = case_cells(make_results(lines), columns)
    assert header[1:] == ["tok/iter pooled", "tok/s x ar", "wall x ar", "over ar"]
    assert body[:2] == [["ar", "", "", "", ""], ["fixed", "3.50", "1.29x", "2.00x", "+0.0%"]]
    without = lines[6].pop("wall_ms")
    assert without and case_cells(make_results(lines), columns)[1][1][3] == "", "a time is missing"
    del lines[6]  # ar's text of the third prompt
    cells = case_cells(make_results(lines), columns)[1][1]
    assert cells[2:4] == ["1.56x", "1.20x"], "280 / 180, 3 / 2.5"


def test_speedups_are_over_the_baseline_that_is_asked_for(lines: list[Line]) -> None:
    """Check that header and notes name the baseline. Texts are still compared with ar's."""
    found = make_results(lines, make_head(CASES, options={"baseline": "fixed"}))
    header, body = case_cells(found, ["speedup_mean", "throughput_speedup", "exact"])
    assert header == ["method", "x fixed mean", "tok/s x fixed", "exact"]
    assert body == [
        ["ar", "1.17x ± 0.62x", "0.77x", ""],
        ["fixed", "", "", "2/3"],
        ["hf-assisted", "0.58x ± 0.31x", "0.39x", "3/3"],
    ]
    slower, ranked, difference = notes(found)
    assert slower == "Slower than fixed on the median prompt: hf-assisted (0.50x)."
    assert ranked.startswith("Ranked by x fixed, ")
    assert difference.startswith("fixed differs from ar on 1 of 3 texts")


def test_published_figures_are_shown_next_to_measured_ones(lines: list[Line]) -> None:
    cases = [AR, replace(CASES[1], published={"speedup_mean": "1.47x"}), CASES[2]]
    found = make_results(lines, make_head(cases))
    header, body = case_cells(found, ["throughput_mean", "speedup_mean"])
    assert header == ["method", "tok/s mean", "x ar mean", "paper x mean"]
    assert notes(found)[0] == PUBLISHED_NOTE
    assert [row[-1] for row in body] == ["", "1.47x", ""]


def test_an_unfinished_run_is_shown_as_unfinished(lines: list[Line]) -> None:
    """Check also that a case without texts, a missing ar and a missing metric are no errors. An
    unfinished run once looked like a finished one."""
    assert "UNFINISHED" not in text_report(make_results(lines), 80)
    fixed = lines[1::3]
    found = make_results(fixed)
    assert table_cells(found)[1] == [["fixed", "80.0 (55.0-140.0)", "", "", "0.50", ""]]
    del fixed[0]["throughput"]
    found = make_results(fixed)
    assert table_cells(found)[1] == [["fixed", "", "", "", "0.50", ""]]
    for report in (text_report(found, 80), markdown_report(found)):
        assert report.startswith("UNFINISHED, 3 of 9 texts. ablation: 3 prompts")


def test_notes_name_slower_rows_and_different_texts(results: Results, lines: list[Line]) -> None:
    slower, _, difference = notes(results)
    assert slower == "Slower than ar on the median prompt: hf-assisted (0.50x)."
    assert difference == (
        "fixed differs from ar on 1 of 3 texts (first prompt: 2, earliest token: 2, top-2 gap in "
        "float32: at most 2.5e-01, near-ties: 0)."
    )
    unknown = notes(make_results(lines))[2]  # as if interrupted before the texts were compared
    assert "earliest token: unknown, top-2 gap in float32: unknown, near-ties: 0" in unknown
    lines[-2] |= {"ids": [1, 2, 3], "ids_digest": digest_of([1, 2, 3])}
    exact = "Every greedy text is identical to ar's, token for token."
    assert notes(make_results(lines))[2] == exact
    cases = [*CASES, *(replace(AR, row=f"fixed D={depth}") for depth in range(8))]
    others = [make_text(case, 0, 50.0, 1.0, 3) for case in cases[3:]]
    found = notes(make_results(lines + others, make_head(cases)))
    assert found[0] == "9 of 10 rows are slower than ar."


@pytest.mark.parametrize(
    ("speeds", "note"),
    [
        ({"linear": 4, "fixed": 2}, "0 of 2 neighbouring pairs have overlapping quartiles."),
        (
            {"linear": 1.1, "fixed": 0.3},
            "1 of 2 neighbouring pairs have overlapping quartiles, so their order may be noise. "
            "Without overlap: ar > fixed.",
        ),
        (
            {"linear": 1.1, "fixed": 1.2},
            "2 of 2 neighbouring pairs have overlapping quartiles, so their order may be noise.",
        ),
    ],
)
def test_rows_whose_quartiles_overlap(speeds: dict[str, float], note: str) -> None:
    """Check the note on neighbours in the ranking. ar is at 1.00x; the quartiles of the others are
    20 % above and below the median."""
    cases = [AR, *(replace(AR, row=row) for row in speeds)]
    lines = [make_text(AR, prompt, 100.0, 1.0, 3) for prompt in range(3)]
    for case, speed in zip(cases[1:], speeds.values(), strict=True):
        for prompt, factor in enumerate((0.6, 1.0, 1.4)):
            lines.append(make_text(case, prompt, 100 * speed * factor, 1.0, 3))
    found = notes(make_results(lines, make_head(cases)))
    assert f"Ranked by x ar, {note}" in found


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


def test_a_wide_text_table_continues_below_with_its_labels() -> None:
    row = ["fixed", "1" * 50, "2" * 50]
    found = text_table(["method", "a", "b"], [row], 80).split()
    assert found == ["method", "a", *row[:2], "method", "b", "fixed", row[2]]


def test_a_file_holds_everything(lines: list[Line], tmp_path: Path) -> None:
    """Check also that equal ids are stored only once."""
    file = tmp_path / "made" / "r.jsonl"
    with new_file(file):
        writer = Writer(file, Results(make_head(CASES)))
        for line in lines:
            del line["ids"], line["ids_digest"]
            ids = [1, 2, 4] if line["prompt"] == 2 and line["row"] == "fixed" else [1, 2, 3]
            writer.add(line | writer.results.ids_fields(ids))
        writer.add(make_difference(lines[-2]))
    assert load(file) == writer.results
    assert file.read_text().count('"ids":') == 2


def test_an_incomplete_last_line_is_ignored_and_removed(lines: list[Line], tmp_path: Path) -> None:
    """Check that the next text starts a new line."""
    file = write_results(tmp_path / "r.jsonl", lines)
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    found = load(file)
    assert found.n_missing == 1
    writer = Writer(file, found)
    writer.drop_partial_line()
    writer.add(lines[-1])
    assert load(file).texts == make_results(lines).texts
    file.write_bytes(whole[:10])
    with pytest.raises(UsageError, match="r.jsonl is not a results file: it has no complete line"):
        load(file)


def test_two_runs_do_not_write_into_one_file(lines: list[Line], tmp_path: Path) -> None:
    """Check that the second run is refused, because the file is longer than it expects."""
    file = write_results(tmp_path / "r.jsonl", lines[:3])
    first, second = (Writer(file, load(file)) for _ in range(2))
    first.add(lines[3])
    with pytest.raises(UsageError, match="r.jsonl: another run writes to it"):
        second.add(lines[3])
    first.add(lines[4])
    assert len(load(file).texts) == 5
    with pytest.raises(UsageError, match="r.jsonl exists already"), new_file(file):
        pass
    with pytest.raises(UsageError, match="cannot be written: "), new_file(file / "r.jsonl"):
        pass


def test_a_resumed_run_does_not_remove_another_runs_line(lines: list[Line], tmp_path: Path) -> None:
    """Check a file whose incomplete last line was being written by another run."""
    file = write_results(tmp_path / "r.jsonl", lines)
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    writer = Writer(file, load(file))
    file.write_bytes(whole)
    with pytest.raises(UsageError, match="r.jsonl: another run writes to it"):
        writer.drop_partial_line()
    assert file.read_bytes() == whole


def change_text(**changed: Json) -> Callable[[list], None]:
    return lambda lines: lines[1].update(changed)


def change_head(**changed: Json) -> Callable[[list], None]:
    return lambda lines: lines[0]["head"].update(changed)


STEPS = {"context": 1, "rows": [1, 2], "target_ms": [1.0, 2.0], "draft_ms": [1.0, 2.0]}
STEPS |= {"target_bytes": 1, "draft_bytes": 1, "copy_gb_s": 1.0}
INVALID = {  # the error message -> how to make the file invalid
    "line 1: format is 4, it must be 5 (not a results file of format 5)": change_head(format=4),
    "line 1: head has no table": lambda lines: lines[0]["head"].pop("table"),
    "line 1: columns of head is 'x', it must be list[str]": change_head(columns="x"),
    "line 1: machine has no torch": lambda lines: lines[0]["head"]["machine"].pop("torch"),
    "line 1: duplicate case": lambda lines: lines[0]["head"]["cases"].append(asdict(AR)),
    "line 1: a case is not a JSON object": change_head(cases=[3]),
    "line 1: n_prompts has no 'builtin'": change_head(n_prompts={}),
    "line 1: method is 'x', it must be one of": change_head(cases=[asdict(replace(AR, row="x"))]),
    "line 1: repeats is not a whole number": change_head(options={"repeats": [1]}),
    "line 1: the line has no head": lambda lines: lines.pop(0),
    "line 2: the line is not a JSON object": lambda lines: lines.insert(1, 3),
    "line 2: prompt is missing": lambda lines: lines[1].pop("prompt"),
    "line 2: prompt is 3, it must be below 3": change_text(prompt=3),
    "line 2: prompt is -1, it must be a whole number of 0 or more": change_text(prompt=-1),
    "line 2: prompt is True, it must be a whole number": change_text(prompt=True),
    "line 2: round is 1, it must be below 1": change_text(round=1),
    "line 2: 'ar' at this size is not a case of the head": change_text(new_tokens=65),
    "line 2: 'fixed D=2' at this size is not a case": change_text(row="fixed D=2"),
    "line 2: throughput is '1', it must be a number": change_text(throughput="1"),
    "line 2: throughput is 10000000000000.0, it must be a number": change_text(throughput=1e13),
    "line 2: NaN is not a JSON number": change_text(throughput=float("nan")),
    "line 2: ids is [1, -2], it must be list[int]": change_text(ids=[1, -2]),
    "line 2: ids_digest does not match ids": change_text(ids=[1, 2, 9]),
    "line 2: a greedy text has no ids_digest": lambda lines: lines[1].pop("ids_digest"),
    "line 3: duplicate text of 'ar', prompt 0": lambda lines: lines.insert(2, lines[1]),
    "line 11: a second head": lambda lines: lines.extend(lines[:]),
    "line 11: difference of a text that no earlier line has": lambda lines: lines.append(
        make_difference(lines[1] | {"prompt": 7})
    ),
    "line 11: at is missing": lambda lines: lines.append({"difference": lines[1]}),
    "line 11: step_times have a number that is not above 0": lambda lines: lines.append(
        {"step_times": STEPS | {"copy_gb_s": 0}}
    ),
    "line 11: step_times need two or more increasing rows": lambda lines: lines.append(
        {"step_times": STEPS | {"rows": [1]}}
    ),
    "line 12: duplicate step_times": lambda lines: lines.extend([{"step_times": STEPS}] * 2),
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_file_is_refused(message: str, lines: list[Line], tmp_path: Path) -> None:
    """Check that the error is one line with the place and the reason."""
    every = [{"head": asdict(make_head(CASES))}, *lines]
    INVALID[message](every)
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in every))
    with pytest.raises(UsageError, match=re.escape(f"r.jsonl, {message}")):
        load(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "line 1: not JSON: "),
        (b"\xff\xfe\n", "line 1: "),
        (b"[" * 100_000 + b"\n", "line 1: "),
        (b"9" * 5000 + b"\n", "line 1: "),
    ],
)
def test_another_kind_of_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"{message}.*not a results file of format 5") as error:
        load(file)
    assert "\n" not in str(error.value)
    for name in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="not a results file: "):
            load(name)


def test_pandas_reads_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python of docs/results.md and compare its speedups with the report's."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import pandas.*?)```", page, re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(code, names)
    texts, speedups = names["texts"], names["speedups"]
    found = load("results/sampling_cpu.jsonl")
    assert len(texts) == len(found.texts) / 2 and isinstance(speedups, pandas.Series)
    cells = {row[0]: row[1] for row in case_cells(found, ["speedup"])[1]}
    for row, median in speedups.items():
        assert row == "ar" or cells[f"{row} t=0.6"].startswith(f"{median:.2f}x (")


@pytest.mark.parametrize("file", SHOWN)
def test_documents_show_the_committed_results(file: str) -> None:
    """Compare four columns of the file with the tables of docs/results.md and README.md, which has
    some rows."""
    results = load(ROOT / file)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    caption = markdown_report(results).split("\n\n")[0]
    table = markdown_table(*case_cells(results, SHOWN_COLUMNS))
    assert f"From `{file}`. {caption}\n\n{table}\n\n" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if file == SHOWN[0]:
        table = table.splitlines()
        where = f"{prompts_text(results.head)}; {machine_text(results.head.machine)}"
        shown = (
            readme[: readme.index(f"\n\n{where}, from `{file}`.\n")].split("\n\n")[-1].splitlines()
        )
        assert shown[:2] == table[:2] and shown == [row for row in table if row in shown]
        assert len(shown) > 9
