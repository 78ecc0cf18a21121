"""What decided every tree and what became of it, as data: --trace, and --page shows it.

    trace = Trace(tokenizer, settings)
    for step in generate(target, draft, prompt, settings, 64, watcher=trace):
        trace.add(step)
    trace.iterations  # the schema is in docs/page.md

Gates are told by the rules themselves while a tree grows; only by elimination is it found here that
the budget of rows was used up, or that no level was left.

Shapes: W rows of one level, k candidates per row.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cli.terminal import TextStream
from draft_tree import Gates, Level, Settings, Tree
from dynatree import Step
from methods.retrieval import Graft, parse_base

FORMAT = {"name": "dynatree-trace", "version": 1}
MOST_DROPPED = 48  # candidates that are listed per tree, the likeliest; the rest is counted
RANK_GATES = ("confidence", "width")  # that let so many of a node's candidates pass: B(u)
BUDGETS = ("N_max", "N")  # settings that say how many rows a tree may have
DEPTHS = ("D_max", "D", "widths", "K")  # and how many levels
OF_ROWS = "rows"  # the budget, where no one setting says it
NO_LEVEL_LEFT = "limit"  # the end of the text, a window about to drop, or what is strict


@dataclass(frozen=True)
class Seen:
    """A level as it was added: its gates by name, True where a candidate passed."""

    level: Level
    candidates: Tensor  # [W, k]
    dropping: Gates
    stopping: Gates
    is_full: bool


@dataclass(frozen=True)
class Candidate:
    """What the draft proposed below a row, and what the rule made of it."""

    slot: int  # the draft's, of the row above
    token: int
    p: float  # of its path
    dropped: str | None  # the gate that kept it out of the tree, if one of the rule's did
    stopped: str | None  # the one that lets nothing grow below it


class Trace:
    """The Watcher that keeps everything; its JSON is small, as numbers are short."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings, hidden_ids: Iterable[int] = ()):
        """hidden_ids: of no text, as EOS."""
        self.tokenizer = tokenizer
        self.stream = TextStream(tokenizer)
        self.hidden_ids = tuple(hidden_ids)
        drafting = base_of(settings) or settings
        self.budget = name_of(settings, BUDGETS) or OF_ROWS
        self.drafting_budget = name_of(drafting, BUDGETS) or self.budget
        self.deepest = name_of(drafting, DEPTHS) or NO_LEVEL_LEFT
        if drafting is not settings and self.drafting_budget == self.budget:
            self.budget = OF_ROWS  # of two settings of this name, the smaller one
        self.iterations: list[dict] = []
        self.used_ids: set[int] = set()
        # All else is of the tree that grows
        self.standing: Mapping[str, float | str] = {}
        self.n_levels = 0
        self.max_depth = 0
        self.levels: list[Seen] = []
        self.dropping: dict[str, Tensor | bool] = {}
        self.stopping: dict[str, Tensor | bool] = {}

    def begin(self, standing: Mapping[str, float | str], n_levels: int, max_depth: int) -> None:
        self.standing = standing
        self.n_levels = n_levels
        self.max_depth = max_depth
        self.levels = []

    def gates(self, dropping: Gates, stopping: Gates) -> None:
        self.dropping |= dropping
        self.stopping |= stopping

    def level(self, level: Level, candidates: Tensor, is_full: bool) -> None:
        self.levels.append(Seen(level, candidates, self.dropping, self.stopping, is_full))
        self.dropping = {}
        self.stopping = {}

    def add(self, step: Step) -> None:
        """What the step that the last tree led to has added to the text."""
        found = {
            "tokens": step.tokens,
            "text": self.pieces(step.tokens),
            "ms": [round(ms, 3) for ms in (step.draft_ms, step.verify_ms, step.other_ms)],
            "cached": list(step.cached),
        }
        self.used_ids.update(step.tokens)
        if step.tree:
            found |= {
                "path": list(step.path),
                "bonus": step.bonus,
                "standing": {name: short(value) for name, value in self.standing.items()},
                "draft_rows": list(step.draft_rows),
                "tree": self.tree(step.tree, step.predictions.tolist()),
            }
            self.used_ids.add(step.bonus)
        self.iterations.append(found)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text that each id completes; together they are the text."""
        found = []
        for i in ids:
            shown = [] if i in self.hidden_ids else [i]
            found.append(self.stream.push(shown))
        return found

    def tree(self, tree: Tree, predictions: list[int]) -> dict:
        """A tree row by row, and the candidates that are not in it."""
        tokens = tree.tokens.tolist()
        parents = tree.parents.tolist()
        slots = tree.draft_slots.tolist()
        proposed = self.candidates()
        of_row = {}
        for row in range(1, len(tokens)):
            of_row[row] = proposed.pop((slots[parents[row]], tokens[row]), None)
        self.used_ids.update(tokens + predictions)
        confidence, breadth = self.look_at_rows(slots)
        retrieved = []
        if tree.is_retrieved is not None:
            retrieved = tree.is_retrieved.nonzero().flatten().tolist()
        stopped = [None] * len(tokens)
        if self.max_depth < 1:
            stopped[0] = NO_LEVEL_LEFT
        elif self.n_levels and not self.levels:
            stopped[0] = self.drafting_budget
        for row, candidate in of_row.items():
            if candidate and slots[row] < 0 and row not in retrieved:
                stopped[row] = candidate.stopped
        return {
            "tokens": tokens,
            "parents": parents,
            "p": [short(p) for p in tree.logprobs.exp().tolist()],
            "slots": slots,
            "retrieved": retrieved,
            "target": predictions,
            "confidence": confidence,
            "breadth": breadth,
            "stopped": stopped,
            **self.dropped(proposed.values(), slots),
        }

    def dropped(self, candidates: Iterable[Candidate], slots: list[int]) -> dict:
        """Those not in the tree [parent's row, token, p, gate], the likeliest first; and how many
        there are."""
        found = []
        for c in candidates:
            if c.p > 0 and c.slot in slots:
                gate = c.dropped or self.budget
                found.append([slots.index(c.slot), c.token, short(c.p), gate])
        found.sort(key=lambda entry: -entry[2])
        listed = found[:MOST_DROPPED]
        self.used_ids.update(token for _, token, _, _ in listed)
        return {"dropped": listed, "n_dropped": len(found)}

    def candidates(self) -> dict[tuple[int, int], Candidate]:
        """All that the draft proposed, by the parent's slot and the token."""
        found = {}
        slot = 0
        for seen in self.levels:
            shape = seen.candidates.shape
            ids = seen.candidates.tolist()
            p = seen.level.path_logprobs.exp().tolist()
            dropped = first_closed(seen.dropping, shape)
            stopped = first_closed(seen.stopping, shape)
            for row in range(shape[0]):
                for rank, token in enumerate(ids[row]):
                    gate = stopped[row][rank] or self.no_more(seen)
                    candidate = Candidate(slot, token, p[row][rank], dropped[row][rank], gate)
                    found[slot, token] = candidate
                slot += 1
        return found

    def no_more(self, seen: Seen) -> str | None:
        """What stops a whole level, whatever its candidates are."""
        if seen.level.depth + 1 < self.n_levels:
            return self.drafting_budget if seen.is_full else None
        return NO_LEVEL_LEFT if self.n_levels == self.max_depth else self.deepest

    def look_at_rows(self, slots: list[int]) -> tuple[list, list]:
        """By row c(u), the draft's probability of its best guess, and B(u), the candidates its rank
        gate let pass; None where the draft has not run, it is not known or there is no such gate.
        """
        confidence = []
        breadth = []
        for seen in self.levels:
            confidence += best_guesses(seen.level)
            breadth += allowed_ranks(seen)
        by_row = [None if slot < 0 else confidence[slot] for slot in slots]
        return by_row, [None if slot < 0 else breadth[slot] for slot in slots]

    def vocabulary(self) -> dict[str, str]:
        """The text of every id that is named."""
        decode = self.tokenizer.decode
        return {str(i): decode([i], skip_special_tokens=False) for i in sorted(self.used_ids)}

    def as_json(self, prompt: list[int], about: dict) -> dict:
        """The whole object, once the text has ended. about: of the run, everything else there is to
        say."""
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


def best_guesses(level: Level) -> list[float | None]:
    """c(u) [W]; None where what was drawn need not be the best, or the draft overflowed."""
    if level.is_drawn:
        return [None] * len(level.logprobs)
    return [short(p) for p in level.logprobs[:, 0].exp().tolist()]


def allowed_ranks(seen: Seen) -> list[int | None]:
    """B(u) [W]."""
    for name in RANK_GATES:
        if name in seen.dropping:
            is_wanted = torch.as_tensor(seen.dropping[name]).expand(seen.candidates.shape)
            return is_wanted.sum(dim=1).tolist()
    return [None] * len(seen.candidates)


def first_closed(gates: Gates, shape: tuple[int, ...]) -> list[list[str | None]]:
    """The first gate [W, k] that did not let a candidate pass."""
    found: list[list[str | None]] = [[None] * shape[1] for _ in range(shape[0])]
    for name, is_open in gates.items():
        is_closed = torch.as_tensor(is_open).logical_not().expand(shape)
        for row, rank in is_closed.nonzero().tolist():
            found[row][rank] = found[row][rank] or name
    return found


def short(value: float | str) -> float | str | None:
    """A number as short as it is of use; None for one that JSON has not."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def name_of(settings: Settings, names: Iterable[str]) -> str | None:
    """The first of these that is a setting."""
    for name in names:
        if hasattr(settings, name):
            return name
    return None


def base_of(settings: Settings) -> Settings | None:
    """The settings of the rule that graft goes over."""
    return parse_base(settings.base) if isinstance(settings, Graft) else None


def describe_base(settings: Settings) -> dict | None:
    """The settings of graft's base, and what they say; None without one."""
    base = base_of(settings)
    if base is None:
        return None
    return {"settings": asdict(base), "meanings": meanings(base)}


def meanings(settings: Settings) -> dict[str, str]:
    """What each setting says, by its symbol."""
    return {f.name: f.metadata["meaning"] for f in fields(settings)}
