"""Reports of a results file: its texts as a DataFrame, its table, its caption and its notes.

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
from benchmark.columns import BASELINE_METRICS, COLUMNS, METRICS, require_columns
from benchmark.results import CASE_COLUMNS, KEY_COLUMNS, Head, Results
from benchmark.step_times import StepTimes
from cli.compare import is_tie
from cli.errors import UsageError, printable

MAX_NAMED_ROWS = 8  # that a note lists; if there are more, it gives their number
MIN_TEXTS = 3  # of a row, for its quartiles to be compared
PUBLISHED_NOTE = "The paper's figures were measured with its own models, hardware and code."
TEXT_COLUMNS = (*KEY_COLUMNS, *METRICS, "predicted_ms", "ids_digest", "depths", "calibration")
PROMPT_COLUMNS = [name for name in KEY_COLUMNS if name != "row"]  # equal for all rows of a prompt


def text_frame(results: Results) -> pd.DataFrame:
    """Return a DataFrame with a row for each text, ordered by case. It has the fields of the file,
    empty where a text has none, and these columns:

    key                      the text's key in `results.texts`
    label, place, reference  of the text's case
    baseline_NAME            the baseline's metrics on the same prompt in the same round
    has_baseline             whether these were measured; False for the baseline itself
    draft_pass_ms            milliseconds of drafting per pass of the draft
    speedup, predicted       x ar as measured, and as predicted from the times of single passes
    is_compared              whether the text must equal that of a reference, which was measured
    is_different             whether its ids differ from the reference's
    at, gap                  index of the first token that differs, and the top-2 logit gap there
    """
    cases = results.head.cases
    order = {case.key: i for i, case in enumerate(cases)}
    keys = sorted(results.texts, key=lambda key: order[key[: len(CASE_COLUMNS)]])
    lines = [results.texts[key] for key in keys]
    fields = (name for line in lines for name in line)
    texts = pd.DataFrame(lines, columns=list(dict.fromkeys([*TEXT_COLUMNS, *fields])))
    references = [case.reference for case in cases]
    of_cases = {"label": labels(cases), "place": places(cases), "reference": references}
    for name, found in of_cases.items():
        texts[name] = [found[order[key[: len(CASE_COLUMNS)]]] for key in keys]
    texts["key"] = keys
    texts["draft_pass_ms"] = (texts.draft_ms / texts.draft_passes).where(texts.draft_passes > 0)
    return with_difference(with_baseline(texts, results.head.baseline), results)


def match_texts(texts: pd.DataFrame, rows: pd.Series | str, names: Sequence[str]) -> pd.DataFrame:
    """Return, for each text, columns `names` of another row's text on the same prompt in the same
    round, and a column `is_measured`: whether there is such a text.

    rows: the other row, or one for each text.
    """
    keys = ["row", *PROMPT_COLUMNS]
    others = texts[[*keys, *names]].assign(is_measured=True)
    rows = pd.Series(rows, index=texts.index, dtype=object)
    found = texts[PROMPT_COLUMNS].assign(row=rows).merge(others, on=keys, how="left")
    return found[[*names, "is_measured"]].assign(is_measured=found.is_measured.notna())


def with_baseline(texts: pd.DataFrame, baseline: str) -> pd.DataFrame:
    found = match_texts(texts, baseline, BASELINE_METRICS)
    texts = texts.assign(**{f"baseline_{name}": found[name] for name in BASELINE_METRICS})
    texts["has_baseline"] = found.is_measured & (texts.row != baseline)
    is_timed = texts.has_baseline & (texts.throughput > 0) & (found.throughput > 0)
    texts["speedup"] = (texts.throughput / found.throughput).where(is_timed)
    texts["predicted"] = (found.predicted_ms / texts.predicted_ms).where(is_timed)
    return texts


def with_difference(texts: pd.DataFrame, results: Results) -> pd.DataFrame:
    reference = match_texts(texts, texts.reference, ["ids_digest"])
    is_compared = reference.is_measured & (texts.temperature == 0) & (texts.row != texts.reference)
    texts["is_compared"] = is_compared
    texts["is_different"] = is_compared & (texts.ids_digest != reference.ids_digest)
    found = [results.differences.get(key, {}) for key in texts.key]
    texts["at"] = [difference.get("at") for difference in found]
    texts["gap"] = [difference.get("gap") for difference in found]
    return texts


def is_exact(results: Results) -> bool:
    """Whether no strict text differs from its reference and, in float32, no other text does except
    at a near-tie."""
    texts = text_frame(results)
    different = texts[texts.is_different]
    is_float32 = results.head.machine["dtype"] == "float32"
    return not any(
        "strict" in row.split() or (is_float32 and not is_near_tie(gap))
        for row, gap in zip(different.row, different.gap, strict=True)
    )


def is_near_tie(gap: float | None) -> bool:
    return bool(pd.notna(gap)) and is_tie(gap)


def by_label(results: Results) -> dict[str, pd.DataFrame]:
    """Return the texts of each case by its label, in the table's order. Cases without texts are
    left out."""
    return dict(list(text_frame(results).groupby("label", sort=False)))


def text_report(results: Results, width: int) -> str:
    """Return the table for a terminal of `width` columns, with its notes."""
    table = text_table(*table_cells(results), width)
    head, *sentences = [textwrap.fill(text, width) for text in [caption(results), *notes(results)]]
    return "\n\n".join([head, table, *sentences])


def markdown_report(results: Results) -> str:
    """Return the caption, table and notes as markdown."""
    sentences = "\n".join(f"- {note}" for note in notes(results))
    return "\n\n".join([caption(results), markdown_table(*table_cells(results)), sentences])


def caption(results: Results) -> str:
    """Return one line on what was measured, with which models and on which machine."""
    head = results.head
    what = "single forward passes"
    if head.cases:
        temperature = sizes_text(head.cases, "temperature") + draft_text(head.cases)
        n_rounds = 1 + max((int(key[-1]) for key in results.texts), default=0)
        what = f"{prompts_text(head)}, temperature {temperature}, rounds: {n_rounds}"
    models = [head.machine[role] for role in ("target", "draft", "head") if role in head.machine]
    where = f"{' and '.join(map(str, models))}, {machine_text(head.machine)}"
    if head.load_before is not None:
        where += f", load average {head.load_before:.2f} at the start"
    found = f"{head.table}: {what}. {where}."
    if results.n_missing:
        found = f"UNFINISHED, {len(results.texts):,} of {head.n_texts:,} texts. {found}"
    return printable(found)


def draft_text(cases: Sequence[Case]) -> str:
    """Return the draft temperatures, if cases have any, and how greedy text chooses candidates."""
    chosen = [case for case in cases if case.draft_temperature]
    if not chosen:
        return ""
    values = " / ".join(sorted({str(case.draft_temperature) for case in chosen}))
    kinds = {"drawn" if case.is_drawn else "top-k" for case in chosen if not case.temperature}
    candidates = f", greedy candidates {' or '.join(sorted(kinds))}" if kinds else ""
    return f" (draft {values}{candidates})"


def prompts_text(head: Head) -> str:
    """Return the number, source and length of the prompts, and the number of new tokens."""
    n_prompts = sum(head.n_prompts.values())
    noun = "prompt" if n_prompts == 1 else "prompts"
    longest, new_tokens = (sizes_text(head.cases, f"{name}_tokens") for name in ("prompt", "new"))
    which = f"{n_prompts} {noun} ({head.prompts}) of up to {longest} tokens"
    return f"{which}, {new_tokens} new tokens"


def sizes_text(cases: Sequence[Case], name: str) -> str:
    return " / ".join(dict.fromkeys(str(getattr(case, name)) for case in cases))


def machine_text(machine: dict[str, str | int | None]) -> str:
    """Return dtypes, processor, threads, versions and the commit of the code."""
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
    """Return the notes below the table: its title, slow rows, overlapping quartiles, texts that are
    not exact, and the bandwidth floor."""
    head, rows = results.head, by_label(results)
    found = [f"{head.title}."] if head.title else []
    if any(case.published for case in head.cases):
        found.append(PUBLISHED_NOTE)
    found += slower_notes(rows, head.baseline)
    found += overlap_notes(rows, head.baseline)
    if "exact" in head.columns:
        found += exactness_notes(rows)
    if results.step_times:
        found += step_notes(results.step_times)
    return [printable(note) for note in found]


def slower_notes(rows: dict[str, pd.DataFrame], baseline: str) -> list[str]:
    """Return a note that lists or, if there are many, counts the rows slower than the baseline."""
    medians = {label: texts.speedup.median() for label, texts in rows.items()}
    timed = {label: median for label, median in medians.items() if pd.notna(median)}
    slower = {label: median for label, median in timed.items() if round(median, 2) < 1}
    if len(slower) > MAX_NAMED_ROWS:
        return [f"{len(slower)} of {len(timed)} rows are slower than {baseline}."]
    names = ", ".join(f"{label} ({median:.2f}x)" for label, median in slower.items())
    return [f"Slower than {baseline} on the median prompt: {names}."] if slower else []


def overlap_notes(rows: dict[str, pd.DataFrame], baseline: str) -> list[str]:
    """Return a note on neighbours in the ranking by x ar whose quartiles overlap, so that their
    order may be noise, and on those whose quartiles do not.

    The baseline is ranked at 1.00x. Rows with fewer than MIN_TEXTS texts are left out.
    """
    n_pairs, distinct = 0, []
    rows = {label: texts for label, texts in rows.items() if len(texts) >= MIN_TEXTS}
    for _, texts in pd.concat(rows.values()).groupby("place", sort=False) if rows else ():
        texts = texts.assign(speedup=texts.speedup.mask(texts.row == baseline, 1.0))
        found = texts.groupby("label").speedup.quantile([0.25, 0.5, 0.75]).unstack().dropna()
        found = found.sort_values(0.5, ascending=False, kind="stable")
        for faster, slower in pairwise(found.index):
            n_pairs += 1
            if found[0.25][faster] > found[0.75][slower]:
                distinct.append(f"{faster} > {slower}")
    if not n_pairs:
        return []
    n = n_pairs - len(distinct)
    note = f"Ranked by x {baseline}, {n} of {n_pairs} neighbouring pairs have overlapping quartiles"
    if n:
        note += ", so their order may be noise"
    if n and 0 < len(distinct) <= MAX_NAMED_ROWS:
        note += f". Without overlap: {', '.join(distinct)}"
    return [f"{note}."]


def exactness_notes(rows: dict[str, pd.DataFrame]) -> list[str]:
    """Return a note for each row with texts that differ from its reference's, and notes on which
    references are not plain ar."""
    found = [describe_differences(rows[label]) for label in rows if rows[label].is_different.any()]
    if not found and any(texts.is_compared.any() for texts in rows.values()):
        found.append("Every greedy text is identical to ar's, token for token.")
    if any("strict" in label.split() for label in rows):
        found.append("A strict row is compared with strict ar at the same number of rows per pass.")
    if any(" window=" in label for label in rows):
        found.append("A row with a window is compared with ar with that window.")
    return found


def describe_differences(texts: pd.DataFrame) -> str:
    """Return a note on the texts of a row that differ from its reference's: how many, the first
    prompt and token, and the largest top-2 gap. What is not measured yet is unknown in it."""
    different = texts[texts.is_different]
    label, place, reference = different[["label", "place", "reference"]].iloc[0]
    first = int(different["at"].min()) if different["at"].notna().any() else "unknown"
    gap = f"at most {different.gap.max():.1e}" if different.gap.notna().any() else "unknown"
    n_ties = sum(is_near_tie(one) for one in different.gap)
    return (
        f"{label} differs from {f'{reference} {place}'.strip()} on {len(different)} of "
        f"{texts.is_compared.sum()} texts (first prompt: {different.prompt.min()}, earliest token: "
        f"{first}, top-2 gap in float32: {gap}, near-ties: {n_ties})."
    )


def step_notes(times: StepTimes) -> list[str]:
    """Return a note for each model that compares a one-row pass with its bandwidth floor."""
    found = []
    for role in ("target", "draft"):
        n_bytes = getattr(times, f"{role}_bytes")
        ms = getattr(times, f"{role}_ms")[0]
        floor = times.floor_ms(role)
        speed = f"{floor / ms:.0%} of that speed"
        if ms < floor:
            speed = "faster, because the processor's cache holds the weights"
        found.append(
            f"A one-row {role} pass at {times.context} cached tokens reads {n_bytes / 1e6:,.1f} "
            f"MB, which would take {floor:.2f} ms at {times.copy_gb_s:.1f} GB/s, the bandwidth of "
            f"a large copy. The pass takes {ms:.2f} ms, {speed}."
        )
    return found


def table_cells(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the file's table, as text. Raises UsageError if it has no
    step times yet."""
    if results.head.table == "steps":
        if not results.step_times:
            raise UsageError("the results file has no step times yet; use --resume to measure them")
        return step_cells(results.step_times)
    return case_cells(results, results.head.columns)


def case_cells(results: Results, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows, as text: the label of each case, its columns of these names,
    and next to a column the published figures, if there are any.

    Raises UsageError for an unknown column.
    """
    require_columns(names)
    cases = dict(zip(labels(results.head.cases), results.head.cases, strict=True))
    is_published = {name: any(name in case.published for case in cases.values()) for name in names}
    header = ["method"]
    for name in names:
        title = COLUMNS[name].title
        header.append(name_baseline(results.head, title))
        if is_published[name]:
            header.append("paper " + title.replace("x ar", "x"))  # the paper has its own baseline
    body = []
    for label, texts in by_label(results).items():
        body.append([printable(label)])
        for name in names:
            body[-1].append(COLUMNS[name].cell(texts))
            if is_published[name]:
                body[-1].append(printable(cases[label].published.get(name, "")))
    return header, body


def name_baseline(head: Head, text: str) -> str:
    """Return a title with "ar" replaced by the name of the baseline."""
    return re.sub(r"\b(x|over) ar\b", lambda word: f"{word[1]} {printable(head.baseline)}", text)


def step_cells(times: StepTimes) -> tuple[list[str], list[list[str]]]:
    """Return a table of the times of a pass by its number of rows, also relative to one row."""
    header = ["rows", "draft ms", "x 1 row", "target ms", "x 1 row"]
    drafts, targets = times.draft_ms, times.target_ms
    body = []
    for n_rows, draft, target in zip(times.rows, drafts, targets, strict=True):
        cells = [str(n_rows), f"{draft:.2f}", f"{draft / drafts[0]:.2f}"]
        body.append(cells + [f"{target:.2f}", f"{target / targets[0]:.2f}"])
    return header, body


def text_table(header: list[str], body: list[list[str]], width: int) -> str:
    """Return a table with right-aligned columns. Columns that do not fit into `width` follow in
    further blocks, each with the labels repeated."""
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
    """Return the cells padded to the widest. side: < aligns left, > aligns right."""
    width = max(map(len, cells))
    return [f"{cell:{side}{width}}" for cell in cells]


def markdown_table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header)] + body
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
