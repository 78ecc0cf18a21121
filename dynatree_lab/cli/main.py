"""The full program: a generation per prompt, streamed text, summary and reports.

main(["--prompt", "She opened the door", "--method", "auto"])
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dynatree_lab.cli.compare import (
    compare,
    describe_comparison,
    is_wrong,
    reference_of,
    unknown_distribution,
)
from dynatree_lab.cli.load import add_load_option
from dynatree_lab.cli.options import (
    PAIRS,
    add_method_options,
    add_model_options,
    add_sampling_options,
    choose_config,
    open_pair,
    overflow_note,
    require_fit,
    warn_of_length,
)
from dynatree_lab.cli.program import (
    Parser,
    command_name,
    print_line,
    report_mistake,
    run_command_line,
)
from dynatree_lab.cli.prompts import Prompt, read_prompts, read_text
from dynatree_lab.cli.terminal import LayerProgress
from dynatree_lab.drawing import LEGEND, draw_tree
from dynatree_lab.engine.checkpoint import first_line
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.engine.ranks import from_rank_0, rank, run_on_ranks, world_size
from dynatree_lab.errors import UsageError, writing
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.html_page import as_data, as_page
from dynatree_lab.methods import PROJECT_METHODS
from dynatree_lab.methods.eagle import EagleHead
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.metrics import summarise
from dynatree_lab.playground import as_playground, playground_data, record
from dynatree_lab.request import Request
from dynatree_lab.result import Result
from dynatree_lab.tokens import encode_prompt

DESCRIPTION = "Generate text by tree speculative decoding: %(prog)s --prompt TEXT [options]"
EXIT_STATUS = "exit status: 1 wrong ids (--compare) or closed stdout, 2 error, 130 interrupted"


def build_parser() -> Parser:
    parser = Parser(
        prog=command_name("dynatree_lab"),
        usage=argparse.SUPPRESS,
        description=DESCRIPTION,
        epilog=EXIT_STATUS,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=25),
    )
    parser.repeatable = ("--set", "--stop", "--load")
    parser.less_memory = "a 16-bit --dtype, a shorter prompt, fewer --max-new-tokens, a --window"
    parser.less_memory += ", --target-memory, a smaller --target"
    add_input_options(parser.add_argument_group("input"))
    method = parser.add_argument_group("method")
    add_method_options(method)
    add_load_option(method)
    add_sampling_options(parser.add_argument_group("sampling"))
    add_model_options(parser.add_argument_group("models"), PAIRS)
    add_output_options(parser.add_argument_group("output"))
    return parser


def add_input_options(group: argparse._ArgumentGroup) -> None:
    file = "UTF-8 file, without its last newline; - is stdin"
    prompt = group.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help=file)
    prompts = 'prompts: lines of JSON ("prompt", "turns") or plain text; each has a seed one '
    prompts += "higher than the one before; without --html, --trace and --playground"
    prompt.add_argument("--prompts", metavar="FILE", help=prompts)
    add = group.add_argument
    limit = "maximum number of new tokens (default 128, with --playground 64)"
    add("--max-new-tokens", type=int, metavar="N", help=limit)
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before TEXT (repeatable)")
    add("--ignore-eos", action="store_true", help="continue after the end-of-text token")


def add_output_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--compare", action="store_true", help="also run ar; compare speed and token ids")
    add("--show-tree", action="store_true", help="draw the tree of every iteration on stderr")
    add("--json", action="store_true", help="print a JSON object instead of each text")
    add("--html", metavar="FILE", help="write a page that shows the run step by step")
    add("--trace", metavar="FILE", help="write the data of that page as JSON")
    playground = "write a page that replays the text under other settings"
    add("--playground", metavar="FILE", help=playground)
    logprobs = (
        "with --json or --trace: log-probabilities of the text's tokens and of the K likeliest"
    )
    add("--logprobs", type=int, nargs="?", const=0, metavar="K", help=logprobs)


def prepare(args: argparse.Namespace) -> tuple[list[Prompt], Request]:
    """Check all options and load the models. Return the prompts, and a request that has none
    yet."""
    if args.max_new_tokens is None:
        args.max_new_tokens = 64 if args.playground else 128
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens is {args.max_new_tokens}, it must be at least 1")
    if args.logprobs is not None:
        if args.logprobs < 0:
            raise UsageError(f"--logprobs is {args.logprobs}, it must be at least 0")
        if not (args.json or args.trace):
            raise UsageError("--logprobs needs --json or --trace")
    config = choose_config(args)
    is_drafting = config.method.needs_draft
    if args.playground:
        require_playground(args, config)
    require_files(args)
    prompts = from_rank_0(choose_prompts, args)
    if (args.draft or args.draft_dtype) and not is_drafting:
        print_line(f"note: --method {args.method} ignores --draft and --draft-dtype")
    pair = open_pair(args, is_drafting, print_line)
    require_fit(config, pair)
    if args.playground and isinstance(pair.draft, EagleHead):
        raise UsageError("--playground needs a draft model, and --draft is an EAGLE head")
    if pair.target_memory is not None and sys.stderr.isatty():
        pair.target.layers.on_layer = LayerProgress(pair.target.layers.n_layers)
    eos_ids = () if args.ignore_eos else pair.target.config.eos_ids
    if config.window != FULL_ATTENTION:
        kept = f"{config.window.sinks} sinks and the latest {config.window.size} tokens or more"
        print_line(f"note: the caches keep {kept}, so the text differs from full attention")
    request = Request(
        pair,
        [],
        config,
        args.max_new_tokens,
        eos_ids=eos_ids,
        stop=args.stop,
        logprobs=args.logprobs,
        is_recorded=bool(args.html or args.trace),
    )
    return prompts, request


def require_files(args: argparse.Namespace) -> None:
    """Raise UsageError for files of a run that cannot be written, before a long run."""
    files = [name for name in (args.html, args.trace, args.playground) if name]
    if args.prompts and files:
        what = "--html, --trace and --playground show one run"
        raise UsageError(f"{what}; use --prompt instead of --prompts")
    for name in files:
        if not Path(name).absolute().parent.is_dir():
            raise UsageError(f"{name} cannot be written: no such folder")
        if Path(name).is_dir():
            raise UsageError(f"{name} cannot be written: it is a folder")


def require_playground(args: argparse.Namespace, config: GenerationConfig) -> None:
    """Raise UsageError for options that a playground's replay does not have."""
    if not config.sampling.is_greedy:
        raise UsageError("--playground replays greedy text; leave out --temperature")
    if not config.method.needs_draft:
        what = f"--playground records a draft model, and --method {args.method} has none"
        raise UsageError(f"{what}; leave out --method")
    if not config.works_on_any_model:
        raise UsageError("--playground replays plain passes; leave out --window and --strict")


def choose_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompt, or those of --prompts, and print how many these are."""
    if args.prompts is None:
        return [{"prompt": read_text(args.prompt_file) if args.prompt_file else args.prompt}]
    prompts, unit = read_prompts(Path(args.prompts))
    print_line(f"note: {args.prompts} has {len(prompts)} prompts, {unit}")
    return prompts


def with_prompt(request: Request, text: str, i: int) -> Request:
    """Return the request with prompt i, whose seed is i higher if text is sampled. Warn if the
    sequence is longer than the target was trained for."""
    sampling, pair = request.config.sampling, request.pair
    ids = encode_prompt(text, pair.tokenizer, pair.target.config.vocab_size)
    if not sampling.is_greedy:
        try:
            sampling = replace(sampling, seed=sampling.seed + i)
        except ValueError as error:
            raise UsageError(f"--{error}") from error
    if request.config.window == FULL_ATTENTION:
        warn_of_length(pair, len(ids) + request.max_new_tokens)
    return replace(request, prompt=ids, config=replace(request.config, sampling=sampling))


def write(parser: Parser, args: argparse.Namespace) -> int:
    """Run the parsed command line and return the exit status, the highest one of all prompts.

    A mistake in one of --prompts is reported, and the others go on.
    """
    prompts, request = prepare(args)
    if args.method not in PROJECT_METHODS and not args.load:
        args.command = []  # the method is that of a program which has called lab.run
    if args.prompts is None:
        request = with_prompt(request, prompts[0]["prompt"], 0)
        return write_one(Result(request, args.command), args, {})
    status = 0
    for i, prompt in enumerate(prompts):
        name, result = f"prompt {i + 1} of {len(prompts)}", None
        print_line(name)
        others = prompt | {"settings": {"prompt_number": i + 1}}
        try:
            result = Result(with_prompt(request, prompt["prompt"], i), args.command)
            found = write_one(result, args, others)
        except Exception as error:
            # Memory may be short on one rank only, and the others then wait for it
            if world_size() > 1 and not isinstance(error, UsageError):
                raise
            found = report_mistake(error, parser, f"{name}: ")
            if args.json and not (result and result.steps):  # it has no object yet
                print(json.dumps(others | {"error": first_line(error)}), flush=True)
        status = max(status, found)
    return status


def write_one(result: Result, args: argparse.Namespace, others: dict) -> int:
    """Write the text of a result and return the exit status. others: what --json prints besides."""
    request, comparison = result.request, None
    if args.compare:
        for warm_up in (request, reference_of(request)):  # so that neither is the first to run
            list(islice(warm_up.decode(), warm_up.pair.warm_up_steps))
    end: dict = {"interrupted": True}  # or failed, until everything is done
    try:
        stream(result, args)
        if args.compare:
            end["compare"] = comparison = compare(request, result.steps)
            print_line(describe_comparison(comparison))
            if comparison["exact"] is None and args.method not in PROJECT_METHODS:
                print_line(f"note: {unknown_distribution([args.method])}")
        end["interrupted"] = False
    except Exception as error:
        end["error"] = first_line(error)
        raise
    finally:
        if result.steps:
            write_outputs(result, args, others, end)
    if args.playground:
        save_playground(result, args)
    if comparison is None or not is_wrong(comparison):
        return 0
    if request.config.strict or request.pair.target.dtype == torch.float32:
        return 1
    print_line("note: in half precision rounding decides near-ties; with --strict the ids are ar's")
    return 0


def stream(result: Result, args: argparse.Namespace) -> None:
    """Generate and print the text, then its summary. If something ends it early, the result has the
    text so far."""
    is_streaming = not args.json and not args.show_tree  # text and trees would be mixed
    pair, has_overflowed = result.request.pair, False

    def on_step(step: Step) -> None:
        nonlocal has_overflowed
        if step.draft_overflowed and not has_overflowed:
            print_line("")  # the line may already have text
            print_line(overflow_note(pair.draft))
        has_overflowed |= step.draft_overflowed
        if args.show_tree and len(result.steps) > 1:  # the first step is the prefill's
            show_tree(step, len(result.steps) - 1, pair.tokenizer)

    if args.show_tree:
        print_line(LEGEND)
    try:
        for piece in result.write(on_step):
            if is_streaming:
                print(piece, end="", flush=True)
    finally:
        if result.steps:
            if not args.json:
                print("" if is_streaming else result.text, flush=True)
            print_summary(result)


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


def print_summary(result: Result) -> None:
    """Print the summary of a generation, and the time of captures, which it excludes."""
    print_line(summarise(result.metrics))
    n_graphs, capture_s = result.request.pair.captured()
    if n_graphs:
        graphs = "graph" if n_graphs == 1 else "graphs"
        print_line(f"captured {n_graphs} {graphs} in {capture_s:.1f} s so far, not counted above")


def write_outputs(result: Result, args: argparse.Namespace, others: dict, end: dict) -> None:
    """Print the object of --json, and write the page and the trace, as the options ask. others,
    end: what it has besides the result's report, whose keys replace those of `others`."""
    report = result.report()
    report["settings"] |= others.get("settings", {})
    found = others | report | end
    if (args.html or args.trace) and rank() == 0:
        save_trace(result.data | found, args.html, args.trace)
    if args.json:
        print(json.dumps(found), flush=True)


def save_trace(content: dict, page: str | None, trace: str | None) -> None:
    """Write the page, the trace or both, and print their names. Raises UsageError if a file cannot
    be written."""
    for kind, name, form in (("trace", trace, as_data), ("page", page, as_page)):
        if name:
            with writing(name):
                Path(name).write_text(form(content), encoding="utf-8")
            print_line(f"{kind} written to {name}")


def save_playground(result: Result, args: argparse.Namespace) -> None:
    """Record the draft's candidates, write the playground and print its name. Raises UsageError if
    the file cannot be written, or if the text is too short."""
    print_line("recording the draft's candidates along the text")
    text, candidates = record(result)
    options = []  # that choose the models
    for name in ("pair", "target", "draft", "device", "dtype", "draft_dtype", "target_memory"):
        if value := getattr(args, name):
            options += [f"--{name.replace('_', '-')}", value]
    tokenizer = result.request.pair.tokenizer
    page = as_playground(playground_data(text, candidates, tokenizer, options))
    if rank() == 0:
        with writing(args.playground):
            Path(args.playground).write_text(page, encoding="utf-8")
        print_line(f"playground of {len(page) // 1000} kB written to {args.playground}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else map(str, arguments)
    command = [*parser.prog.split(), *words]  # the page shows how to repeat the run
    parser.set_defaults(command=command)
    return run_on_ranks(partial(run_command_line, partial(write, parser), parser, arguments))


run = main  # its name in dynatree_lab
