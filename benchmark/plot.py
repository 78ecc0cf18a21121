"""Results files as figures: one kind for each table, everything computed from the file.

matplotlib is needed here alone, and only when a figure is drawn.

    python -m benchmark.plot results/main_cpu.json  # main_cpu.png, main_cpu_depth.png beside it
"""

import argparse
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.results import Results, Row
from cli.errors import Parser, UsageError, run_command_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too; wine for its yellow, on which
# nothing white can be read
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#882255", "#000000")
COLOURS += ("#AA4499",)  # one for each method
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
    below = f"{m['target']} + {m['draft']}, {m['dtype']}, {m['processor']}, {m['threads']} threads"
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
    medians = [row.median("throughput") for row in rows]
    lows, highs = zip(*[extremes(row) for row in rows], strict=True)
    low_errors = [m - low for m, low in zip(medians, lows, strict=True)]
    high_errors = [high - m for m, high in zip(medians, highs, strict=True)]
    axis.bar(labels(rows), medians, color=colours(rows), width=0.6)
    errors = {"yerr": [low_errors, high_errors], "fmt": "none", "ecolor": "#444444", "capsize": 3}
    axis.errorbar(range(len(rows)), medians, **errors)
    style = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "color": "white"}
    for i, row in enumerate(rows):
        text = f"{row.speedup:.2f}x" if row.speedups else "1x"
        axis.annotate(text, (i, 0), (0, 6), **style)
    axis.set_ylabel("tokens/s")
    axis.tick_params(axis="x", labelsize=8)
    return figure


def extremes(row: Row) -> tuple[float, float]:
    """The slowest and the fastest prompt's throughput."""
    values = [record["metrics"]["throughput"] for record in row.records.values()]
    return min(values), max(values)


def labels(rows: Sequence[Row]) -> list[str]:
    """Row labels, a word a line."""
    return [row.run.label.replace(" ", "\n") for row in rows]


def colours(rows: Sequence[Row]) -> list[str]:
    """One colour for each method, by its first appearance; one for all peers."""
    methods = list(dict.fromkeys(row.run.method for row in rows if not row.is_peer))
    by_method = dict(zip(methods, COLOURS * 9, strict=False))
    return [by_method.get(row.run.method, PEER_COLOUR) for row in rows]


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
    axis.set_ylim(0, max(high for _, high in map(extremes, results.rows())) * 1.25)
    return figure


def acceptance_by_depth(results: Results) -> dict[str, list[float]]:
    """By drafting run: the share accepted at depth 1, 2, ... of the trees that reach it.

    As deep as at least MIN_TREES trees went.
    """
    found = {}
    for row in results.rows():
        drafted: dict[int, int] = defaultdict(int)
        accepted: dict[int, int] = defaultdict(int)
        for record in row.records.values():
            depths = record.get("depths", {"drafted": [], "accepted": []})
            for depth, (n, m) in enumerate(zip(*depths.values(), strict=True)):
                drafted[depth] += n
                accepted[depth] += m
        shares = [accepted[depth] / n for depth, n in drafted.items() if n >= MIN_TREES]
        if shares:
            found[row.run.label] = shares
    return found


def depth_lines(results: Results) -> "Figure":
    figure, axis = new_figure(results, "Acceptance by depth")
    shares = acceptance_by_depth(results)
    every = dict(zip(labels(results.rows()), colours(results.rows()), strict=True))
    for label, values in shares.items():
        depths = range(1, len(values) + 1)
        axis.plot(depths, values, "o-", label=label, color=every[label.replace(" ", "\n")])
    axis.set(xlabel="depth", ylabel="accepted / trees that reach this depth", ylim=(0, 1.02))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    return figure


def lines_by(size: str, symbol: str, second: str, title: str) -> Callable[[Results], "Figure"]:
    """A figure of throughput and of a second value against a size of the runs."""

    def value(row: Row, name: str) -> float:
        return (row.speedup if row.speedups else 1.0) if name == "speedup" else row.median(name)

    def draw(results: Results) -> "Figure":
        figure, axes = new_figure(results, title, 2)
        by_label: dict[str, list[Row]] = defaultdict(list)
        for row in results.rows():
            by_label[" ".join((row.run.method, *row.run.settings))].append(row)
        for (label, rows), colour in zip(by_label.items(), COLOURS * 9, strict=False):
            for axis, name in zip(axes, ("throughput", second), strict=True):
                xs = [getattr(row.run, size) for row in rows]
                axis.plot(xs, [value(row, name) for row in rows], "o-", color=colour, label=label)
        for axis, name in zip(axes, ("tokens/s", second.replace("_", " ")), strict=True):
            axis.set(xlabel=symbol, ylabel=name)
            axis.set_ylim(bottom=0)
        axes[0].legend(frameon=False, fontsize=8)
        return figure

    return draw


def grid(rows: Sequence[Row], x: str, y: str) -> tuple[list[float], list[float], list[list[float]]]:
    """Values of settings x and y, rising, and the speedups [y][x], nan where none was measured."""
    speedups = {}
    for row in rows:
        settings = dict(setting.split("=") for setting in row.run.settings)
        speedups[float(settings[x]), float(settings[y])] = row.speedup
    xs, ys = (sorted({key[i] for key in speedups}) for i in (0, 1))
    return xs, ys, [[speedups.get((a, b), float("nan")) for a in xs] for b in ys]


def heatmaps(results: Results) -> "Figure":
    """fixed's speedup by depth and branches, a panel a tau; dynatree's by its two thresholds."""
    panels: dict[str, tuple[str, str, list[Row]]] = {}
    for row in results.rows():
        tau = next((s for s in row.run.settings if s.startswith("tau=")), "thresholds")
        if row.run.method == "fixed":
            panels.setdefault(f"fixed, {tau}", ("B", "D", []))[2].append(row)
        elif row.run.method == "dynatree":
            panels.setdefault("dynatree", ("tau_h", "tau_l", []))[2].append(row)
    figure, axes = new_figure(results, "Speedup over ar by settings", len(panels), squeeze=False)
    every = [row.speedup for _, _, rows in panels.values() for row in rows]
    scale = {"vmin": min(every), "vmax": max(every), "cmap": "cividis", "aspect": "auto"}
    for axis, (title, (x, y, rows)) in zip(axes[0], panels.items(), strict=True):
        image = draw_grid(axis, grid(rows, x, y), scale)
        axis.set_title(title, fontsize=8)
        axis.set(xlabel=x, ylabel=y)
    figure.colorbar(image, ax=axes[0].tolist(), label="x ar")
    return figure


def draw_grid(axis: "Axes", cells: tuple, scale: dict) -> object:
    xs, ys, values = cells
    axis.grid(False)
    image = axis.imshow(values, origin="lower", **scale)
    middle = (scale["vmin"] + scale["vmax"]) / 2
    for j, line in enumerate(values):
        for i, value in enumerate(line):
            colour = "white" if value < middle else "black"
            axis.text(i, j, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs], fontsize=7)
    axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys], fontsize=7)
    return image


def staircase(results: Results) -> "Figure":
    """Forward times by rows on double logarithmic axes, each with its bandwidth floor."""
    from matplotlib.ticker import LogLocator, NullLocator

    times = results.step_times
    title = f"One forward at {times['context']} cached tokens, and its one-row bandwidth floor"
    figure, axis = new_figure(results, title)
    for role, colour in zip(("target", "draft"), COLOURS, strict=False):
        axis.plot(times["rows"], times[f"{role}_ms"], "o-", color=colour, label=role)
        floor = times[f"{role}_bytes"] / times["copy_gb_s"] / 1e6
        axis.axhline(floor, color=colour, linestyle="--", label=f"{role}'s floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xticks(times["rows"], [str(n) for n in times["rows"]])
    axis.set(xlabel="rows", ylabel="milliseconds")
    axis.legend(frameon=False)
    return figure


KINDS: dict[
    str, dict[str, Callable[[Results], "Figure"]]
] = {  # table -> file name ending -> figure
    "main": {"": bars, "_depth": depth_lines},
    "ablation": {"": bars_with_progress},
    "length": {"": lines_by("new_tokens", "new tokens T", "tokens_per_iter", "By text length")},
    "prompt": {"": lines_by("prompt_tokens", "prompt tokens L", "speedup", "By prompt length")},
    "sampling": {"": lines_by("temperature", "temperature", "speedup", "By temperature")},
    "sweep": {"": heatmaps},
    "steps": {"": staircase},
}


def run(args: argparse.Namespace) -> int:
    """The command line, once parsed. Returns the exit status."""
    if not importlib.util.find_spec("matplotlib"):
        raise UsageError("figures need matplotlib: pip install matplotlib==3.11.2")
    for file in map(Path, args.files):
        for ending, figure in figures(Results.load(file)):
            path = (args.output or file.parent) / f"{file.stem}{ending}.png"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=DPI)
            except OSError as error:
                raise UsageError(f"{path} cannot be written: {error.strerror}") from error
            print(path)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmark.plot", description="Draw results files as PNG figures."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of bench.py")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="instead of beside the file")
    return run_command_line(run, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
