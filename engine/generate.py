"""dynatree.generate with everything that the engine has: graphs, windows, strict passes, timing.

The loop is the core's. This file makes the caches as this generation needs them. It gives the
drafter and the acceptance what the host has read with each pass. It ends trees where a window drops
tokens or where strict attention ends, and it adds times, caches and predictions to each step.

    for step in generate(target, draft, prompt, GenerationConfig(DynaTree(), strict=True), 64):
        print(step.tokens)
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

import numpy
from torch import Tensor

import dynatree
from draft_tree import MAX_ROWS, Candidates, Rule, Tree
from dynatree import Drafter
from engine.cache import FastCache, OnPass, require_caches
from engine.generation_config import GenerationConfig
from engine.model import FastGPTNeoX, is_fast
from engine.passes import PassConfig
from engine.scores import Ranking
from gpt_neox import KVCache, Model
from methods.acceptances import Accept
from methods.compose import Kit, Parts, compose
from methods.observing import HiddenDrafter, HiddenModel
from methods.rules import MethodRule, RuleWrapper
from methods.sampler import Sampling, TemperedDrafter
from verify import Acceptance, finite_rows


@dataclass(frozen=True, slots=True)
class Step:
    """A step of dynatree.generate, with what the command line and the benchmark report of it."""

    tokens: list[int]
    tree: Tree | None = None  # None for the prompt's step
    path: list[int] = field(default_factory=list)
    bonus: int = -1  # the bonus token, also if EOS or the limit cut it
    predictions: list[int] = field(default_factory=list)  # [N], the target's best id of each row
    draft_rows: list[int] = field(default_factory=list)  # of each pass of the draft
    cached: tuple[int, int] = (0, 0)  # committed tokens in the target's and the draft's cache
    draft_overflowed: bool = False
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def n_drafted(self) -> int:
        return len(self.tree) - 1 if self.tree else 0


class PlannedModel:
    """A fast model that makes one cache, as one generation needs it."""

    def __init__(self, model: FastGPTNeoX, plan: PassConfig, n_tokens: int, n_scratch: int):
        """n_tokens: of the whole text. n_scratch: slots that a tree needs above them."""
        self.model, self.plan = model, plan
        self.config, self.device = model.config, model.device
        self.prefill = model.prefill
        self.capacity = min(n_tokens, plan.window.full) + n_scratch
        self.cache: FastCache | None = None
        self.on_pass: list[OnPass] = []

    def new_cache(self, capacity: int) -> FastCache:
        """Return the cache. It has room for the window only, if that is less than `capacity`."""
        self.cache = self.model.new_cache(self.capacity, self.plan)
        self.cache.on_pass.extend(self.on_pass)
        return self.cache

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: FastCache, mask: Tensor | None = None
    ) -> Tensor:
        logits = self.model.forward(tokens, positions, cache, mask)
        cache.show(tokens, cache.scores)  # after the call, which all ranks make
        return logits

    def take_passes(self) -> tuple[float, list[int]]:
        """Return FastCache.take_passes of the cache."""
        return self.cache.take_passes()

    def __enter__(self) -> "PlannedModel":
        return self

    def __exit__(self, *error: object) -> None:
        if self.cache:
            self.cache.__exit__(*error)


class TimedModel:
    """A plain model, whose passes are timed as those of a PlannedModel are."""

    def __init__(self, model: Model):
        self.model, self.config, self.device = model, model.config, model.device
        self.ms, self.rows = 0.0, []

    def new_cache(self, capacity: int) -> KVCache:
        self.cache = self.model.new_cache(capacity)
        return self.cache

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        return self.timed(self.model.prefill, tokens, cache)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.timed(self.model.forward, tokens, positions, cache, mask)

    def timed(
        self, run: Callable[..., Tensor], tokens: Sequence | Tensor, *others: object
    ) -> Tensor:
        began = time.perf_counter()
        logits = run(tokens, *others)
        self.ms += (time.perf_counter() - began) * 1e3
        self.rows.append(len(tokens))
        return logits

    def take_passes(self) -> tuple[float, list[int]]:
        """Return what passes since the last call took, in milliseconds, and the rows of each."""
        taken = self.ms, self.rows
        self.ms, self.rows = 0.0, []
        return taken


class FastDrafter(TemperedDrafter):
    """A draft model whose candidates the host reads with the pass."""

    def choose(self, logits: Tensor, k: int) -> Candidates:
        scores = self.model.cache.scores
        return Candidates(*scores.top(k, self.temperature, self.vocab_size))


class LimitedRule(RuleWrapper):
    """A rule whose trees end where the target's cache drops tokens or strict attention ends."""

    def __init__(self, rule: Rule, target: PlannedModel):
        super().__init__(rule)
        self.target = target

    def begin_tree(self, root: int, max_depth: int) -> int:
        return super().begin_tree(root, min(max_depth, self.target.cache.max_commit - 1))


class TimedDrafter(Drafter):
    """A drafter whose levels are timed. `overflowed`: no candidate of the last root was finite."""

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


class RecordedAcceptance:
    """An Acceptance that keeps what a Step reports of it."""

    def __init__(self, accept: Acceptance, target: PlannedModel | TimedModel, keeps_logits: bool):
        self.accept, self.target, self.keeps_logits = accept, target, keeps_logits
        self.bonus, self.predictions = -1, []
        self.logits: Tensor | None = None  # [n, V], that the n tokens were chosen from

    def __call__(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        path, tokens = self.accept(tree, logits)
        self.bonus = tokens[-1]
        is_planned = isinstance(self.target, PlannedModel)
        best = self.target.cache.scores.argmax if is_planned else logits.argmax(-1).tolist
        self.predictions = best()
        if self.keeps_logits:
            self.logits = logits[path]
        return path, tokens


def generate(
    target: Model,
    draft: Model | Drafter | None,
    prompt: Sequence[int],
    config: GenerationConfig,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    inspect: Callable[[Tensor], None] | None = None,
    watcher: object | None = None,
) -> Iterator[Step]:
    """Decode a text as dynatree.generate does. Strict trees are at most 15 levels deep.

    Args:
        inspect: called after each step with the target's float32 logits [n, V] that its n tokens
            were chosen from.
        watcher: wraps the rule and sees every trial (cli.trace.Trace).

    Raises OutOfMemory, and what dynatree.generate raises.
    """
    if not isinstance(config, GenerationConfig):
        what = "it must be a GenerationConfig; GenerationConfig.parse makes one of words"
        raise ValueError(f"config is {config!r:.80}, {what}")
    prompt = dynatree.require_text(target.config.vocab_size, prompt, max_new_tokens)
    n_tokens = len(prompt) + max_new_tokens
    target, draft = plan_models(target, draft, config, n_tokens)
    if isinstance(target, TimedModel) and (inspect or not config.works_on_plain_model):
        raise ValueError("a plain model has no strict passes, window, rebuilt commit or inspection")
    parts = compose_fast(target, draft, config, watcher)
    drafter = TimedDrafter(parts.drafter) if parts.drafter else None
    accept = RecordedAcceptance(parts.accept, target, inspect is not None)
    rule, eos_ids = parts.rule, tuple(eos_ids)
    if isinstance(target, PlannedModel):
        rule = LimitedRule(rule, target)
    steps = dynatree.generate(
        parts.target, drafter, prompt, rule, max_new_tokens, eos_ids=eos_ids, accept=accept
    )
    planned = [model for model in (target, draft) if isinstance(model, PlannedModel)]
    if planned:
        require_caches([(model.model, model.capacity, model.plan) for model in planned])
    with ExitStack() as stack:
        for each in (*planned, closing(steps)):
            stack.enter_context(each)
        n_left, is_first = max_new_tokens, True
        began = time.perf_counter()
        if isinstance(target, PlannedModel):
            rule.start(prompt)
        for step in steps:
            ms = (time.perf_counter() - began) * 1e3
            if inspect:
                inspect(accept.logits[: len(step.tokens)])
            yield reported(step, is_first, target, draft, drafter, accept, ms)
            n_left -= len(step.tokens)
            if config.graphs and is_first and n_left and step.tokens[-1] not in eos_ids:
                shortest = min(len(prompt) + 1, config.window.size + config.window.sinks)
                for model in planned:  # the prompt has been read, so its chunks are in no graph
                    model.cache.capture(shortest)
            is_first = False
            began = time.perf_counter()


def plan_models(
    target: Model, draft: Model | Drafter | None, config: GenerationConfig, n_tokens: int
) -> tuple[PlannedModel | TimedModel, PlannedModel | TimedModel | Drafter | None]:
    """Return both models as this generation of n_tokens uses them, the draft only if the method
    has one."""
    rule = config.make_rule()
    n_ids = target.config.vocab_size
    reads_hidden = rule.max_depth > 0 and isinstance(draft, HiddenDrafter)
    if is_fast(target):
        plan = PassConfig(
            rule.max_verified,
            rule.min_rows,
            ranking=Ranking(rule.target_top_k),
            is_strict=config.strict,
            window=config.window,
            rebuilds_cache=config.commit == "rebuild",
            shows_prompt=rule.target_top_k > 0 or reads_hidden,
        )
        target = PlannedModel(target, plan, n_tokens, rule.max_verified)
    else:
        target = TimedModel(target)
    if not rule.max_depth or draft is None:
        return target, None
    if isinstance(draft, Drafter):
        return target, draft
    if not is_fast(draft):
        return target, TimedModel(draft)
    ranking = draft_ranking(rule, config.sampling)
    max_rows = min(rule.max_rows, MAX_ROWS)
    plan = PassConfig(max_rows, rule.min_rows, rule.max_rows, n_ids, ranking, is_draft=True)
    plan = plan._replace(window=config.window)
    return target, PlannedModel(draft, plan, n_tokens, rule.max_rows)


def draft_ranking(rule: MethodRule, sampling: Sampling) -> Ranking:
    """Return what the host reads of the draft's logits: the top k, or nothing if candidates are
    drawn on the device."""
    if rule.draws_candidates and sampling.draws_candidates:
        return Ranking(is_read=False)
    return Ranking(rule.max_branches, are_logprobs=True, temperature=sampling.top_k_temperature)


def compose_fast(
    target: PlannedModel | TimedModel,
    draft: PlannedModel | TimedModel | Drafter | None,
    config: GenerationConfig,
    watcher: object | None,
) -> Parts:
    """Return the parts of the method, which read fast models' passes by what the host has read."""
    kit = Kit(hidden=hidden)
    if isinstance(target, PlannedModel):
        kit = kit._replace(observed=observed, **fast_acceptances(target))
    if isinstance(draft, PlannedModel):
        kit = kit._replace(drafter=FastDrafter)
    trace = watcher.wrap if watcher else None
    parts = compose(target, draft, config.settings, config.sampling, config.acceptance, kit, trace)
    if watcher and isinstance(parts.accept, Accept):
        parts.accept.sampler.on_trial = watcher.add_trial
    return parts


def fast_acceptances(target: PlannedModel) -> dict[str, Callable]:
    """Return accept and accept_greedy of a Kit, which use what the host has read of the pass."""

    def finite(logits: Tensor) -> list[bool]:
        is_finite = target.cache.scores.finite()
        return is_finite if is_finite[0] else finite_rows(logits)  # which raises

    def accept_greedy(tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        """As verify.accept_greedy, without a read of its own."""
        best, is_finite = target.cache.scores.argmax(), finite(logits)
        path = [0]
        for row in range(1, len(tree)):
            last = path[-1]
            if tree.parents[row] == last and tree.tokens[row] == best[last] and is_finite[row]:
                path.append(row)
        return path, [best[row] for row in path]

    return {"accept": partial(Accept, finite_rows=finite), "accept_greedy": accept_greedy}


def observed(target: PlannedModel, rule: MethodRule) -> Model:
    """Show a rule the target's best tokens in each pass, and return the target."""
    if k := rule.target_top_k:
        target.on_pass.append(lambda ids, scores: rule.observe_target(ids, scores.best(k)))
    return target


def hidden(target: PlannedModel | TimedModel, drafter: HiddenDrafter) -> Model:
    """Show a drafter the target's last hidden states in each pass, and return the target."""
    if isinstance(target, PlannedModel):
        target.on_pass.append(lambda _, scores: drafter.observe_hidden(scores.hidden))
    else:
        target.model = HiddenModel(target.model, drafter)
    return target


def reported(
    step: dynatree.Step,
    is_first: bool,
    target: PlannedModel | TimedModel,
    draft: PlannedModel | TimedModel | Drafter | None,
    drafter: TimedDrafter | None,
    accept: RecordedAcceptance,
    ms: float,
) -> Step:
    """Return a step with what the wrappers have recorded since the last one."""
    verify_ms, _ = target.take_passes()
    has_model = draft is not None and not isinstance(draft, Drafter)
    _, rows = draft.take_passes() if has_model else (0.0, [])
    cached = target.cache.length, draft.cache.length if has_model else 0
    draft_ms, overflowed = 0.0, False
    if drafter:
        draft_ms, drafter.ms = drafter.ms, 0.0
        overflowed = bool(rows) and drafter.overflowed
    tree, path, bonus, predictions = step.tree, step.path, accept.bonus, accept.predictions
    if is_first:
        tree, path, bonus, predictions, rows, overflowed = None, [], -1, [], [], False
    times = draft_ms, verify_ms, ms - draft_ms - verify_ms
    return Step(step.tokens, tree, path, bonus, predictions, rows, cached, overflowed, *times)
