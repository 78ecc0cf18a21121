"""A generated text, with all that a notebook, --json and the page show of it.

pair = load_pair()
for piece in stream_text(pair, "She opened the door", "dynatree tau=0.01"):
    print(piece, end="", flush=True)
result = write_text(pair, "The ship", "dyspec N=32", max_new_tokens=64, temperature=0.8, seed=1)
print(result.text, result.metrics.tokens_per_iter)
save_page(result, "run.html")
session = Session(pair)  # a text that is written by several calls; no token is run twice
print(session.write("The ship", max_new_tokens=32).text, session.write(" The captain").text)
"""

from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Unpack

import torch
from tokenizers import Tokenizer

from draft_tree import Settings
from dynatree_lab.engine.model import is_fast
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.engine.scores import TokenLogprob
from dynatree_lab.errors import writing
from dynatree_lab.generation.config import METHOD_OPTIONS, GenerationConfig
from dynatree_lab.generation.kept import KeptCache
from dynatree_lab.generation.step import Step
from dynatree_lab.html_page import as_page
from dynatree_lab.methods import METHODS, PROJECT_METHODS
from dynatree_lab.methods.sampler import GREEDY
from dynatree_lab.metrics import Metrics, measure, summarise, token_ids, versions
from dynatree_lab.pair import Pair, dtype_name
from dynatree_lab.request import Request, TextOptions, make_request
from dynatree_lab.tokens import StopTexts, TextStream
from dynatree_lab.trace import trace_of


@dataclass(repr=False)
class Result:
    """A text and how it was written, or what there is of it so far."""

    request: Request
    command: list[str]  # a command line that writes the text; empty if none does
    steps: list[Step] = field(default_factory=list)  # the first one is the prompt's
    text: str = ""
    finish_reason: str | None = None  # "eos", "stop" or "length", once the text has ended

    def write(
        self, on_step: Callable[[Step], None] = lambda step: None
    ) -> Generator[str, None, str]:
        """Write the text and yield it in pieces, each as soon as it is final, without EOS and stop
        text. Return the finish reason.

        on_step: called with each step, before its piece is yielded.
        """
        request = self.request
        stream, stops = TextStream(request.pair.tokenizer), StopTexts(request.stop)
        for step in request.decode():
            self.steps.append(step)
            on_step(step)
            piece = stops.push(stream.push([i for i in step.tokens if i not in request.eos_ids]))
            self.text += piece
            yield piece
            if stops.has_ended:
                self.finish_reason = "stop"
                return self.finish_reason
        rest = stops.push(stream.finish()) + stops.held
        self.text += rest
        yield rest
        if step.tokens[-1] in request.eos_ids:
            self.finish_reason = "eos"
        else:
            has_stopped = stops.has_ended or step.tokens[-1] in request.stop_ids
            self.finish_reason = "stop" if has_stopped else "length"
        return self.finish_reason

    def write_all(self) -> "Result":
        """Write the whole text, and return the result."""
        for _ in self.write():
            pass
        return self

    @property
    def ids(self) -> list[int]:
        return token_ids(self.steps)

    @property
    def metrics(self) -> Metrics:
        return measure(self.steps)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the ids; empty if they are not wanted."""
        return [each for step in self.steps for each in step.logprobs]

    @property
    def data(self) -> dict:
        """The data of the page, as docs/page.md describes it."""
        request, tokenizer = self.request, self.request.pair.tokenizer
        config, eos_ids = request.config, request.eos_ids
        trace = trace_of(self.steps, request.prompt, config.settings, tokenizer, hidden_ids=eos_ids)
        trace["meanings"] |= {name: METHOD_OPTIONS[name] for name in config.method_options}
        return trace | self.report() | {"command": self.command}

    def report(self) -> dict:
        """Return the object of --json."""
        request = self.request
        n_graphs, capture_s = request.pair.captured()
        found = {
            "token_ids": self.ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "metrics": asdict(self.metrics),
            "versions": versions(),
            "graphs": {"n": n_graphs, "capture_s": capture_s},
            "settings": describe_request(request),
            "interrupted": False,
        }
        if request.logprobs is not None:
            found["logprobs"] = describe_logprobs(self.logprobs, request.pair.tokenizer)
        return found

    def __repr__(self) -> str:
        return f"{self.text}\n{summarise(self.metrics)}"


def stream_text(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str = "dynatree",
    max_new_tokens: int = 128,
    **options: Unpack[TextOptions],
) -> Generator[str, None, str]:
    """Yield the text that continues a prompt, in pieces of whole characters, each as soon as it is
    final. Return (the value of `yield from`) the finish reason: "eos", "stop" or "length".

    Args:
        config: a GenerationConfig, or words for one, such as "dynatree tau=0.02 strict".
        options: those of request.TextOptions but logprobs.

    Warns of a sequence that is longer than the target was trained for. Raises ValueError for
    invalid arguments, and the errors of generation/generate.py.
    """
    return Result(make_request(pair, prompt, config, max_new_tokens, options), []).write()


def write_text(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str = "dynatree",
    max_new_tokens: int = 128,
    **options: Unpack[TextOptions],
) -> Result:
    """Continue a prompt. The arguments are those of stream_text and logprobs, and the errors those
    of stream_text.

    The run is recorded for save_page, which takes some of the time that result.metrics has.
    """
    request = make_request(pair, prompt, config, max_new_tokens, options, is_recorded=True)
    return Result(request, make_command(prompt, request)).write_all()


class Session:
    """A text that is written by several calls: its ids so far, and copies of the caches that have
    run them."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.ids: list[int] = []  # may be replaced; what has not changed is not run again
        self.kept = KeptCache(), KeptCache()  # of the target and of the draft

    def write(
        self,
        text: str,
        config: GenerationConfig | str = "dynatree",
        max_new_tokens: int = 128,
        **options: Unpack[TextOptions],
    ) -> Result:
        """Append a text, which may be empty after the first call, and continue it. The arguments
        are those of write_text, and so are the errors.

        The result is that of a fresh run over all ids, whatever was written before, and with
        whatever method. After a stop text, the session goes on from the token that completed it.
        """
        request = make_request(
            self.pair,
            text,
            config,
            max_new_tokens,
            options,
            before=self.ids,
            kept=self.kept,
            is_recorded=True,
        )
        result = Result(request, [] if self.ids else make_command(text, request)).write_all()
        self.ids = request.prompt + ids_until_stop(result)
        return result

    def stream(
        self,
        text: str,
        config: GenerationConfig | str = "dynatree",
        max_new_tokens: int = 128,
        **options: Unpack[TextOptions],
    ) -> Generator[str, None, str]:
        """Do what `write` does, in the pieces of stream_text. `ids` grows with each step."""
        request = make_request(
            self.pair, text, config, max_new_tokens, options, before=self.ids, kept=self.kept
        )
        result = Result(request, [])

        def on_step(step: Step) -> None:
            self.ids = request.prompt + ids_until_stop(result)

        return result.write(on_step)


def ids_until_stop(result: Result) -> list[int]:
    """Return the ids of a result up to the one that completed a stop text, if one did. The ids
    after it depend on the trees."""
    if not result.request.stop:
        return result.ids
    stream, stops = TextStream(result.request.pair.tokenizer), StopTexts(result.request.stop)
    for n, token in enumerate(result.ids, start=1):
        stops.push(stream.push([token]))
        if stops.has_ended:
            return result.ids[:n]
    return result.ids


def save_page(result: Result, file: str | Path) -> None:
    """Write the HTML page that shows a run step by step. Raises ValueError."""
    if not isinstance(result, Result):
        raise ValueError(f"result is {result!r:.80}, it must be a Result of write_text")
    with writing(str(file)):
        Path(file).write_text(as_page(result.data), encoding="utf-8")


def describe_request(request: Request) -> dict:
    """Return the settings that a report has."""
    config = request.config
    method = method_name(config.settings) or type(config.settings).__name__
    objects = {
        name: getattr(each, "__name__", type(each).__name__)
        for name, each in request.objects.items()
    }
    return {
        "method": method,
        **asdict(config.settings),
        **config.method_options,
        **request.pair.report,
        "threads": torch.get_num_threads(),
        "max_new_tokens": request.max_new_tokens,
        "eos_ids": request.eos_ids,
        "stop_texts": request.stop,
        "strict": config.strict,
        "prompt_tokens": len(request.prompt),
        "sampling": None if config.sampling == GREEDY else asdict(config.sampling),
        "draft_temperature": request.draft_temperature,
        "acceptance": request.acceptance,
        "window": None if config.window == FULL_ATTENTION else asdict(config.window),
    } | ({"objects": objects} if objects else {})


def describe_logprobs(logprobs: list[TokenLogprob], tokenizer: Tokenizer) -> list[dict]:
    """Return the log-probabilities of each id of the text, and of the likeliest ids."""

    def describe(id: int, logprob: float) -> dict:
        return {"id": id, "token": tokenizer.decode([id], False), "logprob": logprob}

    return [
        describe(each.id, each.logprob) | {"top": [describe(*other) for other in each.top]}
        for each in logprobs
    ]


def method_name(settings: Settings) -> str | None:
    """Return the name of the method that has these settings, or the core's; None if none has."""
    kinds = {name: kind for name, kind in METHODS.items() if issubclass(kind, type(settings))}
    exact = [name for name, kind in kinds.items() if kind is type(settings)]
    return next(iter(exact or kinds), None)


def make_command(prompt: str, request: Request) -> list[str]:
    """Return a command line that writes the text of a request, or an empty list if none does."""
    pair, config, sampling = request.pair, request.config, request.config.sampling
    method, eos_ids = method_name(config.settings), tuple(request.eos_ids)
    is_own_eos = eos_ids not in ((), tuple(pair.target.config.eos_ids))
    are_loaded = all(map(is_fast, pair.models))  # others are the caller's
    has_option = config.commit == "keep" and not is_own_eos and not request.objects
    if method not in PROJECT_METHODS or not has_option or not are_loaded:
        return []
    options = {"--method": method, "--max-new-tokens": request.max_new_tokens}
    options |= {"--target": pair.target_folder, "--dtype": dtype_name(pair.target.dtype)}
    options["--device"] = pair.target.device
    if pair.draft:
        options |= {"--draft": pair.draft_folder, "--draft-dtype": dtype_name(pair.draft.dtype)}
    if pair.target_memory:
        options["--target-memory"] = f"{pair.target_memory / 10**6}MB"
    if not sampling.is_greedy:
        options |= {"--temperature": sampling.temperature, "--top-p": sampling.top_p}
        options |= {"--top-k": sampling.top_k or None, "--min-p": sampling.min_p or None}
        options |= {"--seed": sampling.seed, "--accept": config.acceptance}
    options["--draft-temperature"] = sampling.draft_temperature
    if config.window != FULL_ATTENTION:
        options |= {"--window": config.window.size, "--sinks": config.window.sinks}
    words = ["python", "-m", "dynatree_lab", "--prompt", prompt]
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    given = {f.name: getattr(config.settings, f.name) for f in fields(config.settings)}
    changed = [f.name for f in fields(config.settings) if given[f.name] != f.default]
    for name, value in ({name: given[name] for name in changed} | config.method_options).items():
        word = ("off", "on")[value] if isinstance(value, bool) else value
        words += ["--set", f"{name}={word}"]
    for text in request.stop:
        words += ["--stop", text]
    flags = {"--strict": config.strict, "--ignore-eos": not eos_ids}
    return words + [name for name, is_on in flags.items() if is_on]
