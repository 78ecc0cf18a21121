"""What is shown of a results file: its texts as a DataFrame, its table, its caption, its notes.

results = load("results/main_cpu.jsonl")
print(text_report(results, width=80))
text_frame(results).groupby("label").speedup.median()
"""

import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise

import pandas as pd

from benchmark.cases import Case, labels, places
from benchmark.columns import BESIDE, COLUMNS, METRICS, require_columns
from benchmark.results import CASE, KEY, Head, Results
from benchmark.step_times import StepTimes
from cli.compare import is_tie
from cli.errors import UsageError, printable

MANY = 8  # rows that a note names; it counts more than these
FEWEST = 3  # texts of a row whose quartiles are compared
NOT_OURS = "The paper's figures are of its own models, machine and code, whatever is named above."
KNOWN = (*KEY, *METRICS, "predicted_ms", "ids_digest", "depths", "calibration")  # if not in a file
AT = ["dataset", "prompt_tokens", "new_tokens", "temperature", "prompt", "round"]


def text_frame(results: Results) -> pd.DataFrame:
    """Return a row for each text, case by case: what the file says of it, if it says so, and

    key                      its key in `results.texts`
    label, place, reference  of its case
    baseline_NAME            the baseline's metrics on the same prompt in the same round
    has_baseline             whether there are such; not for the baseline itself
    speedup, predicted       x ar as measured, and as the times of single passes predict it
    is_compared              whether its ids are to be those of a reference that was measured
    is_different             whether they are others; `at` and `gap` say where and how narrowly
    """
    cases = results.head.cases
    order = {case.key: i for i, case in enumerate(cases)}
    keys = sorted(results.texts, key=lambda key: order[key[: len(CASE)]])
    lines = [results.texts[key] for key in keys]
    others = (name for line in lines for name in line)
    texts = pd.DataFrame(lines, columns=list(dict.fromkeys([*KNOWN, *others])))
    references = [case.reference for case in cases]
    of_cases = {"label": labels(cases), "place": places(cases), "reference": references}
    for name, found in of_cases.items():
        texts[name] = [found[order[key[: len(CASE)]]] for key in keys]
    texts["key"] = keys
    return with_difference(with_baseline(texts, results.head.baseline), results)


def beside(texts: pd.DataFrame, rows: pd.Series | str, names: Sequence[str]) -> pd.DataFrame:
    """Return for each text these columns of another row's text on the same prompt in the same
    round, and whether there `is_one`."""
    others = texts[["row", *AT, *names]].assign(is_one=True)
    rows = pd.Series(rows, index=texts.index, dtype=object)
    found = texts[AT].assign(row=rows).merge(others, on=["row", *AT], how="left")
    return found[[*names, "is_one"]].assign(is_one=found.is_one.notna())


def with_baseline(texts: pd.DataFrame, baseline: str) -> pd.DataFrame:
    own = beside(texts, baseline, BESIDE)
    texts = texts.assign(**{f"baseline_{name}": own[name] for name in BESIDE})
    texts["has_baseline"] = own.is_one & (texts.row != baseline)
    is_timed = texts.has_baseline & (texts.throughput > 0) & (own.throughput > 0)
    texts["speedup"] = (texts.throughput / own.throughput).where(is_timed)
    texts["predicted"] = (own.predicted_ms / texts.predicted_ms).where(is_timed)
    return texts


def with_difference(texts: pd.DataFrame, results: Results) -> pd.DataFrame:
    reference = beside(texts, texts.reference, ["ids_digest"])
    is_compared = reference.is_one & (texts.temperature == 0) & (texts.row != texts.reference)
    texts["is_compared"] = is_compared
    texts["is_different"] = is_compared & (texts.ids_digest != reference.ids_digest)
    found = [results.differences.get(key, {}) for key in texts.key]
    texts["at"] = [difference.get("at") for difference in found]
    texts["gap"] = [difference.get("gap") for difference in found]
    return texts


def is_exact(results: Results) -> bool:
    """Whether every text is its reference's that has to be: every strict one and, in float32,
    every other one except near-ties."""
    texts = text_frame(results)
    wrong = texts[texts.is_different]
    is_float32 = results.head.machine["dtype"] == "float32"
    return not any(
        "strict" in row.split() or (is_float32 and not is_near_tie(gap))
        for row, gap in zip(wrong.row, wrong.gap, strict=True)
    )


def is_near_tie(gap: float | None) -> bool:
    return bool(pd.notna(gap)) and is_tie(gap)


def by_label(results: Results) -> dict[str, pd.DataFrame]:
    """Return the texts of each case that has some, in the table's order."""
    return dict(list(text_frame(results).groupby("label", sort=False)))


def text_report(results: Results, width: int) -> str:
    """Return the table for a terminal of `width` columns, with its notes."""
    table = text_table(*table_cells(results), width)
    head, *sentences = [textwrap.fill(text, width) for text in [caption(results), *notes(results)]]
    return "\n\n".join([head, table, *sentences])


def markdown_report(results: Results) -> str:
    """Return the same for a document."""
    sentences = "\n".join(f"- {note}" for note in notes(results))
    return "\n\n".join([caption(results), markdown_table(*table_cells(results)), sentences])


def caption(results: Results) -> str:
    """Return what was measured, on what, on one line."""
    head = results.head
    what = "forwards alone"
    if head.cases:
        temperature = sizes_text(head.cases, "temperature") + draft_text(head.cases)
        n_rounds = 1 + max((int(key[-1]) for key in results.texts), default=0)
        what = f"{prompts_text(head)}, temperature {temperature}, rounds: {n_rounds}"
    where = f"{head.machine['target']} and {head.machine['draft']}, {machine_text(head.machine)}"
    if head.load_before is not None:
        where += f", load {head.load_before:.2f} as it began"
    found = f"{head.table}: {what}. {where}."
    if results.n_lacking:
        found = f"UNFINISHED, {len(results.texts):,} of {head.n_texts:,} texts. {found}"
    return printable(found)


def draft_text(cases: Sequence[Case]) -> str:
    """Return the temperature of the drafts that have one of their own, and how greedy text uses
    it."""
    own = [case for case in cases if case.draft_temperature]
    if not own:
        return ""
    heats = " / ".join(sorted({str(case.draft_temperature) for case in own}))
    of_greedy = {"drawn" if case.is_drawn else "ranked" for case in own if not case.temperature}
    kinds = f", greedy candidates {' or '.join(sorted(of_greedy))}" if of_greedy else ""
    return f" (draft {heats}{kinds})"


def prompts_text(head: Head) -> str:
    """Return how many prompts there are, whose, how long, and how much is written after them."""
    n_prompts = sum(head.n_prompts.values())
    noun = "prompt" if n_prompts == 1 else "prompts"
    longest, new_tokens = (sizes_text(head.cases, f"{name}_tokens") for name in ("prompt", "new"))
    which = f"{n_prompts} {noun} ({head.prompts}) of up to {longest} tokens"
    return f"{which}, {new_tokens} new tokens"


def sizes_text(cases: Sequence[Case], name: str) -> str:
    return " / ".join(dict.fromkeys(str(getattr(case, name)) for case in cases))


def machine_text(machine: dict[str, str | int | None]) -> str:
    """Return precision, processor, libraries and the code's commit."""
    libraries = f"torch {machine['torch']}"
    if "transformers" in machine:
        libraries += f", transformers {machine['transformers']}"
    precision = str(machine["dtype"])
    of_draft = machine.get("draft_dtype", precision)
    if of_draft != precision:
        precision += f" (draft {of_draft})"
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    where = f"{precision} on {machine['processor']}, {threads}"
    if "ranks" in machine:
        where += f" in each of {machine['ranks']} ranks"
    return f"{where}, {libraries}, Python {machine['python']}, commit {machine['commit']}"


def notes(results: Results) -> list[str]:
    """Return sentences for below the table: what it is, which rows are slow, which cannot be told
    apart, what is not exact, the bandwidth floor."""
    head, rows = results.head, by_label(results)
    found = [f"{head.title}."] if head.title else []
    if any(case.published for case in head.cases):
        found.append(NOT_OURS)
    found += slower_notes(rows, head.baseline)
    found += overlap_notes(rows, head.baseline)
    if "exact" in head.columns:
        found += exactness_notes(rows)
    if results.step_times:
        found += step_notes(results.step_times)
    return [printable(note) for note in found]


def slower_notes(rows: dict[str, pd.DataFrame], baseline: str) -> list[str]:
    """Return which rows are slower than the baseline, or how many if they are many."""
    medians = {label: texts.speedup.median() for label, texts in rows.items()}
    timed = {label: median for label, median in medians.items() if pd.notna(median)}
    slower = {label: median for label, median in timed.items() if round(median, 2) < 1}
    if len(slower) > MANY:
        return [f"{len(slower)} of {len(timed)} rows are slower than {baseline}."]
    names = ", ".join(f"{label} ({median:.2f}x)" for label, median in slower.items())
    return [f"Slower than {baseline} on the median prompt: {names}."] if slower else []


def overlap_notes(rows: dict[str, pd.DataFrame], baseline: str) -> list[str]:
    """Return for how many neighbours in the ranking by x ar the quartiles overlap, so that their
    order may be noise, and for which they do not. The baseline is in it, at 1.00x. Quartiles of
    fewer than FEWEST texts say nothing."""
    pairs, apart = 0, []
    rows = {label: texts for label, texts in rows.items() if len(texts) >= FEWEST}
    for _, own in pd.concat(rows.values()).groupby("place", sort=False) if rows else ():
        own = own.assign(speedup=own.speedup.mask(own.row == baseline, 1.0))
        found = own.groupby("label").speedup.quantile([0.25, 0.5, 0.75]).unstack().dropna()
        found = found.sort_values(0.5, ascending=False, kind="stable")
        for faster, slower in pairwise(found.index):
            pairs += 1
            if found[0.25][faster] > found[0.75][slower]:
                apart.append(f"{faster} > {slower}")
    if not pairs:
        return []
    n = pairs - len(apart)
    what = f"Ranked by x {baseline}, the quartiles of {n} of {pairs} neighbouring pairs overlap"
    if n:
        what += ", and the order of these may be noise"
    if n and 0 < len(apart) <= MANY:
        what += f". Told apart: {', '.join(apart)}"
    return [f"{what}."]


def exactness_notes(rows: dict[str, pd.DataFrame]) -> list[str]:
    """Return a sentence for each row with texts that are not its reference's, and what a reference
    is."""
    found = [describe_differences(rows[label]) for label in rows if rows[label].is_different.any()]
    if not found and any(texts.is_compared.any() for texts in rows.values()):
        found.append("Every greedy text is ar's, token for token.")
    if any("strict" in label.split() for label in rows):
        found.append("A strict row is held against strict ar with as many rows a pass.")
    if any(" window=" in label for label in rows):
        found.append("A row over a window is held against ar over it, not over the whole text.")
    return found


def describe_differences(texts: pd.DataFrame) -> str:
    """Return on how many texts a row differs from its reference, where first, and how narrowly the
    target decided there; "?" before that is known."""
    wrong = texts[texts.is_different]
    label, place, reference = wrong[["label", "place", "reference"]].iloc[0]
    first = int(wrong["at"].min()) if wrong["at"].notna().any() else "?"
    gap = f"at most {wrong.gap.max():.1e}" if wrong.gap.notna().any() else "not known"
    n_ties = sum(is_near_tie(one) for one in wrong.gap)
    return (
        f"{label} differs from {f'{reference} {place}'.strip()} on {len(wrong)} of "
        f"{texts.is_compared.sum()} texts, the first on prompt {wrong.prompt.min()}, from token "
        f"{first} at the earliest (top-2 gap in float32 {gap}; ties: {n_ties})."
    )


def step_notes(times: StepTimes) -> list[str]:
    """Return the weight-bandwidth floor of each model's one-row step."""
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
    """Return header and rows of the file's own table, as text. Raises UsageError if it has none."""
    if results.head.table == "steps":
        if not results.step_times:
            raise UsageError("the results file has no step times yet: go on with it (--resume)")
        return step_cells(results.step_times)
    return case_cells(results, results.head.columns)


def case_cells(results: Results, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, as text: the label of each case and its columns of these names,
    beside each what a paper prints there. Raises UsageError for an unknown column."""
    require_columns(names)
    cases = dict(zip(labels(results.head.cases), results.head.cases, strict=True))
    is_published = {name: any(name in case.published for case in cases.values()) for name in names}
    header = ["method"]
    for name in names:
        title = COLUMNS[name].title
        header.append(named(results.head, title))
        if is_published[name]:
            header.append("paper " + title.replace("x ar", "x"))  # over a baseline of its own
    body = []
    for label, texts in by_label(results).items():
        body.append([printable(label)])
        for name in names:
            body[-1].append(COLUMNS[name].cell(texts))
            if is_published[name]:
                body[-1].append(printable(cases[label].published.get(name, "")))
    return header, body


def named(head: Head, text: str) -> str:
    """Return a title with the name of the baseline instead of "ar"."""
    return re.sub(r"\b(x|over) ar\b", lambda word: f"{word[1]} {printable(head.baseline)}", text)


def step_cells(times: StepTimes) -> tuple[list[str], list[list[str]]]:
    """Return the times of a pass by its rows, and as multiples of one row's."""
    header = ["rows", "draft ms", "x 1 row", "target ms", "x 1 row"]
    drafts, targets = times.draft_ms, times.target_ms
    body = []
    for n_rows, draft, target in zip(times.rows, drafts, targets, strict=True):
        cells = [str(n_rows), f"{draft:.2f}", f"{draft / drafts[0]:.2f}"]
        body.append(cells + [f"{target:.2f}", f"{target / targets[0]:.2f}"])
    return header, body


def text_table(header: list[str], body: list[list[str]], width: int) -> str:
    """Return right-aligned columns; those that do not fit follow in further blocks, with the
    labels repeated."""
    first, *columns = zip(header, *body, strict=True)
    blocks = [[aligned(first, "<")]]
    for column in columns:
        cells = aligned(column, ">")
        used = sum(len(block[0]) + 2 for block in blocks[-1])
        if used + len(cells[0]) > width and len(blocks[-1]) > 1:
            blocks.append(blocks[0][:1])
        blocks[-1].append(cells)
    return "\n\n".join(join_columns(block) for block in blocks)


def join_columns(columns: Sequence[list[str]]) -> str:
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def aligned(cells: Sequence[str], side: str) -> list[str]:
    """Return all as wide as the widest. side: < or >, where their ends meet."""
    width = max(map(len, cells))
    return [f"{cell:{side}{width}}" for cell in cells]


def markdown_table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header)] + body
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
