"""Results files and what is shown of them, on numbers worked out by hand."""

import json
from pathlib import Path

import pytest

from bench import main
from benchmark.results import README_START, Results, Run, readme_section, text_table, update_readme
from cli.errors import UsageError

ROOT = Path(__file__).parent.parent
MACHINE = {"target": "T", "draft": "D", "dtype": "float32", "processor": "P", "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11", "commit": "abc"}
NAMES = ["end_to_end", "ttft_ms", "tpot_ms", "tokens_per_iter", "path_length", "acceptance"]
NAMES += ["draft_nodes", "iterations", "draft_ms", "verify_ms", "other_ms", "repetition"]
COLUMNS = ["throughput", "speedup", "spread", "predicted", "tokens_per_iter", "exact"]


def record(run: str, prompt: int, throughput: float, predicted_ms: float, ids: list[int]) -> dict:
    metrics = dict.fromkeys(NAMES, 0.5) | {"throughput": throughput}
    head = {"run": run, "prompt": prompt, "repeat": 0, "metrics": metrics, "token_ids": ids}
    return head | {"predicted_ms": predicted_ms}


@pytest.fixture
def results() -> Results:
    """ar, one method that is 2, 1 and 0.5 times as fast, and a peer; one text differs."""
    runs = [
        Run(name, name, (), "keep", 150, 64, 0.0, "ar") for name in ("ar", "fixed", "hf-assisted")
    ]
    sizes = {"prompt_tokens": [150], "new_tokens": [64], "temperature": [0.0]}
    prompts = {"dataset": "builtin", "n": 3, "sha256": "0"}
    found = Results("ablation", COLUMNS, {"repeats": 1}, MACHINE, prompts, sizes, runs)
    for prompt, (ar, fixed) in enumerate([(100.0, 200.0), (80.0, 80.0), (60.0, 30.0)]):
        found.records.append(record("ar", prompt, ar, 12.0, [1, 2, 3]))
        found.records.append(record("fixed", prompt, fixed, 8.0, [1, 2, 3 + prompt // 2]))
        found.records.append(record("hf-assisted", prompt, ar / 2, 1.0, [1, 2, 3]))
        del found.records[-1]["predicted_ms"]
    found.records[-2]["difference"] = {"at": 2, "gap": 0.25, "is_tie": False}
    return found


def test_cells_are_medians_over_prompts_and_speedups_are_by_prompt(results: Results) -> None:
    header, body = results.table_cells()
    assert header == ["method", "tok/s", "x ar", "min-max", "predicted", "tok/iter", "exact"]
    assert body == [
        ["ar", "80.0", "", "", "", "0.50", ""],
        ["fixed", "80.0", "1.00x", "0.50-2.00", "1.50x", "0.50", "2/3"],
        ["hf-assisted", "40.0", "0.50x", "0.50-0.50", "", "0.50", "3/3"],
    ]


def test_a_run_cut_short_shows_what_there_is(results: Results) -> None:
    """Neither a row without records nor one whose ar is missing is in the way."""
    results.records = [r for r in results.records if r["run"] == "fixed"]
    _, body = results.table_cells()
    assert body == [["fixed", "80.0", "", "", "", "0.50", ""]]
    assert results.report(80) and results.markdown()


def test_notes_say_what_is_slower_and_what_differs(results: Results) -> None:
    slower, difference = results.notes()
    assert slower == "Slower than ar on the median prompt: hf-assisted (0.50x)."
    assert difference.startswith("fixed differs from ar on prompt 2 from token 2 on")
    assert "2.5e-01" in difference and "a tie" not in difference
    for record in results.records:
        record["token_ids"] = [1]
    assert results.notes()[1] == "Every greedy text is ar's, token for token."


def test_rounding_is_summed_up_by_method(results: Results) -> None:
    results.machine = MACHINE | {"dtype": "float16"}
    assert results.notes()[1] == (
        "fixed differs from ar on 1 of 3 texts, from token 2 at the earliest "
        "(top-2 gap in float32 there at most 2.5e-01)."
    )


def test_many_slower_rows_are_counted(results: Results) -> None:
    results.runs += [
        Run(f"fixed D={d}", "fixed", (f"D={d}",), "keep", 150, 64, 0.0, "ar") for d in range(8)
    ]
    results.records += [record(run.label, 0, 50.0, 1.0, [1]) for run in results.runs[3:]]
    assert results.notes()[0] == "9 of 10 rows are slower than ar."


def test_sampled_texts_are_not_compared(results: Results) -> None:
    results.runs = [Run(r.label, r.method, (), "keep", 150, 64, 0.6, "ar") for r in results.runs]
    assert [row[-1] for row in results.table_cells()[1]] == ["", "", ""]


def test_the_floor_is_bytes_over_bandwidth(results: Results) -> None:
    times = {"context": 200, "rows": [1, 2], "target_ms": [4.0, 5.0], "draft_ms": [1.0, 1.0]}
    times |= {"target_bytes": 40_000_000, "draft_bytes": 5_000_000, "copy_gb_s": 20.0}
    results.step_times = times
    target, draft = results.notes()[-2:]
    assert "reads 40.0 MB, at least 2.00 ms at the 20.0 GB/s" in target
    assert target.endswith("it takes 4.00 ms, 50% of that speed.") and "at least 0.25 ms" in draft
    results.table = "steps"
    assert results.table_cells()[1][1] == ["2", "1.00", "1.00", "5.00", "1.25"]


def test_text_tables_fit_the_terminal_by_blocks() -> None:
    header, body = ["method", *"abc"], [["fixed", "1" * 30, "2" * 30, "3" * 30]]
    first, second = text_table(header, body, 80).split("\n\n")
    assert max(map(len, (first + "\n" + second).splitlines())) <= 80
    assert first.splitlines()[1] == f"fixed   {'1' * 30}  {'2' * 30}"
    assert second.splitlines()[1] == f"fixed   {'3' * 30}"


def test_reports_fit_eighty_columns(results: Results) -> None:
    results.table = "main"  # with the published cells
    assert max(map(len, results.report(80).splitlines())) <= 80
    assert "Published (DynaTree v2" in results.report(80)


def test_a_file_holds_everything(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path / "made" / "r.json")
    assert Results.load(tmp_path / "made" / "r.json") == results
    assert [f.name for f in (tmp_path / "made").iterdir()] == ["r.json"]
    content = json.loads((tmp_path / "made" / "r.json").read_text())
    assert set(content) == {
        *("format", "table", "columns", "options", "machine", "prompts", "sizes", "runs"),
        *("setup_s", "step_times", "records"),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a results file"),
        ("[]", "is not a results file"),
        ('{"format": 99}', "has format 99, not 1"),
        ('{"format": 1}', "is not a results file"),
        ('{"format": 1, "runs": [{}]}', "is not a results file"),
    ],
)
def test_bad_files(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        Results.load(tmp_path / "r.json")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        Results.load(tmp_path / "none.json")


def test_records_of_unknown_runs_are_refused(results: Results, tmp_path: Path) -> None:
    results.records[0]["run"] = "nothing"
    results.save(tmp_path / "r.json")
    with pytest.raises(UsageError, match="is not a results file"):
        Results.load(tmp_path / "r.json")


def test_a_file_that_cannot_be_written(results: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        results.save(tmp_path / "file" / "r.json")


def test_the_readme_is_made_of_the_committed_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """README.md shows what its results files say; `bench.py --readme FILES` makes it so."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index(README_START) :]
    files = [line.split("`")[1] for line in section.splitlines() if line.startswith("From `")]
    assert len(files) >= 2 and readme_section(files) in text
    readme = tmp_path / "README.md"
    readme.write_text(text.replace("|", "#"), encoding="utf-8")
    update_readme(readme, files)
    assert readme_section(files) in readme.read_text(encoding="utf-8")
    readme.write_text("nothing")
    with pytest.raises(UsageError, match="lacks the lines"):
        update_readme(readme, files)
    assert main(["--readme", str(tmp_path / "none.json")]) == 2
    assert (ROOT / "README.md").read_text(encoding="utf-8") == text
