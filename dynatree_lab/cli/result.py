"""A generated text with all that a notebook shows of it.

pair = load_pair()
result = write_text(pair, "The ship", "dyspec N=32", max_new_tokens=64, temperature=0.8, seed=1)
print(result.text, result.metrics.tokens_per_iter)
save_page(result, "run.html")
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from draft_tree import Settings
from dynatree_lab.cli.errors import writing
from dynatree_lab.cli.files import write_whole
from dynatree_lab.cli.main import report, request_report, summarise
from dynatree_lab.cli.metrics import Metrics, Tally
from dynatree_lab.cli.models import Pair, dtype_name
from dynatree_lab.cli.page import as_page
from dynatree_lab.cli.request import Request, make_request
from dynatree_lab.cli.trace import Trace, describe_base, meanings
from dynatree_lab.engine.generate import Step
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.engine.model import is_fast
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.engine.scores import TokenLogprob
from dynatree_lab.methods import METHODS
from gpt_neox import Model


@dataclass(frozen=True, repr=False)
class Result:
    """A text, and how it was written."""

    text: str
    ids: list[int]
    finish_reason: str  # "eos", "stop" or "length"
    metrics: Metrics
    steps: list[Step]  # the first one is the prompt's
    data: dict  # of the page, as docs/page.md describes it
    logprobs: list[TokenLogprob]  # of the ids; empty without the argument

    def __repr__(self) -> str:
        return f"{self.text}\n{summarise(self.metrics)}"


def write_text(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str = "dynatree",
    max_new_tokens: int = 128,
    eos_ids: Iterable[int] | None = None,
    stop: str | Iterable[str] = (),
    logprobs: int | None = None,
    **sampling: float,
) -> Result:
    """Continue a prompt. The arguments are those of stream_text, and so are the errors.

    logprobs: if given, the result has the log-probabilities of its ids, and of as many likeliest
    ids beside each.

    The run is recorded for save_page, which takes some of the time that result.metrics has.
    """
    request = make_request(pair, prompt, config, max_new_tokens, eos_ids, stop, sampling)
    request = replace(request, logprobs=logprobs)
    return write_request(request, command(prompt, request))


def write_request(request: Request, words: list[str]) -> Result:
    """Write the text of a request. words: a command line that writes it, too, or an empty list."""
    pair = request.pair
    settings, tally, steps = request.config.settings, Tally(), []
    trace = Trace(pair.tokenizer, settings, request.eos_ids)

    def on_step(step: Step) -> None:
        trace.add(step)
        tally.add(step)
        steps.append(step)

    about = {"interrupted": False, "settings": settings_report(request)}
    about |= {"meanings": meanings(settings), "base": describe_base(settings)}
    about["command"] = words
    pieces = request.text(on_step, observer=trace)
    while tally.finish_reason is None:
        try:
            tally.pieces.append(next(pieces))
        except StopIteration as end:
            tally.finish_reason = end.value
    text = "".join(tally.pieces)
    data = trace.as_json(request.prompt, report(request, tally, None) | about)
    metrics, found = tally.metrics(), tally.logprobs
    return Result(text, tally.ids, tally.finish_reason, metrics, steps, data, found)


def save_page(result: Result, file: str | Path) -> None:
    """Write the HTML page that shows a run step by step. Raises ValueError."""
    if not isinstance(result, Result):
        raise ValueError(f"result is {result!r:.80}, it must be a Result of write_text")
    with writing(str(file)):
        write_whole(Path(file), as_page(result.data))


def settings_report(request: Request) -> dict:
    """Return what the page says of a request: its method and models."""
    pair, settings = request.pair, request.config.settings
    models = {"target": str(pair.target_folder), "draft": None, "device": str(pair.target.device)}
    models |= {"dtype": dtype_of(pair.target), "draft_dtype": None}
    if pair.draft:
        models |= {"draft": str(pair.draft_folder), "draft_dtype": dtype_of(pair.draft)}
    threads = {"threads": torch.get_num_threads()}
    method = {"method": method_name(settings) or type(settings).__name__} | asdict(settings)
    return method | models | threads | request_report(request)


def dtype_of(model: Model) -> str | None:
    """Return the name of a model's dtype; None if it has only the members of the interface."""
    return dtype_name(model.dtype) if hasattr(model, "dtype") else None


def method_name(settings: Settings) -> str | None:
    """Return the name of the method that has these settings, or the core's; None if none has."""
    kinds = {name: kind for name, kind in METHODS.items() if issubclass(kind, type(settings))}
    exact = [name for name, kind in kinds.items() if kind is type(settings)]
    return next(iter(exact or kinds), None)


def command(prompt: str, request: Request) -> list[str]:
    """Return a command line that writes the text of a request, or an empty list if none does."""
    pair, config, sampling = request.pair, request.config, request.config.sampling
    method, eos_ids = method_name(config.settings), tuple(request.eos_ids)
    is_own_eos = eos_ids not in ((), tuple(pair.target.config.eos_ids))
    if not method or config.commit != "keep" or is_own_eos or not dtype_of(pair.target):
        return []
    options = {"--method": method, "--max-new-tokens": request.max_new_tokens}
    options |= {"--target": pair.target_folder, "--dtype": dtype_of(pair.target)}
    options["--device"] = pair.target.device
    if pair.draft:
        options |= {"--draft": pair.draft_folder, "--draft-dtype": dtype_of(pair.draft)}
    if pair.target_memory:
        options["--target-memory"] = f"{pair.target_memory / 10**6}MB"
    if not sampling.is_greedy:
        options |= {"--temperature": sampling.temperature, "--top-p": sampling.top_p}
        options |= {"--top-k": sampling.top_k or None, "--min-p": sampling.min_p or None}
        options |= {"--seed": sampling.seed, "--accept": config.acceptance}
    options["--draft-temperature"] = sampling.draft_temperature
    if config.window != FULL_ATTENTION:
        options |= {"--window": config.window.size, "--sinks": config.window.sinks}
    words = ["dynatree.py", "--prompt", prompt]
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    for f in fields(config.settings):
        if (value := getattr(config.settings, f.name)) != f.default:
            word = ("off", "on")[value] if f.type is bool else value
            words += ["--set", f"{f.name}={word}"]
    for text in request.stop:
        words += ["--stop", text]
    flags = {"--strict": config.strict, "--ignore-eos": not eos_ids}
    flags["--reference"] = not is_fast(pair.target)
    return words + [name for name, is_on in flags.items() if is_on]
