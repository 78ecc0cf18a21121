"""Reports of a results file: its texts as a DataFrame, its table, its caption and its notes.

    results = load("results/regimes_embedded_cpu.jsonl")
    print(text_report(results, ["throughput", "speedup_mean"], width=80))
    text_frame(results).groupby("label").speedup.median()

A column NAME of a table is the median of a metric over the texts, with its quartiles. NAME_mean is
its mean and standard deviation, as in the papers. NAME_speedup is a ratio of means, as the papers'
authors compute speed-ups. docs/results.md explains the metrics, which are those of metrics.py.
"""

import argparse
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import pandas as pd

from dynatree_lab.benchmark.cases import PRICES, Case, labels
from dynatree_lab.benchmark.results import CASE_KEYS, KEYS, Line, Results
from dynatree_lab.benchmark.tuning import describe_settings, search, sort_by_speed
from dynatree_lab.cli.compare import is_tie, unknown_distribution
from dynatree_lab.methods import METHODS, PROJECT_METHODS
from dynatree_lab.replay.prices import Fit, Prices, fit, x_ar

NUMBERS = {  # by column: title, metric, format
    "throughput": ("tok/s", "throughput", "{:.1f}"),
    "speedup": ("x {baseline}", "speedup", "{:.2f}x"),
    "computed": ("x ar computed", "computed", "{:.2f}x"),
    "end_to_end": ("end-to-end tok/s", "end_to_end", "{:.1f}"),
    "wall": ("wall ms/token", "wall_ms", "{:.2f}"),
    "setup": ("set-up s", "setup_s", "{:.2f}"),
    "ttft": ("TTFT ms", "ttft_ms", "{:.1f}"),
    "tpot": ("TPOT ms", "tpot_ms", "{:.2f}"),
    "tokens_per_iter": ("tok/iter", "tokens_per_iter", "{:.2f}"),
    "accepted_per_iter": ("accepted/iter", "accepted_per_iter", "{:.2f}"),
    "acceptance_rate": ("accept", "acceptance_rate", "{:.2f}"),
    "top1_match": ("top-1 match", "top1_match", "{:.2f}"),
    "code_acceptance": ("accept (code)", "code_acceptance", "{:.1%}"),
    "drafted_per_iter": ("drafted/iter", "drafted_per_iter", "{:.1f}"),
    "rows": ("rows/tree", "rows", "{:.1f}"),
    "iterations": ("iters", "iterations", "{:.0f}"),
    "draft_passes": ("passes", "draft_passes", "{:.2f}"),
    "draft_pass": ("draft ms/pass", "draft_pass_ms", "{:.2f}"),
    "draft": ("draft ms", "draft_ms", "{:.2f}"),
    "verify": ("verify ms", "verify_ms", "{:.2f}"),
    "other": ("other ms", "other_ms", "{:.2f}"),
    "repetition": ("repeat", "repetition", "{:.2f}"),
    "peak": ("peak MB", "peak_mb", "{:.0f}"),
}
NARROW = ("rows", "draft_passes")  # without quartiles, so that the default columns fit 80 columns
RATES = ("throughput", "end_to_end")  # higher is faster; of times, lower is
WITH_SPEEDUP = {"throughput": "tok/s", "end_to_end": "end-to-end", "wall": "wall"}  # titles
OF_BASELINE = ["throughput", "end_to_end", "wall_ms", "peak_mb"]
FIELDS = [*KEYS, *(metric for _, metric, _ in NUMBERS.values())]
METRICS = list(dict.fromkeys(FIELDS[len(KEYS) :]))  # without repeats
FIELDS += ["target_rows", "draft_rows", "ids_digest", "calibration", "root_ranks", "draft_fit"]
FIELDS += ["incomplete"]  # trees of a replayed text
MAX_INCOMPLETE = 0.02  # share of such trees above which a row has no numbers
PROMPT_KEYS = [name for name in KEYS if name != "row"]  # equal for all rows of a prompt
PUBLISHED_NOTE = "The paper's figures were measured with its own models, hardware and code."
DRAWN_NOTE = (
    "Sampled texts with drawn candidates have other ids than ar's. The tests compute the "
    "distribution of the project's methods by enumeration (docs/method.md)."
)


def text_frame(results: Results) -> pd.DataFrame:
    """Return a DataFrame with a row for each text, ordered by case, or by speed if the table is
    sorted. It has the fields of the file, empty where a text has none, and these columns:

    key               the text's key in `results.texts`
    label, reference  of the text's case
    of_baseline_NAME  the baseline's metrics on the same prompt in the same round
    has_baseline      whether these were measured; False for the baseline itself
    draft_pass_ms     milliseconds of drafting per pass of the draft
    speedup           x ar as measured
    computed          x ar as computed from prices, if there are any
    rows              rows of a target pass: the drafted ones and the root
    is_compared       whether the text must equal that of a reference, which was measured
    is_different      whether its ids differ from the reference's
    at, gap           index of the first token that differs, and compare.rounding_gap there
    """
    order = {case.key: i for i, case in enumerate(results.cases)}
    keys = sorted(results.texts, key=lambda key: order[key[: len(CASE_KEYS)]])
    texts = pd.DataFrame([results.texts[key] for key in keys], columns=FIELDS).assign(key=keys)
    places = [order[key[: len(CASE_KEYS)]] for key in keys]
    names = labels(results.cases)
    texts["label"] = [names[i] for i in places]
    references = [results.cases[i].reference for i in places]
    texts["reference"] = pd.Series(references, dtype=object)  # also if there is none
    texts["is_replayed"] = [results.cases[i].is_replayed for i in places]
    for name, prices in choose_prices(results).items():
        texts[name] = [x_ar(prices, results.texts[key]) for key in keys]
    texts["rows"] = 1 + texts.drafted_per_iter
    texts["n_trees"] = texts.iterations
    unknown = [*METRICS, *results.head.get("prices", {})]
    texts.loc[is_too_incomplete(texts), unknown] = math.nan
    texts["draft_pass_ms"] = (texts.draft_ms / texts.draft_passes).where(texts.draft_passes > 0)
    texts = with_difference(with_baseline(texts, results.baseline), results)
    return sort_by_speed(texts, results.baseline) if results.is_sorted else texts


def choose_prices(results: Results) -> dict[str, Prices]:
    """Return the prices by the column that they give: of `computed` those of --prices or, in tables
    prices and tune, of the texts; then those of the table."""
    found = {title: Prices.parse(word) for title, word in results.head.get("prices", {}).items()}
    if word := results.head["options"].get("prices"):
        return {"computed": Prices.parse(word)} | found
    own = fit_own(results)
    return ({"computed": own.prices} if own else {}) | found


def is_too_incomplete(texts: pd.DataFrame) -> pd.Series:
    """Return which texts are of a row with a larger share of trees that may be incomplete."""
    of_row = texts.groupby("label")[["incomplete", "n_trees"]].transform("sum")
    return of_row.incomplete > MAX_INCOMPLETE * of_row.n_trees


def fit_own(results: Results) -> Fit | None:
    """Return the prices fitted to the texts of tables prices and tune. Return None for other
    tables, or while the texts do not suffice."""
    with suppress(ValueError):
        is_fitted = results.head["table"] == PRICES or results.is_sorted
        return fit(results.texts.values()) if is_fitted else None


def with_baseline(texts: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Join each text with the baseline's on the same prompt in the same round."""
    of_baseline = texts.loc[texts.row == baseline, [*PROMPT_KEYS, *OF_BASELINE]]
    of_baseline = of_baseline.rename(columns={name: f"of_baseline_{name}" for name in OF_BASELINE})
    texts = texts.merge(of_baseline, "left", on=PROMPT_KEYS, indicator="has_baseline")
    texts["has_baseline"] = (texts.has_baseline == "both") & (texts.row != baseline)
    ar = texts.of_baseline_throughput
    is_timed = texts.has_baseline & (texts.throughput > 0) & (ar > 0)
    texts["speedup"] = (texts.throughput / ar).where(is_timed)
    return texts


def with_difference(texts: pd.DataFrame, results: Results) -> pd.DataFrame:
    """Join each text with its reference on the same prompt in the same round."""
    names = {"row": "reference", "ids_digest": "reference_digest"}
    references = texts[[*KEYS, "ids_digest"]].rename(columns=names)
    texts = texts.merge(references, "left", on=["reference", *PROMPT_KEYS])
    has_ids = texts.reference_digest.notna() & texts.ids_digest.notna()
    texts["is_compared"] = has_ids & (texts.row != texts.reference)
    texts["is_different"] = texts.is_compared & (texts.ids_digest != texts.reference_digest)
    for name in ("at", "gap"):
        texts[name] = [results.differences.get(key, {}).get(name) for key in texts.key]
    return texts


def is_exact(results: Results) -> bool:
    """Whether no strict text differs from its reference and, in float32, no other text does except
    at a near-tie."""
    texts = text_frame(results)
    different = texts[texts.is_different]
    is_float32 = results.head["machine"]["dtype"] == "float32"
    return not any(
        "strict" in row.split() or (is_float32 and not is_tie(gap))
        for row, gap in zip(different.row, different.gap, strict=True)
    )


# Cells. Each function gets the texts of one case; a cell is empty if it was not measured


def values(metric: str, texts: pd.DataFrame) -> pd.Series:
    """Return a metric of every text, or nothing if a text lacks it, for example because
    transformers does not report it. Of speed-ups, return those whose baseline was measured."""
    found = texts[metric].dropna()
    return found if metric == "speedup" or len(found) == len(texts) else found[:0]


def write(form: str, number: float) -> str:
    """Return a number as text, from 100 on without decimals."""
    return (re.sub(r"\.\df", ".0f", form) if number >= 100 else form).format(number)


def narrow_cell(metric: str, form: str, texts: pd.DataFrame) -> str:
    """Return the median."""
    found = values(metric, texts)
    return "" if found.empty else write(form, found.median())


def median_cell(metric: str, form: str, texts: pd.DataFrame) -> str:
    """Return median and quartiles, as "1.27x (1.20-1.33)"; only the median if the formatted
    quartiles are equal."""
    return spread(values(metric, texts), form)


def spread(found: pd.Series, form: str) -> str:
    """Return median and quartiles; an empty string for no values."""
    if found.empty:
        return ""
    low, median, high = (write(form, found.quantile(q)) for q in (0.25, 0.5, 0.75))
    quartiles = f" ({low.removesuffix('x')}-{high.removesuffix('x')})"
    return median if low == high else median + quartiles


def mean_cell(metric: str, form: str, texts: pd.DataFrame) -> str:
    """Return the mean and the standard deviation over the texts, which divides by n as the papers'
    does; only the mean of a single text."""
    found = values(metric, texts)
    numbers = [statistics.mean(found), statistics.pstdev(found)] if len(found) else []
    return " ± ".join(write(form, number) for number in numbers[: len(found)])


def ratio(metric: str, texts: pd.DataFrame) -> float:
    """Return the mean of a metric / the baseline's mean on the same prompts; 0 if one of them is
    not known or not positive."""
    compared = texts[texts.has_baseline]
    own, ar = (compared[name].sum(skipna=False) for name in (metric, f"of_baseline_{metric}"))
    return own / ar if own > 0 and ar > 0 else 0.0


def speedup_cell(metric: str, texts: pd.DataFrame) -> str:
    found = ratio(metric, texts)
    return f"{found if metric in RATES else 1 / found:.2f}x" if found else ""


def more_memory_cell(texts: pd.DataFrame) -> str:
    found = ratio("peak_mb", texts)
    return f"{found - 1:+.1%}" if found else ""


def pooled_cell(texts: pd.DataFrame) -> str:
    """Return the tokens of all texts / the iterations of all texts."""
    n_iterations = texts.iterations.sum(skipna=False)
    n_tokens = (texts.tokens_per_iter * texts.iterations).sum(skipna=False)
    return f"{n_tokens / n_iterations:.2f}" if n_iterations > 0 else ""


def exact_cell(texts: pd.DataFrame) -> str:
    n = texts.is_compared.sum()
    return f"{n - texts.is_different.sum()}/{n}" if n else ""


def incomplete_cell(texts: pd.DataFrame) -> str:
    n = texts.incomplete.sum()
    return f"{n:.0f} of {texts.n_trees.sum():.0f} trees" if n else ""


COLUMNS: dict[str, tuple[str, Callable[[pd.DataFrame], str]]] = {  # by name: title, cell
    name: (title, partial(narrow_cell if name in NARROW else median_cell, metric, form))
    for name, (title, metric, form) in NUMBERS.items()
}
COLUMNS["tokens_pooled"] = "tok/iter pooled", pooled_cell
COLUMNS["exact"] = "exact", exact_cell
COLUMNS["incomplete"] = "incomplete", incomplete_cell
COLUMNS["more_memory"] = "over {baseline}", more_memory_cell
VARIANTS = {
    f"{name}_mean": (f"{title} mean", partial(mean_cell, metric, form))
    for name, (title, metric, form) in NUMBERS.items()
}
VARIANTS |= {
    f"{name}_speedup": (title + " x {baseline}", partial(speedup_cell, NUMBERS[name][1]))
    for name, title in WITH_SPEEDUP.items()
}


def column(name: str) -> str:
    """Return the name of a column, which may be given by its title. Raises
    argparse.ArgumentTypeError if there is none."""
    titles = {name: title for name, (title, _) in (COLUMNS | VARIANTS).items()}
    names = {title.format(baseline="ar"): name for name, title in titles.items()}
    name = names.get(name, name)
    if name not in COLUMNS | VARIANTS:
        known = f"{', '.join(COLUMNS)}, NAME_mean, NAME_speedup or a title (see --tables)"
        raise argparse.ArgumentTypeError(f"column is {name!r}, it must be one of {known}")
    return name


# Tables


def table_of(results: Results, texts: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the table as text: a row for each case with texts, its cells of these columns, and
    next to a column the published figures, if there are any."""
    cases = dict(zip(labels(results.cases), results.cases, strict=True))
    texts_of = dict(list(texts.groupby("label", sort=False)))
    of_table = results.head.get("prices", {})  # their columns come last
    found = {}
    for name in columns:
        title, cell = (COLUMNS | VARIANTS)[name]
        found[title.format(baseline=results.baseline)] = [cell(own) for own in texts_of.values()]
        if any(name in case.published for case in results.cases):
            paper = f"paper {title.replace('x {baseline}', 'x')}"  # it has a baseline of its own
            found[paper] = [cases[label].published.get(name, "") for label in texts_of]
    for name in of_table:
        found[name] = [median_cell(name, "{:.2f}x", own) for own in texts_of.values()]
    if of_table:  # so many columns have no room for quartiles
        found = {name: [cell.partition(" ")[0] for cell in cells] for name, cells in found.items()}
    return pd.DataFrame(found, index=list(texts_of)).rename_axis(columns="method")


def tables_of(results: Results, texts: pd.DataFrame, columns: Sequence[str]) -> list[pd.DataFrame]:
    """Return the tables of a report: one of all texts, or, if the table is sorted and settings were
    searched, one of the measured texts and one of the best settings."""
    best = search(texts) if results.is_sorted else {}
    measured = texts[~texts.is_replayed] if best else texts
    tables = [] if measured.empty else [table_of(results, measured, columns)]
    if not best:
        return tables
    cells = {
        method: (found.row, *(spread(each, "{:.2f}x") for each in (found.held_out, found.default)))
        for method, found in best.items()
    }
    titles = ["best setting", "x ar computed", "default"]
    found = pd.DataFrame.from_dict(cells, orient="index", columns=titles)
    return [*tables, found.rename_axis(columns="method")]


def text_report(results: Results, columns: Sequence[str], width: int) -> str:
    """Return the table for a terminal of `width` columns, with its caption and notes."""
    texts = text_frame(results)
    tables = [text_lines(each, width) for each in tables_of(results, texts, columns)]
    lines = [caption(results), *notes(results, texts, columns)]
    prose = [textwrap.fill(line, width) for line in lines]
    options = describe_options(results, texts)  # not filled, to be copied
    return "\n\n".join([prose[0], *tables, *prose[1:], *options])


def text_lines(table: pd.DataFrame, width: int) -> str:
    """Return a table for a terminal. pandas marks wrapped lines by a backslash, for which it keeps
    two columns free even if it need not wrap."""
    lines = table.to_string().splitlines()
    if len(lines[0]) > width:
        lines = table.to_string(line_width=width).splitlines()
    return "\n".join(line.rstrip(" \\") for line in lines)


def markdown_report(results: Results, columns: Sequence[str]) -> str:
    texts = text_frame(results)
    tables = ["\n".join(markdown_lines(each)) for each in tables_of(results, texts, columns)]
    sentences = "\n".join(f"- {note}" for note in notes(results, texts, columns))
    options = describe_options(results, texts)
    return "\n\n".join([caption(results), *tables, sentences, *options])


def markdown_lines(table: pd.DataFrame) -> list[str]:
    rows = [(table.columns.name, *table.columns), ["---"] * (1 + len(table.columns))]
    rows += table.itertuples(name=None)
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


# Captions and notes


def caption(results: Results) -> str:
    """Return one line on what was measured, with which models and on which machine."""
    head, machine = results.head, results.head["machine"]
    temperature = head.get("text_temperature")  # of recorded texts
    if temperature is None:
        temperature = sizes_text(results.cases, "temperature")
    n_rounds = 1 + max((text["round"] for text in results.texts.values()), default=0)
    what = f"{prompts_text(results)}, temperature {temperature}, rounds: {n_rounds}"
    models = " and ".join(machine[role] for role in ("target", "draft", "head") if role in machine)
    where = f"{models}, {machine_text(machine)}"
    if "streamed" in machine:
        where += f", {machine['streamed']}"
    if head["load_before"] is not None:
        where += f", load average {head['load_before']:.2f} at the start"
    found = f"{head['table']}: {what}. {where}."
    if results.n_missing:
        n = len(results.texts)
        found = f"UNFINISHED, {n:,} of {n + results.n_missing:,} texts. {found}"
    return found


def prompts_text(results: Results) -> str:
    """Return the number, source and length of the prompts, and the number of new tokens."""
    n_prompts = sum(results.head["n_prompts"].values())
    noun = "prompt" if n_prompts == 1 else "prompts"
    longest, new = (sizes_text(results.cases, name) for name in ("prompt_tokens", "new_tokens"))
    which = f"{n_prompts} {noun} ({results.head['prompts']}) of up to {longest} tokens"
    return f"{which}, {new} new tokens"


def sizes_text(cases: Sequence[Case], name: str) -> str:
    return " / ".join(dict.fromkeys(str(getattr(case, name)) for case in cases))


def machine_text(machine: Line) -> str:
    """Return dtypes, processor, threads, versions and the commit of the code."""
    libraries = f"torch {machine['torch']}"
    if "transformers" in machine:
        libraries += f", transformers {machine['transformers']}"
    precision = machine["dtype"]
    if machine["draft_dtype"] not in (None, precision):
        precision += f" (draft {machine['draft_dtype']})"
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    where = f"{precision} on {machine['processor']}, {threads}"
    if "ranks" in machine:
        where += f" in each of {machine['ranks']} ranks"
    return f"{where}, {libraries}, Python {machine['python']}, commit {machine['commit']}"


def notes(results: Results, texts: pd.DataFrame, columns: Sequence[str]) -> Iterator[str]:
    """Yield the notes below a table of these columns: its title, the source of published figures
    and of prices, and texts that are not exact."""
    if results.head["title"]:
        yield f"{results.head['title']}."
    if any(case.published for case in results.cases):
        yield PUBLISHED_NOTE
    for _, own in texts[texts.is_compared].groupby("label", sort=False):
        if own.is_different.any():
            yield describe_differences(own)
    if texts.is_compared.any() and not texts.is_different.any():
        yield "Every compared text is identical to ar's, token for token."
    if any(not case.writes_ar_ids for case in results.cases):
        yield DRAWN_NOTE
        drawn = [case.method for case in results.cases if not case.writes_ar_ids and not case.is_hf]
        if own := [method for method in dict.fromkeys(drawn) if method not in PROJECT_METHODS]:
            yield f"{unknown_distribution(own)}."
    if unused := dict.fromkeys(case.row for case in results.cases if skips_acceptance(case)):
        yield f"Greedy text does not call the acceptance of {', '.join(unused)}: use --temperature."
    if any(case.is_strict for case in results.cases):
        yield "A strict row is compared with strict ar at the same number of rows per pass."
    if any(case.has_window for case in results.cases):
        yield "A row with a window is compared with ar with that window."
    yield from replay_notes(texts)
    if of_table := results.head.get("prices"):
        prices = ", ".join(f"{title} {word}" for title, word in of_table.items())
        yield f"Medians. x ar is computed at these prices I:R:D (docs/replay.md): {prices}."
    if "computed" in columns:
        yield describe_computed(results)
    if own := fit_own(results):
        yield f"Prices fitted to these texts: {own.describe_errors()}."


def replay_notes(texts: pd.DataFrame) -> Iterator[str]:
    """Yield the notes on replayed texts: that they have no times, and how many rows have no numbers
    because their trees may lack candidates."""
    if texts.is_replayed.any():
        yield "Replayed texts have the trees and rows of real runs, and no times."
    if n := texts[is_too_incomplete(texts)].label.nunique():
        why = f"more than {MAX_INCOMPLETE:.0%} of their trees ask for candidates not recorded"
        yield f"Rows without numbers: {n}, because {why}."


def describe_computed(results: Results) -> str:
    """Return a note on the prices of column computed."""
    if not (prices := choose_prices(results).get("computed")):
        return "Without prices, x ar computed is empty: use --prices or --measure-prices."
    file = results.head["options"].get("prices_file")
    source = f", fitted to {file}" if file else ""
    return f"x ar computed has the prices {prices} of an iteration, a row and a draft pass{source}."


def describe_options(results: Results, texts: pd.DataFrame) -> Iterator[str]:
    """Yield options to be copied: the settings of table tune, or the prices of table prices."""
    yield from describe_settings(results, texts)
    if own := fit_own(results):
        yield f"Prices of this machine and pair:\n\n    --prices {own.prices}"
        yield f"Costs of auto and of cost gates that follow:\n\n    --set costs={own.prices.costs}"


def skips_acceptance(case: Case) -> bool:
    """Whether a greedy text does not call the acceptance that the method brings, which is for
    sampled text."""
    if case.is_hf or case.temperature or case.method not in METHODS:  # its file is not there
        return False
    method = case.generation_config().method
    return bool(method.facts.acceptance) and not method.make_accept


def describe_differences(texts: pd.DataFrame) -> str:
    """Return a note on the texts of a row that differ from its reference's: how many, the first
    prompt and token, and the largest gap (compare.rounding_gap), unknown if it is not measured yet.
    """
    different = texts[texts.is_different]
    label, row, reference = different[["label", "row", "reference"]].iloc[0]
    first = "unknown" if different["at"].isna().all() else int(different["at"].min())
    gap = "unknown" if different.gap.isna().all() else f"at most {different.gap.max():.1e}"
    n_ties = different.gap.map(is_tie).sum()
    return (
        f"{label} differs from {label.replace(row, reference, 1)} on {len(different)} of "
        f"{len(texts)} texts (first prompt: {different.prompt.min()}, earliest token: {first}, "
        f"gap in float32: {gap}, near-ties: {n_ties})."
    )
