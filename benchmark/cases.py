"""The cases of a table: each a row on one dataset at one size, and what a paper prints of it.

tables.toml has our own tables and the papers'. bench.py's options change a table's rows, datasets
and sizes.

    args = build_parser().parse_args(["--table", "v2-1"])
    case = choose_cases(choose_parts(args), args)[1]
    case.row, case.new_tokens, case.published  # "linear K=8", 1500, {"end_to_end_mean": ...}
"""

import argparse
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from benchmark.hf import HF_METHODS
from benchmark.prompts import DATASETS, SCRIPT, SCRIPT_TEXTS
from cli.compare import strict_reference
from cli.errors import UsageError
from cli.options import has_temperature
from engine.generation_config import NUMBER_OPTIONS, GenerationConfig
from methods import METHODS
from methods.sampler import GREEDY, Sampling

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}  # of sizes, in labels
CONTROL = "ar rows=16"  # in half precision: what rounding alone changes
Size = tuple[int, int, float]  # prompt tokens, new tokens, temperature


@dataclass(frozen=True)
class Case:
    """A row of a table: a method in words, on one dataset's prompts, at one size."""

    row: str  # the words of GenerationConfig.parse, or one of hf.HF_METHODS
    dataset: str
    prompt_tokens: int  # maximum; a prompt may be shorter
    new_tokens: int
    temperature: float  # 0 is greedy
    reference: str = "ar"  # row whose ids a greedy text must have
    draft_temperature: float | None = None  # the draft's own, where it has an effect
    is_drawn: bool = False  # candidates of greedy text are drawn, too
    acceptance: str | None = None  # of sampled text; None: as the row says, or its method's own
    published: dict[str, str] = field(default_factory=dict, hash=False)  # by column, of a paper

    @property
    def key(self) -> tuple[str, str, int, int, float]:
        """What tells the case from all others of its table."""
        return self.row, self.dataset, self.prompt_tokens, self.new_tokens, self.temperature

    @property
    def method(self) -> str:
        return self.row.partition(" ")[0]

    @property
    def is_hf(self) -> bool:
        """Whether transformers writes its texts."""
        return self.method in HF_METHODS

    def config(
        self, top_p: float | None = None, seed: int = 0, graphs: bool = True
    ) -> GenerationConfig:
        """Return how a text is written; not for transformers. Raises ValueError for a row that
        this version cannot read."""
        words = self.row.split() + ([self.acceptance] if self.acceptance else [])
        sampling = GREEDY
        if self.temperature or self.draft_temperature:
            top_p = top_p if self.temperature and top_p is not None else 1.0
            sampling = Sampling(
                self.temperature, top_p, seed, self.draft_temperature, self.is_drawn
            )
        return replace(GenerationConfig.parse(*words), sampling=sampling, graphs=graphs)


def places(cases: Sequence[Case]) -> list[str]:
    """Return for each case what tells its dataset and size from those of the others, as
    "on pg19 T=100"; an empty text if all have the same."""
    values: dict[tuple[str, str], set[float]] = {}
    for case, name in product(cases, SYMBOLS):
        values.setdefault((case.dataset, name), set()).add(getattr(case, name))
    has_several = len({case.dataset for case in cases}) > 1
    found = []
    for case in cases:
        words = [f"on {case.dataset}"] if has_several else []
        for name, symbol in SYMBOLS.items():
            if len(values[case.dataset, name]) > 1:
                words.append(f"{symbol}={getattr(case, name)}")
        found.append(" ".join(words))
    return found


def labels(cases: Sequence[Case]) -> list[str]:
    """Return the name of each case in its table: its row and its place."""
    return [f"{case.row} {at}".strip() for case, at in zip(cases, places(cases), strict=True)]


@dataclass(frozen=True)
class Part:
    """What a table runs on one dataset, as tables.toml says it."""

    rows: Sequence[str] = ()
    dataset: str = DATASETS[0]
    n_prompts: int = 12
    prompt_tokens: Sequence[int] = (150,)
    new_tokens: Sequence[int] = (128,)
    temperature: Sequence[float] = (0.0,)
    draft_temperature: float | None = None  # where it has an effect
    drawn: Sequence[str] = ()  # methods whose candidates of greedy text are drawn at it
    acceptance: str | None = None  # of sampled rows that name none
    published: dict[tuple, dict[str, str]] = field(default_factory=dict)  # by row and size
    is_stand_in: bool = False  # the paper's dataset is not here, a file of prompts may be it

    def sizes(self) -> list[Size]:
        return list(product(self.prompt_tokens, self.new_tokens, self.temperature))


@dataclass(frozen=True)
class Table:
    """A table of tables.toml."""

    title: str
    columns: Sequence[str]
    parts: Sequence[Part]
    is_memory: bool = False  # it measures memory, each text in a process of its own


def read_part(found: dict) -> Part:
    """Return a part of tables.toml; its published figures are found again by row and size."""
    columns, cells = found.pop("published_columns", []), found.pop("published", {})
    texts = found.pop("rows", [row for row in cells if row not in HF_METHODS])
    part = Part(rows=[row for text in texts for row in expand(text)], **found)
    pairs = product([*part.rows, *HF_METHODS], part.sizes())
    cases = [Case(row, part.dataset, *size) for row, size in pairs]
    for case, label in zip(cases, labels(cases), strict=True):
        if label in cells:
            pairs = zip(columns, cells.pop(label), strict=True)
            size = case.key[2:]
            part.published[case.row, *size] = {name: cell for name, cell in pairs if cell}
    assert not cells, f"published of no row: {list(cells)}"
    return part


def expand(text: str) -> list[str]:
    """Return every row that a text with {a,b} or * stands for; the first braces vary slowest."""
    if text == "*":
        return list(METHODS)
    words = re.split(r"\{(.*?)\}", text)  # texts and braces in turn
    options = [word.split(",") if i % 2 else [word] for i, word in enumerate(words)]
    return ["".join(chosen) for chosen in product(*options)]


def read_table(found: dict) -> Table:
    return Table(parts=[read_part(part) for part in found.pop("parts")], **found)


ALL = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
TABLES = {name: read_table(found) for name, found in ALL["own"].items()}
PRESETS = {name: read_table(found) for name, found in ALL["papers"].items()}
NOT_HERE = ALL["not_here"]


def table_of(name: str) -> Table:
    """Return a table by its name. Raises UsageError."""
    tables = TABLES | PRESETS
    if name in NOT_HERE:
        raise UsageError(f"--table {name} is not here: it needs {NOT_HERE[name]}")
    if name not in tables:
        raise UsageError(f"unknown table {name!r}; there are {', '.join(tables)}")
    return tables[name]


def choose_parts(
    args: argparse.Namespace, unfetched: Sequence[str] = (), is_half: bool = False
) -> list[Part]:
    """Return the parts of the table asked for, on the datasets and at the sizes asked for.

    If no part is on the dataset asked for, the first one is moved there; so it is for a file of
    prompts, whose dataset is its name. Raises UsageError.

    Args:
        unfetched: datasets that could not be fetched. Our own prompts stand in for the first part
            on one of them, and the other such parts are left out.
        is_half: whether the target's precision is half, in which rounding changes texts.
    """
    table = table_of(args.table)
    parts: dict[str, Part] = {}
    if args.prompts is not None:
        parts[Path(args.prompts).name] = table.parts[0]
    elif args.dataset is not None:
        of = "wikitext2" if args.dataset == SCRIPT else args.dataset
        own = [part for part in table.parts if part.dataset == of]
        parts[args.dataset] = own[0] if own else table.parts[0]
    else:
        for part in table.parts:
            parts.setdefault(DATASETS[0] if part.dataset in unfetched else part.dataset, part)
    chosen = [choose_part(part, dataset, args) for dataset, part in parts.items()]
    if is_half and "exact" in table.columns:
        return [replace(part, rows=[*part.rows, CONTROL]) for part in chosen]
    return chosen


def choose_part(own: Part, dataset: str, args: argparse.Namespace) -> Part:
    """Return a part on this dataset, with the sizes asked for.

    What a paper prints stays only beside as many prompts of its own dataset and, if sampled,
    beside samples from all ids.
    """
    asked = {name: getattr(args, name) for name in ("n_prompts", *SYMBOLS)}
    given = {name: value for name, value in asked.items() if value is not None}
    part = replace(own, dataset=dataset, **given)
    is_theirs = dataset == own.dataset
    n_theirs = [own.n_prompts]
    if args.prompts is not None:
        is_theirs = own.is_stand_in
    elif dataset == SCRIPT and own.dataset == "wikitext2":
        is_theirs = True
        n_theirs.append(SCRIPT_TEXTS)
    if is_theirs and part.n_prompts in n_theirs and args.top_p in (None, 1.0):
        return part
    return replace(part, published={})


def choose_cases(parts: Sequence[Part], args: argparse.Namespace) -> list[Case]:
    """Return the cases of these parts: the rows of each, or those asked for, at each of its sizes.
    Raises UsageError."""
    cases = []
    for part in parts:
        texts = part.rows if args.methods is None else split_list(args.methods, "--methods")
        rows = choose_rows(texts, args)
        cases += [make_case(row, part, size) for size in part.sizes() for row in rows]
    return cases


def split_list(text: str, option: str) -> list[str]:
    """Return the parts of a comma-separated list. Raises UsageError if one is empty."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"{option} {text!r}: a part of the list is empty")
    return parts


def choose_rows(texts: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return the rows that these texts say; before them ar, the rows that they are held against
    and the baseline, if the texts lack them. Raises UsageError."""
    rows = [parse_row(text) for text in texts]
    rows += [name for name in HF_METHODS if args.hf and name not in rows]
    for row in rows:
        if rows.count(row) > 1:
            raise UsageError(f"--methods names a row twice: {row!r}")
    if not rows:
        return []
    baseline = parse_row("ar" if args.baseline is None else args.baseline)
    needed = [*(reference_of(row) for row in [*rows, baseline]), baseline]
    return list(dict.fromkeys(["ar", *(row for row in needed if row not in rows), *rows]))


def parse_row(text: str) -> str:
    """Return a row with single spaces between its words. Raises UsageError if it cannot be run."""
    row = " ".join(text.split())
    method, *words = row.split() or [""]
    if method in HF_METHODS:
        if words:
            raise UsageError(f"{text!r}: {method} takes no settings")
        return row
    if method not in METHODS:
        known = ", ".join([*METHODS, *HF_METHODS])
        raise UsageError(f"unknown method {method!r}; there are {known}")
    try:
        GenerationConfig.parse(*row.split()).make_rule()
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from error
    return row


def reference_of(row: str) -> str:
    """Return the ar whose ids a row's greedy texts must have: over the row's window and, for a
    strict row, strict with as many rows per pass."""
    words = ["ar"]
    if "strict" in row.split():
        words.append("strict")
        n_rows = strict_reference(GenerationConfig.parse(*row.split()).settings).rows
        if n_rows > 1:
            words.append(f"rows={n_rows}")
    words += [word for word in row.split() if word.partition("=")[0] in NUMBER_OPTIONS]
    return " ".join(words)


def make_case(row: str, part: Part, size: Size) -> Case:
    """Return a row at one size of a part; with the part's acceptance and draft temperature where
    they have an effect. Raises UsageError."""
    published = part.published.get((row, *size), {})
    case = Case(row, part.dataset, *size, reference=reference_of(row), published=published)
    if case.is_hf:
        return case
    config, rule = case.config(), case.config().make_rule()
    is_sampled = case.temperature > 0
    if config.acceptance and not is_sampled:
        raise UsageError(f"{row}: greedy text has one acceptance; --temperature")
    if part.acceptance and is_sampled and rule.max_verified > 1 and not config.acceptance:
        case = replace(case, acceptance=part.acceptance)
    if part.draft_temperature is not None:
        is_drawn = rule.draws_candidates and case.method in part.drawn and not is_sampled
        if has_temperature(rule, is_drawn or is_sampled):
            own = part.draft_temperature
            case = replace(case, draft_temperature=own, is_drawn=is_drawn)
    return case
