"""Figures of a results file, drawn with pandas and seaborn: one for each question.

""            How fast is every row? Bars of medians; whiskers reach from the first quartile to the
              third, so a machine that stalls now and then changes neither
_calibration  Are the draft's probabilities right? How often candidates match the target's best
              token, by their probability (DySpec's Figure 2, DEAGLE's Eq. 15)
_envelope     Which settings are worth their rows? Each method's best tokens per target pass, by
              its rows; drawn if a method has three settings

    for ending, figure in draw(load("results/regimes_embedded_cpu.jsonl")).items():
        figure.savefig(f"regimes_embedded_cpu{ending}.png")
"""

import json
import textwrap
import warnings
from itertools import zip_longest

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib import pyplot
from matplotlib.figure import Figure

from dynatree_lab.benchmark.hf import HF_METHODS
from dynatree_lab.benchmark.report import caption, text_frame
from dynatree_lab.benchmark.results import Results
from dynatree_lab.html_page import read
from dynatree_lab.methods import METHODS
from dynatree_lab.metrics import N_BINS

COLOURS = json.loads(read("colours.json"))["methods"]  # as on the page of a run
GREY = "#8A8A8A"
PALETTE = dict(zip_longest(METHODS, COLOURS, fillvalue=GREY)) | dict.fromkeys(HF_METHODS, GREY)
STYLE = {"figure.dpi": 150, "grid.color": "#E4E4E4", "text.parse_math": False}
WIDTH = 9  # inches
MAX_PANELS = 24
MIN_SETTINGS = 3  # of a method whose front is drawn
PASSES = "draft passes per iteration"
ENVELOPE = """\
Settings that no other of their method beats with as few rows: medians over the texts.
They depend on the models and the texts, and not on the hardware (but for auto and costs=learned)"""
MIN_COUNT = 10  # candidates of which a share is shown
BARS = {  # by metric: title and format
    "throughput": ("tokens/s", "{:,.0f}"),
    "speedup": ("speedup over {baseline}", "{:.2f}"),
    "tokens_per_iter": ("tokens per target pass", "{:.2f}"),
    "peak_mb": ("peak MB", "{:,.0f}"),
}


def palette_of(methods: pd.Series) -> dict[str, str]:
    """Return the colour of each method. Those that the project does not have are grey."""
    return {method: PALETTE.get(method, GREY) for method in methods.unique()}


def set_style() -> None:
    matplotlib.rcdefaults()  # the user's settings may need LaTeX or missing fonts
    sns.set_theme(style="whitegrid", font_scale=0.75, rc=STYLE)


def draw(results: Results) -> dict[str, Figure]:
    """Return the figures of a results file with texts, by the ending of their file names."""
    set_style()
    texts = text_frame(results)
    texts["method"] = texts.row.str.partition(" ")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on the layout, which `add_caption` replaces
        measured = texts[~texts.is_replayed]
        grids = {"": bars(measured, results) if len(measured) else None}
        grids |= {"_calibration": calibration(texts), "_envelope": envelope(texts)}
    pyplot.close("all")  # frees pyplot's references; closed figures can still be saved
    text = caption(results)
    return {ending: add_caption(grid.figure, text) for ending, grid in grids.items() if grid}


def add_caption(figure: Figure, text: str) -> Figure:
    figure.supxlabel(textwrap.fill(text, 18 * WIDTH), fontsize=6.5)
    figure.set_figheight(figure.get_figheight() + 1)  # for title and caption
    figure.set_layout_engine("constrained")
    return figure


def bars(texts: pd.DataFrame, results: Results) -> sns.FacetGrid:
    """Draw bars of every row, with a panel for each metric. Medians are at the ends of the bars."""
    metrics = [name for name in BARS if texts[name].notna().any()]
    long = texts.melt(["label", "method"], metrics, "metric")
    height = 0.5 + 0.25 * texts.label.nunique()
    grid = sns.catplot(
        long, kind="bar", x="value", y="label", col="metric", sharex=False, hue="method",
        palette=palette_of(texts.method), saturation=1, legend=False, estimator="median",
        errorbar=("pi", 50), err_kws={"linewidth": 1}, height=height,
        aspect=WIDTH / len(metrics) / height
    )  # fmt: skip
    grid.set_titles("").set_ylabels("")
    for metric, panel in grid.axes_dict.items():
        title, form = BARS[metric]
        panel.set_xlabel(title.format(baseline=results.baseline))
        for container in panel.containers:
            panel.bar_label(container, fmt=form, label_type="center", fontsize=6, color="white")
    grid.figure.suptitle("Medians over the texts of each row; whiskers: quartiles")
    return grid


def calibration(texts: pd.DataFrame) -> sns.FacetGrid | None:
    """Draw how often candidates are the target's best token, by their probability, with a panel for
    each row that drafts. Return None if there is none, or too many."""
    found = [
        (label, method, (i + 0.5) / N_BINS, *pair)
        for label, method, counts in zip(texts.label, texts.method, texts.calibration, strict=True)
        if isinstance(counts, dict)  # later rounds and sampled texts have none
        for i, pair in enumerate(zip(counts["top1_match"], counts["drafted"], strict=True))
    ]
    keys = ["label", "method", "probability"]
    points = pd.DataFrame(found, columns=[*keys, "n_right", "n"])
    points = points.groupby(keys, sort=False, as_index=False).sum()
    points = points[points.n >= MIN_COUNT]
    if not 0 < points.label.nunique() <= MAX_PANELS:
        return None
    grid = sns.relplot(
        points.assign(share=points.n_right / points.n), kind="line", x="probability", y="share",
        col="label", col_wrap=4, hue="method", palette=palette_of(points.method), marker="o",
        legend=False, height=1.7, aspect=WIDTH / 4 / 1.7
    )  # fmt: skip
    grid.set(ylim=(0, 1.05))
    for label, panel in grid.axes_dict.items():
        panel.set_title(textwrap.fill(label, 26))
        panel.axline((0, 0), (1, 1), color=GREY, linewidth=0.8, linestyle=":")
    grid.figure.suptitle("How often a candidate is the target's best token, by its probability")
    return grid


def envelope(texts: pd.DataFrame) -> sns.FacetGrid | None:
    """Draw the fronts of the methods, with a panel for each dataset and size. Return None if no
    method has MIN_SETTINGS."""
    texts = texts[texts["rows"].notna()]
    if not (texts.groupby("method").row.nunique() >= MIN_SETTINGS).any():
        return None
    sizes = [label[len(row) + 1 :] for label, row in zip(texts.label, texts.row, strict=True)]
    points = find_fronts(texts.assign(size=sizes)).rename(columns={"draft_passes": PASSES})
    found = list(dict.fromkeys(sizes))  # without repeats
    palette, n_columns = palette_of(texts.method), min(len(found), 2)
    grid = sns.relplot(
        points, kind="scatter", x="rows", y="tokens_per_iter", col="size", col_order=found,
        col_wrap=n_columns, hue="method", hue_order=list(palette), palette=palette, size=PASSES,
        sizes=(12, 120), zorder=3, height=5.5 / n_columns, aspect=WIDTH / 5.5
    )  # fmt: skip
    for (size, method), front in points.groupby(["size", "method"]):
        panel = grid.axes_dict[size]
        panel.plot(front.rows, front.tokens_per_iter, color=palette[method], linewidth=1)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
    sns.move_legend(grid, "outside right center")
    grid.set_titles("{col_name}")
    grid.set_axis_labels("rows of a target pass", "tokens per target pass")
    grid.figure.suptitle(ENVELOPE)
    return grid


def find_fronts(texts: pd.DataFrame) -> pd.DataFrame:
    """Return the medians of each setting on the front of its method: those with more tokens per
    pass than any setting of no more rows."""
    lines = ["size", "method"]
    medians = texts.groupby([*lines, "row"])[["rows", "tokens_per_iter", "draft_passes"]].median()
    points = medians.reset_index().sort_values(["rows", "tokens_per_iter"], ascending=[True, False])
    best = points.groupby(lines).tokens_per_iter.cummax()
    return points[~points.assign(best=best).duplicated([*lines, "best"])]
