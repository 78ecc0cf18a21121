"""bench.py's options: read, checked, and made into a table to measure; or a file shown again.

args = build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"])
with ExitStack() as held:
    results, pair, prompts, file = open_table(args, held)
"""

import argparse
import hashlib
import os
import shutil
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch

from benchmark.columns import COLUMNS
from benchmark.documents import write_documents
from benchmark.enlarged import enlarged_pair
from benchmark.machine import ROOT, describe_machine
from benchmark.peers import PEERS, check_vocabularies, require_transformers
from benchmark.presets import NOT_HERE, PRESETS
from benchmark.prompts import DATASETS, cut_prompts, lengthened, load_prompts
from benchmark.report import markdown_report, text_report
from benchmark.results import Results, Run
from benchmark.resume import require_possible, require_same
from benchmark.rows import SIZED_WORDS, choose_runs, settings_of, window_of
from benchmark.shard import on_own_device, require_sharable
from benchmark.tables import (
    TABLES,
    Part,
    Table,
    choose_columns,
    choose_parts,
    parse_sizes,
    parse_temperatures,
    with_controls,
)
from benchmark.turns import Prompts
from cli.errors import Parser, UsageError, say
from cli.models import Pair, choose_device, choose_dtype, open_pair
from cli.options import add_model_options, choose_sampling, require_drawing
from engine.files import locked, remove
from engine.sampling import LAST_SEED
from parallel.ranks import read_number
from parallel.target import Mail

MOST_REPEATS = 10**12
# Options that decide no figure
ABOUT_THE_CALL = ("output", "resume", "show", "format", "docs", "shard")


def build_parser() -> Parser:
    parser = Parser(
        prog="bench.py",
        description="Measure every method beside ar, prompt by prompt in turn.",
        epilog=describe_tables(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.less_memory = "a 16-bit --dtype, fewer --new-tokens, a smaller --target"
    add = parser.add_argument
    add("--table", default="main", metavar="T", help="one of those below (main)")
    rows = 'rows, each "method NAME=VALUE ... [rebuild] [eager] [strict] [window=N] [sinks=S]"'
    add("--methods", metavar="M,...", help=rows)
    add("--columns", metavar="C,...", help="columns to show")
    add("--strict", action="store_true", help="every row strict, held against strict ar")
    add("--window", type=int, metavar="N", help="every row over a window, held against ar over it")
    add("--sinks", type=int, metavar="N", help="and with a window the first N tokens (4)")
    add("--peers", action="store_true", help=f"also {', '.join(PEERS)}; needs transformers")
    add("--dataset", metavar="D", help=f"{', '.join(DATASETS)} (the table's, most often builtin)")
    add("--prompts", metavar="FILE", help='.jsonl with "prompt" fields, or text in paragraphs')
    add("--n-prompts", type=int, metavar="N", help="prompts, evenly spread over the dataset")
    add("--prompt-tokens", metavar="N,...", help="lengths to cut the prompts to")
    add("--new-tokens", metavar="N,...", help="tokens to generate")
    add("--temperature", metavar="X,...", help="0 is greedy (0)")
    add("--top-p", type=float, metavar="P", help="of the sampled runs (1)")
    add("--seed", type=int, metavar="N", help="of the sampled runs; each prompt has its own (0)")
    add("--draft-temperature", type=float, metavar="X", help="of what sampled runs draw (the same)")
    add("--repeats", type=int, default=1, metavar="N", help="rounds over all prompts (1)")
    add_model_options(parser)
    shard = "under torchrun: each process takes prompts of its own, with a pair on its own device"
    add("--shard", choices=("prompts",), help=shard)
    add("--output", metavar="FILE", help="results file (results/run_<time>_<table>.json)")
    add("--resume", metavar="FILE", help="go on with an interrupted table, its options included")
    add("--show", metavar="FILE", help="print a results file's table again; measures nothing")
    add("--format", choices=("text", "markdown"), default="text", help="of the table printed")
    docs = "write docs/results.md from these files, and README's table from the first"
    add("--docs", nargs="+", metavar="FILE", help=docs)
    return parser


def describe_tables() -> str:
    """The end of --help: every table and every column."""
    titles = {name: table.title for name, table in TABLES.items()}
    papers = {name: table.title for name, table in PRESETS.items()}
    lines = ["tables:"] + describe(titles, 9)
    lines += ["", "the papers' own, beside what they print:"] + describe(papers, 14)
    lines += ["", "and what theirs need that is not here:"] + describe(NOT_HERE, 14)
    lines += ["", textwrap.fill(f"columns: {', '.join(COLUMNS)}", 80, subsequent_indent="  ")]
    return "\n".join(lines)


def describe(titles: dict[str, str], width: int) -> list[str]:
    """A paragraph for each name, all as far to the right."""
    margin = " " * (width + 3)
    paragraphs = []
    for name, title in titles.items():
        head = f"  {name:<{width}} "
        paragraphs.append(textwrap.fill(head + title, 80, subsequent_indent=margin))
    return paragraphs


def is_about_files(args: argparse.Namespace) -> bool:
    """Whether results files are to be shown or written up, and nothing measured."""
    return args.show is not None or args.docs is not None


def show_files(args: argparse.Namespace) -> None:
    """Carry out --show or --docs."""
    if args.docs is not None:
        require_alone(args, "--docs", ())
        write_documents(ROOT, args.docs)
        return
    require_alone(args, "--show", ("columns", "format"))
    results = Results.load(args.show)
    results.columns = choose_columns(args.columns, results.columns)
    show(results, args.format)


def show(results: Results, kind: str) -> None:
    """Print the table; kind: text or markdown."""
    if kind == "markdown":
        print(markdown_report(results), flush=True)
    else:
        print(text_report(results, shutil.get_terminal_size().columns), flush=True)


def open_table(
    args: argparse.Namespace, held: ExitStack, mail: Mail | None = None
) -> tuple[Results, Pair, Prompts, Path]:
    """Check the options, load models and prompts; continue a results file or begin one.

    Returns the results so far, the models, the prompts' ids by dataset, and the results file, which
    no other run can write before `held` ends. mail: to the ranks that compute the target, if any.
    """
    previous = None
    if args.resume is not None:
        previous = open_previous(args, held)
        args = recorded_arguments(args, previous.options)
        args.threads = args.threads or recorded_threads(previous)
    plan = make_plan(args, mail)
    file = choose_file(args, held)
    results, pair, prompts = open_plan(args, plan, mail)
    if previous:
        require_same(previous, results)
        previous.options = results.options  # with those that there were not before
        require_possible(previous, prompts, pair.target.config.vocab_size)
        return previous, pair, prompts, file
    held.callback(remove_unless_begun, file)
    results.save(file)  # now, so that a file that cannot be written costs no measurement
    return results, pair, prompts, file


def open_share(
    args: argparse.Namespace, options: dict, done: Sequence[dict]
) -> tuple[Results, Pair, Prompts]:
    """The same on a rank that keeps no file, told which options and which texts rank 0 has."""
    args = recorded_arguments(args, options)
    results, pair, prompts = open_plan(args, make_plan(args))
    results.records += done
    return results, pair, prompts


@dataclass(frozen=True)
class Plan:
    """What is to be measured, checked before anything is loaded or written."""

    table: Table
    runs: list[Run]
    texts: dict[str, list[str]]  # by dataset


def make_plan(args: argparse.Namespace, mail: Mail | None = None) -> Plan:
    """Raises UsageError."""
    table = choose_table(args)
    runs = choose_runs(table, args.methods, args.peers, words_everywhere(args))
    check_options(args, table, runs)
    if args.table == "enlarged" and args.target is None and args.draft is None:
        args.target, args.draft = enlarged_pair()
    if table.is_memory and mail:
        raise UsageError(f"--table {args.table} measures processes of its own: leave out torchrun")
    texts = {}
    for part in table.parts:
        texts[part.dataset] = load_prompts(part.dataset, args.prompts, part.n_prompts)
    check_last_seed(args, table, texts)
    return Plan(table, runs, texts)


def open_plan(
    args: argparse.Namespace, plan: Plan, mail: Mail | None = None
) -> tuple[Results, Pair, Prompts]:
    """Results of which there are none yet, the models, the prompts' ids by dataset."""
    table, runs = plan.table, plan.runs
    pair, models = open_pair(on_own_device(args), is_drafting=True, say=say, mail=mail)
    machine = describe_machine(pair, models, has_peers(runs))
    check_vocabularies([run.method for run in runs], pair)
    for run in runs:
        window_of(run, pair)  # which raises UsageError if there can be none such
    warn_of_positions(pair, runs)
    prompts, described = cut_all(table, plan.texts, pair)
    options = plain_options(vars(args))
    results = Results(args.table, table.columns, options, machine, described, table.sizes(), runs)
    results.is_memory = table.is_memory
    if args.table in PRESETS:
        results.title = table.title
    return results, pair, prompts


def choose_table(args: argparse.Namespace) -> Table:
    """The table asked for, with the columns, datasets and sizes asked for. Raises UsageError."""
    tables = TABLES | PRESETS
    if args.table in NOT_HERE:
        raise UsageError(f"--table {args.table} is not here: it needs {NOT_HERE[args.table]}")
    if args.table not in tables:
        raise UsageError(f"unknown table {args.table!r}; there are {', '.join(tables)}")
    device = choose_device(args.device)
    is_half = choose_dtype(args.dtype, device) != torch.float32
    table = with_controls(tables[args.table], device.type == "cuda", not args.no_graphs, is_half)
    parts = []
    for part in choose_parts(table, args.dataset, args.prompts):
        parts.append(choose_sizes(part, args))
    columns = choose_columns(args.columns, table.columns)
    return replace(table, columns=columns, parts=tuple(parts))


def choose_sizes(part: Part, args: argparse.Namespace) -> Part:
    """A part with the sizes asked for. Raises UsageError."""
    if args.n_prompts is not None:
        part = replace(part, n_prompts=args.n_prompts)
    if args.draft_temperature is not None:
        part = replace(part, draft_temperature=args.draft_temperature)
    chosen = replace(
        part,
        prompt_tokens=parse_sizes(args.prompt_tokens, part.prompt_tokens, "--prompt-tokens"),
        new_tokens=parse_sizes(args.new_tokens, part.new_tokens, "--new-tokens"),
        temperature=parse_temperatures(args.temperature, part.temperature),
    )
    if chosen.temperature != part.temperature:  # what a paper printed is of its own
        chosen = replace(chosen, published={})
    return chosen


def words_everywhere(args: argparse.Namespace) -> list[str]:
    """What the options add to every row."""
    words = []
    if args.strict:
        words.append("strict")
    for name in SIZED_WORDS:
        value = getattr(args, name)
        if value is not None:
            words.append(f"{name}={value}")
    return words


def has_peers(runs: Sequence[Run]) -> bool:
    return any(run.method in PEERS for run in runs)


def check_options(args: argparse.Namespace, table: Table, runs: Sequence[Run]) -> None:
    """Raise UsageError for options that are wrong together, or that nothing would use."""
    if args.shard is not None:
        require_sharable(args, table)
    sizes = table.sizes()
    hot = [value for value in sizes["temperature"] if value]
    is_varied = any(len(values) > 1 for values in sizes.values())
    if args.table == "steps" and (runs or hot or is_varied):
        raise UsageError("--table steps runs no methods, and at one length")
    if has_peers(runs):
        check_peers(args, table, is_sampling=bool(hot))
    for value in hot or [0.0]:
        choose_sampling(value, args.top_p, args.seed, args.draft_temperature)
    if args.draft_temperature is not None:
        for run in runs:
            if run.temperature and run.method != "ar":
                require_drawing(run.label, settings_of(run).rule())
    if args.prompts is not None and args.dataset not in (None, DATASETS[0]):
        raise UsageError("give either --dataset or --prompts")
    if not 1 <= args.repeats <= MOST_REPEATS:  # with more, its progress is no float
        raise UsageError(f"--repeats {args.repeats}: 1 to {MOST_REPEATS}")
    if min(part.n_prompts for part in table.parts) < 1:
        raise UsageError("--n-prompts is at least 1")
    device = choose_device(args.device)
    if device.type != "cuda" and any(run.is_eager for run in runs):
        raise UsageError(f'"eager" has no effect on {device}: only cuda has graphs')


def check_last_seed(args: argparse.Namespace, table: Table, texts: dict[str, list[str]]) -> None:
    """Raise UsageError if the seeds of a sampled table, one for each text, would run out."""
    if not any(table.sizes()["temperature"]):
        return
    most = max(min(part.n_prompts, len(texts[part.dataset])) for part in table.parts)
    last = (args.seed or 0) + args.repeats * most - 1
    if last > LAST_SEED:
        why = f"each text has its own, and the last would have {last}, past 2^63 - 1"
        raise UsageError(f"--seed {args.seed or 0}: {why}")


def check_peers(args: argparse.Namespace, table: Table, is_sampling: bool) -> None:
    """Raise UsageError where transformers cannot be measured."""
    names = ", ".join(PEERS)
    if table.is_memory:
        raise UsageError(f"--table {args.table} does not measure {names}")
    if is_sampling:
        raise UsageError(f"{names} are measured at temperature 0 only")
    if args.window is not None:
        raise UsageError(f"{names} have no --window")
    require_transformers()


def open_previous(args: argparse.Namespace, held: ExitStack) -> Results:
    """The results to go on with, kept from every other run. Raises UsageError."""
    require_alone(args, "--resume", ("format", "shard"))
    Results.load(args.resume)  # before anything is made beside it
    keep(Path(args.resume), held)
    return Results.load(args.resume)  # as the run left it that may have kept it before


def recorded_arguments(args: argparse.Namespace, options: dict) -> argparse.Namespace:
    """The call that began a table, read again from what its file says of it. Raises UsageError."""
    known = vars(build_parser().parse_args([]))
    words = []
    for name, value in plain_options(options).items():
        if name not in known:
            raise UsageError(f"{args.resume}: there is no option {name!r}")
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    found = build_parser().parse_args(words)
    for name in ABOUT_THE_CALL:
        setattr(found, name, getattr(args, name))
    return found


def recorded_threads(previous: Results) -> int | None:
    """Those of an interrupted table that did not ask for any: torchrun gives a process others than
    it has by itself. None if this machine has fewer."""
    n_threads = previous.machine["threads"]
    return n_threads if n_threads <= (os.cpu_count() or 1) else None


def restarted(args: argparse.Namespace) -> argparse.Namespace:
    """The options; to go on, if torchrun has started all ranks again (its --max-restarts)."""
    is_again = args.shard is not None and read_number("TORCHELASTIC_RESTART_COUNT", 0) > 0
    if is_again and args.output is not None and os.path.exists(args.output):
        words = ["--resume", args.output, "--shard", args.shard, "--format", args.format]
        return build_parser().parse_args(words)
    return args


def choose_file(args: argparse.Namespace, held: ExitStack) -> Path:
    """Where results go, kept from every other run. Raises UsageError rather than overwrite some."""
    if args.resume is not None:
        return Path(args.resume)
    file = name_file(args)
    if os.path.lexists(file) and not os.path.isfile(file):
        raise UsageError(f"{file} is there and is no file; name a new one")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    keep(file, held)
    if os.path.lexists(file):
        raise UsageError(f"{file} exists already; go on with it (--resume) or remove it")
    return file


def name_file(args: argparse.Namespace) -> Path:
    """As asked for, or by the time, to the microsecond: several runs may begin in one second."""
    if args.output is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        return ROOT / "results" / f"run_{stamp}_{args.table}.json"
    if not args.output:
        raise UsageError("--output needs the name of a file")
    return Path(args.output)


def keep(file: Path, held: ExitStack) -> None:
    """Keep a results file from every other run until `held` ends. Raises UsageError."""
    try:
        held.enter_context(locked(file))
    except BlockingIOError as error:
        raise UsageError(f"{file} is being written by another run: let it end first") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


def remove_unless_begun(file: Path) -> None:
    """Leave no results file in which nothing was measured; whatever else is there stays."""
    try:
        is_begun = Results.load(file).is_begun
    except UsageError:
        return
    if not is_begun:
        remove(file)


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
    every: list[list[int]] = []
    for part in table.parts:
        own, name = choose_prompts(texts[part.dataset], pair, part)
        if len(table.parts) > 1:
            name = f"{len(own)} {name}"
        prompts[part.dataset] = own
        names.append(name)
        every += own
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
    shortest = 1
    which = "prompts"
    if is_varied and not is_own:
        shortest = longest
        which = f"prompts of {longest} tokens or more"
    vocab_size = pair.target.config.vocab_size
    prompts = cut_prompts(texts, pair.tokenizer, vocab_size, longest, part.n_prompts, shortest)
    if len(prompts) < part.n_prompts:
        say(f"note: {part.dataset} has {len(prompts)} {which}, not {part.n_prompts}")
    name = part.dataset
    if is_varied and is_own and min(len(prompt) for prompt in prompts) < longest:
        say(f"note: the target writes our own prompts on, to {longest} tokens")
        prompts = lengthened(prompts, pair, longest)
        name += ", written on by the target"
    return prompts, name


def plain_options(options: dict) -> dict:
    """What decides the figures, for the results file; the rest is about this call alone."""
    return {name: value for name, value in options.items() if name not in ABOUT_THE_CALL}


def require_alone(args: argparse.Namespace, option: str, allowed: tuple[str, ...]) -> None:
    """Raise UsageError for options that would have no effect beside this one."""
    unused = build_parser().parse_args([])
    for name, value in vars(args).items():
        given = f"--{name.replace('_', '-')}"
        if given != option and name not in allowed and value != getattr(unused, name):
            raise UsageError(f"{given} has no effect beside {option}")
