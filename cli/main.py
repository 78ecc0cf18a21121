"""python dynatree.py: the options, one generation, and what is said of it.

main(["--prompt", "The ship sailed at dawn", "--method", "auto"])
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch

from cli.compare import Comparison, Digests, compare, reference_of
from cli.errors import Parser, UsageError, run_command_line, say, tell
from cli.interrupts import interrupts
from cli.metrics import Metrics, Tally, versions
from cli.models import Pair, Request, encode, open_pair, overflow_note
from cli.options import (
    add_model_options,
    add_sampling_options,
    choose_sampling,
    choose_window,
    parse_settings,
    read_prompt,
    require_drawing,
)
from cli.page import not_written, save_trace
from cli.ranks import on_ranks
from cli.terminal import TextStream, describe, draw_tree, harmless, has_color
from cli.trace import Trace, describe_base, meanings
from draft_tree import Settings
from dynatree import COMMITS, Step
from engine.files import require_writable
from engine.streaming import WHOLE_TEXT, Window
from engine.strict import MAX_DEPTH
from methods import METHODS
from parallel.target import Mail

WARM_UP_STEPS = 8
DEPTHS = ("K", "D", "D_max")  # settings that say how deep a tree may be
ENDINGS = """exit status:
  0    or 1 if --compare finds a text that is not ar's, or whoever reads this one has gone
  2    a mistake, in one line
  70   an error that nobody foresaw, in one line; --debug shows where
  130  Ctrl-C: the text, its summary and its --json object are kept as far as they came;
       another one, more than a second later, ends at once"""


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
    add("--prompt", metavar="TEXT", help="the text to continue")
    add("--prompt-file", metavar="F", help="a UTF-8 file, to 4 MB; - is standard input")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="limit (default 128)")
    add("--method", default="dynatree", metavar="M", help=f"{', '.join(METHODS)} (dynatree)")
    add_sampling_options(parser)
    add("--window", type=int, metavar="N", help="keep the latest N tokens in the cache (all)")
    add("--sinks", type=int, metavar="N", help="and with a window the first N (4)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a method's setting")
    add("--commit", choices=COMMITS, default="keep", help="keep rows, or rebuild as the paper")
    add("--strict", action="store_true", help="strict ar's logits, bit for bit, in any dtype")
    add_model_options(parser)
    add("--ignore-eos", action="store_true", help="go on past end-of-text")
    add("--compare", action="store_true", help="also run ar: speedup, and are the ids equal?")
    add("--show-tree", action="store_true", help="draw every iteration's tree on stderr")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--page", metavar="FILE", help="write a page (HTML) that shows the run, tree by tree")
    add("--trace", metavar="FILE", help="and the data of it as JSON")
    return parser


def stream(
    request: Request,
    settings: Settings,
    args: argparse.Namespace,
    written: Tally,
    inspect: Digests | None,
    trace: Trace | None,
) -> None:
    """Write one text, printing as it goes and adding it up; what ends it early leaves both."""
    has_overflowed = False  # the draft, and it was said
    tokenizer = request.pair.tokenizer
    text = TextStream(tokenizer)
    is_streaming = not args.json and not args.show_tree  # trees and text would interleave
    try:
        with interrupts(raised=True):
            for step in request.decode(settings, inspect, trace):
                if step.tree and step.tree.has_overflowed and not has_overflowed:
                    has_overflowed = True
                    say_between(text, overflow_note(request.pair.draft))
                keep(step, written, trace)
                if is_streaming:
                    put(text.push(request.printable(step.tokens)))
                if args.show_tree and step.tree:
                    say(f"iteration {written.n_steps - 1}: {summarise_step(step)}")
                    colors = has_color(sys.stderr)
                    tell(draw_tree(step.tree, step.path, step.bonus, tokenizer, colors))
    finally:
        if is_streaming and written.ids:
            put(text.finish() + "\n")
        elif args.show_tree and not args.json and written.ids:
            put(tokenizer.decode(request.printable(written.ids.tolist())) + "\n")
        if written.ids:
            say_summary(written.metrics(), request.pair)


def keep(step: Step, written: Tally, trace: Trace | None) -> None:
    """Add a step to what there is of the text, and to its trace: to both, or to neither."""
    if trace is None:
        written.add(step)
        return
    with interrupts(raised=False):
        written.add(step)
        trace.add(step)


def put(text: str) -> None:
    """Text of the model's on stdout."""
    if sys.stdout.isatty():
        text = harmless(text)
    print(text, end="", flush=True)


def say_between(text: TextStream, line: str) -> None:
    """A line on stderr while text streams to stdout: where both meet, on a line of its own."""
    if text.is_mid_line and sys.stdout.isatty():
        tell("")
    say(line)


def summarise_step(step: Step) -> str:
    """The line above a drawn tree."""
    n_accepted = len(step.path) - 1
    ms = step.draft_ms + step.verify_ms + step.other_ms
    n_retrieved = sum(step.tree.are_retrieved)
    sources = f"{step.n_drafted - n_retrieved} drafted, {n_retrieved} retrieved +"
    accepted = f"{n_accepted} of {step.n_drafted} accepted ({sources})"
    return f"{accepted}, depth {step.tree.depth}, {ms:.1f} ms"


def summarise(metrics: Metrics) -> str:
    """The line that ends every text."""
    first = f"first token after {metrics.ttft_ms:.0f} ms"
    if not metrics.iterations:
        return f"1 token, {first}"
    rates = f"{metrics.throughput:.1f} tokens/s, {metrics.tokens_per_iter:.2f} tokens/iter"
    return f"{metrics.new_tokens} tokens, {rates}, {first}"


def prepare(args: argparse.Namespace, mail: Mail | None) -> tuple[Request, Settings, dict]:
    """Check everything that was asked for and load the models; also the settings to report."""
    if args.method not in METHODS:
        raise UsageError(f"unknown method {args.method!r}; there are {', '.join(METHODS)}")
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens}: at least 1")
    settings = parse_settings(METHODS[args.method], args.set)
    rule = settings.rule()
    sampling = choose_sampling(args.temperature, args.top_p, args.seed, args.draft_temperature)
    if args.draft_temperature is not None:
        require_drawing(args.method, rule)
    text = read_prompt(args.prompt, args.prompt_file)
    require_places(args)
    if args.draft and not rule.max_depth:
        say(f"note: --method {args.method} needs no draft; {args.draft} is not loaded")
    if args.draft_dtype and not rule.max_depth:
        say(f"note: --method {args.method} needs no draft; --draft-dtype has no effect")
    if args.strict:
        note_depth(settings)
    pair, models = open_pair(args, rule.max_depth > 0, say, mail)
    window = choose_window(args.window, args.sinks, rule.max_rows, pair)
    prompt = encode(text, pair.tokenizer, pair.target.config.vocab_size)
    warn_of_length(len(prompt), args.max_new_tokens, window, pair)
    eos_ids = () if args.ignore_eos else pair.target.config.eos_ids
    options = {"max_new_tokens": args.max_new_tokens, "eos_ids": eos_ids, "commit": args.commit}
    options["strict"] = args.strict
    reported = {"method": args.method, **asdict(settings), **models, **options}
    reported["prompt_tokens"] = len(prompt)
    reported["sampling"] = asdict(sampling) if sampling else None
    reported["window"] = asdict(window) if args.window else None
    options["sampling"] = sampling
    options["window"] = window
    return Request(pair, prompt, options), settings, reported


def require_places(args: argparse.Namespace) -> None:
    """Raise UsageError where the page or the trace could not be written, or would be over what is
    read."""
    places = {}
    for option in ("page", "trace"):
        name = getattr(args, option)
        if name is not None:
            try:
                require_writable(Path(name))
            except (OSError, ValueError) as error:
                raise not_written(name, error) from error
            places[option] = os.path.realpath(name)
    if args.prompt_file is not None:
        places["prompt-file"] = os.path.realpath(args.prompt_file)
    if len(set(places.values())) < len(places):
        raise UsageError(f"--{' and --'.join(places)} must not be one file")


def note_depth(settings: Settings) -> None:
    """Say if a strict tree will be less deep than these settings allow."""
    for name, value in asdict(settings).items():
        if name in DEPTHS and value > MAX_DEPTH:
            say(f"note: {name}={value}, but with --strict a tree is {MAX_DEPTH} deep at most")


def warn_of_length(n_prompt: int, n_new: int, window: Window, pair: Pair) -> None:
    """Say if the text will be that of a window, or longer than what the target was trained for."""
    n_trained = pair.target.config.max_positions
    if window is not WHOLE_TEXT:
        kept = f"{window.sinks} sinks and the latest {window.size} tokens or more"
        say(f"note: the caches keep {kept}; this is not the text of full attention")
    elif n_prompt + n_new > n_trained:
        say(
            f"warning: {n_prompt} prompt and {n_new} new tokens exceed the "
            f"{n_trained} positions the target was trained for"
        )


def write(args: argparse.Namespace) -> int:
    """The command line, once parsed. Returns the exit status."""
    with on_ranks() as mail:
        request, settings, reported = prepare(args, mail)
        trace = None
        if args.page or args.trace:
            trace = Trace(request.pair.tokenizer, settings, request.options["eos_ids"])
        if args.compare:  # warm up, so that whichever is first does not pay for it
            for warm_up in (settings, reference_of(request, settings)):
                list(islice(request.decode(warm_up), WARM_UP_STEPS))
        is_compared = args.compare and args.strict and not request.options["sampling"]
        digests = Digests() if is_compared else None
        written = Tally()
        comparison = None
        is_interrupted = True  # or failed, until all is done
        with interrupts(raised=False):  # but where the work is: what was written is not to be lost
            try:
                stream(request, settings, args, written, digests, trace)
                if args.compare:
                    comparison = compare_aloud(request, settings, written, digests)
                is_interrupted = False
            finally:
                if written.ids and (args.json or trace):
                    found = report(request, written, comparison)
                    found |= {"settings": reported, "interrupted": is_interrupted}
                    hand_over(found, request, settings, args, trace)
        is_exact = args.strict or request.pair.target.dtype == torch.float32  # or ought to be
        return int(comparison is not None and comparison.is_wrong and is_exact)


def hand_over(
    found: dict, request: Request, settings: Settings, args: argparse.Namespace, trace: Trace | None
) -> None:
    """Print what --json is to say, and write the page and the trace."""
    if args.json:
        print(json.dumps(found), flush=True)
    if trace:
        found |= {"command": args.command, "meanings": meanings(settings)}
        found["base"] = describe_base(settings)
        save_trace(trace.as_json(request.prompt, found), args.page, args.trace)


def compare_aloud(
    request: Request, settings: Settings, written: Tally, digests: Digests | None
) -> Comparison:
    """Hold the text against ar's, and say the result."""
    with interrupts(raised=True):
        comparison = compare(request, settings, written, digests)
        say(comparison.line())
        if comparison.control:
            say(comparison.control_line())
        return comparison


def say_summary(metrics: Metrics, pair: Pair) -> None:
    """What ends every text, and what is in no figure of it."""
    say(summarise(metrics))
    n_graphs, capture_s = pair.captured()
    if n_graphs:
        say(f"captured {n_graphs} graphs in {capture_s:.1f} s, which no figure counts")


def report(request: Request, written: Tally, comparison: Comparison | None) -> dict:
    """The object of --json, but for what was asked."""
    ids = written.ids.tolist()
    n_graphs, capture_s = request.pair.captured()
    found = {
        "token_ids": ids,
        "text": request.pair.tokenizer.decode(request.printable(ids)),
        "metrics": asdict(written.metrics()),
        "versions": versions(),
        "graphs": {"n": n_graphs, "capture_s": capture_s},
    }
    if request.options["strict"]:
        target = request.pair.target
        found["steady_rows"] = target.pool.steady_rows(target)
    if comparison:
        found["compare"] = asdict(comparison)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    parser.set_defaults(command=[parser.prog, *words])  # the page says how to run it again
    return run_command_line(write, parser, arguments)
