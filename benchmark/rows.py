"""A table's rows: each a run of one method, told how, at which size, and what it is held against.

runs = choose_runs(TABLES["main"], Options(methods="ar,dynatree strict,linear window=512"))
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from benchmark.peers import PEERS
from benchmark.results import Options, Run
from benchmark.tables import SYMBOLS, Part, Table, split_list
from cli.compare import strict_reference
from cli.errors import UsageError
from cli.models import Pair, Request
from cli.options import choose_window, has_temperature, parse_settings, require_acceptance
from draft_tree import Settings
from engine.streaming import WHOLE_TEXT, Window
from methods import METHODS
from methods.acceptances import ACCEPTANCES
from methods.settings import read_values
from sampling import Sampling

WORDS = ("rebuild", "eager", "kernels", "strict", *ACCEPTANCES)  # of a row, beside its settings


@dataclass(frozen=True)
class Caches:
    """What of a text a row's caches keep, where that is not all of it."""

    window: int
    sinks: int


SIZED_WORDS = tuple(f.name for f in fields(Caches))  # the same, with a number: window=512


def parse_run(text: str) -> Run:
    """A run from "method NAME=VALUE ... [rebuild] [eager] [kernels] [strict] [ACCEPTANCE]
    [window=N [sinks=S]]", with no sizes. Raises UsageError."""
    method, *words = text.split()
    names = [name_in(word) for word in words]
    if len(set(names)) < len(names):
        raise UsageError(f"{text!r} says something twice")
    settings = [word for word in words if word not in WORDS and name_in(word) not in SIZED_WORDS]
    if method in METHODS:
        parse_settings(METHODS[method], settings)
    elif method not in PEERS:
        known = ", ".join([*METHODS, *PEERS])
        raise UsageError(f"unknown method {method!r}; there are {known}")
    elif words:
        raise UsageError(f"{text!r}: {method} takes no settings")
    accepting = [word for word in words if word in ACCEPTANCES]
    if len(accepting) > 1:
        raise UsageError(f"{text!r} names two acceptances")
    commit = "rebuild" if "rebuild" in words else "keep"
    try:
        caches = read_values(Caches, [word for word in words if name_in(word) in SIZED_WORDS])
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from error
    run = Run(" ".join([method, *words]), method, tuple(settings), commit, 0, 0, 0.0, "")
    if accepting:
        run = replace(run, acceptance=accepting[0])
        require_acceptance(text, settings_of(run).rule(), run.acceptance)
    is_told = {"is_eager": "eager" in words, "is_strict": "strict" in words}
    return replace(run, has_kernels="kernels" in words, **is_told, **caches)


def name_in(word: str) -> str:
    """NAME of NAME=VALUE, or the word itself."""
    return word.partition("=")[0]


def settings_of(run: Run) -> Settings:
    """What a run's method is told, of a method that is not a peer."""
    return parse_settings(METHODS[run.method], run.settings)


def window_of(run: Run, pair: Pair) -> Window:
    """What the caches keep. Raises UsageError, naming the run, if it is too little for its trees or
    too much for the models."""
    if run.window is None and run.sinks is None:  # as of a peer, which has no settings
        return WHOLE_TEXT
    try:
        return choose_window(run.window, run.sinks, settings_of(run).rule().max_rows, pair)
    except UsageError as error:
        raise UsageError(f"{run.label}: {error}") from error


def request_of(run: Run, pair: Pair, prompt: list[int], sampling: Sampling) -> Request:
    """A text that continues these ids as the run says; of a method that is not a peer."""
    return Request(
        pair,
        prompt,
        settings_of(run),
        run.new_tokens,
        sampling=sampling,
        window=window_of(run, pair),
        commit=run.commit,
        strict=run.is_strict,
        acceptance=run.acceptance,
    )


def choose_runs(table: Table, options: Options) -> list[Run]:
    """Every run of a table: in each part its rows, or those asked for, at each of its sizes. A
    label names the dataset if there are several. Raises UsageError."""
    runs = []
    for part in table.parts:
        suffix = f" on {part.dataset}" if len(table.parts) > 1 else ""
        asked = options.methods
        texts = part.rows if asked is None else split_list(asked, "--methods")
        runs += at_every_size(choose_rows(texts, options), part, suffix)
    return runs


def choose_rows(texts: Sequence[str], options: Options) -> list[Run]:
    """The rows of these texts, before them ar, what else they are held against, and the baseline,
    where it is another.

    ar is over their window, if all have one; it is not strict. Raises UsageError.
    """
    everywhere = ["strict"] * options.strict + sized_words(options)
    texts = [add_words(text, everywhere) for text in texts]
    if options.peers:
        texts += [name for name in PEERS if name not in texts]
    runs = {}
    for text in texts:
        run = parse_run(text)
        if run.label in runs:
            raise UsageError(f"--methods names a row twice: {run.label!r}")
        runs[run.label] = run
    if not runs:
        return []
    ar = parse_run(" ".join(["ar", *sized_words(options)]))
    baseline = ar if options.baseline is None else choose_baseline(options.baseline, everywhere)
    found = {ar.label: ar}
    for label in [reference_of(run) for run in [*runs.values(), baseline]] + [baseline.label]:
        if label not in runs | found:
            found[label] = parse_run(label)
    told = {"baseline": baseline.label}
    return [replace(run, reference=reference_of(run), **told) for run in (found | runs).values()]


def choose_baseline(text: str, words: Sequence[str]) -> Run:
    """The row that speed-ups are over, as --methods would have it. Raises UsageError."""
    if not text.strip():
        raise UsageError("--baseline names no row")
    return parse_run(add_words(text, words))


def add_words(text: str, words: Sequence[str]) -> str:
    """A row with these words after its method, but for those that it has; a peer takes none."""
    method, *own = text.split()
    if method in PEERS:
        return text
    names = [name_in(word) for word in own]
    added = [word for word in words if name_in(word) not in names]
    return " ".join([method, *added, *own])


def reference_of(run: Run) -> str:
    """The ar that a run's ids must be those of: over its window, and to a strict run strict with
    as many rows a pass."""
    words = ["ar"]
    if run.is_strict:
        words.append("strict")
        rows = strict_reference(settings_of(run)).rows
        if rows > 1:
            words.append(f"rows={rows}")
    return " ".join([*words, *sized_words(run)])


def sized_words(of: Run | Options) -> list[str]:
    """A window and sinks as a row has them, those that there are."""
    values = {name: getattr(of, name) for name in SIZED_WORDS}
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def at_every_size(rows: Sequence[Run], part: Part, suffix: str = "") -> list[Run]:
    """Each row at each prompt length, text length and temperature of a part, its baseline and
    reference there. A label ends in `suffix` and in those sizes that have several values. Raises
    UsageError."""
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
            names = {"label": row.label + end, "baseline": row.baseline + end}
            names |= {"reference": row.reference + end, "dataset": part.dataset}
            run = replace(row, published=part.published(row.label, size), **names, **size)
            if run.acceptance and not run.temperature:
                raise UsageError(f"{row.label}: greedy text has one acceptance; --temperature")
            runs.append(with_draft(run, part))
    return runs


def with_draft(run: Run, part: Part) -> Run:
    """A run with a part's draft temperature, and its greedy guesses drawn at it, where that has an
    effect."""
    if part.draft_temperature is None or run.method not in METHODS:
        return run
    rule = settings_of(run).rule()
    is_sampled = bool(run.temperature)
    is_drawn = rule.is_drawing and part.guesses == "drawn" and not is_sampled
    if has_temperature(rule, is_drawn or is_sampled):
        run = replace(run, draft_temperature=part.draft_temperature, is_drawn=is_drawn)
    return run
