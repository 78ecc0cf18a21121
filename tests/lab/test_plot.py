"""Tests of figures: which ones a file gives, the numbers that they show, and their files."""

import random
import sys
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING

import pandas
import pytest
from small import Captured, error_line
from test_results import AR, make_head, make_results, make_text, write_results

from dynatree_lab.benchmark.cases import Case
from dynatree_lab.benchmark.plot import main
from dynatree_lab.benchmark.results import Line, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("ar", "linear", "dynatree tau=0.1", "hf-ar", "mine K=2")  # the last one is a user's


def make_lines(cases: list[Case]) -> list[Line]:
    """Return the lines of four prompts. The first row's throughputs are 50, 51, 54 and 59, the
    next one's 51, 52, ..."""
    lines = []
    for (i, case), prompt in product(enumerate(cases), range(4)):
        text = make_text(case, prompt, 50.0 + i + prompt**2)
        if case.method in ("linear", "dynatree") and not case.temperature:
            text["calibration"] = {"drafted": [90, 8, 2], "top1_match": [45, 8, 2]}
        lines.append(text)
    return lines


@pytest.fixture(scope="module")
def drawn() -> dict[str, "Figure"]:
    """Return the figures of these rows, greedy and sampled."""
    draw = pytest.importorskip("dynatree_lab.benchmark.figures").draw  # it needs seaborn
    cases = [replace(AR, row=row, temperature=t) for t in (0.0, 0.6) for row in NAMES]
    found = Results(make_head(cases, 4))
    for line in make_lines(cases):
        found.add(line)
    return draw(found)


def test_bars_are_medians_and_whiskers_quartiles(drawn: dict[str, "Figure"]) -> None:
    """Check also that a method has one colour, whatever its settings."""
    speed, speedup, _ = drawn[""].axes
    widths = {round(bar.get_center()[1]): bar.get_width() for bar in speed.patches}
    assert widths == {i: 52.5 + i for i in range(10)}
    linear = speedup.patches[0]  # ar has no speedup, and its line in the panel stays empty
    assert linear.get_width() == pytest.approx((52 / 51 + 55 / 54) / 2)
    assert linear.get_center()[1] == pytest.approx(1)
    whisker = speed.lines[0].get_xdata()
    assert (min(whisker), max(whisker)) == (50.75, 55.25)
    assert {"52", "54", "56"} <= {text.get_text() for text in speed.texts}
    labels = [tick.get_text() for tick in speed.get_yticklabels()]
    assert labels == [f"{name} t={t}" for t in (0.0, 0.6) for name in NAMES]
    assert len({bar.get_facecolor() for bar in speed.patches}) == 4  # of hf-ar and mine one


def test_shares_are_of_ten_candidates_or_more(drawn: dict[str, "Figure"]) -> None:
    panels = drawn["_calibration"].axes
    assert [panel.get_title() for panel in panels] == ["linear t=0.0", "dynatree tau=0.1 t=0.0"]
    points = panels[0].lines[0].get_xydata().tolist()
    # Of four prompts; 8 candidates of probability above 0.1 are too few
    assert points == [[0.025, 0.5], [pytest.approx(0.075), 1.0]]


def test_too_many_panels_are_not_drawn() -> None:
    calibration = pytest.importorskip("dynatree_lab.benchmark.figures").calibration
    counts = {"drafted": [90], "top1_match": [45]}
    labels = [f"linear T={n}" for n in range(25)]
    texts = {"label": labels, "method": "linear", "calibration": [counts] * 25}
    assert calibration(pandas.DataFrame(texts)) is None


def is_beaten(one: tuple, all_of: list[tuple]) -> bool:
    """Whether another setting has as many tokens with as few rows, or more."""
    n_rows, n_tokens, _ = one
    return any(it != one and it[0] <= n_rows and it[1] >= n_tokens for it in all_of)


def test_the_envelope_has_the_front_of_each_method() -> None:
    """Compare dots and lines with the settings that have more tokens than any setting of their
    method with no more rows, found one by one. Some have equal rows or equal tokens."""
    draw = pytest.importorskip("dynatree_lab.benchmark.figures").draw
    source, points, lines = random.Random(0), {}, []  # points by temperature and row
    methods = ("linear", "dynatree", "dyspec")
    for t, method in product((0.6, 0.0), methods):
        spots = source.sample(list(product(range(2, 10), range(2, 10))), 12)
        points |= {(t, f"{method} {n}"): (*spot, source.random()) for n, spot in enumerate(spots)}
    cases = [replace(AR, row=row, temperature=t) for t, row in points]
    for case, (n_rows, n_tokens, n_passes) in zip(cases, points.values(), strict=True):
        for prompt, off in enumerate((-0.25, 0.0, 0.5)):  # medians are the points
            text = make_text(case, prompt, 50.0) | {"draft_passes": n_passes + off}
            lines.append(text | {"drafted_per_iter": n_rows - 1, "tokens_per_iter": n_tokens + off})
    figure = draw(make_results(lines, make_head(cases, 3)))["_envelope"]
    assert [panel.get_title() for panel in figure.axes] == ["t=0.6", "t=0.0"]
    for panel, t in zip(figure.axes, (0.6, 0.0), strict=True):
        fronts = []
        for method in methods:
            all_of = [points[t, f"{method} {n}"] for n in range(12)]
            fronts.append(sorted(one for one in all_of if not is_beaten(one, all_of)))
        drawn = [line.get_xydata().tolist() for line in panel.lines]  # those of the legend: empty
        expected = sorted([list(one[:2]) for one in front] for front in fronts)
        assert sorted(filter(None, drawn)) == expected
        (dots,) = panel.collections
        in_order = sorted(zip(dots.get_sizes(), dots.get_offsets().tolist(), strict=True))
        by_passes = sorted(chain(*fronts), key=lambda one: one[2])
        assert [spot for _, spot in in_order] == [list(one[:2]) for one in by_passes]
    two = lines[:6]  # settings of one method
    assert "_envelope" not in draw(make_results(two, make_head(cases[:2], 3)))


def test_files(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the names of figures, a run that was interrupted before its first text, and the line of
    a package that is missing."""
    pytest.importorskip("seaborn")
    file = tmp_path / "a$\\frac$.jsonl"
    head = make_head([AR], 4, machine=make_head([])["machine"] | {"processor": "a$\\frac$"})
    write_results(file, make_lines([AR]), head)
    interrupted = tmp_path / "interrupted.jsonl"
    write_results(interrupted, [], head)
    assert main([str(interrupted), str(file), "--output", str(tmp_path / "made")]) == 0
    (figure,) = (tmp_path / "made").iterdir()
    captured = capsys.readouterr()
    assert captured.err == f"note: {interrupted} has no texts to draw\n"
    assert captured.out == f"{figure}\n" and figure.read_bytes()[:4] == b"\x89PNG"
    line = error_line(capsys, main, [str(file), "--output", str(figure)])
    assert "cannot be written: File exists" in line
    monkeypatch.setitem(sys.modules, "dynatree_lab.benchmark.figures", None)
    assert "; use pip install seaborn" in error_line(capsys, main, [str(file)])
