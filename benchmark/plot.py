"""Draw results files as PNG figures, beside each file or in another folder.

    python -m benchmark.plot results/main_cpu.jsonl  # main_cpu.png, main_cpu_depth.png, ...

Which figures there are follows from what a file varies: benchmark/figures.py.
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
    """Carry out the command line, once parsed. Returns the exit status."""
    for path, figure in drawn(args.files, args.output).items():
        content = io.BytesIO()
        figure.savefig(content, format="png")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content.getvalue())
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        print(printable(str(path)))
    return 0


def drawn(files: Sequence[str], output: str | None) -> dict[Path, "Figure"]:
    """Every figure, by where it goes. Raises UsageError if two would go there."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook sets one for its shells that may not be there
    try:
        figures = importlib.import_module("benchmark.figures")
    except ImportError as error:
        what = "figures need seaborn: pip install seaborn==0.13.2"
        raise UsageError(f"{what} ({first_line(error)})") from error
    found = {}
    for name in files:
        for ending, figure in figures.draw(load(name)).items():
            path = Path(output or Path(name).parent) / f"{Path(name).stem}{ending}.png"
            if path in found:
                what = f"{path} is to be a figure of {name}, and of another file"
                raise UsageError(f"{what}; draw it into another folder (--output)")
            found[path] = figure
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmark.plot", description="Draw results files as PNG figures."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of bench.py")
    parser.add_argument("--output", metavar="FOLDER", help="instead of beside the file")
    return run_command_line(execute, parser, arguments)
