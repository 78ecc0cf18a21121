"""The program dynatree.py: a generation per prompt, streamed text, summary and reports.

main(["--prompt", "The ship sailed at dawn", "--method", "auto"])
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dynatree_lab.cli.compare import (
    Comparison,
    compare,
    describe_comparison,
    is_wrong,
    reference_of,
)
from dynatree_lab.cli.errors import (
    Parser,
    UsageError,
    print_line,
    report_mistake,
    run_command_line,
)
from dynatree_lab.cli.metrics import Metrics, Tally, versions
from dynatree_lab.cli.models import (
    open_pair,
    overflow_note,
    warn_of_length,
)
from dynatree_lab.cli.options import (
    add_method_options,
    add_model_options,
    add_sampling_options,
    choose_config,
    read_prompt,
    require_fit,
)
from dynatree_lab.cli.page import require_places, save_trace
from dynatree_lab.cli.prompts import read_prompts
from dynatree_lab.cli.request import Request
from dynatree_lab.cli.terminal import LEGEND, LayerProgress, draw_tree
from dynatree_lab.cli.tokens import encode_prompt
from dynatree_lab.cli.trace import Trace, describe_base, meanings
from dynatree_lab.engine.generate import Step
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.engine.ranks import from_rank_0, rank, run_on_ranks, world_size
from dynatree_lab.engine.scores import TokenLogprob
from dynatree_lab.methods.acceptances import default_acceptance
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.methods.sampler import GREEDY

DESCRIPTION = "Generate text by tree speculative decoding: dynatree.py --prompt TEXT [options]"
EXIT_STATUS = "exit status: 1 wrong ids (--compare) or closed stdout, 2 error, 130 interrupted"


def build_parser() -> Parser:
    parser = Parser(
        prog="dynatree.py",
        usage=argparse.SUPPRESS,
        description=DESCRIPTION,
        epilog=EXIT_STATUS,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=25),
    )
    parser.repeatable = ("--set", "--stop")
    parser.less_memory = "a 16-bit --dtype, a shorter prompt, fewer --max-new-tokens, a --window"
    parser.less_memory += ", --target-memory, a smaller --target"
    add_input_options(parser.add_argument_group("input"))
    add_method_options(parser.add_argument_group("method"))
    add_sampling_options(parser.add_argument_group("sampling"))
    models = parser.add_argument_group("models")
    add_model_options(models)
    reference = "run the readable model of gpt_neox.py (slower)"
    models.add_argument("--reference", action="store_true", help=reference)
    add_output_options(parser.add_argument_group("output"))
    return parser


def add_input_options(group: argparse._ArgumentGroup) -> None:
    file = "UTF-8 file, without its last newline; - is stdin"
    prompt = group.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help=file)
    prompts = 'prompts: lines of JSON ("prompt", "turns") or plain text; each has a seed one '
    prompts += "higher than the one before; without --html and --trace"
    prompt.add_argument("--prompts", metavar="FILE", help=prompts)
    add = group.add_argument
    limit = "maximum number of new tokens (default 128)"
    add("--max-new-tokens", type=int, default=128, metavar="N", help=limit)
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before TEXT (repeatable)")
    add("--ignore-eos", action="store_true", help="continue after the end-of-text token")


def add_output_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--compare", action="store_true", help="also run ar; compare speed and token ids")
    add("--show-tree", action="store_true", help="draw the tree of every iteration on stderr")
    add("--json", action="store_true", help="print a JSON object instead of each text")
    add("--html", metavar="FILE", help="write a page that shows the run step by step")
    add("--trace", metavar="FILE", help="write the data of that page as JSON")
    logprobs = (
        "with --json or --trace: log-probabilities of the text's tokens and of the K likeliest"
    )
    add("--logprobs", type=int, nargs="?", const=0, metavar="K", help=logprobs)


def prepare(args: argparse.Namespace) -> tuple[list[str], Request, dict]:
    """Check all options and load the models. Return the prompts, a request that has none yet, and
    the settings to report."""
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens is {args.max_new_tokens}, it must be at least 1")
    if args.logprobs is not None:
        if args.logprobs < 0:
            raise UsageError(f"--logprobs is {args.logprobs}, it must be at least 0")
        if not (args.json or args.trace):
            raise UsageError("--logprobs needs --json or --trace")
    config = choose_config(args)
    is_drafting = config.make_rule().max_depth > 0
    if args.reference and (world_size() > 1 or not config.works_on_reference_model):
        raise UsageError("--reference: no --strict, --window, rebuild or torchrun")
    if args.prompts and (args.html or args.trace):
        raise UsageError("--html and --trace show one run; use --prompt instead of --prompts")
    texts = from_rank_0(read_texts, args)
    if rank() == 0:
        require_places(args.html, args.trace)
    if (args.draft or args.draft_dtype) and not is_drafting:
        print_line(f"note: --method {args.method} ignores --draft and --draft-dtype")
    pair, models = open_pair(args, is_drafting, print_line, args.reference)
    require_fit(config, pair)
    if pair.target_memory is not None and sys.stderr.isatty():
        pair.target.layers.on_layer = LayerProgress(pair.target.layers.n_layers)
    eos_ids = () if args.ignore_eos else pair.target.config.eos_ids
    if config.window != FULL_ATTENTION:
        kept = f"{config.window.sinks} sinks and the latest {config.window.size} tokens or more"
        print_line(f"note: the caches keep {kept}, so the text differs from full attention")
    limits = args.max_new_tokens, eos_ids, args.stop
    request = Request(pair, [], config, *limits, args.logprobs)
    return texts, request, {"method": args.method, **asdict(config.settings), **models}


def read_texts(args: argparse.Namespace) -> list[str]:
    """Return the text of the prompt, or those of --prompts, and print how many these are."""
    if args.prompts is None:
        return [read_prompt(args.prompt, args.prompt_file)]
    texts, unit = read_prompts(Path(args.prompts))
    print_line(f"note: {args.prompts} has {len(texts)} prompts, {unit}")
    return texts


def with_prompt(request: Request, text: str, i: int) -> Request:
    """Return the request with prompt i, whose seed is i higher if text is sampled. Warn if the
    sequence is longer than the target was trained for."""
    sampling, ids = request.config.sampling, encode_prompt(text, request.pair.tokenizer)
    if not sampling.is_greedy:
        try:
            sampling = replace(sampling, seed=sampling.seed + i)
        except ValueError as error:
            raise UsageError(f"--{error}") from error
    if request.config.window == FULL_ATTENTION:
        warn_of_length(request.pair, len(ids) + request.max_new_tokens)
    return replace(request, prompt=ids, config=replace(request.config, sampling=sampling))


def request_report(request: Request) -> dict:
    """Return the report of a request, except for its method and models."""
    config, rule = request.config, request.config.make_rule()
    accepts = config.acceptance or default_acceptance(rule)
    return {
        "max_new_tokens": request.max_new_tokens,
        "eos_ids": request.eos_ids,
        "stop_texts": request.stop,
        "strict": config.strict,
        "prompt_tokens": len(request.prompt),
        "sampling": None if config.sampling == GREEDY else asdict(config.sampling),
        "acceptance": None if config.sampling.is_greedy else accepts,
        "window": None if config.window == FULL_ATTENTION else asdict(config.window),
    }


def write(parser: Parser, args: argparse.Namespace) -> int:
    """Run the parsed command line and return the exit status, the highest one of all prompts.

    A mistake in one of --prompts is reported, and the others go on.
    """
    texts, request, settings = prepare(args)
    if args.prompts is None:
        return write_one(with_prompt(request, texts[0], 0), args, settings)
    status = 0
    for i, text in enumerate(texts):
        name = f"prompt {i + 1} of {len(texts)}"
        print_line(name)
        try:
            numbered = settings | {"prompt_number": i + 1}
            found = write_one(with_prompt(request, text, i), args, numbered)
        except Exception as error:
            # Memory may be short on one rank only, and the others then wait for it
            if world_size() > 1 and not isinstance(error, UsageError):
                raise
            found = report_mistake(error, parser, f"{name}: ")
        status = max(status, found)
    return status


def write_one(request: Request, args: argparse.Namespace, settings: dict) -> int:
    """Write the text of a request and return the exit status. settings: to report."""
    reported = settings | request_report(request)
    tally, trace, comparison = Tally(), None, None
    if args.html or args.trace:
        trace = Trace(request.pair.tokenizer, request.config.settings, request.eos_ids)
    if args.compare:
        for warm_up in (request, reference_of(request)):  # so that neither is the first to run
            list(islice(warm_up.decode(), warm_up.pair.warm_up_steps))
    is_interrupted = True  # or failed, until everything is done
    try:
        stream(request, args, tally, trace)
        if args.compare:
            comparison = compare(request, tally)
            print_line(describe_comparison(comparison))
        is_interrupted = False
    finally:
        if tally.ids:
            found = report(request, tally, comparison)
            found |= {"settings": reported, "interrupted": is_interrupted}
            write_outputs(found, request, args, trace)
    if comparison is None or not is_wrong(comparison):
        return 0
    if request.config.strict or request.pair.target.dtype == torch.float32:
        return 1
    print_line("note: in half precision rounding decides near-ties; with --strict the ids are ar's")
    return 0


def stream(
    request: Request,
    args: argparse.Namespace,
    tally: Tally,
    trace: Trace | None,
) -> None:
    """Generate and print the text, then its summary. If something ends it early, the tally has the
    text so far."""
    is_streaming = not args.json and not args.show_tree  # text and trees would be mixed

    def on_step(step: Step) -> None:
        if step.draft_overflowed and not tally.draft_overflowed:
            print_line("")  # the line may already have text
            print_line(overflow_note(request.pair.draft))
        if trace:
            trace.add(step)
        tally.add(step)
        if args.show_tree and tally.n_steps > 1:  # the first step is the prefill's
            show_tree(step, tally.n_steps - 1, request.pair.tokenizer)

    def pieces() -> Iterator[str]:
        tally.finish_reason = yield from request.text(on_step, observer=trace)

    if args.show_tree:
        print_line(LEGEND)
    try:
        for piece in pieces():
            tally.pieces.append(piece)
            if is_streaming:
                print(piece, end="", flush=True)
    finally:
        if tally.ids:
            if not args.json:
                print("" if is_streaming else "".join(tally.pieces), flush=True)
            print_summary(request, tally)


def show_tree(step: Step, number: int, tokenizer: Tokenizer) -> None:
    """Print a summary line and the tree of an iteration on stderr."""
    print_line(f"iteration {number}: {summarise_step(step)}")
    print(draw_tree(step, tokenizer, sys.stderr.isatty()), file=sys.stderr, flush=True)


def summarise_step(step: Step) -> str:
    """Return the line above a drawn tree."""
    n_accepted = len(step.path) - 1
    accepted = f"{n_accepted} of {step.n_drafted} accepted"
    n_retrieved = sum(are_retrieved(step.tree))
    if n_retrieved:
        accepted += f" ({step.n_drafted - n_retrieved} drafted, {n_retrieved} retrieved)"
    return f"{accepted}, depth {max(step.tree.depths)}, {step.ms:.1f} ms"


def summarise(metrics: Metrics) -> str:
    """Return the summary of a generation: a line, then its acceptance by depth if it drafted."""
    first = f"first token after {metrics.ttft_ms:.0f} ms"
    if not metrics.iterations:
        return f"1 token, {first}"
    rates = f"{metrics.throughput:.1f} tokens/s, {metrics.tokens_per_iter:.2f} tokens/iter"
    line = f"{metrics.new_tokens} tokens, {rates}, {first}"
    by_depth = zip(metrics.depths["accepted"], metrics.depths["nodes"], strict=True)
    shares = " ".join(f"{n_accepted}/{n_nodes}" for n_accepted, n_nodes in by_depth)
    if not shares:
        return line
    return line + "\n" + textwrap.fill(f"accepted/nodes by depth: {shares}", 80)


def print_summary(request: Request, tally: Tally) -> None:
    """Print the summary of a generation, and the time of captures, which it excludes."""
    print_line(summarise(tally.metrics()))
    n_graphs, capture_s = request.pair.captured()
    if n_graphs:
        graphs = "graph" if n_graphs == 1 else "graphs"
        print_line(f"captured {n_graphs} {graphs} in {capture_s:.1f} s so far, not counted above")


def report(request: Request, tally: Tally, comparison: Comparison | None) -> dict:
    """Return the object of --json, except for its settings."""
    n_graphs, capture_s = request.pair.captured()
    found = {
        "token_ids": tally.ids,
        "text": "".join(tally.pieces),
        "finish_reason": tally.finish_reason,
        "metrics": asdict(tally.metrics()),
        "versions": versions(),
        "graphs": {"n": n_graphs, "capture_s": capture_s},
    }
    if request.logprobs is not None:
        found["logprobs"] = describe_logprobs(tally.logprobs, request.pair.tokenizer)
    if comparison:
        found["compare"] = comparison
    return found


def describe_logprobs(logprobs: list[TokenLogprob], tokenizer: Tokenizer) -> list[dict]:
    """Return the log-probabilities of --json: of each id of the text, and of the likeliest ids."""

    def describe(id: int, logprob: float) -> dict:
        return {"id": id, "token": tokenizer.decode([id], False), "logprob": logprob}

    return [
        describe(each.id, each.logprob) | {"top": [describe(*other) for other in each.top]}
        for each in logprobs
    ]


def write_outputs(
    found: dict, request: Request, args: argparse.Namespace, trace: Trace | None
) -> None:
    """Print the object of --json, and write the page and the trace, as the options ask."""
    if trace and rank() == 0:
        found_there = {"command": args.command, "meanings": meanings(request.config.settings)}
        found_there["base"] = describe_base(request.config.settings)
        content = trace.as_json(request.prompt, found | found_there)
        save_trace(content, args.html, args.trace)
    if args.json:
        print(json.dumps(found), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    parser.set_defaults(command=[parser.prog, *words])  # the page shows how to repeat the run
    return run_on_ranks(partial(run_command_line, partial(write, parser), parser, arguments))
