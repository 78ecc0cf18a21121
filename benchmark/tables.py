"""Tables: on which datasets, of which sizes, which rows and columns; and what options change.

A table has parts: on each dataset its own rows, at every size. benchmark/presets.py has the tables
of the papers themselves, benchmark/rows.py makes runs of the rows.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from benchmark.columns import require_columns
from benchmark.prompts import DATASETS
from cli.errors import UsageError
from methods import METHODS

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}
CONTROL_ROWS = 16  # of ar's passes, where it shows what rounding alone changes
SPEED = ["throughput", "speedup", "spread"]
SPLIT = ["draft", "verify", "other"]


@dataclass(frozen=True)
class Part:
    """What a table runs on one dataset; the command line may change all of it."""

    methods: tuple[str, ...]  # as rows.parse_run reads them
    dataset: str = DATASETS[0]
    n_prompts: int = 12
    prompt_tokens: tuple[int, ...] = (150,)
    new_tokens: tuple[int, ...] = (128,)
    temperature: tuple[float, ...] = (0.0,)
    draft_temperature: float | None = None  # of sampled runs; None: the target's
    # A paper's own figures: row, and its sizes if they vary -> column -> as printed
    published: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def sizes(self) -> dict[str, tuple[float, ...]]:
        """Every value of the fields of Run that a table can vary."""
        return {name: getattr(self, name) for name in SYMBOLS}


@dataclass(frozen=True)
class Table:
    """What a table runs and shows."""

    title: str
    columns: list[str]
    parts: tuple[Part, ...]
    is_memory: bool = False  # it measures memory, each text in a process of its own

    def sizes(self) -> dict[str, list[float]]:
        """Every value that any part has of them."""
        found: dict[str, list[float]] = {name: [] for name in SYMBOLS}
        for part in self.parts:
            for name, values in part.sizes().items():
                found[name] += [value for value in values if value not in found[name]]
        return found


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
        SPEED
        + ["predicted", "end_to_end", "setup", "ttft", "tpot", "tokens_per_iter", "path_length"]
        + ["acceptance", "draft_nodes", "iterations"]
        + SPLIT
        + ["repetition", "exact"],
        (Part(EVERY_METHOD),),
    ),
    "ablation": Table(
        "dynatree's parts switched on one by one, and the two ways to commit",
        SPEED + ["tokens_per_iter", "acceptance", "draft_nodes", "iterations"] + SPLIT + ["exact"],
        (
            Part(
                (
                    "ar",
                    "fixed",
                    "fixed rebuild",
                    "dynatree adapt_depth=off history=off",
                    "dynatree adapt_breadth=off history=off",
                    "dynatree history=off",
                    "dynatree",
                    "dynatree rebuild",
                )
            ),
        ),
    ),
    "length": Table(
        "text length T",
        SPEED + ["tokens_per_iter", "path_length", "acceptance", "repetition", "exact"],
        (Part(EVERY_METHOD, n_prompts=4, new_tokens=(100, 200, 500, 1000, 1500, 2000)),),
    ),
    "prompt": Table(
        "prompt length L",
        SPEED + ["ttft", "tokens_per_iter", "acceptance", "exact"],
        (Part(EVERY_METHOD, n_prompts=8, prompt_tokens=(100, 200, 400, 800, 1000)),),
    ),
    "sweep": Table(
        "settings: the static tree's depth, branches and tau; dynatree's tau_h and tau_l",
        SPEED + ["tokens_per_iter", "acceptance", "draft_nodes", "exact"],
        (Part(tuple(_sweep()), n_prompts=4),),
    ),
    "memory": Table(
        "peak memory, each method in a process of its own",
        ["peak", "more_memory", "floor"],
        (Part(EVERY_METHOD, n_prompts=1),),
        is_memory=True,
    ),
    "sampling": Table(
        "temperature t",
        SPEED + ["tokens_per_iter", "acceptance", "repetition", "exact"],
        (Part(EVERY_METHOD, n_prompts=8, temperature=(0.0, 0.6, 1.0)),),
    ),
    "enlarged": Table(
        "the main methods on the embedded pair at the cost of Pythia-410M and 70M",
        SPEED + ["ttft", "tokens_per_iter", "draft_nodes"] + SPLIT + ["exact"],
        (Part(("ar", "linear", "dynatree", "recycle", "auto"), n_prompts=4),),
    ),
    "steps": Table("what one forward costs, by its rows", [], (Part((), n_prompts=1),)),
}


def with_controls(table: Table, is_cuda: bool, has_graphs: bool, is_half: bool) -> Table:
    """A table, and what belongs beside it on this device and in this precision."""
    controls = []
    columns = list(table.columns)
    if is_half and "exact" in columns:  # ar with more rows: what rounding alone changes
        controls.append(f"ar rows={CONTROL_ROWS}")
    if is_cuda and has_graphs and table == TABLES["main"]:
        controls.append("ar eager")
    if is_cuda and table.is_memory:
        columns += ["pools", "context"]
    parts = []
    for part in table.parts:
        parts.append(replace(part, methods=part.methods + tuple(controls)))
    return replace(table, columns=columns, parts=tuple(parts))


def choose_parts(table: Table, dataset: str | None, file: str | None) -> tuple[Part, ...]:
    """The table's parts on a dataset; if it has none there, its first part, moved there. So for a
    file of prompts, whose dataset is its name."""
    if file is not None:
        return (replace(table.parts[0], dataset=Path(file).name),)
    if dataset is None:
        return table.parts
    kept = tuple(part for part in table.parts if part.dataset == dataset)
    return kept or (replace(table.parts[0], dataset=dataset),)


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


def choose_columns(text: str | None, default: list[str]) -> list[str]:
    """Columns by name. Raises UsageError."""
    if text is None:
        return default
    columns = split_list(text, "--columns")
    require_columns(columns)
    return columns
