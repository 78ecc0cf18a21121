"""Results files: what a benchmark leaves behind, one JSON object per file.

What was measured on what, and one record for every text. Everything shown, on the terminal, in the
documents or as a figure, is computed from the file alone. A file may be anybody's: its format, its
keys and their types and ranges are checked by the declarations below.

    results = Results.load("results/main_cpu.json")
    for row in results.rows():
        print(row.run.label, row.median("throughput"))
"""

import statistics
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from benchmark.peers import PEERS
from benchmark.step_times import StepTimes
from cli.errors import UsageError
from engine.files import write_whole
from engine.foreign import ForeignFile, read_json
from engine.way import Way, read_way

FORMAT = 4  # of the file; another number is refused
LIMIT = 2**28  # bytes of a file, some 400,000 texts
LARGE = 10**12  # past any figure; what is divided and drawn stays far from where floats end
NEEDED = {  # what is shown of every table
    "machine": "target draft dtype processor torch python commit threads",
    "sizes": "prompt_tokens new_tokens temperature",
}
UNTOLD = ("acceptance", "matching", "draft_nodes", "draft_passes")  # by transformers
UNTOLD += ("draft_ms", "verify_ms", "other_ms")

Count = Annotated[int, Meta(ge=0, le=LARGE)]
Size = Annotated[int, Meta(ge=1, le=LARGE)]
Temperature = Annotated[float, Meta(ge=0, le=LARGE)]  # 0 is greedy
Figure = Annotated[int, Meta(ge=-LARGE, le=LARGE)] | Annotated[float, Meta(ge=-LARGE, le=LARGE)]


@dataclass(frozen=True)
class Options:
    """What decides a table's figures: bench.py's options but those about the call alone."""

    table: str = "main"
    methods: str | None = None
    columns: str | None = None
    peers: bool | None = False  # None, in older files: of no row
    baseline: str | None = None  # row of the speed-ups; None: ar
    dataset: str | None = None
    prompts: str | None = None
    unfetched: tuple[str, ...] = ()  # datasets of the table's, for which our own prompts stand in
    n_prompts: Size | None = None
    prompt_tokens: tuple[Size, ...] | None = None
    new_tokens: tuple[Size, ...] | None = None
    temperature: tuple[float, ...] | None = None
    top_p: float | None = None
    seed: int | None = None
    repeats: Annotated[int, Meta(ge=1, le=10_000)] = 1
    pair: str | None = None  # a name for a target and a draft
    target: str | None = None
    draft: str | None = None
    device: str | None = None
    dtype: str | None = None
    draft_dtype: str | None = None
    threads: int | None = None
    no_graphs: bool = False


@dataclass(frozen=True)
class Run:
    """One row of a table: a method with its settings, on prompts and limits of one size."""

    label: str  # unique in its table
    row: str  # words of engine.way.read_way, or the name of a peer
    prompt_tokens: Count
    new_tokens: Count
    temperature: Temperature
    baseline: str  # label of the run that it is compared with, on the same prompts and limits
    reference: str = ""  # label of the run whose ids are to be its own; the baseline if empty
    dataset: str = ""  # of its prompts
    # Of the draft; None: none of its own, or no effect
    draft_temperature: Temperature | None = None
    is_drawn: bool = False  # guesses of greedy text, too
    published: dict[str, str] = field(default_factory=dict)  # by column: a paper's own figure

    @property
    def method(self) -> str:
        """Or peer."""
        return self.row.partition(" ")[0]

    @property
    def is_peer(self) -> bool:
        return self.method in PEERS

    @property
    def way(self) -> Way:
        """How it is written but for its sampling; of no peer. Raises ValueError for a row of a file
        that this version cannot write."""
        return read_way(*self.row.split())

    def says(self, word: str) -> bool:
        """Whether its row has a word that begins so."""
        return any(found.startswith(word) for found in self.row.split())


class Difference(TypedDict):
    """Where a text leaves its reference's."""

    at: Count  # index of the token
    gap: Figure | None  # the target's top-2 gap there in float32; None if that does not fit
    is_tie: bool


class Record(TypedDict):
    """One text: a run on a prompt, in one of the rounds over all prompts."""

    run: str  # its label
    prompt: Count  # index among its dataset's
    repeat: Count  # the round
    metrics: dict[str, Figure]  # of cli/metrics.py, or of the memory table
    ids_at: Count  # where its ids stand in the file's `token_ids`
    depths: NotRequired[dict[str, list[Count]]]  # as counts.count_depths
    calibration: NotRequired[dict[str, list[Count]]]  # as counts.count_calibration
    predicted_ms: NotRequired[Figure]  # what its forwards alone would take
    difference: NotRequired[Difference]


Texts = dict[tuple[int, int], Record]  # of one run, by prompt and round


class Prompts(TypedDict):
    """Whose prompts, how many, and what tells them from any others."""

    dataset: str
    n: Count
    sha256: NotRequired[str]


@dataclass
class Results:
    """A results file."""

    format: Literal[FORMAT]
    table: str
    columns: list[str]
    options: Options
    machine: dict[str, str | int | None]  # versions, processor, models, dtypes, threads, commit
    prompts: Prompts
    sizes: dict[str, list[Size | Temperature]]  # every value of prompt_tokens, new_tokens, ...
    runs: list[Run]
    setup_s: dict[str, Figure] = field(default_factory=dict)  # by label: loading and warming up
    step_times: StepTimes | None = None
    is_memory: bool = False  # peak memory was measured, and no speed
    title: str = ""  # of a paper's table: which it is, and what is different here
    load_before: Figure | None = None  # as one_minute_load has it
    n_texts: Count = 0  # that it has when it is done
    token_ids: list[list[Count]] = field(default_factory=list)  # every greedy text, equal ones once
    records: list[Record] = field(default_factory=list)

    @classmethod
    def load(cls, file: str | Path) -> "Results":
        """A file's checked content. Raises UsageError: not there, not a results file, or one of
        another format."""
        try:
            found = read_json(Path(file), cls, LIMIT)
        except ForeignFile as error:
            raise UsageError(f"not a results file of format {FORMAT}: {error}") from error
        found.require_sense(str(file))
        return found

    def require_sense(self, where: str) -> None:
        """Raise UsageError unless what is shown of every table is there, each run has a label of
        its own and a row that can be read, and all else names one of the runs."""
        for name, keys in NEEDED.items():
            lacking = set(keys.split()) - getattr(self, name).keys()
            if lacking:
                raise UsageError(f"{where}: {name} has no {', '.join(sorted(lacking))}")
        labels = {run.label for run in self.runs}
        named = {record["run"] for record in self.records}
        for run in self.runs:
            named |= {run.baseline, run.reference or run.baseline}
            if not run.is_peer:
                try:
                    read_way(*run.row.split())
                except ValueError as error:
                    raise UsageError(f"{where} has a row {run.row!r}: {error}") from error
        if named - labels:
            raise UsageError(f"{where} speaks of {min(named - labels)!r}, which is no run of it")
        if len(labels) < len(self.runs):
            raise UsageError(f"{where} has two runs of one label")
        n_different = len({tuple(ids) for ids in self.token_ids})
        last = max((record["ids_at"] for record in self.records), default=-1)
        if n_different < len(self.token_ids) or last >= n_different:
            raise UsageError(f"{where}: a text stands twice in token_ids, or is not there")

    def place_of(self, ids: list[int]) -> int:
        """Where a text's ids stand among `token_ids`, which has them from then on."""
        if ids not in self.token_ids:
            self.token_ids.append(ids)
        return self.token_ids.index(ids)

    def save(self, file: Path) -> None:
        """Write all at once or not at all, a record a line, a text's ids too. Raises UsageError."""
        content = msgspec.json.encode(replace(self, token_ids=[], records=[]))
        content = msgspec.json.format(content, indent=1)
        for name in ("token_ids", "records"):
            lines = b",\n".join(msgspec.json.encode(one) for one in getattr(self, name))
            before, key, after = content.partition(f'"{name}": ['.encode())
            content = before + key + b"\n" + lines + b"\n" + after
        write(file, content + b"\n")

    @property
    def is_begun(self) -> bool:
        """Whether anything in it was measured."""
        return bool(self.records or self.step_times)

    @property
    def lacks_step_times(self) -> bool:
        """Whether it is to have the times of single forwards, and has not."""
        is_timed = self.table == "steps" or "predicted" in self.columns
        return is_timed and not self.is_memory and not self.step_times

    @property
    def is_exact(self) -> bool:
        """Whether every text is its reference's that had to be: a strict one, and in float32 any
        but for near-ties."""
        is_float32 = self.machine["dtype"] == "float32"
        return not any(
            row.run.says("strict") or (is_float32 and not record["difference"]["is_tie"])
            for row in self.rows()
            for record, _ in row.differing()
        )

    def rows(self) -> list["Row"]:
        """The runs that have records, in the table's order."""
        by_run: dict[str, Texts] = {run.label: {} for run in self.runs}
        for record in self.records:
            by_run[record["run"]][record["prompt"], record["repeat"]] = record
        found = []
        for run in self.runs:
            reference = by_run[run.reference or run.baseline]
            texts = by_run[run.label], by_run[run.baseline], reference
            found.append(Row(run, *texts, self.setup_s.get(run.label)))
        return [row for row in found if row.records]


def write(file: Path, content: bytes | str) -> None:
    """Write a file whole or not at all, its folder made if there is none. Raises UsageError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


def key_of(record: Record) -> tuple[str, int, int]:
    """Which text it is of."""
    return record["run"], record["prompt"], record["repeat"]


@dataclass(frozen=True)
class Row:
    """One run's records, and on the same prompts ar's and those of its reference."""

    run: Run
    records: Texts
    baseline: Texts
    reference: Texts
    setup_s: float | None

    def values(self, name: str) -> list[float]:
        """One metric of every text; none if some lack it, as if transformers does not tell it."""
        found = [record["metrics"].get(name) for record in self.records.values()]
        return [] if None in found or (self.run.is_peer and name in UNTOLD) else found

    def median(self, name: str) -> float | None:
        """Median over prompts of one metric; None if this table does not measure it."""
        found = self.values(name)
        return statistics.median(found) if found else None

    def beside(self, others: Texts) -> list[tuple[Record, Record]]:
        """Records, each with another run's on the same prompt and in the same round; none for a run
        beside itself, as for ar beside `baseline`."""
        if others is self.records:
            return []
        return [(record, others[key]) for key, record in self.records.items() if key in others]

    @cached_property
    def speedups(self) -> list[float]:
        """Throughput / ar's on the same prompt; none if the table does not measure it."""
        found = []
        for record, ar in self.beside(self.baseline):
            ours = record["metrics"].get("throughput")
            theirs = ar["metrics"].get("throughput")
            if ours and theirs:  # 0 of a text of one token, which no pass follows
                found.append(ours / theirs)
        return found

    @property
    def speedup(self) -> float:
        """Median over prompts of throughput / ar's throughput on the same prompt."""
        return statistics.median(self.speedups)

    def ratio(self, name: str) -> float | None:
        """The mean of one metric / the baseline's mean on the same prompts, as the papers' authors
        compute speed-ups; None if there is none."""
        sums = [0.0, 0.0]
        for pair in self.beside(self.baseline):
            found = [record["metrics"].get(name) for record in pair]
            if None in found:
                return None
            sums = [total + value for total, value in zip(sums, found, strict=True)]
        return sums[0] / sums[1] if all(sums) else None

    def compared(self) -> list[tuple[Record, Record]]:
        """Records whose ids are to be the reference's, each with it; none if sampled."""
        return [] if self.run.temperature else self.beside(self.reference)

    def differing(self) -> list[tuple[Record, Record]]:
        """Of the compared ones, those whose ids are not the reference's."""
        return [pair for pair in self.compared() if pair[0]["ids_at"] != pair[1]["ids_at"]]
