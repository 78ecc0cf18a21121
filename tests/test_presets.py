"""The papers' tables: every row is a run, every printed figure stands beside its row."""

from dataclasses import replace
from pathlib import Path

import pytest

import bench
from bench import main
from benchmark.columns import COLUMNS
from benchmark.options import build_parser, check_options, choose_table
from benchmark.peers import PEERS
from benchmark.presets import NOT_HERE, PRESETS
from benchmark.report import table_cells
from benchmark.results import Results, Run
from benchmark.rows import choose_runs, settings_of
from benchmark.tables import TABLES, Table

Captured = pytest.CaptureFixture[str]


def options(name: str, *others: str) -> tuple[Table, list[Run]]:
    """The table and runs that --table NAME asks for, its options checked."""
    args = build_parser().parse_args(["--table", name] + list(others))
    table = choose_table(args)
    runs = choose_runs(table)
    check_options(args, table, runs)
    return table, runs


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name: str) -> None:
    """Its rows, settings, sizes and columns, with what it is by default and on our own prompts."""
    table, runs = options(name)
    labels = [run.label for run in runs]
    assert len(set(labels)) == len(labels) > 1
    assert len({part.dataset for part in table.parts}) == len(table.parts)
    assert set(table.columns) <= set(COLUMNS)
    for run in runs:
        settings_of(run).rule()
        assert run.baseline in labels and run.reference in labels
    _, moved = options(name, "--dataset", "builtin")
    assert {run.dataset for run in moved} == {"builtin"}
    assert moved[0].label.split(" ")[0] == "ar" and len(moved) <= len(runs)


@pytest.mark.parametrize("name", PRESETS)
def test_printed_figures_stand_beside_their_rows(name: str) -> None:
    """All of them: none is of a row, a size or a column that the table does not have."""
    table, runs = options(name)
    shown = {}
    for run in runs:
        shown[run.dataset, run.label.replace(f" on {run.dataset}", "")] = run.published
    for part in table.parts:
        for row, cells in part.published.items():
            assert set(cells) <= set(table.columns), f"{row} is shown without {cells}"
            if row not in PEERS:
                assert shown[part.dataset, row] == cells


def test_names() -> None:
    """A name is one thing only; and every paper's every table is here or said not to be."""
    names = list(TABLES) + list(PRESETS) + list(NOT_HERE)
    assert len(set(names)) == len(names)
    for paper, n_tables in {"v1": 7, "v2": 5, "deagle": 4, "dyspec": 5}.items():
        for n in range(1, n_tables + 1):
            assert f"{paper}-{n}" in names


def test_what_is_not_here_says_why(capsys: Captured) -> None:
    assert main(["--table", "dyspec-4"]) == 2
    expected = "error: --table dyspec-4 is not here: it needs 768 rows a tree, and MAX_ROWS is 128"
    assert capsys.readouterr().err.startswith(expected)


def test_the_sizes_of_v1_table_4() -> None:
    """450 configurations, and ar at each length."""
    table, runs = options("v1-4")
    assert len([run for run in runs if run.method == "fixed"]) == 450 and len(runs) == 455
    best = [run for run in runs if run.published and run.method == "fixed"]
    assert [run.new_tokens for run in best] == [100, 200, 500, 750, 1000]
    assert best[0].published["throughput_mean"] == "113.4"


def test_each_dataset_has_the_rows_of_its_own_table() -> None:
    """K and D_max are others on PG-19, and so are the prompts' lengths."""
    _, runs = options("v2-1")
    by_label = {run.label: run for run in runs}
    wikitext = by_label["linear K=8 on wikitext2"]
    pg19 = by_label["linear K=5 on pg19"]
    assert (wikitext.prompt_tokens, pg19.prompt_tokens) == (800, 1000)
    assert wikitext.published == {"throughput_mean": "196.1±37.8", "speedup_mean": "1.47x"}
    assert by_label["dynatree D_max=9 on pg19"].published["speedup_mean"] == "1.70x"


def cells_of(name: str) -> dict[str, dict[str, str]]:
    """What a table of one part prints, by row."""
    _, runs = options(name)
    return {run.label: run.published for run in runs}


def test_deagles_tables_differ_in_what_they_print() -> None:
    """The rows of all three are the same; in a cell stand its four benchmarks, in its order."""
    first, second, third = cells_of("deagle-1"), cells_of("deagle-2"), cells_of("deagle-3")
    assert list(first) == list(second) == list(third) and len(first) == 30
    row = "deagle k=10 N_max=60 D_max=18 t=1.0"
    assert first[row] == {"speedup": "3.58x / 4.50x / 3.47x / 3.49x"}
    assert third[row] == {"speedup": "3.99x / 4.85x / 4.38x / 4.58x"}
    row = "beam k=10 N_max=60 D_max=6 t=0.0"
    assert second[row] == {"speedup": "3.73x / 4.02x / 3.91x / 3.87x"}


def test_deagles_tables_agree_where_they_print_the_same_runs() -> None:
    """Table 4's last column is table 2's on MT-Bench: neither is copied wrong."""
    votes, depths = cells_of("deagle-4"), cells_of("deagle-2")
    for depth in range(6, 19, 2):
        row = f"deagle k=10 N_max=60 D_max={depth}"
        assert depths[f"{row} t=0.0"]["speedup"].startswith(votes[row]["speedup"] + " / ")


def test_deagles_table_4_has_both_readings_of_the_length_vote() -> None:
    """Alone and among three: each beside what the paper prints, which says not which it is."""
    votes = cells_of("deagle-4")
    literal = [row for row in votes if row.endswith(" length=literal")]
    assert len(literal) == 4 and len(votes) == 1 + 4 * 7 + 4
    for row in literal:
        assert votes[row] == votes[row.removesuffix(" length=literal")]


def test_dyspecs_tables_differ_in_what_they_print() -> None:
    """Seconds there, milliseconds here; tokens an iteration of all but ar."""
    seventy = cells_of("dyspec-3")
    assert list(cells_of("dyspec-1")) == list(cells_of("dyspec-2")) == list(seventy)
    assert cells_of("dyspec-1")["dyspec N=64 t=0.0"]["tpot"] == "7.30 / 9.60 / 9.26"
    assert cells_of("dyspec-2")["ar t=0.6"] == {"tpot": "28.24 / 28.27 / 28.12"}
    expected = {"tpot": "889.20 / 918.15 / 907.51", "tokens_per_iter": "6.08 / 6.41 / 6.42"}
    assert seventy["sequoia N=64 t=0.0"] == expected


TINY = ["--n-prompts", "1", "--prompt-tokens", "12", "--new-tokens", "6"]


def run_preset(name: str, file: Path, *others: str) -> Results:
    """A paper's table, as little of it as can be measured."""
    command = ["--table", name, "--dataset", "builtin", "--output", str(file)]
    assert main(command + TINY + list(others)) == 0
    return Results.load(file)


def test_a_preset_is_measured_and_shows_what_is_printed(capsys: Captured, tmp_path: Path) -> None:
    """The file alone tells both; the title says which table it is."""
    results = run_preset("v2-1", tmp_path / "r.json")
    header, body = table_cells(results)
    assert header[:5] == ["method", "tok/s mean", "paper tok/s mean", "x ar mean", "paper x mean"]
    cells = {line[0]: line[1:] for line in body}
    assert cells["dynatree"][1] == "219.5±22.2" and cells["linear K=8"][3] == "1.47x"
    assert "paper x ar" not in header and "paper exact" not in header
    printed = " ".join(capsys.readouterr().out.split())
    assert PRESETS["v2-1"].title + "." in printed
    own = "models, prompts, lengths, machine and baseline"
    assert f"The paper's figures are of its own {own}." in printed
    results.runs = [replace(run, published={}) for run in results.runs]
    assert not any(title.startswith("paper") for title in table_cells(results)[0])


def test_the_row_of_v1_that_streams(capsys: Captured, tmp_path: Path) -> None:
    """StreamingLLM's window beside methods of the whole text, held against ar over it."""
    methods = "ar,linear K=6,linear K=6 window=512"
    results = run_preset("v1-1", tmp_path / "r.json", "--methods", methods)
    assert [run.label for run in results.runs][:2] == ["ar", "ar window=512"]
    assert results.runs[3].published == {"throughput_mean": "132.9", "speedup_mean": "1.11x"}
    assert "1/1" in capsys.readouterr().out


def test_a_papers_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured as the memory table is, but in this process."""
    monkeypatch.setattr(bench, "in_own_process", lambda measure, *arguments: measure(*arguments))
    results = run_preset("v2-5", tmp_path / "r.json", "--methods", "ar")
    assert results.is_memory and "paper peak MB" in table_cells(results)[0]
    assert results.records[0]["metrics"]["peak_mb"] > 0


def test_a_greedy_figure_stands_beside_no_sampled_row(capsys: Captured, tmp_path: Path) -> None:
    results = run_preset("v2-1", tmp_path / "r.json", "--temperature", "0.8", "--methods", "linear")
    assert not any(run.published for run in results.runs)
    assert "token for token" not in capsys.readouterr().out


def test_a_tables_draft_temperature_is_for_the_rows_that_draw(tmp_path: Path) -> None:
    results = run_preset("dyspec-1", tmp_path / "r.json", "--methods", "linear,fixed")
    own = {run.label: run.draft_temperature for run in results.runs if run.temperature}
    assert own == {"ar t=0.6": None, "linear t=0.6": 0.6, "fixed t=0.6": None}
