"""DynaTree decoding: the loop, and the draft model's side of it.

Each iteration drafts a tree of guesses below the last committed token, lets the target read the
whole tree in one pass, and keeps the path on which the target agrees, plus the target's own next
token. The text is exactly what the target alone would write. Paper: DynaTree v2, Algorithm 1.

    python dynatree.py --prompt "The ship sailed at dawn" --max-new-tokens 64

    for step in generate(target, draft, prompt_ids, DynaTree(), max_new_tokens=64):
        print(step.tokens)

Shapes: N tree rows, W rows of one level, S cache slots, V vocabulary.
"""

if __name__ == "__main__":  # before torch, whose import takes a second
    from cli.start import guard_imports

    guard_imports()

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_tree import MAX_ROWS, DynaTree, Rule, Settings, Tree, Watcher, grow, lone
from engine.caches import require_caches
from engine.memory import OutOfMemory
from engine.passes import Use
from engine.sampling import Sampler, Sampling
from engine.scores import Scores
from engine.stopwatch import Stopwatch
from engine.streaming import WHOLE_TEXT, Window
from engine.strict import MAX_DEPTH
from gpt_neox import GPTNeoX, KVCache
from verify import NonFiniteLogits, accept, cut, tree_mask, tree_positions

__all__ = ["DynaTree", "NonFiniteLogits", "Step", "generate"]

COMMITS = ("keep", "rebuild")


@dataclass(frozen=True, slots=True)
class Step:
    """What one commit adds to the text; the first step is prefill's token and has no tree."""

    tokens: list[int]  # new ids, after the EOS and limit cut
    tree: Tree | None = None
    path: Sequence[int] = (0,)  # accepted rows of the tree, root first; as many as were committed
    bonus: int = -1  # the target's token after the path, even if the cut removed it
    draft_ms: float = 0.0  # forwards of the draft
    verify_ms: float = 0.0  # forwards of the target: prefill, verification, rebuild
    other_ms: float = 0.0  # everything else
    n_drafted: int = 0  # nodes of the tree, the root not counted
    predictions: Tensor | None = None  # [N] int64 on the host, the target's best id after each row
    draft_rows: tuple[int, ...] = ()  # of each of the draft's passes, the catch-up first
    cached: tuple[int, int] = (0, 0)  # tokens that the target's cache, and the draft's, now hold


class Drafter:
    """The draft model over its own cache: slots [0, length) committed, then root, then nodes.

    The root stands at slot `length`, above it every node in the order it was run. Committed
    tokens the draft has not run yet are caught up in place, in one causal block with the root.
    """

    def __init__(self, model: GPTNeoX, cache: KVCache, visible: list[int], watch: Stopwatch):
        """visible: the ids that the loop has committed, the pending root last."""
        self.model, self.cache, self.visible, self.watch = model, cache, visible, watch
        self.depth = 0  # of the level that ran last
        self.cursor = 0  # the slot that the next level is written from
        self.seen = torch.empty(0)  # [W, cursor] bool, the slots that each row of the level attends
        self.n_run: list[int] = []  # rows of each pass since they were last asked for

    def run(self, tokens: Tensor, parents: Tensor | None) -> Scores:
        """One level of W rows, for draft_tree.grow."""
        with self.watch.draft:
            if parents is None:
                return self.catch_up()
            return self.run_level(tokens, parents)

    def catch_up(self) -> Scores:
        """Run the committed tokens that are lacking, and the root: its scores."""
        n_ids, cache = self.model.config.vocab_size, self.cache
        # An id that the draft cannot embed is read as 0: a worse guess, never a wrong text.
        lacking = [i if i < n_ids else 0 for i in self.visible[cache.length :]]
        self.n_run.append(len(lacking))
        if len(lacking) > cache.use.n_rows:
            scores = self.model.prefill(lacking, cache)
        else:
            scores = self.model.append(lacking, cache)
        self.cursor = cache.length
        cache.rewind(cache.length - 1)  # the root stays scratch until it is verified
        self.depth = 0
        self.seen = torch.ones(1, self.cursor, dtype=torch.bool)
        return scores

    def run_level(self, tokens: Tensor, parents: Tensor) -> Scores:
        """Run nodes whose parents are rows of the level before."""
        self.n_run.append(len(tokens))
        itself = torch.eye(len(tokens), dtype=torch.bool)
        self.seen = torch.cat([self.seen[parents], itself], dim=1)  # what its parent saw, and it
        self.depth += 1
        positions = torch.full_like(tokens, self.cache.length + self.depth)
        scores = self.model.forward(tokens, positions, self.cache, self.seen, self.cursor)
        self.cursor += len(tokens)
        return scores

    def take_rows(self) -> tuple[int, ...]:
        """The rows of each pass since the last call."""
        rows = tuple(self.n_run)
        self.n_run.clear()
        return rows

    def commit(self, tree: Tree, path: list[int]) -> None:
        """Keep the accepted nodes that were run; the rest of the path is caught up later."""
        slots = tree.draft_slots.tolist()
        self.cache.commit([slots[row] for row in path if slots[row] >= 0])

    def drop(self, window: Window) -> None:
        """Drop the `slack` tokens after the sinks, as the target just has; all if not so many are
        there."""
        if self.cache.length >= window.sinks + window.slack:
            self.model.forget(self.cache, window.sinks, window.slack)
        else:
            self.cache.rewind(min(self.cache.length, window.sinks))


@dataclass(frozen=True, slots=True)
class Generation:
    """One text as it is written: the models, their caches, the rule, and the ids so far."""

    target: GPTNeoX
    cache: KVCache
    drafter: Drafter | None
    rule: Rule
    sampler: Sampler | None
    window: Window
    visible: list[int]  # the ids in the target's cache, and the pending root
    watch: Stopwatch
    is_rebuilding: bool
    inspect: Callable[[Tensor], None] | None

    def prefill(self) -> Scores:
        """Read the prompt: its last token's scores."""
        read = self.rule.read if self.rule.n_read else None
        with self.watch.verify:
            return self.window.prefill(self.target, self.visible, self.cache, read)

    def show(self, scores: Scores, rows: list[int]) -> None:
        """Let `inspect` see the rows that a step's tokens were chosen from, in nobody's time."""
        if self.inspect:
            with self.watch.paused():
                self.inspect(scores.logits[rows])

    def commit(self, tree: Tree, path: list[int]) -> None:
        """Keep the accepted rows; or, as the paper does, drop the tree and run them again."""
        if self.is_rebuilding:
            with self.watch.verify:
                self.target.append(tree.tokens[path].tolist(), self.cache)
        else:
            self.cache.commit(path)
        if self.drafter:
            self.drafter.commit(tree, path)
        if self.window.drop(self.target, self.visible, self.cache) and self.drafter:
            self.drafter.drop(self.window)

    def capture(self) -> None:
        """On CUDA: the passes that are left to make, as graphs."""
        shortest = min(len(self.visible), self.window.size + self.window.sinks)
        capture(self.target, self.cache, shortest)
        if self.drafter:
            capture(self.drafter.model, self.drafter.cache, shortest)

    def cached(self) -> tuple[int, int]:
        """As Step has it."""
        return self.cache.length, self.drafter.cache.length if self.drafter else 0

    def close(self) -> None:
        """Give the caches back."""
        self.target.pool.take_back(self.cache.storage)
        if self.drafter:
            self.drafter.model.pool.take_back(self.drafter.cache.storage)


def capture(model: GPTNeoX, cache: KVCache, shortest: int) -> None:
    """Capture the passes over a cache from a length on, where passes are captured at all."""
    lengths = range(shortest, cache.capacity + 1)
    model.pool.capture(cache.storage, lengths, cache.length, cache.use)


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
    window: Window = WHOLE_TEXT,
    strict: bool = False,
    inspect: Callable[[Tensor], None] | None = None,
    watcher: Watcher | None = None,
) -> Iterator[Step]:
    """Decode, one Step per commit: the target's own greedy ids, or samples of its distribution.

    draft may be None for a rule that drafts no level. eos_ids end the text where they appear.
    commit: "keep" moves the accepted rows in the cache, "rebuild" runs them again (section 3.5):
    one more target pass, the same cache. window: what of the text the caches keep. strict: the
    target's logits are ar's bit for bit, if ar's passes have as many rows (engine/strict.py); trees
    are no deeper than 15. inspect: shown, before each step, the target's float32 logits [n, V] that
    its n tokens were chosen from, where the model is. watcher: told how each tree grows. Raises
    ValueError (arguments) and OutOfMemory at the first step, NonFiniteLogits.
    """
    rule = settings.rule()  # fresh: no generation learns from another
    rule.watcher = watcher
    if not prompt or max_new_tokens < 1 or commit not in COMMITS or (rule.max_depth and not draft):
        raise ValueError("needs a prompt, a limit of 1 or more, commit keep or rebuild, a draft")
    watch = Stopwatch(target.device)
    visible = list(prompt)
    n_tokens = min(len(prompt) + max_new_tokens, window.full)
    cache, drafter = open_caches(target, draft, rule, visible, n_tokens, watch, strict)
    sampler = sampling.sampler(target.device) if sampling else None
    is_rebuilding = commit == "rebuild"
    generation = Generation(
        target, cache, drafter, rule, sampler, window, visible, watch, is_rebuilding, inspect
    )
    try:
        yield from iterate(generation, max_new_tokens, eos_ids)
    finally:
        generation.close()


def open_caches(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    rule: Rule,
    visible: list[int],
    n_tokens: int,
    watch: Stopwatch,
    strict: bool,
) -> tuple[KVCache, Drafter | None]:
    """The target's cache for n_tokens and a tree, and a drafter with its own, if both fit."""
    capacity = n_tokens + rule.max_rows
    use = Use(rule.max_rows, rule.min_rows, n_ranked=rule.n_read, is_strict=strict)
    if not rule.max_depth:
        return target.new_cache(capacity, use), None
    draft_capacity = n_tokens + rule.max_drafted
    draft_use = Use(
        n_rows=min(rule.max_drafted, MAX_ROWS),
        min_rows=rule.min_rows,
        n_ids=target.config.vocab_size,
        n_ranked=rule.max_branches,
    )
    require_caches([(target.pool, capacity, use), (draft.pool, draft_capacity, draft_use)])
    cache = target.new_cache(capacity, use)
    try:
        draft_cache = draft.new_cache(draft_capacity, draft_use)
    except OutOfMemory:
        target.pool.take_back(cache.storage)
        raise
    return cache, Drafter(draft, draft_cache, visible, watch)


def iterate(generation: Generation, left: int, eos_ids: Sequence[int]) -> Iterator[Step]:
    """The loop of generate: `left` tokens after the prompt, which is still to be read."""
    target, cache, rule = generation.target, generation.cache, generation.rule
    sampler, visible, watch = generation.sampler, generation.visible, generation.watch
    draft = generation.drafter.run if generation.drafter else None
    root = torch.tensor(visible[-1:])
    rule.start(list(visible))
    scores = generation.prefill()
    path, tokens = accept(lone(root), scores, sampler)
    generation.show(scores, path)
    step = Step(cut(tokens, eos_ids, left), cached=generation.cached(), **watch.times())
    while True:
        visible += step.tokens
        left -= len(step.tokens)
        yield step
        if not left or visible[-1] in eos_ids:
            return
        if step.tree is None:  # the first: the passes to come are known now
            generation.capture()  # set-up, which has no time
        watch.restart()
        # 1 draft: a tree below the pending root, no deeper than the tokens still allowed
        root = torch.tensor(visible[-1:])
        max_depth = min(left, generation.window.until_drop(cache)) - 1
        if cache.use.is_strict:
            max_depth = min(max_depth, MAX_DEPTH)
        tree = grow(rule, root, draft, max_depth, sampler)
        # 2 mask and positions: a node sees the prefix and its ancestors, and stands at its depth
        mask = tree_mask(tree.ancestors, cache.length) if tree.depth else None
        positions = tree_positions(tree.depths, cache.length)
        # 3 verify: one target pass over the whole tree
        with watch.verify:
            scores = target.forward(tree.tokens, positions, cache, mask)  # of N rows
        # 4 accept: the path on which the target agrees, then the bonus token
        path, tokens = accept(tree, scores, sampler)
        new = cut(tokens, eos_ids, left)
        generation.show(scores, path[: len(new)])
        rule.read(tree.tokens, scores)  # now: a later pass may overwrite them
        # 5 commit: the accepted rows stay in both caches, the rest is forgotten
        generation.commit(tree, path)
        # 6 adapt
        rule.adapt(tree, path, watch.ms())
        step = Step(
            tokens=new,
            tree=tree,
            path=path,
            bonus=tokens[-1],
            n_drafted=len(tree) - 1,
            predictions=scores.best()[1],
            draft_rows=generation.drafter.take_rows() if generation.drafter else (),
            cached=generation.cached(),
            **watch.times(),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, which ranks above this file. Returns the exit status."""
    from cli.main import main

    return main(arguments)


if __name__ == "__main__":
    sys.exit(main())
