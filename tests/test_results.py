"""Results files and what is shown of them, on numbers worked out by hand."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pandas
import pytest
from conftest import ROOT

from benchmark.cases import Case
from benchmark.hf import NOT_TOLD
from benchmark.report import (
    NOT_OURS,
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
from benchmark.results import FORMAT, Head, Json, Results, Text, Writer, digest_of, load, new_file
from cli.errors import UsageError
from cli.metrics import Metrics

SHOWN = [f"results/{name}_cpu.jsonl" for name in ("main", "enlarged", "ablation", "steps")]
README_COLUMNS = ["throughput", "speedup", "tokens_per_iter", "exact"]
MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc"}
COLUMNS = ["throughput", "speedup", "predicted", "tokens_per_iter", "exact"]
AR = Case("ar", "builtin", 150, 64, 0.0)
CASES = [AR, replace(AR, row="fixed"), replace(AR, row="hf-assisted")]


def head_of(cases: list[Case], n_prompts: int = 3, **others: object) -> Head:
    given = {"format": FORMAT, "table": "ablation", "title": "", "columns": COLUMNS}
    given |= {"options": {"repeats": 1}, "unfetched": [], "machine": MACHINE, "load_before": None}
    given |= {"prompts": "builtin", "prompts_sha256": "0"}
    given |= {"n_prompts": {case.dataset: n_prompts for case in cases}}
    return Head(**(given | {"cases": cases} | others))


def text_of(case: Case, prompt: int, throughput: float, predicted_ms: float, last: int) -> Text:
    """The line of a text whose ids are 1, 2 and the last one."""
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
        return {name: value for name, value in line.items() if name not in NOT_TOLD}
    return line | {"predicted_ms": predicted_ms}


def lines_of(cases: list[Case] = CASES) -> list[Text]:
    """ar, one method that is 2, 1 and 0.5 times as fast, and transformers; the last text of the
    method differs."""
    ar, fixed, hf = cases
    lines = []
    for prompt, (slow, fast) in enumerate([(100.0, 200.0), (80.0, 80.0), (60.0, 30.0)]):
        lines.append(text_of(ar, prompt, slow, 12.0, 3))
        lines.append(text_of(fixed, prompt, fast, 8.0, 4 if prompt == 2 else 3))
        lines.append(text_of(hf, prompt, slow / 2, 1.0, 3))
    return lines


def difference_of(text: Text, at: int = 2, gap: float | None = 0.25) -> dict[str, Json]:
    names = ("row", "dataset", "prompt_tokens", "new_tokens", "temperature", "prompt", "round")
    return {"difference": {name: text[name] for name in names} | {"at": at, "gap": gap}}


def results_of(lines: list[Json], head: Head | None = None) -> Results:
    found = Results(head or head_of(CASES))
    for line in lines:
        found.add(line)
    return found


def written(file: Path, lines: list[Json], head: Head | None = None) -> Path:
    """The file, with these lines after its head."""
    every = [{"head": asdict(head or head_of(CASES))}, *lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in every))
    return file


@pytest.fixture
def lines() -> list[Text]:
    return lines_of()


@pytest.fixture
def results(lines: list[Text]) -> Results:
    return results_of([*lines, difference_of(lines[-2])])


def test_cells_are_medians_with_quartiles_and_speedups_are_by_prompt(results: Results) -> None:
    """One figure alone where all three read the same."""
    header, body = table_cells(results)
    assert header == ["method", "tok/s", "x ar", "predicted", "tok/iter", "exact"]
    assert body == [
        ["ar", "80.0 (70.0-90.0)", "", "", "0.50", ""],
        ["fixed", "80.0 (55.0-140.0)", "1.00x (0.75-1.50)", "1.50x", "0.50", "2/3"],
        ["hf-assisted", "40.0 (35.0-45.0)", "0.50x", "", "0.50", "3/3"],
    ]
    sampled = [replace(case, temperature=0.6) for case in CASES]
    found = results_of(lines_of(sampled), head_of(sampled))
    assert [row[-1] for row in table_cells(found)[1]] == ["", "", ""], "sampled: not compared"


def test_means_and_deviations_are_over_prompts(lines: list[Text]) -> None:
    """As the papers print them: 100, 80 and 60; 200, 80 and 30 are 2, 1 and 0.5 times as fast; by
    their code's acceptance above 100 %. None of what a case does not tell."""
    for text, value in zip(lines[1::3], (1.0, 1.0, 1.3), strict=True):
        text["code_acceptance"] = value
    columns = ["throughput_mean", "speedup_mean", "code_acceptance_mean", "acceptance_rate_mean"]
    header, body = case_cells(results_of(lines), columns)
    assert header[1:] == ["tok/s mean", "x ar mean", "accept (code) mean", "accept mean"]
    assert body == [
        ["ar", "80.0 ± 16.3", "", "", "0.50 ± 0.00"],
        ["fixed", "103.3 ± 71.3", "1.17x ± 0.62x", "110.0% ± 14.1%", "0.50 ± 0.00"],
        ["hf-assisted", "40.0 ± 8.2", "0.50x ± 0.00x", "", ""],
    ]
    one = case_cells(results_of(lines[:2]), columns)[1]
    assert one[1] == ["fixed", "200.0", "2.00x", "100.0%", "0.50"], "one prompt has no deviation"


def test_a_ratio_of_means_is_no_mean_of_ratios(lines: list[Text]) -> None:
    """As the authors have it: of rates more is faster, of times less; over the prompts that the
    baseline wrote, too. Tokens of all texts are over all passes, as v2's table 3 has them."""
    columns = ["tokens_pooled", "throughput_speedup", "wall_speedup", "more_memory"]
    for prompt, (ar, fixed, n) in enumerate([(1.0, 0.5, 10), (2.0, 2.0, 30), (3.0, 0.5, 0)]):
        of_ar, of_fixed, _ = lines[3 * prompt : 3 * prompt + 3]
        of_ar |= {"wall_ms": ar, "peak_mb": 100.0 * ar, "iterations": 0}
        of_fixed |= {"wall_ms": fixed, "peak_mb": 200.0}
        of_fixed |= {"iterations": n, "tokens_per_iter": 2.0 + 2 * prompt}
    header, body = case_cells(results_of(lines), columns)
    assert header[1:] == ["tok/iter pooled", "tok/s x ar", "wall x ar", "over ar"]
    assert body[:2] == [["ar", "", "", "", ""], ["fixed", "3.50", "1.29x", "2.00x", "+0.0%"]]
    without = lines[6].pop("wall_ms")
    assert without and case_cells(results_of(lines), columns)[1][1][3] == "", "not all measured"
    del lines[6]  # ar's third
    cells = case_cells(results_of(lines), columns)[1][1]
    assert cells[2:4] == ["1.56x", "1.20x"], "280 / 180, 3 / 2.5"


def test_speedups_are_over_the_baseline_that_is_asked_for(lines: list[Text]) -> None:
    """Its name stands in the header and the notes; texts are held against ar's all the same."""
    found = results_of(lines, head_of(CASES, options={"baseline": "fixed"}))
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


def test_what_a_paper_prints_stands_beside_what_is_measured(lines: list[Text]) -> None:
    cases = [AR, replace(CASES[1], published={"speedup_mean": "1.47x"}), CASES[2]]
    found = results_of(lines, head_of(cases))
    header, body = case_cells(found, ["throughput_mean", "speedup_mean"])
    assert header == ["method", "tok/s mean", "x ar mean", "paper x mean"]
    assert notes(found)[0] == NOT_OURS
    assert [row[-1] for row in body] == ["", "1.47x", ""]


def test_a_run_cut_short_shows_what_there_is(lines: list[Text]) -> None:
    """It read as a finished one, in the documents too. Neither a case without texts nor one whose
    ar is missing is in the way, nor a metric that was not measured."""
    assert "UNFINISHED" not in text_report(results_of(lines), 80)
    fixed = lines[1::3]
    found = results_of(fixed)
    assert table_cells(found)[1] == [["fixed", "80.0 (55.0-140.0)", "", "", "0.50", ""]]
    del fixed[0]["throughput"]
    found = results_of(fixed)
    assert table_cells(found)[1] == [["fixed", "", "", "", "0.50", ""]]
    for report in (text_report(found, 80), markdown_report(found)):
        assert report.startswith("UNFINISHED, 3 of 9 texts. ablation: 3 prompts")


def test_notes_say_what_is_slower_and_what_differs(results: Results, lines: list[Text]) -> None:
    slower, _, difference = notes(results)
    assert slower == "Slower than ar on the median prompt: hf-assisted (0.50x)."
    assert difference == (
        "fixed differs from ar on 1 of 3 texts, the first on prompt 2, from token 2 at the "
        "earliest (top-2 gap in float32 at most 2.5e-01; ties: 0)."
    )
    unknown = notes(results_of(lines))[2]  # it was interrupted before that was known
    assert "from token ? at the earliest (top-2 gap in float32 not known" in unknown
    lines[-2] |= {"ids": [1, 2, 3], "ids_digest": digest_of([1, 2, 3])}
    assert notes(results_of(lines))[2] == "Every greedy text is ar's, token for token."
    cases = [*CASES, *(replace(AR, row=f"fixed D={depth}") for depth in range(8))]
    others = [text_of(case, 0, 50.0, 1.0, 3) for case in cases[3:]]
    found = notes(results_of(lines + others, head_of(cases)))
    assert found[0] == "9 of 10 rows are slower than ar."


@pytest.mark.parametrize(
    ("speeds", "note"),
    [
        ({"linear": 4, "fixed": 2}, "the quartiles of 0 of 2 neighbouring pairs overlap."),
        (
            {"linear": 1.1, "fixed": 0.3},
            "the quartiles of 1 of 2 neighbouring pairs overlap, and the order of these may be "
            "noise. Told apart: ar > fixed.",
        ),
        (
            {"linear": 1.1, "fixed": 1.2},
            "the quartiles of 2 of 2 neighbouring pairs overlap, and the order of these may be "
            "noise.",
        ),
    ],
)
def test_rows_that_cannot_be_told_apart(speeds: dict[str, float], note: str) -> None:
    """Of neighbours in the ranking, ar among them at 1.00x; their quartiles are 20 % from the
    median."""
    cases = [AR, *(replace(AR, row=row) for row in speeds)]
    lines = [text_of(AR, prompt, 100.0, 1.0, 3) for prompt in range(3)]
    for case, speed in zip(cases[1:], speeds.values(), strict=True):
        for prompt, factor in enumerate((0.6, 1.0, 1.4)):
            lines.append(text_of(case, prompt, 100 * speed * factor, 1.0, 3))
    found = notes(results_of(lines, head_of(cases)))
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
    """Every strict text; in float32 every other one, except near-ties."""
    cases = [AR, replace(AR, row=row), CASES[2]]
    head = head_of(cases, machine=MACHINE | {"dtype": dtype})
    lines = lines_of(cases)
    assert is_exact(results_of([*lines, difference_of(lines[-2], gap=gap)], head)) == expected


def test_a_text_table_goes_on_below_with_its_labels_repeated() -> None:
    row = ["fixed", "1" * 50, "2" * 50]
    found = text_table(["method", "a", "b"], [row], 80).split()
    assert found == ["method", "a", *row[:2], "method", "b", "fixed", row[2]]


def test_a_file_holds_everything(lines: list[Text], tmp_path: Path) -> None:
    """And no ids twice."""
    file = tmp_path / "made" / "r.jsonl"
    with new_file(file):
        writer = Writer(file, Results(head_of(CASES)))
        for line in lines:
            del line["ids"], line["ids_digest"]
            ids = [1, 2, 4] if line["prompt"] == 2 and line["row"] == "fixed" else [1, 2, 3]
            writer.add(line | writer.results.columns_of_ids(ids))
        writer.add(difference_of(lines[-2]))
    assert load(file) == writer.results
    assert file.read_text().count('"ids":') == 2


def test_a_line_that_was_cut_off_is_left_out_and_cut(lines: list[Text], tmp_path: Path) -> None:
    """So that what is added later begins a line."""
    file = written(tmp_path / "r.jsonl", lines)
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    found = load(file)
    assert found.n_lacking == 1
    writer = Writer(file, found)
    writer.cut()
    writer.add(lines[-1])
    assert load(file).texts == results_of(lines).texts
    file.write_bytes(whole[:10])
    with pytest.raises(UsageError, match="r.jsonl is not a results file: it has no whole line"):
        load(file)


def test_two_runs_do_not_write_into_one_file(lines: list[Text], tmp_path: Path) -> None:
    """The one that comes second finds the file longer than it left it; nothing is lost."""
    file = written(tmp_path / "r.jsonl", lines[:3])
    first, second = (Writer(file, load(file)) for _ in range(2))
    first.add(lines[3])
    with pytest.raises(UsageError, match="another run writes to .*r.jsonl"):
        second.add(lines[3])
    first.add(lines[4])
    assert len(load(file).texts) == 5
    with pytest.raises(UsageError, match="r.jsonl exists already"), new_file(file):
        pass
    with pytest.raises(UsageError, match="cannot be written: "), new_file(file / "r.jsonl"):
        pass


def test_a_resumed_run_removes_nothing_that_another_has_written(
    lines: list[Text], tmp_path: Path
) -> None:
    """It read a line that was cut off, which was the other run's, not yet whole."""
    file = written(tmp_path / "r.jsonl", lines)
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    writer = Writer(file, load(file))
    file.write_bytes(whole)
    with pytest.raises(UsageError, match="another run writes to .*r.jsonl"):
        writer.cut()
    assert file.read_bytes() == whole


def with_text(**changed: Json) -> Callable[[list], None]:
    return lambda lines: lines[1].update(changed)


def with_head(**changed: Json) -> Callable[[list], None]:
    return lambda lines: lines[0]["head"].update(changed)


STEPS = {"context": 1, "rows": [1, 2], "target_ms": [1.0, 2.0], "draft_ms": [1.0, 2.0]}
STEPS |= {"target_bytes": 1, "draft_bytes": 1, "copy_gb_s": 1.0}
WRONG = {  # by what the line says: what is wrong with the file
    "line 1: format is 4, not 5 (not a results file of format 5)": with_head(format=4),
    "line 1: head has no table": lambda lines: lines[0]["head"].pop("table"),
    "line 1: columns of head is 'x', it must be list[str]": with_head(columns="x"),
    "line 1: machine has no torch": lambda lines: lines[0]["head"]["machine"].pop("torch"),
    "line 1: a case stands twice": lambda lines: lines[0]["head"]["cases"].append(asdict(AR)),
    "line 1: a case is no JSON object": with_head(cases=[3]),
    "line 1: n_prompts has no 'builtin'": with_head(n_prompts={}),
    "line 1: unknown method 'x'": with_head(cases=[asdict(replace(AR, row="x"))]),
    "line 1: repeats is no whole number": with_head(options={"repeats": [1]}),
    "line 1: it is no head": lambda lines: lines.pop(0),
    "line 2: it is no JSON object": lambda lines: lines.insert(1, 3),
    "line 2: it has no prompt": lambda lines: lines[1].pop("prompt"),
    "line 2: prompt is 3, and builtin has 3 prompts": with_text(prompt=3),
    "line 2: prompt is -1, it must be a whole number from 0 on": with_text(prompt=-1),
    "line 2: prompt is True, it must be a whole number": with_text(prompt=True),
    "line 2: round is 1 of 1": with_text(round=1),
    "line 2: 'ar' at this size is no case of the head": with_text(new_tokens=65),
    "line 2: 'fixed D=2' at this size is no case": with_text(row="fixed D=2"),
    "line 2: throughput is '1', it must be a number": with_text(throughput="1"),
    "line 2: throughput is 10000000000000.0, it must be a number": with_text(throughput=1e13),
    "line 2: NaN is no number": with_text(throughput=float("nan")),
    "line 2: ids is [1, -2], it must be list[int]": with_text(ids=[1, -2]),
    "line 2: ids_digest is of other ids": with_text(ids=[1, 2, 9]),
    "line 2: a greedy text has no ids_digest": lambda lines: lines[1].pop("ids_digest"),
    "line 3: the text of 'ar', prompt 0 stands twice": lambda lines: lines.insert(2, lines[1]),
    "line 11: a second head": lambda lines: lines.extend(lines[:]),
    "line 11: the text of this difference is not above": lambda lines: lines.append(
        difference_of(lines[1] | {"prompt": 7})
    ),
    "line 11: it has no at": lambda lines: lines.append({"difference": lines[1]}),
    "line 11: step_times are not all above 0": lambda lines: lines.append(
        {"step_times": STEPS | {"copy_gb_s": 0}}
    ),
    "line 11: step_times are not of two or more rising numbers": lambda lines: lines.append(
        {"step_times": STEPS | {"rows": [1]}}
    ),
    "line 12: step_times stand twice": lambda lines: lines.extend([{"step_times": STEPS}] * 2),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_file_from_anybody(message: str, lines: list[Text], tmp_path: Path) -> None:
    """Edited, merged or not of this project: one line that says where and what."""
    every = [{"head": asdict(head_of(CASES))}, *lines]
    WRONG[message](every)
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
def test_a_file_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"{message}.*not a results file of format 5") as error:
        load(file)
    assert "\n" not in str(error.value)
    for name in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="not a results file: "):
            load(name)


def test_pandas_reads_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the lines of docs/results.md, which give what the report shows."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import pandas.*?)```", page, re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(code, names)
    texts, speedups = names["texts"], names["speedups"]
    found = load("results/main_cpu.jsonl")
    assert len(texts) == len(found.texts) and isinstance(speedups, pandas.Series)
    cells = {row[0]: row[1] for row in case_cells(found, ["speedup"])[1]}
    for row, median in speedups.items():
        assert row == "ar" or cells[row].startswith(f"{median:.2f}x (")


@pytest.mark.parametrize("file", SHOWN)
def test_documents_show_what_the_committed_results_say(file: str) -> None:
    """docs/results.md what `bench.py --show FILE --format markdown` prints, README.md four columns
    of some rows of one."""
    results = load(ROOT / file)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"From `{file}`. {markdown_report(results)}\n\n" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if file == SHOWN[0]:
        table = markdown_table(*case_cells(results, README_COLUMNS)).splitlines()
        where = f"{prompts_text(results.head)}; {machine_text(results.head.machine)}"
        shown = (
            readme[: readme.index(f"\n\n{where}, from `{file}`.\n")].split("\n\n")[-1].splitlines()
        )
        assert shown[:2] == table[:2] and shown == [row for row in table if row in shown]
        assert len(shown) > 9
