"""A request to continue a prompt: its steps, and its text in pieces of whole characters.

pair = load_pair()
for piece in stream_text(pair, "The ship sailed at dawn", "dynatree tau=0.01"):
    print(piece, end="", flush=True)
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dynatree import checked_ids
from dynatree_lab.engine.generate import Step, generate
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.engine.kept import KeptCache
from dynatree_lab.pair import Pair
from dynatree_lab.tokens import StopTexts, TextStream, encode_prompt


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

    def text(
        self, on_step: Callable[[Step], None] = lambda step: None
    ) -> Generator[str, None, str]:
        """Yield the text in pieces, each as soon as it is final, without EOS and stop text. Return
        the finish reason: "eos", "stop" or "length".

        on_step: called with each step, before its piece is yielded.
        """
        stream, stops = TextStream(self.pair.tokenizer), StopTexts(self.stop)
        for step in self.decode():
            on_step(step)
            new = stream.push([i for i in step.tokens if i not in self.eos_ids])
            yield stops.push(new)
            if stops.has_ended:
                return "stop"
        yield stops.push(stream.finish())
        yield stops.held
        if step.tokens[-1] in self.eos_ids:
            return "eos"
        has_stopped = stops.has_ended or step.tokens[-1] in self.stop_ids
        return "stop" if has_stopped else "length"


def stream_text(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str = "dynatree",
    max_new_tokens: int = 128,
    eos_ids: Iterable[int] | None = None,
    stop: str | Iterable[str] = (),
    **sampling: float,
) -> Generator[str, None, str]:
    """Yield the text that continues a prompt, in pieces of whole characters, each as soon as it is
    final. Return (the value of `yield from`) the finish reason: "eos", "stop" or "length".

    Args:
        config: a GenerationConfig, or words for one, such as "dynatree tau=0.02 strict".
        eos_ids: None for the target's.
        stop: a text, or several, before which generation stops.
        sampling: temperature, top_k, top_p, min_p, seed and draft_temperature, which the words may
            have instead.

    Raises ValueError for invalid arguments, and the errors of engine/generate.py.
    """
    return make_request(
        pair, prompt, config, max_new_tokens, eos_ids=eos_ids, stop=stop, sampling=sampling
    ).text()


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
    """Return the request of stream_text's arguments. before: ids before the prompt. Raises
    ValueError."""
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
    return Request(pair, ids, config, max_new_tokens, eos_ids=eos_ids, stop=stops)
