"""Requests to continue a prompt: their steps and their text, which is streamed.

pair = load_pair("models/tiny/target", "models/tiny/draft")
for piece in stream_text(pair, "The ship sailed at dawn", max_new_tokens=64):
    print(piece, end="", flush=True)
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from cli.models import Pair
from cli.tokens import StopTexts, TextStream, encode_prompt, special_stops
from dynatree import checked_ids
from engine.generate import Step, generate
from engine.generation_config import GenerationConfig
from methods.sampler import Sampling


@dataclass(frozen=True)
class Request:
    """One generation: its prompt, its config, and where it ends."""

    pair: Pair
    prompt: list[int]  # ids
    config: GenerationConfig
    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    stop: Sequence[str] = ()  # generation stops before any of these texts

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of stop texts that are special tokens."""
        return special_stops(self.stop, self.pair.tokenizer)

    def decode(self, observer: object | None = None) -> Iterator[Step]:
        """Return the steps. observer: as in engine.generate.generate."""
        return generate(
            self.pair.target,
            self.pair.draft,
            self.prompt,
            self.config,
            self.max_new_tokens,
            eos_ids=(*self.eos_ids, *self.stop_ids),
            observer=observer,
        )

    def text(
        self,
        on_step: Callable[[Step], None] = lambda step: None,
        observer: object | None = None,
    ) -> Generator[str, None, str]:
        """Yield the text in pieces, each as soon as it is final, without EOS and stop text. Return
        the finish reason: "eos", "stop" or "length".

        on_step: called with each step, before its piece is yielded.
        """
        stream, stops = TextStream(self.pair.tokenizer), StopTexts(self.stop)
        for step in self.decode(observer):
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
        sampling: temperature, top_p, seed and other fields of methods.sampler.Sampling. They
            replace those of the config.

    Raises UsageError for a prompt without valid tokens, ValueError for other invalid arguments,
    and the errors of engine.generate.generate.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"prompt is {prompt!r:.80}, it must be a str; engine.generate takes ids")
    names = [f.name for f in fields(Sampling)]
    for name in sampling.keys() - set(names):
        raise ValueError(f"{name} is no argument; those of sampling are {', '.join(names)}")
    target = pair.target.config
    ids = encode_prompt(prompt, pair.tokenizer)
    if isinstance(config, str):
        config = GenerationConfig.parse(*config.split())
    if sampling:
        config = replace(config, sampling=Sampling(**sampling))
    eos_ids = checked_ids("eos_ids", target.eos_ids if eos_ids is None else eos_ids)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return Request(pair, ids, config, max_new_tokens, eos_ids, stops).text()
