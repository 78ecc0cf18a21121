"""A request to continue a prompt.

request = Request(load_pair(), prompt, GenerationConfig(settings), max_new_tokens=20)
print(token_ids(request.decode()))
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypedDict

from torch import Tensor

from draft_tree import Rule, number
from dynatree import Drafter
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.generation.config import SAMPLING, GenerationConfig
from dynatree_lab.generation.generate import checked_ids, generate
from dynatree_lab.generation.kept import KeptCache
from dynatree_lab.generation.process import Process
from dynatree_lab.generation.replayed import at_recorded_temperature
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.acceptances import default_acceptance
from dynatree_lab.methods.method import Method
from dynatree_lab.pair import Pair, length_warning
from dynatree_lab.tokens import encode_prompt, known_ids
from verify import Acceptance


class TextOptions(TypedDict, total=False):
    """The keyword arguments of a text. generate.py explains those from rule to inspect."""

    eos_ids: Iterable[int] | None  # None for the target's
    stop: str | Iterable[str]  # a text, or several, before which generation stops
    logprobs: int | None  # log-probabilities of the ids, and as many likeliest ids beside each
    rule: Rule
    drafter: Drafter
    accept: Acceptance
    process: Process
    inspect: Callable[[Tensor], None]
    # The fields of Sampling, which the words of a config may have instead. None: the default
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    draft_temperature: float | None


OBJECTS = ("rule", "drafter", "accept", "process", "inspect")  # those of the caller


@dataclass(frozen=True)
class Request:
    """One generation: its prompt, its config, and where it ends."""

    pair: Pair
    prompt: list[int]  # ids
    config: GenerationConfig
    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    stop: Sequence[str] = ()  # generation stops before any of these texts
    logprobs: int | None = None  # as in generation/generate.py
    kept: Sequence[KeptCache] = ()  # of a session
    is_recorded: bool = False  # for a trace
    objects: dict[str, object] = field(default_factory=dict)  # by their names in OBJECTS

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of stop texts that are special tokens, because decoded text omits them."""
        added = self.pair.tokenizer.get_added_tokens_decoder() if self.stop else {}
        return tuple(i for i, each in added.items() if each.special and each.content in self.stop)

    @cached_property
    def method(self) -> Method:
        """The config's method, with the caller's rule if there is one."""
        rule = self.objects.get("rule")
        return self.config.method_with(rule) if rule else self.config.method

    @property
    def is_drawn(self) -> bool:
        """Whether the candidates are drawn from the draft model."""
        may_draw = "drafter" not in self.objects and self.method.can_draw
        return may_draw and self.config.sampling.draws_candidates

    @property
    def draft_temperature(self) -> float | None:
        """The temperature of the draft's probabilities; None if it does not change the trees."""
        given = self.config, self.method, self.pair.target, self.prompt
        sampling = at_recorded_temperature(*given).sampling
        if "drafter" in self.objects or not self.method.has_temperature(sampling.draws_candidates):
            return None
        return self.method.draft_temperature(sampling)

    @property
    def acceptance(self) -> str | None:
        """How the path is chosen: own (the caller's or the method's), token, traversal, or walk for
        sampled text without drawn candidates; None for greedy text."""
        facts, is_greedy = self.method.facts, self.config.sampling.is_greedy
        own = self.method.make_accept if is_greedy else facts.acceptance
        if own or "accept" in self.objects:
            return "own"
        if is_greedy:
            return None
        return self.config.acceptance or default_acceptance(facts) if self.is_drawn else "walk"

    def decode(self) -> Iterator[Step]:
        """Return the steps."""
        return generate(
            self.pair.target,
            None if "drafter" in self.objects else self.pair.draft,
            self.prompt,
            self.config,
            max_new_tokens=self.max_new_tokens,
            eos_ids=(*self.eos_ids, *self.stop_ids),
            logprobs=self.logprobs,
            is_recorded=self.is_recorded,
            kept=self.kept,
            **self.objects,
        )


def make_request(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str,
    max_new_tokens: int,
    options: TextOptions,
    *,
    before: Sequence[int] = (),
    kept: Sequence[KeptCache] = (),
    is_recorded: bool = False,
) -> Request:
    """Return the request of stream_text's arguments (result.py). before: ids before the prompt.
    Warns of a sequence that is longer than the target was trained for. Raises ValueError."""
    for name in options.keys() - TextOptions.__annotations__.keys():
        known = f"the keywords are max_new_tokens, {', '.join(TextOptions.__annotations__)}"
        how = 'settings go into the words, such as "dynatree tau=0.01 strict"'
        raise ValueError(f"{name} is no argument; {known}; {how}")
    if options.get("logprobs") is not None and not is_recorded:
        raise ValueError("logprobs has no effect on a stream; use write_text")
    sampling = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    objects = {name: options[name] for name in OBJECTS if options.get(name) is not None}
    for name, value, kind in (("pair", pair, Pair), ("prompt", prompt, str)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r:.80}, it must be a {kind.__name__}")
    if isinstance(config, str):
        config = GenerationConfig.parse(*config.split(), **sampling)
    elif isinstance(config, GenerationConfig):
        config = config.with_sampling(**sampling)
    else:
        raise ValueError(f"config is {config!r:.80}, it must be words or a GenerationConfig")
    if pair.tokenizer is None:
        raise ValueError("the pair has no draft and so no tokenizer: use lab.generate with ids")
    config.require_fit([each.config for each in pair.models])
    own = objects.get("rule")
    needs_draft = (config.method_with(own) if own else config.method).needs_draft
    if needs_draft and "drafter" not in objects and pair.draft is None:
        raise ValueError("the pair has no draft: load one, or use ar, lookup or recycle")
    n_ids = pair.target.config.vocab_size
    if before:  # inside a text, nothing is added
        new = pair.tokenizer.encode(prompt, add_special_tokens=False).ids
        ids = [*before, *known_ids(new, pair.tokenizer, n_ids)]
    else:
        ids = encode_prompt(prompt, pair.tokenizer, n_ids)
    eos_ids, stop = options.get("eos_ids"), options.get("stop", ())
    eos_ids = checked_ids("eos_ids", pair.target.config.eos_ids if eos_ids is None else eos_ids)
    stops = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r:.80}, it must be a text or several, none of them empty")
    max_new_tokens = number("max_new_tokens", max_new_tokens, int)
    if config.window == FULL_ATTENTION:
        if warning := length_warning(pair, len(ids) + max_new_tokens):
            warnings.warn(warning, stacklevel=3)  # at the caller of write_text, for example
    return Request(
        pair,
        ids,
        config,
        max_new_tokens,
        eos_ids=eos_ids,
        stop=stops,
        logprobs=options.get("logprobs"),
        kept=kept,
        is_recorded=is_recorded,
        objects=objects,
    )
