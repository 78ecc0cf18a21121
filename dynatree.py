"""DynaTree decoding: the loop, and the draft model's side of it.

Each iteration drafts a tree of guesses below the last committed token, lets the target read the
whole tree in one pass, and keeps the path on which the target agrees, plus the target's own next
token. The text is exactly what the target alone would write, or if it is sampled as likely. Paper:
DynaTree v2, Algorithm 1.

    from dynatree import DynaTree, generate
    from gpt_neox import GPTNeoX

    target = GPTNeoX.from_pretrained("models/tiny/target")
    draft = GPTNeoX.from_pretrained("models/tiny/draft")
    for step in generate(target, draft, [509, 2509], DynaTree(), max_new_tokens=64):  # "The ship"
        print(step.tokens)

gpt_neox.py, draft_tree.py, sampling.py, verify.py and this file are whole by themselves, from ids
to ids. The loop knows nothing of what makes it fast: engine/decoding.py hands it other models, and
stands between its steps. The command line, which reads and writes text, is cli/main.py's:

    python dynatree.py --prompt "The ship sailed at dawn" --max-new-tokens 64

Shapes: N tree rows, n rows of one level, S cache slots, V vocabulary.
"""

if __name__ == "__main__":
    import cli.start  # noqa: F401

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from numbers import Integral
from operator import index

import numpy
import torch

from draft_tree import (
    MAX_ROWS,
    Candidates,
    Draft,
    DynaTree,
    Rule,
    Settings,
    Tree,
    Watcher,
    grow,
    lone,
)
from gpt_neox import KVCache, Model, Scores
from sampling import GREEDY, Acceptance, Sampler, Sampling, accept_by_token
from verify import NonFiniteLogits, accept, cut, tree_pass

__all__ = ["DynaTree", "NonFiniteLogits", "Step", "generate"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one commit adds to the text; the first step is prefill's token and has no tree."""

    tokens: list[int]  # new ids, after the EOS and limit cut
    tree: Tree | None = None
    path: list[int] = field(default_factory=list)  # accepted rows of the tree, root first
    bonus: int = -1  # the target's token after the path, even if the cut removed it
    predictions: list[int] = field(default_factory=list)  # [N], the target's best id after each row
    draft_rows: list[int] = field(default_factory=list)  # of the draft's passes, catch-up first
    cached: tuple[int, int] = (0, 0)  # tokens that the target's cache, and the draft's, now hold
    draft_ms: float = 0.0  # the draft's passes
    verify_ms: float = 0.0  # the target's: prefill, verification, its cache's commit
    other_ms: float = 0.0  # everything else

    @property
    def n_drafted(self) -> int:
        """Nodes of the tree, the root not counted."""
        return len(self.tree) - 1 if self.tree else 0


class Stopwatch:
    """Milliseconds `with` it."""

    ms = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.ms += (time.perf_counter() - self.began) * 1e3

    def around(self, draft: Draft) -> Draft:
        """The same, but that each call is timed."""

        def timed(tokens: list[int], parents: list[int] | None) -> Candidates:
            with self:
                return draft(tokens, parents)

        return timed


class Clock:
    """Milliseconds of one step by part, all of it the host's: what a pass says is read with it, so
    a device has come to its end. What passes between two steps is in none."""

    def __init__(self) -> None:
        self.drafting, self.verifying = Stopwatch(), Stopwatch()
        self.restart()

    def restart(self) -> None:
        """A step begins."""
        self.began = time.perf_counter()
        self.drafting.ms = self.verifying.ms = 0.0

    def ms(self) -> float:
        """All that has passed since the step began."""
        return (time.perf_counter() - self.began) * 1e3

    def times(self) -> dict[str, float]:
        """The same by part, as a Step has them."""
        parts = {"draft_ms": self.drafting.ms, "verify_ms": self.verifying.ms}
        return parts | {"other_ms": self.ms() - sum(parts.values())}


class Drafter:
    """What guesses, in one generation at a time: a model (ModelDrafter), or whatever a subclass
    does instead, as trained heads or some of the target's own layers."""

    length = 0  # tokens of the text in a cache of its own
    pass_rows: list[int]  # how many each of its passes had; the loop begins a list for each tree

    def start(
        self, prompt: list[int], n_new: int, rule: Rule, sampler: Sampler, cache: KVCache
    ) -> None:
        """A text begins, which gets n_new tokens at most. cache: the target's, not read yet."""

    def draft(self, tokens: list[int], parents: list[int] | None) -> Candidates:
        """Candidates below each of n nodes, as draft_tree.Draft has it."""
        raise NotImplementedError(f"{type(self).__name__} has no `draft`")

    def commit(self, tree: Tree, path: list[int], tokens: list[int], scores: Scores) -> None:
        """These rows of the tree were accepted, the root first; tokens: what follows each of them,
        the bonus last, though a limit or EOS may cut the text before; scores: of all its rows. The
        first call is of the prompt: its last token, a tree alone, and what follows."""

    def end(self) -> None:
        """The text has ended, or its reader has gone."""


class ModelDrafter(Drafter):
    """A draft model over its own cache: slots [0, length) committed, then root, then nodes.

    The root stands at slot `length`, above it every node in the order it was run. Committed
    tokens the draft has not run yet are caught up in place, in one causal block with the root.
    """

    def __init__(self, model: Model, n_ids: int):
        """n_ids: of the target's vocabulary, to which guesses are limited."""
        self.model, self.n_ids = model, n_ids

    def start(
        self, prompt: list[int], n_new: int, rule: Rule, sampler: Sampler, cache: KVCache
    ) -> None:
        self.cache = self.model.new_cache(len(prompt) + n_new + rule.max_drafted)
        self.rule, self.sampler = rule, sampler
        self.is_drawing = rule.is_drawing and sampler.settings.draws
        self.lacking = list(prompt)  # committed tokens that it has not run, the root last
        self.depth = 0  # of the level that ran last
        self.sees = numpy.ones((1, 1), dtype=bool)  # which slots from the root's its rows attend

    @property
    def length(self) -> int:
        return self.cache.length

    def draft(self, tokens: list[int], parents: list[int] | None) -> Candidates:
        scores = self.catch_up() if parents is None else self.run_level(tokens, parents)
        if self.is_drawing:
            logits = scores.logits[:, : self.n_ids]
            return Candidates(*self.sampler.propose(logits, self.rule.n_drawn))
        temperature = self.sampler.settings.ranked_at
        return Candidates(*scores.top(self.rule.max_branches, temperature, self.n_ids))

    def catch_up(self) -> Scores:
        """Run the committed tokens that are lacking, and the root: its scores."""
        n_ids, cache = self.model.config.vocab_size, self.cache
        # An id that the draft cannot embed is read as 0: a worse guess, never a wrong text.
        ids = [i if i < n_ids else 0 for i in self.lacking]
        self.lacking = []
        self.pass_rows.append(len(ids))
        if len(ids) <= min(MAX_ROWS, cache.most):  # a pass that an engine may have captured
            positions = torch.arange(cache.length, cache.length + len(ids))
            scores = self.model.forward(torch.tensor(ids), positions, cache, n_last=1)
            cache.advance(len(ids))
        else:
            scores = self.model.prefill(ids, cache)
        cache.rewind(cache.length - 1)  # the root stays scratch until it is verified
        self.depth = 0
        self.sees = numpy.ones((1, 1), dtype=bool)
        return scores

    def run_level(self, tokens: list[int], parents: list[int]) -> Scores:
        """Run nodes whose parents are rows of the level before: each sees what its parent saw, and
        itself."""
        n, end = len(tokens), self.sees.shape[1]  # so many slots above the root's begins the level
        self.pass_rows.append(n)
        sees = numpy.zeros((n, end + n), dtype=bool)
        for i, parent in enumerate(parents):
            sees[i, :end] = self.sees[parent]
            sees[i, end + i] = True
        self.sees = sees
        self.depth += 1
        root = self.cache.length
        positions = torch.full((n,), root + self.depth)
        ids = torch.from_numpy(numpy.array(tokens))
        return self.model.forward(ids, positions, self.cache, torch.from_numpy(sees), root + end)

    def commit(self, tree: Tree, path: list[int], tokens: list[int], scores: Scores) -> None:
        """Keep the accepted nodes that were run; the rest of the path is caught up later."""
        slots = [slot for row in path if (slot := tree.draft_slots[row]) >= 0]
        self.cache.commit(slots)
        if not slots:  # the root was not run, so it is lacking already
            slots = [0]
        self.lacking += tokens[len(slots) - 1 :]

    def end(self) -> None:
        self.cache.__exit__()


@torch.inference_mode()
def generate(
    target: Model,
    draft: Model | Drafter | None,
    prompt: list[int],
    settings: Settings,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    acceptance: Acceptance | None = None,
    watcher: Watcher | None = None,
) -> Iterator[Step]:
    """Decode, one Step per commit: the target's own greedy ids, or samples of its distribution.

    draft: None for a rule that drafts no level, which does not ask it either. eos_ids end the text
    where they appear; those of a checkpoint are in config.eos_ids. acceptance: of sampled text;
    None: the rule's own, or by token. watcher: told of each tree. Raises, once the first step is
    asked for, ValueError for such arguments and MemoryError, and at any step NonFiniteLogits.
    """
    prompt, eos_ids = whole_numbers(prompt), tuple(eos_ids)
    require_arguments(target, prompt, settings, max_new_tokens, sampling, acceptance)
    rule = settings.rule()  # fresh: no generation learns from another
    drafter = choose_drafter(target, draft, rule)
    sampler = sampling.sampler(target.device, watcher and watcher.tried)
    acceptance = acceptance or rule.acceptance or accept_by_token
    left = max_new_tokens
    clock = Clock()
    draft_level = clock.drafting.around(drafter.draft)
    with ExitStack() as at_end:
        cache = at_end.enter_context(target.new_cache(len(prompt) + left + rule.max_rows))
        drafter.start(prompt, left, rule, sampler, cache)
        at_end.callback(drafter.end)
        rule.start(list(prompt))
        with clock.verifying:
            scores = target.prefill(prompt, cache, reader(rule))
        tree = lone(prompt[-1])
        path, tokens = accept(tree, scores, sampler, acceptance)
        drafter.commit(tree, path, tokens, scores)
        new = cut(tokens, eos_ids, left)
        root, left = new[-1], left - len(new)
        yield Step(new, cached=(cache.length, drafter.length), **clock.times())
        while left and root not in eos_ids:
            clock.restart()
            # 1 draft: a tree below the pending root, no deeper than the tokens still allowed
            max_depth = min(left, cache.most) - 1
            drafter.pass_rows = []
            tree = grow(rule, root, draft_level, max_depth, watcher, target.config.vocab_size)
            # 2 mask and positions: a node sees what is above it and stands at its depth
            ids, positions, mask = tree_pass(tree, cache.length)
            # 3 verify: one target pass over the whole tree
            with clock.verifying:
                scores = target.forward(ids, positions, cache, mask)  # of N rows
            # 4 accept: the path on which the target agrees, then the bonus token
            path, tokens = accept(tree, scores, sampler, acceptance)
            new = cut(tokens, eos_ids, left)
            best = scores.argmax()
            if rule.n_read:
                rule.read(tree.tokens, scores.best(rule.n_read))
            # 5 commit: the accepted rows stay in both caches, the rest is forgotten
            drafter.commit(tree, path, tokens, scores)
            with clock.verifying:
                cache.commit(path)
            # 6 adapt
            rule.adapt(tree, path, clock.ms())
            root, left = new[-1], left - len(new)
            cached, rows = (cache.length, drafter.length), drafter.pass_rows
            yield Step(new, tree, path, tokens[-1], best, rows, cached, **clock.times())


def whole_numbers(prompt: Sequence[int]) -> list[int]:
    """A prompt's ids, also those of numpy and torch. Raises ValueError for anything else."""
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise ValueError("a prompt is a list of token ids, as a tokenizer makes") from error


def require_arguments(
    target: Model,
    prompt: Sequence[int],
    settings: Settings,
    max_new_tokens: int,
    sampling: Sampling,
    acceptance: Acceptance | None,
) -> None:
    """Raise ValueError for an empty prompt, an id in it that the target does not know, settings of
    no method, a text of no tokens, or an acceptance of greedy text."""
    if not prompt:
        raise ValueError("the prompt is empty")
    n_ids = target.config.vocab_size
    for token in prompt:
        if not 0 <= token < n_ids:
            raise ValueError(f"the prompt has id {token}, but the target knows 0 to {n_ids - 1}")
    if not hasattr(settings, "rule"):
        raise ValueError(f"{settings!r} is no method's settings, as DynaTree() is")
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, it must be a whole number from 1")
    if acceptance and sampling.is_greedy:
        raise ValueError("an acceptance is of sampled text, and this is greedy")


def choose_drafter(target: Model, draft: Model | Drafter | None, rule: Rule) -> Drafter:
    """What drafts for this rule; one that is never asked for a rule without a level. Raises
    ValueError if it has levels and there is no draft."""
    if not rule.max_depth:
        return Drafter()
    if draft is None:
        raise ValueError("the method drafts, and there is no draft")
    if isinstance(draft, Drafter):
        return draft
    return ModelDrafter(draft, target.config.vocab_size)


def reader(rule: Rule) -> Callable[[list[int], Scores], None] | None:
    """What shows a rule that asks for it what the target likes after each token of the prompt."""
    if not rule.n_read:
        return None
    return lambda tokens, scores: rule.read(tokens, scores.best(rule.n_read))


if __name__ == "__main__":
    from cli.main import main

    sys.exit(main())
