"""The columns of tables: what each says of one row, as text.

    title, cell = COLUMNS["speedup"].title, COLUMNS["speedup"].cell(row)

NAME is the median of a number that each text has, NAME_mean its mean and deviation, as the papers
print it; NAME_speedup, of rates and times, is the ratio of means, as their authors compute it. What
a metric is stands in cli/metrics.py, for readers in docs/results.md.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmark.results import Row
from cli.errors import UsageError, shown


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str  # in which "ar" is the baseline
    cell: Callable[[Row], str]  # empty where there is nothing to say


@dataclass(frozen=True)
class Number:
    """A metric, one number for each text."""

    title: str
    metric: str
    form: str  # as str.format writes it


NUMBERS = {
    "throughput": Number("tok/s", "throughput", "{:.1f}"),
    "end_to_end": Number("end-to-end tok/s", "end_to_end", "{:.1f}"),
    "wall": Number("wall ms/token", "wall_ms", "{:.2f}"),
    "ttft": Number("TTFT ms", "ttft_ms", "{:.1f}"),
    "tpot": Number("TPOT ms", "tpot_ms", "{:.2f}"),
    "tokens_per_iter": Number("tok/iter", "tokens_per_iter", "{:.2f}"),
    "path_length": Number("path", "path_length", "{:.2f}"),
    "acceptance": Number("accept", "acceptance", "{:.2f}"),
    "matching": Number("match", "matching", "{:.2f}"),
    "code_acceptance": Number("accept (code)", "code_acceptance", "{:.1%}"),
    "draft_nodes": Number("nodes", "draft_nodes", "{:.1f}"),
    "iterations": Number("iters", "iterations", "{:.0f}"),
    "draft_passes": Number("passes", "draft_passes", "{:.2f}"),
    "draft": Number("draft ms", "draft_ms", "{:.2f}"),
    "verify": Number("verify ms", "verify_ms", "{:.2f}"),
    "other": Number("other ms", "other_ms", "{:.2f}"),
    "repetition": Number("repeat", "repetition", "{:.2f}"),
    "peak": Number("peak MB", "peak_mb", "{:.0f}"),
    "floor": Number("weights + caches MB", "floor_mb", "{:.0f}"),
    "pools": Number("graph pools MB", "pools_mb", "{:.0f}"),
    "context": Number("beside torch MB", "context_mb", "{:.0f}"),
}
RATES = ("throughput", "end_to_end")  # metrics of which more is faster; of times less is


def median_text(found: list[float], form: str) -> str:
    return form.format(statistics.median(found)) if found else ""


def mean_text(found: list[float], form: str) -> str:
    """Mean and standard deviation over the texts, as the papers report them; theirs is that of
    these texts, by their number, and no estimate for others."""
    numbers = [statistics.mean(found)] if found else []
    if len(found) > 1:
        numbers.append(statistics.pstdev(found))
    return " ± ".join(form.format(number) for number in numbers)


def median_cell(number: Number, row: Row) -> str:
    return median_text(row.values(number.metric), number.form)


def mean_cell(number: Number, row: Row) -> str:
    return mean_text(row.values(number.metric), number.form)


def ratio_cell(number: Number, row: Row) -> str:
    """How many times as fast as the baseline, by the means of both."""
    ratio = row.ratio(number.metric)
    if not ratio:  # 0.0 is what is left of figures that are too far apart
        return ""
    return f"{ratio if number.metric in RATES else 1 / ratio:.2f}x"


def pooled_cell(row: Row) -> str:
    """Tokens of all texts / passes of all."""
    means, passes = row.values("tokens_per_iter"), row.values("iterations")
    if not means or not sum(passes):
        return ""
    n_tokens = sum(mean * n for mean, n in zip(means, passes, strict=True))
    return f"{n_tokens / sum(passes):.2f}"


def spread_cell(row: Row) -> str:
    return f"{min(row.speedups):.2f}-{max(row.speedups):.2f}" if row.speedups else ""


def predicted_cell(row: Row) -> str:
    """The median speedup that the forwards' step times alone would give."""
    ratios = []
    for record, ar in row.beside(row.baseline):
        if not record.get("predicted_ms") or not ar.get("predicted_ms"):
            return ""
        ratios.append(ar["predicted_ms"] / record["predicted_ms"])
    return f"{statistics.median(ratios):.2f}x" if ratios and row.speedups else ""


def exact_cell(row: Row) -> str:
    n_compared = len(row.compared())
    return f"{n_compared - len(row.differing())}/{n_compared}" if n_compared else ""


def more_memory_cell(row: Row) -> str:
    ratio = row.ratio("peak_mb")
    return "" if ratio is None else f"{ratio - 1:+.1%}"


def setup_cell(row: Row) -> str:
    return "" if row.setup_s is None else f"{row.setup_s:.2f}"


PLAIN = {name: Column(n.title, partial(median_cell, n)) for name, n in NUMBERS.items()}
PLAIN |= {
    "speedup": Column("x ar", lambda row: median_text(row.speedups, "{:.2f}x")),
    "spread": Column("min-max", spread_cell),
    "predicted": Column("predicted", predicted_cell),
    "setup": Column("set-up s", setup_cell),
    "tokens_pooled": Column("tok/iter pooled", pooled_cell),
    "exact": Column("exact", exact_cell),
    "more_memory": Column("over ar", more_memory_cell),
}
MEANS = {
    f"{name}_mean": Column(f"{n.title} mean", partial(mean_cell, n)) for name, n in NUMBERS.items()
}
MEANS["speedup_mean"] = Column("x ar mean", lambda row: mean_text(row.speedups, "{:.2f}x"))
SPEEDUPS = {  # titled without the unit
    f"{name}_speedup": Column(f"{n.title.split()[0]} x ar", partial(ratio_cell, n))
    for name, n in NUMBERS.items()
    if name in ("throughput", "end_to_end", "wall")
}
COLUMNS = PLAIN | MEANS | SPEEDUPS


def published(name: str) -> Column:
    """What a paper printed in a column; its speed-ups are over a baseline of its own."""
    title = "paper " + COLUMNS[name].title.replace("x ar", "x")
    return Column(title, lambda row: shown(row.run.published.get(name, "")))


def require_columns(names: Sequence[str]) -> None:
    """Raise UsageError for a name that is no column's."""
    for name in names:
        if name not in COLUMNS:
            there = f"there are {', '.join(PLAIN)}, and the _mean and _speedup of some (--tables)"
            raise UsageError(f"unknown column {name!r}; {there}")
