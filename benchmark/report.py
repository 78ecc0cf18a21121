"""What is shown of a results file: its columns as text, its table, its caption, its notes.

results = Results.load("results/main_cpu.json")
print(text_report(results, width=80))
"""

import re
import textwrap
from collections.abc import Sequence

from benchmark.columns import COLUMNS, published, require_columns
from benchmark.results import Results, Row
from benchmark.step_times import StepTimes
from cli.errors import UsageError, shown

MANY = 8  # rows, after which a note counts instead of naming them
PRINTED = "The paper's figures are of its own models, machine and code, whichever are named above."


def text_report(results: Results, width: int) -> str:
    """The table for a terminal of `width` columns, with its notes."""
    table = text_table(*table_cells(results), width)
    head, *sentences = [textwrap.fill(text, width) for text in [caption(results), *notes(results)]]
    return "\n\n".join([head, table, *sentences])


def markdown_report(results: Results) -> str:
    """The same for a document."""
    sentences = "\n".join(f"- {note}" for note in notes(results))
    return "\n\n".join([caption(results), markdown_table(*table_cells(results)), sentences])


def caption(results: Results) -> str:
    """What was measured, on what, on one line."""
    what = "forwards alone"
    if results.runs:
        temperature = sizes_text(results, "temperature") + draft_text(results)
        rounds = 1 + max((record["repeat"] for record in results.records), default=0)
        what = f"{prompts_text(results)}, temperature {temperature}, rounds: {rounds}"
    machine = results.machine
    models = f"{machine['target']} and {machine['draft']}"
    where = machine_text(machine)
    if results.load_before is not None:
        where += f", load {results.load_before:.2f} as it began"
    found = f"{results.table}: {what}. {models}, {where}."
    if len(results.records) < results.n_texts:
        found = f"UNFINISHED, {len(results.records):,} of {results.n_texts:,} texts. {found}"
    return shown(found)


def draft_text(results: Results) -> str:
    """The temperature of those drafts that have one of their own, and how greedy text uses it."""
    own = [run for run in results.runs if run.draft_temperature]
    if not own:
        return ""
    heats = " / ".join(sorted({str(run.draft_temperature) for run in own}))
    of_greedy = {"drawn" if run.is_drawn else "ranked" for run in own if not run.temperature}
    kinds = f", greedy guesses {' or '.join(sorted(of_greedy))}" if of_greedy else ""
    return f" (draft {heats}{kinds})"


def prompts_text(results: Results) -> str:
    """How many prompts, whose, how long, and how much was written after them."""
    prompts = results.prompts
    longest = sizes_text(results, "prompt_tokens")
    new_tokens = sizes_text(results, "new_tokens")
    noun = "prompt" if prompts["n"] == 1 else "prompts"
    which = f"{prompts['n']} {noun} ({prompts['dataset']}) of up to {longest} tokens"
    return f"{which}, {new_tokens} new tokens"


def sizes_text(results: Results, name: str) -> str:
    return " / ".join(str(size) for size in results.sizes[name])


def machine_text(machine: dict) -> str:
    """Precision, the draft's where it is another, processor, libraries and the code's commit."""
    libraries = f"torch {machine['torch']}"
    if "transformers" in machine:
        libraries += f", transformers {machine['transformers']}"
    precision = machine["dtype"]
    of_draft = machine.get("draft_dtype", precision)
    if of_draft != precision:
        precision += f" (draft {of_draft})"
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    where = f"{precision} on {machine['processor']}, {threads}"
    if "ranks" in machine:
        where += f" in each of {machine['ranks']} ranks"
    return f"{where}, {libraries}, Python {machine['python']}, commit {machine['commit']}"


def notes(results: Results) -> list[str]:
    """Sentences below the table: what it is, what is slower than the baseline, what is not exact,
    the floor."""
    rows = results.rows()
    found = [f"{results.title}."] if results.title else []
    if any(run.published for run in results.runs):
        found.append(PRINTED)
    found += slower_notes([row for row in rows if row.speedups], baseline_of(results))
    if "exact" in results.columns:
        found += exactness_notes(rows)
    if results.step_times:
        found += step_notes(results.step_times)
    return [shown(note) for note in found]


def baseline_of(results: Results) -> str:
    """What the speed-ups are over."""
    return results.options.baseline or "ar"


def named(results: Results, text: str) -> str:
    """A title, in which the baseline has its own name."""
    return re.sub(r"\b(x|over) ar\b", lambda word: f"{word[1]} {shown(baseline_of(results))}", text)


def slower_notes(rows: list[Row], baseline: str) -> list[str]:
    """Which rows are slower than the baseline, or how many if they are many."""
    slower = [row for row in rows if round(row.speedup, 2) < 1]  # as it is shown
    if len(slower) > MANY:
        return [f"{len(slower)} of {len(rows)} rows are slower than {baseline}."]
    names = ", ".join(f"{row.run.label} ({row.speedup:.2f}x)" for row in slower)
    return [f"Slower than {baseline} on the median prompt: {names}."] if slower else []


def place_of(row: Row) -> str:
    """What of a row's label its dataset and sizes are, as "on pg19 T=100"; empty if the table has
    one of each."""
    words = (row.run.reference or row.run.baseline).split()[1:]  # of ar there
    own = ("strict", "rows=", "window=", "sinks=")
    return " ".join(word for word in words if not word.startswith(own))


def name_of(row: Row) -> str:
    """The rest of its label: method, settings, words."""
    return row.run.label.removesuffix(f" {place_of(row)}")


def exactness_notes(rows: list[Row]) -> list[str]:
    """A sentence for each row with texts that are not its reference's, and what that is."""
    found = [describe_differences(row) for row in rows if row.differing()]
    if not found and any(row.compared() for row in rows):
        found.append("Every greedy text is ar's, token for token.")
    if any(row.run.says("strict") for row in rows):
        found.append("A strict row is held against strict ar with as many rows a pass.")
    if any(row.run.says("window=") for row in rows):
        found.append("A row over a window is held against ar over it, not over the whole text.")
    return found


def describe_differences(row: Row) -> str:
    """On how many texts a row leaves its reference, where first, and how near the target's choice
    was there; what is not known yet of a run cut short is "?"."""
    differing = [record for record, _ in row.differing()]
    found = [record["difference"] for record in differing if "difference" in record]
    prompt = min(record["prompt"] for record in differing)
    first = min((difference["at"] for difference in found), default="?")
    gaps = [difference["gap"] for difference in found if difference["gap"] is not None]
    gap = f"at most {max(gaps):.1e}" if gaps else "not known"
    n_ties = sum(difference["is_tie"] for difference in found)
    reference = row.run.reference or row.run.baseline
    return (
        f"{row.run.label} differs from {reference} on {len(differing)} of {len(row.compared())} "
        f"texts, the first on prompt {prompt}, from token {first} at the earliest "
        f"(top-2 gap in float32 {gap}; ties: {n_ties})."
    )


def step_notes(times: StepTimes) -> list[str]:
    """The weight-bandwidth floor of each model's one-row step."""
    found = []
    for role in ("target", "draft"):
        n_bytes = getattr(times, f"{role}_bytes")
        ms = getattr(times, f"{role}_ms")[0]
        floor = times.floor_ms(role)
        speed = f"{floor / ms:.0%} of that speed"
        if ms < floor:
            speed = "faster, as the processor's cache holds the weights"
        found.append(
            f"One {role} step of one row at {times.context} tokens reads {n_bytes / 1e6:,.1f} "
            f"MB, {floor:.2f} ms at the {times.copy_gb_s:.1f} GB/s of a large copy; "
            f"it takes {ms:.2f} ms, {speed}."
        )
    return found


def table_cells(results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the results' own table, as text. Raises UsageError if it has none."""
    if results.table == "steps":
        if not results.step_times:
            raise UsageError("the results file has no step times yet: go on with it (--resume)")
        return step_cells(results.step_times)
    return run_cells(results, results.columns)


def run_cells(results: Results, names: list[str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text: each run's label and its columns of these names, beside each what
    a paper printed there. Raises UsageError for a column that there is not."""
    require_columns(names)
    rows = results.rows()
    columns = []
    for name in names:
        columns.append(COLUMNS[name])
        if any(name in row.run.published for row in rows):
            columns.append(published(name))
    header = ["method"] + [named(results, column.title) for column in columns]
    body = []
    for row in rows:
        body.append([shown(row.run.label)] + [column.cell(row) for column in columns])
    return header, body


def step_cells(times: StepTimes) -> tuple[list[str], list[list[str]]]:
    """Forward times by rows, and as multiples of one row's."""
    header = ["rows", "draft ms", "x 1 row", "target ms", "x 1 row"]
    drafts, targets = times.draft_ms, times.target_ms
    body = []
    for n_rows, draft, target in zip(times.rows, drafts, targets, strict=False):
        cells = [str(n_rows), f"{draft:.2f}", f"{draft / drafts[0]:.2f}"]
        body.append(cells + [f"{target:.2f}", f"{target / targets[0]:.2f}"])
    return header, body


def text_table(header: list[str], body: list[list[str]], width: int) -> str:
    """Right-aligned columns; those that do not fit follow in further blocks, labels repeated."""
    labels, *columns = zip(header, *body, strict=True)
    first = aligned(labels, "<")
    blocks = [first]
    for column in columns:
        cells = aligned(column, ">")
        if len(blocks[-1][0]) + 2 + len(cells[0]) > width and blocks[-1] is not first:
            blocks.append(first)
        blocks[-1] = [f"{line}  {cell}" for line, cell in zip(blocks[-1], cells, strict=True)]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)


def aligned(cells: Sequence[str], side: str) -> list[str]:
    """All as wide as the widest; side: < or >, where their ends meet."""
    width = max(map(len, cells))
    return [f"{cell:{side}{width}}" for cell in cells]


def markdown_table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header)] + body
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
