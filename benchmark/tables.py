"""Tables: on which datasets, of which sizes, which rows and columns. They are in tables.toml.

    table = PRESETS["v2-1"]  # of a paper; TABLES["main"] is one of our own
    table.parts[0].printed["linear K=8", 800, 1500, 0.0]  # what it prints there, by column

What a paper's table needs that this project has not is in NOT_HERE.
"""

import re
import tomllib
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import msgspec

from benchmark.peers import PEERS
from benchmark.prompts import DATASETS, SCRIPT, SCRIPT_TEXTS
from benchmark.results import Options
from methods import METHODS

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}  # of sizes, in labels
CONTROL = "ar rows=16"  # in half precision: what rounding alone changes


@dataclass(frozen=True)
class Part:
    """What a table runs on one dataset; the command line may change dataset and sizes."""

    rows: tuple[str, ...] = ()  # as rows.parse_run reads them
    dataset: str = DATASETS[0]
    n_prompts: int = 12
    prompt_tokens: tuple[int, ...] = (150,)
    new_tokens: tuple[int, ...] = (128,)
    temperature: tuple[float, ...] = (0.0,)
    draft_temperature: float | None = None  # where it has an effect; None: as Run has it
    drawn: tuple[str, ...] = ()  # methods whose greedy guesses are drawn at it; others' are ranked
    acceptance: str | None = None  # of sampled rows that name none; None: as their method has it
    # A paper's own figures, by column, of each (row, prompt tokens, new tokens, temperature)
    printed: dict[tuple, dict[str, str]] = field(default_factory=dict)
    is_stand_in: bool = False  # the paper's dataset is not here, but a file of prompts may be it

    def sizes(self) -> list[tuple[float, ...]]:
        """Every combination of its prompt tokens, new tokens and temperatures."""
        return list(product(*(getattr(self, name) for name in SYMBOLS)))

    def size_words(self, size: tuple[float, ...]) -> str:
        """What a label says of a size: of those that have several values, as " T=200"."""
        words = ""
        for (name, symbol), value in zip(SYMBOLS.items(), size, strict=True):
            if len(getattr(self, name)) > 1:
                words += f" {symbol}={value}"
        return words


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
            for name, values in found.items():
                values += [value for value in getattr(part, name) if value not in values]
        return found


def read_table(found: dict) -> Table:
    """A table as tables.toml has it."""
    parts = tuple(read_part(part) for part in found.pop("parts"))
    return replace(msgspec.convert(found | {"parts": []}, Table), parts=parts)


def read_part(found: dict) -> Part:
    """A part as tables.toml has it, with its rows one by one."""
    columns, cells = found.pop("prints", []), found.pop("printed", {})
    texts = found.pop("rows", [row for row in cells if row not in PEERS])
    rows = [row for text in texts for row in expand(text)]
    part = msgspec.convert(found | {"rows": rows}, Part)
    for row, size in product([*rows, *PEERS], part.sizes()):
        figures = cells.pop(row + part.size_words(size), None)
        if figures:
            pairs = zip(columns, figures, strict=True)
            part.printed[row, *size] = {name: figure for name, figure in pairs if figure}
    assert not cells, f"printed of no row: {list(cells)}"
    return part


def expand(text: str) -> list[str]:
    """Every row that a text with {a,b} or * stands for, those of the first braces slowest."""
    if text == "*":
        return list(METHODS)
    words = re.split(r"\{(.*?)\}", text)  # texts and braces in turn
    options = [word.split(",") if i % 2 else [word] for i, word in enumerate(words)]
    return ["".join(chosen) for chosen in product(*options)]


ALL = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
TABLES = {name: read_table(found) for name, found in ALL["own"].items()}
PRESETS = {name: read_table(found) for name, found in ALL["papers"].items()}
NOT_HERE = ALL["not_here"]


def with_controls(table: Table, is_cuda: bool, is_half: bool) -> Table:
    """A table, and what belongs beside it on this device and in this precision."""
    columns = table.columns
    if is_cuda and table.is_memory:
        columns += ("pools", "context")
    parts = table.parts
    if is_half and "exact" in columns:
        parts = tuple(replace(part, rows=(*part.rows, CONTROL)) for part in parts)
    return replace(table, columns=columns, parts=parts)


def choose_parts(table: Table, options: Options) -> tuple[Part, ...]:
    """The table's parts on the dataset asked for; if it has none there, its first part, moved
    there. So for a file of prompts, whose dataset is its name. Where a dataset cannot be had, our
    own prompts stand in for the first such part, and the others are left out."""
    if options.prompts is not None:
        chosen = {Path(options.prompts).name: table.parts[0]}
    elif options.dataset is not None:
        of = "wikitext2" if options.dataset == SCRIPT else options.dataset
        kept = [part for part in table.parts if part.dataset == of]
        chosen = {options.dataset: kept[0] if kept else table.parts[0]}
    else:
        chosen = {}
        for part in table.parts:
            is_there = part.dataset not in options.unfetched
            chosen.setdefault(part.dataset if is_there else DATASETS[0], part)
    return tuple(choose_part(part, dataset, options) for dataset, part in chosen.items())


def choose_part(own: Part, dataset: str, options: Options) -> Part:
    """A part on this dataset, with the sizes asked for. What a paper prints stays only beside as
    many prompts of its own dataset, and if sampled, from all ids."""
    asked = {name: getattr(options, name) for name in ("n_prompts", *SYMBOLS)}
    chosen = {name: value for name, value in asked.items() if value is not None}
    part = replace(own, dataset=dataset, **chosen)
    is_theirs = dataset == own.dataset
    n_theirs = [own.n_prompts]
    if options.prompts is not None:
        is_theirs = own.is_stand_in
    elif dataset == SCRIPT and own.dataset == "wikitext2":
        is_theirs = True
        n_theirs.append(SCRIPT_TEXTS)
    if is_theirs and part.n_prompts in n_theirs and options.top_p in (None, 1.0):
        return part
    return replace(part, printed={})
