"""bench.py's options, and the options that a results file keeps.

from benchmark.results import load

args = build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"])
args = read_options(load("results/main_cpu.jsonl").head)  # those it was measured with
"""

import argparse
import re
import textwrap
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from benchmark.cases import NOT_HERE, PRESETS, TABLES
from benchmark.columns import MEANS, PLAIN, SPEEDUPS
from benchmark.hf import HF_METHODS
from benchmark.machine import ROOT
from benchmark.opening import OF_THE_CALL, PAIRS
from benchmark.prompts import DATASETS
from benchmark.results import Head
from cli.errors import Parser, UsageError
from cli.options import add_graphs_option, add_model_options
from engine.generation_config import FLAGS

MAX_COUNT = 10**12  # of prompts or tokens
MAX_ROUNDS = 10_000
MAX_SEED = 10**12  # so that every prompt and round has one below 2^63
MAX_TEMPERATURE = 1_000_000


def build_parser() -> Parser:
    parser = Parser(
        prog="bench.py",
        description="Measure every method beside ar, prompt by prompt in turn.",
    )
    parser.less_memory = "a 16-bit --dtype, fewer --new-tokens, a smaller --target"
    add = parser.add_argument
    add("--table", default="main", metavar="T", help="one of those that --tables lists (main)")
    add("--tables", action="store_true", help="list our tables, the papers', and the columns")
    words = " ".join(f"[{word}]" for word in (*FLAGS, "window=N", "sinks=S") if word != "keep")
    rows = f'rows, each "method NAME=VALUE ... {words}"'
    add("--methods", metavar="M,...", help=rows)
    add("--columns", metavar="C,...", help="columns to show, of those that --tables lists")
    add("--hf", action="store_true", help=f"also {', '.join(HF_METHODS)}, which need transformers")
    add("--peers", action="store_true", help=argparse.SUPPRESS)  # its name before
    base = "row that speed-ups are over, as in --methods (ar)"
    add("--baseline", type=single_spaced, metavar="M", help=base)
    add("--dataset", metavar="D", help=f"{', '.join(DATASETS)} (the table's, most often builtin)")
    add("--prompts", metavar="FILE", help='.jsonl with "prompt" or "turns", or text in paragraphs')
    add("--n-prompts", type=count, metavar="N", help="prompts, evenly spread over the dataset")
    add("--prompt-tokens", type=several(count), metavar="N,...", help="lengths to cut prompts to")
    add("--new-tokens", type=several(count), metavar="N,...", help="tokens to generate")
    add("--temperature", type=several(temperature), metavar="X,...", help="0 is greedy (0)")
    add("--top-p", type=float, metavar="P", help="of the sampled texts (1)")
    add("--seed", type=seed, metavar="N", help="of the sampled texts; each prompt has its own (0)")
    add("--repeats", type=rounds, default=1, metavar="N", help="rounds over all prompts (1)")
    add("--pair", choices=PAIRS, help="target and draft by one name")
    add_model_options(parser)
    add_graphs_option(parser)
    add("--output", metavar="FILE", help="results file (results/run_<time>_<table>.jsonl)")
    add("--resume", metavar="FILE", help="go on with an interrupted table, its options included")
    add("--show", metavar="FILE", help="print a results file's table again; measures nothing")
    add("--format", choices=("text", "markdown"), default="text", help="of the table printed")
    return parser


def single_spaced(text: str) -> str:
    """Return words with single spaces between them. Raises argparse.ArgumentTypeError if there are
    none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return " ".join(text.split())


def count(text: str) -> int:
    """Return a whole number from 1 to MAX_COUNT. Raises argparse.ArgumentTypeError."""
    return whole(text, 1, MAX_COUNT)


def rounds(text: str) -> int:
    """Return a whole number from 1 to MAX_ROUNDS. Raises argparse.ArgumentTypeError."""
    return whole(text, 1, MAX_ROUNDS)


def seed(text: str) -> int:
    """Return a whole number from 0 to MAX_SEED. Raises argparse.ArgumentTypeError."""
    return whole(text, 0, MAX_SEED)


def whole(text: str, low: int, high: int) -> int:
    """Return a whole number from low to high. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"\d{1,18}", text) or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {low} to {high:,}")
    return int(text)


def temperature(text: str) -> float:
    """Return a number from 0 to MAX_TEMPERATURE. Raises argparse.ArgumentTypeError."""
    if not 0 <= float(text) <= MAX_TEMPERATURE:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to {MAX_TEMPERATURE:,}")
    return float(text)


def several(kind: Callable[[str], float]) -> Callable[[str], list]:
    """Return the reader of a list of such numbers, each once."""

    def number(text: str) -> list:  # named so because argparse's message has the name
        found = [kind(part) for part in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice")
        return found

    return number


def require_alone(args: argparse.Namespace, option: str, *allowed: str) -> None:
    """Raise UsageError for options that would have no effect beside this one."""
    unused = build_parser().parse_args([])
    for name, value in vars(args).items():
        given = f"--{name.replace('_', '-')}"
        if given != option and name not in allowed and value != getattr(unused, name):
            raise UsageError(f"{given} has no effect beside {option}")


def read_options(head: Head) -> argparse.Namespace:
    """Return the options that a results file was measured with. They are parsed again, as the file
    may come from anybody. Raises UsageError."""
    words = []
    known = vars(build_parser().parse_args([])).keys() - set(OF_THE_CALL)
    for name, value in head.options.items():
        option = f"--{name.replace('_', '-')}"
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
    """Return where results go: as asked for, or named by the time, to the microsecond, because
    several runs may begin in one second."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return Path(args.output or ROOT / "results" / f"run_{stamp}_{args.table}.jsonl")


def describe_tables() -> str:
    """Return what --tables prints."""
    sections = {
        "our own tables:": {name: table.title for name, table in TABLES.items()},
        "the papers', beside what they print:": {n: table.title for n, table in PRESETS.items()},
        "and what theirs need that is not here:": NOT_HERE,
        "columns:": {name: column.title for name, column in PLAIN.items()} | described_variants(),
    }
    lines = []
    for heading, titles in sections.items():
        lines.append(heading)
        for name, title in titles.items():
            lines.append(textwrap.fill(f"  {name:<18} {title}", 80, subsequent_indent=" " * 21))
        lines.append("")
    return "\n".join(lines).strip()


def described_variants() -> dict[str, str]:
    """Return the columns that are made of others, and how."""
    means = ", ".join(name.removesuffix("_mean") for name in MEANS)
    speedups = ", ".join(name.removesuffix("_speedup") for name in SPEEDUPS)
    return {
        "NAME_mean": f"mean ± standard deviation over the texts: {means}",
        "NAME_speedup": f"x ar, of the means of both: {speedups}",
    }
