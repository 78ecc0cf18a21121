"""Figures of a results file, drawn with pandas and seaborn: one for each question.

""            How fast is every row? Bars of medians; whiskers reach from the first quartile to the
              third, so a machine that stalls now and then changes neither
_depth        How deep do trees pay? The share of trees whose accepted path reaches a depth
_calibration  Are the draft's probabilities right? How often candidates match the target's best
              token, by their probability (DySpec's Figure 2, DEAGLE's Eq. 15)

    for ending, figure in draw(load("results/main_cpu.jsonl")).items():
        figure.savefig(f"main_cpu{ending}.png")
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
from dynatree_lab.benchmark.report import caption, name_baseline, text_frame
from dynatree_lab.benchmark.results import Results
from dynatree_lab.html_page import read
from dynatree_lab.methods import METHODS

COLOURS = json.loads(read("colours.json"))["methods"]  # as on the page of a run
GREY = "#8A8A8A"
PALETTE = dict(zip_longest(METHODS, COLOURS, fillvalue=GREY)) | dict.fromkeys(HF_METHODS, GREY)
STYLE = {"figure.dpi": 150, "grid.color": "#E4E4E4", "text.parse_math": False}
WIDTH = 9  # inches
MAX_PANELS = 24
MIN_COUNT = 10  # trees or nodes of which a rate is shown
BARS = {  # by metric: title and format
    "throughput": ("tokens/s", "{:,.0f}"),
    "speedup": ("speedup over ar", "{:.2f}"),
    "tokens_per_iter": ("tokens per target pass", "{:.2f}"),
    "peak_mb": ("peak MB", "{:,.0f}"),
}


def draw(results: Results) -> dict[str, Figure]:
    """Return the figures of a results file with texts, by the ending of their file names."""
    matplotlib.rcdefaults()  # the user's settings may need LaTeX or missing fonts
    sns.set_theme(style="whitegrid", font_scale=0.75, rc=STYLE)
    texts = text_frame(results)
    texts["method"] = texts.row.str.partition(" ")[0]
    by_depth = "Share of the trees that reach a depth whose accepted path reaches it"
    by_probability = "Share of candidates that are the target's best token, by their probability"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on the layout, which `add_caption` replaces
        grids = {
            "": bars(texts, results),
            "_depth": rates(texts, "depths", "accepted", by_depth),
            "_calibration": rates(texts, "calibration", "top1_match", by_probability),
        }
    pyplot.close("all")  # frees pyplot's references; closed figures can still be saved
    return {ending: add_caption(grid.figure, results) for ending, grid in grids.items() if grid}


def add_caption(figure: Figure, results: Results) -> Figure:
    """Add the report's caption below a figure."""
    figure.supxlabel(textwrap.fill(caption(results), 18 * WIDTH), fontsize=6.5)
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
        palette=PALETTE, saturation=1, legend=False, estimator="median", errorbar=("pi", 50),
        err_kws={"linewidth": 1}, height=height, aspect=WIDTH / len(metrics) / height
    )  # fmt: skip
    grid.set_titles("").set_ylabels("")
    for metric, panel in grid.axes_dict.items():
        title, form = BARS[metric]
        panel.set_xlabel(name_baseline(results, title))
        for container in panel.containers:
            panel.bar_label(container, fmt=form, label_type="center", fontsize=6, color="white")
    grid.figure.suptitle("Medians over the texts of each row; whiskers: quartiles")
    return grid


def rates(texts: pd.DataFrame, kind: str, part: str, title: str) -> sns.FacetGrid | None:
    """Draw a share by depth or by probability, with a panel for each row that drafts. Return None
    if there is none, or too many.

    kind, part: the column with the counts, and those of which the share is taken.
    """
    points = pool_counts(texts, kind, part)
    if not 0 < points.label.nunique() <= MAX_PANELS:
        return None
    x = "depth" if kind == "depths" else "probability"
    points[x] = points["at"] + 1 if kind == "depths" else (points["at"] + 0.5) / 20
    grid = sns.relplot(
        points, kind="line", x=x, y="share", col="label", col_wrap=4, hue="method", marker="o",
        palette=PALETTE, legend=False, height=1.7, aspect=WIDTH / 4 / 1.7
    )  # fmt: skip
    grid.set(ylim=(0, 1.05))
    for label, panel in grid.axes_dict.items():
        panel.set_title(textwrap.fill(label, 26))
        if kind == "calibration":
            panel.axline((0, 0), (1, 1), color=GREY, linewidth=0.8, linestyle=":")
    grid.figure.suptitle(title)
    return grid


def pool_counts(texts: pd.DataFrame, kind: str, part: str) -> pd.DataFrame:
    """Return the share `part` / `drafted` of the counts of all texts, by label and index in the
    lists of counts. Shares of fewer than MIN_COUNT are left out."""
    found = [
        (label, method, at, *pair)
        for label, method, counts in zip(texts.label, texts.method, texts[kind], strict=True)
        if isinstance(counts, dict)  # greedy texts of later rounds repeat those of the first
        for at, pair in enumerate(zip(counts[part], counts["drafted"], strict=True))
    ]
    points = pd.DataFrame(found, columns=["label", "method", "at", part, "n"])
    points = points.groupby(["label", "method", "at"], sort=False, as_index=False).sum()
    points = points[points.n >= MIN_COUNT]
    return points.assign(share=points[part] / points.n)
