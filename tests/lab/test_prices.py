"""Tests of prices: their words, the speed that follows from them, and their fit to texts."""

import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from small import ROOT, Captured, error_line
from test_measure import BRIEF, run_bench
from test_results import AR, make_head, make_text, write_results
from test_tables import chosen

from dynatree_lab.benchmark.measure import main
from dynatree_lab.benchmark.plan import build_parser
from dynatree_lab.benchmark.report import text_frame
from dynatree_lab.benchmark.results import Line
from dynatree_lab.methods.costs import LEVEL, MIN_COST, ROW, parse_costs
from dynatree_lab.replay.prices import Prices, fit, x_ar

IN_MEMORY, STREAMED = Prices(0.92, 0.08, 0.31), Prices(0.99, 0.01, 0.0007)
ROWS = {  # of table prices: target rows and draft passes of an iteration, tokens per iteration
    "ar": (1, 0, 1.0),
    "linear K=1": (2, 1, 1.6),
    "linear K=4": (5, 4, 2.8),
    "linear K=8": (9, 8, 3.3),
    "dyspec N=16": (16, 5, 3.5),
    "dyspec N=64": (64, 9, 4.2),
}


def make_texts(prices: Prices, n_prompts: int, n_tokens: int, noise: float) -> list[Line]:
    """Return texts of ROWS that take these prices on a machine on which an iteration of ar takes
    50 ms. noise: standard deviation of the target's part, relative."""
    source, texts = random.Random(0), []
    for row, (n_rows, n_passes, n_gained) in ROWS.items():
        for prompt in range(n_prompts):
            n = round((n_tokens - 1) / n_gained) + prompt % 2
            verifying = 50 * n * (prices.iteration + prices.row * n_rows) * source.gauss(1, noise)
            drafting = 50 * n * n_passes * prices.draft_pass
            text = {"row": row, "new_tokens": n_tokens, "iterations": n, "draft_ms": drafting / n}
            text |= {"target_rows": {str(n_rows): n}}
            text |= {"draft_rows": {"1": n * n_passes} if n_passes else {}}
            text["throughput"] = (n_tokens - 1) / (verifying + drafting) * 1e3
            texts.append(text)
    return texts


def test_the_word_of_prices() -> None:
    """Check that it is parsed again, also after rounding, and the costs that follow from it. Costs
    are above 0."""
    for prices in (IN_MEMORY, STREAMED, Prices(1.0, 0.0, 0.0), Prices(0.9237123, 0.0762877, 1.5)):
        again = Prices.parse(str(prices))
        assert Prices.parse(str(again)) == again and again.row == pytest.approx(
            prices.row, abs=4e-3
        )
        costs = parse_costs(prices.costs)
        assert costs[ROW - 1] == pytest.approx(max(prices.row, MIN_COST), rel=0.01)
        assert costs[LEVEL - 1] == pytest.approx(max(prices.draft_pass, MIN_COST), rel=0.01)
        assert costs[::2] == (MIN_COST, MIN_COST)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("0.9:0.1", "prices are '0.9:0.1', they must be iteration:row:draft_pass"),
        ("0.9:0.1:x", "they must be iteration:row:draft_pass"),
        ("0.9:0.2:0.3", "an iteration costs 0.9 and a row 0.2, they must add up to 1"),
        ("1.1:-0.1:0.3", "prices are 1.1:-0.1:0.3, each must be 0 or more"),
        ("0.9:0.1:nan", "each must be 0 or more"),
        ("0.9:0.1:inf", "each must be 0 or more"),
    ],
)
def test_words_that_are_no_prices(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        Prices.parse(word)
    assert "\n" not in str(raised.value)


def test_the_speed_that_follows_from_prices() -> None:
    """Check an example by hand, ar at any prices, and a text whose passes were not counted."""
    text = {"new_tokens": 25, "target_rows": {"4": 3, "8": 2}, "draft_rows": {"1": 9, "3": 1}}
    assert x_ar(Prices(0.5, 0.5, 0.1), text) == pytest.approx(24 / (5 * 0.5 + 28 * 0.5 + 10 * 0.1))
    ar = {"new_tokens": 25, "target_rows": {"1": 24}, "draft_rows": {}}
    assert [x_ar(IN_MEMORY, ar), x_ar(STREAMED, ar)] == pytest.approx([1, 1])
    assert math.isnan(x_ar(IN_MEMORY, {"new_tokens": 25}))


@pytest.mark.parametrize(("prices", "n_prompts", "n_tokens", "noise", "off"), [
    (IN_MEMORY, 4, 64, 0.0, 0.002), (IN_MEMORY, 4, 64, 0.05, 0.05), (STREAMED, 2, 16, 0.05, 0.05),
])  # fmt: skip
def test_a_fit_finds_the_prices_of_texts(
    prices: Prices, n_prompts: int, n_tokens: int, noise: float, off: float
) -> None:
    """Check prices, errors and speeds. The streamed target has two texts of 16 tokens, and its
    draft takes less time than its noise."""
    texts = make_texts(prices, n_prompts, n_tokens, noise)
    found = fit(texts)
    assert found.prices.row == pytest.approx(prices.row, rel=0.15 if noise else 1e-6)
    assert found.prices.draft_pass == pytest.approx(prices.draft_pass, rel=0.1 if noise else 1e-6)
    for text in texts:
        assert x_ar(found.prices, text) == pytest.approx(x_ar(prices, text), rel=off)
    assert list(found.errors) == list(ROWS)
    middle = statistics.median(map(abs, found.errors.values()))
    assert max(map(abs, found.errors.values())) <= 1.5 * noise + 1e-9
    assert f" by {middle:.0%} in the median row, and by " in found.describe_errors()


def test_no_fitted_price_is_below_zero() -> None:
    """Use texts in which more rows take less time."""
    texts = make_texts(Prices(1.0, 0.0, 0.0007), 2, 16, 0.0)
    for text in texts:
        text["throughput"] *= 1.05 if text["row"].startswith("dyspec") else 1
    found = fit(texts).prices
    assert (found.iteration, found.row) == (1, 0) and found.draft_pass == pytest.approx(7e-4, 0.1)


def test_texts_that_do_not_tell_prices_apart() -> None:
    texts = make_texts(IN_MEMORY, 4, 64, 0.0)
    chain = [text for text in texts if text["row"] == "linear K=4"]
    chain[0]["target_rows"] = {"5": 20, "4": 3}  # the last trees are smaller
    old = [{**text, "target_rows": None} for text in texts]
    for few in ([], texts[:4], chain, old):
        with pytest.raises(ValueError, match="^\\d+ texts with counted passes do not tell the"):
            fit(few)
    without = [{**text, "draft_ms": 0.0, "draft_rows": {}} for text in texts]
    with pytest.raises(ValueError, match="^24 texts"):
        fit(without)
    assert fit(texts[:4] + chain[1:]).prices.row == pytest.approx(0.08)


def test_the_table_of_prices(tmp_path: Path, capsys: Captured) -> None:
    """Check that its report ends with the prices of its texts, that its file gives other tables
    prices, which they record, and that --show takes others. The times are made up."""
    rows = ",".join(ROWS)
    assert [case.row for case in chosen("prices")] == list(ROWS)
    file, other = tmp_path / "prices.jsonl", tmp_path / "other.jsonl"
    head = make_head([replace(AR, row=row) for row in ROWS], 4, table="prices")
    lines = [
        make_text(replace(AR, row=text["row"]), i % 4, text["throughput"]) | text
        for i, text in enumerate(make_texts(IN_MEMORY, 4, 64, 0.0))
    ]
    write_results(file, lines, head)
    assert main(["--show", str(file), "--columns", "computed"]) == 0
    shown = capsys.readouterr().out
    assert "differ from measured ones by 0% in the median row" in " ".join(shown.split())
    assert "\n\n    --prices 0.92:0.08:0.31\n\n" in shown
    assert shown.endswith("\n\n    --set costs=0.0001:0.08:0.0001:0.31\n")
    table = ["--methods", rows, "--columns", "exact", "--prices", str(file)]
    results, printed = run_bench(other, BRIEF, *table)
    assert results.head["columns"] == ["exact", "computed"]
    recorded = results.head["options"]
    assert (recorded["prices"], recorded["prices_file"]) == ("0.92:0.08:0.31", "prices.jsonl")
    assert "draft pass, fitted to prices.jsonl." in " ".join(printed.split())
    assert main(["--resume", str(other)]) == 0 and capsys.readouterr().out == printed
    assert main(["--show", str(other), "--prices", "0.5:0.5:0"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the prices 0.5:0.5:0 of an iteration, a row and a draft pass." in shown
    frame = text_frame(results)
    expected = [x_ar(IN_MEMORY, results.texts[key]) for key in frame.key]
    assert frame.computed.tolist() == pytest.approx(expected) and frame.computed.max() > 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("0.9:0.3:0.1", "--prices 0.9:0.3:0.1: an iteration costs 0.9 and a row 0.3, they must"),
        ("none.jsonl", "none.jsonl cannot be read: No such file"),
        (
            f"{ROOT}/results/deagle_4_cpu.jsonl",
            "0 texts with counted passes do not tell the prices",
        ),
    ],
)
def test_prices_that_are_refused(word: str, message: str, capsys: Captured) -> None:
    assert message in error_line(capsys, main, [*BRIEF, "--prices", word])


def test_measure_prices_is_a_table(capsys: Captured) -> None:
    args = build_parser().parse_args(["--measure-prices", "--max-new-tokens", "16"])
    assert args.table == "prices"
    line = error_line(capsys, main, ["--show", "none.jsonl", "--measure-prices"])
    assert "error: --table: no effect with --show" in line
