"""Command-line options of methods, sampling and models, and what they choose.

Every mistake raises UsageError, whose message is one line that says what to do.

    config = choose_config(parser.parse_args(["--prompt", "a", "--method", "lookup", "--strict"]))
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from dynatree_lab.cli.program import print_line
from dynatree_lab.cli.terminal import describe
from dynatree_lab.engine.checkpoint import DTYPES
from dynatree_lab.engine.ranks import world_size
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import SAMPLING, GenerationConfig
from dynatree_lab.methods import METHODS
from dynatree_lab.methods.acceptances import ACCEPTANCES
from dynatree_lab.pair import TINY, Pair, choose_device, dtype_name, length_warning, load_pair
from gpt_neox import GPTNeoX

MAX_THREADS = 1024  # torch crashes with too many
PYTHIA = ("EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m")  # the papers' target and draft


def add_model_options(
    parser: argparse._ActionsContainer, pairs: Mapping[str, Callable[[], tuple[str, str]]]
) -> None:
    """Add the options that `open_pair` reads. pairs: those that --pair may name."""
    add = parser.add_argument
    names = f"target and draft by name: {', '.join(pairs)} (default embedded)"
    add("--pair", choices=pairs, metavar="NAME", help=names)
    add("--target", metavar="MODEL", help="folder or hub NAME[@REVISION] (default by --pair)")
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


def embedded_pair() -> tuple[str, str]:
    """Return the folders of target and draft, relative to the working folder."""
    return os.path.relpath(TINY / "target"), os.path.relpath(TINY / "draft")


def embedded_head() -> str:
    """Return the folder of the embedded target's EAGLE head, relative to the working folder."""
    return os.path.relpath(TINY / "eagle")


# Of target and draft. `pythia` is a download of 5.7 GB
PAIRS = {"embedded": embedded_pair, "pythia": lambda: PYTHIA}


def require_one_pair(args: argparse.Namespace) -> None:
    """Raise UsageError for models that are named in two ways."""
    if args.pair and (args.target or args.draft):
        raise UsageError("--pair excludes --target and --draft; use one or the other")


def set_threads(n: int | None, device: torch.device) -> None:
    """Use n CPU threads. None means torch's default on CPU, and one thread on CUDA, where waking a
    second thread takes longer than the host's work. Raises UsageError."""
    if n is None and device.type == "cuda":
        n = 1
    if n is not None:
        if not 1 <= n <= MAX_THREADS:
            raise UsageError(f"--threads is {n}, it must be from 1 to {MAX_THREADS}")
        torch.set_num_threads(n)


def open_pair(args: argparse.Namespace, is_drafting: bool, announce: Callable[[str], None]) -> Pair:
    """Announce and load the models that the options name."""
    require_one_pair(args)
    device = choose_device(args.device)
    set_threads(args.threads, device)
    if world_size() > 1 and device.type == "cuda":
        device = choose_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    if is_drafting and args.target and not args.draft:
        raise UsageError(
            "--target also needs --draft; without a draft model use --method lookup or recycle"
        )
    target, draft = PAIRS[args.pair or "embedded"]()
    return load_pair(
        args.target or target,
        (args.draft or draft) if is_drafting else None,
        device=device,
        dtype=args.dtype,
        draft_dtype=args.draft_dtype,
        announce=announce,
        target_memory=args.target_memory,
    )


def require_fit(config: GenerationConfig, pair: Pair, whose: str = "") -> None:
    """Raise UsageError for a window that these models cannot have. whose: the start of its line."""
    try:
        config.require_fit([model.config for model in pair.models])
    except ValueError as error:
        raise UsageError(f"{whose}{error}") from error


def warn_of_length(pair: Pair, n_tokens: int) -> None:
    """Print a warning if a sequence is longer than the target was trained for."""
    if warning := length_warning(pair, n_tokens):
        print_line(f"warning: {warning}")


def overflow_note(draft: GPTNeoX) -> str:
    """Return the note for a draft model that overflows."""
    remedy = "another --draft" if draft.dtype == torch.float32 else "--draft-dtype float32"
    what = f"the draft's logits are not finite in {dtype_name(draft.dtype)}"
    return f"note: {what}; until they are, it drafts nothing; try {remedy}"
