"""Command line that draws results files as PNG figures, next to each file or in another folder.

    python -m benchmark.plot results/main_cpu.jsonl  # main_cpu.png, main_cpu_depth.png, ...

benchmark/figures.py draws them.
"""

if __name__ == "__main__":
    from cli.start import run_program

    run_program("benchmark.plot")

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from benchmark.results import load
from cli.errors import Parser, UsageError, print_line, run_command_line, writing


def execute(args: argparse.Namespace) -> int:
    """Run the parsed command line and return the exit status."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook's shells inherit a backend that may be missing
    try:
        from benchmark.figures import draw
    except ImportError as error:
        raise UsageError(f"{error}; use pip install seaborn==0.13.2") from error
    for name in args.files:
        results = load(name)
        if not results.texts:
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
        prog="python -m benchmark.plot", description="Draw results files as PNG figures."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="results file of bench.py")
    parser.add_argument("--output", metavar="FOLDER", help="another folder for the figures")
    return run_command_line(execute, parser, arguments)
