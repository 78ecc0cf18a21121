"""A generated text with all that a notebook shows of it.

pair = load_pair()
result = write_text(pair, "The ship", "dyspec N=32", max_new_tokens=64, temperature=0.8, seed=1)
print(result.text, result.metrics.tokens_per_iter)
save_page(result, "run.html")
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from draft_tree import Settings
from dynatree_lab.cli.files import write_whole
from dynatree_lab.cli.main import report, request_report, summarise
from dynatree_lab.cli.metrics import Metrics, Tally
from dynatree_lab.cli.models import Pair, dtype_name
from dynatree_lab.cli.page import as_page
from dynatree_lab.cli.request import Request, make_request
from dynatree_lab.cli.trace import Trace, describe_base, meanings
from dynatree_lab.engine.generate import Step
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.methods import METHODS


@dataclass(frozen=True, repr=False)
class Result:
    """A text, and how it was written."""

    text: str
    ids: list[int]
    finish_reason: str  # "eos", "stop" or "length"
    metrics: Metrics
    steps: list[Step]  # the first one is the prompt's
    data: dict  # of the page, as docs/page.md describes it

    def __repr__(self) -> str:
        return f"{self.text}\n{summarise(self.metrics)}"


def write_text(
    pair: Pair,
    prompt: str,
    config: GenerationConfig | str = "dynatree",
    max_new_tokens: int = 128,
    eos_ids: Iterable[int] | None = None,
    stop: str | Iterable[str] = (),
    **sampling: float,
) -> Result:
    """Continue a prompt. The arguments are those of stream_text, and so are the errors.

    The run is recorded for save_page, which takes some of the time that result.metrics has.
    """
    request = make_request(pair, prompt, config, max_new_tokens, eos_ids, stop, sampling)
    settings, tally, steps = request.config.settings, Tally(), []
    trace = Trace(pair.tokenizer, settings, request.eos_ids)

    def on_step(step: Step) -> None:
        trace.add(step)
        tally.add(step)
        steps.append(step)

    pieces = request.text(on_step, observer=trace)
    while tally.finish_reason is None:
        try:
            tally.pieces.append(next(pieces))
        except StopIteration as end:
            tally.finish_reason = end.value
    about = report(request, tally, None) | {"interrupted": False}
    about |= {"settings": settings_report(request), "command": command(prompt, request)}
    about |= {"meanings": meanings(settings), "base": describe_base(settings)}
    text, data = "".join(tally.pieces), trace.as_json(request.prompt, about)
    return Result(text, tally.ids, tally.finish_reason, tally.metrics(), steps, data)


def save_page(result: Result, file: str | Path) -> None:
    """Write the HTML page that shows a run step by step. Raises OSError."""
    write_whole(Path(file), as_page(result.data))


def settings_report(request: Request) -> dict:
    """Return what the page says of a request: its method and models."""
    pair, settings = request.pair, request.config.settings
    models = {"target": str(pair.target_folder), "draft": None, "device": str(pair.target.device)}
    models |= {"dtype": dtype_name(pair.target.dtype), "draft_dtype": None}
    if pair.draft:
        models |= {"draft": str(pair.draft_folder), "draft_dtype": dtype_name(pair.draft.dtype)}
    threads = {"threads": torch.get_num_threads()}
    method = {"method": method_name(settings)} | asdict(settings)
    return method | models | threads | request_report(request)


def method_name(settings: Settings) -> str:
    """Return the name of the method that has these settings."""
    return next((name for name, kind in METHODS.items() if kind is type(settings)), "own")


def command(prompt: str, request: Request) -> list[str]:
    """Return a command line that writes the text of a request."""
    settings, sampling = request.config.settings, request.config.sampling
    words = ["dynatree.py", "--prompt", prompt, "--method", method_name(settings)]
    words += ["--max-new-tokens", str(request.max_new_tokens)]
    for f in fields(settings):
        if (value := getattr(settings, f.name)) != f.default:
            word = ("off", "on")[value] if f.type is bool else value
            words += ["--set", f"{f.name}={word}"]
    for name in ("temperature", "top_p", "seed"):
        if not sampling.is_greedy:
            words += [f"--{name.replace('_', '-')}", str(getattr(sampling, name))]
    return words + ["--strict"] * request.config.strict
