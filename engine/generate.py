"""dynatree.generate with all features of the engine: graphs, windows, strict passes, timing.

This file wraps the arguments of dynatree.generate, whose loop does not change. The wrappers make
caches for one GenerationConfig. They give the drafter and the acceptance the results that the host
has read with each pass. They end a tree where the window drops tokens or where strict attention
ends, and they add times, cache lengths and predictions to each step.

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
from draft_tree import Candidates, Rule, Tree
from dynatree import Drafter
from engine.cache import FastCache, OnPass, require_caches
from engine.generation_config import GenerationConfig
from engine.masks import PLAIN
from engine.model import FastGPTNeoX, is_fast
from engine.passes import SMALL_PASS, PassConfig
from engine.scores import Ranking
from engine.strict import STRICT
from gpt_neox import KVCache, Model
from methods.acceptances import Accept
from methods.compose import Kit, Parts, compose
from methods.eagle import head_of
from methods.observing import HiddenDrafter, HiddenModel
from methods.rules import MethodRule, RuleWrapper
from methods.sampler import Sampling, TemperedDrafter
from verify import Acceptance, finite_rows


@dataclass(frozen=True, slots=True)
class Step:
    """A step of dynatree.generate, with more results for the command line and the benchmark."""

    tokens: list[int]
    tree: Tree | None = None  # None for the prompt's step
    path: list[int] = field(default_factory=list)
    bonus: int = -1  # the bonus token, even if EOS or the limit cuts it from `tokens`
    predictions: list[int] = field(default_factory=list)  # [N], the target's best id of each row
    draft_rows: list[int] = field(default_factory=list)  # rows of each pass of the draft
    cache_lengths: tuple[int, int] = (0, 0)  # committed tokens of the target, of the draft
    draft_overflowed: bool = False
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def n_drafted(self) -> int:
        return len(self.tree) - 1 if self.tree else 0


class ConfiguredModel:
    """A fast model for one generation. It makes one cache, with the generation's PassConfig."""

    def __init__(self, model: FastGPTNeoX, pass_config: PassConfig, n_tokens: int, n_scratch: int):
        """Choose the cache's capacity for n_tokens of prompt and new text, and n_scratch rows of a
        tree."""
        self.model, self.pass_config = model, pass_config
        self.config, self.device = model.config, model.device
        self.prefill = model.prefill
        self.capacity = min(n_tokens, pass_config.window.max_length) + n_scratch
        self.cache: FastCache | None = None
        self.on_pass: list[OnPass] = []

    def new_cache(self, capacity: int) -> FastCache:
        """Return the cache. Its own capacity replaces the argument, which ignores the window."""
        self.cache = self.model.new_cache(self.capacity, self.pass_config)
        self.cache.on_pass.extend(self.on_pass)
        return self.cache

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: FastCache, mask: Tensor | None = None
    ) -> Tensor:
        logits = self.model.forward(tokens, positions, cache, mask)
        cache.report_pass(tokens, cache.scores)
        return logits

    def pop_pass_stats(self) -> tuple[float, list[int]]:
        """Return FastCache.pop_pass_stats of the cache."""
        return self.cache.pop_pass_stats()

    def __enter__(self) -> "ConfiguredModel":
        return self

    def __exit__(self, *error: object) -> None:
        if self.cache:
            self.cache.__exit__(*error)


class TimedModel:
    """A reference model with a timer of its passes, like that of a ConfiguredModel."""

    def __init__(self, model: Model):
        self.model, self.config, self.device = model, model.config, model.device
        self.ms, self.rows = 0.0, []

    def new_cache(self, capacity: int) -> KVCache:
        self.cache = self.model.new_cache(capacity)
        return self.cache

    def prefill(self, tokens: list[int], cache: KVCache) -> Tensor:
        return self.run_timed(self.model.prefill, tokens, cache)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.run_timed(self.model.forward, tokens, positions, cache, mask)

    def run_timed(
        self, run: Callable[..., Tensor], tokens: Sequence | Tensor, *others: object
    ) -> Tensor:
        began = time.perf_counter()
        logits = run(tokens, *others)
        self.ms += (time.perf_counter() - began) * 1e3
        self.rows.append(len(tokens))
        return logits

    def pop_pass_stats(self) -> tuple[float, list[int]]:
        """Return the milliseconds of passes since the last call, and the row count of each."""
        stats = self.ms, self.rows
        self.ms, self.rows = 0.0, []
        return stats


class FastDrafter(TemperedDrafter):
    """A draft model whose passes rank the candidates, so that the host reads only those."""

    def choose(self, logits: Tensor, k: int) -> Candidates:
        scores = self.model.cache.scores
        return Candidates(*scores.top_candidates(k, self.temperature, self.vocab_size))


class LimitedRule(RuleWrapper):
    """A rule whose trees end where the target's cache drops tokens or strict attention ends."""

    def __init__(self, rule: Rule, target: ConfiguredModel):
        super().__init__(rule)
        self.target = target

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        return super().begin_tree(root_token, min(max_depth, self.target.cache.max_commit - 1))


class TimedDrafter(Drafter):
    """A drafter with a timer. `overflowed`: whether no candidate of the last root was finite."""

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
    """An Acceptance that keeps the bonus token, the predictions and, if asked, the logits."""

    def __init__(
        self, accept: Acceptance, target: ConfiguredModel | TimedModel, keeps_logits: bool
    ):
        self.accept, self.target, self.keeps_logits = accept, target, keeps_logits
        self.bonus, self.predictions = -1, []
        self.logits: Tensor | None = None  # [n, V], from which the n tokens were chosen

    def __call__(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        path, tokens = self.accept(tree, logits)
        self.bonus = tokens[-1]
        if isinstance(self.target, ConfiguredModel):
            self.predictions = self.target.cache.scores.argmax()
        else:
            self.predictions = logits.argmax(-1).tolist()
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
    observer: object | None = None,
) -> Iterator[Step]:
    """Decode a text as dynatree.generate does. Strict trees are at most 15 levels deep.

    Args:
        inspect: called after each step with the target's float32 logits [n, V], from which the n
            tokens were chosen.
        observer: wraps the rule and gets every trial (cli.trace.Trace).

    Raises OutOfMemory, and what dynatree.generate raises.
    """
    if not isinstance(config, GenerationConfig):
        why = "it must be a GenerationConfig; use GenerationConfig.parse to make one from words"
        raise ValueError(f"config is {config!r:.80}, {why}")
    prompt = dynatree.checked_prompt(target.config.vocab_size, prompt, max_new_tokens)
    eos_ids = dynatree.checked_ids("eos_ids", eos_ids)
    n_tokens = len(prompt) + max_new_tokens
    target, draft = configure_models(target, draft, config, n_tokens)
    if isinstance(target, TimedModel) and (inspect or not config.works_on_reference_model):
        what = "strict passes, window, rebuilt commit or inspection"
        raise ValueError(f"a GPTNeoX has no {what}")
    parts = compose_fast(target, draft, config, observer)
    drafter = TimedDrafter(parts.drafter) if parts.drafter else None
    accept = RecordedAcceptance(parts.accept, target, inspect is not None)
    rule = parts.rule
    if isinstance(target, ConfiguredModel):
        rule = LimitedRule(rule, target)
    steps = dynatree.generate(
        parts.target, drafter, prompt, rule, max_new_tokens, eos_ids=eos_ids, accept=accept
    )
    configured = [model for model in (target, draft) if isinstance(model, ConfiguredModel)]
    if configured:
        require_caches([(each.model, each.capacity, each.pass_config) for each in configured])
    with ExitStack() as stack:
        for each in (*configured, closing(steps)):
            stack.enter_context(each)
        is_first = True
        began = time.perf_counter()
        if isinstance(target, ConfiguredModel):
            rule.start(prompt)
        for step in steps:
            ms = (time.perf_counter() - began) * 1e3
            if inspect:
                inspect(accept.logits[: len(step.tokens)])
            # Read here, because a caller may change the Step
            goes_on = len(step.tokens) < max_new_tokens and step.tokens[-1] not in eos_ids
            yield make_step(step, is_first, target, draft, drafter, accept, ms)
            if config.graphs and is_first and goes_on:
                shortest = min(len(prompt) + 1, config.window.size + config.window.sinks)
                for model in configured:  # after the prefill, whose passes are not captured
                    model.cache.capture(shortest)
            is_first = False
            began = time.perf_counter()


def configure_models(
    target: Model, draft: Model | Drafter | None, config: GenerationConfig, n_tokens: int
) -> tuple[ConfiguredModel | TimedModel, ConfiguredModel | TimedModel | Drafter | None]:
    """Return both models, wrapped for one generation of n_tokens. The draft is None if the method
    does not use it."""
    rule = config.make_rule()
    n_ids = target.config.vocab_size
    reads_hidden = rule.max_depth > 0 and bool(isinstance(draft, HiddenDrafter) or head_of(draft))
    if is_fast(target):
        pass_config = PassConfig(
            rule.max_verified,
            rule.min_rows,
            max(rule.max_verified, SMALL_PASS),  # so that methods with small trees share graphs
            ranking=Ranking(rule.target_top_k),
            masks=STRICT if config.strict else PLAIN,
            window=config.window,
            rebuilds_cache=config.commit == "rebuild",
            reports_prompt=rule.target_top_k > 0 or reads_hidden,
        )
        target = ConfiguredModel(target, pass_config, n_tokens, rule.max_verified)
    else:
        target = TimedModel(target)
    if not rule.max_depth or draft is None:
        return target, None
    if isinstance(draft, Drafter):
        return target, draft
    if not is_fast(draft):
        return target, TimedModel(draft)
    ranking = draft_ranking(rule, config.sampling)
    # A level seldom has more rows than the tree; if it has, its pass has no fixed shape
    max_rows = min(rule.max_rows, max(rule.max_verified, SMALL_PASS))
    pass_config = PassConfig(max_rows, rule.min_rows, rule.max_rows, n_ids, ranking, is_draft=True)
    pass_config = pass_config._replace(window=config.window)
    return target, ConfiguredModel(draft, pass_config, n_tokens, rule.max_rows)


def draft_ranking(rule: MethodRule, sampling: Sampling) -> Ranking:
    """Return the Ranking of the draft's logits: the top k, or none if the device draws the
    candidates."""
    if rule.draws_candidates and sampling.draws_candidates:
        return Ranking(is_read=False)
    return Ranking(rule.max_branches, are_logprobs=True, temperature=sampling.top_k_temperature)


def compose_fast(
    target: ConfiguredModel | TimedModel,
    draft: ConfiguredModel | TimedModel | Drafter | None,
    config: GenerationConfig,
    observer: object | None,
) -> Parts:
    """Return the parts of the method. They use the rankings that fast models compute in a pass."""
    kit = Kit(hidden=observe_hidden)
    if isinstance(target, ConfiguredModel):
        kit = kit._replace(observed=observe_tokens, **make_fast_acceptances(target))
    if isinstance(draft, ConfiguredModel):
        kit = kit._replace(drafter=FastDrafter)
    trace = observer.wrap if observer else None
    parts = compose(target, draft, config.settings, config.sampling, config.acceptance, kit, trace)
    if observer and isinstance(parts.accept, Accept):
        parts.accept.sampler.on_trial = observer.add_trial
    return parts


def make_fast_acceptances(target: ConfiguredModel) -> dict[str, Callable]:
    """Return accept and accept_greedy of a Kit, which use the scores that the host has read."""

    def fast_finite_rows(logits: Tensor) -> list[bool]:
        is_finite = target.cache.scores.finite_rows()
        return is_finite if is_finite[0] else finite_rows(logits)  # this call raises

    def accept_greedy(tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        """Do what verify.accept_greedy does, without reading the logits."""
        best, is_finite = target.cache.scores.argmax(), fast_finite_rows(logits)
        path = [0]
        for row in range(1, len(tree)):
            last = path[-1]
            if tree.parents[row] == last and tree.tokens[row] == best[last] and is_finite[row]:
                path.append(row)
        return path, [best[row] for row in path]

    accept = partial(Accept, finite_rows=fast_finite_rows)
    return {"accept": accept, "accept_greedy": accept_greedy}


def observe_tokens(target: ConfiguredModel, rule: MethodRule) -> Model:
    """Pass the target's top ids of each pass to a rule. Return the target."""
    if k := rule.target_top_k:
        target.on_pass.append(lambda ids, scores: rule.observe_target(ids, scores.top_ids(k)))
    return target


def observe_hidden(target: ConfiguredModel | TimedModel, drafter: HiddenDrafter) -> Model:
    """Pass the target's last hidden states of each pass to a drafter. Return the target."""
    if isinstance(target, ConfiguredModel):
        target.on_pass.append(lambda _, scores: drafter.observe_hidden(scores.hidden))
    else:
        target.model = HiddenModel(target.model, drafter)
    return target


def make_step(
    step: dynatree.Step,
    is_first: bool,
    target: ConfiguredModel | TimedModel,
    draft: ConfiguredModel | TimedModel | Drafter | None,
    drafter: TimedDrafter | None,
    accept: RecordedAcceptance,
    ms: float,
) -> Step:
    """Return an engine Step: the loop's step, and what the wrappers have recorded during it."""
    verify_ms, _ = target.pop_pass_stats()
    has_model = draft is not None and not isinstance(draft, Drafter)
    _, rows = draft.pop_pass_stats() if has_model else (0.0, [])
    lengths = target.cache.length, draft.cache.length if has_model else 0
    draft_ms, overflowed = 0.0, False
    if drafter:
        draft_ms, drafter.ms = drafter.ms, 0.0
        overflowed = bool(rows) and drafter.overflowed
    tree, path, bonus, predictions = step.tree, step.path, accept.bonus, accept.predictions
    if is_first:
        tree, path, bonus, predictions, rows, overflowed = None, [], -1, [], [], False
    times = draft_ms, verify_ms, ms - draft_ms - verify_ms
    return Step(step.tokens, tree, path, bonus, predictions, rows, lengths, overflowed, *times)
