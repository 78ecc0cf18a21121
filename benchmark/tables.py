"""The papers' tables as lists of runs and columns; what the options make of them.

table = TABLES["main"]
runs = at_every_size(choose_runs(table, "ar,dynatree tau=0.02", False), sizes)
for repeat, prompt, run in interleave(runs, n_prompts=12, n_repeats=1): ...
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmark.peers import PEERS
from benchmark.results import COLUMNS, Run
from cli.errors import UsageError
from cli.options import parse_settings
from methods import METHODS

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}
SPEED = ["throughput", "speedup", "spread", "predicted", "tokens_per_iter", "exact"]
SPLIT = ["draft", "verify", "other"]


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
        [*SPEED[:4], "end_to_end", "setup", "ttft", "tpot", "tokens_per_iter", "path_length"]
        + ["acceptance", "draft_nodes", "iterations", *SPLIT, "repetition", "exact"],
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
        [*SPEED[:3], "tokens_per_iter", "acceptance", "draft_nodes", "iterations", *SPLIT, "exact"],
    ),
    "length": Table(
        "text length T",
        EVERY_METHOD,
        [*SPEED[:3], "tokens_per_iter", "path_length", "acceptance", "repetition", "exact"],
        n_prompts=4,
        new_tokens=(100, 200, 500, 1000, 1500, 2000),
    ),
    "prompt": Table(
        "prompt length L",
        EVERY_METHOD,
        [*SPEED[:3], "ttft", "tokens_per_iter", "acceptance", "exact"],
        n_prompts=8,
        prompt_tokens=(100, 200, 400, 800, 1000),
    ),
    "sweep": Table(
        "settings: the static tree's depth, branches and tau; dynatree's tau_h and tau_l",
        tuple(_sweep()),
        [*SPEED[:3], "tokens_per_iter", "acceptance", "draft_nodes", "exact"],
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
        [*SPEED[:3], "tokens_per_iter", "acceptance", "repetition", "exact"],
        n_prompts=8,
        temperature=(0.0, 0.6, 1.0),
    ),
    "steps": Table("what one forward costs, by its rows", (), [], n_prompts=1),
}


def split_list(text: str, option: str) -> list[str]:
    """A comma-separated list. Raises UsageError if a part is empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{option} {text!r}: a part of the list is empty")
    return parts


def parse_sizes(text: str | None, default: tuple[int, ...], option: str) -> tuple[int, ...]:
    """Whole numbers of at least 1. Raises UsageError."""
    if text is None:
        return default
    parts = split_list(text, option)
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) for part in parts):
        raise UsageError(f"{option} {text!r}: whole numbers of 1 or more")
    if len(set(map(int, parts))) < len(parts):
        raise UsageError(f"{option} {text!r} names a size twice")
    return tuple(int(part) for part in parts)


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
    """A run from "method NAME=VALUE ... [rebuild] [eager]", no sizes. Raises UsageError."""
    method, *words = text.split()
    settings = tuple(word for word in words if word not in ("rebuild", "eager"))
    commit = "rebuild" if "rebuild" in words else "keep"
    if method not in METHODS and method not in PEERS:
        raise UsageError(f"unknown method {method!r}; there are {', '.join((*METHODS, *PEERS))}")
    if method in PEERS and words:
        raise UsageError(f"{text!r}: {method} takes no settings")
    if method in METHODS:
        parse_settings(METHODS[method], settings)
    label = " ".join(text.split())
    return Run(label, method, settings, commit, 0, 0, 0.0, "", is_eager="eager" in words)


def choose_columns(text: str | None, default: list[str]) -> list[str]:
    """Columns by name. Raises UsageError."""
    columns = default if text is None else split_list(text, "--columns")
    for name in columns:
        if name not in COLUMNS:
            raise UsageError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
    return columns


def choose_runs(table: Table, methods: str | None, with_peers: bool) -> list[Run]:
    """The table's methods or those asked for, ar always first. Raises UsageError."""
    texts = list(table.methods) if methods is None else split_list(methods, "--methods")
    texts += [name for name in PEERS if with_peers and name not in texts]
    variants = [parse_run(text) for text in texts]
    if len({run.label for run in variants}) < len(variants):
        raise UsageError(f"--methods {methods!r} names a row twice")
    if not variants:
        return []
    return [parse_run("ar"), *(run for run in variants if run.label != "ar")]


def at_every_size(variants: Sequence[Run], sizes: dict[str, tuple[float, ...]]) -> list[Run]:
    """Each run at each prompt length, text length and temperature, ar there as its baseline.

    sizes: fields of Run with their values; a label names those that have several.
    """
    runs = []
    for values in product(*sizes.values()):
        size = dict(zip(sizes, values, strict=True))
        varied = [f" {SYMBOLS[name]}={size[name]}" for name in sizes if len(sizes[name]) > 1]
        suffix = "".join(varied)
        size["baseline"] = f"ar{suffix}"
        runs += [replace(run, label=run.label + suffix, **size) for run in variants]
    return runs


def interleave(runs: Sequence[Run], n_prompts: int, n_repeats: int) -> Iterator[tuple]:
    """(repeat, prompt, run): all runs on a prompt before the next, each time another one first."""
    order = deque(runs)
    for repeat, prompt in product(range(n_repeats), range(n_prompts)):
        for run in tuple(order):
            yield repeat, prompt, run
        order.rotate(-1)
