"""The columns of tables: what each says of a case, as text.

    COLUMNS["speedup"].title  # in which "ar" is the baseline
    COLUMNS["speedup"].cell(texts[texts.label == "dynatree"])  # texts: report.text_frame

NAME is the median of a metric over the texts, with its quartiles. NAME_mean is its mean and
deviation, as the papers print it. NAME_speedup, of rates and times, is the ratio of means, as their
authors compute speed-ups. The metrics are those of cli/metrics.py; docs/results.md explains them.
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
    cell: Callable[[pd.DataFrame], str]  # of the texts of one case; empty if nothing is known


NUMBERS = {  # by column: title, metric, and how str.format writes it
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
NO_MEAN = ("predicted", "setup")
RATES = ("throughput", "end_to_end")  # more is faster; of times less is
BESIDE = ("throughput", "end_to_end", "wall_ms", "peak_mb", "predicted_ms")  # held against ar's
RENAMED = {
    "acceptance": "acceptance_rate",
    "path_length": "accepted_per_iter",
    "draft_nodes": "drafted_per_iter",
    "matching": "top1_match",
    "floor": "weights_and_caches",
    "context": "cuda_context",
    "spread": "speedup",  # whose quartiles stand where its minimum and maximum stood
}


def values(texts: pd.DataFrame, metric: str) -> pd.Series:
    """Return a metric of every text; empty if some lack it, as if transformers does not tell it.
    A speed-up is only left out of the texts that have none."""
    found = texts[metric]
    if metric == "speedup":
        return found.dropna()
    return found[:0] if found.isna().any() else found


def median_cell(metric: str, form: str, texts: pd.DataFrame) -> str:
    """Median and quartiles, as "1.27x (1.20-1.33)"; the median alone if all three read the same."""
    found = values(texts, metric)
    if found.empty:
        return ""
    median = form.format(found.median())
    low, high = (form.format(found.quantile(q)).removesuffix("x") for q in (0.25, 0.75))
    return median if low == high else f"{median} ({low}-{high})"


def mean_cell(metric: str, form: str, texts: pd.DataFrame) -> str:
    """Mean and standard deviation over the texts: divided by their number, as in the papers."""
    found = values(texts, metric)
    if found.empty:
        return ""
    numbers = [statistics.mean(found), statistics.pstdev(found)]
    return " ± ".join(form.format(number) for number in numbers[: len(found)])


def ratio(metric: str, texts: pd.DataFrame) -> float | None:
    """Return the mean of a metric over the baseline's mean on the same prompts; None if there is
    none."""
    beside = texts[texts.has_baseline]
    if beside.empty:
        return None
    sums = beside[[metric, f"baseline_{metric}"]].sum(skipna=False)
    return sums.iloc[0] / sums.iloc[1] if (sums > 0).all() else None


def ratio_cell(metric: str, texts: pd.DataFrame) -> str:
    """How many times as fast as the baseline, by the means of both."""
    found = ratio(metric, texts)
    if not found:  # 0.0 is what is left of figures that are too far apart
        return ""
    return f"{found if metric in RATES else 1 / found:.2f}x"


def pooled_cell(texts: pd.DataFrame) -> str:
    """Tokens of all texts / passes of all."""
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


PLAIN = {
    name: Column(title, partial(median_cell, metric, form))
    for name, (title, metric, form) in NUMBERS.items()
}
PLAIN |= {
    "tokens_pooled": Column("tok/iter pooled", pooled_cell),
    "exact": Column("exact", exact_cell),
    "more_memory": Column("over ar", more_memory_cell),
}
MEANS = {
    f"{name}_mean": Column(f"{title} mean", partial(mean_cell, metric, form))
    for name, (title, metric, form) in NUMBERS.items()
    if name not in NO_MEAN
}
SPEEDUPS = {  # titled without the unit
    f"{name}_speedup": Column(f"{title.split()[0]} x ar", partial(ratio_cell, metric))
    for name, (title, metric, _) in NUMBERS.items()
    if name in ("throughput", "end_to_end", "wall")
}
COLUMNS = PLAIN | MEANS | SPEEDUPS


def require_columns(names: Sequence[str]) -> None:
    """Raise UsageError for a name that is no column's."""
    for name in names:
        if name in RENAMED:
            raise UsageError(f"unknown column {name!r}: use {RENAMED[name]}")
        if name not in COLUMNS:
            there = f"there are {', '.join(PLAIN)}, and the _mean and _speedup of some (--tables)"
            raise UsageError(f"unknown column {name!r}; {there}")
