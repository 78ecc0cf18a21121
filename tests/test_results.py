"""Results files and what is shown of them, on numbers worked out by hand."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmark.report import (
    PRINTED,
    machine_text,
    markdown_report,
    markdown_table,
    notes,
    prompts_text,
    run_cells,
    table_cells,
    text_report,
    text_table,
)
from benchmark.results import FORMAT, Options, Record, Results, Run
from cli.errors import UsageError
from cli.metrics import Metrics

ROOT = Path(__file__).parent.parent
SHOWN = [f"results/{name}_cpu.json" for name in ("main", "enlarged", "ablation", "steps")]
README_COLUMNS = ["throughput", "speedup", "tokens_per_iter", "exact"]
MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc"}
COLUMNS = ["throughput", "speedup", "spread", "predicted", "tokens_per_iter", "exact"]


def record(run: str, prompt: int, throughput: float, predicted_ms: float, ids_at: int) -> Record:
    metrics = {field.name: 0.5 for field in fields(Metrics)} | {"throughput": throughput}
    head = {"run": run, "prompt": prompt, "repeat": 0, "metrics": metrics, "ids_at": ids_at}
    return head | {"predicted_ms": predicted_ms}


@pytest.fixture
def results() -> Results:
    """ar, one method that is 2, 1 and 0.5 times as fast, and a peer; one text differs."""
    runs = [Run(name, name, 150, 64, 0.0, "ar") for name in ("ar", "fixed", "hf-assisted")]
    sizes = {"prompt_tokens": [150], "new_tokens": [64], "temperature": [0.0]}
    prompts = {"dataset": "builtin", "n": 3, "sha256": "0"}
    found = Results(FORMAT, "ablation", COLUMNS, Options(), MACHINE, prompts, sizes, runs)
    for prompt, (ar, fixed) in enumerate([(100.0, 200.0), (80.0, 80.0), (60.0, 30.0)]):
        own = found.place_of([1, 2, 3])
        found.records.append(record("ar", prompt, ar, 12.0, own))
        found.records.append(record("fixed", prompt, fixed, 8.0, own))
        found.records.append(record("hf-assisted", prompt, ar / 2, 1.0, own))
        del found.records[-1]["predicted_ms"]
    different = {"at": 2, "gap": 0.25, "is_tie": False}
    found.records[-2] |= {"ids_at": found.place_of([1, 2, 4]), "difference": different}
    return found


def test_cells_are_medians_over_prompts_and_speedups_are_by_prompt(results: Results) -> None:
    header, body = table_cells(results)
    assert header == ["method", "tok/s", "x ar", "min-max", "predicted", "tok/iter", "exact"]
    assert body == [
        ["ar", "80.0", "", "", "", "0.50", ""],
        ["fixed", "80.0", "1.00x", "0.50-2.00", "1.50x", "0.50", "2/3"],
        ["hf-assisted", "40.0", "0.50x", "0.50-0.50", "", "0.50", "3/3"],
    ]
    results.runs = [replace(run, temperature=0.6) for run in results.runs]
    assert [row[-1] for row in table_cells(results)[1]] == ["", "", ""], "sampled: not compared"


def test_means_and_deviations_are_over_prompts(results: Results) -> None:
    """As the papers print them: 100, 80 and 60; 200, 80 and 30 are 2, 1 and 0.5 times as fast; by
    their code's acceptance above 100 %. None of what a run does not tell."""
    for text, value in zip(results.records[1::3], (1.0, 1.0, 1.3), strict=True):
        text["metrics"]["code_acceptance"] = value
    columns = ["throughput_mean", "speedup_mean", "code_acceptance_mean", "acceptance_mean"]
    header, body = run_cells(results, columns)
    assert header[1:] == ["tok/s mean", "x ar mean", "accept (code) mean", "accept mean"]
    assert body == [
        ["ar", "80.0 ± 16.3", "", "", "0.50 ± 0.00"],
        ["fixed", "103.3 ± 71.3", "1.17x ± 0.62x", "110.0% ± 14.1%", "0.50 ± 0.00"],
        ["hf-assisted", "40.0 ± 8.2", "0.50x ± 0.00x", "", ""],
    ]
    results.records = results.records[:2]  # one prompt has no deviation
    assert run_cells(results, columns)[1][1] == ["fixed", "200.0", "2.00x", "100.0%", "0.50"]


def test_a_ratio_of_means_is_no_mean_of_ratios(results: Results) -> None:
    """As the authors have it: of rates more is faster, of times less; over the prompts that the
    baseline wrote, too. Tokens of all texts are over all passes, as v2's table 3 has them."""
    columns = ["tokens_pooled", "throughput_speedup", "wall_speedup", "more_memory"]
    for prompt, (ar, fixed, n) in enumerate([(1.0, 0.5, 10), (2.0, 2.0, 30), (3.0, 0.5, 0)]):
        of_ar, of_fixed, _ = results.records[3 * prompt : 3 * prompt + 3]
        of_ar["metrics"] |= {"wall_ms": ar, "peak_mb": 100.0 * ar, "iterations": 0}
        of_fixed["metrics"] |= {"wall_ms": fixed, "peak_mb": 200.0}
        of_fixed["metrics"] |= {"iterations": n, "tokens_per_iter": 2.0 + 2 * prompt}
    header, body = run_cells(results, columns)
    assert header[1:] == ["tok/iter pooled", "tok/s x ar", "wall x ar", "over ar"]
    assert body[:2] == [["ar", "", "", "", ""], ["fixed", "3.50", "1.29x", "2.00x", "+0.0%"]]
    results.records[6]["metrics"].pop("wall_ms")
    assert run_cells(results, columns)[1][1][3] == "", "of texts that are not all measured"
    del results.records[6]  # ar's third
    assert run_cells(results, columns)[1][1][2:4] == ["1.56x", "1.20x"], "280 / 180, 3 / 2.5"


def test_speedups_are_over_the_baseline_that_is_asked_for(results: Results) -> None:
    """Its name stands in the header and the notes; texts are held against ar's all the same."""
    results.options = Options(baseline="fixed")
    results.runs = [replace(run, baseline="fixed", reference="ar") for run in results.runs]
    header, body = run_cells(results, ["speedup", "throughput_speedup", "exact"])
    assert header == ["method", "x fixed", "tok/s x fixed", "exact"]
    assert body == [
        ["ar", "1.00x", "0.77x", ""],
        ["fixed", "", "", "2/3"],
        ["hf-assisted", "0.50x", "0.39x", "3/3"],
    ]
    slower, difference = notes(results)
    assert slower == "Slower than fixed on the median prompt: hf-assisted (0.50x)."
    assert difference.startswith("fixed differs from ar on 1 of 3 texts")


def test_what_a_paper_prints_stands_beside_what_is_measured(results: Results) -> None:
    results.runs[1] = replace(results.runs[1], published={"speedup": "1.47x"})
    header, body = run_cells(results, ["throughput", "speedup"])
    assert header == ["method", "tok/s", "x ar", "paper x"] and notes(results)[0] == PRINTED
    assert body[:2] == [["ar", "80.0", "", ""], ["fixed", "80.0", "1.00x", "1.47x"]]


def test_a_run_cut_short_shows_what_there_is(results: Results) -> None:
    """It read as a finished one, in the documents too. Neither a row without records nor one whose
    ar is missing is in the way, nor a metric that was not measured."""
    assert "UNFINISHED" not in text_report(results, 80)
    results.records = [r for r in results.records if r["run"] == "fixed"]
    assert table_cells(results)[1] == [["fixed", "80.0", "", "", "", "0.50", ""]]
    del results.records[0]["metrics"]["throughput"]
    assert table_cells(results)[1] == [["fixed", "", "", "", "", "0.50", ""]]
    results.n_texts = 12
    for report in (text_report(results, 80), markdown_report(results)):
        assert report.startswith("UNFINISHED, 3 of 12 texts. ablation: 3 prompts")


def test_notes_say_what_is_slower_and_what_differs(results: Results) -> None:
    slower, difference = notes(results)
    assert slower == "Slower than ar on the median prompt: hf-assisted (0.50x)."
    assert difference == (
        "fixed differs from ar on 1 of 3 texts, the first on prompt 2, from token 2 at the "
        "earliest (top-2 gap in float32 at most 2.5e-01; ties: 0)."
    )
    del results.records[-2]["difference"]  # it was interrupted before that was known
    assert "from token ? at the earliest (top-2 gap in float32 not known" in notes(results)[1]
    results.records[-2]["ids_at"] = 0
    assert notes(results)[1] == "Every greedy text is ar's, token for token."
    for depth in range(8):
        label = f"fixed D={depth}"
        results.runs.append(replace(results.runs[1], label=label, row=label))
        results.records.append(record(label, 0, 50.0, 1.0, 0))
    assert notes(results)[0] == "9 of 10 rows are slower than ar."


def test_a_text_table_goes_on_below_with_its_labels_repeated() -> None:
    row = ["fixed", "1" * 50, "2" * 50]
    found = text_table(["method", "a", "b"], [row], 80).split()
    assert found == ["method", "a", *row[:2], "method", "b", "fixed", row[2]]


def test_a_file_holds_everything(results: Results, tmp_path: Path) -> None:
    file = tmp_path / "made" / "r.json"
    results.save(file)
    assert Results.load(file) == results
    assert set(json.loads(file.read_text())) == {field.name for field in fields(Results)}
    with pytest.raises(UsageError, match="cannot be written"):
        results.save(file / "r.json")


@pytest.mark.parametrize("file", SHOWN)
def test_documents_show_what_the_committed_results_say(file: str) -> None:
    """docs/results.md what `bench.py --show FILE --format markdown` prints, README.md four columns
    of some rows of one."""
    results = Results.load(ROOT / file)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"From `{file}`. {markdown_report(results)}\n\n" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if file == SHOWN[0]:
        table = markdown_table(*run_cells(results, README_COLUMNS)).splitlines()
        end = f"\n\n{prompts_text(results)}; {machine_text(results.machine)}, from `{file}`.\n"
        shown = readme[: readme.index(end)].split("\n\n")[-1].splitlines()
        assert shown[:2] == table[:2] and shown == [row for row in table if row in shown]
        assert len(shown) > 9
