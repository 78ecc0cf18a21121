"""The data of --trace and --html: each tree, the gates that decided it, and the accepted rows.

    steps = list(generate(target, draft, prompt, GenerationConfig(settings), 64, is_recorded=True))
    content = trace_of(steps, prompt, settings, tokenizer)  # the schema is in docs/page.md

The gates are those of the rule. If no gate stopped a tree, its rows were used up or no level was
left.

Shapes: n rows of one level, k candidates per row.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import NamedTuple

import numpy
from tokenizers import Tokenizer

from draft_tree import Gates, Settings, Tree
from dynatree_lab.generation.generate import Step
from dynatree_lab.generation.record import TreeRecord
from dynatree_lab.methods.retrieval import Graft, parse_base
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.tokens import TextStream

FORMAT = {"name": "dynatree-trace", "version": 3}
MAX_DROPPED = 48  # the likeliest dropped candidates of a tree are listed, the others only counted
NO_LEVEL_LEFT = "limit"  # the end of the text, a window about to drop tokens, or a strict pass
# Names of settings that limit a tree's rows, and of those that limit its levels
ROWS = ("N_max", "N")
LEVELS = ("D_max", "D", "K", "widths")
RANK_GATES = ("confidence", "width")  # gates that limit the number of children

Place = tuple[int, int]  # of a candidate: its parent's draft slot, and its token


class Candidate(NamedTuple):
    """A drafted candidate."""

    p: float  # the draft probability of its path
    draft_p: float  # the draft model's probability of the token, without calibration
    dropped_by: str | None  # the first gate that it did not pass to become a row
    stopped_by: str | None  # what allows it no children, if anything does


def trace_of(
    steps: Sequence[Step],
    prompt: list[int],
    settings: Settings,
    tokenizer: Tokenizer,
    hidden_ids: Collection[int] = (),
) -> dict:
    """Return the trace of a run, whose steps have records.

    hidden_ids: ids without text, such as EOS.
    """
    iterations = [describe_step(step, settings) for step in steps]
    text = iter(pieces([i for step in steps for i in step.tokens], tokenizer, hidden_ids))
    used_ids = {*prompt}
    for found in iterations:
        found["text"] = [next(text) for _ in found["tokens"]]
        used_ids.update(found["tokens"])
        if tree := found.get("tree"):
            used_ids.update([found["bonus"], *tree["tokens"], *tree["target"]])
            used_ids.update(token for _, token, *_ in tree["dropped"])
    return {
        "format": FORMAT,
        "meanings": meanings(settings),
        "base": describe_base(settings),
        "prompt": {"tokens": prompt, "text": pieces(prompt, tokenizer)},
        "iterations": iterations,
        "vocabulary": {str(i): tokenizer.decode([i], False) for i in sorted(used_ids)},
    }


def pieces(ids: Sequence[int], tokenizer: Tokenizer, hidden_ids: Collection[int] = ()) -> list[str]:
    """Return the piece of text that each id completes; joined, they are the whole text."""
    stream = TextStream(tokenizer)
    found = [stream.push([] if i in hidden_ids else [i]) for i in ids]
    found[-1] += stream.finish()
    return found


def describe_step(step: Step, settings: Settings) -> dict:
    """Return the tokens that a step added, and its tree, except for the prefill's."""
    found = {
        "tokens": step.tokens,
        "ms": [round(ms, 3) for ms in (step.draft_ms, step.verify_ms, step.other_ms)],
        "cached": list(step.cache_lengths),
    }
    if step.record is None:
        return found
    return found | {
        "path": step.path,
        "bonus": step.bonus,
        "state": {name: short(value) for name, value in step.record.state.items()},
        "draft_rows": step.draft_rows,
        "trials": [[row, *map(short, numbers)] for row, *numbers in step.record.trials],
        "tree": describe_tree(step.tree, step.predictions, step.record, settings),
    }


def describe_tree(
    tree: Tree, predictions: list[int], record: TreeRecord, settings: Settings
) -> dict:
    """Return the data of a tree: lists by row, and the dropped candidates."""
    slots, limit_of_rows = tree.draft_slots, rows_setting(settings)
    retrieved = [row for row, is_it in enumerate(are_retrieved(tree)) if is_it]
    candidates = find_candidates(record, {*slots}, limit_of_rows, deepest_setting(settings))
    places = [(slots[above], token) for above, token in zip(tree.parents, tree.tokens, strict=True)]
    drafted = [None, *(candidates.pop(place, None) for place in places[1:])]  # by row
    stopped = [None] * len(tree)
    if record.max_depth < 1:
        stopped[0] = NO_LEVEL_LEFT
    elif record.n_levels and not record.levels:
        stopped[0] = limit_of_rows
    for row, candidate in enumerate(drafted):
        if candidate and slots[row] < 0 and row not in retrieved:
            stopped[row] = candidate.stopped_by
    dropped = [(c, slots.index(slot), token) for (slot, token), c in candidates.items() if c.p]
    dropped.sort(key=lambda each: -each[0].p)
    confidence, breadth = look_at_rows(record)
    return {
        "tokens": tree.tokens,
        "parents": tree.parents,
        "p": [short(math.exp(logprob)) for logprob in tree.path_logprobs],
        "draft_p": draft_probabilities(tree, record, drafted),
        "slots": slots,
        "retrieved": retrieved,
        "target": predictions,
        "confidence": [None if slot < 0 else confidence[slot] for slot in slots],
        "breadth": [None if slot < 0 else breadth[slot] for slot in slots],
        "stopped": stopped,
        "dropped": [
            [row, token, short(c.p), c.dropped_by or limit_of_rows]
            for c, row, token in dropped[:MAX_DROPPED]
        ],
        "n_dropped": len(dropped),
    }


def find_candidates(
    record: TreeRecord, slots: set[int], limit_of_rows: str, deepest: str
) -> dict[Place, Candidate]:
    """Return the possible candidates below the rows in these draft slots.

    limit_of_rows, deepest: the settings that limit the tree's rows and levels.
    """
    found, slot = {}, 0
    for one in record.levels:
        level, shape = one.level, one.level.tokens.shape
        own = level.logprobs if one.draft_logprobs is None else one.draft_logprobs
        is_possible = level.path_logprobs > -math.inf
        columns = [numpy.exp(x.astype(float)).tolist() for x in (level.path_logprobs, own)]
        columns += [first_closed(gates, shape) for gates in (one.add_gates, one.expand_gates)]
        if level.row_depth + 1 < record.n_levels:
            is_last = record.is_full and one is record.levels[-1]
            otherwise = limit_of_rows if is_last else None
        else:
            otherwise = NO_LEVEL_LEFT if record.n_levels == record.max_depth else deepest
        for i, tokens in enumerate(level.tokens.tolist()):
            for rank, token in enumerate(tokens if slot in slots else []):
                if is_possible[i, rank]:
                    p, draft_p, dropped_by, stopped_by = (column[i][rank] for column in columns)
                    found[slot, token] = Candidate(p, draft_p, dropped_by, stopped_by or otherwise)
            slot += 1
    return found


def first_closed(gates: Gates, shape: tuple[int, int]) -> list[list[str | None]]:
    """Return the first gate that each candidate [n, k] did not pass, None if it passed all."""
    found = numpy.full(shape, None, object)
    for name, is_open in reversed([*gates.items()]):
        found[~numpy.broadcast_to(is_open, shape)] = name
    return found.tolist()


def draft_probabilities(
    tree: Tree, record: TreeRecord, drafted: list[Candidate | None]
) -> list | None:
    """Return by row the draft model's own probability of the path; None if it did not propose the
    row. Returns None instead of the list if p is not calibrated."""
    if all(level.draft_logprobs is None for level in record.levels):
        return None
    found: list[float | None] = [1.0]
    for parent, candidate in zip(tree.parents[1:], drafted[1:], strict=True):
        above = found[parent]
        found.append(above * candidate.draft_p if candidate and above is not None else None)
    return [None if p is None else short(p) for p in found]


def look_at_rows(record: TreeRecord) -> tuple[list, list]:
    """Return c(u) and B(u) by draft slot: the probability of the draft model's best candidate, and
    the number of candidates that passed the rank gate. An entry is None if c(u) is not finite, or
    if there is no such gate."""
    confidence, breadth = [], []
    for one in record.levels:
        level = one.level
        gates = [one.add_gates[name] for name in RANK_GATES if name in one.add_gates]
        has_overflowed = ~(level.path_logprobs > -math.inf).any(axis=1)
        best = numpy.where(has_overflowed, math.nan, level.confidence)
        confidence += map(short, best.tolist())
        breadth += gates[0].sum(axis=1).tolist() if gates else [None] * len(level.tokens)
    return confidence, breadth


def rows_setting(settings: Settings) -> str:
    """Return the setting that limits the rows of a tree; "rows" for graft, which has an N and that
    of its base, and for a method without one."""
    names = () if isinstance(settings, Graft) else ROWS
    return next((name for name in names if hasattr(settings, name)), "rows")


def deepest_setting(settings: Settings) -> str:
    """Return the setting that limits the levels of a tree; for graft that of its base."""
    if isinstance(settings, Graft):
        settings = parse_base(settings.base)
    return next((name for name in LEVELS if hasattr(settings, name)), NO_LEVEL_LEFT)


def short(value: float | str) -> float | str | None:
    """Return a number rounded to four digits to keep the trace small; None if it is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def describe_base(settings: Settings) -> dict | None:
    """Return the settings of graft's base rule, and their meanings; None for other methods."""
    if not isinstance(settings, Graft):
        return None
    base = parse_base(settings.base)
    return {"settings": asdict(base), "meanings": meanings(base)}


def meanings(settings: Settings) -> dict[str, str]:
    """Return each setting's meaning, by its symbol."""
    return {f.name: f.metadata["meaning"] for f in fields(settings)}
