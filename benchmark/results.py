"""Results files: what a benchmark leaves behind, and the tables made of it.

One JSON object per file: what was run on what, and one record for every prompt. Everything shown,
on the terminal, in the README or as a figure, is computed from the file alone.

    results = Results.load("results/main_cpu.json")
    print(results.report(width=80))
"""

import json
import os
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cli.errors import UsageError

MANY = 8  # rows, after which a note counts instead of naming them
FORMAT = 1  # of the file; another number is refused
README_START, README_END = "<!-- results: made by bench.py --readme -->", "<!-- end of results -->"
PUBLISHED = """\
| published | Wiki t/s | x | TPOT ms | tok/iter | iters | PG-19 t/s | x | tok/iter |
|---|---|---|---|---|---|---|---|---|
| AR | 133.4 | 1 | 7.48 | 1 | 1500 | 114.8 | 1 | 1 |
| Linear | 196.1 | 1.47 | 5.32 | 6.82 | 220 | 144.9 | 1.26 | 4.56 |
| Fixed D8 B3 | 200.7 | 1.50 | 5.30 | 6.79 | 221 | 185.5 | 1.62 | 6.20 |
| DynaTree | 219.5 | 1.64 | 4.59 | 7.08 | 212 | 194.9 | 1.70 | 6.17 |
| Fixed D5 B2 | 188.0 | 1.42 | | | | | | |
| + both | 213.2 | 1.61 | | | | | | |
| + history | 218.5 | 1.65 | | | | | | |"""
PUBLISHED_NOTE = (
    "Published (DynaTree v2, tables 1 to 4; the last three rows are its ablation): one A100, "
    "Pythia-2.8B and Pythia-70M in float16, 1,500 new tokens, x over transformers' eager loop, by "
    "code that verifies at wrong positions. Other hardware, other models and another baseline "
    "than the rows measured here: no figure of the one says anything about the other."
)


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


@dataclass
class Results:
    """A results file. `records`: one dict per run, prompt and repeat, see Bench.measure."""

    table: str
    columns: list[str]
    options: dict  # the command line's
    machine: dict  # versions, processor, models, device, dtype, threads, commit of the code
    prompts: dict  # dataset, how many, their sha256
    sizes: dict[str, Sequence[float]]  # prompt_tokens, new_tokens, temperature
    runs: list[Run]
    setup_s: dict[str, float] = field(default_factory=dict)  # by label: loading and warming up
    step_times: dict | None = None  # step_times.StepTimes
    records: list[dict] = field(default_factory=list)
    format: int = FORMAT

    @classmethod
    def load(cls, file: str | Path) -> "Results":
        """Raises UsageError: not there, not a results file, or one of another version."""
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            if content.get("format") != FORMAT:
                raise UsageError(f"{file} has format {content.get('format')}, not {FORMAT}")
            runs = [Run(**{**run, "settings": tuple(run["settings"])}) for run in content["runs"]]
            unknown = {r["run"] for r in content["records"]} - {run.label for run in runs}
            if unknown:
                raise ValueError(f"records of {', '.join(unknown)}, which is no run of it")
            return cls(**{**content, "runs": runs})
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{file} is not a results file: {error}") from error

    def save(self, file: Path) -> None:
        """Write all at once or not at all, a record a line. Raises UsageError."""
        content = asdict(self)
        records = ",\n".join(json.dumps(record) for record in content.pop("records"))
        head = json.dumps(content, indent=1).removesuffix("\n}")
        draft = file.with_suffix(".part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(f'{head},\n "records": [\n{records}\n]}}\n', encoding="utf-8")
            os.replace(draft, file)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from error

    def rows(self) -> list["Row"]:
        """The runs that have records, in the table's order."""
        by_run: dict[str, dict] = {run.label: {} for run in self.runs}
        for record in self.records:
            by_run[record["run"]][record["prompt"], record["repeat"]] = record
        return [
            Row(run, by_run[run.label], by_run[run.baseline], self.setup_s.get(run.label))
            for run in self.runs
            if by_run[run.label]
        ]

    def table_cells(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the table, as text."""
        if self.table == "steps":
            return step_cells(self.step_times)
        columns = [COLUMNS[name] for name in self.columns]
        body = [[row.run.label, *(text(row) for _, text in columns)] for row in self.rows()]
        return ["method", *(title for title, _ in columns)], body

    def report(self, width: int) -> str:
        """The table for a terminal of `width` columns, with its notes."""
        parts = [self.caption(), text_table(*self.table_cells(), width), *self.notes()]
        if self.table == "main":
            parts += [text_table(*markdown_cells(PUBLISHED), width), PUBLISHED_NOTE]
        return "\n\n".join(part if "\n" in part else textwrap.fill(part, width) for part in parts)

    def markdown(self) -> str:
        """The same for the README."""
        notes = "\n".join(f"- {note}" for note in self.notes())
        return f"{self.caption()}\n\n{markdown_table(*self.table_cells())}\n\n{notes}"

    def caption(self) -> str:
        """What was measured, on what."""
        m = self.machine
        libraries = ", ".join(
            f"{name} {m[name]}" for name in ("torch", "transformers") if name in m
        )
        prompt_size, text_size, temperature = (
            " / ".join(map(str, self.sizes[name]))
            for name in ("prompt_tokens", "new_tokens", "temperature")
        )
        what = (
            f"{self.prompts['n']} prompts ({self.prompts['dataset']}) of up to {prompt_size} "
            f"tokens, {text_size} new tokens, temperature {temperature}, rounds: "
            f"{self.options['repeats']}"
        )
        return (
            f"{self.table}: {what if self.runs else 'forwards alone'}. {m['target']} and "
            f"{m['draft']}, {m['dtype']} on {m['processor']}, {m['threads']} threads, "
            f"{libraries}, Python {m['python']}, commit {m['commit']}."
        )

    def notes(self) -> list[str]:
        """Sentences below the table: what is slower than ar, what is not exact, the floor."""
        found = []
        rows = [row for row in self.rows() if row.speedups]
        slower = [f"{r.run.label} ({x:.2f}x)" for r in rows if (x := r.speedup) < 1]
        if len(slower) > MANY:
            found.append(f"{len(slower)} of {len(rows)} rows are slower than ar.")
        elif slower:
            found.append(f"Slower than ar on the median prompt: {', '.join(slower)}.")
        if rows and "exact" in self.columns:
            is_summed = self.machine["dtype"] != "float32"  # then rounding makes many
            differences = [text for row in rows for text in row.differences(is_summed)]
            found += differences or ["Every greedy text is ar's, token for token."]
        if self.step_times:
            found += step_notes(self.step_times)
        return found


class Row:
    """One run's records, and ar's on the same prompts."""

    def __init__(self, run: Run, records: dict, baseline: dict, setup_s: float | None):
        """records, baseline: (prompt, repeat) -> record."""
        self.run, self.records, self.baseline, self.setup_s = run, records, baseline, setup_s
        self.is_peer = run.method.startswith("hf-")
        self.speedups = [
            value / ar
            for key, record in records.items()
            if key in baseline and run.label != run.baseline
            if (ar := baseline[key]["metrics"].get("throughput"))
            and (value := record["metrics"].get("throughput"))
        ]

    @property
    def speedup(self) -> float:
        """Median over prompts of throughput / ar's throughput on the same prompt."""
        return statistics.median(self.speedups)

    def median(self, name: str) -> float | None:
        """Median over prompts of one metric; None if this table does not measure it."""
        values = [record["metrics"].get(name) for record in self.records.values()]
        return None if None in values else statistics.median(values)

    def predicted(self) -> float:
        """Median over prompts of the speedup that the forwards' step times alone would give."""
        return statistics.median(
            self.baseline[key]["predicted_ms"] / record["predicted_ms"]
            for key, record in self.records.items()
            if key in self.baseline
        )

    def compared(self) -> list[tuple[dict, bool]]:
        """Records with whether their ids are ar's; none if sampled, where they need not be."""
        if self.run.temperature or self.run.label == self.run.baseline:
            return []
        return [
            (record, record["token_ids"] == self.baseline[key]["token_ids"])
            for key, record in self.records.items()
            if key in self.baseline
        ]

    def differences(self, is_summed: bool) -> list[str]:
        """A sentence for each text that is not ar's, or one for all of them."""
        compared = self.compared()
        differing = [record for record, is_equal in compared if not is_equal]
        if not (is_summed and differing):
            return [describe_difference(record) for record in differing]
        found = [record["difference"] for record in differing if "difference" in record]
        first = min((difference["at"] for difference in found), default="?")
        gaps = [difference["gap"] for difference in found if difference["gap"] is not None]
        gap = f"at most {max(gaps):.1e}" if gaps else "not known"
        count = f"{len(differing)} of {len(compared)} texts"
        return [
            f"{self.run.label} differs from ar on {count}, from token {first} at the earliest "
            f"(top-2 gap in float32 there {gap})."
        ]


def describe_difference(record: dict) -> str:
    found = record.get("difference") or {"at": "?", "gap": None, "is_tie": False}
    gap = "not known" if found["gap"] is None else f"{found['gap']:.1e}"
    kind = ": a tie" if found["is_tie"] else ""
    return (
        f"{record['run']} differs from ar on prompt {record['prompt']} from token {found['at']} "
        f"on (top-2 gap in float32 {gap}{kind})."
    )


def _number(name: str, digits: int, peers: bool = True) -> Callable[[Row], str]:
    """A cell: one metric's median; empty where the peers do not tell it."""

    def text(row: Row) -> str:
        value = None if row.is_peer and not peers else row.median(name)
        return "" if value is None else f"{value:.{digits}f}"

    return text


def _speedup(row: Row) -> str:
    return f"{row.speedup:.2f}x" if row.speedups else ""


def _spread(row: Row) -> str:
    return f"{min(row.speedups):.2f}-{max(row.speedups):.2f}" if row.speedups else ""


def _predicted(row: Row) -> str:
    if row.is_peer or not row.speedups or "predicted_ms" not in next(iter(row.records.values())):
        return ""
    return f"{row.predicted():.2f}x"


def _exact(row: Row) -> str:
    compared = row.compared()
    return f"{sum(is_equal for _, is_equal in compared)}/{len(compared)}" if compared else ""


def _more_memory(row: Row) -> str:
    ar = [record["metrics"].get("peak_mb") for record in row.baseline.values()]
    if row.run.label == row.run.baseline or not ar or None in ar:
        return ""
    return f"{row.median('peak_mb') / statistics.median(ar) - 1:+.1%}"


def _setup(row: Row) -> str:
    return "" if row.setup_s is None else f"{row.setup_s:.2f}"


COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {  # name -> title, cell
    "throughput": ("tok/s", _number("throughput", 1)),
    "speedup": ("x ar", _speedup),
    "spread": ("min-max", _spread),
    "predicted": ("predicted", _predicted),
    "end_to_end": ("end-to-end tok/s", _number("end_to_end", 1)),
    "setup": ("set-up s", _setup),
    "ttft": ("TTFT ms", _number("ttft_ms", 1)),
    "tpot": ("TPOT ms", _number("tpot_ms", 2)),
    "tokens_per_iter": ("tok/iter", _number("tokens_per_iter", 2)),
    "path_length": ("path", _number("path_length", 2)),
    "acceptance": ("accept", _number("acceptance", 2, peers=False)),
    "draft_nodes": ("nodes", _number("draft_nodes", 1, peers=False)),
    "iterations": ("iters", _number("iterations", 0)),
    "draft": ("draft ms", _number("draft_ms", 2, peers=False)),
    "verify": ("verify ms", _number("verify_ms", 2, peers=False)),
    "other": ("other ms", _number("other_ms", 2, peers=False)),
    "repetition": ("repeat", _number("repetition", 2)),
    "exact": ("exact", _exact),
    "peak": ("peak MB", _number("peak_mb", 0)),
    "more_memory": ("over ar", _more_memory),
    "floor": ("weights + caches MB", _number("floor_mb", 0)),
    "pools": ("graph pools MB", _number("pools_mb", 0)),
    "context": ("beside torch MB", _number("context_mb", 0)),
}


def step_cells(times: dict) -> tuple[list[str], list[list[str]]]:
    """Forward times by rows, and as multiples of one row's."""
    columns = zip(times["rows"], times["draft_ms"], times["target_ms"], strict=True)
    draft_1, target_1 = times["draft_ms"][0], times["target_ms"][0]
    header = ["rows", "draft ms", "x 1 row", "target ms", "x 1 row"]
    return header, [
        [str(n), f"{d:.2f}", f"{d / draft_1:.2f}", f"{t:.2f}", f"{t / target_1:.2f}"]
        for n, d, t in columns
    ]


def step_notes(times: dict) -> list[str]:
    """The weight-bandwidth floor of each model's one-row step."""
    found = []
    for role in ("target", "draft"):
        n_bytes, ms = times[f"{role}_bytes"], times[f"{role}_ms"][0]
        floor = n_bytes / times["copy_gb_s"] / 1e6
        found.append(
            f"One {role} step of one row at {times['context']} tokens reads {n_bytes / 1e6:,.1f} "
            f"MB, at least {floor:.2f} ms at the {times['copy_gb_s']:.1f} GB/s of a large copy; "
            f"it takes {ms:.2f} ms, {floor / ms:.0%} of that speed."
        )
    return found


def text_table(header: list[str], body: list[list[str]], width: int) -> str:
    """Right-aligned columns; those that do not fit follow in further blocks, labels repeated."""
    cells = [header, *body]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    blocks, start = [], 1
    while start < len(header):
        stop, used = start, widths[0]
        while stop < len(header) and (stop == start or used + 2 + widths[stop] <= width):
            used += 2 + widths[stop]
            stop += 1
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(start, stop))]
            )
            for row in cells
        ]
        blocks.append("\n".join(line.rstrip() for line in lines))
        start = stop
    return "\n\n".join(blocks)


def markdown_table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_cells(table: str) -> tuple[list[str], list[list[str]]]:
    """The reverse of markdown_table."""
    header, _, *body = (
        [c.strip() for c in line.strip("|").split("|")] for line in table.split("\n")
    )
    return header, body


def update_readme(readme: Path, files: Sequence[str]) -> None:
    """Write the results section anew from results files. Raises UsageError."""
    text = readme.read_text(encoding="utf-8")
    if text.count(README_START) != 1 or text.count(README_END) != 1:
        raise UsageError(f"{readme} lacks the lines that mark its results section")
    before, rest = text.split(README_START)
    _, after = rest.split(README_END)
    readme.write_text(before + readme_section(files) + after, encoding="utf-8")


def readme_section(files: Sequence[str]) -> str:
    """The README's results section, its marks included, from results files in this order."""
    tables = [f"From `{file}`. {Results.load(file).markdown()}" for file in files]
    return "\n\n".join([README_START, *tables, PUBLISHED, PUBLISHED_NOTE, README_END])
