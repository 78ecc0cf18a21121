"""The plan of a table's run: the options, and the cases, models and prompts they choose.

plan = make_plan(build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"]))
plan.prompts["builtin"][0]  # ids
"""

import argparse
import hashlib
import json
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from dynatree_lab.benchmark.cases import (
    CONTROL,
    HEAD,
    PRESETS,
    PRICES,
    TABLES,
    UNAVAILABLE,
    Case,
    Part,
    Table,
    choose_cases,
    choose_parts,
    find_table,
)
from dynatree_lab.benchmark.enlarge import SHAPES, enlarged_pair
from dynatree_lab.benchmark.hf import HF_METHODS
from dynatree_lab.benchmark.machine import describe_machine, one_minute_load, path_from_root
from dynatree_lab.benchmark.prompts import (
    DATASETS,
    cut_prompts,
    encode_valid,
    load_prompts,
    pick_evenly,
)
from dynatree_lab.benchmark.replaying import (
    choose_replayable,
    move_to_texts,
    open_replay,
    read_texts_of,
)
from dynatree_lab.benchmark.report import COLUMNS, WITH_SPEEDUP, column
from dynatree_lab.benchmark.results import FORMAT, Line, Results, load
from dynatree_lab.cli.load import add_load_option, digest_files
from dynatree_lab.cli.options import (
    PAIRS,
    add_model_options,
    embedded_head,
    open_pair,
    require_fit,
    require_one_pair,
    warn_of_length,
)
from dynatree_lab.cli.program import Parser, command_name, print_line
from dynatree_lab.engine.checkpoint import find_checkpoint
from dynatree_lab.engine.ranks import from_rank_0
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import FLAGS, GenerationConfig
from dynatree_lab.methods import METHODS, PROJECT_METHODS
from dynatree_lab.pair import Pair, choose_device, choose_dtype, with_draft
from dynatree_lab.replay.prices import Prices, fit

Prompts = dict[str, list[list[int]]]  # ids of each prompt, by dataset
ALL_PAIRS = PAIRS | {name: partial(enlarged_pair, name) for name in SHAPES}
REPLAY_COLUMNS = ("tokens_per_iter", "rows", "draft_passes")
# Not in a results file: they do not change what is measured; --pair is recorded as its two models
UNRECORDED_OPTIONS = ("output", "resume", "show", "tables", "format", "pair", "record")
PATHS = ("target", "draft", "head")  # options that may be paths


@dataclass(frozen=True)
class Plan:
    """A table that is ready to be measured."""

    args: argparse.Namespace
    head: Line  # of the results file
    pair: Pair
    eagle_pair: Pair | None  # with the EAGLE head as its draft, if a row uses it
    prompts: Prompts
    is_memory_table: bool  # measures peak memory, each text in a new process
    has_invalid_prompts: bool = False  # which were left out


def build_parser() -> Parser:
    parser = Parser(
        prog=command_name("dynatree_lab.benchmark"),
        description="Compare the speed of methods with ar on the same prompts.",
    )
    parser.repeatable = ("--load",)
    parser.less_memory = "a 16-bit --dtype, fewer --max-new-tokens, --target-memory"
    add = parser.add_argument
    add("--table", default="main", metavar="T", help="table, see --tables (default main)")
    fitting = {"action": "store_const", "const": PRICES, "default": "main"}
    add("--measure-prices", dest="table", **fitting, help=f"the same as --table {PRICES}")
    add("--tables", action="store_true", help="list tables and columns, and exit")
    options = (*FLAGS, "window=N", "sinks=S", HEAD)
    words = " ".join(f"[{word}]" for word in options if word != "keep")
    rows = f'table rows, each "method NAME=VALUE ... {words}" (default: the table\'s)'
    add("--methods", type=list_of(words_of), metavar="M,...", help=rows)
    add("--add", type=list_of(words_of), metavar="M,...", help="rows after the table's")
    add_load_option(parser)
    shown = "columns to show by name or title, see --tables (default: the table's)"
    add("--columns", type=list_of(column), metavar="C,...", help=shown)
    prices = "for column x ar computed: I:R:D (docs/results.md), or a results file to fit to"
    add("--prices", metavar="P", help=prices)
    add("--hf", action="store_true", help=f"add rows {', '.join(HF_METHODS)} (need transformers)")
    add("--baseline", type=words_of, metavar="M", help="row of the speed-ups (default ar)")
    source = parser.add_mutually_exclusive_group().add_argument
    source("--dataset", metavar="D", help=f"{', '.join(DATASETS)} (default: the table's)")
    prompts = 'prompts: lines of JSON ("prompt", "turns") or plain text'
    source("--prompts", metavar="FILE", help=prompts)
    replay = "recorded texts (.jsonl) or a text of people, in place of the target (docs/replay.md)"
    source("--replay", metavar="FILE", help=replay)
    recorded = "with --replay or --record: the draft's candidates, recorded if FILE is not there"
    add("--candidates", metavar="FILE", help=recorded)
    add("--record", metavar="FILE", help="write ar's texts for --replay to a new file, and exit")
    add("--n-prompts", type=count, metavar="N", help="number of prompts (default: the table's)")
    add("--prompt-tokens", type=list_of(count), metavar="N,...", help="lengths to cut prompts to")
    lengths = {"dest": "new_tokens", "type": list_of(count)}  # the name in results files
    add("--max-new-tokens", **lengths, metavar="N,...", help="tokens to generate")
    greedy = "0 is greedy (default: the table's)"
    add("--temperature", type=list_of(float), metavar="X,...", help=greedy)
    add("--top-p", type=float, metavar="P", help="nucleus sampling (default 1)")
    add("--seed", type=int, metavar="N", help="first random seed (default 0)")
    add("--repeats", type=count, default=1, metavar="N", help="rounds over prompts (default 1)")
    add_model_options(parser, ALL_PAIRS)
    head = "EAGLE head of rows with the word head (default: the embedded one)"
    add("--head", metavar="FOLDER", help=head)
    add("--output", metavar="FILE", help="results file (default results/run_<time>_<table>.jsonl)")
    add("--resume", metavar="FILE", help="continue the interrupted run of a results file")
    add("--show", metavar="FILE", help="print the table of a results file, and exit")
    formats = ("text", "markdown")
    add("--format", choices=formats, default="text", help="format of the table (default text)")
    return parser


def count(text: str) -> int:
    """Return a whole number of at least 1. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def words_of(text: str) -> str:
    """Return the words of a row with one space between two. Raises argparse.ArgumentTypeError."""
    if not text.split():
        raise argparse.ArgumentTypeError("a row is empty")
    return " ".join(text.split())


def list_of(kind: Callable[[str], float | str]) -> Callable[[str], list]:
    """Return a parser of a comma-separated list of different items. kind: parses one."""

    def items(text: str) -> list:  # argparse's messages include this name
        found = [kind(part.strip()) for part in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} has an item twice")
        return found

    return items


def require_alone(args: argparse.Namespace, option: str, *allowed: str) -> None:
    """Raise UsageError for options that have no effect together with this one."""
    actions = [a for a in build_parser()._actions if getattr(args, a.dest, a.default) != a.default]
    given = [action.option_strings[0] for action in actions]
    names = (option, *allowed, "--measure-prices")  # this one sets --table
    others = [name for name in given if name not in names]
    if others:
        raise UsageError(f"{', '.join(others)}: no effect with {option}")


def recorded_options(args: argparse.Namespace) -> Line:
    """Return the options that a results file records: all that change what is measured. Of the file
    of prompts it is the name, because others may read the results."""
    given = {name: value for name, value in vars(args).items() if name not in UNRECORDED_OPTIONS}
    for name in ("prompts", "replay", "candidates"):
        given[name] = given[name] and Path(given[name]).name
    return {name: value for name, value in given.items() if value not in (None, False)}


def read_options(head: Line) -> argparse.Namespace:
    """Return the options that a results file was measured with."""
    defaults = vars(build_parser().parse_args([]))
    threads = {"threads": head["machine"]["threads"]}
    return argparse.Namespace(**(defaults | threads | head["options"]))


def choose_columns(args: argparse.Namespace, columns: Sequence[str]) -> list[str]:
    """Return the columns of the options, by default these, and the computed one of prices."""
    if args.replay:  # a table's columns are mostly times
        columns = REPLAY_COLUMNS + ("incomplete",) * (args.candidates is not None)
    found = list(args.columns or columns)
    return found + ["computed"] * (args.prices is not None and "computed" not in found)


def resolve_prices(word: str | None) -> dict[str, str | None]:
    """Return the options that record the word of --prices: three numbers, and the name of the
    results file that they are fitted to, if the word is one. Raises UsageError."""
    if word is None:
        return {}
    is_file = ":" not in word or os.path.exists(word)
    try:
        texts = from_rank_0(load, word).texts.values() if is_file else ()
        prices = fit(texts).prices if is_file else Prices.parse(word)
    except ValueError as error:
        raise UsageError(f"--prices {word}: {error}") from error
    return {"prices": str(prices), "prices_file": Path(word).name if is_file else None}


def make_plan(args: argparse.Namespace, previous: Results | None = None) -> Plan:
    """Check the options, then load models and prompts. Raises UsageError.

    previous: the content of the file to resume.
    """
    table = find_table(args.table)
    args = with_recorded_texts(args, table)
    require_replay_options(args, table)
    is_half = choose_dtype(args.dtype, choose_device(args.device)) != torch.float32
    all_texts = read_texts_of(args, table.parts[0]) if args.replay else []
    texts = pick_evenly(all_texts, args.n_prompts or len(all_texts))
    parts = [move_to_texts(texts, table.parts[0], args)] if texts else choose_parts(args)
    is_controlled = is_half and "exact" in table.columns and not texts
    cases = choose_cases(parts, args, [CONTROL] if is_controlled else [])
    if texts:
        cases = choose_replayable(cases, is_named=bool(args.methods))
    check_options(args, cases)
    args = resolve_models(args)
    load_before = one_minute_load()
    needs_draft = any(case.is_drafting or case.is_hf for case in cases) or bool(args.candidates)
    pair = open_replay(args, all_texts) if texts else open_pair(args, needs_draft, print_line)
    models = pair.report | {"threads": torch.get_num_threads()}
    eagle_pair = None
    if any(case.uses_head for case in cases):
        models["head"] = args.head or embedded_head()
        eagle_pair = with_draft(pair, find_checkpoint(models["head"]), pair.draft.dtype)
    check_lengths(cases, pair)
    prompts, has_invalid = {parts[0].dataset: [text.prompt for text in texts]}, False
    if not texts:
        prompts, has_invalid = encode_prompts(args, parts, pair)
    all_ids = [prompt for ids in prompts.values() for prompt in ids]
    names = [f"{len(ids)} {name}" if len(parts) > 1 else name for name, ids in prompts.items()]
    head = {
        "format": FORMAT,
        "table": args.table,
        "title": describe_preset(args.table, cases, models),
        "columns": choose_columns(args, table.columns),
        "is_sorted": table.is_sorted,
        "prices": table.prices,
        "text_temperature": parts[0].text_temperature,
        "options": recorded_options(args),
        "machine": from_rank_0(describe_machine, pair, models, any(c.is_hf for c in cases)),
        "load_before": load_before,
        "n_prompts": {dataset: len(ids) for dataset, ids in prompts.items()},
        "prompts": ", ".join(names),
        "prompts_sha256": hashlib.sha256(repr(all_ids).encode()).hexdigest(),
        "cases": [asdict(case) for case in cases],
    }
    if previous:
        require_same_conditions(previous.head, head)
    given = args, head, pair, eagle_pair, prompts, table.is_memory_table
    return Plan(*given, has_invalid_prompts=has_invalid)


def with_recorded_texts(args: argparse.Namespace, table: Table) -> argparse.Namespace:
    """Return the options with the recorded texts of a table that has some, and with a row for each
    method of --load. Raises UsageError for other texts."""
    if not table.replay or args.replay:
        return args
    names = ("dataset", "prompts", "record")
    if refused := ", ".join(f"--{name}" for name in names if getattr(args, name)):
        raise UsageError(f"{refused}: no effect with --table {args.table}, which has its own texts")
    loaded = [name for name in METHODS if name not in PROJECT_METHODS]
    file = str(Path(__file__).with_name(table.replay))
    given = {"replay": file, "add": [*(args.add or ()), *loaded]}
    return argparse.Namespace(**(vars(args) | given))


def require_replay_options(args: argparse.Namespace, table: Table) -> None:
    """Raise UsageError for options that need --replay, or with it other options."""
    if args.candidates and not (args.replay or args.record):
        raise UsageError("--candidates has no effect without --replay or --record")
    if args.replay and args.table == PRICES:
        raise UsageError("--measure-prices has no effect with --replay, which has no times")
    if args.replay and table.is_sorted and not args.prices:
        raise UsageError("--table tune --replay needs --prices; --measure-prices measures them")


def encode_prompts(
    args: argparse.Namespace, parts: Sequence[Part], pair: Pair
) -> tuple[Prompts, bool]:
    """Return the prompts of these parts, and whether an invalid one was left out."""
    n_ids, prompts, has_invalid = pair.target.config.vocab_size, {}, False
    for part in parts:
        texts = from_rank_0(load_prompts, part.dataset, args.prompts, part.n_prompts)
        encoded = encode_valid(texts, pair.tokenizer, n_ids)
        prompts[part.dataset] = choose_prompts(encoded, part)
        has_invalid |= len(encoded) < len(texts)
    return prompts, has_invalid


def check_options(args: argparse.Namespace, cases: Sequence[Case]) -> None:
    """Raise UsageError for options that contradict each other."""
    # Greedy texts of a sampled table ignore top_p and seed
    given = {"top_p": args.top_p, "seed": args.seed}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        hottest = max(case.temperature for case in cases)
        GenerationConfig.parse("ar", temperature=hottest, **given)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    require_one_pair(args)
    if args.head and not any(case.uses_head for case in cases):
        raise UsageError(f"--head {args.head} has no effect: no row has the word {HEAD}")
    if any(case.is_hf and case.temperature for case in cases):
        raise UsageError(f"{', '.join(HF_METHODS)}: only greedy text; use temperature 0")


def resolve_models(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the target and draft of --pair, prices as numbers, and absolute
    paths, so that --resume works in every folder. Those of --pair stay relative, because a results
    file that names it is published."""
    found = vars(args) | resolve_prices(args.prices)
    for name in PATHS:
        if found[name] and os.path.exists(found[name]):
            found[name] = os.path.abspath(found[name])
    if args.pair:
        found["target"], found["draft"] = from_rank_0(ALL_PAIRS[args.pair])
    if args.load:
        found["load"] = digest_files(map(os.path.abspath, args.load))
    return argparse.Namespace(**(found | {"pair": None}))


def check_lengths(cases: Sequence[Case], pair: Pair) -> None:
    """Raise UsageError for a window that the models cannot have. Warn if texts are longer than the
    target's training length."""
    for case in cases:
        if not case.is_hf:
            require_fit(case.generation_config(), pair, f"{case.row}: ")
    lengths = [c.prompt_tokens + c.new_tokens for c in cases if not c.has_window]
    warn_of_length(pair, max(lengths, default=0))


def choose_prompts(encoded: list[list[int]], part: Part) -> list[list[int]]:
    """Return the ids of a part's prompts, cut to its largest length. Print a note if there are too
    few. A single length is a maximum. If there are several, every prompt must reach all of them."""
    max_tokens = max(part.prompt_tokens)
    min_tokens = max_tokens if len(part.prompt_tokens) > 1 else 1
    prompts = cut_prompts(encoded, max_tokens, part.n_prompts, min_tokens)
    if len(prompts) < part.n_prompts:
        limit = f" of {min_tokens} tokens or more" if min_tokens > 1 else ""
        print_line(f"note: {part.dataset} has {len(prompts)} prompts{limit}, not {part.n_prompts}")
    return prompts


def describe_preset(name: str, cases: Sequence[Case], models: dict) -> str:
    """Return the title of a paper's table, which names the drafts that its rows use, and says so if
    no published figure matches a case; an empty string for other tables.

    models: as open_pair reports, and the head.
    """
    if name not in PRESETS:
        return ""
    roles = {"head" if case.uses_head else "draft" for case in cases if case.is_drafting}
    drafts = " and ".join(path_from_root(models[role]) for role in sorted(roles))
    found = PRESETS[name].title.replace("{drafter}", drafts or "no draft")
    is_published = any(any(part.published.values()) for part in PRESETS[name].parts)
    if is_published and not any(case.published for case in cases):
        found += "; its published figures are for other prompts, sizes or rows"
    return found


def require_same_conditions(before: Line, now: Line) -> None:
    """Raise UsageError if an interrupted table would be resumed under other conditions."""
    now = json.loads(json.dumps(now))
    was, found = before["machine"], now["machine"]
    changes = [
        f"{name} was {was.get(name)} and is {found.get(name)}"
        for name in sorted(was.keys() | found.keys())
        if was.get(name) != found.get(name)
    ]
    for name in ("prompts_sha256", "columns", "cases"):
        if before[name] != now[name]:
            changes.append(f"the {name.removesuffix('_sha256')} have changed")
    files = (each["options"].get("load", {}) for each in (before, now))
    if len({tuple(sorted(each.values())) for each in files}) > 1:  # they may have moved
        changes.append("a file of --load has changed")
    if changes:
        raise UsageError(f"--resume: {', '.join(changes)}; use the same conditions or a new file")


def describe_tables() -> str:
    """Return the output of --tables."""
    columns = {name: title.format(baseline="ar") for name, (title, _) in COLUMNS.items()}
    columns["NAME_mean"] = "mean ± standard deviation over the texts"
    columns["NAME_speedup"] = f"x ar, as a ratio of means; for {', '.join(WITH_SPEEDUP)}"
    sections = {
        "tables of this project:": {name: table.title for name, table in TABLES.items()},
        "tables of the papers, shown with published figures:": {
            name: table.title.replace("{drafter}", "--draft") for name, table in PRESETS.items()
        },
        "unavailable tables of the papers, and what they need:": UNAVAILABLE,
        "columns, with their titles:": columns,
    }
    lines = []
    for heading, titles in sections.items():
        lines += ["", heading]
        for name, found in titles.items():
            lines.append(textwrap.fill(f"  {name:<18} {found}", 80, subsequent_indent=" " * 21))
    return "\n".join(lines[1:])
