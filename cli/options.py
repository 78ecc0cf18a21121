"""What the user asked for, checked: options, settings, prompt.

Every mistake raises a UsageError whose message is one line that says what is wrong and what to do.

    settings = parse_settings(DynaTree, ["tau=0.02", "history=off"])
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeVar

from cli.errors import UsageError
from cli.models import Pair
from draft_tree import Rule
from engine.checkpoint import DTYPES
from engine.streaming import DEFAULT_SINKS, WHOLE_TEXT, Window
from methods import METHODS
from methods.acceptances import choose_acceptance
from methods.settings import read_values
from sampling import GREEDY, Sampling

Kind = TypeVar("Kind")
GUESSES = ("ranked", "drawn")
MAX_PROMPT_BYTES = 4_000_000  # of a file: a long novel, some 500 times Pythia's positions


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that `open_pair` reads."""
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder, or hub NAME or NAME@REVISION")
    add("--draft", metavar="MODEL", help="the same, of a smaller model with this tokenizer")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--dtype", help=f"{', '.join(DTYPES)} (float16 on cuda, float32 on cpu)")
    own = "the draft's own (as the target's; bfloat16 for float16 on GPUs that have it)"
    add("--draft-dtype", metavar="DTYPE", help=own)
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")
    add("--no-graphs", action="store_true", help="on cuda, launch every kernel by itself")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The options that `choose_sampling` takes."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens reaching P (1)")
    add("--seed", type=int, metavar="N", help="of the sampling (0)")
    add_draft_options(parser)


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """How guesses come from the draft."""
    add = parser.add_argument
    own = "of the draft (--temperature's where guesses are drawn, 1 where they are ranked)"
    add("--draft-temperature", type=float, metavar="X", help=own)
    of_greedy = "of greedy text: the draft's likeliest (default), or drawn at its temperature"
    add("--guesses", choices=GUESSES, help=of_greedy)


def choose_sampling(
    temperature: float,
    top_p: float | None,
    seed: int | None,
    draft_temperature: float | None,
    guesses: str | None,
) -> Sampling:
    """How text is chosen. Raises UsageError, also for options that would have no effect."""
    is_drawn = guesses == "drawn"
    if temperature == 0:
        if guesses and draft_temperature is None:
            raise UsageError(f"--guesses {guesses} of greedy text needs a --draft-temperature")
        for name, value in {"--top-p": top_p, "--seed": None if is_drawn else seed}.items():
            if value is not None:
                raise UsageError(f"{name} needs a --temperature above 0")
        if draft_temperature is None:
            return GREEDY
    elif guesses:
        raise UsageError(f"--guesses {guesses} is of greedy text: --temperature 0")
    top_p = 1.0 if top_p is None else top_p
    try:
        return Sampling(temperature, top_p, seed or 0, draft_temperature, is_drawn)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def has_temperature(rule: Rule, draws: bool) -> bool:
    """Whether a draft's temperature changes its trees. draws: where the rule can."""
    return (draws and rule.is_drawing) or (rule.max_depth > 0 and rule.goes_by_probs)


def require_temperature(row: str, rule: Rule, draws: bool) -> None:
    """Raise UsageError, naming the row, if its trees are the same at any draft temperature."""
    if not has_temperature(rule, draws):
        why = f"no probability that a draft gives shapes the trees of {row}"
        raise UsageError(f"--draft-temperature has no effect: {why}")


def require_drawing(row: str, rule: Rule) -> None:
    """Raise UsageError, naming the row, if its guesses cannot be drawn from the draft."""
    if not rule.is_drawing:
        drawing = [name for name, kind in METHODS.items() if kind().rule().is_drawing]
        why = f"no guess of {row} is drawn; those of {', '.join(drawing)} can be"
        raise UsageError(f"--guesses drawn has no effect: {why}")


def require_acceptance(row: str, rule: Rule, name: str) -> None:
    """Raise UsageError, naming the row, if sampled text of its trees cannot be accepted so."""
    if rule.max_rows == 1:
        raise UsageError(f"{row} has no effect: the method proposes no token")
    try:
        choose_acceptance(rule, name)
    except ValueError as error:
        raise UsageError(f"{row}: {error}") from error


def choose_window(size: int | None, sinks: int | None, max_rows: int, pair: Pair) -> Window:
    """What the caches keep. Raises UsageError if the tree or the trained range does not fit."""
    if size is None:
        if sinks is not None:
            raise UsageError("--sinks needs a --window")
        return WHOLE_TEXT
    longest = min(model.config.max_positions for model in pair.models)
    sinks = DEFAULT_SINKS if sinks is None else sinks
    most = (longest - sinks) * 4 // 5  # size + size // 4 tokens beside the sinks
    why = f"the method's tree has {max_rows} rows, the models {longest} positions"
    if sinks < 0 or most < max_rows:
        raise UsageError(f"--sinks {sinks} leaves no window: {why}")
    if not max_rows <= size <= most:
        raise UsageError(f"--window {size}: {max_rows} to {most} ({why})")
    return Window(size, sinks)


def parse_settings(kind: type[Kind], assignments: Sequence[str]) -> Kind:
    """A settings dataclass with NAME=VALUE changes. Raises UsageError naming what is wrong."""
    try:
        return kind(**read_values(kind, assignments))
    except ValueError as error:
        raise UsageError(f"--set {error}") from error


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt as it is given, or what is in its file (- is standard input).

    Raises UsageError: unreadable, too long, not UTF-8.
    """
    raw = read_file(file) if text is None else text.encode("utf-8", "surrogateescape")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8: {error}") from error


def read_file(name: str) -> bytes:
    """A prompt's file, which may be a pipe. Raises UsageError."""
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_PROMPT_BYTES:  # a device never ends
        most = f"{MAX_PROMPT_BYTES // 1_000_000} MB"
        raise UsageError(f"{name} is longer than a prompt may be, {most}; give a part of it")
    return raw
