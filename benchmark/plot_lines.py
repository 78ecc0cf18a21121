"""Lines: by the size of a text or prompt, by depth, by the draft's probability, by rows."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from benchmark.plot_canvas import (
    PEER_COLOUR,
    add_legend,
    colour,
    line_style,
    name_styles,
    new_figure,
)
from benchmark.report import contests, name_of, place_of, speedup_of
from benchmark.results import Results, Row
from benchmark.tables import SYMBOLS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {"prompt_tokens": "prompt tokens L", "new_tokens": "new tokens T"}
AXES |= {"temperature": "temperature t"}
TITLES = {"throughput": "tokens/s", "speedup": "x ar", "tokens_per_iter": "tokens / iteration"}
TITLES |= {"path_length": "accepted / iteration", "acceptance": "accepted / drafted"}
PROGRESS = ("tokens_per_iter", "path_length", "acceptance")  # v2, Figure 5 b to d
MIN_COUNT = 20  # trees or nodes; a share of fewer says nothing


def size_lines(results: Results, size: str) -> "Figure":
    """Throughput, and beside it the speedup, against a size of the runs (v2, Figures 5 a and 8)."""
    return lines_by(results, size, ("throughput", "speedup"))


def progress_lines(results: Results, size: str) -> "Figure":
    """What an iteration brings, against a size of the runs."""
    return lines_by(results, size, PROGRESS)


def lines_by(results: Results, size: str, metrics: Sequence[str]) -> "Figure":
    """Medians over prompts against a size, a panel for each metric."""
    figure, axes = new_figure(results, f"By {AXES[size]}", n_columns=len(metrics))
    for i, (label, rows) in enumerate(by_all_but(results, size).items()):
        style = line_style(i)
        if rows[0].is_peer:
            style = {"color": PEER_COLOUR, "linestyle": "--"}
        for axis, metric in zip(axes, metrics, strict=True):
            points = [(getattr(row.run, size), value_of(row, metric)) for row in rows]
            draw_points(axis, points, label=label, marker=".", **style)
    for axis, metric in zip(axes, metrics, strict=True):
        axis.set(xlabel=AXES[size], ylabel=TITLES[metric])
        axis.set_ylim(bottom=0)
    add_legend(figure, axes[0])
    return figure


def by_all_but(results: Results, size: str) -> dict[str, list[Row]]:
    """The rows in groups that differ in this size alone, each by what its labels share."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in results.rows():
        groups[label_without(row, size)].append(row)
    return groups


def label_without(row: Row, size: str) -> str:
    """A row's label without the word of this size."""
    others = [word for word in place_of(row).split() if not word.startswith(f"{SYMBOLS[size]}=")]
    return " ".join([name_of(row)] + others)


def value_of(row: Row, metric: str) -> float | None:
    """A metric's median, or the speedup, which is 1 for ar; None where it says nothing."""
    if metric == "acceptance" and not row.median("draft_nodes"):  # ar's, or not told by a peer
        return None
    if metric != "speedup":
        return row.median(metric)
    if not row.speedups:
        return 1.0
    return row.speedup


def draw_points(axis: "Axes", points: Iterable[tuple], **style: object) -> None:
    """A line through the points that have a value, if any has."""
    known = [point for point in points if point[1] is not None]
    if known:
        xs, ys = zip(*sorted(known), strict=True)
        axis.plot(xs, ys, **style)


def optimum_lines(results: Results) -> "Figure":
    """The fastest settings of each method at each text length, beside ar (v1, Figure 6)."""
    lines = best_by_length(results)
    title = "The fastest settings at each text length"
    figure, axes = new_figure(results, title, n_columns=len(lines))
    for axis, (name, best) in zip(axes, lines.items(), strict=True):
        lengths = [row.run.new_tokens for row in best]
        axis.plot(lengths, [ar_throughput(row) for row in best], "o-", color=colour(0), label="ar")
        speeds = [row.median("throughput") for row in best]
        axis.plot(lengths, speeds, "o-", color=colour(1), label="the fastest")
        for row, length, speed in zip(best, lengths, speeds, strict=True):
            name_settings(axis, row, (length, speed))
        axis.set_title(name, fontsize=9)
        axis.set(xlabel=AXES["new_tokens"], ylabel="tokens/s")
        axis.set_ylim(0, 1.3 * max(speeds))
        axis.margins(x=0.15)
    add_legend(figure, axes[0])
    return figure


def best_by_length(results: Results) -> dict[str, list[Row]]:
    """By method, and whatever else is varied beside the length, the fastest row at each of them."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for (_, method), rows in contests(results).items():
        best = max(rows, key=speedup_of)
        where = label_without(best, "new_tokens").removeprefix(name_of(best))
        lines[method + where].append(best)
    return lines


def ar_throughput(row: Row) -> float:
    """The baseline's median on the same prompts."""
    speeds = [ar["metrics"].get("throughput") for _, ar in row.beside_ar()]
    return statistics.median([speed for speed in speeds if speed])


def name_settings(axis: "Axes", row: Row, point: tuple[float, float]) -> None:
    """A row's settings and speedup over its point."""
    text = "\n".join(name_of(row).split()[1:] + [f"{row.speedup:.2f}x"])
    style = {"textcoords": "offset points", "ha": "center", "fontsize": 6.5}
    axis.annotate(text, point, (0, 5), **style)


def by_name(rows: Sequence[Row], kind: str) -> dict[str, list[Row]]:
    """By name, whatever their sizes, the rows that counted what they drafted in this kind."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if any(summed([row], kind, "drafted")):
            groups[name_of(row)].append(row)
    return groups


def summed(rows: Sequence[Row], kind: str, name: str) -> list[int]:
    """Of the records' counts of this kind the list of this name, added up item by item and as long
    as the longest; empty if no record has it."""
    found: list[int] = []
    for row in rows:
        for record in row.records.values():
            counts = record.get(kind, {}).get(name, [])
            found += [0] * (len(counts) - len(found))
            for i, n in enumerate(counts):
                found[i] += n
    return found


def shares(parts: Sequence[int], wholes: Sequence[int]) -> list[float | None]:
    """Item by item, as far as both go; None of fewer than MIN_COUNT."""
    found = []
    for part, whole in zip(parts, wholes, strict=False):
        share = None
        if whole >= MIN_COUNT:
            share = part / whole
        found.append(share)
    return found


def depth_lines(results: Results) -> "Figure":
    """How many of the trees that reach a depth have their path accepted as far."""
    what = "accepted / trees that reach this depth"
    return share_lines(results, "Acceptance by depth", "drafted", what)


def position_lines(results: Results) -> "Figure":
    """How many of the paths that were accepted to depth d - 1, and drafted on, reach depth d.

    Level lines would mean that the chance of a guess does not depend on those accepted before it.
    """
    title = "Acceptance by depth, of the paths accepted so far"
    return share_lines(results, title, "tried", "accepted / tried at this depth")


def share_lines(results: Results, title: str, whole: str, what: str) -> "Figure":
    figure, (axis,) = new_figure(results, title)
    styles = name_styles(results)
    for label, rows in by_name(results.rows(), "depths").items():
        found = shares(summed(rows, "depths", "accepted"), summed(rows, "depths", whole))
        draw_points(axis, enumerate(found, start=1), label=label, marker="o", **styles[label])
    axis.set(xlabel="depth", ylabel=what, ylim=(0, 1.02))
    axis.xaxis.get_major_locator().set_params(integer=True)
    add_legend(figure, axis)
    return figure


def calibration_lines(results: Results) -> "Figure":
    """Whether what the draft thinks likely is accepted: DySpec's Figure 2, DEAGLE's Eq. 15.

    Left: of the nodes that have this probability after their parent, how many are the target's best
    token there; on the dotted line the draft would be right as often as it believes. Right: how
    many there are. What is sampled is accepted otherwise, and left out.
    """
    title = "Is a guess as often right as its draft believes?"
    figure, (left, right) = new_figure(results, title, n_columns=2)
    left.plot([0, 1], [0, 1], color="#444444", linewidth=0.8, linestyle=":")
    styles = name_styles(results)
    for label, rows in calibrated(results.rows()).items():
        drafted = summed(rows, "calibration", "drafted")
        matching = summed(rows, "calibration", "matching")
        middles = [(i + 0.5) / len(drafted) for i in range(len(drafted))]
        total = sum(drafted)
        of_all = [n / total for n in drafted]
        style = styles[label] | {"marker": "."}
        found = shares(matching, drafted)
        draw_points(left, zip(middles, found, strict=True), **style)
        draw_points(right, zip(middles, of_all, strict=True), label=label, **style)
    for axis in (left, right):
        axis.set_xlabel("the draft's probability (auto: its estimate)")
    left.set(ylabel="matches the target's choice", ylim=(0, 1.02))
    right.set_ylabel("share of the drafted nodes")
    right.set_ylim(bottom=0)
    add_legend(figure, right)
    return figure


def calibrated(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By name the greedy rows whose matches were counted."""
    return by_name([row for row in rows if not row.run.temperature], "calibration")


def staircase(results: Results) -> "Figure":
    """Forward times by rows on double logarithmic axes, each with its bandwidth floor."""
    from matplotlib.ticker import LogLocator, NullLocator

    times = results.step_times
    title = f"One forward at {times['context']} cached tokens, and its one-row bandwidth floor"
    figure, (axis,) = new_figure(results, title)
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
