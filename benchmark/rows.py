"""A table's rows: each a run of one method, told how, at which size, and what it is held against.

runs = choose_runs(TABLES["main"], Options(methods="ar,dynatree strict,linear window=512"))
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmark.peers import PEERS, Peers
from benchmark.results import Options, Run
from benchmark.tables import SYMBOLS, Part, Table
from cli.compare import strict_reference
from cli.errors import UsageError
from cli.models import Pair, Request
from cli.options import choose_window, has_temperature, parse_settings, require_acceptance
from draft_tree import Settings
from engine.streaming import WHOLE_TEXT, Window
from methods import METHODS
from methods.acceptances import ACCEPTANCES
from sampling import GREEDY, Sampling

# What a row may say beside its settings, as fields of Run
WORDS = {"rebuild": {"commit": "rebuild"}, "strict": {"is_strict": True}}
WORDS |= {name: {"acceptance": name} for name in ACCEPTANCES}
SIZED_WORDS = ("window", "sinks")  # the same, with a number: window=512


def split_list(text: str, option: str) -> list[str]:
    """A comma-separated list. Raises UsageError if a part is empty."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"{option} {text!r}: a part of the list is empty")
    return parts


def parse_run(text: str) -> Run:
    """A run from "method NAME=VALUE ... [rebuild] [strict] [ACCEPTANCE] [window=N [sinks=S]]", with
    no sizes. Raises UsageError."""
    method, *words = text.split() or [""]
    if method not in METHODS and method not in PEERS:
        known = ", ".join([*METHODS, *PEERS])
        raise UsageError(f"unknown method {method!r}; there are {known}")
    if method in PEERS and words:
        raise UsageError(f"{text!r}: {method} takes no settings")
    settings = []
    said = {}
    for word in words:
        told = read_word(text, word)
        if said.keys() & told.keys():
            raise UsageError(f"{text!r} says something twice")
        said |= told
        if not told:
            settings.append(word)
    run = Run(" ".join([method, *words]), method, tuple(settings), "keep", 0, 0, 0.0, "")
    run = replace(run, **said)
    if method in METHODS:
        rule = settings_of(run).rule()  # which raises UsageError if there can be none such
        if run.acceptance:
            require_acceptance(text, rule, run.acceptance)
    return run


def read_word(text: str, word: str) -> dict[str, object]:
    """What a row's word says of its Run, by field; nothing if it is one of the method's settings.
    text: the row. Raises UsageError."""
    name, _, value = word.partition("=")
    if name not in SIZED_WORDS:
        return WORDS.get(word, {})
    try:
        return {name: int(value)}
    except ValueError as error:
        raise UsageError(f"{text!r}: {word}: {name} takes a whole number") from error


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


def sampling_of(run: Run, top_p: float | None, seed: int) -> Sampling:
    """How a run's text is chosen, and its draft's guesses."""
    if not run.temperature and not run.draft_temperature:
        return GREEDY
    if not run.temperature or top_p is None:
        top_p = 1.0
    return Sampling(run.temperature, top_p, seed, run.draft_temperature, run.is_drawn)


def load_seconds(run: Run, pair: Pair, peers: Peers | None) -> float:
    """What loading took of what a run needs."""
    if run.method in PEERS:
        return peers.load_s
    if settings_of(run).rule().max_depth > 0:
        return pair.load_s["target"] + pair.load_s["draft"]
    return pair.load_s["target"]


def choose_runs(table: Table, options: Options) -> list[Run]:
    """Every run of a table: in each part its rows, or those asked for, at each of its sizes. A
    label ends in the dataset, if there are several, and in those sizes that have several values.
    Raises UsageError."""
    runs = []
    for part in table.parts:
        texts = part.rows
        if options.methods is not None:
            texts = split_list(options.methods, "--methods")
        rows = choose_rows(texts, options)
        suffix = f" on {part.dataset}" if len(table.parts) > 1 else ""
        for size in part.sizes():
            runs += [at_size(row, part, size, suffix) for row in rows]
    return runs


def choose_rows(texts: Sequence[str], options: Options) -> list[Run]:
    """The rows of these texts, before them ar, what else they are held against, and the baseline,
    where it is another. Raises UsageError."""
    texts = list(texts)
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
    baseline = parse_run("ar" if options.baseline is None else options.baseline)
    needed = [reference_of(run) for run in [*runs.values(), baseline]] + [baseline.label]
    before = {"ar": parse_run("ar")}
    before |= {label: parse_run(label) for label in needed if label not in runs}
    told = {"baseline": baseline.label}
    return [replace(run, reference=reference_of(run), **told) for run in (before | runs).values()]


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


def at_size(row: Run, part: Part, size: tuple[float, ...], suffix: str) -> Run:
    """A row at one of a part's sizes, its baseline and reference there. suffix: of labels. Raises
    UsageError."""
    end = suffix + part.size_words(size)
    names = {name: getattr(row, name) + end for name in ("label", "baseline", "reference")}
    published = part.printed.get((row.label, *size), {})
    sizes = dict(zip(SYMBOLS, size, strict=True))
    run = replace(row, dataset=part.dataset, published=published, **names, **sizes)
    if run.acceptance and not run.temperature:
        raise UsageError(f"{row.label}: greedy text has one acceptance; --temperature")
    return with_draft(run, part)


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
