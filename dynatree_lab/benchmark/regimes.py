"""The tables of README.md and docs/results.md: methods where rows cost little and much.

A regime is a pair of models on a machine, at a temperature. Its results file has the methods at
their defaults, then the methods of README's table at settings that were chosen on other prompts.
The enlarged pairs write the embedded pair's greedy text with the embedded pair's trees. So defaults
that were not measured, among them all over a streamed target, are computed from prices.

    python -m dynatree_lab.benchmark.regimes    # prints the tables
"""

if __name__ == "__main__":
    from dynatree_lab.cli.start import run_program

    run_program("dynatree_lab.benchmark.regimes")

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from dynatree_lab.benchmark.report import markdown_lines, median_cell, narrow_cell, text_frame
from dynatree_lab.benchmark.results import Line, Results, load
from dynatree_lab.cli.program import Parser, run_command_line
from dynatree_lab.replay.prices import Prices, fit, x_ar

STREAMED = "streamed"
TITLES = {  # of the columns, by regime
    "embedded": "embedded",
    "enlarged": "enlarged",
    STREAMED: "streamed",
    "sampled": "enlarged, at 0.7",
}
PAPER = "dynatree draft_temperature=1"
MEASURED = ("ar", "auto")  # over a streamed target; what auto drafts depends on times
AS_DEFAULT = (*MEASURED, PAPER)  # rows of README's table that are defaults too
NAMES = {  # of README's rows; a method stands for its last row in a results file
    "linear": "chain (`linear`)",
    "fixed": "tree of fixed breadth (`fixed`)",
    PAPER: "`dynatree`, as in the paper",
    "dynatree": "`dynatree`, draft temperature",
    "dyspec": "`dyspec`, the N likeliest rows",
    "sequoia": "`sequoia`, a planned tree",
    "auto": "`auto`, not from a paper",
}
COMPARED = (
    ("dynatree", "linear"),
    ("dynatree", "fixed"),
    ("dynatree", PAPER),
    ("auto", "dynatree"),
)


def load_runs(folder: Path) -> dict[str, Results]:
    """Return the run of each regime. Raises UsageError."""
    return {name: load(folder / f"regimes_{name}_cpu.jsonl") for name in TITLES}


def chosen_rows(run: Results) -> dict[str, str]:
    """Return the row of each key of NAMES in a run."""
    last = {case.method: case.row for case in run.cases}
    return {name: last.get(name, name) for name in NAMES}


def fit_prices(runs: dict[str, Results]) -> dict[str, Prices]:
    """Return the prices of each regime. Raises ValueError if its texts do not tell them apart."""
    return {name: fit(run.texts.values()).prices for name, run in runs.items()}


def chosen_table(runs: dict[str, Results], frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return README's table: x ar of its rows by regime, of ar tok/s. First it has what a row and a
    draft pass cost, and how much the texts repeat."""
    prices = fit_prices(runs).values()
    ar = [texts[texts.row == "ar"] for texts in frames.values()]
    cells = {
        "price of a row, of a draft pass": [f"{p.row:.2g}, {p.draft_pass:.2g}" for p in prices],
        "repeated 4-grams": [median_cell("repetition", "{:.0%}", texts) for texts in ar],
        "`ar`, in tok/s": [median_cell("throughput", "{:.3g}", texts) for texts in ar],
    }
    rows = [chosen_rows(run) for run in runs.values()]
    for name, title in NAMES.items():
        own = [
            texts[texts.row == row[name]] for texts, row in zip(frames.values(), rows, strict=True)
        ]
        cells[title] = [median_cell("speedup", "{:.2f}x", texts) for texts in own]
    return as_table(cells, TITLES.values())


def settings_table(runs: dict[str, Results]) -> pd.DataFrame:
    """Return the settings that were chosen for README's rows, by regime."""
    rows = [chosen_rows(run) for run in runs.values()]
    searched = [name for name in NAMES if name not in AS_DEFAULT]
    cells = {NAMES[name]: [row[name].partition(" ")[2] for row in rows] for name in searched}
    return as_table(cells, TITLES.values())


def paired_table(runs: dict[str, Results], frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the speed of one of README's rows over that of another, by regime."""
    rows = {name: chosen_rows(run) for name, run in runs.items()}
    cells = {
        f"`{one}` / `{other}`": [
            paired_cell(texts, rows[name][one], rows[name][other]) for name, texts in frames.items()
        ]
        for one, other in COMPARED
    }
    return as_table(cells, TITLES.values())


def paired_cell(texts: pd.DataFrame, row: str, other: str) -> str:
    """Return the quotient of two rows' speeds on the same prompt in the same round: its median with
    quartiles, and after how many prompts its median is above 1."""
    speeds = texts.pivot(index=["prompt", "round"], columns="row", values="throughput")
    quotients = (speeds[row] / speeds[other]).to_frame("quotient")
    by_prompt = quotients.groupby("prompt").quotient.median()
    n_faster = (by_prompt > 1).sum()
    return f"{median_cell('quotient', '{:.2f}', quotients)}, {n_faster} of {len(by_prompt)}"


def default_table(runs: dict[str, Results], frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the table of all methods at their defaults. Medians: rows, draft passes and tokens per
    pass of the embedded pair's greedy text, then x ar by regime, of ar tok/s. A star marks cells
    that are computed from this text, because they were not measured."""
    embedded, prices = frames["embedded"], fit_prices(runs)
    chosen = {row for name, row in chosen_rows(runs["embedded"]).items() if row not in AS_DEFAULT}
    cells = {}
    for row in embedded.row.unique():
        if row in chosen:
            continue
        own = embedded[embedded.row == row]
        texts = [runs["embedded"].texts[key] for key in own.key]
        cells["ar, in tok/s" if row == "ar" else row] = [
            *(narrow_cell(metric, "{:.1f}", own) for metric in ("rows", "draft_passes")),
            narrow_cell("tokens_per_iter", "{:.2f}", own),
            *(default_cell(row, name, frames[name], texts, prices[name]) for name in TITLES),
        ]
    return as_table(cells, ["rows/tree", "passes", "tok/iter", *TITLES.values()])


def default_cell(
    row: str, regime: str, frame: pd.DataFrame, texts: Sequence[Line], prices: Prices
) -> str:
    """Return the measured or computed cell of a row. texts: of the embedded pair. Over a streamed
    target the same texts are computed for all rows, because those that were measured are others."""
    measured = frame[frame.row == row]
    if regime != STREAMED or row in MEASURED:
        metric, form = ("throughput", "{:.3g}") if row == "ar" else ("speedup", "{:.2f}x")
        if len(measured):
            return narrow_cell(metric, form, measured)
    if regime == "sampled" or row in MEASURED:  # sampled texts are others
        return ""
    computed = pd.DataFrame({"speedup": [x_ar(prices, text) for text in texts]}).dropna()
    return f"{narrow_cell('speedup', '{:.2f}x', computed)}*" if len(computed) else ""


def as_table(cells: dict[str, list[str]], columns: Sequence[str]) -> pd.DataFrame:
    table = pd.DataFrame.from_dict(cells, orient="index", columns=list(columns))
    return table.rename_axis(columns="")


def tables_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each table as lines of markdown, with what it is. Raises UsageError."""
    runs = load_runs(folder)
    frames = {name: text_frame(run) for name, run in runs.items()}
    tables = {
        "README's table": chosen_table(runs, frames),
        "its settings": settings_table(runs),
        "its rows in pairs": paired_table(runs, frames),
        "defaults": default_table(runs, frames),
    }
    for title, table in tables.items():
        yield title, "\n".join(markdown_lines(table))


def execute(args: argparse.Namespace) -> int:
    for title, table in tables_of(Path(args.folder)):
        print(f"{title}:\n\n{table}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m dynatree_lab.benchmark.regimes",
        description="Print the tables of README.md and docs/results.md from their results files.",
    )
    where = "folder of the results files (default results)"
    parser.add_argument("folder", nargs="?", default="results", help=where)
    return run_command_line(execute, parser, arguments)
