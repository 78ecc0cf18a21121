"""The record of a run for --trace and --html: each tree, its gates and the accepted rows.

    trace = Trace(tokenizer, settings)
    for step in generate(target, draft, prompt, GenerationConfig(settings), 64, observer=trace):
        trace.add(step)
    trace.iterations  # the schema is in docs/page.md

The gates are those of the rule. If no gate stopped a tree, its rows were used up or no level was
left.

Shapes: n rows of one level, k candidates per row.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial

import numpy
from tokenizers import Tokenizer

from draft_tree import Gates, Level, Rule, Settings, Tree
from dynatree_lab.cli.tokens import TextStream
from dynatree_lab.engine.generate import Step
from dynatree_lab.methods.calibration import CalibratedDrafter
from dynatree_lab.methods.retrieval import Graft, parse_base
from dynatree_lab.methods.rules import RuleWrapper, are_retrieved

FORMAT = {"name": "dynatree-trace", "version": 3}
MAX_DROPPED = 48  # the likeliest dropped candidates of a tree are listed, the others only counted
NO_LEVEL_LEFT = "limit"  # the end of the text, a window about to drop tokens, or a strict pass
# Names of settings that limit a tree's rows, and of those that limit its levels
ROWS = ("N_max", "N")
LEVELS = ("D_max", "D", "K", "widths")
RANK_GATES = ("confidence", "width")  # gates that limit the number of children


@dataclass(frozen=True)
class TracedLevel:
    """A level with its gates by name, True where a candidate passed."""

    level: Level
    add_gates: Gates
    expand_gates: Gates
    # [n, k], the draft model's own, if those of the level are calibrated
    draft_logprobs: numpy.ndarray | None


@dataclass(frozen=True)
class Candidate:
    """A drafted candidate, at a place [i, rank] of its level."""

    traced: TracedLevel
    slot: int  # the parent's draft slot, counted from the root's
    i: int
    rank: int

    @property
    def token(self) -> int:
        return self.traced.level.tokens.item(self.i, self.rank)

    @property
    def p(self) -> float:
        """The draft probability of its path."""
        return math.exp(self.traced.level.path_logprobs[self.i, self.rank])

    @property
    def draft_p(self) -> float:
        """The draft model's probability of the token, without calibration."""
        own = self.traced.draft_logprobs
        return math.exp((self.traced.level.logprobs if own is None else own)[self.i, self.rank])

    def first_closed(self, gates: Gates) -> str | None:
        """Return the first gate that the candidate did not pass, if any."""
        shape = self.traced.level.tokens.shape
        for name, is_open in gates.items():
            if not numpy.broadcast_to(is_open, shape)[self.i, self.rank]:
                return name
        return None


class TracedRule(RuleWrapper):
    """A rule that records each level in a trace, with the gates that decided it."""

    def __init__(self, rule: Rule, trace: "Trace", calibrated: CalibratedDrafter | None):
        super().__init__(rule)
        self.trace, self.calibrated = trace, calibrated

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        n_levels = super().begin_tree(root_token, max_depth)
        self.trace.begin(self.state(), n_levels, max_depth)
        return n_levels

    def add_gates(self, level: Level) -> Gates:
        self.gates = super().add_gates(level)
        return self.gates

    def expand_gates(self, level: Level) -> Gates:
        gates = super().expand_gates(level)
        logprobs = self.calibrated.draft_logprobs[-1] if self.calibrated else None
        level.confidence  # noqa: B018  # cached now, before the calibration learns
        self.trace.levels.append(TracedLevel(level, self.gates, gates, logprobs))
        return gates

    def finish_tree(self, tree: Tree) -> Tree:
        self.trace.is_full = len(tree) >= self.rule.max_rows
        return super().finish_tree(tree)


class Trace:
    """The record of a run: a wrapper of its rule, and an observer of its trials and steps."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings, hidden_ids: Iterable[int] = ()):
        """hidden_ids: ids without text, such as EOS."""
        self.tokenizer = tokenizer
        self.stream = TextStream(tokenizer)
        self.hidden_ids = tuple(hidden_ids)
        self.rows, self.deepest = rows_setting(settings), deepest_setting(settings)
        self.iterations: list[dict] = []
        self.used_ids: set[int] = set()
        # The other attributes belong to the current tree
        self.state: Mapping[str, float | str] = {}
        self.n_levels = 0
        self.max_depth = 0
        self.is_full = False
        self.levels: list[TracedLevel] = []
        self.trials: list[list[float]] = []

    def begin(self, state: Mapping[str, float | str], n_levels: int, max_depth: int) -> None:
        self.state = state
        self.n_levels = n_levels
        self.max_depth = max_depth
        self.levels = []
        self.trials = []

    def wrap(self, rule: Rule, calibrated: CalibratedDrafter | None) -> TracedRule:
        """Return a traced rule (for engine.compose)."""
        return TracedRule(rule, self, calibrated)

    def add_trial(self, row: int, probability: float, number: float, remaining_mass: float) -> None:
        """Record one trial of a row (methods.sampler.OnTrial)."""
        self.trials.append([row, *map(short, (probability, number, remaining_mass))])

    def add(self, step: Step) -> None:
        """Record a step: the tokens that it added, and its tree, except for the prefill's."""
        found = {
            "tokens": step.tokens,
            "text": self.pieces(step.tokens),
            "ms": [round(ms, 3) for ms in (step.draft_ms, step.verify_ms, step.other_ms)],
            "cached": list(step.cache_lengths),
        }
        self.used_ids.update(step.tokens)
        if self.iterations:  # the first step is the prefill's
            found |= {
                "path": step.path,
                "bonus": step.bonus,
                "state": {name: short(value) for name, value in self.state.items()},
                "draft_rows": step.draft_rows,
                "trials": self.trials,
                "tree": self.tree(step.tree, step.predictions),
            }
            self.used_ids.add(step.bonus)
        self.iterations.append(found)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the piece of text that each id completes; joined, they are the whole text."""
        found = []
        for i in ids:
            shown = [] if i in self.hidden_ids else [i]
            found.append(self.stream.push(shown))
        return found

    def tree(self, tree: Tree, predictions: list[int]) -> dict:
        """Return the data of a tree: lists by row, and the dropped candidates."""
        tokens, slots = tree.tokens, tree.draft_slots
        drafted, dropped = self.candidates(tree)
        of_row = {}
        for row in range(1, len(tokens)):
            of_row[row] = drafted.get((slots[tree.parents[row]], tokens[row]))
        self.used_ids.update(tokens + predictions)
        confidence, breadth = self.look_at_rows(slots)
        retrieved = [row for row, is_it in enumerate(are_retrieved(tree)) if is_it]
        stopped = [None] * len(tokens)
        if self.max_depth < 1:
            stopped[0] = NO_LEVEL_LEFT
        elif self.n_levels and not self.levels:
            stopped[0] = self.rows
        for row, candidate in of_row.items():
            if candidate and slots[row] < 0 and row not in retrieved:
                stopped[row] = self.stopped(candidate)
        return {
            "tokens": tokens,
            "parents": tree.parents,
            "p": [short(math.exp(logprob)) for logprob in tree.path_logprobs],
            "draft_p": self.draft_p(tree, of_row),
            "slots": slots,
            "retrieved": retrieved,
            "target": predictions,
            "confidence": confidence,
            "breadth": breadth,
            "stopped": stopped,
            "dropped": self.list_dropped(dropped, slots),
            "n_dropped": len(dropped),
        }

    def draft_p(self, tree: Tree, of_row: dict[int, Candidate | None]) -> list | None:
        """Return by row the draft model's own probability of the path; None if it did not propose
        the row.

        Returns None instead of the list if p is not calibrated.
        """
        if all(traced.draft_logprobs is None for traced in self.levels):
            return None
        found: list[float | None] = [1.0]
        for row, candidate in of_row.items():
            above = found[tree.parents[row]]
            found.append(above * candidate.draft_p if candidate and above is not None else None)
        return [None if p is None else short(p) for p in found]

    def list_dropped(self, candidates: list[Candidate], slots: list[int]) -> list[list]:
        """Return the MAX_DROPPED likeliest candidates as [parent's row, token, p, gate]."""
        rows = {slot: row for row, slot in enumerate(slots)}
        listed = []
        for c in sorted(candidates, key=lambda c: -c.p)[:MAX_DROPPED]:
            gate = c.first_closed(c.traced.add_gates) or self.rows
            listed.append([rows[c.slot], c.token, short(c.p), gate])
            self.used_ids.add(c.token)
        return listed

    def candidates(self, tree: Tree) -> tuple[dict[tuple[int, int], Candidate], list[Candidate]]:
        """Return the candidates that became rows, by the parent's slot and the token, and those
        below rows of the tree that did not."""
        slots = tree.draft_slots
        are_rows = {
            (slots[parent], token)
            for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True)
        }
        drafted, dropped = {}, []
        slot = 0
        for traced in self.levels:
            for i, tokens in enumerate(traced.level.tokens.tolist()):
                for rank, token in enumerate(tokens if slot in slots else []):
                    candidate = Candidate(traced, slot, i, rank)
                    if (slot, token) in are_rows:
                        drafted[slot, token] = candidate
                    elif candidate.p:
                        dropped.append(candidate)
                slot += 1
        return drafted, dropped

    def stopped(self, candidate: Candidate) -> str | None:
        """Return what allows a candidate no children, if anything does: the first closed gate, the
        tree's rows or depth, or the end of the text."""
        traced = candidate.traced
        if gate := candidate.first_closed(traced.expand_gates):
            return gate
        if traced.level.row_depth + 1 < self.n_levels:
            return self.rows if self.is_full and traced is self.levels[-1] else None
        return NO_LEVEL_LEFT if self.n_levels == self.max_depth else self.deepest

    def look_at_rows(self, slots: list[int]) -> tuple[list, list]:
        """Return c(u) and B(u) by row: the probability of the draft model's best candidate, and the
        number of candidates that passed the rank gate.

        An entry is None if the draft model did not run the row, if c(u) is not finite, or if there
        is no such gate.
        """
        confidence = []
        breadth = []
        for traced in self.levels:
            level = traced.level
            gates = [traced.add_gates[name] for name in RANK_GATES if name in traced.add_gates]
            has_overflowed = ~(level.path_logprobs > -math.inf).any(axis=1)
            best = numpy.where(has_overflowed, math.nan, level.confidence)
            confidence += map(short, best.tolist())
            breadth += gates[0].sum(axis=1).tolist() if gates else [None] * len(level.tokens)
        by_row = [None if slot < 0 else confidence[slot] for slot in slots]
        return by_row, [None if slot < 0 else breadth[slot] for slot in slots]

    def vocabulary(self) -> dict[str, str]:
        """Return the text of every id in the data."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        return {str(i): decode([i]) for i in sorted(self.used_ids)}

    def as_json(self, prompt: list[int], about: dict) -> dict:
        """Return the trace as one object, at the end of the run. about: its other keys."""
        self.used_ids.update(prompt)
        self.iterations[-1]["text"][-1] += self.stream.finish()
        stream = TextStream(self.tokenizer)
        pieces = [stream.push([i]) for i in prompt]
        pieces[-1] += stream.finish()
        return {
            "format": FORMAT,
            **about,
            "prompt": {"tokens": prompt, "text": pieces},
            "iterations": self.iterations,
            "vocabulary": self.vocabulary(),
        }


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
