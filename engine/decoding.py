"""dynatree.generate over fast models, with all that the engine has: graphs, windows, strict passes.

The loop is the core's. It gets a view of each model, which makes caches for what this generation
will ask, times the passes and keeps what the host has read of the last one; a drafter and an
acceptance that use this reading in place of the logits; and a rule that ends trees where a window
or a strict pass does.

    for step in generate(target, draft, prompt_ids, Way(DynaTree(), strict=True), 64):
        print(step.tokens)
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

import dynatree
from draft_tree import MAX_ROWS, Candidates, Rule, Tree
from dynatree import Drafter, ModelDrafter
from engine.caches import require_caches
from engine.model import FastCache, is_fast
from engine.passes import Use
from engine.sampling import FastSampling
from engine.scores import Ranking, ReadScores
from engine.way import Way
from gpt_neox import KVCache, Model
from methods.acceptances import Accept
from methods.compose import Kit, compose
from methods.observing import HiddenDrafter, HiddenModel, ObservedModel
from methods.rules import RuleWrapper
from methods.sampler import Sampling
from verify import Acceptance, finite_rows


@dataclass(frozen=True, slots=True)
class Step:
    """A core Step with what the command line and the benchmark report of it."""

    tokens: list[int]
    tree: Tree | None = None  # None: of the prompt's step
    path: list[int] = field(default_factory=list)
    bonus: int = -1  # the target's token after the path, even if the cut removed it
    predictions: list[int] = field(default_factory=list)  # [N], the target's best id of each row
    draft_rows: list[int] = field(default_factory=list)  # of the draft's passes
    cached: tuple[int, int] = (0, 0)  # committed tokens in the target's and the draft's cache
    draft_overflowed: bool = False
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def n_drafted(self) -> int:
        return len(self.tree) - 1 if self.tree else 0


class View:
    """A fast or plain model as one generation uses it: a gpt_neox.Model that is timed."""

    def __init__(self, model: Model, use: Use, n_tokens: int, n_scratch: int, is_draft: bool):
        """n_tokens: of the text. n_scratch: slots above it."""
        self.model, self.use = model, use
        self.is_fast, self.is_draft = is_fast(model), is_draft
        self.config, self.device = model.config, model.device
        self.capacity = min(n_tokens, use.window.full) + n_scratch
        self.cache: KVCache | None = None
        self.scores: ReadScores | None = None  # of the last pass
        self.keeps_logits = False  # though a pass before the next step overwrites them on CUDA
        self.observers: list[Callable[[list[int], ReadScores], None]] = []  # of every pass
        self.ms = 0.0
        self.rows: list[int] = []

    def new_cache(self, capacity: int) -> KVCache:
        if self.is_fast:
            self.cache = self.model.new_cache(self.capacity, self.use)
            commit = self.cache.commit
            self.cache.commit = lambda rows: self.timed(commit, rows)
        else:
            self.cache = self.model.new_cache(capacity + self.use.n_scratch)
        return self.cache

    def close(self, is_failed: bool) -> None:
        if self.is_fast and self.cache:
            del self.cache.commit
            self.cache.close(is_failed)

    def timed(self, run: Callable, *args: object) -> object:
        if self.is_draft:  # whose levels are timed as a whole
            return run(*args)
        began = time.perf_counter()
        try:
            return run(*args)
        finally:
            self.ms += (time.perf_counter() - began) * 1e3

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        self.rows.append(len(tokens))
        if not self.is_fast:
            return self.timed(self.model.prefill, tokens, cache)
        self.scores = self.timed(self.run_text, tokens, cache)
        return self.scores.logits

    def run_text(self, tokens: list[int], cache: FastCache) -> ReadScores:
        if self.is_draft and len(tokens) <= min(MAX_ROWS, cache.most):  # it may be captured
            positions = torch.arange(cache.length, cache.length + len(tokens))
            scores = self.model.forward(torch.tensor(tokens), positions, cache, n_last=1)
            cache.advance(len(tokens))
            return scores
        return self.model.prefill(tokens, cache, self.show if self.observers else None)

    def show(self, tokens: list[int], scores: ReadScores) -> None:
        """Show the observers what a pass says after each token."""
        for observe in self.observers:
            observe(tokens, scores)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        self.rows.append(len(tokens))
        if not self.is_fast:
            return self.timed(self.model.forward, tokens, positions, cache, mask)
        self.scores = self.timed(self.run_tree, tokens, positions, cache, mask)
        if self.keeps_logits:
            self.scores.logits = self.scores.logits.clone()
        if self.observers:
            self.show(tokens.tolist(), self.scores)
        return self.scores.logits

    def run_tree(
        self, tokens: Tensor, positions: Tensor, cache: FastCache, mask: Tensor
    ) -> ReadScores:
        start, n = cache.length, len(tokens)
        if n == mask.shape[1]:  # a whole tree
            return self.model.forward(tokens, positions, cache, None if n == 1 else mask)
        cache.length = start + n - mask.shape[1]  # the engine's masks begin there
        try:
            return self.model.forward(tokens, positions, cache, mask, start)
        finally:
            cache.length = start


class FastDrafter(ModelDrafter):
    """A draft model whose candidates come with the pass, by one read."""

    def __init__(self, model: View, temperature: float):
        super().__init__(model)
        self.temperature = temperature

    def choose(self, logits: Tensor, k: int) -> Candidates:
        scores = self.model.scores
        return Candidates(*scores.top(k, self.temperature, self.vocab_size))


def observed(view: View, rule: Rule) -> Model:
    """Return the view, which shows the rule what it asks for by the reading of each pass."""
    if not view.is_fast:
        return ObservedModel(view, rule)
    if k := rule.target_top_k:
        view.observers.append(lambda ids, scores: rule.observe_target(ids, scores.best(k)))
    return ToldPrompt(view, rule)


class ToldPrompt(ObservedModel):
    """A view that only tells a rule the prompt."""

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        self.rule.start(tokens)
        return self.model.prefill(tokens, cache)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.model.forward(tokens, positions, cache, mask)


def hidden(view: View, drafter: HiddenDrafter) -> Model:
    """Return the view, which shows the drafter the last hidden states of each pass."""
    if view.is_fast:
        view.observers.append(lambda _, scores: drafter.observe_hidden(scores.hidden))
    else:
        view.model = HiddenModel(view.model, drafter)
    return view


class LimitedRule(RuleWrapper):
    """A rule whose trees end where the target's cache would drop tokens, or strict sight ends."""

    def __init__(self, rule: Rule, target: View):
        super().__init__(rule)
        self.target = target

    def begin_tree(self, root: int, max_depth: int) -> int:
        most = getattr(self.target.cache, "most", max_depth + 1)
        return super().begin_tree(root, min(max_depth, most - 1))


class Timed(Drafter):
    """A drafter whose levels are timed, of which it is known whether the draft overflowed."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.start, self.commit = drafter.start, drafter.commit
        self.ms, self.overflowed = 0.0, False

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        began = time.perf_counter()
        found = self.drafter.draft(tokens, parents, k)
        if parents is None:
            self.overflowed = not (found.logprobs > -numpy.inf).any()
        self.ms += (time.perf_counter() - began) * 1e3
        return found


class Recorded:
    """An Acceptance that keeps the bonus token and the target's best id after each row."""

    def __init__(self, accept: Acceptance, target: View):
        self.accept, self.target = accept, target
        self.bonus, self.predictions = -1, []

    def __call__(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        path, tokens = self.accept(tree, logits)
        self.bonus = tokens[-1]
        best = self.target.scores.argmax if self.target.is_fast else logits.argmax(-1).tolist
        self.predictions = best()
        return path, tokens


class Reading:
    """Stands in for logits where the host has read what an acceptance asks of them."""

    def __init__(self, view: View):
        self.view = view

    def finite(self, logits: Tensor) -> list[bool]:
        is_finite = self.view.scores.finite().tolist()
        return is_finite if is_finite[0] else finite_rows(logits)  # which raises

    def accept_greedy(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        """verify.accept_greedy without a read of its own."""
        best, is_finite = self.view.scores.argmax(), self.finite(logits)
        path = [0]
        for row in range(1, len(tree)):
            last = path[-1]
            if tree.parents[row] == last and tree.tokens[row] == best[last] and is_finite[row]:
                path.append(row)
        return path, [best[row] for row in path]

    def accept(self, *args: object) -> Accept:
        found = Accept(*args)
        found.finite_rows = self.finite
        return found


def generate(
    target: Model,
    draft: Model | Drafter | None,
    prompt: list[int],
    way: Way,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    inspect: Callable[[Tensor], None] | None = None,
    watcher: object | None = None,
) -> Iterator[Step]:
    """As dynatree.generate, by a way: strict trees are no deeper than 15. inspect: shown, after
    each step, the target's float32 logits [n, V] that its n tokens were chosen from. watcher: may
    wrap the parts of the run (cli.trace.Trace.attach). Raises also OutOfMemory.
    """
    if not isinstance(way, Way):
        raise ValueError(f"{way!r} is no Way; read_way of engine/way.py makes one of words")
    prompt = dynatree.require_text(target.config.vocab_size, prompt, max_new_tokens)
    rule, eos_ids = way.rule(), tuple(eos_ids)
    n_tokens = len(prompt) + max_new_tokens
    if (inspect or not way.is_plain) and not is_fast(target):
        raise ValueError("a plain model has no strict passes, window, rebuilt commit or inspection")
    ranking = Ranking(rule.target_top_k)
    use = Use(rule.max_verified, rule.min_rows, ranking=ranking, window=way.window)
    use = use._replace(is_strict=way.strict, is_rebuilt=way.commit == "rebuild")
    view = View(target, use, n_tokens, rule.max_verified, is_draft=False)
    view.keeps_logits = inspect is not None and use.is_rebuilt
    views = [view]
    if rule.max_depth and draft is not None and not isinstance(draft, Drafter):
        n_rows, n_ids = min(rule.max_rows, MAX_ROWS), target.config.vocab_size
        use = Use(n_rows, rule.min_rows, rule.max_rows, n_ids, proposed(rule, way.sampling))
        use = use._replace(window=way.window)
        draft = View(draft, use, n_tokens, rule.max_rows, is_draft=True)
        views.append(draft)
    kit = Kit(observed=observed, hidden=hidden)
    reading = Reading(view)
    if is_fast(target):
        kit = kit._replace(accept=reading.accept, accept_greedy=reading.accept_greedy)
    if views[-1].is_draft and views[-1].is_fast:
        kit = kit._replace(drafter=FastDrafter)
    sampling = FastSampling.of(way.sampling)
    trace = watcher.wrap if watcher else None
    parts = compose(view, draft, way.settings, sampling, way.acceptance, kit, trace)
    if watcher and isinstance(parts.accept, Accept):
        parts.accept.sampler.on_trial = watcher.add_trial
    drafter = Timed(parts.drafter) if parts.drafter else None
    accept = Recorded(parts.accept, view)
    limited = LimitedRule(parts.rule, view)
    steps = dynatree.generate(
        parts.target, drafter, prompt, limited, max_new_tokens, eos_ids=eos_ids, accept=accept
    )
    fast = [view for view in views if view.is_fast]
    if fast:  # together, before the first is made: memory is taken lazily
        require_caches([(view.model.pool, view.capacity, view.use) for view in fast])
    is_failed = True
    try:
        with closing(steps):
            n_left = max_new_tokens
            is_first = True
            began = time.perf_counter()
            for step in steps:
                ms = (time.perf_counter() - began) * 1e3
                if inspect:
                    inspect(view.scores.logits[step.path[: len(step.tokens)] or [0]])
                yield timed_step(step, is_first, views, drafter, accept, ms)
                n_left -= len(step.tokens)
                if way.graphs and is_first and n_left and step.tokens[-1] not in eos_ids:
                    for each in fast:  # the passes to come are known now
                        shortest = min(len(prompt) + 1, way.window.size + way.window.sinks)
                        each.model.capture(each.cache, shortest)
                is_first = False
                for part in (*views, *([drafter] if drafter else ())):
                    part.ms = 0.0
                for each in views:
                    each.rows = []
                began = time.perf_counter()
        is_failed = False
    except GeneratorExit:
        is_failed = False
        raise
    finally:
        for each in fast:
            each.close(is_failed)


def timed_step(
    step: dynatree.Step,
    is_first: bool,
    views: list[View],
    drafter: Timed | None,
    accept: Recorded,
    ms: float,
) -> Step:
    """A step with what the wrappers of its parts have seen."""
    cached = views[0].cache.length, views[1].cache.length if len(views) > 1 else 0
    verify_ms, draft_ms = views[0].ms, drafter.ms if drafter else 0.0
    times = draft_ms, verify_ms, ms - draft_ms - verify_ms
    if is_first:
        return Step(step.tokens, None, [], -1, [], [], cached, False, *times)
    rows = views[1].rows if len(views) > 1 else []
    overflowed = bool(drafter and rows and drafter.overflowed)
    seen = accept.bonus, accept.predictions, rows, cached, overflowed
    return Step(step.tokens, step.tree, step.path, *seen, *times)


def proposed(rule: Rule, sampling: Sampling) -> Ranking:
    """What the drafter will ask of the draft's rows: the likeliest, or their logits to draw
    from."""
    if rule.draws_candidates and sampling.draws_candidates:
        return Ranking(is_read=False)
    return Ranking(rule.max_branches, are_logprobs=True, temperature=sampling.top_k_temperature)
