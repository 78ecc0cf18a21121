"""Tests of README.md's table, on made-up results files."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from small import ROOT, Captured
from test_results import AR, make_head, make_text, write_results

from dynatree_lab.benchmark.regimes import (
    GIVEN_RUN,
    TITLES,
    column_frames,
    less_repetitive,
    load_runs,
    main,
    table_lines,
)
from dynatree_lab.benchmark.results import Line
from dynatree_lab.benchmark.step_times import StepTimes

ROWS = (
    "ar", "linear", "dynatree", "dynatree calibrate=on", "sequoia", "dyspec N=16 calibrate=on",
    "dyspec N=64 calibrate=on", "deagle", "lookup", "auto",
)  # fmt: skip
GIVEN = "auto costs=0.1:0.1:0.1:0.1"
TIMES = StepTimes(9, [1, 16, 64], [2.0, 4.0, 20.0], [0.2] * 3, 9, 9, 1.0)
STREAMED = replace(TIMES, target_ms=[1000.0, 1000.0, 2000.0], draft_ms=[2.0] * 3)


def make_lines(rows: tuple[str, ...], times: StepTimes) -> list[Line]:
    """Return the lines of four prompts. Row i takes 120 / (i + 1) passes of 16 rows and as many of
    the draft. It is measured at 1 + i / 10 times ar's speed. Prompts 1 and 2 repeat less."""
    lines = [{"step_times": asdict(times)}]
    for i, row in enumerate(rows):
        for prompt in range(4):
            text = make_text(replace(AR, row=row), prompt, 100.0 + 10 * i)
            n_rows, n = ("16", 120 // (i + 1)) if i else ("1", 120)
            text |= {"target_rows": {n_rows: n}, "draft_rows": {"1": n} if i else {}}
            text |= {"repetition": [0.5, 0.2, 0.3, 0.6][prompt], "drafted_per_iter": 15.0}
            lines.append(text)
    return lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*TITLES, GIVEN_RUN):
        rows = {"auto": ("ar", GIVEN), "streamed": ("ar", "auto")}.get(name, ROWS)
        times = STREAMED if name == "streamed" else TIMES
        head = make_head([replace(AR, row=row) for row in rows], 4)
        write_results(tmp_path / f"regimes_{name}_cpu.jsonl", make_lines(rows, times), head)
    return tmp_path


def test_the_table(folder: Path, capsys: Captured) -> None:
    """Check measured and computed cells, and that the second table has the prompts that repeat
    less, without the measured row of a streamed target, whose prompts are others."""
    assert main([str(folder)]) == 0
    whole, which, half = capsys.readouterr().out.strip().split("\n\n")
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in whole.splitlines()}
    costs = cells["cost of a pass of 1, 4, 16, 64 rows"]
    assert costs[2] == costs[3] == "1.0, 1.2, 2.0, 10.0; draft 1/10"
    assert costs[4] == "1.0, 1.0, 1.0, 2.0; draft 1/500"
    assert cells["repeated 4-grams"][2] == "40% (28%-52%)"
    assert cells["ar, in tok/s"] == ["16.0", "0.50", "100", "100", "100", "100 |"]
    # 120 passes of one row / (40 of 16 rows and 40 of the draft)
    assert cells["dynatree"] == ["16.0", "0.50", "1.20x", "1.20x", "2.99x", "1.20x |"]
    assert cells["auto"][2:5] == ["1.90x", "1.90x", "1.10x"]
    assert cells["auto, costs given"][2:] == ["", "", "2.00x", " |"]
    assert list(cells)[-3:] == ["*not from a paper:*", "auto", "auto, costs given"]
    assert which == "Prompts 1, 2, which repeat less:" and "25% (22%-28%)" in half
    assert "| auto | 16.0 | 0.50 | 1.90x | 1.90x |  | 1.90x |" in half


def test_committed_results_name_no_folder_of_their_prompts() -> None:
    """Check that a file has the name and the sha256 instead."""
    for file in (ROOT / "results").glob("*.jsonl"):
        with file.open(encoding="utf-8") as lines:
            head = json.loads(next(lines))["head"]
        assert head["options"]["prompts"] == head["prompts"] and len(head["prompts_sha256"]) == 64


def test_the_documents_show_the_committed_results() -> None:
    """Compare README's table, and that of docs/results.md over the prompts that repeat less."""
    runs = load_runs(ROOT / "results")
    frames = column_frames(runs)
    half = less_repetitive(frames["embedded"])
    less = {name: texts[texts.prompt.isin(half)] for name, texts in frames.items()}
    for file, found in (("README.md", frames), ("docs/results.md", less)):
        table = "\n".join(table_lines(runs, found))
        assert f"\n\n{table}\n\n" in (ROOT / file).read_text(encoding="utf-8")
