"""A table opened: options checked, models loaded, prompts cut; everything except measuring.

args = build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"])
table = open_table(args)
table.prompts["builtin"][0]  # ids
"""

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmark.cases import (
    PRESETS,
    Case,
    Part,
    Table,
    choose_cases,
    choose_parts,
    split_list,
    table_of,
)
from benchmark.columns import require_columns
from benchmark.enlarged import enlarged_pair
from benchmark.hf import HF_METHODS, check_vocabularies, require_transformers
from benchmark.machine import describe_machine, one_minute_load
from benchmark.prompts import DATASETS, cut_prompts, lengthened, load_prompts
from benchmark.results import FORMAT, Head, Results
from cli.errors import UsageError, say
from cli.models import (
    PYTHIA,
    Pair,
    choose_device,
    choose_dtype,
    embedded_pair,
    open_pair,
    require_graphs,
    warn_of_length,
)
from cli.options import choose_sampling, require_fit
from engine.ranks import Ranks, is_launched

Prompts = dict[str, list[list[int]]]  # their ids, by dataset
PAIRS = {"embedded": embedded_pair, "pythia": lambda: PYTHIA, "enlarged": enlarged_pair}
OF_THE_CALL = ("output", "resume", "show", "tables", "format", "pair", "peers")


@dataclass(frozen=True)
class OpenTable:
    """What is needed to measure a table."""

    head: Head  # of its results file
    args: argparse.Namespace
    pair: Pair
    prompts: Prompts
    step_context: int  # cached tokens at which single passes are timed
    is_memory: bool  # it measures memory, each text in a process of its own


def open_table(
    args: argparse.Namespace, previous: Results | None = None, ranks: Ranks | None = None
) -> OpenTable:
    """Check the options, load models and prompts. Raises UsageError; what is wrong with the options
    is said before a model is loaded.

    Args:
        previous: the content of the file to go on with.
        ranks: those that compute the target, if there are several.
    """
    unfetched = previous.head.unfetched if previous else []
    device = choose_device(args.device)
    is_half = choose_dtype(args.dtype, device) != torch.float32
    table = with_columns(table_of(args.table), args.columns, device.type == "cuda")
    parts = choose_parts(args, unfetched, is_half)
    check_options(args, table, parts, choose_cases(parts, args))
    args = name_places(name_models(args))
    load_before = one_minute_load()
    texts, unfetched = fetch_texts(args, parts, unfetched)
    parts = choose_parts(args, unfetched, is_half)  # with what could be fetched
    cases = choose_cases(parts, args)
    pair, models = open_pair(args, is_drafting=True, say=say, ranks=ranks)
    check_vocabularies([case.method for case in cases], pair)
    check_lengths(cases, pair)
    chosen = {part.dataset: choose_prompts(texts[part.dataset], pair, part) for part in parts}
    prompts = {dataset: own for dataset, (own, _) in chosen.items()}
    names = [f"{len(own)} {name}" if len(parts) > 1 else name for own, name in chosen.values()]
    head = Head(
        format=FORMAT,
        table=args.table,
        title=describe_preset(args.table, cases, parts, unfetched),
        columns=list(table.columns),
        options=options_of(args),
        unfetched=unfetched,
        machine=describe_machine(pair, models, any(case.is_hf for case in cases)),
        load_before=load_before,
        n_prompts={dataset: len(own) for dataset, own in prompts.items()},
        prompts=", ".join(names),
        prompts_sha256=sha256_of(prompts),
        cases=cases,
    )
    if previous:
        require_same(previous, head, pair)
    first = parts[0]
    longest = max(len(prompt) for own in prompts.values() for prompt in own)
    step_context = min(longest, first.prompt_tokens[0]) + first.new_tokens[0] // 2
    return OpenTable(head, args, pair, prompts, step_context, table.is_memory)


def with_columns(table: Table, asked: str | None, is_cuda: bool) -> Table:
    """Return the table with the columns asked for, or with its own and what belongs beside them on
    a CUDA device. Raises UsageError."""
    columns = choose_columns(asked, table.columns)
    if is_cuda and table.is_memory and asked is None:
        columns += ["pools", "cuda_context"]
    return replace(table, columns=columns)


def choose_columns(asked: str | None, default: Sequence[str]) -> list[str]:
    """Return columns by name. Raises UsageError."""
    columns = list(default) if asked is None else split_list(asked, "--columns")
    if len(set(columns)) < len(columns):
        raise UsageError(f"--columns {asked!r} names a column twice")
    require_columns(columns)
    return columns


def check_options(
    args: argparse.Namespace, table: Table, parts: Sequence[Part], cases: Sequence[Case]
) -> None:
    """Raise UsageError for options that are wrong together."""
    require_graphs(args)
    temperatures = {temperature for part in parts for temperature in part.temperature}
    for value in temperatures:
        if value or not any(temperatures):  # greedy texts beside sampled ones have no use for both
            choose_sampling(value, args.top_p, args.seed, None)
    if args.dataset and args.prompts:
        raise UsageError("give either --dataset or --prompts")
    if args.pair and (args.target or args.draft):
        raise UsageError("give either --pair or --target and --draft")
    if args.table == "steps" and cases:
        raise UsageError("--table steps runs no methods")
    if table.is_memory and is_launched():
        raise UsageError(f"--table {args.table} is measured by one process")
    if any(case.is_hf for case in cases):
        if table.is_memory or any(temperatures):
            names = ", ".join(HF_METHODS)
            raise UsageError(f"{names} are measured for speed alone, at temperature 0")
        require_transformers()


def check_lengths(cases: Sequence[Case], pair: Pair) -> None:
    """Raise UsageError for a window that the models cannot have; warn if texts are longer than what
    they were trained for."""
    for case in cases:
        if not case.is_hf:
            require_fit(case.config(), pair, f"{case.row}: ")
    whole = [case for case in cases if " window=" not in case.row]
    longest = max((case.prompt_tokens + case.new_tokens for case in whole), default=0)
    warn_of_length(pair, longest)


def changed(args: argparse.Namespace, **values: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(args) | values))


def name_models(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with target and draft of the pair that they or the table name, which is
    made if need be. Raises UsageError."""
    is_unsaid = args.target is None and args.draft is None
    pair = args.pair or ("enlarged" if args.table == "enlarged" and is_unsaid else None)
    if pair is None:
        return args
    target, draft = PAIRS[pair]()
    return changed(args, pair=None, target=target, draft=draft)


def name_places(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with absolute names of files, so that --resume works in every folder."""
    names = {name: getattr(args, name) for name in ("prompts", "target", "draft")}
    files = {option: name for option, name in names.items() if name and os.path.exists(name)}
    return changed(args, **{option: os.path.abspath(name) for option, name in files.items()})


def options_of(args: argparse.Namespace) -> dict[str, str | int | float | bool | list]:
    """Return the options that decide a table's figures, as a results file has them."""
    given = {name: value for name, value in vars(args).items() if name not in OF_THE_CALL}
    return {name: value for name, value in given.items() if value not in (None, False)}


def fetch_texts(
    args: argparse.Namespace, parts: Sequence[Part], unfetched: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the prompts' texts by dataset, and which of the table's own datasets could not be
    fetched, so that our own prompts stand in. Says so. Raises UsageError."""
    texts = {}
    failed = {}
    for part in parts:
        try:
            texts[part.dataset] = load_prompts(part.dataset, args.prompts, part.n_prompts)
        except UsageError as error:
            if args.dataset or args.prompts:
                raise
            failed[part.dataset] = str(error)
    if failed:
        texts[DATASETS[0]] = load_prompts(DATASETS[0], None)
        first, *others = failed
        left_out = f" (rows on {', '.join(others)} are left out)" * bool(others)
        why = "; ".join(failed.values())
        what = f"note: our own prompts stand in for {first}, beside no published figure"
        say(f"{what}{left_out}: {why}")
    return texts, [*unfetched, *failed]


def describe_preset(
    name: str, cases: Sequence[Case], parts: Sequence[Part], unfetched: Sequence[str]
) -> str:
    """Return which paper's table it is, if any; and whether our own prompts stand in, or none of
    its figures is of these cases."""
    if name not in PRESETS:
        return ""
    table = PRESETS[name]
    if unfetched:
        return f"{table.title}; on our own prompts instead of {', '.join(unfetched)}"
    is_bare = not any(case.published for case in cases)
    if is_bare and any(part.published for part in table.parts):
        return f"{table.title}; its figures are of other prompts, sizes or rows: none is shown"
    return table.title


def choose_prompts(texts: list[str], pair: Pair, part: Part) -> tuple[list[list[int]], str]:
    """Return a part's prompts as ids, as long as its longest case wants them, and their name. Says
    so if they are too few.

    A single length is a maximum. Of several lengths each has to be met: our own prompts are then
    written on by the target, and of other texts only the long ones are taken.
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
    if is_varied and is_own and min(len(prompt) for prompt in prompts) < longest:
        say(f"note: the target writes our own prompts on, to {longest} tokens")
        return lengthened(prompts, pair, longest), f"{part.dataset}, written on by the target"
    return prompts, part.dataset


def sha256_of(prompts: Prompts) -> str:
    """Return what tells the prompts from any others."""
    every = [prompt for own in prompts.values() for prompt in own]
    return hashlib.sha256(repr(every).encode()).hexdigest()


def require_same(previous: Results, now: Head, pair: Pair) -> None:
    """Raise UsageError if an interrupted table would go on under other conditions."""
    before = previous.head
    changes = []
    for name in sorted(before.machine.keys() | now.machine.keys()):
        if before.machine.get(name) != now.machine.get(name):
            is_now = now.machine.get(name)
            changes.append(f"{name} was {before.machine.get(name)} and is {is_now}")
    if (before.n_prompts, before.prompts_sha256) != (now.n_prompts, now.prompts_sha256):
        changes.append("the prompts were others")
    for name in ("columns", "cases"):
        if getattr(before, name) != getattr(now, name):
            changes.append(f"the {name} were others")
    last_id = max((max(ids, default=0) for ids in previous.ids.values()), default=0)
    if last_id >= pair.target.config.vocab_size:
        changes.append(f"the target had an id {last_id}")
    if changes:
        raise UsageError(f"--resume would mix two conditions: {', '.join(changes)}")
