"""The papers' tables as lists of runs and columns; what the options make of them.

table = TABLES["main"]
runs = at_every_size(choose_runs(table, "ar,dynatree tau=0.02", False), table.sizes())
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmark.peers import PEERS
from benchmark.report import COLUMNS
from benchmark.results import Run
from cli.compare import CONTROL_ROWS, strict_reference
from cli.errors import UsageError
from cli.options import parse_settings
from draft_tree import Settings
from methods import METHODS

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}
SPEED = ["throughput", "speedup", "spread"]
SPLIT = ["draft", "verify", "other"]
WORDS = ("rebuild", "eager", "strict")  # of a row, beside its settings


@dataclass(frozen=True)
class Table:
    """What a table runs and shows; the command line may change every part of it."""

    title: str
    methods: tuple[str, ...]  # as parse_run reads them
    columns: list[str]
    n_prompts: int = 12
    prompt_tokens: tuple[int, ...] = (150,)
    new_tokens: tuple[int, ...] = (128,)
    temperature: tuple[float, ...] = (0.0,)

    def sizes(self) -> dict[str, tuple[float, ...]]:
        """Every value of the fields of Run that a table can vary."""
        return {name: getattr(self, name) for name in SYMBOLS}


def _sweep() -> Iterator[str]:
    """The papers' grids: the static tree's shape (v1, 4.5), then the thresholds (v2, B.1)."""
    yield "ar"
    for d, b, tau in product(range(3, 9), (2, 3, 4), (0.01, 0.02, 0.03, 0.05, 0.1)):
        yield f"fixed D={d} B={b} tau={tau}"
    for tau_h, tau_l in product((0.6, 0.7, 0.8, 0.9, 0.95), (0.2, 0.3, 0.4, 0.5)):
        yield f"dynatree tau_h={tau_h} tau_l={tau_l}"


EVERY_METHOD = tuple(METHODS)
TABLES = {
    "main": Table(
        "every method",
        EVERY_METHOD,
        SPEED
        + ["predicted", "end_to_end", "setup", "ttft", "tpot", "tokens_per_iter", "path_length"]
        + ["acceptance", "draft_nodes", "iterations"]
        + SPLIT
        + ["repetition", "exact"],
    ),
    "ablation": Table(
        "dynatree's parts switched on one by one, and the two ways to commit",
        (
            "ar",
            "fixed",
            "fixed rebuild",
            "dynatree depth=off history=off",
            "dynatree breadth=off history=off",
            "dynatree history=off",
            "dynatree",
            "dynatree rebuild",
        ),
        SPEED + ["tokens_per_iter", "acceptance", "draft_nodes", "iterations"] + SPLIT + ["exact"],
    ),
    "length": Table(
        "text length T",
        EVERY_METHOD,
        SPEED + ["tokens_per_iter", "path_length", "acceptance", "repetition", "exact"],
        n_prompts=4,
        new_tokens=(100, 200, 500, 1000, 1500, 2000),
    ),
    "prompt": Table(
        "prompt length L",
        EVERY_METHOD,
        SPEED + ["ttft", "tokens_per_iter", "acceptance", "exact"],
        n_prompts=8,
        prompt_tokens=(100, 200, 400, 800, 1000),
    ),
    "sweep": Table(
        "settings: the static tree's depth, branches and tau; dynatree's tau_h and tau_l",
        tuple(_sweep()),
        SPEED + ["tokens_per_iter", "acceptance", "draft_nodes", "exact"],
        n_prompts=4,
    ),
    "memory": Table(
        "peak memory, each method in a process of its own",
        EVERY_METHOD,
        ["peak", "more_memory", "floor"],
        n_prompts=1,
    ),
    "sampling": Table(
        "temperature t",
        EVERY_METHOD,
        SPEED + ["tokens_per_iter", "acceptance", "repetition", "exact"],
        n_prompts=8,
        temperature=(0.0, 0.6, 1.0),
    ),
    "steps": Table("what one forward costs, by its rows", (), [], n_prompts=1),
}


def with_controls(name: str, is_cuda: bool, has_graphs: bool, is_half: bool) -> Table:
    """A table, and what belongs beside it on this device and in this precision."""
    table = TABLES[name]
    methods = list(table.methods)
    columns = list(table.columns)
    if is_half and "exact" in columns:  # ar with more rows: what rounding alone changes
        methods.append(f"ar rows={CONTROL_ROWS}")
    if is_cuda and has_graphs and name == "main":
        methods.append("ar eager")
    if is_cuda and name == "memory":
        columns += ["pools", "context"]
    return replace(table, methods=tuple(methods), columns=columns)


def split_list(text: str, option: str) -> list[str]:
    """A comma-separated list. Raises UsageError if a part is empty."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"{option} {text!r}: a part of the list is empty")
    return parts


def parse_sizes(text: str | None, default: tuple[int, ...], option: str) -> tuple[int, ...]:
    """Whole numbers of at least 1. Raises UsageError."""
    if text is None:
        return default
    sizes = []
    for part in split_list(text, option):
        if not re.fullmatch("[0-9]{1,9}", part) or int(part) == 0:
            raise UsageError(f"{option} {text!r}: whole numbers of 1 or more")
        if int(part) in sizes:
            raise UsageError(f"{option} {text!r} names a size twice")
        sizes.append(int(part))
    return tuple(sizes)


def parse_temperatures(text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    """Numbers; whether they are temperatures is for choose_sampling. Raises UsageError."""
    if text is None:
        return default
    try:
        values = [float(part) for part in split_list(text, "--temperature")]
    except ValueError as error:
        raise UsageError(f"--temperature {text!r}: {error}") from error
    if len(set(values)) < len(values):
        raise UsageError(f"--temperature {text!r} names one twice")
    return tuple(values)


def parse_run(text: str) -> Run:
    """A run from "method NAME=VALUE ... [rebuild] [eager] [strict]", no sizes; UsageError."""
    words = text.split()
    method = words.pop(0)
    settings = tuple(word for word in words if word not in WORDS)
    if method in PEERS:
        if words:
            raise UsageError(f"{text!r}: {method} takes no settings")
    elif method in METHODS:
        parse_settings(METHODS[method], settings)
    else:
        known = ", ".join(list(METHODS) + list(PEERS))
        raise UsageError(f"unknown method {method!r}; there are {known}")
    commit = "keep"
    if "rebuild" in words:
        commit = "rebuild"
    label = " ".join(text.split())
    run = Run(label, method, settings, commit, 0, 0, 0.0, "")
    return replace(run, is_eager="eager" in words, is_strict="strict" in words)


def settings_of(run: Run) -> Settings:
    """What a run's method is told, of a method that is not a peer."""
    return parse_settings(METHODS[run.method], run.settings)


def choose_columns(text: str | None, default: list[str]) -> list[str]:
    """Columns by name. Raises UsageError."""
    if text is None:
        return default
    columns = split_list(text, "--columns")
    for name in columns:
        if name not in COLUMNS:
            raise UsageError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
    return columns


def choose_runs(
    table: Table, methods: str | None, with_peers: bool, is_strict: bool = False
) -> list[Run]:
    """The table's methods or those asked for, ar always first. Raises UsageError.

    is_strict: they are strict, one and all, and beside them plain ar.
    """
    texts = list(table.methods)
    if methods is not None:
        texts = split_list(methods, "--methods")
    if is_strict:
        texts = [add_strict(text) for text in texts]
    if with_peers:
        texts += [name for name in PEERS if name not in texts]
    runs = [parse_run(text) for text in texts]
    labels = [run.label for run in runs]
    if len(set(labels)) < len(labels):
        raise UsageError(f"--methods {methods!r} names a row twice")
    if not runs:
        return []
    return [parse_run("ar")] + with_references([run for run in runs if run.label != "ar"])


def add_strict(text: str) -> str:
    """A row with the word after its method, unless it is there or means nothing."""
    words = text.split()
    if words[0] not in PEERS and "strict" not in words:
        words.insert(1, "strict")
    return " ".join(words)


def with_references(runs: Sequence[Run]) -> list[Run]:
    """Strict runs told whose ids they must have: those of strict ar at as many rows a pass, which
    comes first if it is not among them."""
    labels = {run.label for run in runs}
    added = []
    found = []
    for run in runs:
        if run.is_strict:
            rows = strict_reference(settings_of(run)).rows
            label = f"ar strict rows={rows}" if rows > 1 else "ar strict"
            if label not in labels:
                labels.add(label)
                added.append(replace(parse_run(label), reference=label))
            run = replace(run, reference=label)
        found.append(run)
    return added + found


def at_every_size(variants: Sequence[Run], sizes: dict[str, tuple[float, ...]]) -> list[Run]:
    """Each run at each prompt length, text length and temperature, ar there as its baseline.

    sizes: fields of Run with their values; a label names those that have several.
    """
    runs = []
    for values in product(*sizes.values()):
        size = dict(zip(sizes, values, strict=True))
        suffix = ""
        for name, value in size.items():
            if len(sizes[name]) > 1:
                suffix += f" {SYMBOLS[name]}={value}"
        for run in variants:
            labels = {"label": run.label + suffix, "baseline": f"ar{suffix}"}
            labels["reference"] = (run.reference or "ar") + suffix
            runs.append(replace(run, **labels, **size))
    return runs
