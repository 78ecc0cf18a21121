"""Command-line options of methods, sampling and models, and the prompt.

Every mistake raises UsageError, whose message is one line that says what to do.

    config = choose_config(parser.parse_args(["--prompt", "a", "--method", "lookup", "--strict"]))
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from dynatree_lab.cli.errors import print_line
from dynatree_lab.cli.terminal import describe
from dynatree_lab.engine.checkpoint import DTYPES
from dynatree_lab.engine.generation_config import SAMPLING, GenerationConfig
from dynatree_lab.errors import UsageError
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.acceptances import ACCEPTANCES
from dynatree_lab.pair import Pair


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that `open_pair` reads."""
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder or hub NAME[@REVISION] (default by device)")
    draft = "smaller model of the same tokenizer, or folder of an EAGLE head"
    add("--draft", metavar="MODEL", help=draft)
    add("--device", help="cpu, cuda or cuda:N (default cuda if available)")
    add("--dtype", help=f"{', '.join(DTYPES)} (default by device)")
    draft_dtype = "dtype of the draft (default by --dtype and device)"
    add("--draft-dtype", metavar="DTYPE", help=draft_dtype)
    add("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")
    memory = "memory for the target, such as 2GB; other layers are read in each pass"
    add("--target-memory", metavar="SIZE", help=memory)
    no_graphs = "on cuda, launch each kernel without CUDA graphs"
    add("--no-graphs", action="store_true", help=no_graphs)


def add_method_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that say how to decode. Some collect words of GenerationConfig.parse."""
    method = "decoding method (default dynatree)"
    parser.add_argument("--method", choices=METHODS, default="dynatree", metavar="M", help=method)
    listing = "print the methods and their settings, and exit"
    named = {"nargs": "?", "choices": METHODS, "metavar": "M"}
    parser.add_argument("--list-methods", action=ListMethods, **named, help=listing)
    add_word(parser, "--set", metavar="NAME=VALUE", help="setting of the method (repeatable)")
    window = "keep the latest N to N + N / 4 tokens (default all)"
    add_word(parser, "--window", type="window={}".format, metavar="N", help=window)
    sinks = "with --window: also keep the first N (default 4)"
    add_word(parser, "--sinks", type="sinks={}".format, metavar="N", help=sinks)
    strict = "batch-invariant logits: exact in every dtype"
    add_word(parser, "--strict", action="append_const", const="strict", help=strict)


def add_sampling_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that say how tokens are chosen."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default 0)")
    add("--top-k", type=int, metavar="K", help="only the K likeliest tokens (default 0: all)")
    add("--top-p", type=float, metavar="P", help="nucleus sampling (default 1)")
    min_p = "only tokens at least P times as likely as the likeliest (default 0)"
    add("--min-p", type=float, metavar="P", help=min_p)
    add("--seed", type=int, metavar="N", help="random seed (default 0)")
    draft = "temperature of the draft model (default by method)"
    add("--draft-temperature", type=float, metavar="X", help=draft)
    accept = f"{', '.join(ACCEPTANCES)} (default by method)"
    add_word(parser, "--accept", choices=ACCEPTANCES, metavar="RULE", help=accept)


def add_word(parser: argparse._ActionsContainer, name: str, **kwargs: object) -> None:
    """Add an option whose value is appended to `words`."""
    parser.add_argument(name, dest="words", default=[], **({"action": "append"} | kwargs))


class ListMethods(argparse.Action):
    """The option --list-methods: print all methods, or one, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        method: str | None,
        option: str | None = None,
    ) -> None:
        print(describe(METHODS if method is None else {method: METHODS[method]}))
        parser.exit()


def choose_config(args: argparse.Namespace) -> GenerationConfig:
    """Return the generation config. Raises UsageError, also for options without effect."""
    given = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    try:
        config = GenerationConfig.parse(args.method, *args.words, **given)
    except ValueError as error:
        raise UsageError(f"--method {args.method}: {error}") from error
    if config.acceptance and config.sampling.is_greedy:
        raise UsageError(f"--accept {config.acceptance} needs a --temperature above 0")
    return replace(config, graphs=not args.no_graphs)


def require_fit(config: GenerationConfig, pair: Pair, whose: str = "") -> None:
    """Raise UsageError for a window that these models cannot have. whose: the start of its line."""
    try:
        config.require_fit([model.config for model in pair.models])
    except ValueError as error:
        raise UsageError(f"{whose}{error}") from error


def warn_of_length(pair: Pair, n_tokens: int) -> None:
    """Warn if a sequence is longer than the target was trained for."""
    trained = pair.target.config.max_position_embeddings
    if n_tokens > trained:
        print_line(f"warning: {n_tokens} tokens in all; the target was trained for {trained}")


def read_prompt(text: str | None, file: str | None) -> str:
    """Return the prompt, or what is in its file (- is standard input) without the last line end,
    which editors and echo add. Raises UsageError if the file cannot be read or is not UTF-8."""
    if file is None:
        return text or ""
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error}") from error
