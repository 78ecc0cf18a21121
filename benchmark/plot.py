"""Results files as figures: one kind for each table, everything computed from the file.

matplotlib is needed here alone, and only when a figure is drawn.

    python -m benchmark.plot results/main_cpu.json  # main_cpu.png, main_cpu_depth.png beside it
"""

import argparse
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.report import precision_text
from benchmark.results import Results, Row
from benchmark.tables import settings_of
from cli.errors import Parser, UsageError, run_command_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Okabe and Ito's palette, told apart by colour-blind readers too; wine for its yellow, on which
# nothing white can be read
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#882255", "#000000")
COLOURS += ("#AA4499",)  # then from the start again
PEER_COLOUR = "#8A8A8A"
MIN_TREES = 20  # a share of fewer says nothing
SIZE = (8.0, 4.5)  # inches
DPI = 150


def figures(results: Results) -> Iterator[tuple[str, "Figure"]]:
    """The figures of a results file, each with what its file name ends in. Raises UsageError."""
    if results.table not in KINDS:
        raise UsageError(f"no figure for table {results.table!r}; there are {', '.join(KINDS)}")
    if not (results.records or results.table == "steps"):
        raise UsageError("the results file has no records yet")
    for ending, draw in KINDS[results.table].items():
        yield ending, draw(results)


def new_figure(results: Results, title: str, n_axes: int = 1, **options: object) -> tuple:
    """A figure with the title, and below it in small print what was measured on what."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n_axes, figsize=SIZE, layout="constrained", **options)
    m = results.machine
    where = f"{precision_text(m)}, {m['processor']}, {m['threads']} threads"
    below = f"{m['target']} + {m['draft']}, {where}"
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(f"{below}, torch {m['torch']}, commit {m['commit']}", fontsize=6.5)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def bars(
    results: Results, title: str = "Throughput: median over prompts, and their range"
) -> "Figure":
    """Throughput by method, its spread over prompts, and the speedup over ar in each bar."""
    rows = results.rows()
    figure, axis = new_figure(results, title)
    style = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "color": "white"}
    medians = []
    below = []  # how far the slowest prompt is under the median
    above = []
    for i, row in enumerate(rows):
        median = row.median("throughput")
        speeds = throughputs(row)
        medians.append(median)
        below.append(median - min(speeds))
        above.append(max(speeds) - median)
        text = "1x"
        if row.speedups:
            text = f"{row.speedup:.2f}x"
        axis.annotate(text, (i, 0), (0, 6), **style)
    labels = [row.run.label.replace(" ", "\n") for row in rows]
    axis.bar(labels, medians, color=colours(rows), width=0.6)
    errors = {"yerr": [below, above], "fmt": "none", "ecolor": "#444444", "capsize": 3}
    axis.errorbar(range(len(rows)), medians, **errors)
    axis.set_ylabel("tokens/s")
    axis.tick_params(axis="x", labelsize=8)
    return figure


def throughputs(row: Row) -> list[float]:
    return [record["metrics"]["throughput"] for record in row.records.values()]


def colours(rows: Sequence[Row]) -> list[str]:
    """One colour for each method, by its first appearance; one for all peers."""
    methods: list[str] = []
    found = []
    for row in rows:
        method = row.run.method
        if row.is_peer:
            found.append(PEER_COLOUR)
            continue
        if method not in methods:
            methods.append(method)
        found.append(colour(methods.index(method)))
    return found


def colour(i: int) -> str:
    """The i-th colour; there are enough for the methods."""
    return COLOURS[i % len(COLOURS)]


def bars_with_progress(results: Results) -> "Figure":
    """Bars, and on a second axis the tokens committed per iteration (as Figure 4 of v2)."""
    figure = bars(results, "DynaTree's parts: throughput, its range, and tokens per iteration")
    (axis,) = figure.axes
    other = axis.twinx()
    values = [row.median("tokens_per_iter") for row in results.rows()]
    other.plot(range(len(values)), values, "D", color="#000000", label="tokens/iter (right)")
    other.set_ylim(0, max(values) * 1.25)
    other.set_ylabel("tokens per iteration")
    other.legend(loc="upper right", fontsize=8, frameon=False)
    fastest = max(max(throughputs(row)) for row in results.rows())
    axis.set_ylim(0, fastest * 1.25)
    return figure


def acceptance_by_depth(row: Row) -> list[float]:
    """The share accepted at depth 1, 2, ... of a drafting run's trees that reach it.

    As deep as at least MIN_TREES trees went.
    """
    drafted: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for record in row.records.values():
        if "depths" not in record:
            continue
        for depth, n_trees in enumerate(record["depths"]["drafted"]):
            drafted[depth] += n_trees
            accepted[depth] += record["depths"]["accepted"][depth]
    deep_enough = [depth for depth in drafted if drafted[depth] >= MIN_TREES]
    return [accepted[depth] / drafted[depth] for depth in deep_enough]


def depth_lines(results: Results) -> "Figure":
    figure, axis = new_figure(results, "Acceptance by depth")
    rows = results.rows()
    row_colours = colours(rows)
    for i, row in enumerate(rows):
        shares = acceptance_by_depth(row)
        depths = range(1, len(shares) + 1)
        if shares:
            axis.plot(depths, shares, "o-", label=row.run.label, color=row_colours[i])
    axis.set(xlabel="depth", ylabel="accepted / trees that reach this depth", ylim=(0, 1.02))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    return figure


def length_lines(results: Results) -> "Figure":
    return lines_by(results, "new_tokens", "new tokens T", "tokens_per_iter", "By text length")


def prompt_lines(results: Results) -> "Figure":
    return lines_by(results, "prompt_tokens", "prompt tokens L", "speedup", "By prompt length")


def temperature_lines(results: Results) -> "Figure":
    return lines_by(results, "temperature", "temperature", "speedup", "By temperature")


def lines_by(results: Results, size: str, symbol: str, second: str, title: str) -> "Figure":
    """Throughput, and a second value beside it, against a size of the runs."""
    figure, (left, right) = new_figure(results, title, 2)
    for i, rows in enumerate(rows_by_method(results)):
        method = " ".join((rows[0].run.method,) + rows[0].run.settings)
        style = {"color": colour(i), "label": method}
        sizes = [getattr(row.run, size) for row in rows]
        left.plot(sizes, [row.median("throughput") for row in rows], "o-", **style)
        right.plot(sizes, [value_of(row, second) for row in rows], "o-", **style)
    left.set(xlabel=symbol, ylabel="tokens/s")
    right.set(xlabel=symbol, ylabel=second.replace("_", " "))
    for axis in (left, right):
        axis.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    return figure


def rows_by_method(results: Results) -> list[list[Row]]:
    """The rows in groups that differ in their sizes alone."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in results.rows():
        groups[row.run.method, row.run.settings].append(row)
    return list(groups.values())


def value_of(row: Row, name: str) -> float:
    """A metric's median, or the speedup, which is 1 for ar."""
    if name != "speedup":
        return row.median(name)
    if not row.speedups:
        return 1.0
    return row.speedup


def grid(rows: Sequence[Row], x: str, y: str) -> tuple[list[float], list[float], list[list[float]]]:
    """Values of settings x and y, rising, and the speedups [y][x], nan where none was measured."""
    speedups = {}
    for row in rows:
        speedups[setting(row, x), setting(row, y)] = row.speedup
    xs = sorted({setting(row, x) for row in rows})
    ys = sorted({setting(row, y) for row in rows})
    cells = []
    for b in ys:
        cells.append([speedups.get((a, b), float("nan")) for a in xs])
    return xs, ys, cells


def setting(row: Row, name: str) -> float:
    """The value of one of a run's settings, its method's default if the run names none."""
    return float(getattr(settings_of(row.run), name))


@dataclass
class Panel:
    """One grid of the sweep: rows by two of their settings."""

    x: str
    y: str
    rows: list[Row] = field(default_factory=list)


def sweep_panels(results: Results) -> dict[str, Panel]:
    """By title: fixed's rows by depth and branches, a panel a tau; dynatree's by thresholds."""
    panels: dict[str, Panel] = {}
    for row in results.rows():
        if row.run.method == "fixed":
            title = f"fixed, tau={setting(row, 'tau'):g}"
            panel = Panel("B", "D")
        elif row.run.method == "dynatree":
            title = "dynatree"
            panel = Panel("tau_h", "tau_l")
        else:
            continue
        panels.setdefault(title, panel).rows.append(row)
    return panels


def heatmaps(results: Results) -> "Figure":
    """The sweep's speedups, a panel a grid."""
    panels = sweep_panels(results)
    figure, axes = new_figure(results, "Speedup over ar by settings", len(panels), squeeze=False)
    speedups = []
    for panel in panels.values():
        speedups += [row.speedup for row in panel.rows]
    scale = {"vmin": min(speedups), "vmax": max(speedups), "cmap": "cividis", "aspect": "auto"}
    for axis, title in zip(axes[0], panels, strict=True):
        panel = panels[title]
        xs, ys, cells = grid(panel.rows, panel.x, panel.y)
        image = draw_grid(axis, xs, ys, cells, scale)
        axis.set_title(title, fontsize=8)
        axis.set(xlabel=panel.x, ylabel=panel.y)
    figure.colorbar(image, ax=axes[0].tolist(), label="x ar")
    return figure


def draw_grid(
    axis: "Axes", xs: list[float], ys: list[float], cells: list[list[float]], scale: dict
) -> "AxesImage":
    """One panel: cells [y][x] as colours, with their numbers."""
    axis.grid(False)
    image = axis.imshow(cells, origin="lower", **scale)
    middle = (scale["vmin"] + scale["vmax"]) / 2
    style = {"ha": "center", "va": "center", "fontsize": 6}
    for j, line in enumerate(cells):
        for i, value in enumerate(line):
            ink = "black"
            if value < middle:
                ink = "white"
            axis.text(i, j, f"{value:.2f}", color=ink, **style)
    axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs], fontsize=7)
    axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys], fontsize=7)
    return image


def staircase(results: Results) -> "Figure":
    """Forward times by rows on double logarithmic axes, each with its bandwidth floor."""
    from matplotlib.ticker import LogLocator, NullLocator

    times = results.step_times
    title = f"One forward at {times['context']} cached tokens, and its one-row bandwidth floor"
    figure, axis = new_figure(results, title)
    for i, role in enumerate(("target", "draft")):
        axis.plot(times["rows"], times[f"{role}_ms"], "o-", color=colour(i), label=role)
        floor = times[f"{role}_bytes"] / times["copy_gb_s"] / 1e6
        axis.axhline(floor, color=colour(i), linestyle="--", label=f"{role}'s floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xticks(times["rows"], [str(n) for n in times["rows"]])
    axis.set(xlabel="rows", ylabel="milliseconds")
    axis.legend(frameon=False)
    return figure


KINDS: dict[str, dict[str, Callable[[Results], "Figure"]]] = {
    # table: file name ending -> figure
    "main": {"": bars, "_depth": depth_lines},
    "ablation": {"": bars_with_progress},
    "length": {"": length_lines},
    "prompt": {"": prompt_lines},
    "sampling": {"": temperature_lines},
    "sweep": {"": heatmaps},
    "steps": {"": staircase},
}


def execute(args: argparse.Namespace) -> int:
    """Carry out the command line, once parsed. Returns the exit status."""
    if not importlib.util.find_spec("matplotlib"):
        raise UsageError("figures need matplotlib: pip install matplotlib==3.11.2")
    for name in args.files:
        file = Path(name)
        for ending, figure in figures(Results.load(file)):
            path = (args.output or file.parent) / f"{file.stem}{ending}.png"
            save(figure, path)
            print(path)
    return 0


def save(figure: "Figure", path: Path) -> None:
    """Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmark.plot", description="Draw results files as PNG figures."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of bench.py")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="instead of beside the file")
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
