"""The columns of tables: what each says of one row, as text.

    title, cell = COLUMNS["speedup"].title, COLUMNS["speedup"].cell(row)

What a metric is stands in cli/metrics.py, for readers in docs/results.md.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark.results import Row
from cli.errors import UsageError, shown


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    cell: Callable[[Row], str]  # empty where there is nothing to say


def number(title: str, metric: str, digits: int) -> Column:
    """A column of one metric's medians; empty where it is not measured."""

    def cell(row: Row) -> str:
        value = row.median(metric)
        return "" if value is None else f"{value:.{digits}f}"

    return Column(title, cell)


def mean_cell(found: list[float], digits: int) -> str:
    """Mean and standard deviation over the texts, as the papers report them."""
    numbers = [statistics.mean(found)] if found else []
    if len(found) > 1:
        numbers.append(statistics.stdev(found))
    return " ± ".join(f"{number:.{digits}f}" for number in numbers)


def code_acceptance_cell(row: Row) -> str:
    """The mean, as in table 3, whose figures it is there to be held against."""
    found = row.values("code_acceptance")
    return f"{statistics.mean(found):.1%}" if found else ""


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
    own = row.median("peak_mb")
    ar = [record["metrics"].get("peak_mb") for _, record in row.beside(row.baseline)]
    if own is None or not ar or not all(ar):
        return ""
    return f"{own / statistics.median(ar) - 1:+.1%}"


COLUMNS = {
    "throughput": number("tok/s", "throughput", 1),
    "speedup": Column("x ar", lambda row: f"{row.speedup:.2f}x" if row.speedups else ""),
    "spread": Column("min-max", spread_cell),
    "throughput_mean": Column("tok/s mean", lambda row: mean_cell(row.values("throughput"), 1)),
    "speedup_mean": Column("x ar mean", lambda row: mean_cell(row.speedups, 2)),
    "predicted": Column("predicted", predicted_cell),
    "end_to_end": number("end-to-end tok/s", "end_to_end", 1),
    "setup": Column("set-up s", lambda row: "" if row.setup_s is None else f"{row.setup_s:.2f}"),
    "ttft": number("TTFT ms", "ttft_ms", 1),
    "tpot": number("TPOT ms", "tpot_ms", 2),
    "tokens_per_iter": number("tok/iter", "tokens_per_iter", 2),
    "path_length": number("path", "path_length", 2),
    "acceptance": number("accept", "acceptance", 2),
    "matching": number("match", "matching", 2),
    "code_acceptance": Column("accept (code)", code_acceptance_cell),
    "draft_nodes": number("nodes", "draft_nodes", 1),
    "iterations": number("iters", "iterations", 0),
    "draft_passes": number("passes", "draft_passes", 2),
    "draft": number("draft ms", "draft_ms", 2),
    "verify": number("verify ms", "verify_ms", 2),
    "other": number("other ms", "other_ms", 2),
    "repetition": number("repeat", "repetition", 2),
    "exact": Column("exact", exact_cell),
    "peak": number("peak MB", "peak_mb", 0),
    "more_memory": Column("over ar", more_memory_cell),
    "floor": number("weights + caches MB", "floor_mb", 0),
    "pools": number("graph pools MB", "pools_mb", 0),
    "context": number("beside torch MB", "context_mb", 0),
}

TIMED = ("throughput", "speedup", "spread", "throughput_mean", "speedup_mean", "predicted")
TIMED += ("end_to_end", "setup", "ttft", "tpot", "draft", "verify", "other")  # columns of speed
TIMES = ("throughput", "end_to_end", "ttft_ms", "tpot_ms", "draft_ms", "verify_ms", "other_ms")


def published(name: str) -> Column:
    """What a paper printed in a column; its speed-ups are over a baseline of its own."""
    title = "paper " + COLUMNS[name].title.replace("x ar", "x")
    return Column(title, lambda row: shown(row.run.published.get(name, "")))


def require_columns(names: Sequence[str]) -> None:
    """Raise UsageError for a name that is no column's."""
    for name in names:
        if name not in COLUMNS:
            raise UsageError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
