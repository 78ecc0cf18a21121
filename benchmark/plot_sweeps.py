"""Sweeps: speedups over grids of two settings, and against each setting that varies."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from benchmark.plot_canvas import line_style, new_figure
from benchmark.report import name_of, place_of, speedup_of
from benchmark.results import Results, Row
from benchmark.rows import settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

GRIDS = {  # pairs of settings that the papers vary together
    "fixed": [("B", "D")],
    "dynatree": [("tau_h", "tau_l"), ("D0", "D_max"), ("B_min", "B_max")],
}
LEAST = 4  # rows of a method that make a sweep
MOST = 30  # grids in a figure: more take a minute, and memory without end
FEW = 8  # lines in a panel that can be told apart
DEPTHS = ("K", "D", "D0", "D_max")  # settings on which the number of draft passes depends
Value = Callable[[Row], float]


@dataclass
class Panel:
    """Rows against one of their settings, or two of them."""

    title: str
    x: str
    y: str = ""
    rows: list[Row] = field(default_factory=list)


def sweeps(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By method, the rows of one place that are beside ar, of methods that have LEAST or more."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.speedups and not row.is_peer:
            found[row.run.method].append(row)
    return {method: rows for method, rows in found.items() if len(rows) >= LEAST}


def setting(row: Row, name: str) -> float:
    """The value of one of a run's settings, its method's default if the run names none."""
    return float(getattr(settings_of(row.run), name))


def others(row: Row, names: Sequence[str]) -> tuple:
    """What tells a row from those that may differ in these settings, whether its label spells out
    the rest of them or leaves it to the defaults."""
    values = asdict(settings_of(row.run))
    for name in names:
        del values[name]
    words = [word for word in name_of(row).split()[1:] if word not in row.run.settings]
    return tuple(values.items()), tuple(words)


def label_without(row: Row, names: Sequence[str]) -> str:
    """A row's name without its method and these settings."""
    words = name_of(row).split()[1:]
    return " ".join(word for word in words if word.partition("=")[0] not in names)


def group(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of one method that differ in these settings alone, by the longest label that one of them
    has for the rest."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[others(row, names)].append(row)
    found = {}
    for alike in groups.values():
        labels = [label_without(row, names) for row in alike]
        found[max(labels, key=len)] = alike
    return found


def grid_panels(rows: Sequence[Row]) -> list[Panel]:
    """For each pair of settings the rows that differ in nothing else, if they differ in both."""
    panels = []
    for method, found in sweeps(rows).items():
        for x, y in GRIDS.get(method, []):
            for label, alike in group(found, (x, y)).items():
                panels.append(Panel(f"{method} {label}", x, y, alike))
    return [panel for panel in panels if is_grid(panel)]


def is_grid(panel: Panel) -> bool:
    """Whether more than one value of both settings was measured."""
    n_xs = len({setting(row, panel.x) for row in panel.rows})
    n_ys = len({setting(row, panel.y) for row in panel.rows})
    return n_xs > 1 and n_ys > 1


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


def heatmaps(results: Results, rows: Sequence[Row]) -> "Figure":
    """The speedups of one place's rows, a panel a grid."""
    panels = grid_panels(rows)
    title = titled("Speedup over ar by settings", rows)
    if len(panels) > MOST:
        title += f": {MOST} grids of {len(panels)}"
        panels = panels[:MOST]
    figure, axes = panel_figure(results, title, len(panels))
    speedups = []
    for panel in panels:
        speedups += [row.speedup for row in panel.rows]
    scale = {"vmin": min(speedups), "vmax": max(speedups), "cmap": "cividis", "aspect": "auto"}
    for axis, panel in zip(axes, panels, strict=True):
        xs, ys, cells = grid(panel.rows, panel.x, panel.y)
        image = draw_grid(axis, xs, ys, cells, scale)
        axis.set_title(panel.title, fontsize=8)
        axis.set(xlabel=panel.x, ylabel=panel.y)
    figure.colorbar(image, ax=axes, label="x ar")
    return figure


def titled(what: str, rows: Sequence[Row]) -> str:
    """And where, if there are several places."""
    place = place_of(rows[0])
    if not place:
        return what
    return f"{what} ({place})"


def panel_figure(results: Results, title: str, n: int) -> tuple["Figure", list["Axes"]]:
    """A figure of n axes, in rows of three at most."""
    n_columns = min(n, 3)
    n_rows = -(-n // n_columns)
    figure, axes = new_figure(results, title, n_rows, n_columns)
    for axis in axes[n:]:
        axis.remove()
    return figure, axes[:n]


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
            if value != value:  # nan: not measured
                continue
            ink = "black"
            if value < middle:
                ink = "white"
            axis.text(i, j, f"{value:.2f}", color=ink, **style)
    axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs], fontsize=7)
    axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys], fontsize=7)
    return image


def setting_panels(rows: Sequence[Row]) -> list[Panel]:
    """For each number among a method's settings that varies, all its rows."""
    panels = []
    for method, found in sweeps(rows).items():
        for name, value in asdict(settings_of(found[0].run)).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and len({setting(row, name) for row in found}) > 1:
                panels.append(Panel(method, name, rows=list(found)))
    return panels


def setting_lines(results: Results, rows: Sequence[Row]) -> "Figure":
    """Speedups against each setting, a line through rows that differ in it alone (v1, Figure 4; v2,
    Figures 6 and 7)."""
    title = titled("Speedup over ar by each setting", rows)
    return panel_lines(results, title, setting_panels(rows), "x ar", speedup_of)


def pass_panels(rows: Sequence[Row]) -> list[Panel]:
    """Of the setting panels those of a depth, if it was counted how often the draft ran."""
    panels = []
    for panel in setting_panels(rows):
        if panel.x in DEPTHS and all(draft_passes(row) is not None for row in panel.rows):
            panels.append(panel)
    return panels


def pass_lines(results: Results, rows: Sequence[Row]) -> "Figure":
    """Forwards of the draft for a text, against the depth that the settings allow (DEAGLE, Figure
    2)."""
    title = titled("Forwards of the draft for a text", rows)
    return panel_lines(results, title, pass_panels(rows), "draft passes", draft_passes)


def draft_passes(row: Row) -> float | None:
    """Median over the texts of an iteration's passes, times the median of the iterations."""
    passes = row.median("draft_passes")
    iterations = row.median("iterations")
    if passes is None or iterations is None:
        return None
    return passes * iterations


def panel_lines(
    results: Results, title: str, panels: Sequence[Panel], what: str, value: Value
) -> "Figure":
    figure, axes = panel_figure(results, title, len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        draw_panel(axis, panel, value)
        axis.set_title(panel.title, fontsize=8)
        axis.set(xlabel=panel.x, ylabel=what)
    return figure


def draw_panel(axis: "Axes", panel: Panel, value: Value) -> None:
    """Lines with a legend if they are few, else pale ones and their mean."""
    lines = group(panel.rows, (panel.x,))
    for i, (label, rows) in enumerate(lines.items()):
        points = sorted((setting(row, panel.x), value(row)) for row in rows)
        style = line_style(i) | {"label": label or panel.title}
        if len(lines) > FEW:
            style = {"color": "#888888", "alpha": 0.35, "linewidth": 0.8}
        axis.plot(*zip(*points, strict=True), marker=".", **style)
    found: dict[float, list[float]] = defaultdict(list)
    for row in panel.rows:
        found[setting(row, panel.x)].append(value(row))
    xs = sorted(found)
    if len(lines) > FEW:
        means = [statistics.mean(found[x]) for x in xs]
        axis.plot(xs, means, "o-", color="#000000", label="mean")
    if len(xs) <= FEW:
        axis.set_xticks(xs, [f"{x:g}" for x in xs], fontsize=6)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=6)
