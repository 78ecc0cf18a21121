"""dynatree.generate with all methods and features of the engine: graphs, windows, strict passes.

This file wraps the arguments of dynatree.generate, whose loop does not change. Each model makes a
cache for one GenerationConfig. A tree ends where the window drops tokens or where strict attention
ends. Each step has times, cache lengths and predictions as well.

    for step in generate(target, draft, prompt, GenerationConfig(DynaTree(), strict=True), 64):
        print(step.tokens)
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy
from torch import Tensor

import dynatree
from draft_tree import Candidates, Rule, Tree
from dynatree import Drafter
from dynatree_lab.engine.compose import Parts, compose, draft_ranking
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.engine.invariance import strict_rows
from dynatree_lab.engine.kept import KeptCache
from dynatree_lab.engine.masks import PLAIN
from dynatree_lab.engine.model import is_fast, require_caches
from dynatree_lab.engine.passes import SMALL_PASS, PassConfig
from dynatree_lab.engine.process import Process, processed
from dynatree_lab.engine.record import TreeRecord
from dynatree_lab.engine.run import ModelRun
from dynatree_lab.engine.scores import Ranking, Scores, TokenLogprob, token_logprobs
from dynatree_lab.engine.strict import STRICT
from dynatree_lab.methods.rules import RuleWrapper, with_attributes
from gpt_neox import Model
from verify import Acceptance, accept_best


@dataclass(frozen=True, slots=True, repr=False)
class Step(dynatree.Step):
    """A step of dynatree.generate, with more results for the command line and the benchmark."""

    bonus: int = -1  # the bonus token, even if EOS or the limit cuts it from `tokens`
    predictions: list[int] = field(default_factory=list)  # [N], the target's best id of each row
    draft_rows: list[int] = field(default_factory=list)  # rows of each pass of the draft
    cache_lengths: tuple[int, int] = (0, 0)  # committed tokens of the target, of the draft
    draft_overflowed: bool = False
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


class LimitedRule(RuleWrapper):
    """A rule whose trees end where the target's cache drops tokens or strict attention ends."""

    def __init__(self, rule: Rule, target: ModelRun):
        super().__init__(rule)
        self.target = target

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        return super().begin_tree(root_token, min(max_depth, self.target.max_commit - 1))


class Recorder(Drafter):
    """A method's drafter and acceptance, which records what a Step has more than the loop's."""

    def __init__(
        self,
        parts: Parts,
        prompt: list[int],
        target: ModelRun,
        draft: ModelRun | None,
        own_accept: Acceptance | None,
        process: Process | None,
        n_logprobs: int | None,
        keeps_logits: bool,
    ):
        self.parts, self.own_accept, self.process = parts, own_accept, process
        self.drafter = parts.drafter or Drafter()
        self.target, self.draft_run = target, draft
        self.n_logprobs, self.keeps_logits = n_logprobs, keeps_logits
        self.text = prompt[:-1]  # the committed ids, without the pending token
        self.draft_ms = self.commit_ms = 0.0
        self.of_root: Candidates | None = None  # those below the latest root

    def start(self, prompt: list[int], capacity: int, vocab_size: int) -> None:
        self.drafter.start(prompt, capacity, vocab_size)

    def draft(self, tokens: list[int], parents: list[int] | None, k: int) -> Candidates:
        began = time.perf_counter()
        found = self.drafter.draft(tokens, parents, k)
        if parents is None:
            self.of_root = found  # checked by draft_tree.grow
        self.draft_ms += (time.perf_counter() - began) * 1e3
        return found

    def commit(self, tree: Tree, path: list[int], tokens: list[int]) -> None:
        self.commit_ms = (time.perf_counter() - self.accepted) * 1e3  # of the target's cache
        self.drafter.commit(tree, path, tokens)

    def accept(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        """Accept rows by the scores of the pass, which the host has read (a verify.Acceptance)."""
        scores, own = self.target.scores, logits
        is_finite = scores.finite_rows()
        if self.process:
            logits, is_finite = processed(self.process, logits, is_finite, self.text, tree)
            scores = Scores(None, logits)
        self.predictions = scores.argmax()
        if self.own_accept:
            path, tokens = self.own_accept(tree, logits)
        elif self.parts.accept:
            path, tokens = self.parts.accept(tree, logits, is_finite)
        else:
            path, tokens = accept_best(tree, self.predictions, is_finite)
        if self.keeps_logits:  # a copy, because on CUDA a rebuilt commit overwrites them
            self.logits = own[path]
        self.bonus = tokens[-1]
        self.text += [tree.tokens[row] for row in path]
        self.accepted = time.perf_counter()
        return path, tokens

    def step(self, step: dynatree.Step, ms: float) -> Step:
        """Return the loop's step, which took `ms`, with what was recorded during it."""
        draft_ms, self.draft_ms = self.draft_ms, 0.0
        verify_ms = self.target.pop_stats()[0] + self.commit_ms
        n_cached, rows = 0, []
        if self.draft_run:
            n_cached, (_, rows) = self.draft_run.cache.length, self.draft_run.pop_stats()
        recorded, logprobs = self.parts.recorded, []
        if self.n_logprobs is not None:
            logits = self.logits[: len(step.tokens)]
            logprobs = token_logprobs(logits, step.tokens, self.n_logprobs)
        return Step(
            step.tokens,
            step.tree,
            step.path,
            self.bonus,
            self.predictions,
            rows,
            (self.target.cache.length, n_cached),
            bool(rows) and not (self.of_root.logprobs > -numpy.inf).any(),
            draft_ms,
            verify_ms,
            ms - draft_ms - verify_ms,
            logprobs,
            recorded and recorded.record,
        )


def generate(
    target: Model,
    draft: Model | None,
    prompt: Sequence[int],
    config: GenerationConfig,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    rule: Rule | None = None,
    drafter: Drafter | None = None,
    accept: Acceptance | None = None,
    process: Process | None = None,
    logprobs: int | None = None,
    inspect: Callable[[Tensor], None] | None = None,
    is_recorded: bool = False,
    kept: Sequence[KeptCache] = (),
) -> Iterator[Step]:
    """Decode a text as dynatree.generate does. Strict trees are at most 15 levels deep.

    Args:
        rule: a new one, in place of that of config.settings.
        drafter: in place of the draft, which is then None.
        accept: in place of the acceptance of config.sampling, which is then greedy.
        process: changes the target's logits before a token is chosen from them.
        logprobs: if given, each step has the log-probabilities of its tokens, and as many likeliest
            ids beside each.
        inspect: called after each step with the target's own float32 logits [n, V], from which
            the n tokens were chosen, perhaps after `process`.
        is_recorded: steps have the record of how each tree was decided.
        kept: the caches of the target and the draft after an earlier text. What the prompt has in
            common with that text is not run again. Afterwards they are those of this text.

    Raises OutOfMemory, and what dynatree.generate raises.
    """
    if not isinstance(config, GenerationConfig):
        why = "it must be a GenerationConfig; use GenerationConfig.parse to make one from words"
        raise ValueError(f"config is {config!r:.80}, {why}")
    if drafter and draft:
        raise ValueError("drafter replaces the draft, which is then None")
    if accept and not config.sampling.is_greedy:
        raise ValueError("accept replaces sampling, so config.sampling must be greedy")
    if logprobs is not None and (type(logprobs) is not int or logprobs < 0):
        raise ValueError(f"logprobs is {logprobs!r}, it must be an integer of at least 0")
    prompt = dynatree.checked_prompt(target.config.vocab_size, prompt, max_new_tokens)
    eos_ids = dynatree.checked_ids("eos_ids", eos_ids)
    rule = choose_rule(rule, config)
    n_tokens = len(prompt) + max_new_tokens
    target, draft = configure_models(target, draft, rule, config, n_tokens)
    options = config.sampling, config.acceptance, is_recorded
    parts = compose(target, drafter or draft, rule, *options)
    runs = [each for each in (target, draft) if each]
    fast = [(each.model, each.capacity, each.pass_config) for each in runs if each.pass_config]
    if fast:
        require_caches(fast)
    keeps_logits = logprobs is not None or inspect is not None
    slots = accept, process, logprobs, keeps_logits
    recorder = Recorder(parts, prompt, target, draft, *slots)
    for each, cache in zip(runs, kept, strict=False):  # a method may have no draft
        each.keep(cache, recorder.text, config.strict)
    dynatree.require_drafter(parts.drafter, rule)
    rule = LimitedRule(parts.rule, target)
    steps = dynatree.generate(
        target, recorder, prompt, rule, max_new_tokens, eos_ids=eos_ids, accept=recorder.accept
    )
    with ExitStack() as stack:
        for each in (*runs, closing(steps)):
            stack.enter_context(each)
        is_first, began = True, time.perf_counter()
        rule.start(prompt)
        for step in steps:
            ms = (time.perf_counter() - began) * 1e3
            if inspect:
                inspect(recorder.logits[: len(step.tokens)])
            # Read here, because a caller may change the Step
            goes_on = len(step.tokens) < max_new_tokens and step.tokens[-1] not in eos_ids
            yield recorder.step(step, ms)
            if config.graphs and is_first and goes_on:
                shortest = min(len(prompt) + 1, config.window.size + config.window.sinks)
                for each in runs:  # after the prefill, whose passes are not captured
                    each.capture(shortest)
            is_first, began = False, time.perf_counter()


def choose_rule(rule: Rule | None, config: GenerationConfig) -> Rule:
    """Return the caller's rule, or a new one of config.settings. Raises ValueError for a rule that
    has served another text or that config does not support."""
    if rule is None:
        return config.make_rule()
    dynatree.require_new(rule)
    config.require_supported(with_attributes(rule))
    rule.is_used = True
    return rule


def configure_models(
    target: Model, draft: Model | None, rule: Rule, config: GenerationConfig, n_tokens: int
) -> tuple[ModelRun, ModelRun | None]:
    """Return both models, wrapped for one generation of n_tokens. The draft is None if the method
    does not use it. Raises ValueError for options that only an engine model has."""
    n_ids, target_config, draft_config = target.config.vocab_size, None, None
    if is_fast(target):
        n_rows, min_rows = rule.max_verified, rule.min_rows
        target_config = PassConfig(
            n_rows,
            strict_rows(target, max(n_rows, min_rows)) if config.strict else min_rows,
            max(n_rows, SMALL_PASS),  # so that methods with small trees share graphs
            ranking=Ranking(rule.target_top_k),
            masks=STRICT if config.strict else PLAIN,
            window=config.window,
            rebuilds_cache=config.commit == "rebuild",
        )
    elif not config.works_on_reference_model:
        name = type(target).__name__
        raise ValueError(f"{name} has no strict passes, window or rebuilt commit; FastGPTNeoX has")
    target = ModelRun(target, n_tokens, rule.max_verified, target_config)
    if not rule.max_depth or draft is None:
        return target, None
    if is_fast(draft):
        ranking = draft_ranking(rule, config.sampling)
        # A level seldom has more rows than the tree; if it has, its pass has no fixed shape
        n_rows = min(rule.max_rows, max(rule.max_verified, SMALL_PASS))
        shape = n_rows, rule.min_rows, rule.max_rows, n_ids
        draft_config = PassConfig(*shape, ranking, window=config.window, is_draft=True)
    return target, ModelRun(draft, n_tokens, rule.max_rows, draft_config)
