"""Tests of figures: which ones a file gives, the numbers that they show, and their files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import ROOT, Captured, error_line
from test_results import MACHINE, make_head, write_results

from benchmark.cases import SYMBOLS, Case
from benchmark.plot import main
from benchmark.results import CASE_COLUMNS, Line, Results, load
from cli.metrics import Metrics
from methods import METHODS

figures = pytest.importorskip("benchmark.figures")  # it needs seaborn
draw = figures.draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = ROOT / "results" / "steps_cpu.jsonl"
NAMES = ("ar", "linear", "dynatree", "hf-ar")
GRID = ("ar", "fixed D=3 B=2", "fixed B=3 D=3", "fixed B=2 D=4", "fixed D=4 B=3", "fixed B=2")
MANY = ("ar",) + tuple(f"fixed D={d} B={b} tau=0.1" for d in range(3, 9) for b in (2, 3, 4, 5))
METRIC_NAMES = {field.name for field in fields(Metrics)} - {"iterations", "new_tokens"}
TREES = {"_depth", "_position", "_calibration"}
BARS = {""} | TREES
LINES = {"", "_speedup", "_progress", "_acceptance"} | TREES


def make_case(row: str, place: str) -> Case:
    """Return the case of a row at a place such as "on pg19 T=10"."""
    names = {symbol: name for name, symbol in SYMBOLS.items()}
    case = Case(row, place.removeprefix("on ").partition("=")[0], 150, 128, 0.0)
    return replace(case, **{names[w[0]]: json.loads(w[2:]) for w in place.split() if "=" in w})


def make_results(
    names: Sequence[str] = NAMES,
    places: Sequence[str] = ("",),
    change: Callable[[int, Line], object] = lambda i, text: None,
    **head: object,
) -> Results:
    """Return results of these rows at these places, on four prompts in two rounds.

    The first row's throughputs are 50, 51, 54 and 59, the next one's 51, 52, ... `change` edits
    each line of the file.
    """
    cases = [make_case(name, place) for place, name in product(places, names)]
    found = Results(make_head(cases, 4, **({"options": {"repeats": 2}, "table": "main"} | head)))
    for i, case in enumerate(cases):
        for prompt, repeat in product(range(4), range(2)):
            line = dict(zip(CASE_COLUMNS, case.key, strict=True)) | {"prompt": prompt}
            line |= {"round": repeat, "throughput": 50.0 + i + prompt**2, "tokens_per_iter": 2.0}
            line |= {"acceptance_rate": 0.5, "drafted_per_iter": 2.0, "iterations": 5}
            line |= {"draft_passes": 3.0, "ids_digest": "0"}
            if case.method not in ("ar", "hf-ar"):
                depths = {"drafted": [40, 30, 2], "tried": [40, 20, 5], "accepted": [30, 10, 2]}
                line["depths"] = depths
                line["calibration"] = {"drafted": [90, 8, 2], "top1_match": [45, 8, 2]}
            change(i, line)
            found.add(line)
    return found


def marked_points(axis: "Axes") -> list[list[float]]:
    """Return the points that are not in the background."""
    (line,) = [line for line in axis.lines if line.get_marker() == "."]
    return line.get_xydata().tolist()


def shown_texts(figure: "Figure") -> list[str]:
    return [text.get_text() for axis in figure.axes for text in axis.texts]


@pytest.mark.parametrize(
    ("results", "endings"),
    [
        (make_results(), BARS),
        (make_results(places=("on pg19", "on a/../b")), BARS),
        (make_results(("ar",)), {""}),
        (make_results(("ar", "linear"), ("T=10", "T=20")), LINES),
        (make_results(("ar", "linear"), ("t=0.6", "t=1.0")), LINES - {"_calibration"}),
        (
            make_results(("ar", "linear"), ("L=4 T=1", "L=4 T=2", "L=5 T=1", "L=5 T=2")),
            {f"_{size}{kind}" for size in "LT" for kind in LINES - TREES} | TREES,
        ),
        (make_results(GRID), BARS | {"_settings"}),
        (make_results(MANY, ("T=10", "T=20")), {"_settings"}),
        (load(STEPS), {""}),
    ],
)
def test_what_is_drawn_follows_from_what_varies(results: Results, endings: set[str]) -> None:
    """Check the endings of the figures' names. They contain no label."""
    assert set(draw(results)) == endings


def test_bars_are_medians_and_whiskers_quartiles() -> None:
    figure = draw(make_results(places=("on a", "on b")))[""]
    speed, speedup, _, other_speed, *_ = figure.axes
    assert [bar.get_width() for bar in speed.patches] == [52.5, 53.5, 54.5, 55.5]
    assert [bar.get_width() for bar in other_speed.patches] == [56.5, 57.5, 58.5, 59.5]
    assert (speed.get_ylabel(), other_speed.get_ylabel()) == ("on a", "on b")
    whisker = speed.lines[0].get_xdata()
    assert (min(whisker), max(whisker)) == (50.75, 55.25)
    assert shown_texts(figure)[:5] == ["52.5", "53.5", "54.5", "55.5", "1.00x"]
    assert speedup.patches[1].get_width() == pytest.approx((52 / 51 + 55 / 54) / 2)
    assert [tick.get_text() for tick in speed.get_yticklabels()] == list(NAMES)


def test_memory_compared_with_ar() -> None:
    def as_memory(i: int, text: Line) -> None:
        for name in ("throughput", "tokens_per_iter"):
            del text[name]
        text |= {"peak_mb": 300.0 + i, "weights_and_caches_mb": 100.0}

    shown = shown_texts(draw(make_results(change=as_memory))[""])
    assert shown[:4] == ["300", "301", "302", "303"] and shown[8:10] == ["+0.0%", "+0.3%"]


def test_rates_are_of_ten_or_more_and_have_their_counts() -> None:
    """Check that each greedy text counts once, because a second round repeats it. Sampled texts do
    not count for calibration."""

    def as_sampled(i: int, text: Line) -> None:
        if text["row"] == "linear" and text["temperature"]:
            text["calibration"] = {"drafted": [999, 0, 0], "top1_match": [0, 0, 0]}
            del text["depths"]

    results = make_results(places=("t=0.0", "t=0.6"), change=as_sampled)
    found = draw(results)
    linear = found["_depth"].axes[0]
    assert marked_points(linear) == [[1, 0.75], [2, 1 / 3]]  # two trees of four prompts are too few
    assert [text.get_text() for text in linear.texts] == ["160", "120"]
    assert marked_points(found["_position"].axes[0]) == [[1, 0.75], [2, 0.5], [3, 0.4]]
    calibration = found["_calibration"].axes[0]
    assert marked_points(calibration) == [[1 / 6, 0.5], [0.5, 1.0]]
    assert [bar.get_height() for bar in calibration.patches] == [0.9, 0.08, 0.02]


def test_lines_by_size_have_medians_and_speedups() -> None:
    """Check that there are ticks only at sizes that were measured."""
    figure = draw(make_results(("ar", "linear"), ("T=10", "T=20")))[""]
    ar, linear = (marked_points(axis) for axis in figure.axes)
    assert ar == [[10, 52.5], [20, 54.5]] and linear == [[10, 53.5], [20, 55.5]]
    assert shown_texts(figure) == ["1.00x", "1.00x", "1.02x", "1.02x"]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["10", "20"]


def test_a_papers_table_is_drawn_as_the_paper_reads_it() -> None:
    """Check speeds that include prefill, like the paper's columns, and another baseline."""
    results = make_results(
        ("ar", "linear"),
        ("L=10", "L=20"),
        change=lambda i, text: text.update(end_to_end=text["throughput"] / 2),
        columns=["end_to_end_mean", "speedup"],
        options={"repeats": 2, "baseline": "linear"},
    )
    found = draw(results)
    assert marked_points(found[""].axes[1]) == [[10, 26.75], [20, 27.75]]
    assert shown_texts(found[""]) == ["0.98x", "0.98x", "1.00x", "1.00x"]
    assert found[""].get_suptitle().endswith("numbers: median x linear; grey: other rows")
    assert found[""].get_supxlabel().endswith("Speeds include prefill.")
    assert found["_speedup"].get_supylabel() == "speedup over linear"


def test_a_sweep_puts_each_run_at_its_settings() -> None:
    """Check settings in any order, and settings that are left at their defaults."""
    figure = draw(make_results((*GRID, "fixed B=2 rebuild")))["_settings"]
    speedup = figure.axes[0]
    assert [tick.get_text() for tick in speedup.get_xticklabels()] == ["3", "4", "5"]
    assert [tick.get_text() for tick in speedup.get_yticklabels()] == ["B=2", "B=3", "B=2 rebuild"]
    cells = [f"{value:.2f}" for value in speedup.collections[0].get_array().filled(0).ravel()]
    assert cells == ["1.02", "1.06", "1.10", "1.04", "1.08", "0.00", "0.00", "0.00", "1.11"]
    assert set(shown_texts(figure)[-6:]) == {"15"}  # five iterations of three draft passes


def test_a_method_has_one_colour() -> None:
    bars = draw(make_results(("ar", "dynatree", "dynatree W=5", "linear")))[""].axes[0].patches
    painted = [bar.get_facecolor() for bar in bars]
    assert len(set(painted)) == 3 and painted[1] == painted[2]
    assert len({figures.METHOD_COLOURS[method] for method in METHODS}) == len(METHODS)


def test_a_table_that_has_only_begun_is_drawn() -> None:
    """Check one text of the last row, and all of them with one of the row before."""
    results = make_results()
    every = list(results.texts.items())
    for n in (9, 1):
        results.texts = dict(every[-n:])
        assert draw(results)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_extreme_labels_and_numbers_can_be_drawn(tmp_path: Path) -> None:
    """Draw labels with characters that no font has, an invalid formula, 5,000 characters and paths.
    A metric may be 0, as after one token."""
    words = ("\x1b[2J", "a$\\frac$", "x" * 5000, "漢字", "../..", "_", "{0}")
    values = cycle((0.0, 1e-12, 1e12))

    def extreme(i: int, text: Line) -> None:
        value = next(values)
        text |= {name: value for name in text.keys() & METRIC_NAMES}
        if text["round"]:
            del text["throughput"]

    results = make_results(
        ("ar", "linear", "dynatree"),
        [f"on {word}" for word in words],
        extreme,
        machine=MACHINE | {"processor": "".join(words)},
    )
    write_results(tmp_path / "r.jsonl", list(results.texts.values()), results.head)
    assert main([str(tmp_path / "r.jsonl")]) == 0
    names = {f"r{ending}.png" for ending in BARS}
    assert {file.name for file in tmp_path.iterdir()} == names | {"r.jsonl"}
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in names)


def test_no_figure_overwrites_another(tmp_path: Path, capsys: Captured) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "a.txt"]
    results = make_results(("ar", "linear"))
    for file in files:
        write_results(file, list(results.texts.values()), results.head)
    line = error_line(capsys, main, [str(file) for file in files])
    assert f" would be a figure of {files[1]}" in line and not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["empty.jsonl"], "no texts yet"),
        ([str(STEPS), "--output", "empty.jsonl"], "cannot be written"),
        (["many.jsonl"], "no figure: "),
    ],
)
def test_mistakes(
    arguments: list[str],
    word: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    many = ["ar", *(f"specinfer widths=2:{n + 1}" for n in range(figures.MAX_NAMES))]
    for name, results in {"many": make_results(many), "empty": make_results(())}.items():
        write_results(Path(f"{name}.jsonl"), list(results.texts.values()), results.head)
    assert word in error_line(capsys, main, arguments)


def test_without_seaborn_one_line_says_how_to_install_it(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "benchmark.figures", None)
    assert "pip install seaborn==" in error_line(capsys, main, [str(STEPS)])


def test_a_users_matplotlib_settings_are_ignored(tmp_path: Path) -> None:
    """Check a backend that does not exist, as notebooks may set, and a matplotlibrc with LaTeX."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    command = [sys.executable, "-m", "benchmark.plot", str(STEPS), "--output", str(tmp_path)]
    own = {"MATPLOTLIBRC": str(tmp_path), "MPLBACKEND": "none"}
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | own)
    assert (tmp_path / "steps_cpu.png").exists()
