"""Command line that draws results files as PNG figures, next to each file or in another folder.

    python -m benchmark.plot results/main_cpu.jsonl  # main_cpu.png, main_cpu_depth.png, ...

benchmark/figures.py chooses the figures by what the cases of a file vary.
"""

if __name__ == "__main__":
    from cli.start import run_program

    run_program("benchmark.plot")

import argparse
import importlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.results import load
from cli.errors import Parser, UsageError, printable, run_command_line
from cli.files import write_whole
from engine.checkpoint import first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def execute(args: argparse.Namespace) -> int:
    """Run the parsed command line and return the exit status."""
    for path, figure in draw_all(args.files, args.output).items():
        content = io.BytesIO()
        figure.savefig(content, format="png")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content.getvalue())
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        print(printable(str(path)))
    return 0


def draw_all(files: Sequence[str], output: str | None) -> dict[Path, "Figure"]:
    """Return every figure by the path of its PNG file. Raises UsageError if two have one path."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook's shells inherit a backend that may be missing
    try:
        figures = importlib.import_module("benchmark.figures")
    except ImportError as error:
        remedy = "use pip install seaborn==0.13.2"
        raise UsageError(f"figures need seaborn; {remedy} ({first_line(error)})") from error
    found = {}
    for name in files:
        for ending, figure in figures.draw(load(name)).items():
            path = Path(output or Path(name).parent) / f"{Path(name).stem}{ending}.png"
            if path in found:
                reason = f"{path} would be a figure of {name} and of another file"
                raise UsageError(f"{reason}; use another folder with --output")
            found[path] = figure
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmark.plot", description="Draw results files as PNG figures."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="results file of bench.py")
    parser.add_argument("--output", metavar="FOLDER", help="another folder for the figures")
    return run_command_line(execute, parser, arguments)
