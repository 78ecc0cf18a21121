"""Settings for a pair of models: the order of table tune, and what its report ends with.

Below the table are options of the full program: those of the fastest row that is not auto, those of
auto, and the acceptance probabilities by rank that sequoia, recycle and graft take as `p`.

    results = load("tune.jsonl")
    list(describe_settings(results, text_frame(results)))  # "Options for auto, 1.52x ar: ...", ...
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import pandas as pd

from dynatree_lab.benchmark.cases import HEAD, Case, labels
from dynatree_lab.benchmark.hf import HF_METHODS
from dynatree_lab.benchmark.results import Line, Results
from dynatree_lab.generation.step import Step

# Rows that verify one level of other methods' candidates: the draft's, and successors of a table.
# The lines of their texts have root_ranks
DRAFTED, RETRIEVED = "fixed D=1 B=4 tau=0", "recycle N=9 D_max=1"
METHODS_WITH_P = {DRAFTED: "sequoia", RETRIEVED: "recycle and graft"}
MODEL_OPTIONS = ("target", "draft", "device", "dtype", "draft_dtype", "threads", "target_memory")


def sort_by_speed(texts: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the texts by temperature, then by the median speedup of their row, highest first. The
    baseline's speedup is 1; rows without a speedup come last."""
    texts = texts.assign(speedup=texts.speedup.where(texts.row != baseline, 1.0))
    texts["median_speedup"] = texts.groupby("label").speedup.transform("median")
    return texts.sort_values(["temperature", "median_speedup"], ascending=[True, False])


def describe_settings(results: Results, texts: pd.DataFrame) -> Iterator[str]:
    """Yield the settings that the texts of each temperature lead to: a line that names them, and an
    indented one to be copied. Yield nothing if the table is not sorted."""
    if not results.is_sorted:
        return
    cases = dict(zip(labels(results.cases), results.cases, strict=True))
    for temperature, own in texts.groupby("temperature"):
        rows = own[own.median_speedup.notna() & ~own.row.isin(HF_METHODS)].drop_duplicates("label")
        is_auto = rows.row.str.match(r"auto\b")
        for name, found in (("the fastest row but auto", rows[~is_auto]), ("auto", rows[is_auto])):
            if not found.empty:
                label, speedup = found[["label", "median_speedup"]].iloc[0]
                heading = f"Options for {name}, {speedup:.2f}x {results.baseline}:"
                yield f"{heading}\n\n    {options_of(cases[label], results.head)}"
        for row, methods in METHODS_WITH_P.items():
            counts = own[own.row == row].root_ranks.dropna()
            n_trees = sum(count["trees"] for count in counts)
            if probs := rank_probs(counts, is_falling=row == RETRIEVED):
                where = f"temperature {temperature}, from the children of {n_trees} roots"
                word = ":".join(f"{p:.3g}" for p in probs)
                yield f"p of {methods} at {where}:\n\n    --set p={word}"


def options_of(case: Case, head: Line) -> str:
    """Return the options with which the full program runs a case over the models of the table,
    quoted for a shell. --set also takes words that are no settings, such as strict."""
    given = head["options"] | {"temperature": case.temperature}
    if case.uses_head:
        given["draft"] = head["machine"]["head"]
    words = ["--method", case.method]
    words += [part for word in case.row.split()[1:] if word != HEAD for part in ("--set", word)]
    words += [part for file in given.get("load", ()) for part in ("--load", file)]
    sampling = ("temperature", "top_p") if case.temperature else ()
    for name in (*MODEL_OPTIONS, *sampling):
        if name in given:
            words += [f"--{name.replace('_', '-')}", str(given[name])]
    return shlex.join(words)


def count_root_ranks(steps: Sequence[Step]) -> dict[str, int | list[int]]:
    """Return the number of trees with a candidate, and how many of them accepted the root's child
    of rank 0, 1, ..."""
    trees = [step for step in steps[1:] if len(step.tree) > 1]
    # Breadth-first, the root's children are rows 1, 2, ...
    accepted = Counter(step.path[1] - 1 for step in trees if len(step.path) > 1)
    n_ranks = max(accepted, default=-1) + 1
    return {"trees": len(trees), "accepted": [accepted[rank] for rank in range(n_ranks)]}


def rank_probs(counts: Sequence[dict], is_falling: bool) -> list[float]:
    """Return the acceptance probabilities by rank that follow from counts of several texts, up to
    the last rank that was accepted.

    is_falling: sort them and leave out zeros, because recycle and graft refuse zeros and rising
    probabilities. Successors are in the target's order, so their counts rise only by chance.
    """
    n_trees = sum(count["trees"] for count in counts)
    by_rank = zip_longest(*(count["accepted"] for count in counts), fillvalue=0)
    accepted = [sum(ranks) for ranks in by_rank]
    if is_falling:
        accepted = sorted(filter(None, accepted), reverse=True)
    return [n / n_trees for n in accepted]
