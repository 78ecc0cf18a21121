"""bench.py's options, and what they say of files: shown again, or kept and gone on with.

args = build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"])
with open_file(args) as (file, options, previous):
    results, pair, prompts = open_table(options, previous)
"""

import argparse
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from benchmark.columns import MEANS, PLAIN, SPEEDUPS
from benchmark.machine import ROOT
from benchmark.opening import PAIRS, choose_columns
from benchmark.peers import PEERS
from benchmark.prompts import DATASETS
from benchmark.report import markdown_report, text_report
from benchmark.results import Options, Results
from benchmark.tables import NOT_HERE, PRESETS, TABLES
from cli.errors import Parser, UsageError, reserved, say
from cli.options import add_graphs_option, add_model_options
from engine.foreign import ForeignFile, convert
from engine.way import WORDS
from parallel.ranks import Ranks

LOG_S = 30.0  # between two words of how far a table is, where stderr is no terminal


def build_parser() -> Parser:
    parser = Parser(
        prog="bench.py",
        description="Measure every method beside ar, prompt by prompt in turn.",
    )
    parser.less_memory = "a 16-bit --dtype, fewer --new-tokens, a smaller --target"
    add = parser.add_argument
    add("--table", metavar="T", help="one of those that --tables lists (main)")
    add("--tables", action="store_true", help="list our tables, the papers', and the columns")
    words = " ".join(f"[{word}]" for word in (*WORDS, "window=N", "sinks=S") if word != "keep")
    rows = f'rows, each "method NAME=VALUE ... {words}"'
    add("--methods", metavar="M,...", help=rows)
    add("--columns", metavar="C,...", help="columns to show, of those that --tables lists")
    add("--peers", action="store_true", help=f"also {', '.join(PEERS)}, which need transformers")
    add("--baseline", metavar="M", help="the row of --methods that speed-ups are over (ar)")
    add("--dataset", metavar="D", help=f"{', '.join(DATASETS)} (the table's, most often builtin)")
    add("--prompts", metavar="FILE", help='.jsonl with "prompt" or "turns", or text in paragraphs')
    add("--n-prompts", type=int, metavar="N", help="prompts, evenly spread over the dataset")
    add("--prompt-tokens", type=several(int), metavar="N,...", help="lengths to cut the prompts to")
    add("--new-tokens", type=several(int), metavar="N,...", help="tokens to generate")
    add("--temperature", type=several(float), metavar="X,...", help="0 is greedy (0)")
    add("--top-p", type=float, metavar="P", help="of the sampled runs (1)")
    add("--seed", type=int, metavar="N", help="of the sampled runs; each prompt has its own (0)")
    add("--repeats", type=int, metavar="N", help="rounds over all prompts (1)")
    add("--pair", choices=PAIRS, help="target and draft by one name")
    add_model_options(parser)
    add_graphs_option(parser)
    add("--output", metavar="FILE", help="results file (results/run_<time>_<table>.json)")
    add("--resume", metavar="FILE", help="go on with an interrupted table, its options included")
    add("--show", metavar="FILE", help="print a results file's table again; measures nothing")
    add("--format", choices=("text", "markdown"), default="text", help="of the table printed")
    parser.set_defaults(**asdict(Options()))
    return parser


def several(kind: type) -> Callable[[str], tuple]:
    """The reader of an option's list of such numbers, each once; Options says what they may be."""

    def number(text: str) -> tuple:  # argparse names what is none, and calls it so
        found = tuple(kind(part) for part in text.split(","))
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice")
        return found

    return number


def describe_tables() -> str:
    """What --tables prints."""
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
            lines.append(textwrap.fill(f"  {name:<15} {title}", 80, subsequent_indent=" " * 18))
        lines.append("")
    return "\n".join(lines).strip()


def described_variants() -> dict[str, str]:
    """Which columns are made of others, and how."""
    means = ", ".join(name.removesuffix("_mean") for name in MEANS)
    speedups = ", ".join(name.removesuffix("_speedup") for name in SPEEDUPS)
    return {
        "NAME_mean": f"mean ± standard deviation over the texts: {means}",
        "NAME_speedup": f"x ar, of the means of both: {speedups}",
    }


def show_files(args: argparse.Namespace) -> bool:
    """Carry out --tables or --show; False if there is neither of them."""
    if args.tables:
        require_alone(args, "--tables")
        print(describe_tables())
    elif args.show is not None:
        require_alone(args, "--show", "columns", "format")
        results = Results.load(args.show)
        results.columns = choose_columns(args.columns, results.columns)
        show(results, args.format)
    else:
        return False
    return True


def require_alone(args: argparse.Namespace, option: str, *allowed: str) -> None:
    """Raise UsageError for options that would have no effect beside this one."""
    unused = build_parser().parse_args([])
    for name, value in vars(args).items():
        given = f"--{name.replace('_', '-')}"
        if given != option and name not in allowed and value != getattr(unused, name):
            raise UsageError(f"{given} has no effect beside {option}")


@contextmanager
def open_file(args: argparse.Namespace) -> Iterator[tuple[Path, Options, Results | None]]:
    """The results file, which no other run can write meanwhile; the options to measure with; and
    if an interrupted table goes on, what there is of it. Raises UsageError."""
    if args.resume is None:
        options = read_options(args)
        file = choose_file(args)
        with reserved(file):
            yield file, options, None
        return
    require_alone(args, "--resume", "format")
    file = Path(args.resume)
    Results.load(file)  # before anything is made beside it
    with reserved(file):
        previous = Results.load(file)  # as the run left it that may have kept it before
        threads = previous.options.threads or previous.machine["threads"]
        yield file, replace(previous.options, threads=threads), previous


def read_options(args: argparse.Namespace) -> Options:
    """What decides a table's figures. Raises UsageError, naming the option that is wrong."""
    try:
        return convert(vars(args), "the options", Options)
    except ForeignFile as error:
        said, _, where = str(error).rpartition(" - at `$.")
        option = where.strip("`").partition("[")[0].replace("_", "-")
        raise UsageError(f"{said}, at --{option}") from error


def choose_file(args: argparse.Namespace) -> Path:
    """Where results go: as asked for, or named by the time, to the microsecond, as several runs may
    begin in one second. Raises UsageError."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    file = Path(args.output or ROOT / "results" / f"run_{stamp}_{args.table}.json")
    if os.path.lexists(file):
        raise UsageError(f"{file} exists already; name another, or go on with it (--resume)")
    return file


def progress(texts: Sequence) -> tqdm:
    """These, and on stderr how far they are: on a terminal at once, else now and then."""
    pace = {} if sys.stderr.isatty() else {"mininterval": LOG_S, "delay": LOG_S}
    return tqdm(texts, leave=False, unit="text", **pace)


def show_table(results: Results, kind: str, file: Path, ranks: Ranks | None) -> None:
    """Print what was measured, if anything was, and say how to go on with what lacks. kind: as
    `show` has it. ranks: with whom the target was computed."""
    if not results.is_begun:
        return
    show(results, kind)
    again = ""
    n_lacking = results.n_texts - len(results.records)
    if n_lacking:
        start = ["torchrun", "--nproc-per-node", str(ranks.count)] if ranks else ["python"]
        command = shlex.join([*start, os.path.relpath(ROOT / "bench.py"), f"--resume={file}"])
        again = f"; {n_lacking} texts are lacking; to go on: {command}"
    say(f"results in {file}{again}")


def show(results: Results, kind: str) -> None:
    """Print the table; kind: text or markdown."""
    if kind == "markdown":
        print(markdown_report(results), flush=True)
    else:
        print(text_report(results, shutil.get_terminal_size().columns), flush=True)
