"""Tables: on which datasets, of which sizes, which rows and columns. They are in tables.toml.

    table = TABLES["main"]  # or, of a paper, PRESETS["v2-1"]
    table.parts[0].published("linear K=8")  # what it prints there, by column

What a paper's table needs that this project has not is in NOT_HERE.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import msgspec

from benchmark.peers import PEERS
from benchmark.prompts import DATASETS, SCRIPT, SCRIPT_TEXTS
from cli.errors import UsageError
from methods import METHODS

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}
CONTROL_ROWS = 16  # of ar's passes, where it shows what rounding alone changes


@dataclass(frozen=True)
class Part:
    """What a table runs on one dataset; the command line may change all of it."""

    rows: tuple[str, ...] = ()  # as rows.parse_run reads them
    dataset: str = DATASETS[0]
    n_prompts: int = 12
    prompt_tokens: tuple[int, ...] = (150,)
    new_tokens: tuple[int, ...] = (128,)
    temperature: tuple[float, ...] = (0.0,)
    draft_temperature: float | None = None  # where it has an effect; None: as Run has it
    guesses: str = "ranked"  # of greedy runs that have a draft temperature; or drawn
    prints: tuple[str, ...] = ()  # columns in which a paper prints figures of its own
    printed: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by row; "" is none
    is_stand_in: bool = False  # the paper's dataset is not here, but a file of prompts may be it
    own: "Part | None" = None  # of a paper's: what it is unless something else is asked for

    def sizes(self) -> dict[str, tuple[float, ...]]:
        """Every value of the fields of Run that a table can vary."""
        return {name: getattr(self, name) for name in SYMBOLS}

    def published(self, row: str, size: dict[str, float]) -> dict[str, str]:
        """A paper's own figures of a row at a size, by column; none of other prompts or sizes than
        its own."""
        if self.own is None or not self.is_alike(self.own):
            return {}
        for name, values in self.own.sizes().items():
            if size[name] not in values:
                return {}
            if len(values) > 1:
                row += f" {SYMBOLS[name]}={size[name]}"
        cells = self.printed.get(row, ("",) * len(self.prints))
        return {name: cell for name, cell in zip(self.prints, cells, strict=True) if cell}

    def is_alike(self, own: "Part") -> bool:
        """Whether it has as many prompts, of one dataset, and draws guesses alike."""
        is_file = self.dataset not in DATASETS
        is_script = self.dataset == SCRIPT and own.dataset == "wikitext2"
        is_theirs = self.dataset == own.dataset or is_script or (own.is_stand_in and is_file)
        is_drawn = self.draft_temperature == own.draft_temperature and self.guesses == own.guesses
        is_as_many = self.n_prompts in (own.n_prompts, SCRIPT_TEXTS if is_script else None)
        return is_theirs and is_drawn and is_as_many


@dataclass(frozen=True)
class Table:
    """What a table runs and shows."""

    title: str
    columns: tuple[str, ...]
    parts: tuple[Part, ...]
    is_memory: bool = False  # it measures memory, each text in a process of its own

    def sizes(self) -> dict[str, list[float]]:
        """Every value that any part has of them."""
        found: dict[str, list[float]] = {name: [] for name in SYMBOLS}
        for part in self.parts:
            for name, values in part.sizes().items():
                found[name] += [value for value in values if value not in found[name]]
        return found


@dataclass(frozen=True)
class Tables:
    """What tables.toml holds, by name."""

    own: dict[str, Table]
    papers: dict[str, Table]
    not_here: dict[str, str]


def read_tables() -> Tables:
    """The file's tables, each part with its rows one by one."""
    text = Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    for table in [*found["own"].values(), *found["papers"].values()]:
        for part in table["parts"]:
            rows = part.get("rows", [row for row in part.get("printed", []) if row not in PEERS])
            part["rows"] = [row for text in rows for row in expand(text)]
    tables = msgspec.convert(found, Tables)
    return replace(tables, papers={name: with_own(table) for name, table in tables.papers.items()})


def with_own(table: Table) -> Table:
    """A paper's table, each part of which knows its own conditions whatever is made of it."""
    return replace(table, parts=tuple(replace(part, own=part) for part in table.parts))


def expand(text: str) -> list[str]:
    """Every row that a text with {a,b} or * stands for, those of the first braces slowest."""
    if text == "*":
        return list(METHODS)
    words = re.split(r"\{(.*?)\}", text)  # texts and braces in turn
    options = [word.split(",") if i % 2 else [word] for i, word in enumerate(words)]
    return ["".join(chosen) for chosen in product(*options)]


ALL = read_tables()
TABLES, PRESETS, NOT_HERE = ALL.own, ALL.papers, ALL.not_here


def with_controls(table: Table, is_cuda: bool, has_graphs: bool, is_half: bool) -> Table:
    """A table, and what belongs beside it on this device and in this precision."""
    controls: tuple[str, ...] = ()
    columns = table.columns
    if is_half and "exact" in columns:  # ar with more rows: what rounding alone changes
        controls += (f"ar rows={CONTROL_ROWS}",)
    if is_cuda and has_graphs and table == TABLES["main"]:
        controls += ("ar eager",)
    if is_cuda and table.is_memory:
        columns += ("pools", "context")
    parts = [replace(part, rows=part.rows + controls) for part in table.parts]
    return replace(table, columns=columns, parts=tuple(parts))


def choose_parts(
    table: Table, dataset: str | None, file: str | None, unfetched: Sequence[str] = ()
) -> tuple[Part, ...]:
    """The table's parts on a dataset; if it has none there, its first part, moved there. So for a
    file of prompts, whose dataset is its name. unfetched: datasets that cannot be had."""
    if file is not None:
        return (replace(table.parts[0], dataset=Path(file).name),)
    if dataset is None:
        return stand_in(table.parts, unfetched)
    of = "wikitext2" if dataset == SCRIPT else dataset
    kept = tuple(replace(part, dataset=dataset) for part in table.parts if part.dataset == of)
    return kept or (replace(table.parts[0], dataset=dataset),)


def stand_in(parts: tuple[Part, ...], unfetched: Sequence[str]) -> tuple[Part, ...]:
    """The parts with our own prompts for the first of those on a dataset that cannot be had; the
    others of those are left out."""
    lacking = [part for part in parts if part.dataset in unfetched]
    own = [replace(part, dataset=DATASETS[0]) for part in lacking[:1]]
    return (*own, *(part for part in parts if part not in lacking))


def split_list(text: str, option: str) -> list[str]:
    """A comma-separated list. Raises UsageError if a part is empty."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"{option} {text!r}: a part of the list is empty")
    return parts
