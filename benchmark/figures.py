"""Figures of a results file by pandas and seaborn's grids: what a file varies decides which.

All is computed from one table with a row for each text. A bar or point is a median over texts,
whiskers and bands reach from the first quartile to the third: that a machine stalls now and then
moves neither.

    for ending, figure in draw(load("results/main_cpu.jsonl")).items():
        figure.savefig(f"main_cpu{ending}.png")
"""

import json
import textwrap
import warnings
from dataclasses import asdict
from itertools import product

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator

from benchmark.cases import SYMBOLS, labels
from benchmark.hf import HF_METHODS
from benchmark.report import caption, named, text_frame
from benchmark.results import Results
from cli.errors import UsageError
from cli.page import read
from methods import METHODS

COLOURS = json.loads(read("colours.json"))  # one for a method, or a part of the work, everywhere
INK, GREY, PALE = "#202020", "#8A8A8A", "#D8D8D8"
MORE_COLOURS = sns.husl_palette(len(METHODS)).as_hex()  # of methods that somebody adds
METHOD_COLOURS = dict(zip(METHODS, COLOURS["methods"] + MORE_COLOURS, strict=False))
METHOD_COLOURS |= dict.fromkeys(HF_METHODS, GREY)
STYLE = {"figure.dpi": 150, "figure.max_open_warning": 0, "grid.color": "#E4E4E4"}
STYLE |= {"text.parse_math": False}  # a $ in a name begins no formula
SPREAD = {"estimator": "median", "errorbar": ("pi", 50)}
NOTE = {"textcoords": "offset points", "fontsize": 5.5, "rotation": 45}  # neighbours do not collide
WIDTH = 9  # inches

CROWD = 24  # names, beyond which no figure shows each of them
FEWEST = 10  # trees, paths or guesses; a share of fewer says nothing
SWEEP = 4  # rows of a method that make a sweep of its settings

# Columns of the table of texts, named as their axes are
SPEED, SPEEDUP, PROGRESS = "tokens/s", "x ar on the same prompt", "tokens per target pass"
ACCEPTANCE, PASSES = "accepted / drafted", "draft passes for a text"
PEAK, NEEDED, MORE = "peak MB", "weights + caches MB", "peak over ar's"
BARS = {SPEED: "{:,.1f}", SPEEDUP: "{:.2f}x", PROGRESS: "{:.2f}"}  # and how their medians are shown
BARS |= {PEAK: "{:,.0f}", NEEDED: "{:,.0f}", MORE: "{:+.1%}"}
BY_SIZE = {"": SPEED, "_speedup": SPEEDUP, "_progress": PROGRESS, "_acceptance": ACCEPTANCE}
SIZES = {f"{size.replace('_', ' ')} {symbol}": size for size, symbol in SYMBOLS.items()}


def draw(results: Results) -> dict[str, Figure]:
    """Every figure of a results file, by what its name ends in. Raises UsageError for none."""
    matplotlib.rcdefaults()  # what a user has set asks for LaTeX, or fonts that may be missing
    sns.set_theme(style="whitegrid", font_scale=0.75, rc=STYLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a layout that `finished` replaces
        grids = draw_grids(results)
    pyplot.close("all")  # as it keeps each; they can be saved still
    found = {ending: finished(grid.figure, results) for ending, grid in grids.items() if grid}
    if not found:
        raise UsageError("no figure shows these rows: too many for one, and no sweep of settings")
    return found


def draw_grids(results: Results) -> dict[str, sns.FacetGrid | None]:
    """The same as seaborn's grids, None where there is nothing to show. Raises UsageError."""
    if results.head.table == "steps" and results.step_times:
        return {"": staircase(results)}
    if not results.texts:
        raise UsageError("the results file has no texts yet")
    texts = named_texts(results)
    found = figures_by_name(texts) if texts.name.nunique() <= CROWD else {}
    return found | {"_settings": setting_maps(results, texts)}


def finished(figure: Figure, results: Results) -> Figure:
    """A figure with what was measured on what below it, and the baseline named."""
    below = caption(results)
    if speed_of(results) == "end_to_end":
        below += " Speeds include prefill."
    figure.supxlabel(wrapped(below, 18 * WIDTH), fontsize=6.5, color=INK)
    for text in figure.findobj(Text):
        text.set_text(named(results.head, text.get_text()))
    figure.set_figheight(figure.get_figheight() + 1)  # for title and caption
    figure.set_layout_engine("constrained")
    return figure


def wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, max_lines=5)


def speed_of(results: Results) -> str:
    """The metric that is its speed: with prefill, if the table has the papers' reading."""
    return "end_to_end" if "end_to_end_mean" in results.head.columns else "throughput"


def named_texts(results: Results) -> pd.DataFrame:
    """Return the frame of texts with columns that are named as the figures' axes are."""
    texts = text_frame(results)
    for kind in ("depths", "calibration"):
        texts[kind] = [found if isinstance(found, dict) else {} for found in texts[kind]]
    speed, peak = texts[speed_of(results)], texts.peak_mb
    of_baseline = [texts[f"baseline_{metric.name}"] for metric in (speed, peak)]
    baseline_speed, baseline_peak = (found.where(found > 0) for found in of_baseline)
    figures = {
        SPEED: speed,
        PROGRESS: texts.tokens_per_iter,
        SPEEDUP: speed / baseline_speed,
        ACCEPTANCE: texts.acceptance_rate.where(texts.drafted_per_iter > 0),
        PASSES: texts.draft_passes * texts.iterations,
        PEAK: peak,
        NEEDED: texts.weights_and_caches_mb,
        MORE: peak / baseline_peak - 1,
    }
    sizes = {column: texts[name] for column, name in SIZES.items()}
    methods = texts.row.str.partition(" ")[0]
    return texts.assign(name=texts.row, method=methods, line="", note="", **sizes, **figures)


def figures_by_name(texts: pd.DataFrame) -> dict[str, sns.FacetGrid | None]:
    """Those that show every row: as bars, or against each size that varies; by depth; by the
    draft's probability."""
    found = {}
    sizes = [size for size in SIZES if texts.groupby("dataset")[size].nunique().max() > 1]
    for size, (ending, metric) in product(sizes, BY_SIZE.items()):
        if len(sizes) > 1:
            ending = f"_{size[-1]}{ending}"
        found[ending] = size_lines(texts, size, metric)
    if not sizes:
        found[""] = bars(texts)
    found["_depth"] = depth_lines(texts, "drafted", "trees that reach the depth")
    found["_position"] = depth_lines(texts, "tried", "paths accepted to the depth before")
    found["_calibration"] = calibration_lines(texts)
    return found


def bars(texts: pd.DataFrame) -> sns.FacetGrid | None:
    """What was measured of every row, panels side by side, those of each place below each other;
    medians on the right of the bars."""
    metrics = [name for name in BARS if texts[name].notna().any()]
    if not metrics:
        return None
    long = texts.melt(["name", "method", "place"], metrics, "metric")
    height = 0.5 + 0.25 * texts.name.nunique()
    grid = sns.catplot(
        long, kind="bar", x="value", y="name", row="place", col="metric", sharex="col",
        hue="method", palette=METHOD_COLOURS, saturation=1, legend=False, capsize=0.3,
        err_kws={"color": INK, "linewidth": 1}, height=height,
        aspect=WIDTH / len(metrics) / height, **SPREAD
    )  # fmt: skip
    grid.set_titles("")
    names = [wrapped(name, 42) for name in texts.name.unique()]
    medians = long.groupby(["place", "metric", "name"]).value.median()
    for (place, metric), panel in grid.axes_dict.items():
        panel.set_yticks(range(len(names)), names)
        panel.set(xlabel=metric, ylabel=wrapped(place, 40) if metric == metrics[0] else "")
        for at, median in enumerate(medians[place, metric].reindex(texts.name.unique())):
            where = {"transform": panel.get_yaxis_transform(), "va": "center", "fontsize": 7}
            panel.text(1.01, at, BARS[metric].format(median).replace("nan", ""), **where)
        if metric == SPEEDUP:
            panel.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    grid.figure.suptitle("Every row's median over its texts; lines: from quartile to quartile")
    return grid


def size_lines(texts: pd.DataFrame, size: str, metric: str) -> sns.FacetGrid | None:
    """A metric against a size of the runs; each other size and dataset has a line of its own."""
    word = f"{size[-1]}="  # as labels name it
    lines = [" ".join(w for w in p.split() if not w.startswith(word)) for p in texts.place]
    texts = texts.assign(line=lines)
    title = f"{metric}, by {size}: median and quartiles over texts"
    if metric == SPEED:
        speedups = texts.groupby("label")[SPEEDUP].transform("median")
        texts["note"] = speedups.map("{:.2f}x".format).replace("nanx", "")
        title += "; figures: median x ar"
    grid = multiples(title, texts, size, metric)
    sizes = sorted(texts[size].unique())
    for panel in grid.axes.flat if grid else ():
        scale = "log" if sizes[0] > 0 else "linear"
        panel.set(xscale=scale, xticks=sizes, xticklabels=sizes)
        panel.minorticks_off()
    return grid


def depth_lines(texts: pd.DataFrame, whole: str, what: str) -> sns.FacetGrid | None:
    """How many of the trees that reach a depth have their path accepted as far ("drafted"); or how
    many of the paths accepted to the depth before, and drafted on ("tried"): were their lines
    level, the chance of a guess would not depend on those accepted before it."""
    points = counted(texts, "depths", "accepted", whole)
    points["depth"] = points["at"] + 1
    points["note"] = points.n.map("{:,}".format)
    title = f"Accepted share of the {what}, and how many these are"
    return multiples(title, points, "depth", "share accepted")


def calibration_lines(texts: pd.DataFrame) -> sns.FacetGrid | None:
    """Of the guesses that have this probability after their parent, how many are the target's best
    token there (DySpec's Figure 2, DEAGLE's Eq. 15); sampled ones are accepted otherwise."""
    points = counted(texts[texts["temperature t"] == 0], "calibration", "top1_match", "drafted")
    points = points.rename(columns={"share accepted": "share right"})
    points["probability"] = (points["at"] + 0.5) / (points["at"].max() + 1)
    title = "Is a guess right as often as its draft believes? Bars: how its guesses are spread"
    grid = multiples(title, points, "probability", "share right")
    for name, panel in grid.axes_dict.items() if grid else ():
        own = points[points.name == name]
        panel.bar(own.probability, own.n / own.n.sum(), 1 / len(own), color=PALE, zorder=0)
        panel.axline((0, 0), (1, 1), color=INK, linewidth=0.8, linestyle=":")
    return grid


def counted(texts: pd.DataFrame, kind: str, part: str, whole: str) -> pd.DataFrame:
    """By name and index in these lists of counts: n, the sum of the wholes over all texts, and the
    share that the parts have of it, if it is FEWEST or more."""
    found = []
    texts = texts[(texts["round"] == 0) | (texts["temperature t"] > 0)]  # a greedy round is as any
    for name, method, counts in zip(texts.name, texts.method, texts[kind], strict=True):
        for at, pair in enumerate(zip(counts.get(part, []), counts.get(whole, []), strict=False)):
            found.append((name, method, at, *pair))
    points = pd.DataFrame(found, columns=["name", "method", "at", part, "n"])
    points = points.groupby(["name", "method", "at"], sort=False, as_index=False).sum()
    points["share accepted"] = (points[part] / points.n).where(points.n >= FEWEST)
    return points.assign(line="", note="")


def multiples(title: str, points: pd.DataFrame, x: str, y: str) -> sns.FacetGrid | None:
    """A panel for each name: medians at each x with quartiles, beside them what `note` says; a line
    for each `line`; in grey behind them all other names'."""
    points = points[points[y].notna()]
    if points.empty:
        return None
    names = points.name.unique()
    n_columns = min(len(names), 5)
    style = {"style": "line"} if points.line.nunique() > 1 else {}
    grid = sns.relplot(
        points, kind="line", x=x, y=y, col="name", col_wrap=n_columns, hue="method",
        palette=METHOD_COLOURS, marker=".", mew=0, legend="brief" if style else False, height=1.7,
        aspect=WIDTH / n_columns / 1.7, facet_kws={"legend_out": False}, **style, **SPREAD
    )  # fmt: skip
    medians = points.groupby(["name", "line", x], sort=False, as_index=False)
    medians = medians.agg({y: "median", "note": "first"})
    medians["unit"] = medians.name + medians.line
    grey = {"units": "unit", "estimator": None, "color": PALE, "linewidth": 0.7, "zorder": 0}
    for name, panel in grid.axes_dict.items():
        sns.lineplot(medians, x=x, y=y, ax=panel, legend=False, **grey)
        for at, middle, note in medians.loc[medians.name == name, [x, y, "note"]].to_numpy():
            panel.annotate(note, (at, middle), (0, 2), **NOTE)
        panel.set_title(wrapped(name, 100 // n_columns))
        panel.tick_params(labelleft=panel.get_subplotspec().is_first_col())
    grid.set_axis_labels(x, "").set(ylim=(0, None))
    grid.figure.supylabel(y, fontsize="medium")
    grid.figure.suptitle(wrapped(title + "; grey: other rows" * (len(names) > 1), 110))
    return grid


def setting_maps(results: Results, texts: pd.DataFrame) -> sns.FacetGrid | None:
    """Of each sweep: v1, Figures 4 and 9; v2, Figures 6 and 7; DEAGLE, Figure 2."""
    found = sweeps(results, texts)
    if found.empty:
        return None
    metrics = [SPEEDUP, PASSES] if found[PASSES].notna().all() else [SPEEDUP]
    long = found.melt(["title", "setting", "rest"], metrics, "metric")
    height = 0.8 + 0.25 * found.groupby("title").rest.nunique().max()
    grid = sns.FacetGrid(
        long, row="title", col="metric", sharex=False, sharey="row", height=height,
        aspect=WIDTH / len(metrics) / height
    )  # fmt: skip
    grid.map_dataframe(heatmap)
    grid.set_titles("{row_name}: {col_name}").set_axis_labels("", "")
    grid.figure.suptitle("Medians over texts, by setting; white: not measured")
    return grid


def heatmap(data: pd.DataFrame, color: object) -> None:
    """A sweep's cells of one metric, which seaborn's grid has chosen."""
    cells = data.pivot_table("value", "rest", "setting").reindex(data.rest.unique())
    form = ".2f" if SPEEDUP in set(data.metric) else ".0f"
    sns.heatmap(
        cells, cmap="cividis", annot=True, fmt=form, annot_kws={"size": 6.5}, cbar=False
    ).grid(False)


def sweeps(results: Results, texts: pd.DataFrame) -> pd.DataFrame:
    """Medians of the runs of each method with SWEEP runs or more at a place; beside them the value
    of the setting with most values, and the `rest` of what is set."""
    cases = dict(zip(labels(results.head.cases), results.head.cases, strict=True))
    found = [pd.DataFrame()]
    texts = texts[~texts.method.isin(list(HF_METHODS)) & texts[SPEEDUP].notna()]
    keys = ["place", "method", "label", "name"]
    medians = texts.groupby(keys, sort=False, as_index=False)[[SPEEDUP, PASSES]].median()
    for (place, method), runs in medians.groupby(["place", "method"], sort=False):
        settings = [asdict(cases[label].config().settings) for label in runs.label]  # with defaults
        numbers = pd.DataFrame(settings, index=runs.index).select_dtypes("number")
        if len(runs) < SWEEP or not (numbers.nunique() > 1).any():
            continue
        x = numbers.nunique().idxmax()
        words = [[w for w in name.split()[1:] if not w.startswith(f"{x}=")] for name in runs.name]
        rest = [wrapped(" ".join(own) or "defaults", 40) for own in words]
        title = " ".join([method, *place.split(), "by", x])
        found.append(runs.assign(title=title, setting=numbers[x], rest=rest))
    return pd.concat(found)


def staircase(results: Results) -> sns.FacetGrid:
    """Forward times by rows on double logarithmic axes, each with its bandwidth floor."""
    times = results.step_times
    wide = pd.DataFrame({"target": times.target_ms, "draft": times.draft_ms, "rows": times.rows})
    points = wide.melt("rows", var_name="role", value_name="milliseconds")
    colours = {"target": COLOURS["parts"]["verify"], "draft": COLOURS["parts"]["draft"]}
    grid = sns.relplot(
        points, kind="line", x="rows", y="milliseconds", hue="role", palette=colours, marker="o",
        height=4, aspect=WIDTH / 4, facet_kws={"legend_out": False}
    )  # fmt: skip
    for role, colour in colours.items():
        grid.ax.axhline(times.floor_ms(role), linestyle="--", color=colour)
    grid.set(xscale="log", yscale="log", xticks=times.rows, xticklabels=times.rows)
    grid.ax.minorticks_off()
    grid.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    grid.ax.yaxis.set_major_formatter("{x:g}")
    title = f"One forward at {times.context} cached tokens; dashed: its one-row bandwidth floor"
    grid.figure.suptitle(title)
    return grid
