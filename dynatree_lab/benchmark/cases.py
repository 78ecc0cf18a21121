"""The cases of a table: each is a row on one dataset at one size, with a paper's published figures.

tables.toml has this project's tables and the papers'. The program's options change a table's
rows, datasets and sizes.

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

from dynatree import draft_temperature
from dynatree_lab.benchmark.hf import HF_METHODS
from dynatree_lab.benchmark.prompts import DATASETS, SCRIPT, SCRIPT_TEXTS
from dynatree_lab.cli.compare import strict_reference
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import SAMPLING, GenerationConfig
from dynatree_lab.methods import METHODS, PROJECT_METHODS
from dynatree_lab.methods.sampler import Sampling

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}  # in labels
DEFAULT_COLUMNS = ("throughput", "speedup", "tokens_per_iter", "draft_passes", "exact")
PRICES = "prices"  # table of --measure-prices
HEAD = "head"  # word of a row that drafts with the EAGLE head of --head
CONTROL = "ar rows=16"  # in half precision, shows what rounding changes without any drafting
Size = tuple[int, int, float]  # prompt tokens, new tokens, temperature


@dataclass(frozen=True)
class Case:
    """A row of a table: a method with its settings, on one dataset's prompts, at one size."""

    row: str  # words for GenerationConfig.parse and HEAD, or one of hf.HF_METHODS
    dataset: str
    prompt_tokens: int  # maximum; a prompt may be shorter
    new_tokens: int
    temperature: float  # 0 is greedy
    reference: str = "ar"  # row whose greedy text must have the same ids
    draft_temperature: float | None = None  # where it has an effect; older files: None for 1
    is_drawn: bool = False  # draw the candidates of greedy text
    is_replayed: bool = False  # over a recorded text or ar's, without the target
    acceptance: str | None = None  # of sampled text; None: the row's or the method's own
    published: dict[str, str] = field(default_factory=dict, hash=False)  # a paper's, by column

    @property
    def key(self) -> tuple[str, str, int, int, float]:
        """The fields that identify the case in its table."""
        return self.row, self.dataset, self.prompt_tokens, self.new_tokens, self.temperature

    @property
    def method(self) -> str:
        return self.row.partition(" ")[0]

    @property
    def is_hf(self) -> bool:
        """Whether transformers generates the texts."""
        return self.method in HF_METHODS

    @property
    def uses_head(self) -> bool:
        """Whether an EAGLE head drafts, and not the draft model."""
        return HEAD in self.row.split()

    @property
    def is_strict(self) -> bool:
        return "strict" in self.row.split()

    @property
    def has_window(self) -> bool:
        return " window=" in self.row

    @property
    def is_drafting(self) -> bool:
        """Whether a draft model or an EAGLE head runs."""
        return not self.is_hf and self.base_config.method.needs_draft

    @property
    def writes_ar_ids(self) -> bool:
        """Whether the texts must have the ids of their reference; with drawn candidates they have
        its distribution."""
        if not self.temperature:
            return True
        return not self.is_hf and self.base_config.method.writes_ar_ids

    def generation_config(
        self, top_p: float | None = None, seed: int = 0, graphs: bool = True
    ) -> GenerationConfig:
        """Return the generation config, which rows of transformers do not have. Raises UsageError
        for an invalid row."""
        given = {"temperature": self.temperature, "seed": seed}
        if self.temperature and top_p is not None:
            given["top_p"] = top_p
        if self.draft_temperature is not None and "draft_temperature=" not in self.row:
            given["draft_temperature"] = self.draft_temperature
        if self.is_drawn:
            given["draws_greedy"] = True
        words = [word for word in self.row.split() if word != HEAD]
        try:
            config = GenerationConfig.parse(*words, *filter(None, [self.acceptance]), **given)
        except ValueError as error:
            raise UsageError(f"{self.row}: {error}") from error
        return replace(config, graphs=graphs)

    @property
    def base_config(self) -> GenerationConfig:
        """The config without sampling, which the temperature of the case may not allow."""
        words = [word for word in self.row.split() if word.partition("=")[0] not in SAMPLING]
        return Case(" ".join(words), "", 0, 0, 0.0).generation_config()


def labels(cases: Sequence[Case]) -> list[str]:
    """Return the name of each case in its table: its row, and the dataset and sizes that differ
    between the cases, as in "ar on pg19 T=100"."""
    values: dict[tuple[str, str], set[float]] = {}
    for case, name in product(cases, SYMBOLS):
        values.setdefault((case.dataset, name), set()).add(getattr(case, name))
    has_several = len({case.dataset for case in cases}) > 1
    found = []
    for case in cases:
        words = [case.row] + [f"on {case.dataset}"] * has_several
        for name, symbol in SYMBOLS.items():
            if len(values[case.dataset, name]) > 1:
                words.append(f"{symbol}={getattr(case, name)}")
        found.append(" ".join(words))
    return found


@dataclass(frozen=True)
class Part:
    """A part of a table in tables.toml: the rows and sizes to run on one dataset."""

    rows: Sequence[str]
    searched: Sequence[str] = ()  # rows that are replayed over ar's texts
    dataset: str = DATASETS[0]
    n_prompts: int = 12
    prompt_tokens: Sequence[int] = (150,)
    new_tokens: Sequence[int] = (128,)
    temperature: Sequence[float] = (0.0,)
    text_temperature: float | None = None  # of recorded texts; None if the target writes them
    draft_temperature: float | None = None  # of cases where it has an effect
    top_k_temperature: float | None = None  # the same, for top-k candidates only
    drawn: Sequence[str] = ()  # methods that draw the candidates of greedy text
    acceptance: str | None = None  # of sampled rows that name none
    published: dict[tuple, dict[str, str]] = field(default_factory=dict)  # by row and size
    is_substitute: bool = False  # replaces a paper's dataset, which is not available

    def sizes(self) -> list[Size]:
        return list(product(self.prompt_tokens, self.new_tokens, self.temperature))


@dataclass(frozen=True)
class Table:
    """A table of tables.toml."""

    title: str  # may have a place for the drafter's name
    parts: Sequence[Part]
    columns: Sequence[str] = DEFAULT_COLUMNS
    is_memory_table: bool = False  # measures peak memory, each text in a new process
    is_sorted: bool = False  # by speedup; the report ends with settings (tuning.py)
    replay: str | None = None  # file of recorded texts in this folder, in place of a target
    prices: dict[str, str] = field(default_factory=dict)  # by the title of a column of x ar


def read_part(found: dict) -> Part:
    """Return a part of tables.toml, with its published figures by row and size."""
    columns, cells = found.pop("published_columns", []), found.pop("published", {})
    patterns = found.pop("rows", [row for row in cells if row not in HF_METHODS])
    searched = [row for pattern in found.pop("searched", ()) for row in expand(pattern)]
    rows = [row for pattern in patterns for row in expand(pattern)]
    part = Part(rows=rows, searched=searched, **found)
    pairs = product([*part.rows, *HF_METHODS], part.sizes())
    cases = [Case(row, part.dataset, *size) for row, size in pairs]
    for case, label in zip(cases, labels(cases), strict=True):
        if label in cells:
            figures = zip(columns, cells.pop(label), strict=True)
            part.published[case.row, *case.key[2:]] = {name: cell for name, cell in figures if cell}
    assert not cells, f"published figures without a row: {list(cells)}"
    return part


def expand(pattern: str) -> list[str]:
    """Return the rows that a pattern with {a,b} or * matches. The first braces vary slowest."""
    if pattern == "*":
        return list(PROJECT_METHODS)
    words = re.split(r"\{(.*?)\}", pattern)  # odd indices: the content of braces
    options = [word.split(",") if i % 2 else [word] for i, word in enumerate(words)]
    return ["".join(chosen) for chosen in product(*options)]


def read_table(found: dict, **options: object) -> Table:
    """Return a table of tables.toml. options: fields of all of its parts."""
    return Table(parts=[read_part(options | part) for part in found.pop("parts")], **found)


DEFINITIONS = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
TABLES = {name: read_table(found) for name, found in DEFINITIONS["own"].items()}
# The papers take the draft's own probabilities, where they say nothing
PAPERS = DEFINITIONS["papers"].items()
PRESETS = {name: read_table(found, top_k_temperature=1.0) for name, found in PAPERS}
UNAVAILABLE = DEFINITIONS["unavailable"]


def find_table(name: str) -> Table:
    """Return a table by its name. Raises UsageError."""
    tables = TABLES | PRESETS
    if name in UNAVAILABLE:
        raise UsageError(f"--table {name} is not available: it needs {UNAVAILABLE[name]}")
    if name not in tables:
        raise UsageError(f"--table is {name!r}, it must be one of {', '.join(tables)}")
    return tables[name]


def choose_parts(args: argparse.Namespace) -> list[Part]:
    """Return the parts of the table that the options choose, at the sizes that they choose.

    If no part has the dataset of the options, the first part is moved to it. A file of prompts is
    a dataset whose name is the file's. Raises UsageError.
    """
    parts = {part.dataset: part for part in find_table(args.table).parts}
    first = next(iter(parts.values()))
    if args.prompts is not None:
        parts = {Path(args.prompts).name: first}
    elif args.dataset is not None:
        base = "wikitext2" if args.dataset == SCRIPT else args.dataset
        parts = {args.dataset: parts.get(base, first)}
    return [choose_part(part, dataset, args) for dataset, part in parts.items()]


def choose_part(original: Part, dataset: str, args: argparse.Namespace) -> Part:
    """Return a part moved to this dataset, at the sizes that the options choose.

    Published figures are kept only with the paper's dataset and number of prompts, and without
    top-p sampling.
    """
    options = {name: getattr(args, name) for name in ("n_prompts", *SYMBOLS)}
    given = {name: value for name, value in options.items() if value is not None}
    part = replace(original, dataset=dataset, **given)
    is_same_dataset = dataset == original.dataset
    published_n_prompts = [original.n_prompts]
    if args.prompts is not None:  # the file may hold the paper's dataset
        is_same_dataset = original.is_substitute
    elif dataset == SCRIPT and original.dataset == "wikitext2":
        is_same_dataset = True
        published_n_prompts.append(SCRIPT_TEXTS)
    if is_same_dataset and part.n_prompts in published_n_prompts and args.top_p in (None, 1.0):
        return part
    return replace(part, published={})


def choose_cases(
    parts: Sequence[Part], args: argparse.Namespace, control: Sequence[str] = ()
) -> list[Case]:
    """Return the cases of these parts: their rows and the control, or those of --methods, then
    those of --add, at each of their sizes. Raises UsageError."""
    cases = []
    for part in parts:
        rows = add_references([*(args.methods or [*part.rows, *control]), *(args.add or ())], args)
        cases += [make_case(row, part, size) for size in part.sizes() for row in rows]
        searched = [] if args.methods else [row for row in part.searched if row not in rows]
        # The full program draws the candidates of sampled text, which no replay can answer
        greedy = [size for size in part.sizes() if not size[2]]
        found = [make_case(row, part, size) for size in greedy for row in searched]
        cases += [replace(case, is_replayed=True) for case in found]
    return cases


def add_references(names: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return the rows, preceded by the other rows that their comparison needs: ar, the references
    and the baseline. Raises UsageError."""
    rows = [*names, *(row for row in HF_METHODS if args.hf and row not in names)]
    baseline = args.baseline or "ar"
    for row in (*rows, baseline):
        require_row(row)
    needed = [*map(reference_row, [*rows, baseline]), baseline]
    return list(dict.fromkeys(["ar", *(row for row in needed if row not in rows), *rows]))


def require_row(row: str) -> None:
    """Raise UsageError for a row that cannot be run."""
    method, *words = row.split()
    if method in HF_METHODS and not words:
        return
    for word in words:
        if word.startswith(("temperature=", "seed=")):
            raise UsageError(f"{row}: all rows have one; use --{word}")
    if method not in METHODS:
        known = ", ".join([*METHODS, *HF_METHODS])
        raise UsageError(f"method is {row!r}, it must be one of {known}")
    is_drafting = Case(row, "", 0, 0, 0.0).is_drafting  # raises UsageError
    if HEAD in words and not is_drafting:
        raise UsageError(f"{row}: {method} uses no draft model; remove {HEAD}")


def reference_row(row: str) -> str:
    """Return the `ar` row that must have the same greedy ids as a row: with the row's window and,
    if the row is strict, strict with as many rows per pass."""
    words = ["ar"]
    if "strict" in row.split():
        words.append("strict")
        n_rows = strict_reference(Case(row, "", 0, 0, 0.0).base_config).rows
        words += [f"rows={n_rows}"] * (n_rows > 1)
    words += [word for word in row.split() if word.startswith(("window=", "sinks="))]
    return " ".join(words)


def make_case(row: str, part: Part, size: Size) -> Case:
    """Return the case of a row at one size of a part, with the part's acceptance and draft
    temperature where they have an effect. Raises UsageError."""
    published = part.published.get((row, *size), {})
    case = Case(row, part.dataset, *size, reference=reference_row(row), published=published)
    if case.is_hf:
        return case
    config, is_sampled = case.generation_config(), case.temperature > 0
    method = config.method
    if config.acceptance and not is_sampled:
        raise UsageError(f"{row}: greedy text has only one acceptance; use --temperature")
    if part.acceptance and is_sampled and method.can_draw and not config.acceptance:
        case = replace(case, acceptance=part.acceptance)
    is_drawn = method.can_draw and case.method in part.drawn and not is_sampled
    if not method.has_temperature(is_drawn or is_sampled):
        return case
    given = config.sampling.draft_temperature or part.draft_temperature
    if not (method.can_draw and is_sampled):
        given = given or part.top_k_temperature
    sampling = Sampling(case.temperature, draft_temperature=given, draws_greedy=is_drawn)
    resolved = method.draft_temperature(sampling)
    if part.text_temperature is not None:
        own = given or method.facts.draft_temperature
        resolved = own or draft_temperature(part.text_temperature)
    return replace(case, draft_temperature=resolved, is_drawn=is_drawn)
