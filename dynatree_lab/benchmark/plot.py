"""Command line that draws results files as PNG figures, next to each file or in another folder.

    # regimes_embedded_cpu.png, regimes_embedded_cpu_calibration.png
    python -m dynatree_lab.benchmark.plot results/regimes_embedded_cpu.jsonl

benchmark/figures.py draws them.
"""

if __name__ == "__main__":
    from dynatree_lab.cli.start import run_program

    run_program("dynatree_lab.benchmark.plot")

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dynatree_lab.benchmark.results import load
from dynatree_lab.cli.program import Parser, print_line, run_command_line
from dynatree_lab.errors import UsageError, writing


def import_figures() -> ModuleType:
    """Return the module that draws. Raises UsageError if seaborn is missing."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook's shells inherit a backend that may be missing
    try:
        return importlib.import_module("dynatree_lab.benchmark.figures")
    except ImportError as error:
        raise UsageError(f"{error}; use pip install seaborn") from error


def execute(args: argparse.Namespace) -> int:
    draw = import_figures().draw
    for name in args.files:
        results = load(name)
        if not results.texts:  # it was interrupted before its first text
            print_line(f"note: {name} has no texts to draw")
            continue
        for ending, figure in draw(results).items():
            path = Path(args.output or Path(name).parent) / f"{Path(name).stem}{ending}.png"
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path)
            print(path)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m dynatree_lab.benchmark.plot",
        description="Draw results files as PNG figures.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="results file of dynatree-bench")
    parser.add_argument("--output", metavar="FOLDER", help="another folder for the figures")
    return run_command_line(execute, parser, arguments)
