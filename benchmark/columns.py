"""The columns of tables, each with a function that formats its cell for a case.

    COLUMNS["speedup"].title  # "ar" in it stands for the baseline
    COLUMNS["speedup"].cell(texts[texts.label == "dynatree"])  # texts: report.text_frame

NAME is the median of a metric over the texts, with its quartiles. NAME_mean is its mean and
standard deviation, as in the papers. NAME_speedup is a ratio of means, as the papers' authors
compute speed-ups; only rates and times have it. docs/results.md explains the metrics, which are
those of cli/metrics.py.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from cli.errors import UsageError


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    cell: Callable[[pd.DataFrame], str]  # gets the texts of one case; empty if not measured


NUMBERS = {  # by column: title, metric, format
    "throughput": ("tok/s", "throughput", "{:.1f}"),
    "speedup": ("x ar", "speedup", "{:.2f}x"),
    "predicted": ("predicted", "predicted", "{:.2f}x"),
    "end_to_end": ("end-to-end tok/s", "end_to_end", "{:.1f}"),
    "wall": ("wall ms/token", "wall_ms", "{:.2f}"),
    "setup": ("set-up s", "setup_s", "{:.2f}"),
    "ttft": ("TTFT ms", "ttft_ms", "{:.1f}"),
    "tpot": ("TPOT ms", "tpot_ms", "{:.2f}"),
    "tokens_per_iter": ("tok/iter", "tokens_per_iter", "{:.2f}"),
    "accepted_per_iter": ("accepted/iter", "accepted_per_iter", "{:.2f}"),
    "acceptance_rate": ("accept", "acceptance_rate", "{:.2f}"),
    "top1_match": ("top-1 match", "top1_match", "{:.2f}"),
    "code_acceptance": ("accept (code)", "code_acceptance", "{:.1%}"),
    "drafted_per_iter": ("drafted/iter", "drafted_per_iter", "{:.1f}"),
    "iterations": ("iters", "iterations", "{:.0f}"),
    "draft_passes": ("passes", "draft_passes", "{:.2f}"),
    "draft_pass": ("draft ms/pass", "draft_pass_ms", "{:.2f}"),
    "draft": ("draft ms", "draft_ms", "{:.2f}"),
    "verify": ("verify ms", "verify_ms", "{:.2f}"),
    "other": ("other ms", "other_ms", "{:.2f}"),
    "repetition": ("repeat", "repetition", "{:.2f}"),
    "peak": ("peak MB", "peak_mb", "{:.0f}"),
    "weights_and_caches": ("weights + caches MB", "weights_and_caches_mb", "{:.0f}"),
    "pools": ("graph pools MB", "pools_mb", "{:.0f}"),
    "cuda_context": ("CUDA context MB", "cuda_context_mb", "{:.0f}"),
}
METRICS = [metric for _, metric, _ in NUMBERS.values()]
WITHOUT_MEAN = ("predicted", "setup")
RATES = ("throughput", "end_to_end")  # higher is faster; of times, lower is
BASELINE_METRICS = ("throughput", "end_to_end", "wall_ms", "peak_mb", "predicted_ms")
RENAMED = {  # columns of earlier versions
    "acceptance": "acceptance_rate",
    "path_length": "accepted_per_iter",
    "draft_nodes": "drafted_per_iter",
    "matching": "top1_match",
    "floor": "weights_and_caches",
    "context": "cuda_context",
    "spread": "speedup",
}


def values(texts: pd.DataFrame, metric: str) -> pd.Series:
    """Return a metric of every text, or nothing if a text lacks it, for example because
    transformers does not report it. For the speed-up, return the values of texts that have one."""
    found = texts[metric]
    if metric == "speedup":
        return found.dropna()
    return found[:0] if found.isna().any() else found


def median_cell(metric: str, form: str, texts: pd.DataFrame) -> str:
    """Return median and quartiles, as "1.27x (1.20-1.33)"; only the median if the formatted
    quartiles are equal."""
    found = values(texts, metric)
    if found.empty:
        return ""
    median = form.format(found.median())
    low, high = (form.format(found.quantile(q)).removesuffix("x") for q in (0.25, 0.75))
    return median if low == high else f"{median} ({low}-{high})"


def mean_cell(metric: str, form: str, texts: pd.DataFrame) -> str:
    """Return the mean and the standard deviation over the texts, as "80.0 ± 16.3"; only the mean
    of a single text."""
    found = values(texts, metric)
    if found.empty:
        return ""
    numbers = [statistics.mean(found), statistics.pstdev(found)]  # pstdev, as in the papers
    return " ± ".join(form.format(number) for number in numbers[: len(found)])


def ratio(metric: str, texts: pd.DataFrame) -> float | None:
    """Return the mean of a metric / the baseline's mean on the same prompts; None if one of them is
    not known or not positive."""
    compared = texts[texts.has_baseline]
    if compared.empty:
        return None
    sums = compared[[metric, f"baseline_{metric}"]].sum(skipna=False)
    return sums.iloc[0] / sums.iloc[1] if (sums > 0).all() else None


def ratio_cell(metric: str, texts: pd.DataFrame) -> str:
    """Return the speed-up over the baseline, as a ratio of means."""
    found = ratio(metric, texts)
    if not found:  # None, or 0.0 because the quotient is too small for a float
        return ""
    return f"{found if metric in RATES else 1 / found:.2f}x"


def pooled_cell(texts: pd.DataFrame) -> str:
    """Return the tokens of all texts / the iterations of all texts."""
    means, passes = values(texts, "tokens_per_iter"), values(texts, "iterations")
    if means.empty or not passes.sum():
        return ""
    return f"{(means * passes).sum() / passes.sum():.2f}"


def exact_cell(texts: pd.DataFrame) -> str:
    compared = texts[texts.is_compared]
    return f"{(~compared.is_different).sum()}/{len(compared)}" if len(compared) else ""


def more_memory_cell(texts: pd.DataFrame) -> str:
    found = ratio("peak_mb", texts)
    return "" if found is None else f"{found - 1:+.1%}"


BASE_COLUMNS = {
    name: Column(title, partial(median_cell, metric, form))
    for name, (title, metric, form) in NUMBERS.items()
}
BASE_COLUMNS |= {
    "tokens_pooled": Column("tok/iter pooled", pooled_cell),
    "exact": Column("exact", exact_cell),
    "more_memory": Column("over ar", more_memory_cell),
}
MEANS = {
    f"{name}_mean": Column(f"{title} mean", partial(mean_cell, metric, form))
    for name, (title, metric, form) in NUMBERS.items()
    if name not in WITHOUT_MEAN
}
SPEEDUPS = {  # the titles have no unit
    f"{name}_speedup": Column(f"{title.split()[0]} x ar", partial(ratio_cell, metric))
    for name, (title, metric, _) in NUMBERS.items()
    if name in ("throughput", "end_to_end", "wall")
}
COLUMNS = BASE_COLUMNS | MEANS | SPEEDUPS


def require_columns(names: Sequence[str]) -> None:
    """Raise UsageError for an unknown column."""
    for name in names:
        if name in RENAMED:
            raise UsageError(f"column {name!r} was renamed; use {RENAMED[name]}")
        if name not in COLUMNS:
            known = f"{', '.join(BASE_COLUMNS)}, or the _mean or _speedup of some (see --tables)"
            raise UsageError(f"column is {name!r}, it must be one of {known}")
