"""What the user asked for, checked: how the text is written, and the prompt.

Every mistake raises a UsageError, whose message is one line on what is wrong and what to do.

    config = choose_config(parser.parse_args(["--prompt", "a", "--method", "lookup", "--strict"]))
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace

from cli.errors import UsageError
from cli.models import Pair
from draft_tree import Rule
from engine.checkpoint import DTYPES
from engine.generation_config import GenerationConfig
from methods import METHODS
from methods.acceptances import ACCEPTANCES, DEFAULTS
from methods.sampler import GREEDY, Sampling

MAX_PROMPT_BYTES = 4_000_000  # of a file: a long novel, some 500 times Pythia's positions


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `open_pair` reads."""
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder, or hub NAME or NAME@REVISION")
    add("--draft", metavar="MODEL", help="the same, of a smaller model with this tokenizer")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--dtype", help=f"{', '.join(DTYPES)} (float16 on cuda, float32 on cpu)")
    own = "the draft's own (as the target's; bfloat16 for float16 on GPUs that have it)"
    add("--draft-dtype", metavar="DTYPE", help=own)
    add("--threads", type=int, metavar="N", help="CPU threads (one per core)")


def add_graphs_option(parser: argparse.ArgumentParser) -> None:
    help = "on cuda, launch every kernel by itself"
    parser.add_argument("--no-graphs", action="store_true", help=help)


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `choose_config` reads; some are words of GenerationConfig.parse."""
    add = parser.add_argument
    methods = f"{', '.join(METHODS)} (dynatree)"
    add("--method", choices=METHODS, default="dynatree", metavar="M", help=methods)

    def add_word(name: str, **how: object) -> None:
        add(name, dest="words", default=[], **({"action": "append"} | how))

    add_word("--set", metavar="NAME=VALUE", help="a method's setting")
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens reaching P (1)")
    add("--seed", type=int, metavar="N", help="of the sampling (0)")
    own = "of the draft (--temperature's where guesses are drawn, 1 where they are ranked)"
    add("--draft-temperature", type=float, metavar="X", help=own)
    by_kind = ", ".join(f"{kind}: {name}" for kind, name in DEFAULTS.items())
    accept = f"{', '.join(ACCEPTANCES)}: of sampled text (by trees: {by_kind})"
    add_word("--accept", choices=ACCEPTANCES, metavar="A", help=accept)
    window = "keep the latest N tokens in the cache (all)"
    add_word("--window", type="window={}".format, metavar="N", help=window)
    add_word(
        "--sinks", type="sinks={}".format, metavar="N", help="and with a window the first N (4)"
    )
    strict = "strict ar's logits, bit for bit, in any dtype"
    add_word("--strict", action="append_const", const="strict", help=strict)
    add_graphs_option(parser)


def choose_config(args: argparse.Namespace) -> GenerationConfig:
    """Return how the text is written. Raises UsageError, also for options without effect."""
    try:
        config = GenerationConfig.parse(args.method, *args.words)
    except ValueError as error:
        raise UsageError(f"--method {args.method}: {error}") from error
    sampling = choose_sampling(args.temperature, args.top_p, args.seed, args.draft_temperature)
    if args.draft_temperature is not None:
        require_temperature(args.method, config.make_rule(), sampling.draws_candidates)
    if config.acceptance and sampling.is_greedy:
        raise UsageError(f"--accept {config.acceptance} needs a --temperature above 0")
    return replace(config, sampling=sampling, graphs=not args.no_graphs)


def choose_sampling(
    temperature: float, top_p: float | None, seed: int | None, draft_temperature: float | None
) -> Sampling:
    """Return how tokens are chosen. Raises UsageError, also for options without effect."""
    if temperature == 0:
        for name, value in {"--top-p": top_p, "--seed": seed}.items():
            if value is not None:
                raise UsageError(f"{name} needs a --temperature above 0")
        if draft_temperature is None:
            return GREEDY
    top_p = 1.0 if top_p is None else top_p
    try:
        return Sampling(temperature, top_p, seed or 0, draft_temperature)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def has_temperature(rule: Rule, draws: bool) -> bool:
    """Whether a draft's temperature changes its trees. draws: whether candidates are drawn, by a
    rule that can."""
    return (draws and rule.draws_candidates) or (rule.max_depth > 0 and rule.depends_on_probs)


def require_temperature(method: str, rule: Rule, draws: bool) -> None:
    """Raise UsageError if the method's trees are the same at any draft temperature."""
    if not has_temperature(rule, draws):
        why = f"no probability that a draft gives shapes the trees of {method}"
        raise UsageError(f"--draft-temperature has no effect: {why}")


def require_fit(config: GenerationConfig, pair: Pair, whose: str = "") -> None:
    """Raise UsageError for a window that these models cannot have. whose: the start of its line."""
    try:
        config.require_fit([model.config for model in pair.models])
    except ValueError as error:
        raise UsageError(f"{whose}{error}") from error


def read_prompt(text: str | None, file: str | None) -> str:
    """Return the prompt, or what is in its file (- is standard input) without the last line end,
    which editors and echo add. Raises UsageError if it is unreadable, too long or not UTF-8."""
    raw = read_file(file) if text is None else text.encode("utf-8", "surrogateescape")
    try:
        prompt = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8: {error}") from error
    return prompt if file is None else prompt.removesuffix("\n").removesuffix("\r")


def read_file(name: str) -> bytes:
    """Return what is in a prompt's file, which may be a pipe. Raises UsageError."""
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_PROMPT_BYTES:  # a device never ends
        limit = f"{MAX_PROMPT_BYTES // 1_000_000} MB"
        raise UsageError(f"{name} is longer than a prompt may be, {limit}; give a part of it")
    return raw
