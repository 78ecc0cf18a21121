"""Command line options of bench.py, and the options that a results file records.

from benchmark.results import load

args = build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"])
args = read_options(load("results/main_cpu.jsonl").head)  # as it was measured
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from benchmark.cases import HEAD, PRESETS, TABLES, UNAVAILABLE
from benchmark.columns import BASE_COLUMNS, MEANS, SPEEDUPS
from benchmark.hf import HF_METHODS
from benchmark.machine import ROOT
from benchmark.prepare import PAIRS, UNRECORDED_OPTIONS
from benchmark.prompts import DATASETS
from benchmark.results import Head
from cli.errors import Parser, UsageError
from cli.options import add_graphs_option, add_model_options
from engine.generation_config import FLAGS

MAX_COUNT = 10**12  # prompts or tokens
MAX_ROUNDS = 10_000
MAX_SEED = 10**12  # plus any prompt and round, stays below 2^63
MAX_TEMPERATURE = 1_000_000


def build_parser() -> Parser:
    parser = Parser(
        prog="bench.py",
        description="Compare the speed of methods with ar on the same prompts.",
    )
    parser.less_memory = "a 16-bit --dtype, fewer --max-new-tokens, a smaller --target"
    add = parser.add_argument
    add("--table", default="main", metavar="T", help="table, see --tables (default main)")
    add("--tables", action="store_true", help="list tables and columns, and exit")
    options = (*FLAGS, "window=N", "sinks=S", HEAD)
    words = " ".join(f"[{word}]" for word in options if word != "keep")
    rows = f'table rows, each "method NAME=VALUE ... {words}" (default: the table\'s)'
    add("--methods", metavar="M,...", help=rows)
    add("--columns", metavar="C,...", help="columns to show, see --tables (default: the table's)")
    add("--hf", action="store_true", help=f"add rows {', '.join(HF_METHODS)} (need transformers)")
    base = "row that speed-ups are relative to (default ar)"
    add("--baseline", type=normalize_spaces, metavar="M", help=base)
    add("--dataset", metavar="D", help=f"{', '.join(DATASETS)} (default: the table's)")
    add(
        "--prompts", metavar="FILE", help='prompts: lines of JSON ("prompt", "turns") or plain text'
    )
    add("--n-prompts", type=count, metavar="N", help="number of prompts (default: the table's)")
    add("--prompt-tokens", type=list_of(count), metavar="N,...", help="lengths to cut prompts to")
    lengths = {"dest": "new_tokens", "type": list_of(count)}  # the name in results files
    add("--max-new-tokens", **lengths, metavar="N,...", help="tokens to generate")
    greedy = "0 is greedy (default: the table's)"
    add("--temperature", type=list_of(temperature), metavar="X,...", help=greedy)
    add("--top-p", type=float, metavar="P", help="nucleus sampling (default 1)")
    add("--seed", type=seed, metavar="N", help="first random seed (default 0)")
    add("--repeats", type=rounds, default=1, metavar="N", help="rounds over prompts (default 1)")
    add("--pair", choices=PAIRS, help="target and draft by name")
    add_model_options(parser)
    head = "EAGLE head of rows with the word head (default: the embedded one)"
    add("--head", metavar="FOLDER", help=head)
    add_graphs_option(parser)
    add("--output", metavar="FILE", help="results file (default results/run_<time>_<table>.jsonl)")
    add("--resume", metavar="FILE", help="continue the interrupted run of a results file")
    add("--show", metavar="FILE", help="print the table of a results file, and exit")
    formats = ("text", "markdown")
    add("--format", choices=formats, default="text", help="format of the table (default text)")
    return parser


def normalize_spaces(text: str) -> str:
    """Return a text with single spaces between its words. Raises argparse.ArgumentTypeError if it
    has none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return " ".join(text.split())


def count(text: str) -> int:
    """Return a whole number from 1 to MAX_COUNT. Raises argparse.ArgumentTypeError."""
    return whole_number(text, 1, MAX_COUNT)


def rounds(text: str) -> int:
    """Return a whole number from 1 to MAX_ROUNDS. Raises argparse.ArgumentTypeError."""
    return whole_number(text, 1, MAX_ROUNDS)


def seed(text: str) -> int:
    """Return a whole number from 0 to MAX_SEED. Raises argparse.ArgumentTypeError."""
    return whole_number(text, 0, MAX_SEED)


def whole_number(text: str, low: int, high: int) -> int:
    """Return a whole number from low to high. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"\d{1,18}", text) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {low} to {high:,}")
    return int(text)


def temperature(text: str) -> float:
    """Return a number from 0 to MAX_TEMPERATURE. Raises argparse.ArgumentTypeError."""
    if not 0 <= float(text) <= MAX_TEMPERATURE:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to {MAX_TEMPERATURE:,}")
    return float(text)


def list_of(kind: Callable[[str], float]) -> Callable[[str], list]:
    """Return a parser of a comma-separated list of different numbers. kind: parses one."""

    def number(text: str) -> list:  # argparse's messages include this name
        found = [kind(part) for part in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} has a number twice")
        return found

    return number


def require_alone(args: argparse.Namespace, option: str, allowed: Sequence[str] = ()) -> None:
    """Raise UsageError for options that have no effect together with this one."""
    defaults = build_parser().parse_args([])
    for name, value in vars(args).items():
        given = option_of(name)
        if given != option and name not in allowed and value != getattr(defaults, name):
            raise UsageError(f"{given} has no effect with {option}")


def option_of(name: str) -> str:
    """Return the option that sets an attribute of the parsed command line."""
    return "--max-new-tokens" if name == "new_tokens" else f"--{name.replace('_', '-')}"


def read_options(head: Head) -> argparse.Namespace:
    """Return the options that a results file was measured with, parsed and checked like a command
    line because the file is untrusted. Raises UsageError."""
    words = []
    known = vars(build_parser().parse_args([])).keys() - set(UNRECORDED_OPTIONS)
    for name, value in head.options.items():
        option = option_of(name)
        if name not in known:
            raise UsageError(f"the options of the file have an unknown {option}")
        if value is True:
            words.append(option)
        else:
            values = value if isinstance(value, list) else [value]
            words.append(f"{option}={','.join(map(str, values))}")
    args = build_parser().parse_args(words)
    args.threads = args.threads or head.machine["threads"]
    return args


def choose_file(args: argparse.Namespace) -> Path:
    """Return the path of the results file: --output, or a name with the time in microseconds,
    because several runs may start in one second."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return Path(args.output or ROOT / "results" / f"run_{stamp}_{args.table}.jsonl")


def describe_tables() -> str:
    """Return the output of --tables."""
    sections = {
        "tables of this project:": {name: table.title for name, table in TABLES.items()},
        "tables of the papers, shown with published figures:": {
            name: table.title_with("your --draft") for name, table in PRESETS.items()
        },
        "unavailable tables of the papers, and what they need:": UNAVAILABLE,
        "columns, with their titles:": {n: column.title for n, column in BASE_COLUMNS.items()}
        | describe_variants(),
    }
    lines = []
    for heading, titles in sections.items():
        lines.append(heading)
        for name, title in titles.items():
            lines.append(textwrap.fill(f"  {name:<18} {title}", 80, subsequent_indent=" " * 21))
        lines.append("")
    return "\n".join(lines).strip()


def describe_variants() -> dict[str, str]:
    """Return the descriptions of the columns NAME_mean and NAME_speedup."""
    means = ", ".join(name.removesuffix("_mean") for name in MEANS)
    speedups = ", ".join(name.removesuffix("_speedup") for name in SPEEDUPS)
    return {
        "NAME_mean": f"mean ± standard deviation over the texts; for {means}",
        "NAME_speedup": f"x ar, as a ratio of means; for {speedups}",
    }
