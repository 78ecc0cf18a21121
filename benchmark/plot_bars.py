"""Bars: throughput, where the time goes, peak memory; several datasets or sizes side by side."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmark.columns import COLUMNS, values
from benchmark.plot_canvas import SIZE, add_legend, colour, colours, distinct, new_figure
from benchmark.report import name_of, place_of
from benchmark.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 12  # names that fit beside each other, written level
PARTS = ("draft", "verify", "other")  # of an iteration's time
GROUP = 0.8  # of the distance between two names is bars
WIDEST = 100.0  # inches of a figure; of a much wider one there are no pixels to draw
PROGRESS = ("throughput", "tokens_per_iter")
TIMES = ("draft_ms", "verify_ms", "other_ms", "new_tokens", "iterations")


@dataclass(frozen=True)
class Bar:
    """Where a row's bar stands."""

    row: Row
    x: float  # its middle
    width: float
    colour: str  # by its place if there are several, else by its method


def place_bars(rows: Sequence[Row]) -> list[Bar]:
    """One group of bars for each name, in it one bar for each place."""
    names = distinct(rows, name_of)
    places = distinct(rows, place_of)
    width = GROUP / len(places)
    by_method = colours(rows)
    bars = []
    for i, row in enumerate(rows):
        rank = places.index(place_of(row))
        x = names.index(name_of(row)) + width * (rank - (len(places) - 1) / 2)
        paint = by_method[i]
        if len(places) > 1:
            paint = colour(rank)
        bars.append(Bar(row, x, width, paint))
    return bars


def bar_figure(
    results: Results, rows: Sequence[Row], title: str
) -> tuple["Figure", "Axes", list[Bar]]:
    """A figure whose x axis has these rows' names, and where their bars are to stand."""
    names = distinct(rows, name_of)
    width = min(max(SIZE[0], 0.5 * len(names)), WIDEST)
    figure, (axis,) = new_figure(results, title, width=width)
    if len(names) > MANY:
        axis.set_xticks(range(len(names)), names, fontsize=7, rotation=90)
    else:
        axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
    return figure, axis, place_bars(rows)


def name_places(axis: "Axes", bars: Sequence[Bar]) -> None:
    """A legend of the places above the bars, if there are several."""
    from matplotlib.patches import Patch

    painted = {place_of(bar.row): bar.colour for bar in bars}
    if len(painted) > 1:
        patches = [Patch(color=paint, label=place) for place, paint in painted.items()]
        axis.legend(handles=patches, loc="upper left", fontsize=8, frameon=False)
        make_room(axis)


def make_room(axis: "Axes") -> None:
    """Above what is drawn, for what stands there."""
    top = axis.get_ylim()[1]
    if top > 0:
        axis.set_ylim(0, top * 1.2)


def with_metrics(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows whose every text has these metrics."""
    return [row for row in rows if all(values(row, name) for name in names)]


def timed(rows: Sequence[Row]) -> list[Row]:
    """The rows that tell where their time went, which peers' do not."""
    return with_metrics([row for row in rows if not row.is_peer], TIMES)


def throughput_bars(
    results: Results, title: str = "Throughput: median over prompts, and their range"
) -> "Figure":
    """Throughput by method, its spread over prompts, and the speedup over ar in each bar."""
    rows = with_metrics(results.rows(), ["throughput"])
    figure, axis, bars = bar_figure(results, rows, title)
    style = {"textcoords": "offset points", "ha": "center", "color": "white"}
    style |= {"fontsize": 9 if len(bars) <= MANY else 6}
    for bar in bars:
        speeds = values(bar.row, "throughput")
        median = statistics.median(speeds)
        axis.bar(bar.x, median, width=0.75 * bar.width, color=bar.colour)
        reach = [[median - min(speeds)], [max(speeds) - median]]  # below it, above it
        axis.errorbar(bar.x, median, yerr=reach, fmt="none", ecolor="#444444", capsize=3)
        text = "1x"
        if bar.row.speedups:
            text = f"{bar.row.speedup:.2f}x"
        axis.annotate(text, (bar.x, 0), (0, 6), **style)
    axis.set_ylabel("tokens/s")
    name_places(axis, bars)
    return figure


def progress_bars(results: Results) -> "Figure":
    """The same, and on a second axis the tokens committed per iteration (as Figure 4 of v2)."""
    figure = throughput_bars(results, "Throughput, its range, and tokens per iteration")
    (axis,) = figure.axes
    make_room(axis)
    other = axis.twinx()
    bars = place_bars(with_metrics(results.rows(), ["throughput"]))
    bars = [bar for bar in bars if values(bar.row, "tokens_per_iter")]
    heights = [bar.row.median("tokens_per_iter") for bar in bars]
    places = [bar.x for bar in bars]
    other.plot(places, heights, "D", color="#000000", label="tokens/iter (right)")
    make_room(other)
    other.set_ylabel("tokens per iteration")
    other.legend(loc="upper right", fontsize=8, frameon=False)
    return figure


def latency_bars(results: Results) -> "Figure":
    """Where the time of a token goes: the draft's forwards, the target's, and all else."""
    rows = timed(results.rows())
    title = "Milliseconds per token: mean over prompts, by what takes them"
    figure, axis, bars = bar_figure(results, rows, title)
    for bar in bars:
        bottom = 0.0
        for i, part in enumerate(PARTS):
            ms = ms_per_token(bar.row, part)
            label = part if bar is bars[0] else None
            style = {"color": colour(i), "label": label}
            axis.bar(bar.x, ms, bottom=bottom, width=0.75 * bar.width, **style)
            bottom += ms
        if len(distinct(rows, place_of)) > 1:
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 5, "rotation": 90}
            axis.annotate(place_of(bar.row), (bar.x, bottom), (0, 3), **style)
    axis.set_ylabel("ms per token after the first")
    make_room(axis)
    add_legend(figure, axis)
    return figure


def ms_per_token(row: Row, part: str) -> float:
    """Mean over the texts, so that the parts add up to the mean time per token."""
    found = []
    for record in row.records.values():
        metrics = record["metrics"]
        n_tokens = max(metrics["new_tokens"] - 1, 1)
        found.append(metrics[f"{part}_ms"] * metrics["iterations"] / n_tokens)
    return statistics.mean(found)


def memory_bars(results: Results) -> "Figure":
    """Peak memory, in it what weights and caches alone take, and how much more it is than ar's."""
    rows = with_metrics(results.rows(), ["peak_mb"])
    title = "Peak memory, and of it weights and caches (dark)"
    figure, axis, bars = bar_figure(results, rows, title)
    style = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
    for bar in bars:
        peak = bar.row.median("peak_mb")
        width = 0.75 * bar.width
        axis.bar(bar.x, peak, width=width, color=bar.colour, alpha=0.45)
        if values(bar.row, "floor_mb"):
            axis.bar(bar.x, bar.row.median("floor_mb"), width=width, color=bar.colour)
        axis.annotate(COLUMNS["more_memory"].cell(bar.row), (bar.x, peak), (0, 3), **style)
    axis.set_ylabel("MB")
    name_places(axis, bars)
    return figure
