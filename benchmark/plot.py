"""Results files as figures, which ones by what a file varies; everything is computed from it.

plot_canvas  what every figure has: title, axes, colours, what was measured on what
plot_bars    throughput, where the time goes, peak memory
plot_lines   by the size of a text or prompt, by depth, by the draft's probability, by rows
plot_sweeps  grids of settings, and each setting by itself

matplotlib is needed here alone, and only when a figure is drawn.

    python -m benchmark.plot results/main_cpu.json  # main_cpu.png, main_cpu_depth.png, ...
"""

if __name__ == "__main__":
    import cli.start  # noqa: F401

import argparse
import importlib
import io
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark import plot_bars, plot_lines, plot_sweeps
from benchmark.columns import values
from benchmark.plot_canvas import DPI
from benchmark.report import contests, name_of, place_of
from benchmark.results import Results, Row
from benchmark.tables import SYMBOLS
from cli.errors import Parser, UsageError, run_command_line, say, shown
from engine.checkpoint import first_line
from engine.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CROWD = 20  # names of rows, beyond which no figure can show all of them
LONGEST = 1000  # characters of a text that is drawn: it takes time, and shows a few hundred
Drawing = Callable[[Results], "Figure"]


def drawings(results: Results) -> dict[str, Drawing]:
    """What can be drawn of a results file, by what its name ends in. Raises UsageError."""
    if results.table == "steps" and results.step_times:
        return {"": plot_lines.staircase}
    rows = results.rows()
    if not rows:
        raise UsageError("the results file has no records yet")
    if values(rows[0], "peak_mb"):
        return {"": plot_bars.memory_bars}
    found: dict[str, Drawing] = {}
    if len({name_of(row) for row in rows}) <= CROWD:
        found |= drawings_of_all(results, rows)
    if contests(results):
        found["_optimum"] = plot_lines.optimum_lines
    return found | drawings_of_sweeps(rows)


def drawings_of_all(results: Results, rows: Sequence[Row]) -> dict[str, Drawing]:
    """Those that show every row."""
    found: dict[str, Drawing] = {}
    sizes = varied_sizes(rows)
    for size in sizes:
        ending = ""
        if len(sizes) > 1:
            ending = f"_{SYMBOLS[size]}"
        found[ending] = partial(plot_lines.size_lines, size=size)
        found[f"{ending}_progress"] = partial(plot_lines.progress_lines, size=size)
    if not sizes:
        found |= drawings_of_bars(rows)
    if plot_lines.by_name(rows, "depths"):
        found["_depth"] = plot_lines.depth_lines
    if plot_lines.summed(rows, "depths", "tried"):
        found["_position"] = plot_lines.position_lines
    if plot_lines.calibrated(rows):
        found["_calibration"] = plot_lines.calibration_lines
    return found


def drawings_of_bars(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Those of the rows that were measured so far."""
    found: dict[str, Drawing] = {}
    if plot_bars.with_metrics(rows, ["throughput"]):
        found[""] = plot_bars.throughput_bars
    if is_ablation(rows) and plot_bars.with_metrics(rows, plot_bars.PROGRESS):
        found[""] = plot_bars.progress_bars
    if plot_bars.timed(rows):
        found["_latency"] = plot_bars.latency_bars
    return found


def varied_sizes(rows: Sequence[Row]) -> list[str]:
    """The sizes that labels name, as they do those of which there are several on one dataset."""
    words = " ".join(place_of(row) for row in rows).split()
    found = []
    for size, symbol in SYMBOLS.items():
        if any(word.startswith(f"{symbol}=") for word in words):
            found.append(size)
    return found


def is_ablation(rows: Sequence[Row]) -> bool:
    """Whether a method is there with parts of it switched off."""
    return any("=off" in name_of(row) for row in rows)


def drawings_of_sweeps(rows: Sequence[Row]) -> dict[str, Drawing]:
    """At each place those of the settings that vary there."""
    places: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        places[place_of(row)].append(row)
    found: dict[str, Drawing] = {}
    endings: set[str] = set()
    for place, there in places.items():
        words = re.sub(r"[^\w=.,-]", " ", place.removeprefix("on ")).split()  # of a file's name
        ending = "".join(f"_{word}" for word in words)
        while ending in endings:  # of a place whose name differs in what was left out
            ending += "_"
        endings.add(ending)
        if plot_sweeps.grid_panels(there):
            found[f"_grid{ending}"] = partial(plot_sweeps.heatmaps, rows=there)
        if plot_sweeps.setting_panels(there):
            found[f"_settings{ending}"] = partial(plot_sweeps.setting_lines, rows=there)
        if plot_sweeps.pass_panels(there):
            found[f"_passes{ending}"] = partial(plot_sweeps.pass_lines, rows=there)
    return found


def execute(args: argparse.Namespace) -> int:
    """Carry out the command line, once parsed. Returns the exit status."""
    owners = {os.path.realpath(name): "a results file" for name in args.files}
    jobs = []
    for name in args.files:
        file = Path(name)
        results = Results.load(file)
        folder = file.parent
        if args.output is not None:
            folder = Path(args.output)
        jobs.append((file, results, choose_paths(file, results, folder, owners)))
    with plain_style():
        for file, results, paths in jobs:
            for path, draw in paths.items():
                save(draw(results), path)
                print(shown(str(path)))
            note_what_is_missing(results, file)
    return 0


def choose_paths(
    file: Path, results: Results, folder: Path, owners: dict[str, str]
) -> dict[Path, Drawing]:
    """Where each figure of a results file goes. owners: what the paths are that are taken; these
    are added to it. Raises UsageError for one that is taken."""
    paths = {}
    for ending, draw in drawings(results).items():
        path = folder / f"{file.stem}{ending}.png"
        place = os.path.realpath(path)
        if place in owners:
            what = f"{path} is to be a figure of {file}, but is {owners[place]}"
            raise UsageError(f"{what}; draw it into another folder (--output)")
        owners[place] = f"a figure of {file}"
        paths[path] = draw
    return paths


def plain_style() -> AbstractContextManager:
    """matplotlib as it comes, however it is set up here: what that asks for, LaTeX or a font, may
    be missing. Raises UsageError."""
    try:
        return importlib.import_module("matplotlib.style").context("default")
    except ModuleNotFoundError as error:
        why = "figures need matplotlib: pip install matplotlib==3.11.2"
        raise UsageError(why) from error
    except Exception as error:  # what does not fit another package raises anything
        why = f"matplotlib does not start ({first_line(error)})"
        raise UsageError(f"{why}; check MPLBACKEND and its installation") from error


def note_what_is_missing(results: Results, file: Path) -> None:
    """Say of a file from before matches were counted why it has fewer figures."""
    if any("depths" in r and "calibration" not in r for r in results.records):
        say(f"note: {file} has no counts for the figures _position and _calibration: measure anew")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, all of it or nothing. Raises UsageError."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a $ in a name begins no formula
        text.set_text(text.get_text()[:LONGEST])
    drawn = io.BytesIO()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        figure.savefig(drawn, dpi=DPI, format="png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    for warning in said[:1]:  # the others are of other characters that no font has
        say(f"note: {path}: {first_line(warning.message)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmark.plot", description="Draw results files as PNG figures."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of bench.py")
    parser.add_argument("--output", metavar="FOLDER", help="instead of beside the file")
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
