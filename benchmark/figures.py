"""Figures of a results file, drawn with pandas and seaborn. What the cases vary decides which.

All figures show one DataFrame with a row for each text. A bar or point is a median over texts, and
a whisker or band reaches from the first quartile to the third. A machine that stalls now and then
changes neither.

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
from benchmark.report import caption, name_baseline, text_frame
from benchmark.results import Results
from cli.errors import UsageError
from cli.page import read
from methods import METHODS

COLOURS = json.loads(read("colours.json"))  # of methods and parts of an iteration, as on the page
INK, GREY, LIGHT_GREY = "#202020", "#8A8A8A", "#D8D8D8"
MORE_COLOURS = sns.husl_palette(len(METHODS)).as_hex()  # for methods that a fork adds
METHOD_COLOURS = dict(zip(METHODS, COLOURS["methods"] + MORE_COLOURS, strict=False))
METHOD_COLOURS |= dict.fromkeys(HF_METHODS, GREY)
STYLE = {"figure.dpi": 150, "figure.max_open_warning": 0, "grid.color": "#E4E4E4"}
STYLE |= {"text.parse_math": False}  # names may contain $
QUARTILES = {"estimator": "median", "errorbar": ("pi", 50)}
ANNOTATION = {"textcoords": "offset points", "fontsize": 5.5, "rotation": 45}  # steep, to fit
WIDTH = 9  # inches

MAX_NAMES = 24  # rows of a figure that shows every row
MIN_COUNT = 10  # trees, paths or nodes of which a rate is shown
MIN_SWEEP_ROWS = 4  # rows of a method that count as a sweep of its settings

# Columns of the DataFrame of texts; their names are the axis labels
SPEED, SPEEDUP, TOKENS_PER_PASS = "tokens/s", "speedup over ar", "tokens per target pass"
ACCEPTANCE, PASSES = "acceptance rate", "draft passes per text"
PEAK, WEIGHTS_AND_CACHES = "peak MB", "weights + caches MB"
PEAK_OVER_BASELINE = "peak over ar"
BARS = {SPEED: "{:,.1f}", SPEEDUP: "{:.2f}x", TOKENS_PER_PASS: "{:.2f}"}  # formats of medians
BARS |= {PEAK: "{:,.0f}", WEIGHTS_AND_CACHES: "{:,.0f}", PEAK_OVER_BASELINE: "{:+.1%}"}
BY_SIZE = {"": SPEED, "_speedup": SPEEDUP, "_progress": TOKENS_PER_PASS, "_acceptance": ACCEPTANCE}
SIZES = {f"{size.replace('_', ' ')} {symbol}": size for size, symbol in SYMBOLS.items()}


def draw(results: Results) -> dict[str, Figure]:
    """Return the figures of a results file by the ending of their file names. Raises UsageError if
    there is none."""
    matplotlib.rcdefaults()  # the user's settings may need LaTeX or missing fonts
    sns.set_theme(style="whitegrid", font_scale=0.75, rc=STYLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on the layout, which `add_caption` replaces
        grids = draw_grids(results)
    pyplot.close("all")  # frees pyplot's references; closed figures can still be saved
    found = {ending: add_caption(grid.figure, results) for ending, grid in grids.items() if grid}
    if not found:
        raise UsageError("no figure: the file has too many rows and no sweep; use fewer rows")
    return found


def draw_grids(results: Results) -> dict[str, sns.FacetGrid | None]:
    """Return the figures as seaborn's grids, None where there is nothing to show. Raises UsageError
    if the file has no texts."""
    if results.head.table == "steps" and results.step_times:
        return {"": step_time_lines(results)}
    if not results.texts:
        raise UsageError("the results file has no texts yet")
    texts = figure_frame(results)
    found = figures_by_name(texts) if texts.name.nunique() <= MAX_NAMES else {}
    return found | {"_settings": setting_maps(results, texts)}


def add_caption(figure: Figure, results: Results) -> Figure:
    """Add the report's caption below a figure, and replace "ar" in titles by the baseline."""
    text_below = caption(results)
    if speed_of(results) == "end_to_end":
        text_below += " Speeds include prefill."
    figure.supxlabel(wrapped(text_below, 18 * WIDTH), fontsize=6.5, color=INK)
    for text in figure.findobj(Text):
        text.set_text(name_baseline(results.head, text.get_text()))
    figure.set_figheight(figure.get_figheight() + 1)  # for title and caption
    figure.set_layout_engine("constrained")
    return figure


def wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, max_lines=5)


def speed_of(results: Results) -> str:
    """Return the metric that figures show as speed: end_to_end, which includes prefill, if the
    table has the papers' column of it."""
    return "end_to_end" if "end_to_end_mean" in results.head.columns else "throughput"


def figure_frame(results: Results) -> pd.DataFrame:
    """Return the DataFrame of texts with additional columns, whose names are axis labels."""
    texts = text_frame(results)
    for kind in ("depths", "calibration"):
        texts[kind] = [found if isinstance(found, dict) else {} for found in texts[kind]]
    speed, peak = texts[speed_of(results)], texts.peak_mb
    baselines = [texts[f"baseline_{metric.name}"] for metric in (speed, peak)]
    baseline_speed, baseline_peak = (found.where(found > 0) for found in baselines)
    metrics = {
        SPEED: speed,
        TOKENS_PER_PASS: texts.tokens_per_iter,
        SPEEDUP: speed / baseline_speed,
        ACCEPTANCE: texts.acceptance_rate.where(texts.drafted_per_iter > 0),
        PASSES: texts.draft_passes * texts.iterations,
        PEAK: peak,
        WEIGHTS_AND_CACHES: texts.weights_and_caches_mb,
        PEAK_OVER_BASELINE: peak / baseline_peak - 1,
    }
    sizes = {column: texts[name] for column, name in SIZES.items()}
    methods = texts.row.str.partition(" ")[0]
    return texts.assign(name=texts.row, method=methods, line="", note="", **sizes, **metrics)


def figures_by_name(texts: pd.DataFrame) -> dict[str, sns.FacetGrid | None]:
    """Return the grids that show every row: bars, or lines over each size that varies; acceptance
    by depth; calibration."""
    found = {}
    sizes = [size for size in SIZES if texts.groupby("dataset")[size].nunique().max() > 1]
    for size, (ending, metric) in product(sizes, BY_SIZE.items()):
        if len(sizes) > 1:
            ending = f"_{size[-1]}{ending}"
        found[ending] = size_lines(texts, size, metric)
    if not sizes:
        found[""] = bars(texts)
    title = "Share of the trees that reach a depth whose accepted path reaches it; numbers: trees"
    found["_depth"] = depth_lines(texts, "drafted", title)
    title = "Acceptance rate by depth, of paths accepted up to the depth before; numbers: paths"
    found["_position"] = depth_lines(texts, "tried", title)
    found["_calibration"] = calibration_lines(texts)
    return found


def bars(texts: pd.DataFrame) -> sns.FacetGrid | None:
    """Draw bars of every row: a column of panels for each metric, a line of panels for each place.
    Medians are printed to the right of the bars."""
    metrics = [name for name in BARS if texts[name].notna().any()]
    if not metrics:
        return None
    long = texts.melt(["name", "method", "place"], metrics, "metric")
    height = 0.5 + 0.25 * texts.name.nunique()
    grid = sns.catplot(
        long, kind="bar", x="value", y="name", row="place", col="metric", sharex="col",
        hue="method", palette=METHOD_COLOURS, saturation=1, legend=False, capsize=0.3,
        err_kws={"color": INK, "linewidth": 1}, height=height,
        aspect=WIDTH / len(metrics) / height, **QUARTILES
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
    grid.figure.suptitle("Medians over the texts of each row; whiskers: quartiles")
    return grid


def size_lines(texts: pd.DataFrame, size: str, metric: str) -> sns.FacetGrid | None:
    """Draw a metric over a size, with a separate line for each dataset and other sizes."""
    word = f"{size[-1]}="  # the size in labels
    lines = [" ".join(w for w in p.split() if not w.startswith(word)) for p in texts.place]
    texts = texts.assign(line=lines)
    title = f"{metric} by {size}: medians and quartiles over texts"
    if metric == SPEED:
        speedups = texts.groupby("label")[SPEEDUP].transform("median")
        texts["note"] = speedups.map("{:.2f}x".format).replace("nanx", "")
        title += "; numbers: median x ar"
    grid = small_multiples(title, texts, size, metric)
    sizes = sorted(texts[size].unique())
    for panel in grid.axes.flat if grid else ():
        scale = "log" if sizes[0] > 0 else "linear"
        panel.set(xscale=scale, xticks=sizes, xticklabels=sizes)
        panel.minorticks_off()
    return grid


def depth_lines(texts: pd.DataFrame, total: str, title: str) -> sns.FacetGrid | None:
    """Draw the share of accepted paths by depth.

    total: "drafted" for the share of trees that reach the depth, or "tried" for the share of paths
        that were accepted up to the depth before and have a child there. If the second is equal
        at all depths, the acceptance probability does not depend on the depth.
    """
    points = pool_counts(texts, "depths", "accepted", total)
    points["depth"] = points["at"] + 1
    points["note"] = points.n.map("{:,}".format)
    return small_multiples(title, points, "depth", "share accepted")


def calibration_lines(texts: pd.DataFrame) -> sns.FacetGrid | None:
    """Draw the share of nodes that are the target's best token after their parent, by their
    probability given the parent (DySpec's Figure 2, DEAGLE's Eq. 15). The parent need not be
    accepted. Only greedy texts are used, because sampled ones accept other tokens, too."""
    points = pool_counts(texts[texts["temperature t"] == 0], "calibration", "top1_match", "drafted")
    points = points.rename(columns={"share accepted": "top-1 match"})
    points["predicted probability"] = (points["at"] + 0.5) / (points["at"].max() + 1)
    title = "Top-1 match by predicted probability; bars: distribution of predictions"
    grid = small_multiples(title, points, "predicted probability", "top-1 match")
    for name, panel in grid.axes_dict.items() if grid else ():
        own = points[points.name == name]
        x, height = own["predicted probability"], own.n / own.n.sum()
        panel.bar(x, height, 1 / len(own), color=LIGHT_GREY, zorder=0)
        panel.axline((0, 0), (1, 1), color=INK, linewidth=0.8, linestyle=":")
    return grid


def pool_counts(texts: pd.DataFrame, kind: str, part: str, total: str) -> pd.DataFrame:
    """Return sums of the counts of all texts, by name and index in the lists of counts.

    kind: the column with the counts. Column n is the sum of `total`, and "share accepted" is the
    sum of `part` / n, empty if n is below MIN_COUNT.
    """
    found = []
    is_first = (texts["round"] == 0) | (texts["temperature t"] > 0)  # greedy rounds are equal
    texts = texts[is_first]
    for name, method, counts in zip(texts.name, texts.method, texts[kind], strict=True):
        for at, pair in enumerate(zip(counts.get(part, []), counts.get(total, []), strict=False)):
            found.append((name, method, at, *pair))
    points = pd.DataFrame(found, columns=["name", "method", "at", part, "n"])
    points = points.groupby(["name", "method", "at"], sort=False, as_index=False).sum()
    points["share accepted"] = (points[part] / points.n).where(points.n >= MIN_COUNT)
    return points.assign(line="", note="")


def small_multiples(title: str, points: pd.DataFrame, x: str, y: str) -> sns.FacetGrid | None:
    """Draw a panel for each name: medians and quartiles of y by x, annotated with column note, and
    a line for each value of column line. All other names are grey in the background."""
    points = points[points[y].notna()]
    if points.empty:
        return None
    names = points.name.unique()
    n_columns = min(len(names), 5)
    style = {"style": "line"} if points.line.nunique() > 1 else {}
    grid = sns.relplot(
        points, kind="line", x=x, y=y, col="name", col_wrap=n_columns, hue="method",
        palette=METHOD_COLOURS, marker=".", mew=0, legend="brief" if style else False, height=1.7,
        aspect=WIDTH / n_columns / 1.7, facet_kws={"legend_out": False}, **style, **QUARTILES
    )  # fmt: skip
    medians = points.groupby(["name", "line", x], sort=False, as_index=False)
    medians = medians.agg({y: "median", "note": "first"})
    medians["unit"] = medians.name + medians.line
    grey = {"units": "unit", "estimator": None, "color": LIGHT_GREY, "linewidth": 0.7, "zorder": 0}
    for name, panel in grid.axes_dict.items():
        sns.lineplot(medians, x=x, y=y, ax=panel, legend=False, **grey)
        for at, middle, note in medians.loc[medians.name == name, [x, y, "note"]].to_numpy():
            panel.annotate(note, (at, middle), (0, 2), **ANNOTATION)
        panel.set_title(wrapped(name, 100 // n_columns))
        panel.tick_params(labelleft=panel.get_subplotspec().is_first_col())
    grid.set_axis_labels(x, "").set(ylim=(0, None))
    grid.figure.supylabel(y, fontsize="medium")
    grid.figure.suptitle(wrapped(title + "; grey: other rows" * (len(names) > 1), 110))
    return grid


def setting_maps(results: Results, texts: pd.DataFrame) -> sns.FacetGrid | None:
    """Draw heatmaps of each sweep, as in DynaTree v1, Figures 4 and 9, v2, Figures 6 and 7, and
    DEAGLE, Figure 2."""
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
    """Draw one metric of a sweep. Called by seaborn's grid with the data of a panel."""
    cells = data.pivot_table("value", "rest", "setting").reindex(data.rest.unique())
    form = ".2f" if SPEEDUP in set(data.metric) else ".0f"
    sns.heatmap(
        cells, cmap="cividis", annot=True, fmt=form, annot_kws={"size": 6.5}, cbar=False
    ).grid(False)


def sweeps(results: Results, texts: pd.DataFrame) -> pd.DataFrame:
    """Return the medians of methods with at least MIN_SWEEP_ROWS rows at a place. Column setting
    has the values of the setting that varies most, and column rest the other settings."""
    cases = dict(zip(labels(results.head.cases), results.head.cases, strict=True))
    found = [pd.DataFrame()]
    texts = texts[~texts.method.isin(list(HF_METHODS)) & texts[SPEEDUP].notna()]
    keys = ["place", "method", "label", "name"]
    medians = texts.groupby(keys, sort=False, as_index=False)[[SPEEDUP, PASSES]].median()
    for (place, method), runs in medians.groupby(["place", "method"], sort=False):
        configs = [cases[label].generation_config() for label in runs.label]
        settings = [asdict(config.settings) for config in configs]  # with defaults
        numbers = pd.DataFrame(settings, index=runs.index).select_dtypes("number")
        if len(runs) < MIN_SWEEP_ROWS or not (numbers.nunique() > 1).any():
            continue
        x = numbers.nunique().idxmax()
        words = [[w for w in name.split()[1:] if not w.startswith(f"{x}=")] for name in runs.name]
        rest = [wrapped(" ".join(own) or "defaults", 40) for own in words]
        title = " ".join([method, *place.split(), "by", x])
        found.append(runs.assign(title=title, setting=numbers[x], rest=rest))
    return pd.concat(found)


def step_time_lines(results: Results) -> sns.FacetGrid:
    """Draw the times of single passes by rows, on logarithmic axes, with their bandwidth floors."""
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
    title = f"Time of one pass at {times.context} cached tokens; dashed: one-row bandwidth floor"
    grid.figure.suptitle(title)
    return grid
