"""A request to continue a prompt.

request = Request(load_pair(), prompt, GenerationConfig(settings), max_new_tokens=20)
print(token_ids(request.decode()))
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dynatree_lab.engine.generate import Step, checked_ids, generate
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.engine.kept import KeptCache
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.pair import Pair, length_warning
from dynatree_lab.tokens import encode_prompt


@dataclass(frozen=True)
class Request:
    """One generation: its prompt, its config, and where it ends."""

    pair: Pair
    prompt: list[int]  # ids
    config: GenerationConfig
    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    stop: Sequence[str] = ()  # generation stops before any of these texts
    logprobs: int | None = None  # as in engine/generate.py
    kept: Sequence[KeptCache] = ()  # of a session
    is_recorded: bool = False  # for a trace

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of stop texts that are special tokens, because decoded text omits them."""
        added = self.pair.tokenizer.get_added_tokens_decoder() if self.stop else {}
        return tuple(i for i, each in added.items() if each.special and each.content in self.stop)

    def decode(self) -> Iterator[Step]:
        """Return the steps."""
        return generate(
            self.pair.target,
            self.pair.draft,
            self.prompt,
            self.config,
            max_new_tokens=self.max_new_tokens,
            eos_ids=(*self.eos_ids, *self.stop_ids),
            logprobs=self.logprobs,
            is_recorded=self.is_recorded,
            kept=self.kept,
        )


def make_request(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str,
    max_new_tokens: int,
    eos_ids: Iterable[int] | None,
    stop: str | Iterable[str],
    sampling: dict[str, float],
    before: Sequence[int] = (),
) -> Request:
    """Return the request of stream_text's arguments (result.py). before: ids before the prompt.
    Warns of a sequence that is longer than the target was trained for. Raises ValueError."""
    for name, value, kind in (("pair", pair, Pair), ("prompt", prompt, str)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r:.80}, it must be a {kind.__name__}")
    if isinstance(config, str):
        config = GenerationConfig.parse(*config.split(), **sampling)
    elif isinstance(config, GenerationConfig):
        config = config.with_sampling(**sampling)
    else:
        raise ValueError(f"config is {config!r:.80}, it must be words or a GenerationConfig")
    config.require_fit([each.config for each in pair.models])
    if pair.draft is None and config.make_rule().max_depth:
        raise ValueError("the pair has no draft: load one, or use ar, lookup or recycle")
    if before:  # inside a text, nothing is added
        ids = [*before, *pair.tokenizer.encode(prompt, add_special_tokens=False).ids]
    else:
        ids = encode_prompt(prompt, pair.tokenizer)
    eos_ids = checked_ids("eos_ids", pair.target.config.eos_ids if eos_ids is None else eos_ids)
    stops = (stop,) if isinstance(stop, str | int | None) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r:.80}, it must be a text or several, none of them empty")
    if config.window == FULL_ATTENTION and isinstance(max_new_tokens, int):  # checked by generate
        if warning := length_warning(pair, len(ids) + max_new_tokens):
            warnings.warn(warning, stacklevel=3)  # at the caller of write_text, for example
    return Request(pair, ids, config, max_new_tokens, eos_ids=eos_ids, stop=stops)
