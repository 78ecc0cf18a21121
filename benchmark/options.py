"""bench.py's options: read, checked, and made into a table to measure; or a file shown again.

args = build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"])
with ExitStack() as held:
    file, options, previous = open_file(args, held)
    results, pair, prompts = open_table(options)
"""

import argparse
import hashlib
import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import torch

from benchmark.columns import MEANS, PLAIN, SPEEDUPS, require_columns
from benchmark.enlarged import enlarged_pair
from benchmark.machine import ROOT, describe_machine, one_minute_load
from benchmark.peers import PEERS, check_vocabularies, require_transformers
from benchmark.prompts import DATASETS, cut_prompts, lengthened, load_prompts
from benchmark.report import markdown_report, text_report
from benchmark.results import Options, Results, Run
from benchmark.rows import WORDS, choose_runs, split_list, window_of
from benchmark.tables import (
    NOT_HERE,
    PRESETS,
    TABLES,
    Part,
    Table,
    choose_parts,
    with_controls,
)
from cli.errors import Parser, UsageError, say
from cli.models import (
    PYTHIA,
    Opened,
    Pair,
    choose_device,
    choose_dtype,
    embedded_pair,
    open_pair,
)
from cli.options import add_model_options, choose_sampling
from engine.files import locked
from engine.foreign import ForeignFile, convert
from parallel.ranks import Ranks, is_launched

Prompts = dict[str, list[list[int]]]  # their ids, by dataset
PAIRS = {"embedded": embedded_pair, "pythia": lambda: PYTHIA, "enlarged": enlarged_pair}


def build_parser() -> Parser:
    parser = Parser(
        prog="bench.py",
        description="Measure every method beside ar, prompt by prompt in turn.",
    )
    parser.less_memory = "a 16-bit --dtype, fewer --new-tokens, a smaller --target"
    add = parser.add_argument
    add("--table", metavar="T", help="one of those that --tables lists (main)")
    add("--tables", action="store_true", help="list our tables, the papers', and the columns")
    words = " ".join(f"[{word}]" for word in (*WORDS, "window=N", "sinks=S"))
    rows = f'rows, each "method NAME=VALUE ... {words}"'
    add("--methods", metavar="M,...", help=rows)
    add("--columns", metavar="C,...", help="columns to show, of those that --tables lists")
    add("--peers", action="store_true", help=f"also {', '.join(PEERS)}, which need transformers")
    add("--baseline", metavar="M", help="the row of --methods that speed-ups are over (ar)")
    add("--dataset", metavar="D", help=f"{', '.join(DATASETS)} (the table's, most often builtin)")
    add("--prompts", metavar="FILE", help='.jsonl with "prompt" fields, or text in paragraphs')
    add("--n-prompts", type=int, metavar="N", help="prompts, evenly spread over the dataset")
    add("--prompt-tokens", type=several(int), metavar="N,...", help="lengths to cut the prompts to")
    add("--new-tokens", type=several(int), metavar="N,...", help="tokens to generate")
    add("--temperature", type=several(float), metavar="X,...", help="0 is greedy (0)")
    add("--top-p", type=float, metavar="P", help="of the sampled runs (1)")
    add("--seed", type=int, metavar="N", help="of the sampled runs; each prompt has its own (0)")
    add("--repeats", type=int, metavar="N", help="rounds over all prompts (1)")
    add("--pair", choices=PAIRS, help="target and draft by one name")
    add_model_options(parser)
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


def show(results: Results, kind: str) -> None:
    """Print the table; kind: text or markdown."""
    if kind == "markdown":
        print(markdown_report(results), flush=True)
    else:
        print(text_report(results, shutil.get_terminal_size().columns), flush=True)


def open_file(args: argparse.Namespace, held: ExitStack) -> tuple[Path, Options, Results | None]:
    """The results file, which no other run can write before `held` ends; the options to measure
    with; and if an interrupted table goes on, what there is of it. Raises UsageError."""
    if args.resume is None:
        try:
            options = convert(vars(args), "the options", Options)
        except ForeignFile as error:
            said, _, where = str(error).rpartition(" - at `$.")
            option = where.strip("`").partition("[")[0].replace("_", "-")
            raise UsageError(f"{said}, at --{option}") from error
        file = choose_file(args)
        keep(file, held)
        return file, options, None
    require_alone(args, "--resume", "format")
    file = Path(args.resume)
    Results.load(file)  # before anything is made beside it
    keep(file, held)
    previous = Results.load(file)  # as the run left it that may have kept it before
    threads = previous.options.threads or previous.machine["threads"]
    return file, replace(previous.options, threads=threads), previous


def open_table(
    options: Options, ranks: Ranks | None = None, opened: Opened | None = None
) -> tuple[Results, Pair, Prompts]:
    """Check the options, load models and prompts. Returns results of which there are none yet, the
    models, the prompts' ids by dataset. ranks: with whom the target is computed, if there are
    several. opened: the models, if they are loaded.

    Raises UsageError; what is wrong is told before a model is loaded.
    """
    table = choose_table(options)
    runs = choose_runs(table, options)
    check_options(options, table, runs)
    options = name_models(options)
    load = one_minute_load()  # before ours
    options, texts = fetch_texts(options)
    table = choose_table(options)  # as it is with what could be fetched
    runs = choose_runs(table, options)
    pair, models = opened or open_pair(options, is_drafting=True, say=say, ranks=ranks)
    check_vocabularies([run.method for run in runs], pair)
    for run in runs:
        window_of(run, pair)  # which raises UsageError if there can be none such
    warn_of_positions(pair, runs)
    machine = describe_machine(pair, models, has_peers(runs))
    prompts, described = cut_all(table, texts, pair)
    columns = list(table.columns)
    results = Results(options.table, columns, options, machine, described, table.sizes(), runs)
    results.is_memory = table.is_memory
    results.title = describe_preset(options, runs)
    results.load_before = load
    return results, pair, prompts


def describe_preset(options: Options, runs: Sequence[Run]) -> str:
    """Which paper's table it is, if any; whether our own prompts stand in, or it has figures of
    none of these runs."""
    if options.table not in PRESETS:
        return ""
    table = PRESETS[options.table]
    if options.unfetched:
        return f"{table.title}; on our own prompts instead of {', '.join(options.unfetched)}"
    is_bare = not any(run.published for run in runs)
    if is_bare and any(part.printed for part in table.parts):
        return f"{table.title}; its figures are of other prompts, sizes or rows: none is shown"
    return table.title


def name_models(options: Options) -> Options:
    """The options with target and draft of the pair that they or the table name; it may have to be
    made. Raises UsageError."""
    is_unsaid = options.target is None and options.draft is None
    pair = "enlarged" if options.table == "enlarged" and is_unsaid else None
    pair = options.pair or pair
    if pair is None:
        return options
    target, draft = PAIRS[pair]()
    return replace(options, pair=None, target=target, draft=draft)


def fetch_texts(options: Options) -> tuple[Options, dict[str, list[str]]]:
    """The texts by dataset; and the options with those of the table's own datasets that could not
    be fetched, for which ours stand in. Says so. Raises UsageError."""
    texts = {}
    failed = {}
    for part in choose_table(options).parts:
        try:
            texts[part.dataset] = load_prompts(part.dataset, options.prompts, part.n_prompts)
        except UsageError as error:
            if options.dataset or options.prompts:
                raise
            failed[part.dataset] = str(error)
    if not failed:
        return options, texts
    texts[DATASETS[0]] = load_prompts(DATASETS[0], None)
    first, *others = failed
    left_out = f" (rows on {', '.join(others)} are left out)" * bool(others)
    why = "; ".join(failed.values())
    say(f"note: our own prompts stand in for {first}, beside no printed figure{left_out}: {why}")
    return replace(options, unfetched=(*options.unfetched, *failed)), texts


def require_same(previous: Results, now: Results) -> None:
    """Raise UsageError if an interrupted table would go on under other conditions."""
    changed = []
    for name in sorted(previous.machine.keys() | now.machine.keys()):
        before = previous.machine.get(name)
        if before != now.machine.get(name):
            changed.append(f"{name} was {before}")
    for name in ("prompts", "columns", "sizes", "runs"):
        if getattr(previous, name) != getattr(now, name):
            changed.append(f"the {name} were others")
    if changed:
        raise UsageError(f"--resume would mix two conditions: {', '.join(changed)}")


def choose_table(options: Options) -> Table:
    """The table asked for, with the columns, datasets and sizes asked for. Raises UsageError."""
    tables = TABLES | PRESETS
    name = options.table
    if name in NOT_HERE:
        raise UsageError(f"--table {name} is not here: it needs {NOT_HERE[name]}")
    if name not in tables:
        raise UsageError(f"unknown table {name!r}; there are {', '.join(tables)}")
    device = choose_device(options.device)
    is_half = choose_dtype(options.dtype, device) != torch.float32
    table = with_controls(tables[name], device.type == "cuda", is_half)
    columns = choose_columns(options.columns, table.columns)
    return replace(table, columns=columns, parts=choose_parts(table, options))


def choose_columns(text: str | None, default: Sequence[str]) -> list[str]:
    """Columns by name. Raises UsageError."""
    columns = list(default) if text is None else split_list(text, "--columns")
    require_columns(columns)
    return columns


def has_peers(runs: Sequence[Run]) -> bool:
    return any(run.method in PEERS for run in runs)


def check_options(options: Options, table: Table, runs: Sequence[Run]) -> None:
    """Raise UsageError for options that are wrong together."""
    temperatures = table.sizes()["temperature"]
    for value in temperatures:
        if value or not any(temperatures):  # greedy texts beside sampled ones have no use for both
            choose_sampling(value, options.top_p, options.seed, None, None)
    if options.dataset and options.prompts:
        raise UsageError("give either --dataset or --prompts")
    if options.pair and (options.target or options.draft):
        raise UsageError("give either --pair or --target and --draft")
    if options.table == "steps" and runs:
        raise UsageError("--table steps runs no methods")
    if table.is_memory and is_launched():
        raise UsageError(f"--table {options.table} is measured by one process")
    if has_peers(runs):
        if table.is_memory or any(temperatures):
            raise UsageError(f"{', '.join(PEERS)} are measured for speed alone, at temperature 0")
        require_transformers()


def choose_file(args: argparse.Namespace) -> Path:
    """Where results go: as asked for, or named by the time, to the microsecond, as several runs may
    begin in one second. Raises UsageError."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    file = Path(args.output or ROOT / "results" / f"run_{stamp}_{args.table}.json")
    if os.path.lexists(file):
        raise UsageError(f"{file} exists already; name another, or go on with it (--resume)")
    return file


def keep(file: Path, held: ExitStack) -> None:
    """Keep a results file from every other run until `held` ends. Raises UsageError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(file))
    except BlockingIOError as error:
        raise UsageError(f"{file} is being written by another run: let it end first") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


def warn_of_positions(pair: Pair, runs: Sequence[Run]) -> None:
    """Say how long the longest text will be, if the target was not trained for that."""
    lengths = [run.prompt_tokens + run.new_tokens for run in runs if run.window is None]
    longest = max(lengths, default=0)
    trained = pair.target.config.max_positions
    if longest > trained:
        say(f"warning: up to {longest} tokens, but the target was trained for {trained} positions")


def cut_all(table: Table, texts: dict[str, list[str]], pair: Pair) -> tuple[Prompts, dict]:
    """The prompts' ids by dataset, of the texts by dataset; and for the results file whose they
    are, how many, and what tells them from any others."""
    prompts = {}
    names = []
    for part in table.parts:
        own, name = choose_prompts(texts[part.dataset], pair, part)
        prompts[part.dataset] = own
        names.append(f"{len(own)} {name}" if len(table.parts) > 1 else name)
    every = sum(prompts.values(), [])
    sha256 = hashlib.sha256(repr(every).encode()).hexdigest()
    return prompts, {"dataset": ", ".join(names), "n": len(every), "sha256": sha256}


def choose_prompts(texts: list[str], pair: Pair, part: Part) -> tuple[list[list[int]], str]:
    """The prompts as ids, as long as the longest run wants them; and what they are to be called.

    Of several lengths each must be what it says, while a single one is the most: our own prompts
    are then written on, of other texts only the long ones count. Says so, and if there are too few.
    """
    longest = max(part.prompt_tokens)
    is_varied = len(part.prompt_tokens) > 1
    is_own = part.dataset == DATASETS[0]
    shortest = longest if is_varied and not is_own else 1
    vocab_size = pair.target.config.vocab_size
    prompts = cut_prompts(texts, pair.tokenizer, vocab_size, longest, part.n_prompts, shortest)
    if len(prompts) < part.n_prompts:
        enough = f" of {shortest} tokens or more" if shortest > 1 else ""
        say(f"note: {part.dataset} has {len(prompts)} prompts{enough}, not {part.n_prompts}")
    name = part.dataset
    if is_varied and is_own and min(len(prompt) for prompt in prompts) < longest:
        say(f"note: the target writes our own prompts on, to {longest} tokens")
        prompts = lengthened(prompts, pair, longest)
        name += ", written on by the target"
    return prompts, name
