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
from cli.models import Pair
from cli.options import has_temperature
from engine.way import SIZED_WORDS, Way
from methods import METHODS
from methods.sampler import GREEDY, Sampling


def split_list(text: str, option: str) -> list[str]:
    """A comma-separated list. Raises UsageError if a part is empty."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"{option} {text!r}: a part of the list is empty")
    return parts


def parse_run(text: str) -> Run:
    """A run of a method in words (engine.way.read_way), or of a peer; with no sizes. Raises
    UsageError."""
    row = " ".join(text.split())
    run = Run(row, row, 0, 0, 0.0, baseline="")
    if row in PEERS:
        return run
    if run.is_peer:
        raise UsageError(f"{text!r}: {run.method} takes no settings")
    if run.method not in METHODS:
        known = ", ".join([*METHODS, *PEERS])
        raise UsageError(f"unknown method {run.method!r}; there are {known}")
    try:
        run.way.rule()
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from error
    return run


def way_of(run: Run, options: Options, seed: int = 0) -> Way:
    """How a run's texts are written, of a method that is not a peer. seed: of a sampled one."""
    sampling = GREEDY
    if run.temperature or run.draft_temperature:
        top_p = options.top_p if run.temperature and options.top_p is not None else 1.0
        sampling = Sampling(run.temperature, top_p, seed, run.draft_temperature, run.is_drawn)
    return replace(run.way, sampling=sampling, graphs=not options.no_graphs)


def load_seconds(run: Run, pair: Pair, peers: Peers | None) -> float:
    """What loading took of what a run needs."""
    if run.is_peer:
        return peers.load_s
    if run.way.rule().max_depth > 0:
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
    if run.says("strict"):
        words.append("strict")
        rows = strict_reference(run.way.settings).rows
        if rows > 1:
            words.append(f"rows={rows}")
    words += [word for word in run.row.split() if word.partition("=")[0] in SIZED_WORDS]
    return " ".join(words)


def at_size(row: Run, part: Part, size: tuple[float, ...], suffix: str) -> Run:
    """A row at one of a part's sizes, its baseline and reference there. suffix: of labels. Raises
    UsageError."""
    end = suffix + part.size_words(size)
    names = {name: getattr(row, name) + end for name in ("label", "baseline", "reference")}
    published = part.printed.get((row.label, *size), {})
    sizes = dict(zip(SYMBOLS, size, strict=True))
    run = replace(row, dataset=part.dataset, published=published, **names, **sizes)
    if run.is_peer:
        return run
    if run.way.acceptance and not run.temperature:
        raise UsageError(f"{row.label}: greedy text has one acceptance; --temperature")
    return with_draft(with_acceptance(run, part), part)


def with_acceptance(run: Run, part: Part) -> Run:
    """A sampled run, accepted as its part has it unless it says how; its label stays, as a paper's
    figures go by it."""
    is_open = run.temperature and run.way.rule().max_verified > 1 and not run.way.acceptance
    if not (part.acceptance and is_open):
        return run
    return replace(run, row=f"{run.row} {part.acceptance}")


def with_draft(run: Run, part: Part) -> Run:
    """A run with a part's draft temperature, its greedy guesses drawn at it if its method's are to
    be, where that has an effect."""
    if part.draft_temperature is None:
        return run
    rule = run.way.rule()
    is_sampled = bool(run.temperature)
    is_drawn = rule.draws_candidates and run.method in part.drawn and not is_sampled
    if has_temperature(rule, is_drawn or is_sampled):
        run = replace(run, draft_temperature=part.draft_temperature, is_drawn=is_drawn)
    return run
