"""python dynatree.py: the options, one generation, and what is said of it.

main(["--prompt", "The ship sailed at dawn", "--method", "auto"])
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from tqdm import tqdm

from cli.compare import Comparison, Digests, compare, reference_of
from cli.errors import Parser, UsageError, run_command_line, say, tell
from cli.metrics import Metrics, Tally, versions
from cli.models import Request, open_pair, overflow_note, require_graphs, warn_of_length
from cli.options import (
    add_model_options,
    add_way_options,
    choose_way,
    read_prompt,
    require_fit,
)
from cli.page import require_places, save_trace
from cli.terminal import LEGEND, describe, draw_tree, harmless, has_color
from cli.tokens import encode
from cli.trace import Trace, describe_base, meanings
from engine.decoding import Step
from engine.model import FastGPTNeoX
from engine.streaming import WHOLE_TEXT
from methods import METHODS
from methods.acceptances import default_of
from methods.rules import are_retrieved
from methods.sampler import GREEDY
from parallel.driver import on_ranks
from parallel.ranks import Ranks

WARM_UP_STEPS = 8
LONG_PROMPT = 2000  # tokens
ENDINGS = """exit status:
  0    or 1: --compare found a text that is not ar's, or the reader has gone
  2    a mistake, in one line
  70   an error that nobody foresaw, in one line; --debug shows where
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
    add_way_options(parser)
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


@dataclass
class Written:
    """What there is of a text, whatever ends it."""

    tally: Tally = field(default_factory=Tally)
    text: io.StringIO = field(default_factory=io.StringIO)
    trace: Trace | None = None
    digests: Digests | None = None  # of its logits, if they are to be compared
    finish_reason: str | None = None  # "eos", "stop" or "length", once it has ended


def prepare(args: argparse.Namespace, ranks: Ranks | None) -> tuple[Request, dict]:
    """Check everything that was asked for and load the models; also the settings to report."""
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens}: at least 1")
    way = choose_way(args)
    is_drafting = way.rule().max_depth > 0
    if args.plain and (ranks or not way.is_plain):
        raise UsageError("--plain has no strict passes, window, graphs or ranks")
    text = read_prompt(args.prompt, args.prompt_file)
    require_places(args.page, args.trace)
    if (args.draft or args.draft_dtype) and not is_drafting:
        say(f"note: --method {args.method} needs no draft: --draft, --draft-dtype have no effect")
    require_graphs(args)
    pair, models = open_pair(args, is_drafting, say, ranks, args.plain)
    require_fit(way, pair)
    config = pair.target.config
    prompt = encode(text, pair.tokenizer, config.vocab_size)
    eos_ids = () if args.ignore_eos else config.eos_ids
    if way.window == WHOLE_TEXT:
        warn_of_length(pair, len(prompt) + args.max_new_tokens)
    else:
        kept = f"{way.window.sinks} sinks and the latest {way.window.size} tokens or more"
        say(f"note: the caches keep {kept}; this is not the text of full attention")
    request = Request(pair, prompt, way, args.max_new_tokens, eos_ids, args.stop)
    return request, {"method": args.method, **asdict(way.settings), **models, **rest_of(request)}


def rest_of(request: Request) -> dict:
    """What is reported of a request beside its method and models."""
    way, rule = request.way, request.way.rule()
    accepts = way.acceptance or default_of(rule)
    return {
        "max_new_tokens": request.max_new_tokens,
        "eos_ids": request.eos_ids,
        "stop_texts": request.stop,  # "stop" is a setting of methods
        "strict": way.strict,
        "prompt_tokens": len(request.prompt),
        "sampling": None if way.sampling == GREEDY else asdict(way.sampling),
        "acceptance": None if way.sampling.is_greedy else accepts,
        "window": None if way.window == WHOLE_TEXT else asdict(way.window),
    }


def write(args: argparse.Namespace, ranks: Ranks | None) -> int:
    """The command line, once parsed; ranks: with whom the target is computed. Returns the exit
    status."""
    request, reported = prepare(args, ranks)
    written = Written()
    if args.page or args.trace:
        written.trace = Trace(request.pair.tokenizer, request.way.settings, request.eos_ids)
    if args.compare:
        written.digests = Digests() if request.way.strict else None
        for warm_up in (request, reference_of(request)):  # whichever is first does not pay
            list(islice(warm_up.decode(), WARM_UP_STEPS))
    comparison = None
    is_interrupted = True  # or failed, until all is done
    try:
        stream(request, args, written)
        if args.compare:
            if request.stop:  # which ar ends before as well, but perhaps some tokens sooner
                request = replace(request, max_new_tokens=len(written.tally.ids))
            comparison = compare(request, written.tally, written.digests)
            say(comparison.line())
        is_interrupted = False
    finally:
        if written.tally.ids:
            found = report(request, written, comparison)
            found |= {"settings": reported, "interrupted": is_interrupted}
            hand_over(found, request, args, written.trace)
    if comparison is None or not comparison.is_wrong:
        return 0
    if request.way.strict or request.pair.target.dtype == torch.float32:
        return 1
    say("note: in half precision rounding decides near-ties; with --strict the ids are ar's")
    return 0


def stream(request: Request, args: argparse.Namespace, written: Written) -> None:
    """Write one text, printing as it goes; what ends it early leaves what there is."""
    is_streaming = not args.json and not args.show_tree  # trees and text would interleave
    if args.show_tree:
        say(LEGEND)

    def told(step: Step) -> None:
        if step.draft_overflowed and not written.tally.has_overflowed:
            tell(f"\n{overflow_note(request.pair.draft)}")  # text may stand on the line
        if written.trace:
            written.trace.add(step)
        written.tally.add(step)
        if args.show_tree and step.tree:
            say(f"iteration {written.tally.n_steps - 1}: {summarise_step(step)}")
            colors = has_color(sys.stderr)
            tell(draw_tree(step.tree, step.path, step.bonus, request.pair.tokenizer, colors))

    def pieces() -> Iterator[str]:
        written.finish_reason = yield from request.text(told, written.digests, written.trace)

    try:
        with reading(request):
            for piece in pieces():
                written.text.write(piece)
                if is_streaming:
                    put(piece)
    finally:
        if written.tally.ids:
            if not args.json:
                put("\n" if is_streaming else written.text.getvalue() + "\n")
            say_summary(request, written.tally)


@contextmanager
def reading(request: Request) -> Iterator[None]:
    """On a terminal, show how far a long prompt has been read, until it is; but by a plain model,
    or several ranks, who do not tell."""
    n_tokens, target = len(request.prompt), request.pair.target
    is_shown = n_tokens >= LONG_PROMPT and isinstance(target, FastGPTNeoX)
    if not is_shown or not sys.stderr.isatty():
        yield
        return

    def told(n: int) -> None:
        bar.update(n)
        if bar.n >= n_tokens:
            bar.close()

    with tqdm(total=n_tokens, unit="token", desc="prompt", leave=False) as bar:
        target.told = told
        try:
            yield
        finally:
            target.told = None


def put(text: str) -> None:
    """Text of the model's on stdout."""
    if sys.stdout.isatty():
        text = harmless(text)
    print(text, end="", flush=True)


def summarise_step(step: Step) -> str:
    """The line above a drawn tree."""
    n_accepted = len(step.path) - 1
    ms = step.draft_ms + step.verify_ms + step.other_ms
    accepted = f"{n_accepted} of {step.n_drafted} accepted"
    n_retrieved = sum(are_retrieved(step.tree))
    if n_retrieved:
        accepted += f" ({step.n_drafted - n_retrieved} drafted, {n_retrieved} retrieved)"
    return f"{accepted}, depth {max(step.tree.depths)}, {ms:.1f} ms"


def summarise(metrics: Metrics) -> str:
    """The line that ends every text."""
    first = f"first token after {metrics.ttft_ms:.0f} ms"
    if not metrics.iterations:
        return f"1 token, {first}"
    rates = f"{metrics.throughput:.1f} tokens/s, {metrics.tokens_per_iter:.2f} tokens/iter"
    return f"{metrics.new_tokens} tokens, {rates}, {first}"


def say_summary(request: Request, tally: Tally) -> None:
    """What ends every text, and what is in no figure of it."""
    say(summarise(tally.metrics()))
    n_graphs, capture_s = request.pair.captured()
    if n_graphs:
        graphs = "graph" if n_graphs == 1 else "graphs"
        say(f"captured {n_graphs} {graphs} in {capture_s:.1f} s, which no figure counts")


def report(request: Request, written: Written, comparison: Comparison | None) -> dict:
    """The object of --json, but for what was asked."""
    n_graphs, capture_s = request.pair.captured()
    found = {
        "token_ids": written.tally.ids.tolist(),
        "text": written.text.getvalue(),
        "finish_reason": written.finish_reason,
        "metrics": asdict(written.tally.metrics()),
        "versions": versions(),
        "graphs": {"n": n_graphs, "capture_s": capture_s},
    }
    if request.way.strict:
        target = request.pair.target
        found["steady_rows"] = target.pool.steady_rows(target)
    if comparison:
        found["compare"] = asdict(comparison)
    return found


def hand_over(found: dict, request: Request, args: argparse.Namespace, trace: Trace | None) -> None:
    """Print what --json is to say, and write the page and the trace."""
    try:
        if args.json:
            print(json.dumps(found), flush=True)
    finally:  # if nobody reads it any more, too
        if trace:
            found |= {"command": args.command, "meanings": meanings(request.way.settings)}
            found["base"] = describe_base(request.way.settings)
            save_trace(trace.as_json(request.prompt, found), args.page, args.trace)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    parser.set_defaults(command=[parser.prog, *words])  # the page says how to run it again

    def program(ranks: Ranks | None) -> int:
        return run_command_line(partial(write, ranks=ranks), parser, arguments)

    return on_ranks(program)
