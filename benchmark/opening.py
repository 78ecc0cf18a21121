"""A table opened: options checked, models loaded, prompts cut; all but measuring it.

results, pair, prompts = open_table(Options(methods="ar,dynatree tau=0.02"))
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmark.columns import require_columns
from benchmark.enlarged import enlarged_pair
from benchmark.machine import describe_machine, one_minute_load
from benchmark.peers import PEERS, check_vocabularies, require_transformers
from benchmark.prompts import DATASETS, cut_prompts, lengthened, load_prompts
from benchmark.results import FORMAT, Options, Results, Run
from benchmark.rows import choose_runs, split_list
from benchmark.tables import NOT_HERE, PRESETS, TABLES, Part, Table, choose_parts, with_controls
from cli.errors import UsageError, say, shown
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
from parallel.ranks import Ranks, is_launched

Prompts = dict[str, list[list[int]]]  # their ids, by dataset
PAIRS = {"embedded": embedded_pair, "pythia": lambda: PYTHIA, "enlarged": enlarged_pair}


def open_table(
    options: Options,
    previous: Results | None = None,
    ranks: Ranks | None = None,
) -> tuple[Results, Pair, Prompts]:
    """Check the options, load models and prompts. Returns results, those of an interrupted table or
    such of which there are none yet, the models, the prompts' ids by dataset. ranks: with whom the
    target is computed, if there are several.

    Raises UsageError; what is wrong is told before a model is loaded.
    """
    table = choose_table(options)
    runs = choose_runs(table, options)
    check_options(options, table, runs)
    options = name_places(name_models(options))
    load = one_minute_load()  # before ours
    options, texts = fetch_texts(options)
    table = choose_table(options)  # as it is with what could be fetched
    runs = choose_runs(table, options)
    pair, models = open_pair(options, is_drafting=True, say=say, ranks=ranks)
    check_vocabularies([run.method for run in runs], pair)
    for run in runs:
        if not run.is_peer:
            require_fit(run.way, pair, f"{run.label}: ")
    lengths = [run.prompt_tokens + run.new_tokens for run in runs if not run.says("window=")]
    warn_of_length(pair, max(lengths, default=0))
    machine = describe_machine(pair, models, has_peers(runs))
    prompts, described = cut_all(table, texts, pair)
    columns = list(table.columns)
    what = options.table, columns, options, machine, described, table.sizes(), runs
    results = Results(FORMAT, *what)
    results.is_memory = table.is_memory
    results.title = describe_preset(options, runs)
    results.load_before = load
    results.n_texts = options.repeats * sum(len(prompts[run.dataset]) for run in runs)
    if previous:
        require_same(previous, results)
    return previous or results, pair, prompts


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


def check_options(options: Options, table: Table, runs: Sequence[Run]) -> None:
    """Raise UsageError for options that are wrong together."""
    require_graphs(options)
    temperatures = table.sizes()["temperature"]
    for value in temperatures:
        if value or not any(temperatures):  # greedy texts beside sampled ones have no use for both
            choose_sampling(value, options.top_p, options.seed, None)
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


def has_peers(runs: Sequence[Run]) -> bool:
    return any(run.is_peer for run in runs)


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


def name_places(options: Options) -> Options:
    """The options with such names of files as lead there from every working folder, for --resume.
    Raises UsageError for one that no results file can hold."""
    names = {name: getattr(options, name) for name in ("prompts", "target", "draft")}
    for option, name in names.items():
        if name is None or not os.path.exists(name):  # the hub's are no files
            continue
        names[option] = os.path.abspath(name)
        try:
            names[option].encode()
        except UnicodeEncodeError as error:
            where = shown(names[option])
            raise UsageError(f"--{option} {where}: a results file can name UTF-8 alone") from error
    return replace(options, **names)


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
