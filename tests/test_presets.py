"""The tables: every row is a run, every printed figure stands beside its row."""

from dataclasses import replace
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from bench import main
from benchmark.columns import COLUMNS
from benchmark.opening import PAIRS, check_options, choose_table, name_models
from benchmark.peers import PEERS
from benchmark.report import table_cells
from benchmark.results import Options, Results, Run
from benchmark.rows import choose_runs
from benchmark.tables import NOT_HERE, PRESETS, TABLES, Table, choose_parts, expand
from cli.errors import UsageError
from cli.models import PYTHIA

Captured = pytest.CaptureFixture[str]


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
    assert set(table.columns) <= set(COLUMNS)
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


def test_names() -> None:
    """A name is one thing only; and every paper's every table is here or said not to be."""
    names = list(TABLES) + list(PRESETS) + list(NOT_HERE)
    assert len(set(names)) == len(names)
    for paper, n_tables in {"v1": 7, "v2": 5, "deagle": 4, "dyspec": 5}.items():
        for n in range(1, n_tables + 1):
            assert f"{paper}-{n}" in names


def test_braces_stand_for_several_rows() -> None:
    assert expand("fixed D={3,4} B={1,2} x") == [
        *("fixed D=3 B=1 x", "fixed D=3 B=2 x", "fixed D=4 B=1 x", "fixed D=4 B=2 x"),
    ]
    assert expand("graft base=beam") == ["graft base=beam"] and expand("*")[0] == "ar"


def cells_of(name: str) -> dict[str, dict[str, str]]:
    """What a table prints, by row."""
    return {run.label: run.published for run in chosen(name)[1]}


def test_dynatrees_tables_have_their_papers_sizes() -> None:
    """450 configurations of v1, and ar and its figure's linear at each length; the prompts' length
    is another on PG-19."""
    _, runs = chosen("v1-4")
    assert len([run for run in runs if run.method == "fixed"]) == 450 and len(runs) == 465
    assert [run.row for run in runs[:3]] == ["ar", "linear K=6", "linear K=7"]
    best = [run for run in runs if run.published and run.method == "fixed"]
    assert [run.new_tokens for run in best] == [100, 200, 500, 750, 1000]
    by_label = {run.label: run for run in chosen("v2-1")[1]}
    wikitext = by_label["linear K=8 on wikitext2"]
    assert (wikitext.prompt_tokens, by_label["linear K=5 on pg19"].prompt_tokens) == (800, 1000)
    assert wikitext.published == {"end_to_end_mean": "196.1±37.8", "end_to_end_speedup": "1.47x"}


def mean_of(cell: str) -> float:
    return float(cell.partition("±")[0])


def test_v2s_tables_agree_where_they_print_what_follows_from_another() -> None:
    """Tokens per second, over ar's as a ratio of means, and milliseconds per token; tokens per
    iteration, which are T over the mean of the iterations; path length and accept (code), over
    D0 + 2 or K, which are means: none is copied wrong or read as another."""
    speed, latency, efficiency = cells_of("v2-1"), cells_of("v2-2"), cells_of("v2-3")
    assert list(speed) == list(latency) == list(efficiency) and len(speed) == 8
    depths = {"linear K=8": 8, "linear K=5": 5, "fixed": 10, "dynatree": 7}
    for row, cells in efficiency.items():
        per_second = mean_of(speed[row]["end_to_end_mean"])
        per_token = mean_of(latency[row]["tpot_mean"])
        assert 0.95 < per_second * per_token / 1000 < 1.1, row
        ar = mean_of(speed[f"ar {row[row.index('on ') :]}"]["end_to_end_mean"])
        ratio = float(speed[row]["end_to_end_speedup"].rstrip("x"))
        assert ratio == pytest.approx(per_second / ar, abs=0.006), row
        pooled = 1500 / float(cells["iterations_mean"])
        assert float(cells["tokens_pooled"]) == pytest.approx(pooled, abs=0.02), row
        for name, depth in depths.items():
            if row.startswith(name):
                share = float(cells["code_acceptance_mean"].rstrip("%")) / 100
                path = float(cells["tokens_per_iter_mean"])
                assert share == pytest.approx(path / depth, abs=0.002), row


def test_deagles_tables_agree_where_they_print_the_same_runs() -> None:
    """The rows of 1 to 3 are the same, in a cell its four benchmarks; table 4's last column is
    table 2's on MT-Bench, and what Eq. 26 is read as stands beside the same figure."""
    first, second, third = cells_of("deagle-1"), cells_of("deagle-2"), cells_of("deagle-3")
    assert list(first) == list(second) == list(third) and len(first) == 30
    votes = cells_of("deagle-4")
    for depth in range(6, 19, 2):
        row = f"deagle k=10 N_max=60 D_max={depth}"
        of_all = votes[row]["wall_speedup"]
        assert second[f"{row} t=0.0"]["wall_speedup"].startswith(f"{of_all} / ")
    literal = [row for row in votes if row.endswith(" length=literal")]
    assert len(literal) == 4
    assert all(votes[row] == votes[row.removesuffix(" length=literal")] for row in literal)


@pytest.mark.parametrize("name", ["dyspec-1", "dyspec-2", "dyspec-3"])
def test_dyspecs_tables_draft_and_accept_as_the_papers_methods(name: str) -> None:
    """Greedy children were drawn by the baselines, too, where Sequoia's script takes the likeliest;
    sampled ones were accepted by traversal beside a paper's figures of acceptance by token."""
    drafted = [run for run in chosen(name)[1] if run.method != "ar"]
    assert len(drafted) == 6 and {run.draft_temperature for run in drafted} <= {None, 0.6}
    drawn = [run.label for run in drafted if run.is_drawn]
    assert drawn == ["dyspec N=64 t=0.0"]
    for run in drafted:
        assert run.way.acceptance == ("token" if run.temperature else None)
        assert not run.temperature or run.draft_temperature == 0.6
    (own,) = [run for run in chosen(name, methods="sequoia traversal", temperature=(0.6,))[1][1:]]
    assert own.row == "sequoia traversal"


ALL = ["ar", "linear K=8", "fixed D=8 B=3 tau=0.1", "dynatree"]
V2 = [f"{row} on wikitext2" for row in ALL]
V2 += [f"{row} on pg19" for row in ("ar", "linear K=5", ALL[2], "dynatree D_max=9")]
DYSPEC = ["ar", "specinfer widths=4:2:2:1:1", "sequoia N=64 D_max=16", "dyspec N=64"]
HOT = [f"{row} t=0.6" for row in DYSPEC]
COLD = [f"{row} t=0.0" for row in DYSPEC]
SIXTH = ["ar", "linear K=6", "linear K=7", "fixed D=6 B=2 tau=0.05", "fixed D=7 B=2 tau=0.05"]


@pytest.mark.parametrize(
    ("name", "changed", "rows"),
    [
        ("v2-1", {}, V2),
        ("v2-1", {"n_prompts": 8, "new_tokens": (1500,), "temperature": (0.0,)}, V2),
        ("v2-1", {"repeats": 3, "dtype": "bfloat16", "draft": "other", "baseline": "dynatree"}, V2),
        ("v2-1", {"n_prompts": 7}, []),
        ("v2-1", {"n_prompts": 9}, []),
        ("v2-1", {"new_tokens": (1400,)}, []),
        ("v2-1", {"new_tokens": (1400, 1500)}, [f"{row} T=1500" for row in V2]),
        ("v2-1", {"prompt_tokens": (700,)}, []),
        ("v2-1", {"prompt_tokens": (800,)}, V2[:4]),
        ("v2-1", {"temperature": (0.6,)}, []),
        ("v2-1", {"temperature": (0.0, 0.6)}, [f"{row} t=0.0" for row in V2]),
        ("v2-1", {"dataset": "wikitext2"}, ALL),
        ("v2-1", {"dataset": "builtin"}, []),
        ("v2-1", {"prompts": "own.txt"}, []),
        ("v2-1", {"methods": "linear K=8 window=512"}, ["ar on wikitext2", "ar on pg19"]),
        ("v2-1", {"methods": "linear K=8,linear K=9"}, [V2[0], V2[1], "ar on pg19"]),
        ("v1-6", {"prompt_tokens": (200, 300)}, [f"{row} L=200" for row in SIXTH]),
        ("v1-6", {"prompt_tokens": (200,)}, SIXTH),
        ("dyspec-1", {}, COLD + HOT),
        ("dyspec-1", {"temperature": (0.6,)}, DYSPEC),
        ("dyspec-1", {"top_p": 0.9}, []),
        ("dyspec-1", {"top_p": 1.0}, COLD + HOT),
        ("dyspec-1", {"prompts": "c4.jsonl"}, COLD + HOT),
        ("dyspec-1", {"dataset": "builtin"}, []),
        ("dyspec-1", {"n_prompts": 10}, []),
    ],
)
def test_a_papers_figures_stand_beside_its_own_prompts_and_sizes_alone(
    name: str, changed: dict, rows: list[str]
) -> None:
    """They stood beside other lengths, datasets and numbers of prompts. A file may hold prompts of
    a dataset that is not here; of models, machine and precision, which no table sets, a note tells.
    """
    found = [run for run in chosen(name, **changed)[1] if run.published]
    assert sorted(run.label for run in found) == sorted(rows)
    if changed == {"prompt_tokens": (200,)}:
        assert [run.published["end_to_end_mean"] for run in found[:2]] == ["127.4", "175.6"]


def test_a_preset_is_measured_and_shows_what_is_printed(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file alone tells both; the title says which table it is, and if figures are left out."""
    table = PRESETS["v2-1"]
    small = {"dataset": "builtin", "n_prompts": 1, "prompt_tokens": (12,), "new_tokens": (6,)}
    printed = {(row, 12, 6, 0.0): cells for (row, *_), cells in table.parts[0].printed.items()}
    part = replace(table.parts[0], printed=printed, **small)
    monkeypatch.setitem(PRESETS, "v2-1", replace(table, parts=(part,)))
    few = ["--table", "v2-1", "--methods", "ar,linear K=8"]
    own, other = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert main([*few, "--output", own]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{table.title}. The paper's figures are of its own" in printed
    header, body = table_cells(Results.load(own))
    named = ["end-to-end tok/s mean", "end-to-end x ar", "tok/s", "x ar"]
    assert [title for title in header if title in named] == named
    assert header[2::2][:2] == ["paper end-to-end tok/s mean", "paper end-to-end x"]
    cells = {line[0]: line[1:] for line in body}
    assert cells["linear K=8"][1] == "196.1±37.8" and cells["linear K=8"][3] == "1.47x"
    assert "paper exact" not in header
    assert main([*few, "--output", other, "--new-tokens", "7"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "its figures are of other prompts, sizes or rows: none is shown." in printed
    assert not any(run.published for run in Results.load(other).runs)


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
    """One line says so, no figure of the paper's stands beside them, file and title say whose they
    are; and it goes on with them where the dataset can be fetched again."""
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
    assert {whole.prompts["dataset"], *(run.dataset for run in whole.runs)} == {"builtin"}
    assert not any(run.published for run in whole.runs)
    replace(whole, records=whole.records[:3]).save(file)
    offline(monkeypatch)
    assert main(["--resume", str(file)]) == 0
    again = Results.load(file)
    assert len(again.records) == len(whole.records) and again.prompts == whole.prompts


def test_they_stand_in_for_what_lacks_alone(
    monkeypatch: MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    """What can be fetched is measured as ever; what was asked for by name is an error, and so is
    what lacks when a table is to go on."""
    offline(monkeypatch, "wikitext2")
    file = tmp_path / "r.json"
    assert main(["--table", "v2-1", *BRIEF, "--output", str(file)]) == 0
    results = Results.load(file)
    assert results.prompts["dataset"] == "2 builtin, 2 pg19"
    asked = ["--table", "v2-1", *BRIEF, "--dataset", "wikitext2", "--output", str(tmp_path / "s")]
    assert main(asked) == 2
    assert "error: wikitext2 cannot be fetched" in capsys.readouterr().err
    offline(monkeypatch, "pg19")
    assert main(["--resume", str(file)]) == 2
    assert "error: --resume would mix two conditions: the prompts" in capsys.readouterr().err


def test_the_scripts_reading_is_of_the_part_on_its_dataset() -> None:
    """Of v1-5 that is the second one."""
    (part,) = choose_parts(PRESETS["v1-5"], Options(dataset="wikitext2-script"))
    assert part == replace(PRESETS["v1-5"].parts[1], dataset="wikitext2-script")


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
