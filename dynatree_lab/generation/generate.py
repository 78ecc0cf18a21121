"""dynatree.generate with all methods and features of the engine: graphs, windows, strict passes.

This file wraps the arguments of dynatree.generate, whose loop does not change. Each model makes a
cache for one GenerationConfig. A tree ends where the window drops tokens or where strict attention
ends. Each step has times, cache lengths and predictions as well.

    for step in generate(target, draft, prompt, GenerationConfig(DynaTree(), strict=True), 64):
        print(step.tokens)
"""

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from torch import Tensor

import dynatree
from draft_tree import Rule, number
from dynatree import Drafter
from dynatree_lab.engine.invariance import strict_rows
from dynatree_lab.engine.masks import PLAIN
from dynatree_lab.engine.model import is_fast
from dynatree_lab.engine.passes import SMALL_PASS, PassConfig
from dynatree_lab.engine.scores import Ranking
from dynatree_lab.engine.strict import STRICT
from dynatree_lab.generation.compose import compose, draft_ranking
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.kept import KeptCache
from dynatree_lab.generation.process import Process
from dynatree_lab.generation.replayed import at_recorded_temperature, require_replayable
from dynatree_lab.generation.run import FastRun, ModelRun, Runs
from dynatree_lab.generation.step import Choice, Step, TimedDrafter, step_of
from dynatree_lab.methods.method import Method
from dynatree_lab.methods.rules import RuleWrapper
from dynatree_lab.replay.draft import RecordedDraft
from dynatree_lab.replay.models import RecordedTarget
from gpt_neox import Model
from verify import Acceptance


class LimitedRule(RuleWrapper):
    """A rule whose trees end where the target's cache drops tokens or strict attention ends."""

    def __init__(self, rule: Rule, target: ModelRun):
        super().__init__(rule)
        self.target = target

    def begin_tree(self, root_token: int, max_depth: int) -> int:
        return super().begin_tree(root_token, min(max_depth, self.target.max_commit - 1))


def generate(
    target: Model,
    draft: Model | None,
    prompt: Sequence[int],
    config: GenerationConfig,
    max_new_tokens: int,
    *,
    eos_ids: Iterable[int] = (),
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
        draft: None for a method that needs none, and with a drafter.
        rule: a new one, in place of that of config.settings.
        drafter: in place of the draft and of the method's drafter.
        accept: in place of the method's acceptance and of config.sampling, which is then greedy.
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
    require_valid(draft, config, drafter=drafter, accept=accept, logprobs=logprobs)
    text = checked_text(target, prompt, max_new_tokens, eos_ids)
    method = config.method if rule is None else method_of(rule, config)
    if isinstance(target, RecordedTarget):
        readers = {"accept": accept, "process": process, "inspect": inspect, "logprobs": logprobs}
        require_replayable(config, method, draft, readers)
        target.find(text.ids, text.max_new_tokens)  # raises ReplayError if the text is too short
        config = at_recorded_temperature(config, method, target, text.ids)
    draft = draft.suited(method) if isinstance(draft, RecordedDraft) else draft
    runs = make_runs(target, draft, drafter, method, config, text)
    if accept is None and config.sampling.is_greedy and method.make_accept:
        accept = method.make_accept()
    options = config.sampling, config.acceptance, is_recorded
    parts = compose(runs.target, drafter or runs.draft, method, *options)
    limited_rule = LimitedRule(parts.rule, runs.target)
    observers = process, inspect, logprobs
    choice = Choice(runs.target, text.ids[:-1], parts.accept, accept, *observers)
    timed_drafter = TimedDrafter(parts.drafter or Drafter(), choice.clock)
    runs.keep(kept, choice.committed, config.strict)

    arguments = runs.target, timed_drafter, text.ids, limited_rule, text.max_new_tokens
    steps = dynatree.generate(*arguments, eos_ids=text.end_ids, accept=choice)
    with runs, closing(steps):
        began = time.perf_counter()
        limited_rule.start(text.ids)
        for i, step in enumerate(steps):
            ms = (time.perf_counter() - began) * 1e3
            # Read here, because a caller may change the Step
            is_last = len(step.tokens) == text.max_new_tokens or step.tokens[-1] in text.end_ids
            yield step_of(step, ms, choice, timed_drafter, runs.draft, parts.recorded)
            if config.graphs and i == 0 and not is_last:
                # After the prefill, whose passes are not captured
                runs.capture(min(len(text.ids) + 1, config.window.size + config.window.sinks))
            began = time.perf_counter()


class Text(NamedTuple):
    """The checked arguments of a text."""

    ids: list[int]  # of the prompt
    end_ids: set[int]
    max_new_tokens: int

    @property
    def n_tokens(self) -> int:
        return len(self.ids) + self.max_new_tokens


def checked_text(
    target: Model, prompt: Sequence[int], max_new_tokens: int, eos_ids: Iterable[int]
) -> Text:
    """Return the arguments of a text. Raises ValueError for invalid ones."""
    ids, end_ids = checked_ids("prompt", prompt), set(checked_ids("eos_ids", eos_ids))
    if not ids or not 0 <= min(ids) <= max(ids) < target.config.vocab_size:
        last = target.config.vocab_size - 1
        raise ValueError(f"prompt must have at least one id, and all from 0 to {last}")
    max_new_tokens = number("max_new_tokens", max_new_tokens, int)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
    return Text(ids, end_ids, max_new_tokens)


def checked_ids(name: str, ids: Iterable[int]) -> list[int]:
    """Return ids as a list. Raises ValueError, with the argument's name, if they are no ids."""
    try:
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"{name} is {ids!r:.80}, it must be a sequence of token ids") from error


def require_valid(
    draft: Model | None,
    config: GenerationConfig,
    *,
    drafter: Drafter | None,
    accept: Acceptance | None,
    logprobs: int | None,
) -> None:
    """Raise ValueError for arguments of `generate` that are invalid or contradict each other."""
    if not isinstance(config, GenerationConfig):
        why = "it must be a GenerationConfig; use GenerationConfig.parse to make one from words"
        raise ValueError(f"config is {config!r:.80}, {why}")
    if drafter and draft:
        raise ValueError("drafter replaces the draft, which is then None")
    if accept and not config.sampling.is_greedy:
        raise ValueError("accept replaces sampling, so config.sampling must be greedy")
    if logprobs is not None and number("logprobs", logprobs, int) < 0:
        raise ValueError(f"logprobs is {logprobs}, it must be at least 0")


def method_of(rule: Rule, config: GenerationConfig) -> Method:
    """Return the method of a config with the caller's rule. Raises ValueError for a rule that has
    served another text or that config does not support."""
    method = config.method_with(rule)
    if rule.is_used:
        raise ValueError(f"this {type(rule).__name__} has served another text; make a new rule")
    rule.is_used = True
    return method


def make_runs(
    target: Model,
    draft: Model | None,
    drafter: Drafter | None,
    method: Method,
    config: GenerationConfig,
    text: Text,
) -> Runs:
    """Return the runs of a text. Raises ValueError if the method needs a draft and has none."""
    target_run = run_target(target, method, config, text)
    if drafter or not method.needs_draft:
        return Runs(target_run, None)
    if draft is None:
        raise ValueError("this method drafts, so it needs a draft or a drafter")
    return Runs(target_run, run_draft(draft, method, config, text, target.config.vocab_size))


def run_target(target: Model, method: Method, config: GenerationConfig, text: Text) -> ModelRun:
    """Return the target's run for a text. Raises ValueError for options that only an
    engine model has."""
    facts = method.facts
    if is_fast(target):
        n_rows, min_rows = facts.max_verified, facts.min_rows
        pass_config = PassConfig(
            max_rows=n_rows,
            min_rows=strict_rows(target, method.n_verified) if config.strict else min_rows,
            n_scratch=max(n_rows, SMALL_PASS),  # so that methods with small trees share graphs
            ranking=Ranking(facts.target_top_k),
            masks=STRICT if config.strict else PLAIN,
            window=config.window,
            rebuilds_cache=config.commit == "rebuild",
        )
        return FastRun(target, text.n_tokens, facts.max_verified, pass_config)
    if not config.works_on_any_model:
        name = type(target).__name__
        raise ValueError(f"{name} has no strict passes, window or rebuilt commit; FastGPTNeoX has")
    return ModelRun(target, text.n_tokens + facts.max_verified)


def run_draft(
    draft: Model, method: Method, config: GenerationConfig, text: Text, n_ids: int
) -> ModelRun:
    """Return the draft's run for a text. n_ids: the target's V."""
    if not is_fast(draft):
        return ModelRun(draft, text.n_tokens + method.max_rows)
    pass_config = PassConfig(
        # A level seldom has more rows than the tree; if it has, its pass has no fixed shape
        max_rows=min(method.max_rows, max(method.facts.max_verified, SMALL_PASS)),
        min_rows=method.facts.min_rows,
        n_scratch=method.max_rows,
        n_ids=n_ids,
        ranking=draft_ranking(method, config.sampling),
        window=config.window,
        is_draft=True,
    )
    return FastRun(draft, text.n_tokens, method.max_rows, pass_config)
