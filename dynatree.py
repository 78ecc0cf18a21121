"""DynaTree decoding: the loop, and the draft model's side of it.

Each iteration drafts a tree of guesses below the last committed token, lets the target read the
whole tree in one pass, and keeps the path on which the target agrees, plus the target's own next
token. The text is exactly what the target alone would write. Paper: DynaTree v2, Algorithm 1.

    python dynatree.py --prompt "The ship sailed at dawn" --max-new-tokens 64

    for step in generate(target, draft, prompt_ids, DynaTree(), max_new_tokens=64):
        print(step.tokens)

Shapes: N tree rows, n rows of one level, S cache slots, V vocabulary.
"""

if __name__ == "__main__":
    import cli.start  # noqa: F401

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from acceptance import choose_acceptance
from draft_tree import MAX_ROWS, Candidates, DynaTree, Rule, Settings, Tree, Watcher, grow, lone
from engine.caches import require_caches
from engine.passes import Use
from engine.sampling import Sampler, Sampling
from engine.scores import Ranking, Scores
from engine.stopwatch import Stopwatch
from engine.streaming import WHOLE_TEXT, Window
from engine.strict import MAX_DEPTH
from gpt_neox import GPTNeoX, KVCache
from verify import NonFiniteLogits, accept, cut, tree_pass

__all__ = ["DynaTree", "NonFiniteLogits", "Step", "generate"]

COMMITS = ("keep", "rebuild")


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
    draft_ms: float = 0.0  # passes of the draft
    verify_ms: float = 0.0  # passes of the target: prefill, verification, rebuild
    other_ms: float = 0.0  # everything else

    @property
    def n_drafted(self) -> int:
        """Nodes of the tree, the root not counted."""
        return len(self.tree) - 1 if self.tree else 0


class Drafter:
    """The draft model over its own cache: slots [0, length) committed, then root, then nodes.

    The root stands at slot `length`, above it every node in the order it was run. Committed
    tokens the draft has not run yet are caught up in place, in one causal block with the root.
    """

    def __init__(
        self, model: GPTNeoX, cache: KVCache, rule: Rule, sampler: Sampler | None, watch: Stopwatch
    ):
        """sampler: None if candidates are the likeliest."""
        self.model, self.cache, self.rule = model, cache, rule
        self.sampler, self.watch = sampler, watch
        self.lacking: list[int] = []  # committed tokens that it has not run, the root last
        self.depth = 0  # of the level that ran last
        self.sees = numpy.empty((0, 0), dtype=bool)  # which slots from the root's its rows attend
        self.n_run: list[int] = []  # rows of each pass of this iteration

    def begin(self, visible: list[int]) -> None:
        """An iteration begins, below the last of these committed ids."""
        self.lacking = visible[self.cache.length :]
        self.n_run = []

    def run(self, tokens: list[int], parents: list[int] | None) -> Candidates:
        """One level of n nodes, for draft_tree.grow."""
        with self.watch.draft:
            scores = self.catch_up() if parents is None else self.run_level(tokens, parents)
            if self.sampler:
                return Candidates(*self.sampler.propose(scores.logits, self.rule.n_drawn))
            return Candidates(scores.candidates, scores.values)

    def catch_up(self) -> Scores:
        """Run the committed tokens that are lacking, and the root: its scores."""
        n_ids, cache = self.model.config.vocab_size, self.cache
        # An id that the draft cannot embed is read as 0: a worse guess, never a wrong text.
        lacking = [i if i < n_ids else 0 for i in self.lacking]
        self.n_run.append(len(lacking))
        if len(lacking) > cache.use.n_rows:
            scores = self.model.prefill(lacking, cache)
        else:
            scores = self.model.append(lacking, cache)
        cache.rewind(cache.length - 1)  # the root stays scratch until it is verified
        self.depth = 0
        self.sees = numpy.ones((1, 1), dtype=bool)
        return scores

    def run_level(self, tokens: list[int], parents: list[int]) -> Scores:
        """Run nodes whose parents are rows of the level before: each sees what its parent saw, and
        itself."""
        n, end = len(tokens), self.sees.shape[1]  # so many slots above the root's begins the level
        self.n_run.append(n)
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

    def commit(self, tree: Tree, path: list[int]) -> None:
        """Keep the accepted nodes that were run; the rest of the path is caught up later."""
        slots = [tree.draft_slots[row] for row in path]
        self.cache.commit([slot for slot in slots if slot >= 0])

    def drop(self, window: Window) -> None:
        """Drop the `slack` tokens after the sinks, as the target just has; all if not so many are
        there."""
        if self.cache.length >= window.sinks + window.slack:
            self.model.forget(self.cache, window.sinks, window.slack)
        else:
            self.cache.rewind(min(self.cache.length, window.sinks))


@contextmanager
def open_caches(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    rule: Rule,
    n_tokens: int,
    proposed: Ranking,
    is_strict: bool,
) -> Iterator[list[KVCache]]:
    """The target's cache for n_tokens and a tree, and the draft's if the rule drafts; lent as long
    as the block runs. proposed: what is wanted of the draft. Raises OutOfMemory unless both fit."""
    ranking = Ranking(rule.n_read)
    use = Use(rule.max_rows, rule.min_rows, ranking=ranking, is_strict=is_strict)
    needs = [(target, n_tokens + rule.max_rows, use)]
    if rule.max_depth:
        n_rows = min(rule.max_drafted, MAX_ROWS)
        n_ids = target.config.vocab_size
        use = Use(n_rows, rule.min_rows, rule.max_drafted, n_ids, proposed)
        needs.append((draft, n_tokens + rule.max_drafted, use))
    caches: list[KVCache] = []
    try:
        with target.share.agreeing():
            require_caches([(model.pool, capacity, use) for model, capacity, use in needs])
        with target.share.agreeing():
            for model, capacity, use in needs:
                caches.append(model.new_cache(capacity, use))
        yield caches
    finally:
        for (model, _, _), cache in zip(needs, caches, strict=False):
            model.pool.take_back(cache.storage)


@torch.inference_mode()
def generate(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    prompt: list[int],
    settings: Settings,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    commit: str = "keep",
    sampling: Sampling | None = None,
    acceptance: str | None = None,
    window: Window = WHOLE_TEXT,
    strict: bool = False,
    inspect: Callable[[Tensor], None] | None = None,
    watcher: Watcher | None = None,
) -> Iterator[Step]:
    """Decode, one Step per commit: the target's own greedy ids, or samples of its distribution.

    draft may be None for a rule that drafts no level. sampling: None is greedy; so is one of
    temperature 0, which has a temperature for the draft. eos_ids end the text where they appear.
    commit: "keep" moves the accepted rows in the cache, "rebuild" runs them again (section 3.5):
    one more target pass, the same cache. acceptance: of sampled text, a name in acceptance.py;
    None: the rule's own, or by the kind of its trees. window: what of the text the caches keep.
    strict: the target's logits are ar's bit for bit, if ar's passes have as many rows
    (engine/strict.py); trees are no deeper than 15. inspect: shown, before each step, the target's
    float32 logits [n, V] that its n tokens were chosen from, where the model is. watcher: told of
    each tree.
    Raises ValueError (arguments) and OutOfMemory at the first step, NonFiniteLogits.
    """
    rule = settings.rule()  # fresh: no generation learns from another
    accepts = choose_acceptance(rule, acceptance)
    share = target.share  # of several ranks rank 0 decides, and all make the target's passes
    if share.index:
        rule = spectator(rule)
    if rule.max_depth and not draft:
        raise ValueError("the method drafts, and there is no draft")
    if max_new_tokens < 1 or commit not in COMMITS:
        raise ValueError(f"{max_new_tokens} tokens, commit {commit}: 1 or more, keep or rebuild")
    is_greedy = sampling is None or sampling.is_greedy
    if acceptance and is_greedy:
        raise ValueError(f"acceptance {acceptance} is of sampled text, and this is greedy")
    require_ids(prompt, target.config.vocab_size)
    sampler = sampling.sampler(target.device, watcher and watcher.tried) if sampling else None
    proposed = proposals(rule, sampling)
    proposes_by = None if proposed.is_read else sampler
    accepts_by = None if is_greedy else sampler
    visible = list(prompt)  # the ids in the target's cache, and the pending root
    left = max_new_tokens
    watch = Stopwatch()
    n_tokens = min(len(visible) + left, window.full)
    with open_caches(target, draft, rule, n_tokens, proposed, strict) as (cache, *others):
        drafter = Drafter(draft, others[0], rule, proposes_by, watch) if others else None
        rule.start(list(prompt))
        with watch.verify:
            read = rule.read if rule.n_read else None
            scores = window.read_prompt(target, visible, cache, read)
        root = lone(visible[-1])
        path, tokens = share.first(accept, root, scores, accepts_by, accepts)
        show(inspect, scores, path, watch)
        step = Step(cut(tokens, eos_ids, left), cached=lengths(cache, drafter), **watch.times())
        while True:
            visible += step.tokens
            left -= len(step.tokens)
            yield step
            if not left or visible[-1] in eos_ids:
                return
            if step.tree is None:  # the first: the passes to come are known now
                shortest = min(len(visible), window.size + window.sinks)
                with share.agreeing():
                    for model, own in zip((target, draft), (cache, *others), strict=False):
                        capture(model, own, shortest)
            watch.restart()
            # 1 draft: a tree below the pending root, no deeper than the tokens still allowed
            max_depth = min(left, window.until_drop(cache)) - 1
            if strict:
                max_depth = min(max_depth, MAX_DEPTH)
            if drafter:
                drafter.begin(visible)
            run = drafter and drafter.run
            tree = share.first(grow, rule, visible[-1], run, max_depth, watcher)
            # 2 mask and positions: a node sees what is above it and stands at its depth
            rows, positions, mask = tree_pass(tree, cache.length)
            # 3 verify: one target pass over the whole tree
            with watch.verify:
                scores = target.forward(rows, positions, cache, mask)  # of N rows
            # 4 accept: the path on which the target agrees, then the bonus token
            path, tokens = share.first(accept, tree, scores, accepts_by, accepts)
            new = cut(tokens, eos_ids, left)
            show(inspect, scores, path[: len(new)], watch)
            # 5 commit: the accepted rows stay in both caches, the rest is forgotten
            if commit == "keep":
                cache.commit(path)
            else:  # as the paper does: run them again
                with watch.verify:
                    target.append([tree.tokens[row] for row in path], cache)
            if drafter:
                drafter.commit(tree, path)
            if window.drop(target, visible, cache) and drafter:
                drafter.drop(window)
            # 6 adapt
            if rule.n_read:
                rule.read(tree.tokens, scores.candidates)
            rule.adapt(tree, path, watch.ms())
            step = Step(
                tokens=new,
                tree=tree,
                path=path,
                bonus=tokens[-1],
                predictions=scores.best.tolist(),
                draft_rows=drafter.n_run if drafter else [],
                cached=lengths(cache, drafter),
                **watch.times(),
            )


def proposals(rule: Rule, sampling: Sampling | None) -> Ranking:
    """What is wanted of the draft's rows: the likeliest, or their logits to draw from."""
    if sampling and sampling.draws and rule.is_drawing:
        return Ranking(is_read=False)
    temperature = sampling.draft_temperature if sampling else None
    return Ranking(rule.max_branches, are_logprobs=True, temperature=temperature or 1.0)


def spectator(rule: Rule) -> Rule:
    """What other ranks than the first have for a rule: as many rows, and no say."""
    own = Rule(rule.max_branches, 0, rule.max_rows, rule.max_rows)
    own.min_rows, own.n_read = rule.min_rows, rule.n_read
    return own


def require_ids(prompt: Sequence[int], n_ids: int) -> None:
    """Raise ValueError for an empty prompt, or a token id that the target does not know."""
    if not prompt:
        raise ValueError("the prompt is empty")
    for token in prompt:
        if not 0 <= token < n_ids:
            raise ValueError(f"the prompt has id {token}, but the target knows 0 to {n_ids - 1}")


def show(
    inspect: Callable[[Tensor], None] | None, scores: Scores, rows: list[int], watch: Stopwatch
) -> None:
    """Let `inspect` see the rows that a step's tokens were chosen from, in nobody's time."""
    if inspect:
        with watch.nobodys:
            inspect(scores.logits[rows])


def capture(model: GPTNeoX, cache: KVCache, shortest: int) -> None:
    """On CUDA: the passes over a cache from a length on, as graphs."""
    lengths = range(shortest, cache.capacity + 1)
    model.pool.capture(cache.storage, lengths, cache.length, cache.use)


def lengths(cache: KVCache, drafter: Drafter | None) -> tuple[int, int]:
    """As Step.cached has them."""
    return cache.length, drafter.cache.length if drafter else 0


if __name__ == "__main__":
    from cli.main import main

    sys.exit(main())
