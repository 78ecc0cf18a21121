"""The tables: every row is a run, every printed figure stands beside its row."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Captured
from pytest import MonkeyPatch

from bench import main
from benchmark.columns import COLUMNS
from benchmark.opening import PAIRS, check_options, choose_table, describe_preset, name_models
from benchmark.peers import PEERS
from benchmark.results import Options, Results, Run
from benchmark.rows import choose_runs
from benchmark.tables import CONTROL, PRESETS, TABLES, Table, choose_parts
from cli.errors import UsageError
from cli.models import PYTHIA


def chosen(name: str, **others: object) -> tuple[Table, list[Run]]:
    """The table and runs that --table NAME asks for, its options checked."""
    options = Options(table=name, **others)
    table = choose_table(options)
    runs = choose_runs(table, options)
    check_options(options, table, runs)
    return table, runs


@pytest.mark.parametrize("name", TABLES | PRESETS)
def test_every_table_is_valid(name: str) -> None:
    """Its rows, settings, sizes and columns, with what it is by default and on our own prompts; and
    every printed figure is of a row, a size and a column that the table has."""
    table, runs = chosen(name)
    labels = [run.label for run in runs]
    assert len(set(labels)) == len(labels) and (len(labels) > 1 or name == "steps")
    assert len({part.dataset for part in table.parts}) == len(table.parts)
    assert set(table.columns) <= set(COLUMNS) and CONTROL not in labels
    for run in runs:
        run.way.rule()
        assert run.baseline in labels and run.reference in labels
    shown = {run.label: run.published for run in runs}
    for part in table.parts:
        end = f" on {part.dataset}" * (len(table.parts) > 1)
        for (row, *size), figures in part.printed.items():
            assert set(figures) <= set(table.columns)
            assert row in PEERS or shown[row + end + part.size_words(size)] == figures
    _, moved = chosen(name, dataset="builtin")
    assert {run.dataset for run in moved} <= {"builtin"} and len(moved) <= len(runs)


def test_dynatrees_tables_have_their_papers_sizes() -> None:
    """450 configurations of v1, and ar and its figure's linear at each length."""
    _, runs = chosen("v1-4")
    assert len([run for run in runs if run.method == "fixed"]) == 450 and len(runs) == 465
    assert [run.row for run in runs[:3]] == ["ar", "linear K=6", "linear K=7"]
    best = [run for run in runs if run.published and run.method == "fixed"]
    assert [run.new_tokens for run in best] == [100, 200, 500, 750, 1000]


def number(cell: str) -> float:
    return float(cell.partition("±")[0].rstrip("x"))


def test_v2s_tables_agree_where_they_print_what_follows_from_another() -> None:
    """Tokens per second, over ar's as a ratio of means, and milliseconds per token; tokens per
    iteration, which are T over the mean of the iterations: none is copied wrong."""
    tables = [chosen(name)[1] for name in ("v2-1", "v2-2", "v2-3")]
    speed, latency, efficiency = [{run.label: run.published for run in runs} for runs in tables]
    assert list(speed) == list(latency) == list(efficiency) and len(speed) == 8
    for row, cells in efficiency.items():
        per_second = number(speed[row]["end_to_end_mean"])
        assert 0.95 < per_second * number(latency[row]["tpot_mean"]) / 1000 < 1.1, row
        ratio = per_second / number(speed[f"ar {row[row.index('on ') :]}"]["end_to_end_mean"])
        assert number(speed[row]["end_to_end_speedup"]) == pytest.approx(ratio, abs=0.006), row
        pooled = 1500 / number(cells["iterations_mean"])
        assert number(cells["tokens_pooled"]) == pytest.approx(pooled, abs=0.02), row


@pytest.mark.parametrize("name", ["dyspec-1", "dyspec-2", "dyspec-3"])
def test_dyspecs_tables_draft_and_accept_as_the_papers_methods(name: str) -> None:
    """Greedy children were drawn by the baselines, too, where Sequoia's script takes the likeliest;
    sampled ones were accepted by traversal beside a paper's figures of acceptance by token."""
    drafted = [run for run in chosen(name)[1] if run.method != "ar"]
    assert len(drafted) == 6 and {run.draft_temperature for run in drafted} <= {None, 0.6}
    assert [run.label for run in drafted if run.is_drawn] == ["dyspec N=64 t=0.0"]
    for run in drafted:
        assert run.way.acceptance == ("token" if run.temperature else None)
        assert not run.temperature or run.draft_temperature == 0.6
    _, own = chosen(name, methods="sequoia traversal", temperature=(0.6,))[1]
    assert own.row == "sequoia traversal"


ALL = ["ar", "linear K=8", "fixed D=8 B=3 tau=0.1", "dynatree"]
V2 = [f"{row} on wikitext2" for row in ALL]
V2 += [f"{row} on pg19" for row in ("ar", "linear K=5", ALL[2], "dynatree D_max=9")]
DYSPEC = ["ar", "specinfer widths=4:2:2:1:1", "sequoia N=64 D_max=16", "dyspec N=64"]
HOT = [f"{row} t=0.6" for row in DYSPEC]
COLD = [f"{row} t=0.0" for row in DYSPEC]
SIXTH = ["ar L=200", "linear K=6 L=200", "linear K=7 L=200"]
SIXTH += [f"fixed D={depth} B=2 tau=0.05 L=200" for depth in (6, 7)]


@pytest.mark.parametrize(
    ("name", "changed", "rows"),
    [
        ("v2-1", {}, V2),
        ("v2-1", {"repeats": 3, "dtype": "bfloat16", "draft": "other", "baseline": "dynatree"}, V2),
        ("v2-1", {"n_prompts": 7}, []),
        ("v2-1", {"new_tokens": (1400, 1500)}, [f"{row} T=1500" for row in V2]),
        ("v2-1", {"prompt_tokens": (800,)}, V2[:4]),
        ("v2-1", {"temperature": (0.0, 0.6)}, [f"{row} t=0.0" for row in V2]),
        ("v2-1", {"dataset": "wikitext2"}, ALL),
        ("v2-1", {"dataset": "builtin"}, []),
        ("v2-1", {"prompts": "own.txt"}, []),
        ("v2-1", {"methods": "linear K=8 window=512"}, ["ar on wikitext2", "ar on pg19"]),
        ("v1-6", {"prompt_tokens": (200, 300)}, SIXTH),
        ("dyspec-1", {"temperature": (0.6,)}, DYSPEC),
        ("dyspec-1", {"top_p": 0.9}, []),
        ("dyspec-1", {"prompts": "c4.jsonl"}, COLD + HOT),
    ],
)
def test_a_papers_figures_stand_beside_its_own_prompts_and_sizes_alone(
    name: str, changed: dict, rows: list[str]
) -> None:
    """They stood beside other lengths, datasets and numbers of prompts. A file may hold prompts of
    a dataset that is not here; of models, machine and precision, which no table sets, a note tells.
    The title says if none is left."""
    _, runs = chosen(name, **changed)
    assert sorted(run.label for run in runs if run.published) == sorted(rows)
    title = describe_preset(Options(table=name), runs)
    assert title.endswith("or rows: none is shown") == (not rows)


def offline(monkeypatch: MonkeyPatch, *unfetched: str) -> None:
    """Let these datasets not be had, and any other be texts of its own."""

    def load(dataset: str, *_: object) -> list[str]:
        if dataset in unfetched:
            raise UsageError(f"{dataset} cannot be fetched")
        return [f"{dataset} is what text {n} of it begins with, and so it goes on" for n in "abc"]

    monkeypatch.setattr("benchmark.opening.load_prompts", load)


BRIEF = ["--n-prompts", "2", "--prompt-tokens", "12", "--new-tokens", "6"]


def test_our_own_prompts_stand_in_for_a_datasets(
    monkeypatch: MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    """One line says so, file and title say whose they are; and it goes on with them where the
    dataset can be fetched again."""
    offline(monkeypatch, "wikitext2", "pg19")
    file = tmp_path / "r.json"
    assert main(["--table", "v2-1", *BRIEF, "--output", str(file)]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "stand in for" in line]
    assert len(notes) == 1 and notes[0].startswith("note: our own prompts stand in for wikitext2, ")
    assert "(rows on pg19 are left out): wikitext2 cannot be fetched; pg19 cannot" in notes[0]
    whole = Results.load(file)
    assert whole.title == PRESETS["v2-1"].title + "; on our own prompts instead of wikitext2, pg19"
    rows = ["ar", "linear K=8", "fixed D=8 B=3 tau=0.1", "dynatree"]
    assert [run.label for run in whole.runs] == rows
    assert whole.prompts["dataset"] == "builtin" and not any(r.published for r in whole.runs)
    replace(whole, records=whole.records[:3]).save(file)
    offline(monkeypatch)
    assert main(["--resume", str(file)]) == 0
    again = Results.load(file)
    assert len(again.records) == len(whole.records) and again.prompts == whole.prompts


def test_they_stand_in_for_what_lacks_alone(
    monkeypatch: MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    """What can be fetched is measured as ever, each part with its own rows and baseline; what was
    asked for by name is an error, and so is what lacks when a table is to go on."""
    offline(monkeypatch, "wikitext2")
    file = tmp_path / "r.json"
    assert main(["--table", "v2-1", *BRIEF, "--output", str(file)]) == 0
    assert "4 prompts (2 builtin, 2 pg19) of up to 12 tokens" in capsys.readouterr().out
    rows = Results.load(file).rows()
    assert [row.run.label for row in rows[:5]] == [f"{row} on builtin" for row in ALL] + V2[4:5]
    places = ["builtin"] * 4 + ["pg19"] * 4
    assert [row.run.baseline for row in rows] == [f"ar on {place}" for place in places]
    assert [row.run.reference for row in rows] == [f"ar on {place}" for place in places]
    assert [len(row.records) for row in rows] == [2] * 8
    asked = ["--table", "v2-1", *BRIEF, "--dataset", "wikitext2", "--output", str(tmp_path / "s")]
    assert main(asked) == 2
    assert "error: wikitext2 cannot be fetched" in capsys.readouterr().err
    offline(monkeypatch, "pg19")
    assert main(["--resume", str(file)]) == 2
    assert "error: --resume would mix two conditions: the prompts" in capsys.readouterr().err


def test_which_part_a_dataset_keeps() -> None:
    """The one that is on it, or that a script's reading is of; of what no part is on, the first."""
    (part,) = choose_parts(PRESETS["v1-5"], Options(dataset="wikitext2-script"))
    assert part == replace(PRESETS["v1-5"].parts[1], dataset="wikitext2-script")
    first, second = PRESETS["v2-1"].parts
    for dataset, expected in {"pg19": second, "builtin": first}.items():
        (part,) = choose_parts(PRESETS["v2-1"], Options(dataset=dataset))
        assert (part.dataset, part.rows) == (dataset, expected.rows)
    (part,) = choose_parts(PRESETS["v2-1"], Options(prompts="a/b.txt"))
    assert (part.dataset, part.rows) == ("b.txt", first.rows)


def test_a_pair_by_name(monkeypatch: MonkeyPatch) -> None:
    """It is kept as the two models that it is."""
    found = name_models(Options(pair="pythia"))
    assert (found.pair, found.target, found.draft) == (None, *PYTHIA)
    found = name_models(Options(table="enlarged", pair="embedded"))
    assert (found.target, found.draft) == ("models/tiny/target", "models/tiny/draft")
    monkeypatch.setitem(PAIRS, "enlarged", lambda: ["large", "small"])
    for options in (Options(pair="enlarged"), Options(table="enlarged")):
        assert name_models(options).target == "large"
    assert name_models(Options(target="a", draft="b", table="enlarged")).target == "a"
    with pytest.raises(UsageError, match="give either --pair or --target and --draft"):
        chosen("main", pair="pythia", draft="b")
