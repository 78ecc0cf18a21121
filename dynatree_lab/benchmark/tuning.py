"""Settings for a pair of models: the search of table tune, and what its report ends with.

Rows that are replayed are settings of a grid (tables.toml). For each method the best of them at
given prices is chosen on one half of the prompts and scored on the other half, both ways. Methods
that no replay can have are measured.

Below the tables are options of the full program: those of the best setting found, of the fastest
measured row that is not auto, and of auto; the temperature that fits the draft's probabilities to
the target's texts; and the acceptance probabilities by rank that sequoia, recycle and graft take
as `p`.

    results = load("tune.jsonl")
    list(describe_settings(results, text_frame(results)))  # "Options for auto, 1.52x ar: ...", ...
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import pandas as pd
import torch

from dynatree_lab.benchmark.cases import HEAD, Case, labels
from dynatree_lab.benchmark.hf import HF_METHODS
from dynatree_lab.benchmark.results import Line, Results
from dynatree_lab.generation.step import Step
from dynatree_lab.replay.candidates import TEMPERATURES
from gpt_neox import GPTNeoX

# Rows that verify one level of other methods' candidates: the draft's, and successors of a table.
# The lines of their texts have root_ranks
DRAFTED, RETRIEVED = "fixed D=1 B=4 tau=0", "recycle N=9 D_max=1"
METHODS_WITH_P = {DRAFTED: "sequoia", RETRIEVED: "recycle and graft"}
TEXT_KEYS = ["dataset", "prompt_tokens", "new_tokens", "prompt"]  # of a replayed text
MODEL_OPTIONS = ("target", "draft", "device", "dtype", "draft_dtype", "threads", "target_memory")


def sort_by_speed(texts: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the texts by temperature, then by the median speedup of their row, highest first. The
    baseline's speedup is 1; rows without a speedup come last."""
    texts = texts.assign(speedup=texts.speedup.where(texts.row != baseline, 1.0))
    texts["median_speedup"] = texts.groupby("label").speedup.transform("median")
    return texts.sort_values(["temperature", "median_speedup"], ascending=[True, False])


class Best(NamedTuple):
    """The best setting of a method among those that were replayed, with x ar computed by text."""

    row: str  # chosen by all texts
    held_out: pd.Series  # of each text, with the setting that is chosen by the other half of them
    default: pd.Series  # of the method's default setting; empty if it was not replayed


def search(texts: pd.DataFrame) -> dict[str, Best]:
    """Return the best setting of each method, if there are two texts or more. The best one has the
    highest mean."""
    found: dict[str, Best] = {}
    replayed = texts[texts.is_replayed & texts.computed.notna() & (texts.row != "ar")]
    if replayed.empty:
        return found
    for method, own in replayed.groupby(replayed.row.str.partition(" ")[0], sort=False):
        table = own.pivot(index="row", columns=TEXT_KEYS, values="computed").dropna()
        halves = table.iloc[:, ::2], table.iloc[:, 1::2]
        if not len(table) or halves[1].empty:
            continue
        held_out = [
            scored.loc[chosen.mean(axis=1).idxmax()] for chosen, scored in (halves, halves[::-1])
        ]
        default = table.loc[method] if method in table.index else pd.Series(dtype=float)
        found[method] = Best(table.mean(axis=1).idxmax(), pd.concat(held_out), default)
    return found


def describe_settings(results: Results, texts: pd.DataFrame) -> Iterator[str]:
    """Yield the settings that the texts of each temperature lead to: a line that names them, and an
    indented one to be copied. Yield nothing if the table is not sorted."""
    if not results.is_sorted:
        return
    yield from describe_best(results, texts)
    cases = dict(zip(labels(results.cases), results.cases, strict=True))
    for temperature, own in texts.groupby("temperature"):
        is_shown = own.median_speedup.notna() & ~own.is_replayed & ~own.row.isin(HF_METHODS)
        rows = own[is_shown].drop_duplicates("label")
        is_auto = rows.row.str.match(r"auto\b")
        for name, found in (("the fastest row but auto", rows[~is_auto]), ("auto", rows[is_auto])):
            if not found.empty:
                label, speedup = found[["label", "median_speedup"]].iloc[0]
                heading = f"Options for {name}, {speedup:.2f}x {results.baseline}:"
                yield f"{heading}\n\n    {options_of(cases[label], results.head)}"
        if fits := own.draft_fit.dropna().tolist():
            yield describe_fit(fits, temperature)
        for row, methods in METHODS_WITH_P.items():
            counts = own[own.row == row].root_ranks.dropna()
            n_trees = sum(count["trees"] for count in counts)
            if probs := rank_probs(counts, is_falling=row == RETRIEVED):
                where = f"temperature {temperature}, from the children of {n_trees} roots"
                word = ":".join(f"{p:.3g}" for p in probs)
                yield f"p of {methods} at {where}:\n\n    --set p={word}"


def describe_best(results: Results, texts: pd.DataFrame) -> Iterator[str]:
    """Yield the options of the best replayed setting of all methods, by its score on texts that did
    not choose it."""
    if not (found := search(texts)):
        return
    best = max(found.values(), key=lambda each: each.held_out.median())
    heading = f"Options for {best.row}, {best.held_out.median():.2f}x ar computed:"
    case = next(case for case in results.cases if case.row == best.row)
    yield f"{heading}\n\n    {options_of(case, results.head)}"


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


@torch.inference_mode()
def fit_draft(draft: GPTNeoX, prompt: list[int], ids: list[int]) -> Line:
    """Return how a draft's probabilities fit a text of the target's, by one pass over it.

    n: tokens; n_best: those that are the draft's best candidate. For each of TEMPERATURES,
    confidence is the sum of the best candidates' probabilities, logprob that of the tokens'
    log-probabilities.
    """
    n_ids = draft.config.vocab_size
    # As while drafting, the draft runs token 0 in place of a token that its vocabulary lacks
    tokens = torch.tensor([token if token < n_ids else 0 for token in prompt + ids[:-1]])
    logits = draft.forward(tokens, torch.arange(len(tokens)), draft.new_cache(len(tokens)))
    logits = logits[len(prompt) - 1 :].float().cpu()  # [n, V], before each token of the text
    target = torch.tensor(ids)
    is_known = target < n_ids
    found: Line = {"n": len(ids), "n_best": int((logits.argmax(dim=-1) == target).sum())}
    found |= {"confidence": [], "logprob": []}
    for temperature in TEMPERATURES:
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        found["confidence"].append(float(logprobs.amax(dim=-1).exp().sum()))
        own = logprobs[is_known].gather(1, target[is_known].unsqueeze(1))
        found["logprob"].append(float(own.sum()))
    return found


def describe_fit(fits: Sequence[Line], temperature: float) -> str:
    """Return the draft temperature that fits the texts of a temperature, as an option."""
    n, n_best = (sum(fit[name] for fit in fits) for name in ("n", "n_best"))
    columns = (zip(*(fit[name] for fit in fits), strict=True) for name in ("confidence", "logprob"))
    confidence, logprob = ([sum(column) for column in each] for each in columns)
    best = max(range(len(logprob)), key=logprob.__getitem__)
    plain, scaled = (confidence[i] / n for i in (TEMPERATURES.index(1.0), best))
    fitted = TEMPERATURES[best]
    heading = f"Draft temperature for text at {temperature}, from {n} tokens."
    means = f"{plain:.2f}, at {fitted} {scaled:.2f}; {n_best / n:.2f} of them are right"
    best_has = f"The draft's best candidate\nhas probability {means}:"
    return f"{heading} {best_has}\n\n    --draft-temperature {fitted}"


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
