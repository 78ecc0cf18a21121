"""Figures of a results file by pandas and seaborn: what a file varies decides which there are.

All is computed from one table with a row for each text. A bar or point is a median over texts,
whiskers and bands reach from the first quartile to the third: that a machine stalls now and then
moves neither.

    for ending, figure in draw(Results.load("results/main_cpu.json")).items():
        figure.savefig(f"main_cpu{ending}.png")
"""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, product

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from benchmark.peers import PEERS
from benchmark.report import caption, name_of, named, place_of
from benchmark.results import Results
from benchmark.rows import settings_of
from benchmark.tables import SYMBOLS
from cli.errors import UsageError
from cli.page import read
from methods import METHODS

COLOURS = json.loads(read("colours.json"))  # one for a method, or a part of the work, everywhere
INK, GREY, PALE = "#202020", "#8A8A8A", "#D8D8D8"
METHOD_COLOURS = dict.fromkeys(PEERS, GREY)
METHOD_COLOURS |= dict(zip(METHODS, cycle(COLOURS["methods"]), strict=False))
DASHES = ("-", "--", ":", "-.")
HALO = [withStroke(linewidth=2.5, foreground="white")]  # so that what is drawn over can be read
NOTE = {"textcoords": "offset points", "ha": "center", "fontsize": 5.5, "path_effects": HALO}
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6}
STYLE |= {"grid.linewidth": 0.5, "grid.color": "#E4E4E4", "axes.edgecolor": GREY}
STYLE |= {"text.parse_math": False}  # a $ in a name begins no formula

CROWD = 20  # names, beyond which no figure shows each of them
FEWEST = 10  # trees, paths or guesses; a share of fewer says nothing
SWEEP = 4  # rows of a method that make a sweep of its settings

# Columns of the table of texts, named as their axes are; which metric of a record each one is
SPEED, SPEEDUP, PROGRESS = "tokens/s", "x ar on the same prompt", "tokens per target pass"
ACCEPTANCE, PASSES = "accepted / drafted", "draft passes for a text"
CHANCE = "probability"
MEASURED = {PROGRESS: "tokens_per_iter", ACCEPTANCE: "acceptance"}
MEASURED |= {"peak MB": "peak_mb", "weights + caches MB": "floor_mb"}
MEASURED |= {name: name for name in ("draft_nodes", "draft_passes", "iterations")}
BARS = {SPEED: "{:,.1f}", SPEEDUP: "{:.2f}x", PROGRESS: "{:.2f}"}  # and how their medians are shown
BARS |= {"peak MB": "{:,.0f}", "weights + caches MB": "{:,.0f}", "peak over ar's": "{:+.1%}"}
BY_SIZE = {"": SPEED, "_speedup": SPEEDUP, "_progress": PROGRESS, "_acceptance": ACCEPTANCE}
SIZES = {f"{size.replace('_', ' ')} {symbol}": size for size, symbol in SYMBOLS.items()}


def draw(results: Results) -> dict[str, Figure]:
    """Every figure of a results file, by what its name ends in. Raises UsageError for none."""
    matplotlib.rcdefaults()  # what a user has set asks for LaTeX, or fonts that may be missing
    sns.set_theme(style="whitegrid", font_scale=0.75, rc=STYLE)
    if results.table == "steps" and results.step_times:
        return {"": staircase(results)}
    if not results.records:
        raise UsageError("the results file has no records yet")
    texts = text_table(results)
    found = {}
    if texts.name.nunique() <= CROWD:
        found = figures_by_name(results, texts)
    found["_settings"] = setting_maps(results, texts)
    found = {ending: figure for ending, figure in found.items() if figure}
    if not found:
        raise UsageError(f"no figure shows these {texts.name.nunique()} rows, which are no sweep")
    for text in [text for figure in found.values() for text in figure.findobj(Text)]:
        text.set_text(named(results, text.get_text()))
    return found


def speed_of(results: Results) -> str:
    """The metric that is its speed: with prefill, if the table has the papers' reading."""
    return "end_to_end" if "end_to_end_mean" in results.columns else "throughput"


def text_table(results: Results) -> pd.DataFrame:
    """A row for each text: its run, what was measured of it, how it compares with the baseline's;
    nothing where a figure is lacking."""
    found = []
    speed = speed_of(results)
    for row in results.rows():
        run = row.run
        own = {"run": run.label, "method": run.method, "is_peer": row.is_peer}
        own |= {"name": name_of(row), "place": place_of(row), "dataset": run.dataset}
        own |= {column: getattr(run, size) for column, size in SIZES.items()}
        for (prompt, repeat), record in row.records.items():
            ar = row.baseline.get((prompt, repeat), {"metrics": {}})["metrics"]
            text = {"repeat": repeat, "ar": ar.get(speed), "ar's MB": ar.get("peak_mb")}
            text |= {column: record["metrics"].get(name) for column, name in MEASURED.items()}
            text[SPEED] = record["metrics"].get(speed)
            counts = {kind: record.get(kind, {}) for kind in ("depths", "calibration")}
            found.append(own | text | counts)
    texts = pd.DataFrame(found)
    texts[list(text)] = texts[list(text)].astype(float)
    texts[SPEEDUP] = texts[SPEED] / texts.ar.where(texts.ar > 0)
    texts["peak over ar's"] = texts["peak MB"] / texts["ar's MB"] - 1
    texts[ACCEPTANCE] = texts[ACCEPTANCE].where(texts.draft_nodes > 0)
    texts[PASSES] = texts.draft_passes * texts.iterations
    return texts


def wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, max_lines=5)


def canvas(
    results: Results, title: str, n: int, n_columns: int, height: float, **shared: bool
) -> tuple[Figure, list[Axes]]:
    """A figure of n axes, row by row; below them what was measured on what. height: of a row, in
    inches."""
    n_columns = min(n, n_columns)
    n_rows = -(-n // n_columns)
    inches = min(n_rows * height + 1, 200)  # no more pixels than can be drawn
    figure = Figure(figsize=(9, inches), dpi=150, layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False, **shared).flatten().tolist()
    for axis in axes[n:]:
        axis.remove()
    below = caption(results)
    if speed_of(results) == "end_to_end":
        below += " Speeds include prefill."
    figure.suptitle(title)
    figure.supxlabel(wrapped(below, 165), fontsize=6.5, color=INK)
    return figure, axes[:n]


def figures_by_name(results: Results, texts: pd.DataFrame) -> dict[str, Figure | None]:
    """Those that show every row: as bars, or against each size that varies; by depth; by the
    draft's probability."""
    found = {}
    sizes = [size for size in SIZES if texts.groupby("dataset")[size].nunique().max() > 1]
    for size, (ending, metric) in product(sizes, BY_SIZE.items()):
        if len(sizes) > 1:
            ending = f"_{size[-1]}{ending}"
        found[ending] = size_lines(results, texts, size, metric)
    if not sizes:
        found[""] = bars(results, texts)
    found["_depth"] = depth_lines(results, texts, "drafted")
    found["_position"] = depth_lines(results, texts, "tried")
    found["_calibration"] = calibration_lines(results, texts)
    return found


def bars(results: Results, texts: pd.DataFrame) -> Figure | None:
    """What was measured of every row, panels side by side, those of each place below each other;
    medians on the right of the bars."""
    metrics = [name for name in BARS if texts[name].notna().any()]
    panels = list(product(texts.place.unique(), metrics))
    if not panels:
        return None
    title = "Medians over texts, and quartiles"
    height = 0.5 + 0.27 * texts.groupby("place").run.nunique().max()
    figure, axes = canvas(results, title, len(panels), len(metrics), height)
    for (place, metric), axis in zip(panels, axes, strict=True):
        here = texts[texts.place == place]
        style = {"hue": "method", "palette": METHOD_COLOURS, "saturation": 1, "legend": False}
        style |= {"order": here.run.unique(), "dodge": False}
        style |= {"estimator": "median", "errorbar": ("pi", 50), "capsize": 0.3, "linewidth": 0}
        style |= {"err_kws": {"color": INK, "linewidth": 1, "path_effects": HALO}}
        sns.barplot(here, x=metric, y="run", ax=axis, **style)
        runs = here.drop_duplicates("run")
        axis.set_yticks(range(len(runs)), [wrapped(name, 42) for name in runs["name"]])
        axis.set(ylabel=wrapped(place, 40), ylim=(len(runs) - 0.5, -0.5))
        axis.grid(axis="y", visible=False)
        medians = here.groupby("run", sort=False)[metric].median()
        for i, median in enumerate(medians):
            if median == median:  # nan: not measured
                where = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 7}
                axis.text(1.01, i, BARS[metric].format(median), **where)
        if metric == SPEEDUP:
            axis.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        if metric != metrics[0]:
            axis.set(ylabel="", yticklabels=[])
    return figure


def size_lines(results: Results, texts: pd.DataFrame, size: str, metric: str) -> Figure | None:
    """A metric against a size of the runs; each other size and dataset has a line of its own."""
    word = f"{size[-1]}="  # as labels name it
    lines = [" ".join(w for w in p.split() if not w.startswith(word)) for p in texts.place]
    texts = texts.assign(line=lines, note="")
    title = f"By {size}: medians over texts, and quartiles"
    if metric == SPEED:
        speedups = texts.groupby("run")[SPEEDUP].transform("median")
        texts["note"] = speedups.map("{:.2f}x".format).replace("nanx", "")
        title += "; beside them: x ar"
    return multiples(results, title, texts, size, metric)


def depth_lines(results: Results, texts: pd.DataFrame, whole: str) -> Figure | None:
    """How many of the trees that reach a depth have their path accepted as far ("drafted"); or how
    many of the paths accepted to the depth before, and drafted on ("tried"): were their lines
    level, the chance of a guess would not depend on those accepted before it."""
    points = counted(texts, "depths", "accepted", whole)
    points["share accepted"] = points.share
    points["depth"] = points["at"] + 1
    points["note"] = points.n.map("{:,}".format)
    what = {"drafted": "trees that reach the depth", "tried": "paths accepted to the depth before"}
    title = f"Accepted share of the {what[whole]}, and how many these are{together(texts)}"
    figure = multiples(results, title, points, "depth", "share accepted")
    if figure:
        for text in figure.findobj(Annotation):
            text.set_rotation(90)  # counts of four digits at each depth
        for axis in figure.axes:
            axis.set(ylim=(0, 1.25), yticks=(0, 0.5, 1))
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def calibration_lines(results: Results, texts: pd.DataFrame) -> Figure | None:
    """Whether what the draft thinks likely is accepted: DySpec's Figure 2, DEAGLE's Eq. 15.

    Of the nodes that have this probability after their parent, how many are the target's best
    token there; on the dotted line the draft would be right as often as it believes. What is
    sampled is accepted otherwise, and left out.
    """
    texts = texts[texts["temperature t"] == 0]
    points = counted(texts, "calibration", "matching", "drafted")
    points["share right"] = points.share
    points[CHANCE] = (points["at"] + 0.5) / (points["at"].max() + 1)
    title = "Is a guess right as often as its draft believes? Bars: how its guesses are spread"
    if "auto" in set(points.method):
        title += "; auto's are estimates"
    figure = multiples(results, title + together(texts), points, CHANCE, "share right")
    if figure:
        for name, axis in zip(points.name.unique(), figure.axes, strict=True):
            own = points[points.name == name]
            axis.bar(own[CHANCE], own.n / own.n.sum(), 1 / len(own), color=PALE, zorder=0)
            axis.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=":")
            axis.set(ylim=(0, 1.05), yticks=(0, 0.5, 1), xticks=(0, 0.5, 1))
    return figure


def together(texts: pd.DataFrame) -> str:
    """Which datasets and sizes a figure does not tell apart."""
    places = texts.place.unique()
    return f" ({', '.join(places)} together)" if len(places) > 1 else ""


def counted(texts: pd.DataFrame, kind: str, part: str, whole: str) -> pd.DataFrame:
    """By name and index in these lists of counts: n, the sum of the wholes over all texts, and the
    share that the parts have of it, if it is FEWEST or more."""
    found = []
    texts = texts[(texts["repeat"] == 0) | (texts["temperature t"] > 0)]  # a greedy round is as any
    for name, method, counts in zip(texts.name, texts.method, texts[kind], strict=True):
        for at, pair in enumerate(zip(counts.get(part, []), counts.get(whole, []), strict=False)):
            found.append((name, method, at, *pair))
    points = pd.DataFrame(found, columns=["name", "method", "at", part, "n"])
    points = points.groupby(["name", "method", "at"], sort=False, as_index=False).sum()
    points["share"] = (points[part] / points.n).where(points.n >= FEWEST)
    is_shown = points.groupby("name").share.transform("count") > 0
    return points[is_shown].assign(line="", note="")


def multiples(results: Results, title: str, points: pd.DataFrame, x: str, y: str) -> Figure | None:
    """A panel for each name: medians at each x with quartiles, beside them what `note` says; a line
    for each `line`; in grey behind them all other names'."""
    points = points[points[y].notna()]
    if points.empty:
        return None
    names = points.name.unique()
    n_columns = min((5, 4, 3), key=lambda n: -len(names) % n)  # the last row as full as can be
    shared = {"sharex": True, "sharey": True}
    title += "; grey: others" * (len(names) > 1)
    figure, axes = canvas(results, wrapped(title, 110), len(names), n_columns, 1.7, **shared)
    figure.supylabel(y, fontsize="medium")
    groups = points.groupby(["name", "method", "line", x])
    spread = groups[y].quantile([0.25, 0.5, 0.75]).unstack().join(groups.note.first()).reset_index()
    for i, (name, axis) in enumerate(zip(names, axes, strict=True)):
        for _, line in spread.groupby(["name", "line"]):
            axis.plot(line[x], line[0.5], color=PALE, linewidth=0.7)
        own = spread[spread.name == name]
        style = {"color": METHOD_COLOURS[own.method.iloc[0]]}
        for dash, (label, line) in zip(cycle(DASHES), own.groupby("line"), strict=False):
            axis.fill_between(line[x], line[0.25], line[0.75], alpha=0.2, linewidth=0, **style)
            axis.plot(line[x], line[0.5], dash, marker=".", label=wrapped(label, 30), **style)
        for row in own.to_dict("records"):
            axis.annotate(row["note"], (row[x], row[0.5]), (0, 3.5), **NOTE)
        axis.set_title(wrapped(name, 100 // n_columns))
        axis.tick_params(labelbottom=True)
        if i // n_columns == (len(axes) - 1) // n_columns:
            axis.set_xlabel(x)
    if points.line.nunique() > 1:
        axes[0].legend(frameon=False)
    axes[0].set_ylim(bottom=0)
    return figure


def setting_maps(results: Results, texts: pd.DataFrame) -> Figure | None:
    """Speedup and draft passes of each sweep of settings (v1, Figures 4 and 9; v2, Figures 6 and 7;
    DEAGLE, Figure 2)."""
    found = list(sweeps(results, texts))
    if not found:
        return None
    forms = {SPEEDUP: ".2f"}
    if all(runs[PASSES].notna().all() for *_, runs in found):
        forms[PASSES] = ".0f"
    height = 0.8 + 0.25 * max(runs.rest.nunique() for *_, runs in found)
    n, title = len(found) * len(forms), "Medians over texts, by setting"
    figure, axes = canvas(results, title, n, len(forms), height)
    for ((title, x, runs), y), axis in zip(product(found, forms), axes, strict=True):
        cells = runs.pivot_table(y, "rest", x, "median").reindex(runs.rest.unique())
        style = {"cmap": "cividis", "annot": True, "annot_kws": {"fontsize": 6.5}, "cbar": False}
        sns.heatmap(cells, fmt=forms[y], ax=axis, **style)
        axis.set(title=wrapped(f"{title}: {y}", 60), ylabel="")
        axis.grid(False)  # where nothing was measured
        labels = [wrapped(rest, 36) for rest in cells.index]
        axis.set_yticks([i + 0.5 for i in range(len(labels))], labels, rotation=0)
        axis.tick_params(labelleft=y == SPEEDUP)
    return figure


def sweeps(results: Results, texts: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Of each method with SWEEP runs or more at a place: both, the setting with most values, and
    the runs' medians, beside them that setting's value and the `rest` of what is set."""
    by_label = {run.label: run for run in results.runs}
    texts = texts[~texts.is_peer & texts[SPEEDUP].notna()]
    keys = ["place", "method", "run", "name"]
    medians = texts.groupby(keys, sort=False, as_index=False)[[SPEEDUP, PASSES]].median()
    for (place, method), runs in medians.groupby(["place", "method"], sort=False):
        settings = [asdict(settings_of(by_label[label])) for label in runs.run]  # with defaults
        numbers = pd.DataFrame(settings, index=runs.index).select_dtypes("number")
        if len(runs) < SWEEP or numbers.nunique().max() < 2:
            continue
        x = numbers.nunique().idxmax()
        words = [[w for w in name.split()[1:] if not w.startswith(f"{x}=")] for name in runs.name]
        rest = [" ".join(own) or "defaults" for own in words]
        yield f"{method} {place}".strip(), x, runs.assign(rest=rest, **{x: numbers[x]})


def staircase(results: Results) -> Figure:
    """Forward times by rows on double logarithmic axes, each with its bandwidth floor."""
    times = results.step_times
    title = f"One forward at {times.context} cached tokens, and its one-row bandwidth floor"
    figure, (axis,) = canvas(results, title, 1, 1, 4)
    for role, part in (("target", "verify"), ("draft", "draft")):
        points = zip(times.rows, getattr(times, f"{role}_ms"), strict=False)
        style = {"color": COLOURS["parts"][part]}
        axis.plot(*zip(*points, strict=True), "o-", label=role, **style)
        axis.axhline(times.floor_ms(role), linestyle="--", label=f"{role}'s floor", **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xticks(times.rows, [str(n) for n in times.rows])
    axis.set(xlabel="rows", ylabel="milliseconds")
    axis.legend(frameon=False)
    return figure
