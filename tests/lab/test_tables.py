"""Tests of the tables: every row is a valid case, and every published figure belongs to a row."""

import shlex
from dataclasses import replace

import pytest

from dynatree_lab.benchmark.cases import (
    CONTROL,
    PRESETS,
    TABLES,
    Case,
    Part,
    choose_cases,
    choose_parts,
    find_table,
    labels,
)
from dynatree_lab.benchmark.hf import HF_METHODS
from dynatree_lab.benchmark.plan import (
    ALL_PAIRS,
    build_parser,
    check_options,
    describe_preset,
    resolve_models,
)
from dynatree_lab.benchmark.report import COLUMNS, VARIANTS, column
from dynatree_lab.cli.options import PYTHIA
from dynatree_lab.engine.passes import Window
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.methods.sampler import Sampling
from dynatree_lab.methods.static import Chain


def chosen(name: str, *words: str) -> list[Case]:
    """Return the cases of --table NAME with these options, which are checked."""
    args = build_parser().parse_args(["--table", name, *words])
    cases = choose_cases(choose_parts(args), args)
    check_options(args, cases)
    return cases


def cases_of(part: Part, *words: str) -> list[Case]:
    return choose_cases([part], build_parser().parse_args(words))


@pytest.mark.parametrize("name", TABLES | PRESETS)
def test_every_table_is_valid(name: str) -> None:
    """Check a table's rows, settings, sizes and columns, with its own and with the builtin prompts.
    Every published figure must have a row, a size and a column of the table."""
    cases, table = chosen(name), find_table(name)
    keys = {case.key: case for case in cases}
    assert len(keys) == len(set(labels(cases))) == len(cases)
    assert len(cases) > 1
    assert list(map(column, table.columns)) == list(table.columns)
    assert CONTROL not in {case.row for case in cases}
    for case in cases:
        case.generation_config()
        assert ("ar", *case.key[1:]) in keys and (case.reference, *case.key[1:]) in keys
    for part in table.parts:
        for (row, *size), figures in part.published.items():
            assert set(figures) <= set(table.columns)
            assert row in HF_METHODS or keys[row, part.dataset, *size].published == figures
    moved = chosen(name, "--dataset", "builtin")
    assert {case.dataset for case in moved} <= {"builtin"} and len(moved) <= len(cases)


def test_labels_name_only_what_differs() -> None:
    """Check the labels of cases. If each dataset has one size, no label names a size."""
    one = Case("ar", "a", 1, 2, 0.0)
    assert labels([one, replace(one, row="linear")]) == ["ar", "linear"]
    assert labels([one, replace(one, temperature=0.6)]) == ["ar t=0.0", "ar t=0.6"]
    assert labels([one, Case("ar", "b", 3, 4, 0.6)]) == ["ar on a", "ar on b"]
    sizes = [replace(one, prompt_tokens=3, new_tokens=n) for n in (2, 4)]
    assert labels([one, *sizes]) == ["ar L=1 T=2", "ar L=3 T=2", "ar L=3 T=4"]


def number(cell: str) -> float:
    return float(cell.partition("±")[0].rstrip("x"))


def test_v2s_published_figures_are_consistent() -> None:
    """Find figures that were copied wrong, by columns that follow from others: milliseconds per
    token and the speedup from tokens per second, and tokens per iteration from the iterations."""
    speed, latency, efficiency = [
        {label: case.published for label, case in zip(labels(cases), cases, strict=True)}
        for cases in map(chosen, ("v2-1", "v2-2", "v2-3"))
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
    """Check draft temperature and acceptance of each row. Of greedy text only dyspec draws the
    candidates, and sampled rows are accepted by token, as the paper's figures are."""
    drafted = [case for case in chosen(name) if case.method != "ar"]
    assert len(drafted) >= 6 and {case.draft_temperature for case in drafted} <= {None, 0.6}
    for case in drafted:
        assert case.is_drawn == (case.method == "dyspec" and case.temperature == 0)
        assert case.generation_config().acceptance == ("token" if case.temperature else None)
        assert not case.temperature or case.draft_temperature == 0.6
    own = chosen(name, "--methods", "sequoia traversal", "--temperature", "0.6")[1]
    assert own.acceptance is None and own.generation_config().acceptance == "traversal"


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        ("regimes", [], {"dynatree": 0.5, "confident": 1.0, "graft": 1.0, "linear": None}),
        ("regimes", ["--temperature", "0.6"], {"dynatree": 0.6, "deagle": 0.8, "linear": 0.6}),
        ("v2-1", [], {"dynatree": 1.0}),
        ("regimes", ["--methods", "dynatree draft_temperature=0.3"], {"dynatree": 0.3}),
    ],
)
def test_a_case_has_the_draft_temperature_of_its_trees(
    table: str, options: list[str], expected: dict[str, float | None]
) -> None:
    """Check the defaults, the papers' 1 for top-k candidates, and a row's own."""
    found = {case.method: case.draft_temperature for case in chosen(table, *options)}
    assert {method: found[method] for method in expected} == expected
    for case in chosen(table, *options):
        config = case.generation_config()
        if case.draft_temperature is not None:
            assert config.method.draft_temperature(config.sampling) == case.draft_temperature


SAMPLING_WORDS = [
    ("dynatree top_p=0.5", [], "top_p needs a temperature above 0"),
    ("dynatree temperature=0.5", [], "all rows have one; use --temperature=0.5"),
    ("dynatree seed=3", [], "all rows have one; use --seed=3"),
    ("dynatree top_p=0.5", ["--temperature", "1", "--top-p", "0.9"], "top_p is given twice"),
    ("linear draft_temperature=0.5", [], "draft_temperature has no effect"),
]


@pytest.mark.parametrize(("row", "options", "message"), SAMPLING_WORDS)
def test_a_sampling_word_of_a_row_works_or_is_refused(
    row: str, options: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        for case in chosen("main", "--methods", row, *options):
            case.generation_config(0.9 if "--top-p" in options else None)


ALL = ["ar", "linear K=8", "fixed D=8 B=3 tau=0.1 N_max=256", "dynatree"]
V2 = [f"{row} on wikitext2" for row in ALL]
PG19 = ["ar", "linear K=5", ALL[2], "dynatree D_max=9"]
V2 += [f"{row} on pg19" for row in PG19]
DYSPEC = ["ar", "specinfer widths=4:2:2:1:1", "sequoia N=64 D_max=16", "dyspec N=64"]
SIXTH = ["ar L=200", "linear K=6 L=200", "linear K=7 L=200"]
SIXTH += [f"fixed D={depth} B=2 tau=0.05 N_max=256 L=200" for depth in (6, 7)]


@pytest.mark.parametrize(
    ("name", "words", "rows"),
    [
        ("v2-1", "--repeats 3 --dtype bfloat16 --target t --draft d --baseline dynatree", V2),
        ("v2-1", "--n-prompts 7", []),
        ("v2-1", "--max-new-tokens 1400,1500", [f"{row} T=1500" for row in V2]),
        ("v2-1", "--prompt-tokens 800", V2[:4]),
        ("v2-1", "--temperature 0,0.6", [f"{row} t=0.0" for row in V2]),
        ("v2-1", "--dataset wikitext2", ALL),
        ("v2-1", "--dataset pg19", PG19),
        ("v2-1", "--dataset wikitext2-script --n-prompts 10", ALL),
        ("v2-1", "--dataset builtin", []),
        ("v2-1", "--prompts own.txt", []),
        ("v2-1", "--methods linear\\ K=8\\ window=512", ["ar on wikitext2", "ar on pg19"]),
        ("v1-6", "--prompt-tokens 200,300", SIXTH),
        ("dyspec-1", "--temperature 0.6", DYSPEC),
        ("dyspec-1", "--top-p 0.9", []),
        ("dyspec-1", "--prompts c4.jsonl", [f"{row} t={t}" for t in (0.0, 0.6) for row in DYSPEC]),
    ],
)
def test_published_figures_are_shown_only_for_their_own_prompts_and_sizes(
    name: str, words: str, rows: list[str]
) -> None:
    """Check which rows keep their published figures, and that the title says so if none does.

    A file of prompts counts as a paper's dataset if the project does not have that one. Models,
    machine and precision do not matter here, because no table sets them.
    """
    cases = chosen(name, *shlex.split(words))
    named = zip(labels(cases), cases, strict=True)
    assert sorted(label for label, case in named if case.published) == sorted(rows)
    title = describe_preset(name, cases, {"draft": "a draft", "head": "a head"})
    assert title.endswith("are for other prompts, sizes or rows") == (not rows)


def test_a_pair_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(words: str) -> tuple[str, str]:
        args = resolve_models(build_parser().parse_args(words.split()))
        return args.target, args.draft

    assert resolve("--pair pythia") == PYTHIA
    monkeypatch.setitem(ALL_PAIRS, "enlarged", lambda: ["large", "small"])
    assert resolve("--pair enlarged") == ("large", "small")


def test_references_and_the_baseline() -> None:
    """Check the references: strict ar with as many rows per pass, and ar over the same window. Each
    is added once, after ar, as is any row that is the baseline."""
    methods = "dynatree,dynatree strict,linear K=3 strict,linear window=64,ar rows=4 strict"
    cases = cases_of(Part(["ar"], new_tokens=(4, 8)), "--methods", methods)
    assert [(case.row, case.reference, case.new_tokens) for case in cases[:7]] == [
        ("ar", "ar", 4),
        ("ar strict rows=64", "ar strict rows=64", 4),
        ("ar strict rows=4", "ar strict rows=4", 4),
        ("ar window=64", "ar window=64", 4),
        ("dynatree", "ar", 4),
        ("dynatree strict", "ar strict rows=64", 4),
        ("linear K=3 strict", "ar strict rows=4", 4),
    ]
    assert cases[7].reference == cases[3].row and cases[8].reference == cases[2].row
    assert [case.new_tokens for case in cases] == [4] * 9 + [8] * 9
    cases = cases_of(Part(("ar", "linear"), new_tokens=(4, 8)), "--baseline", "hf-ar")
    assert labels(cases) == [f"{row} T={n}" for n in (4, 8) for row in ("ar", "hf-ar", "linear")]
    assert {case.reference for case in cases} == {"ar"}
    strict = cases_of(Part(["ar"]), "--methods", "ar", "--baseline", "linear  K=3 strict")
    assert labels(strict) == ["ar", "ar strict rows=4", "linear K=3 strict"]


def test_a_row_is_added_to_a_table() -> None:
    rows = [case.row for case in chosen("main")]
    added = [case.row for case in chosen("main", "--add", "dynatree tau=0.02,linear strict,ar")]
    assert added == ["ar", "ar strict rows=8", *rows[1:], "dynatree tau=0.02", "linear strict"]
    assert [case.row for case in chosen("main", "--methods", "lookup", "--add", "recycle")] == [
        "ar", "lookup", "recycle",
    ]  # fmt: skip


def test_a_column_is_named_as_the_table_prints_it() -> None:
    """Check that every title names its own column, and two in an option."""
    for name, (title, _) in (COLUMNS | VARIANTS).items():
        assert column(title.format(baseline="ar")) == column(name) == name
    args = build_parser().parse_args(["--columns", "tok/iter, x ar, exact"])
    assert args.columns == ["tokens_per_iter", "speedup", "exact"]


def test_the_generation_config_of_a_row() -> None:
    def config_of(row: str, top_p: float | None = None, **changes: object) -> GenerationConfig:
        case = Case(row, "", 1, 1, **({"temperature": 0.0} | changes))
        return case.generation_config(top_p, seed=7)

    assert config_of("linear strict head") == GenerationConfig(Chain(), strict=True)
    assert config_of("linear window=16 sinks=2") == GenerationConfig(Chain(), window=Window(16, 2))
    by_traversal = GenerationConfig(Chain(K=3), commit="rebuild", acceptance="traversal")
    assert config_of("linear K=3 rebuild traversal") == by_traversal
    assert config_of("linear K=3 rebuild", acceptance="traversal") == by_traversal
    hot = config_of("dyspec top_k=9 min_p=0.1", 0.9, temperature=0.8)
    assert hot.sampling == Sampling(0.8, 0.9, 7, top_k=9, min_p=0.1)
    cold = config_of("dynatree draft_temperature=0.3", draft_temperature=0.3)
    assert cold.sampling == Sampling(draft_temperature=0.3)
    hot = config_of("linear", 0.9, temperature=0.8, draft_temperature=0.6)
    assert hot.sampling == Sampling(0.8, 0.9, 7, 0.6, False)
    drawn = config_of("linear", 0.9, is_drawn=True, draft_temperature=0.6)
    assert drawn.sampling == Sampling(0.0, 1.0, 7, 0.6, True)
