"""Tables as lists of rows and columns; what the options make of them.

A table has parts: on each dataset its own rows, at every size. benchmark/presets.py has the tables
of the papers themselves.

    table = TABLES["main"]
    runs = choose_runs(table, "ar,dynatree tau=0.02")
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from benchmark.peers import PEERS
from benchmark.prompts import DATASETS
from benchmark.report import COLUMNS
from benchmark.results import Run
from cli.compare import CONTROL_ROWS, strict_reference
from cli.errors import UsageError
from cli.models import Pair
from cli.options import choose_window, parse_settings
from draft_tree import Settings
from engine.streaming import WHOLE_TEXT, Window
from methods import METHODS

SYMBOLS = {"prompt_tokens": "L", "new_tokens": "T", "temperature": "t"}
SPEED = ["throughput", "speedup", "spread"]
SPLIT = ["draft", "verify", "other"]
WORDS = ("rebuild", "eager", "strict")  # of a row, beside its settings
SIZED_WORDS = ("window", "sinks")  # the same, with a number: window=512


@dataclass(frozen=True)
class Part:
    """What a table runs on one dataset; the command line may change all of it."""

    methods: tuple[str, ...]  # as parse_run reads them
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
                    "dynatree depth=off history=off",
                    "dynatree breadth=off history=off",
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


def parse_run(text: str) -> Run:
    """A run from "method NAME=VALUE ... [rebuild] [eager] [strict] [window=N [sinks=S]]", with no
    sizes. Raises UsageError."""
    words = text.split()
    method = words.pop(0)
    settings = []
    sized: dict[str, int | None] = {name: None for name in SIZED_WORDS}
    for word in words:
        name, _, value = word.partition("=")
        if name in SIZED_WORDS:
            sized[name] = parse_number(text, name, value)
        elif word not in WORDS:
            settings.append(word)
    if sized["sinks"] is not None and sized["window"] is None:
        raise UsageError(f"{text!r}: sinks need a window")
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
    run = Run(label, method, tuple(settings), commit, 0, 0, 0.0, "")
    return replace(run, is_eager="eager" in words, is_strict="strict" in words, **sized)


def parse_number(text: str, name: str, value: str) -> int:
    """The number of a word of a row, NAME=VALUE. Raises UsageError."""
    if not re.fullmatch("[0-9]{1,9}", value):
        raise UsageError(f"{text!r}: {name} takes a whole number")
    return int(value)


def settings_of(run: Run) -> Settings:
    """What a run's method is told, of a method that is not a peer."""
    return parse_settings(METHODS[run.method], run.settings)


def window_of(run: Run, pair: Pair) -> Window:
    """What the caches keep. Raises UsageError, naming the run, if it is too little for its trees or
    too much for the models."""
    if run.window is None:
        return WHOLE_TEXT
    try:
        return choose_window(run.window, run.sinks, settings_of(run).rule().max_rows, pair)
    except UsageError as error:
        raise UsageError(f"{run.label}: {error}") from error


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
    table: Table,
    methods: str | None = None,
    with_peers: bool = False,
    everywhere: Sequence[str] = (),
) -> list[Run]:
    """Every run of a table: in each part its rows, or those asked for, at each of its sizes.

    everywhere: words for every row, such as strict or window=512. A label names the dataset if
    there are several. Raises UsageError.
    """
    runs = []
    for part in table.parts:
        suffix = ""
        if len(table.parts) > 1:
            suffix = f" on {part.dataset}"
        texts = part.methods
        if methods is not None:
            texts = split_list(methods, "--methods")
        runs += at_every_size(choose_rows(texts, with_peers, everywhere), part, suffix)
    return runs


def choose_rows(texts: Sequence[str], with_peers: bool, everywhere: Sequence[str]) -> list[Run]:
    """The rows of these texts, before them ar, the baseline, and what else they are held against.

    The baseline is over their window, if all have one; it is not strict. Raises UsageError.
    """
    texts = [add_words(text, everywhere) for text in texts]
    if with_peers:
        texts += [name for name in PEERS if name not in texts]
    runs = [parse_run(text) for text in texts]
    labels = [run.label for run in runs]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"--methods names a row twice: {label!r}")
    if not runs:
        return []
    baseline = parse_run(add_words("ar", [word for word in everywhere if word != "strict"]))
    return with_references([baseline] + [run for run in runs if run.label != baseline.label])


def add_words(text: str, words: Sequence[str]) -> str:
    """A row with these words after its method, but for those that it has; a peer takes none."""
    own = text.split()
    if own[0] in PEERS:
        return text
    names = [word.partition("=")[0] for word in own]
    added = [word for word in words if word.partition("=")[0] not in names]
    return " ".join(own[:1] + added + own[1:])


def with_references(runs: Sequence[Run]) -> list[Run]:
    """Runs, the first the baseline, told whose ids they must have; that run comes after the
    baseline if it is not among them."""
    labels = {run.label for run in runs}
    added = []
    found = []
    for run in runs:
        reference = reference_of(run)
        if reference not in labels:
            labels.add(reference)
            added.append(replace(parse_run(reference), reference=reference))
        found.append(replace(run, reference=reference))
    return found[:1] + added + found[1:]


def reference_of(run: Run) -> str:
    """The ar that a run's ids must be those of: over its window, and to a strict run strict with
    as many rows a pass."""
    words = ["ar"]
    if run.is_strict:
        words.append("strict")
        rows = strict_reference(settings_of(run)).rows
        if rows > 1:
            words.append(f"rows={rows}")
    for name in SIZED_WORDS:
        value = getattr(run, name)
        if value is not None:
            words.append(f"{name}={value}")
    return " ".join(words)


def at_every_size(rows: Sequence[Run], part: Part, suffix: str = "") -> list[Run]:
    """Each row at each prompt length, text length and temperature of a part, the first row there
    as its baseline. A label ends in `suffix` and in those sizes that have several values."""
    sizes = part.sizes()
    runs = []
    for values in product(*sizes.values()):
        size = dict(zip(sizes, values, strict=True))
        varied = ""
        for name, value in size.items():
            if len(sizes[name]) > 1:
                varied += f" {SYMBOLS[name]}={value}"
        if size["temperature"]:
            size["draft_temperature"] = part.draft_temperature
        end = suffix + varied
        for row in rows:
            labels = {"label": row.label + end, "baseline": rows[0].label + end}
            labels["reference"] = row.reference + end
            published = dict(part.published.get(row.label + varied, {}))
            run = replace(row, dataset=part.dataset, published=published, **labels, **size)
            runs.append(run)
    return runs
