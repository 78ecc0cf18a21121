"""What every figure has: title, axes, colours, and in small print what was measured on what.

matplotlib is needed only where a figure is made.

    figure, (left, right) = new_figure(results, "By text length", n_columns=2)
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmark.report import name_of, precision_text
from benchmark.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too; wine for its yellow, on which
# nothing white can be read
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#882255", "#000000")
COLOURS += ("#AA4499",)  # then from the start again, dashed
DASHES = ("-", "--", ":", "-.")
PEER_COLOUR = "#8A8A8A"
SIZE = (8.0, 4.5)  # inches, of a figure of one row of axes
ROW_HEIGHT = 3.0  # inches, of each of several
DPI = 150


def new_figure(
    results: Results, title: str, n_rows: int = 1, n_columns: int = 1, width: float = SIZE[0]
) -> tuple["Figure", list["Axes"]]:
    """A figure with the title and all its axes, row by row; width: inches."""
    from matplotlib.figure import Figure

    height = SIZE[1]
    if n_rows > 1:
        height = ROW_HEIGHT * n_rows
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flatten().tolist()
    m = results.machine
    where = f"{precision_text(m)}, {m['processor']}, {m['threads']} threads"
    below = f"{m['target']} + {m['draft']}, {where}"
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(f"{below}, torch {m['torch']}, commit {m['commit']}", fontsize=6.5)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def add_legend(figure: "Figure", axis: "Axes") -> None:
    """What this axis's lines are, beside all axes; nothing if it has none."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=7.5)


def colour(i: int) -> str:
    """The i-th colour; there are enough for the methods."""
    return COLOURS[i % len(COLOURS)]


def line_style(i: int) -> dict[str, str]:
    """The i-th line's colour and dashes."""
    return {"color": colour(i), "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}


def name_styles(results: Results) -> dict[str, dict[str, str]]:
    """Each name's line, the same in every figure of these results."""
    names = distinct(results.rows(), name_of)
    return {name: line_style(i) for i, name in enumerate(names)}


def distinct(rows: Sequence[Row], of: Callable[[Row], str]) -> list[str]:
    """What the rows have of it, each once, in their order."""
    return list(dict.fromkeys(of(row) for row in rows))


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
