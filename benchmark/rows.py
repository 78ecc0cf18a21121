"""A table's rows: each a run of one method, told how, at which size, and what it is held against.

runs = choose_runs(TABLES["main"], "ar,dynatree tau=0.02 strict,linear window=512")
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from benchmark.peers import PEERS
from benchmark.results import Run
from benchmark.tables import SYMBOLS, Part, Table, split_list
from cli.compare import strict_reference
from cli.errors import UsageError
from cli.models import Pair
from cli.options import choose_window, parse_settings
from draft_tree import Settings
from engine.streaming import WHOLE_TEXT, Window
from methods import METHODS

WORDS = ("rebuild", "eager", "strict")  # of a row, beside its settings
SIZED_WORDS = ("window", "sinks")  # the same, with a number: window=512


def parse_run(text: str) -> Run:
    """A run from "method NAME=VALUE ... [rebuild] [eager] [strict] [window=N [sinks=S]]", with no
    sizes. Raises UsageError."""
    words = text.split()
    method = words.pop(0)
    settings = []
    names = [word.partition("=")[0] for word in words]
    if len(set(names)) < len(names):
        raise UsageError(f"{text!r} says something twice")
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


def is_drawing(run: Run) -> bool:
    """Whether its guesses are drawn from the draft where the text is sampled."""
    return settings_of(run).rule().is_drawing


def window_of(run: Run, pair: Pair) -> Window:
    """What the caches keep. Raises UsageError, naming the run, if it is too little for its trees or
    too much for the models."""
    if run.window is None:
        return WHOLE_TEXT
    try:
        return choose_window(run.window, run.sinks, settings_of(run).rule().max_rows, pair)
    except UsageError as error:
        raise UsageError(f"{run.label}: {error}") from error


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
        end = suffix + varied
        for row in rows:
            own = None
            if size["temperature"] and row.method in METHODS and is_drawing(row):
                own = part.draft_temperature
            labels = {"label": row.label + end, "baseline": rows[0].label + end}
            labels["reference"] = row.reference + end
            published = dict(part.published.get(row.label + varied, {}))
            run = replace(row, dataset=part.dataset, published=published, **labels, **size)
            runs.append(replace(run, draft_temperature=own))
    return runs
