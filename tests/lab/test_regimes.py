"""Tests of the tables of README.md and docs/results.md, on made-up results files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small import ROOT, Captured
from test_results import AR, make_head, make_text, write_results

from dynatree_lab.benchmark.regimes import PAPER, STREAMED, TITLES, main, tables_of
from dynatree_lab.benchmark.results import Line

CHOSEN = ("linear K=2", "fixed D=3", "dynatree tau=0.1", "dyspec N=4", "sequoia N=4")
OF_README = ("ar", PAPER, "auto", *CHOSEN)
ROWS = ("ar", "linear", PAPER, "dynatree", "deagle", "auto", *CHOSEN)
N_PASSES = {"ar": 63, "linear K=2": 30, "dynatree tau=0.1": 18, "deagle": 9}  # others have 21
CHEAP, DEAR = (0.99, 0.01, 0.001), (0.9, 0.1, 0.3)  # of an iteration, a row, a draft pass


def make_line(row: str, prompt: int, prices: tuple[float, ...]) -> Line:
    """Return a text of 64 tokens of passes of 4 rows, with 2 draft passes each. It takes the time
    of these prices, in passes of 10 ms. A fixed tree takes twice that after prompt 0, but its
    passes are not counted there, so the prices do not follow it."""
    n = N_PASSES.get(row, 21)
    n_rows, n_drafting = ("1", 0) if row == "ar" else ("4", 2)
    counts = n, n * int(n_rows), n * n_drafting
    ms = 10 * sum(count * price for count, price in zip(counts, prices, strict=True))
    text = make_text(replace(AR, row=row), prompt, 63 / ms * 1e3)
    text |= {"target_rows": {n_rows: n}, "draft_rows": {"1": counts[2]} if n_drafting else {}}
    text |= {"iterations": n, "draft_ms": 10 * prices[2] * n_drafting, "drafted_per_iter": 3.0}
    text |= {"draft_passes": float(n_drafting), "repetition": [0.5, 0.2, 0.3, 0.6][prompt]}
    if row == "fixed D=3" and prompt == 0:
        text |= {"throughput": text["throughput"] / 2, "target_rows": None}
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in TITLES:
        rows, prices = (OF_README, CHEAP) if name == STREAMED else (ROWS, DEAR)
        rows = [row for row in rows if row != "deagle" or name == "embedded"]
        head = make_head([replace(AR, row=row) for row in rows], 4)
        lines = [make_line(row, prompt, prices) for row in rows for prompt in range(4)]
        write_results(tmp_path / f"regimes_{name}_cpu.jsonl", lines, head)
    return tmp_path


def test_the_tables(folder: Path, capsys: Captured) -> None:
    """Check measured and computed cells."""
    tables = dict(tables_of(folder))
    whole, settings, pairs, defaults = (
        {
            line.split(" | ")[0].strip("| "): line.removesuffix(" |").split(" | ")[1:]
            for line in lines
        }
        for lines in (table.splitlines() for table in tables.values())
    )
    assert whole["price of a row, of a draft pass"][1:3] == ["0.1, 0.3", "0.01, 0.001"]
    assert whole["repeated 4-grams"][0] == "40% (28%-52%)"
    assert whole["`ar`, in tok/s"] == ["100"] * 4
    # 63 passes of one row / (18 of 4 rows and 36 of the draft)
    assert whole["`dynatree`, draft temperature"] == ["1.84x", "1.84x", "3.39x", "1.84x"]
    assert whole["`dynatree`, as in the paper"][0] == "1.58x"
    assert settings["`dynatree`, draft temperature"] == ["tau=0.1"] * 4
    assert len(settings) == 2 + len(CHOSEN)
    assert pairs["`dynatree` / `linear`"][0] == "1.67, 4 of 4"
    assert pairs["`dynatree` / `fixed`"][0] == "1.17 (1.17-1.46), 4 of 4"
    assert pairs["`auto` / `dynatree`"][0] == "0.86, 0 of 4"
    assert list(defaults) == [
        "",
        "---",
        "ar, in tok/s",
        "linear",
        PAPER,
        "dynatree",
        "deagle",
        "auto",
    ]
    assert defaults["deagle"] == ["4.0", "2.0", "0.50", "3.68x", "3.68x*", "6.78x*", ""]
    assert defaults["auto"][-2:] == ["2.91x", "1.58x"]
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == "".join(f"{t}:\n\n{table}\n\n" for t, table in tables.items())


def test_committed_results_name_no_folder() -> None:
    """Check that a file has the name and the sha256 of its prompts, and that its models are those
    of a clone."""
    for file in (ROOT / "results").glob("*.jsonl"):
        with file.open(encoding="utf-8") as lines:
            head = json.loads(next(lines))["head"]
        options = head["options"]
        assert options["prompts"] == head["prompts"] and len(head["prompts_sha256"]) == 64
        models = [options[role] for role in ("target", "draft", "head") if role in options]
        assert all(folder.startswith("models/") for folder in models), file


def test_the_documents_show_the_committed_results() -> None:
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md")]
    for i, (title, table) in enumerate(tables_of(ROOT / "results")):
        assert f"\n\n{table}\n\n" in pages[min(i, 1)], title
