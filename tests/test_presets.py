"""Tests of the tables: every row is a valid case, and every published figure belongs to a row."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Captured
from pytest import MonkeyPatch

from bench import main
from benchmark.cases import (
    CONTROL,
    PRESETS,
    TABLES,
    Case,
    Part,
    choose_cases,
    choose_parts,
    labels,
    places,
    table_of,
)
from benchmark.columns import COLUMNS
from benchmark.hf import HF_METHODS
from benchmark.options import build_parser
from benchmark.prepare import PAIRS, check_options, describe_preset, resolve_pair
from benchmark.report import by_label
from benchmark.results import load
from cli.errors import UsageError
from cli.models import PYTHIA


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def chosen(name: str, *words: str) -> tuple[list[Part], list[Case]]:
    """Return the parts and cases of --table NAME with these options, which are checked."""
    args = parse("--table", name, *words)
    parts = choose_parts(args)
    cases = choose_cases(parts, args)
    check_options(args, table_of(name), parts, cases)
    return parts, cases


@pytest.mark.parametrize("name", TABLES | PRESETS)
def test_every_table_is_valid(name: str) -> None:
    """Check a table's rows, settings, sizes and columns, with its own and with the builtin prompts.
    Every published figure must have a row, a size and a column of the table."""
    parts, cases = chosen(name)
    keys = {case.key: case for case in cases}
    assert len(keys) == len(set(labels(cases))) == len(cases) and (
        len(cases) > 1 or name == "steps"
    )
    assert len({part.dataset for part in parts}) == len(parts)
    assert set(table_of(name).columns) <= set(COLUMNS)
    assert CONTROL not in {case.row for case in cases}
    for case in cases:
        case.generation_config().make_rule()
        assert ("ar", *case.key[1:]) in keys and (case.reference, *case.key[1:]) in keys
    for part in parts:
        for (row, *size), figures in part.published.items():
            assert set(figures) <= set(table_of(name).columns)
            assert row in HF_METHODS or keys[row, part.dataset, *size].published == figures
    _, moved = chosen(name, "--dataset", "builtin")
    assert {case.dataset for case in moved} <= {"builtin"} and len(moved) <= len(cases)


def test_labels_name_only_what_differs() -> None:
    """Check the labels of cases. If each dataset has one size, no label names a size."""
    one = Case("ar", "a", 1, 2, 0.0)
    assert places([one, replace(one, row="linear")]) == ["", ""]
    hot = replace(one, temperature=0.6)
    assert labels([one, hot]) == ["ar t=0.0", "ar t=0.6"]
    other = Case("ar", "b", 3, 4, 0.6)
    assert labels([one, other]) == ["ar on a", "ar on b"]
    sizes = [replace(one, prompt_tokens=3, new_tokens=n) for n in (2, 4)]
    assert places([one, *sizes]) == ["L=1 T=2", "L=3 T=2", "L=3 T=4"]


def test_dynatrees_tables_have_their_papers_sizes() -> None:
    """Check the cases of v1-4: 450 configurations, and ar and two linear rows at each length."""
    _, cases = chosen("v1-4")
    assert len([case for case in cases if case.method == "fixed"]) == 450 and len(cases) == 465
    assert [case.row for case in cases[:3]] == ["ar", "linear K=6", "linear K=7"]
    best = [case for case in cases if case.published and case.method == "fixed"]
    assert [case.new_tokens for case in best] == [100, 200, 500, 750, 1000]


def number(cell: str) -> float:
    return float(cell.partition("±")[0].rstrip("x"))


def test_v2s_published_figures_are_consistent() -> None:
    """Find figures that were copied wrong, by columns that follow from others.

    Milliseconds per token and the speedup follow from tokens per second. Tokens per iteration are T
    over the mean number of iterations.
    """
    tables = [chosen(name)[1] for name in ("v2-1", "v2-2", "v2-3")]
    speed, latency, efficiency = [
        {label: case.published for label, case in zip(labels(cases), cases, strict=True)}
        for cases in tables
    ]
    assert list(speed) == list(latency) == list(efficiency) and len(speed) == 8
    for row, cells in efficiency.items():
        per_second = number(speed[row]["end_to_end_mean"])
        assert 0.95 < per_second * number(latency[row]["tpot_mean"]) / 1000 < 1.1, row
        ratio = per_second / number(speed[f"ar {row[row.index('on ') :]}"]["end_to_end_mean"])
        assert number(speed[row]["end_to_end_speedup"]) == pytest.approx(ratio, abs=0.006), row
        pooled = 1500 / number(cells["iterations_mean"])
        assert number(cells["tokens_pooled"]) == pytest.approx(pooled, abs=0.02), row


@pytest.mark.parametrize("name", ["dyspec-1", "dyspec-2", "dyspec-3", "dyspec-4"])
def test_dyspecs_tables_draft_and_accept_as_the_papers_methods(name: str) -> None:
    """Check draft temperature and acceptance of each row.

    The baselines once drew the candidates of greedy text, where Sequoia's script takes the top k.
    Sampled rows were once accepted by traversal, while the paper's figures are for token.
    """
    drafted = [case for case in chosen(name)[1] if case.method != "ar"]
    assert len(drafted) >= 6 and {case.draft_temperature for case in drafted} <= {None, 0.6}
    for case in drafted:
        assert case.is_drawn == (case.method == "dyspec" and case.temperature == 0)
    for case in drafted:
        assert case.generation_config().acceptance == ("token" if case.temperature else None)
        assert not case.temperature or case.draft_temperature == 0.6
    own = chosen(name, "--methods", "sequoia traversal", "--temperature", "0.6")[1][1]
    assert own.acceptance is None and own.generation_config().acceptance == "traversal"


ALL = ["ar", "linear K=8", "fixed D=8 B=3 tau=0.1 N_max=256", "dynatree"]
V2 = [f"{row} on wikitext2" for row in ALL]
V2 += [f"{row} on pg19" for row in ("ar", "linear K=5", ALL[2], "dynatree D_max=9")]
DYSPEC = ["ar", "specinfer widths=4:2:2:1:1", "sequoia N=64 D_max=16", "dyspec N=64"]
HOT = [f"{row} t=0.6" for row in DYSPEC]
COLD = [f"{row} t=0.0" for row in DYSPEC]
SIXTH = ["ar L=200", "linear K=6 L=200", "linear K=7 L=200"]
SIXTH += [f"fixed D={depth} B=2 tau=0.05 N_max=256 L=200" for depth in (6, 7)]


@pytest.mark.parametrize(
    ("name", "words", "rows"),
    [
        ("v2-1", "", V2),
        ("v2-1", "--repeats 3 --dtype bfloat16 --target t --draft d --baseline dynatree", V2),
        ("v2-1", "--n-prompts 7", []),
        ("v2-1", "--max-new-tokens 1400,1500", [f"{row} T=1500" for row in V2]),
        ("v2-1", "--prompt-tokens 800", V2[:4]),
        ("v2-1", "--temperature 0,0.6", [f"{row} t=0.0" for row in V2]),
        ("v2-1", "--dataset wikitext2", ALL),
        ("v2-1", "--dataset builtin", []),
        ("v2-1", "--prompts own.txt", []),
        ("v2-1", "--methods linear\\ K=8\\ window=512", ["ar on wikitext2", "ar on pg19"]),
        ("v1-6", "--prompt-tokens 200,300", SIXTH),
        ("dyspec-1", "--temperature 0.6", DYSPEC),
        ("dyspec-1", "--top-p 0.9", []),
        ("dyspec-1", "--prompts c4.jsonl", COLD + HOT),
    ],
)
def test_published_figures_are_shown_only_for_their_own_prompts_and_sizes(
    name: str, words: str, rows: list[str]
) -> None:
    """Check which rows keep their published figures.

    Figures were once shown for other lengths, datasets and numbers of prompts. A file of prompts
    counts as a paper's dataset if the project does not have that one. Models, machine and precision
    do not matter here, because no table sets them. The title says so if no figure is left.
    """
    parts, cases = chosen(name, *shlex.split(words))
    named = zip(labels(cases), cases, strict=True)
    assert sorted(label for label, case in named if case.published) == sorted(rows)
    title = describe_preset(name, cases, parts, [], "a drafter")
    assert title.endswith("are for other prompts, sizes or rows") == (not rows)


def offline(monkeypatch: MonkeyPatch, *unfetched: str) -> None:
    """Make fetching these datasets fail, and any other dataset return short texts."""

    def load(dataset: str, *_: object) -> list[str]:
        if dataset in unfetched:
            raise UsageError(f"{dataset} cannot be fetched")
        return [f"{dataset} is what text {n} of it begins with, and so it goes on" for n in "abc"]

    monkeypatch.setattr("benchmark.prepare.load_prompts", load)


BRIEF = ["--n-prompts", "2", "--prompt-tokens", "12", "--max-new-tokens", "6"]


def test_builtin_prompts_replace_datasets_that_cannot_be_fetched(
    monkeypatch: MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    """Check the note, the results file and its title. A resumed run keeps the builtin prompts,
    although the datasets can be fetched by then."""
    offline(monkeypatch, "wikitext2", "pg19")
    file = tmp_path / "r.jsonl"
    assert main(["--table", "v2-1", *BRIEF, "--output", str(file)]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "prompts replace" in line]
    assert len(notes) == 1 and notes[0].startswith("note: builtin prompts replace wikitext2, ")
    assert "(rows on pg19 are left out): wikitext2 cannot be fetched; pg19 cannot" in notes[0]
    whole = load(file)
    title = PRESETS["v2-1"].title + "; with builtin prompts instead of wikitext2, pg19"
    assert whole.head.title == title
    rows = ["ar", "linear K=8", "fixed D=8 B=3 tau=0.1 N_max=256", "dynatree"]
    assert labels(whole.head.cases) == rows
    assert whole.head.prompts == "builtin" and not any(c.published for c in whole.head.cases)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    offline(monkeypatch)
    assert main(["--resume", str(file)]) == 0
    again = load(file)
    assert list(again.texts) == list(whole.texts) and again.head == whole.head


def test_builtin_prompts_replace_only_the_missing_dataset(
    monkeypatch: MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    """Check that the other part keeps its dataset, its rows and its baseline. A missing dataset is
    an error if --dataset names it, or if a resumed table needs it."""
    offline(monkeypatch, "wikitext2")
    file = tmp_path / "r.jsonl"
    assert main(["--table", "v2-1", *BRIEF, "--output", str(file)]) == 0
    assert "4 prompts (2 builtin, 2 pg19) of up to 12 tokens" in capsys.readouterr().out
    found = by_label(load(file))
    assert list(found)[:5] == [f"{row} on builtin" for row in ALL] + V2[4:5] and len(found) == 8
    for label, texts in found.items():
        assert len(texts) == 2 and texts.has_baseline.all() != label.startswith("ar ")
        assert texts.is_compared.all() != label.startswith("ar ")
    named = ["--table", "v2-1", *BRIEF, "--dataset", "wikitext2", "--output", str(tmp_path / "s")]
    assert main(named) == 2
    assert "error: wikitext2 cannot be fetched" in capsys.readouterr().err
    offline(monkeypatch, "pg19")
    assert main(["--resume", str(file)]) == 2
    assert "error: --resume: the prompts have changed" in capsys.readouterr().err


def test_which_part_a_dataset_keeps() -> None:
    """Check --dataset and --prompts: the part on that dataset is kept, or else the first part. The
    script's version of wikitext2 counts as wikitext2."""
    (part,) = choose_parts(parse("--table", "v1-5", "--dataset", "wikitext2-script"))
    assert part == replace(PRESETS["v1-5"].parts[1], dataset="wikitext2-script")
    first, second = PRESETS["v2-1"].parts
    for dataset, expected in {"pg19": second, "builtin": first}.items():
        (part,) = choose_parts(parse("--table", "v2-1", "--dataset", dataset))
        assert (part.dataset, part.rows) == (dataset, expected.rows)
    (part,) = choose_parts(parse("--table", "v2-1", "--prompts", "a/b.txt"))
    assert (part.dataset, part.rows) == ("b.txt", first.rows)


def test_a_pair_by_name(monkeypatch: MonkeyPatch) -> None:
    """Check that --pair is resolved to a target and a draft."""
    found = resolve_pair(parse("--pair", "pythia"))
    assert (found.pair, found.target, found.draft) == (None, *PYTHIA)
    found = resolve_pair(parse("--table", "enlarged", "--pair", "embedded"))
    assert (found.target, found.draft) == ("models/tiny/target", "models/tiny/draft")
    monkeypatch.setitem(PAIRS, "enlarged", lambda: ["large", "small"])
    for words in (["--pair", "enlarged"], ["--table", "enlarged"]):
        assert resolve_pair(parse(*words)).target == "large"
    own = parse("--target", "a", "--draft", "b", "--table", "enlarged")
    assert resolve_pair(own).target == "a"
    with pytest.raises(UsageError, match="--pair excludes --target and --draft"):
        chosen("main", "--pair", "pythia", "--draft", "b")
