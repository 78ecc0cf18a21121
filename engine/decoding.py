"""dynatree.generate over fast models, with all that the engine has: graphs, windows, strict passes.

The loop is the core's and knows none of it. It gets a view of each model, which makes caches for
what this generation will ask; and since it is a generator, what belongs to no step is done between
two of them.

    for step in generate(target, draft, prompt_ids, Way(DynaTree(), strict=True), 64):
        print(step.tokens)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from torch import Tensor

import dynatree
from draft_tree import MAX_ROWS, Rule, Watcher
from dynatree import Drafter, Step
from engine.caches import require_caches
from engine.model import FastCache, FastGPTNeoX, is_fast
from engine.passes import Use
from engine.sampling import FastSampling
from engine.scores import Ranking, ReadScores
from engine.way import Way
from gpt_neox import Model, Scores
from sampling import Sampling


class View:
    """A fast model as one generation uses it: a gpt_neox.Model."""

    def __init__(self, model: FastGPTNeoX, use: Use, n_tokens: int, n_scratch: int):
        """Of its cache: how many tokens of text, and slots above them."""
        self.model, self.use = model, use
        self.config, self.device = model.config, model.device
        self.capacity = min(n_tokens, use.window.full) + n_scratch
        self.cache: FastCache | None = None
        self.scores: ReadScores | None = None  # of the last pass
        self.keeps_logits = False  # though a pass before the next step overwrites them on CUDA

    def new_cache(self, capacity: int) -> FastCache:
        """For the text's own length or the window's, whichever is less."""
        self.cache = self.model.new_cache(self.capacity, self.use)
        return self.cache

    def prefill(
        self,
        tokens: list[int],
        cache: FastCache,
        read: Callable[[list[int], Scores], None] | None = None,
    ) -> ReadScores:
        self.scores = self.model.prefill(tokens, cache, read)
        return self.scores

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: FastCache,
        mask: Tensor | None = None,
        start: int | None = None,
        n_last: int | None = None,
    ) -> ReadScores:
        self.scores = self.model.forward(tokens, positions, cache, mask, start, n_last)
        if self.keeps_logits:
            self.scores.logits = self.scores.logits.clone()
        return self.scores


def generate(
    target: Model,
    draft: Model | Drafter | None,
    prompt: list[int],
    way: Way,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    inspect: Callable[[Tensor], None] | None = None,
    watcher: Watcher | None = None,
) -> Iterator[Step]:
    """As dynatree.generate, by a way: strict trees are no deeper than 15. inspect: shown, after
    each step, the target's float32 logits [n, V] that its n tokens were chosen from, where the
    model is. Unless the way is plain and nothing is inspected, the target is a FastGPTNeoX. Raises
    also OutOfMemory.
    """
    if not isinstance(way, Way):
        raise ValueError(f"{way!r} is no Way; read_way of engine/way.py makes one of words")
    prompt, eos_ids, accepts = dynatree.whole_numbers(prompt), tuple(eos_ids), way.accepts()
    dynatree.require_arguments(target, prompt, way.settings, max_new_tokens, way.sampling, accepts)
    rule = way.rule()
    n_tokens = len(prompt) + max_new_tokens
    views = []
    if is_fast(target):
        ranking = Ranking(rule.n_read)
        use = Use(rule.max_rows, rule.min_rows, ranking=ranking, window=way.window)
        use = use._replace(is_strict=way.strict, is_rebuilt=way.commit == "rebuild")
        target = View(target, use, n_tokens, rule.max_rows)
        target.keeps_logits = inspect is not None and use.is_rebuilt
        views.append(target)
    elif inspect or not way.is_plain:
        raise ValueError("a plain model has no strict passes, window, rebuilt commit or inspection")
    if rule.max_depth and is_fast(draft):
        n_rows, n_ids = min(rule.max_drafted, MAX_ROWS), target.config.vocab_size
        ranking = proposed(rule, way.sampling)
        use = Use(n_rows, rule.min_rows, rule.max_drafted, n_ids, ranking, window=way.window)
        draft = View(draft, use, n_tokens, rule.max_drafted)
        views.append(draft)
    steps = dynatree.generate(
        target,
        draft,
        prompt,
        way.settings,
        max_new_tokens,
        eos_ids=eos_ids,
        sampling=FastSampling.of(way.sampling),
        acceptance=accepts,
        watcher=watcher,
    )
    # Together, before the first is made: memory is taken lazily
    if views:
        require_caches([(view.model.pool, view.capacity, view.use) for view in views])
    with closing(steps):
        n_left = max_new_tokens
        for step in steps:
            if inspect:
                inspect(target.scores.logits[step.path[: len(step.tokens)] or [0]])
            yield step
            n_left -= len(step.tokens)
            is_first = step.tree is None
            if way.graphs and is_first and n_left and step.tokens[-1] not in eos_ids:
                for view in views:  # the passes to come are known now
                    shortest = min(len(prompt) + 1, way.window.size + way.window.sinks)
                    view.model.capture(view.cache, shortest)


def proposed(rule: Rule, sampling: Sampling) -> Ranking:
    """What dynatree.ModelDrafter will ask of the draft's rows: the likeliest, or their logits to
    draw from."""
    if rule.is_drawing and sampling.draws:
        return Ranking(is_read=False)
    return Ranking(rule.max_branches, are_logprobs=True, temperature=sampling.ranked_at)
