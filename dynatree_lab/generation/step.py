"""A step of generate.py, and the drafter and the acceptance that keep what it has more than a step
of dynatree.generate.

Shapes: n rows of a tree, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
from torch import Tensor

import dynatree
from draft_tree import Candidates, Tree
from dynatree import Drafter
from dynatree_lab.engine.scores import Scores, TokenLogprob, token_logprobs
from dynatree_lab.generation.process import Process, processed
from dynatree_lab.generation.record import RecordedRule, TreeRecord
from dynatree_lab.generation.run import ModelRun
from dynatree_lab.methods.overflow import cut_path
from dynatree_lab.methods.sampler import DrawingSampler
from verify import Acceptance, walk


@dataclass(frozen=True, slots=True, repr=False)
class Step(dynatree.Step):
    """A step of dynatree.generate, with more results for the command line and the benchmark."""

    bonus: int = -1  # the bonus token, even if EOS or the limit cuts it from `tokens`
    predictions: list[int] = field(default_factory=list)  # [N], the target's best id of each row
    draft_rows: list[int] = field(default_factory=list)  # rows of each pass of the draft
    cache_lengths: tuple[int, int] = (0, 0)  # committed tokens of the target, of the draft
    draft_overflowed: bool = False
    is_complete: bool = True  # False: recorded candidates may lack some of the tree's
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of `tokens`, if they are wanted
    record: TreeRecord | None = None  # of the tree, if it is wanted

    @property
    def n_drafted(self) -> int:
        return len(self.tree) - 1

    @property
    def ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.other_ms

    def __repr__(self) -> str:  # as a notebook shows it
        accepted = f"{len(self.path) - 1} of {self.n_drafted} accepted"
        return f"{accepted}, depth {max(self.tree.depths)}, {self.ms:.1f} ms: {self.tokens}"


@dataclass
class Clock:
    """When the parts of an iteration ended. Between the two, the target's cache commits."""

    accepted: float = 0.0
    committed: float = 0.0


class TimedDrafter(Drafter):
    """A drafter with the time that its drafts take."""

    def __init__(self, drafter: Drafter, clock: Clock):
        self.drafter, self.clock = drafter, clock
        self.ms = 0.0  # of the drafts since the last step
        self.of_root: Candidates | None = None  # those below the latest root

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.drafter.start(prompt, capacity, vocab_size)

    def draft(self, tree: Tree, rows: list[int], k: int) -> Candidates:
        began = time.perf_counter()
        found = self.drafter.draft(tree, rows, k)
        if rows == [0]:
            self.of_root = found  # checked by draft_tree.grow
        self.ms += (time.perf_counter() - began) * 1e3
        return found

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        self.clock.committed = time.perf_counter()  # the loop commits the target's cache first
        self.drafter.commit(tree, path, tokens)


class Choice:
    """The acceptance of one text (a verify.Acceptance). It reads the scores of the target's pass,
    which the host has, and keeps what it chose from."""

    def __init__(
        self,
        target: ModelRun,
        committed: list[int],
        sampler: DrawingSampler | None,
        accept: Acceptance | None,
        process: Process | None,
        inspect: Callable[[Tensor], None] | None,
        logprobs: int | None,
    ):
        """
        Args:
            committed: the ids before the root, to which the accepted ones are appended.
            sampler: for sampled text.
            accept: the caller's, in place of all others.
            process, inspect, logprobs: as in generate.
        """
        self.target, self.committed, self.clock = target, committed, Clock()
        self.sampler, self.accept, self.process = sampler, accept, process
        self.inspect, self.n_logprobs = inspect, logprobs

    def __call__(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        scores = self.target.scores
        is_finite = scores.finite_rows()
        if self.process:
            changed, is_finite = processed(self.process, logits, is_finite, self.committed, tree)
            scores = Scores(None, changed)
        self.predictions = scores.argmax()
        if self.accept:
            path, tokens = self.accept(tree, scores.logits)
        elif self.sampler:
            path, tokens = self.sampler(tree, scores.logits, is_finite)
        else:
            path, tokens = walk(tree, self.predictions.__getitem__)
        path, tokens = cut_path(path, tokens, is_finite)
        if self.inspect or self.n_logprobs is not None:
            self.logits = logits[path]  # a copy, because on CUDA a rebuilt commit overwrites them
        self.bonus = tokens[-1]
        self.committed += [tree.tokens[row] for row in path]
        self.clock.accepted = time.perf_counter()
        return path, tokens

    def show(self, tokens: list[int]) -> list[TokenLogprob]:
        """Show the caller the logits from which the tokens of a step were chosen. Return their
        log-probabilities, if they are wanted."""
        if self.inspect:
            self.inspect(self.logits[: len(tokens)])
        if self.n_logprobs is None:
            return []
        return token_logprobs(self.logits[: len(tokens)], tokens, self.n_logprobs)


def step_of(
    step: dynatree.Step,
    ms: float,
    choice: Choice,
    drafter: TimedDrafter,
    draft: ModelRun | None,
    recorded: RecordedRule | None,
) -> Step:
    """Return the loop's step, which took `ms`, with what was kept during it."""
    draft_ms, drafter.ms = drafter.ms, 0.0
    commit_ms = (choice.clock.committed - choice.clock.accepted) * 1e3
    verify_ms = choice.target.pop_stats()[0] + commit_ms
    n_cached, draft_rows, is_complete = 0, [], True
    if draft and draft.cache:  # a method's drafter may leave the draft unused
        n_cached, draft_rows = draft.cache.length, draft.pop_stats()[1]
        is_complete, draft.is_incomplete = not draft.is_incomplete, False
    return Step(
        tokens=step.tokens,
        tree=step.tree,
        path=step.path,
        bonus=choice.bonus,
        predictions=choice.predictions,
        draft_rows=draft_rows,
        cache_lengths=(choice.target.cache.length, n_cached),
        is_complete=is_complete,
        draft_overflowed=bool(draft_rows) and not (drafter.of_root.logprobs > -numpy.inf).any(),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=ms - draft_ms - verify_ms,
        logprobs=choice.show(step.tokens),
        record=recorded and recorded.record,
    )
