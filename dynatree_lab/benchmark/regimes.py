"""The table of README.md: the speedup over ar by the cost of a pass of many rows.

An enlarged target writes the embedded pair's text with the embedded pair's trees. So the rows of
every pass are known, and the speed over a target that takes seconds per pass is predicted from
times of single passes. The trees of recycle and graft may differ, because they read the target's
best tokens, whose order rounding may change.

    # prints the table, then that of the less repetitive half of the prompts
    python -m dynatree_lab.benchmark.regimes
"""

if __name__ == "__main__":
    from dynatree_lab.cli.start import run_program

    run_program("dynatree_lab.benchmark.regimes")

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from dynatree_lab.benchmark.report import markdown_lines, median_cell, text_frame
from dynatree_lab.benchmark.results import Results, load
from dynatree_lab.benchmark.step_times import REPORTED_ROWS
from dynatree_lab.cli.program import Parser, run_command_line

TITLES = {  # of the columns, by run
    "embedded": "embedded pair",
    "enlarged": "enlarged (cost of Pythia-410M and 70M)",
    "streamed": "streamed (2.8B from disk in 2 GB), computed",
    "sampled": "temperature 0.7, enlarged",
}
GIVEN_RUN = "auto"  # the embedded pair with auto alone, at costs fitted to the streamed passes
GIVEN = "auto, costs given"  # its row in the streamed column
MEASURED = ("ar", "auto")  # rows of this column that were measured


def load_runs(folder: Path) -> dict[str, Results]:
    """Return the runs of the table by name. Raises UsageError."""
    names = (*TITLES, GIVEN_RUN)
    return {name: load(folder / f"regimes_{name}_cpu.jsonl") for name in names}


def column_frames(runs: dict[str, Results]) -> dict[str, pd.DataFrame]:
    """Return the texts of each column."""
    frames = {name: text_frame(runs[name]) for name in TITLES}
    return frames | {"streamed": streamed_column(runs, frames["streamed"])}


def streamed_column(runs: dict[str, Results], streamed: pd.DataFrame) -> pd.DataFrame:
    """Return the embedded pair's texts, with the speedup predicted from the streamed passes, and
    the MEASURED rows of the streamed texts."""
    times = runs["streamed"].step_times
    computed = text_frame(replace(runs["embedded"], step_times=times))
    given = text_frame(replace(runs[GIVEN_RUN], step_times=times))
    given = given[given.row != "ar"].assign(row=GIVEN)
    computed = pd.concat([computed[~computed.row.isin(MEASURED)], given])
    # They are texts of other prompts, which no half of the table's prompts has
    measured = streamed[streamed.row.isin(MEASURED)].assign(prompt=-1)
    return pd.concat([computed.assign(speedup=computed.predicted), measured])


def less_repetitive(texts: pd.DataFrame) -> list[int]:
    """Return the half of the prompts after which greedy ar repeats fewer 4-grams."""
    by_prompt = texts[texts.row == "ar"].groupby("prompt").repetition.first()
    return sorted(by_prompt.nsmallest(len(by_prompt) // 2).index)


def table_lines(runs: dict[str, Results], frames: dict[str, pd.DataFrame]) -> list[str]:
    """Return the table as lines of markdown."""
    rows = [row for row in frames["embedded"].row.unique() if row not in MEASURED]
    costs = [runs[name].step_times.pass_costs() for name in TITLES]
    costs = [f"{passes}; draft 1/{ratio:.0f}" for passes, ratio in costs]
    cells = {
        f"cost of a pass of {REPORTED_ROWS}": ["", "", *costs],
        "repeated 4-grams": ["", "", *(repetition_cell(name, frames) for name in TITLES)],
        "ar, in tok/s": row_cells("ar", frames),
        **{row: row_cells(row, frames) for row in rows},
        "*not from a paper:*": [""] * (2 + len(TITLES)),
        **{row: row_cells(row, frames) for row in ("auto", GIVEN)},
    }
    columns = ["rows per tree", "tok/iter", *TITLES.values()]
    table = pd.DataFrame.from_dict(cells, orient="index", columns=columns)
    return markdown_lines(table.rename_axis(columns=""))


def repetition_cell(name: str, frames: dict[str, pd.DataFrame]) -> str:
    """Return the repetition of ar's texts in a column; for streamed the embedded pair's, which are
    the same."""
    texts = frames["embedded" if name == "streamed" else name]
    return median_cell("repetition", "{:.0%}", texts[texts.row == "ar"])


def row_cells(row: str, frames: dict[str, pd.DataFrame]) -> list[str]:
    """Return the cells of a row: those of the trees of greedy text, then x ar in each column, of ar
    tok/s."""
    of_row = {name: texts[texts.row == row] for name, texts in frames.items()}
    greedy = of_row["streamed"] if row == GIVEN else of_row["embedded"]
    n_rows = f"{greedy.rows.median():.1f}"
    metric, form = ("throughput", "{:.3g}") if row == "ar" else ("speedup", "{:.2f}x")
    cells = [median_cell(metric, form, of_row[name]) for name in TITLES]
    return [n_rows, median_cell("tokens_per_iter", "{:.2f}", greedy), *cells]


def execute(args: argparse.Namespace) -> int:
    runs = load_runs(Path(args.folder))
    frames = column_frames(runs)
    half = less_repetitive(frames["embedded"])
    less = {name: texts[texts.prompt.isin(half)] for name, texts in frames.items()}
    print("\n".join(table_lines(runs, frames)))
    print(f"\nPrompts {', '.join(map(str, half))}, which repeat less:\n")
    print("\n".join(table_lines(runs, less)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m dynatree_lab.benchmark.regimes",
        description="Print the table of README.md from the results files regimes_*_cpu.jsonl.",
    )
    where = "folder of the results files (default results)"
    parser.add_argument("folder", nargs="?", default="results", help=where)
    return run_command_line(execute, parser, arguments)
