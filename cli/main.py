"""python dynatree.py: its options, one generation, and what is printed of it.

main(["--prompt", "The ship sailed at dawn", "--method", "auto"])
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from cli.compare import (
    Comparison,
    Digests,
    compare,
    describe_comparison,
    is_wrong,
    reference_of,
)
from cli.errors import Parser, UsageError, run_command_line, say, write_stderr
from cli.metrics import Metrics, Tally, versions
from cli.models import Request, open_pair, overflow_note, require_graphs, warn_of_length
from cli.options import (
    add_generation_options,
    add_model_options,
    choose_config,
    read_prompt,
    require_fit,
)
from cli.page import require_places, save_trace
from cli.terminal import LEGEND, describe, draw_tree, harmless, has_color
from cli.tokens import encode
from cli.trace import Trace, describe_base, meanings
from engine.cache import invariant_rows
from engine.driver import on_ranks
from engine.generate import Step
from engine.model import FastGPTNeoX
from engine.passes import WHOLE_TEXT
from engine.ranks import Ranks
from methods import METHODS
from methods.acceptances import default_of
from methods.rules import are_retrieved
from methods.sampler import GREEDY

WARM_UP_STEPS = 8
LONG_PROMPT = 2000  # tokens
ENDINGS = """exit status:
  0    or 1: --compare found a text that is not ar's, or the reader has gone
  2    a mistake, in one line
  130  Ctrl-C, SIGTERM or SIGHUP: text, summary, --json object and page are kept
       as far as they came; another Ctrl-C or SIGTERM ends at once"""


def build_parser() -> Parser:
    parser = Parser(
        prog="dynatree.py",
        description="Write text with a GPT-NeoX target, sped up by a draft model's token trees.",
        epilog=f"{describe(METHODS)}\n\n{ENDINGS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.less_memory = "a 16-bit --dtype, a shorter prompt, fewer --max-new-tokens, a --window"
    parser.less_memory += ", a smaller --target"
    add = parser.add_argument
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    of_file = "a UTF-8 file of it, to 4 MB, but for its last line end; - is stdin"
    prompt.add_argument("--prompt-file", metavar="F", help=of_file)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="limit (default 128)")
    add_generation_options(parser)
    add_model_options(parser)
    add("--plain", action="store_true", help="by gpt_neox.py alone, as it is to be read: slower")
    add("--ignore-eos", action="store_true", help="go on past end-of-text")
    stop = "the text ends before it (again for several); figures and ids count what came with it"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--compare", action="store_true", help="also run ar: speedup, and are the ids equal?")
    add("--show-tree", action="store_true", help="draw every iteration's tree on stderr")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--page", metavar="FILE", help="write a page (HTML) that shows the run, tree by tree")
    add("--trace", metavar="FILE", help="and the data of it as JSON")
    return parser


def prepare(args: argparse.Namespace, ranks: Ranks | None) -> tuple[Request, dict]:
    """Check everything that was asked for, and load the models. Return the request, and the
    settings to report."""
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens}: at least 1")
    config = choose_config(args)
    is_drafting = config.make_rule().max_depth > 0
    if args.plain and (ranks or not config.works_on_plain_model):
        raise UsageError("--plain has no strict passes, window, graphs or ranks")
    text = read_prompt(args.prompt, args.prompt_file)
    require_places(args.page, args.trace)
    if (args.draft or args.draft_dtype) and not is_drafting:
        say(f"note: --method {args.method} needs no draft: --draft, --draft-dtype have no effect")
    require_graphs(args)
    pair, models = open_pair(args, is_drafting, say, ranks, args.plain)
    require_fit(config, pair)
    target = pair.target.config
    prompt = encode(text, pair.tokenizer, target.vocab_size)
    eos_ids = () if args.ignore_eos else target.eos_ids
    if config.window == WHOLE_TEXT:
        warn_of_length(pair, len(prompt) + args.max_new_tokens)
    else:
        kept = f"{config.window.sinks} sinks and the latest {config.window.size} tokens or more"
        say(f"note: the caches keep {kept}; this is not the text of full attention")
    request = Request(pair, prompt, config, args.max_new_tokens, eos_ids, args.stop)
    return request, {"method": args.method, **asdict(config.settings), **models, **rest_of(request)}


def rest_of(request: Request) -> dict:
    """Return what is reported of a request beside its method and models."""
    config, rule = request.config, request.config.make_rule()
    accepts = config.acceptance or default_of(rule)
    return {
        "max_new_tokens": request.max_new_tokens,
        "eos_ids": request.eos_ids,
        "stop_texts": request.stop,  # "stop" is a setting of methods
        "strict": config.strict,
        "prompt_tokens": len(request.prompt),
        "sampling": None if config.sampling == GREEDY else asdict(config.sampling),
        "acceptance": None if config.sampling.is_greedy else accepts,
        "window": None if config.window == WHOLE_TEXT else asdict(config.window),
    }


def write(args: argparse.Namespace, ranks: Ranks | None) -> int:
    """Carry out the parsed command line, and return the exit status.

    ranks: the processes that compute the target, if there are several.
    """
    request, reported = prepare(args, ranks)
    tally, trace, comparison = Tally(), None, None
    digests = Digests() if args.compare and request.config.strict else None
    if args.page or args.trace:
        trace = Trace(request.pair.tokenizer, request.config.settings, request.eos_ids)
    if args.compare:
        for warm_up in (request, reference_of(request)):  # whichever is first does not pay
            list(islice(warm_up.decode(), WARM_UP_STEPS))
    is_interrupted = True  # or failed, until all is done
    try:
        stream(request, args, tally, trace, digests)
        if args.compare:
            comparison = compare(request, tally, digests)
            say(describe_comparison(comparison))
        is_interrupted = False
    finally:
        if tally.ids:
            found = report(request, tally, comparison)
            found |= {"settings": reported, "interrupted": is_interrupted}
            hand_over(found, request, args, trace)
    if comparison is None or not is_wrong(comparison):
        return 0
    if request.config.strict or request.pair.target.dtype == torch.float32:
        return 1
    say("note: in half precision rounding decides near-ties; with --strict the ids are ar's")
    return 0


def stream(
    request: Request,
    args: argparse.Namespace,
    tally: Tally,
    trace: Trace | None,
    digests: Digests | None,
) -> None:
    """Write one text, and print it as it comes. If something ends it early, the tally has what
    there is, which is summed up."""
    is_streaming = not args.json and not args.show_tree  # trees and text would interleave

    def on_step(step: Step) -> None:
        if step.draft_overflowed and not tally.has_overflowed:
            write_stderr(f"\n{overflow_note(request.pair.draft)}")  # text may stand on the line
        if trace:
            trace.add(step)
        tally.add(step)
        if args.show_tree and step.tree:
            show_tree(step, tally.n_steps - 1, request.pair.tokenizer)

    def pieces() -> Iterator[str]:
        tally.finish_reason = yield from request.text(on_step, digests, trace)

    if args.show_tree:
        say(LEGEND)
    try:
        with prompt_bar(request):
            for piece in pieces():
                tally.pieces.append(piece)
                if is_streaming:
                    put(piece)
    finally:
        if tally.ids:
            if not args.json:
                put("\n" if is_streaming else "".join(tally.pieces) + "\n")
            say_summary(request, tally)


@contextmanager
def prompt_bar(request: Request) -> Iterator[None]:
    """Show on a terminal how much of a long prompt has been read. A plain model and several ranks
    do not report it."""
    n_tokens, target = len(request.prompt), request.pair.target
    is_shown = n_tokens >= LONG_PROMPT and isinstance(target, FastGPTNeoX)
    if not is_shown or not sys.stderr.isatty():
        yield
        return

    def advance(n: int) -> None:
        bar.update(n)
        if bar.n >= n_tokens:
            bar.close()

    with tqdm(total=n_tokens, unit="token", desc="prompt", leave=False) as bar:
        target.on_progress = advance
        try:
            yield
        finally:
            target.on_progress = None


def put(text: str) -> None:
    """Print text of the model's on stdout."""
    if sys.stdout.isatty():
        text = harmless(text)
    print(text, end="", flush=True)


def show_tree(step: Step, number: int, tokenizer: Tokenizer) -> None:
    """Draw the tree of an iteration on stderr, below a line about it."""
    say(f"iteration {number}: {summarise_step(step)}")
    is_colored = has_color(sys.stderr)
    write_stderr(draw_tree(step.tree, step.path, step.bonus, tokenizer, is_colored))


def summarise_step(step: Step) -> str:
    """Return the line above a drawn tree."""
    n_accepted = len(step.path) - 1
    ms = step.draft_ms + step.verify_ms + step.other_ms
    accepted = f"{n_accepted} of {step.n_drafted} accepted"
    n_retrieved = sum(are_retrieved(step.tree))
    if n_retrieved:
        accepted += f" ({step.n_drafted - n_retrieved} drafted, {n_retrieved} retrieved)"
    return f"{accepted}, depth {max(step.tree.depths)}, {ms:.1f} ms"


def summarise(metrics: Metrics) -> str:
    """Return the line that ends every text."""
    first = f"first token after {metrics.ttft_ms:.0f} ms"
    if not metrics.iterations:
        return f"1 token, {first}"
    rates = f"{metrics.throughput:.1f} tokens/s, {metrics.tokens_per_iter:.2f} tokens/iter"
    return f"{metrics.new_tokens} tokens, {rates}, {first}"


def say_summary(request: Request, tally: Tally) -> None:
    """Say what ends every text, and what is in no figure of it."""
    say(summarise(tally.metrics()))
    n_graphs, capture_s = request.pair.captured()
    if n_graphs:
        graphs = "graph" if n_graphs == 1 else "graphs"
        say(f"captured {n_graphs} {graphs} in {capture_s:.1f} s, which no figure counts")


def report(request: Request, tally: Tally, comparison: Comparison | None) -> dict:
    """Return the object of --json, but for what was asked."""
    n_graphs, capture_s = request.pair.captured()
    found = {
        "token_ids": tally.ids.tolist(),
        "text": "".join(tally.pieces),
        "finish_reason": tally.finish_reason,
        "metrics": asdict(tally.metrics()),
        "versions": versions(),
        "graphs": {"n": n_graphs, "capture_s": capture_s},
    }
    if request.config.strict:
        target = request.pair.target
        found["min_invariant_rows"] = invariant_rows(target)
    if comparison:
        found["compare"] = comparison
    return found


def hand_over(found: dict, request: Request, args: argparse.Namespace, trace: Trace | None) -> None:
    """Print the object if --json asks for it, and write the page and the trace."""
    try:
        if args.json:
            print(json.dumps(found), flush=True)
    finally:  # the page is written even if the reader of the object has gone
        if trace:
            found |= {"command": args.command, "meanings": meanings(request.config.settings)}
            found["base"] = describe_base(request.config.settings)
            save_trace(trace.as_json(request.prompt, found), args.page, args.trace)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    parser.set_defaults(command=[parser.prog, *words])  # the page says how to run it again

    def program(ranks: Ranks | None) -> int:
        return run_command_line(partial(write, ranks=ranks), parser, arguments)

    return on_ranks(program)
