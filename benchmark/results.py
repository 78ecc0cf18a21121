"""Results files: what a benchmark leaves behind, one JSON object per file.

What was measured on what, and one record for every prompt. Everything shown, on the terminal, in
the documents or as a figure, is computed from the file alone.

    results = Results.load("results/main_cpu.json")
    for row in results.rows():
        print(row.run.label, row.median("throughput"))
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmark.peers import PEERS
from benchmark.schema import check_results
from cli.errors import UsageError
from engine.files import write_whole
from engine.foreign import ForeignFile, read_json, short

FORMAT = 1  # of the file; another number is refused
LIMIT = 2**28  # bytes of a file, some ten million tokens


@dataclass(frozen=True)
class Run:
    """One row of a table: a method with its settings, on prompts and limits of one size."""

    label: str  # unique in its table
    method: str
    settings: tuple[str, ...]  # NAME=VALUE
    commit: str
    prompt_tokens: int
    new_tokens: int
    temperature: float  # 0 is greedy
    baseline: str  # label of ar on the same prompts and limits
    is_eager: bool = False  # on CUDA, without graphs
    is_strict: bool = False  # the target's logits are to be the reference's, bit for bit
    reference: str = ""  # label of the run whose ids are to be its own; the baseline if empty
    dataset: str = ""  # of its prompts
    window: int | None = None  # latest tokens that the caches keep; None: all of the text
    sinks: int | None = None  # first tokens that they keep beside a window
    draft_temperature: float | None = None  # of what a sampled run drafts; None: the target's
    published: dict[str, str] = field(default_factory=dict)  # by column: a paper's own figure


@dataclass
class Results:
    """A results file. `records`: one dict per run, prompt and repeat, see Bench.measure."""

    table: str
    columns: list[str]
    options: dict  # the command line's
    machine: dict  # versions, processor, models, device, dtypes, threads, commit of the code
    prompts: dict  # datasets, how many, their sha256
    sizes: dict[str, Sequence[float]]  # prompt_tokens, new_tokens, temperature
    runs: list[Run]
    setup_s: dict[str, float] = field(default_factory=dict)  # by label: loading and warming up
    step_times: dict | None = None  # step_times.StepTimes
    records: list[dict] = field(default_factory=list)
    is_memory: bool = False  # peak memory was measured, and no speed
    shared_by: list[dict] = field(default_factory=list)  # ranks, of which a record names one
    title: str = ""  # of a paper's table: which it is, and what is different here
    format: int = FORMAT

    @classmethod
    def load(cls, file: str | Path) -> "Results":
        """Raises UsageError: not there, not a results file, or one of another version."""
        try:
            content = read_json(Path(file), limit=LIMIT)
            require_format(content, str(file))
            check_results(content, str(file))
        except ForeignFile as error:
            raise UsageError(f"not a results file: {error}") from error
        fill_in(content)
        return cls(**content)

    def save(self, file: Path) -> None:
        """Write all at once or not at all, a record a line. Raises UsageError."""
        content = asdict(self)
        records = ",\n".join(json.dumps(record) for record in content.pop("records"))
        head = json.dumps(content, indent=1).removesuffix("\n}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, f'{head},\n "records": [\n{records}\n]}}\n')
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from error

    @property
    def is_begun(self) -> bool:
        """Whether anything in it was measured."""
        return bool(self.records or self.step_times)

    def rows(self) -> list["Row"]:
        """The runs that have records, in the table's order."""
        by_run: dict[str, dict] = {run.label: {} for run in self.runs}
        for record in self.records:
            by_run[record["run"]][record["prompt"], record["repeat"]] = record
        found = []
        for run in self.runs:
            records = by_run[run.label]
            if records:
                baseline = by_run[run.baseline]
                reference = by_run[run.reference or run.baseline]
                found.append(Row(run, records, baseline, reference, self.setup_s.get(run.label)))
        return found


def require_format(content: object, where: str) -> None:
    """Raise ForeignFile for a results file of another version, whatever else it says."""
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise ForeignFile(f"{where} has format {short(content['format'])}, not {FORMAT}")


def fill_in(content: dict) -> None:
    """Make the runs of a file's JSON object, and what it lacks if it is from before."""
    content.setdefault("is_memory", content["table"] == "memory")
    dataset = {"dataset": content["prompts"]["dataset"]}  # there was one for all runs
    runs = []
    for run in content["runs"]:
        runs.append(Run(**(dataset | run | {"settings": tuple(run["settings"])})))
    content["runs"] = runs


class Row:
    """One run's records, and on the same prompts ar's and those of its reference."""

    def __init__(
        self, run: Run, records: dict, baseline: dict, reference: dict, setup_s: float | None
    ):
        """records, baseline, reference: (prompt, repeat) -> record."""
        self.run = run
        self.records = records
        self.baseline = baseline
        self.reference = reference
        self.setup_s = setup_s
        self.is_peer = run.method in PEERS
        self.speedups = self.measure_speedups()

    def beside_ar(self) -> list[tuple[dict, dict]]:
        """Records, each with ar's on the same prompt and in the same round; none for ar itself."""
        return self.beside(self.baseline)

    def beside(self, others: dict) -> list[tuple[dict, dict]]:
        """Records, each with another run's on the same prompt; none for a run beside itself."""
        if others is self.records:
            return []
        pairs = []
        for key, record in self.records.items():
            if key in others:
                pairs.append((record, others[key]))
        return pairs

    def measure_speedups(self) -> list[float]:
        """Throughput / ar's on the same prompt; none if the table does not measure it."""
        found = []
        for record, ar in self.beside_ar():
            ours = record["metrics"].get("throughput")
            theirs = ar["metrics"].get("throughput")
            if ours and theirs:
                found.append(ours / theirs)
        return found

    @property
    def speedup(self) -> float:
        """Median over prompts of throughput / ar's throughput on the same prompt."""
        return statistics.median(self.speedups)

    def median(self, name: str) -> float | None:
        """Median over prompts of one metric; None if this table does not measure it."""
        values = [record["metrics"].get(name) for record in self.records.values()]
        if None in values:
            return None
        return statistics.median(values)

    def predicted(self) -> float | None:
        """Median over prompts of the speedup that the forwards' step times alone would give; None
        where a text has no such prediction."""
        ratios = []
        for record, ar in self.beside_ar():
            if not record.get("predicted_ms") or "predicted_ms" not in ar:
                return None
            ratios.append(ar["predicted_ms"] / record["predicted_ms"])
        return statistics.median(ratios)

    def compared(self) -> list[tuple[dict, dict]]:
        """Records whose ids are to be the reference's, each with it; none if sampled."""
        if self.run.temperature:
            return []
        return self.beside(self.reference)

    def differing(self) -> list[tuple[dict, dict]]:
        """Of the compared ones, those whose ids are not the reference's."""
        pairs = self.compared()
        return [pair for pair in pairs if pair[0]["token_ids"] != pair[1]["token_ids"]]
