"""Preparation of a table's run: check the options, load the models, cut the prompts.

args = build_parser().parse_args(["--methods", "ar,dynatree tau=0.02"])
table = prepare_table(args)
table.prompts["builtin"][0]  # ids
"""

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmark.cases import (
    HEAD,
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
from benchmark.hf import HF_METHODS
from benchmark.machine import describe_machine, one_minute_load, path_from_root
from benchmark.prompts import DATASETS, cut_prompts, extend_prompts, load_prompts
from benchmark.results import FORMAT, Head, Results
from cli.errors import UsageError, print_line
from cli.models import (
    PYTHIA,
    Pair,
    choose_device,
    choose_dtype,
    default_models,
    embedded_head,
    embedded_pair,
    open_pair,
    require_graphs,
    warn_of_length,
    with_draft,
)
from cli.options import choose_sampling, require_fit
from engine.checkpoint import is_head
from engine.ranks import from_rank_0, world_size
from methods.eagle import head_of

Prompts = dict[str, list[list[int]]]  # ids of each prompt, by dataset
PAIRS = {"embedded": embedded_pair, "pythia": lambda: PYTHIA, "enlarged": enlarged_pair}
# Not in a results file: they do not change what is measured; --pair is recorded as its two models
UNRECORDED_OPTIONS = ("output", "resume", "show", "tables", "format", "pair")


@dataclass(frozen=True)
class PreparedTable:
    """A table that is ready to be measured."""

    head: Head  # of the results file
    args: argparse.Namespace
    pair: Pair
    prompts: Prompts
    pass_context: int  # cached tokens at which single passes are timed
    is_memory_table: bool  # measures peak memory, each text in a new process
    eagle_pair: Pair | None = None  # with the EAGLE head as its draft, if a row uses it


def prepare_table(args: argparse.Namespace, previous: Results | None = None) -> PreparedTable:
    """Check the options, then load models and prompts. Raises UsageError.

    previous: the content of the file to resume.
    """
    unfetched = previous.head.unfetched if previous else []
    device = choose_device(args.device)
    is_half = choose_dtype(args.dtype, device) != torch.float32
    table = with_columns(table_of(args.table), args.columns, device.type == "cuda")
    parts = choose_parts(args, unfetched, is_half)
    check_options(args, table, parts, choose_cases(parts, args))
    args = make_paths_absolute(resolve_pair(args))
    require_head(args, choose_cases(parts, args))
    load_before = one_minute_load()
    texts, unfetched = from_rank_0(fetch_texts, args, parts, unfetched)
    parts = choose_parts(args, unfetched, is_half)  # again, without what could not be fetched
    cases = choose_cases(parts, args)
    pair, models = open_pair(args, is_drafting=True, announce=print_line)
    eagle_pair = None
    if any(case.uses_head for case in cases):
        models["head"] = args.head or embedded_head()
        eagle_pair = with_draft(pair, Path(models["head"]), pair.draft.dtype)
    check_lengths(cases, pair)
    chosen = {part.dataset: choose_prompts(texts[part.dataset], pair, part) for part in parts}
    prompts = {dataset: ids for dataset, (ids, _) in chosen.items()}
    names = [f"{len(ids)} {name}" if len(parts) > 1 else name for ids, name in chosen.values()]
    head = Head(
        format=FORMAT,
        table=args.table,
        title=describe_preset(
            args.table, cases, parts, unfetched, describe_drafts(cases, pair, models)
        ),
        columns=list(table.columns),
        options=recorded_options(args),
        unfetched=unfetched,
        machine=from_rank_0(describe_machine, pair, models, any(case.is_hf for case in cases)),
        load_before=load_before,
        n_prompts={dataset: len(ids) for dataset, ids in prompts.items()},
        prompts=", ".join(names),
        prompts_sha256=hash_prompts(prompts),
        cases=cases,
    )
    if previous:
        require_same_conditions(previous, head, pair)
    first = parts[0]
    max_length = max(len(prompt) for ids in prompts.values() for prompt in ids)
    pass_context = min(max_length, first.prompt_tokens[0]) + first.new_tokens[0] // 2
    return PreparedTable(head, args, pair, prompts, pass_context, table.is_memory_table, eagle_pair)


def with_columns(table: Table, option: str | None, is_cuda: bool) -> Table:
    """Return the table with the columns of --columns, or with its own, to which a memory table on
    CUDA adds two. Raises UsageError."""
    columns = choose_columns(option, table.columns)
    if is_cuda and table.is_memory_table and option is None:
        columns += ["pools", "cuda_context"]
    return replace(table, columns=columns)


def choose_columns(option: str | None, default: Sequence[str]) -> list[str]:
    """Return the names of the columns of --columns, or the default. Raises UsageError."""
    columns = list(default) if option is None else split_list(option, "--columns")
    if len(set(columns)) < len(columns):
        raise UsageError(f"--columns {option!r} names a column twice")
    require_columns(columns)
    return columns


def check_options(
    args: argparse.Namespace, table: Table, parts: Sequence[Part], cases: Sequence[Case]
) -> None:
    """Raise UsageError for options that contradict each other."""
    require_graphs(args)
    temperatures = {temperature for part in parts for temperature in part.temperature}
    for value in temperatures:
        if value or not any(temperatures):  # greedy texts of a sampled table ignore top_p and seed
            choose_sampling(value, args.top_p, args.seed, None)
    if args.dataset and args.prompts:
        raise UsageError("--dataset and --prompts exclude each other; use one of them")
    if args.pair and (args.target or args.draft):
        raise UsageError("--pair excludes --target and --draft; use one or the other")
    if args.table == "steps" and cases:
        raise UsageError("--methods and --hf have no effect with --table steps")
    if table.is_memory_table and world_size() > 1:
        raise UsageError(f"--table {args.table} needs a single process; use python, not torchrun")
    if any(case.is_hf for case in cases):
        if table.is_memory_table or any(temperatures):
            names = ", ".join(HF_METHODS)
            raise UsageError(f"{names}: only greedy speed; use temperature 0 and no memory table")


def check_lengths(cases: Sequence[Case], pair: Pair) -> None:
    """Raise UsageError for a window that the models cannot have. Warn if texts are longer than the
    target's training length."""
    for case in cases:
        if not case.is_hf:
            require_fit(case.generation_config(), pair, f"{case.row}: ")
    unwindowed = [case for case in cases if " window=" not in case.row]
    max_length = max((case.prompt_tokens + case.new_tokens for case in unwindowed), default=0)
    warn_of_length(pair, max_length)


def replace_options(args: argparse.Namespace, **values: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(args) | values))


def resolve_pair(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the target and draft of --pair or of the table, which are made if
    they are missing. Raises UsageError."""
    has_models = args.target is not None or args.draft is not None
    pair = args.pair or ("enlarged" if args.table == "enlarged" and not has_models else None)
    if pair is None:
        return args
    target, draft = PAIRS[pair]()
    return replace_options(args, pair=None, target=target, draft=draft)


def require_head(args: argparse.Namespace, cases: Sequence[Case]) -> None:
    """Raise UsageError if rows need an EAGLE head that is not given, or if --head has no effect."""
    uses_head = any(case.uses_head for case in cases)
    if args.head and not uses_head:
        raise UsageError(f"--head {args.head} has no effect: no row has the word {HEAD}")
    if args.head and not (os.path.isdir(args.head) and is_head(Path(args.head))):
        raise UsageError(f"--head {args.head} is no folder of an EAGLE head")
    if uses_head and not args.head:
        target = args.target or default_models(choose_device(args.device))[0]
        if os.path.abspath(target) != os.path.abspath(embedded_pair()[0]):
            raise UsageError(f"rows with the word {HEAD} need --head FOLDER, a head of the target")


def make_paths_absolute(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with absolute paths of files, so that --resume works in every folder."""
    given = {option: getattr(args, option) for option in ("prompts", "target", "draft", "head")}
    paths = {option: os.path.abspath(f) for option, f in given.items() if f and os.path.exists(f)}
    return replace_options(args, **paths)


def recorded_options(args: argparse.Namespace) -> dict[str, str | int | float | bool | list]:
    """Return the options that a results file records: all that change what is measured."""
    given = {name: value for name, value in vars(args).items() if name not in UNRECORDED_OPTIONS}
    return {name: value for name, value in given.items() if value not in (None, False)}


def fetch_texts(
    args: argparse.Namespace, parts: Sequence[Part], unfetched: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the prompts by dataset, and the names of datasets that could not be fetched. Builtin
    prompts replace these, which a note says.

    Raises UsageError if --dataset or --prompts could not be read.
    """
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
        reasons = "; ".join(failed.values())
        note = f"note: builtin prompts replace {first}, without its published figures"
        print_line(f"{note}{left_out}: {reasons}")
    return texts, [*unfetched, *failed]


def describe_preset(
    name: str, cases: Sequence[Case], parts: Sequence[Part], unfetched: Sequence[str], drafter: str
) -> str:
    """Return the title of a paper's table, also saying if builtin prompts replace its dataset or if
    no published figure matches a case. Return an empty string for other tables.

    drafter: the name of the drafts, for titles that have a place for it.
    """
    if name not in PRESETS:
        return ""
    title = PRESETS[name].title_with(drafter)
    if unfetched:
        return f"{title}; with builtin prompts instead of {', '.join(unfetched)}"
    is_published = any(case.published for case in cases)
    if not is_published and any(part.published for part in PRESETS[name].parts):
        return f"{title}; its published figures are for other prompts, sizes or rows"
    return title


def describe_drafts(cases: Sequence[Case], pair: Pair, models: dict) -> str:
    """Return the kinds and names of the drafts that the cases use. models: as open_pair reports."""
    drafting = [case for case in cases if case.is_drafting]
    kind = "EAGLE head" if head_of(pair.draft) else "draft model"
    names = []
    if not all(case.uses_head for case in drafting):
        names.append(f"the {kind} {path_from_root(models['draft'])}")
    if any(case.uses_head for case in drafting):
        names.append(f"the EAGLE head {path_from_root(models['head'])}")
    return " and ".join(names) or "no draft"


def choose_prompts(texts: list[str], pair: Pair, part: Part) -> tuple[list[list[int]], str]:
    """Return the ids of a part's prompts, cut to its largest length, and their name. Print a note
    if there are too few.

    A single length is a maximum. If there are several, every prompt must reach all of them: the
    target extends builtin prompts, and of other datasets only texts that are long enough are used.
    """
    max_tokens = max(part.prompt_tokens)
    has_several = len(part.prompt_tokens) > 1
    is_builtin = part.dataset == DATASETS[0]
    min_tokens = max_tokens if has_several and not is_builtin else 1
    vocab_size = pair.target.config.vocab_size
    prompts = cut_prompts(texts, pair.tokenizer, vocab_size, max_tokens, part.n_prompts, min_tokens)
    if len(prompts) < part.n_prompts:
        limit = f" of {min_tokens} tokens or more" if min_tokens > 1 else ""
        print_line(f"note: {part.dataset} has {len(prompts)} prompts{limit}, not {part.n_prompts}")
    if has_several and is_builtin and min(len(prompt) for prompt in prompts) < max_tokens:
        print_line(f"note: the target extends the builtin prompts to {max_tokens} tokens")
        return extend_prompts(prompts, pair, max_tokens), f"{part.dataset}, extended by the target"
    return prompts, part.dataset


def hash_prompts(prompts: Prompts) -> str:
    """Return the SHA-256 of the ids of all prompts."""
    all_ids = [prompt for ids in prompts.values() for prompt in ids]
    return hashlib.sha256(repr(all_ids).encode()).hexdigest()


def require_same_conditions(previous: Results, now: Head, pair: Pair) -> None:
    """Raise UsageError if an interrupted table would be resumed under other conditions."""
    before = previous.head
    changes = []
    for name in sorted(before.machine.keys() | now.machine.keys()):
        if before.machine.get(name) != now.machine.get(name):
            is_now = now.machine.get(name)
            changes.append(f"{name} was {before.machine.get(name)} and is {is_now}")
    if (before.n_prompts, before.prompts_sha256) != (now.n_prompts, now.prompts_sha256):
        changes.append("the prompts have changed")
    for name in ("columns", "cases"):
        if getattr(before, name) != getattr(now, name):
            changes.append(f"the {name} have changed")
    last_id = max((max(ids, default=0) for ids in previous.ids.values()), default=0)
    if last_id >= pair.target.config.vocab_size:
        changes.append(f"the target has no id {last_id}")
    if changes:
        raise UsageError(f"--resume: {', '.join(changes)}; use the same conditions or a new file")
