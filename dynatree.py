"""DynaTree decoding: the loop, the method table, the command line.

Each iteration drafts a tree of guesses below the last committed token, lets the target read the
whole tree in one pass, and keeps the path on which the target agrees, plus the target's own next
token. The text is exactly what the target alone would write. Paper: DynaTree v2, Algorithm 1.

    python dynatree.py --prompt "The ship sailed at dawn" --max-new-tokens 64

    for step in generate(target, draft, prompt_ids, DynaTree(), max_new_tokens=64):
        print(step.tokens)
"""

import argparse
import io
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice, pairwise

import torch
from torch import Tensor

from cli.inputs import (
    Pair,
    Parser,
    UsageError,
    add_model_options,
    add_sampling_options,
    choose_sampling,
    choose_window,
    encode,
    open_pair,
    parse_settings,
    read_prompt,
)
from cli.terminal import TextStream, describe, draw_tree
from draft_tree import MAX_ROWS, Rule, Settings, Tree, grow, lone, to_host
from engine.caches import require_caches
from engine.checkpoint import CheckpointError, HubUnreachable, first_line
from engine.memory import OutOfMemory
from engine.sampling import Sampler, Sampling
from engine.streaming import WHOLE_TEXT, Window
from gpt_neox import GPTNeoX, KVCache
from methods import METHODS
from methods.static import Alone
from verify import accept_greedy, accept_sampled, tree_mask, tree_positions

COMMITS = ("keep", "rebuild")
TIE = 1e-4  # a top-2 gap below it, in float32, is decided by rounding
WARM_UP_STEPS = 8
CONTROL_ROWS = 16  # of ar's passes, where it shows what rounding alone changes
WITHOUT_NETWORK = "--target models/tiny/target --draft models/tiny/draft ..."


class NonFiniteLogits(Exception):
    """The target produced infinite or undefined logits, so it has no next token."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one commit adds to the text; the first step is prefill's token and has no tree."""

    tokens: list[int]  # new ids, after the EOS and limit cut
    tree: Tree | None = None
    path: Sequence[int] = (0,)  # accepted rows of the tree, root first; as many as were committed
    bonus: int = -1  # the target's token after the path, even if the cut removed it
    draft_ms: float = 0.0  # forwards of the draft
    verify_ms: float = 0.0  # forwards of the target: prefill, verification, rebuild
    other_ms: float = 0.0  # everything else
    n_drafted: int = 0  # nodes of the tree, the root not counted


class Stopwatch:
    """Milliseconds by part: by the host's clock or, on CUDA, the device's, which costs no waiting.

    There the parts follow one another on the device; while it waits for the host, the part that it
    waits for goes on.
    """

    def __init__(self, device: torch.device):
        self.device, self.is_cuda = device, device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self.laps: list[tuple[str | None, float | torch.cuda.Event]] = [(None, self._now())]

    def _now(self) -> float | torch.cuda.Event:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def lap(self, part: str | None) -> None:
        """The time since the last lap belongs to a part, or if None to nothing."""
        self.laps.append((part, self._now()))

    @property
    def ms(self) -> dict[str, float]:
        """By part, up to the last lap."""
        totals = {"draft_ms": 0.0, "verify_ms": 0.0, "other_ms": 0.0}
        if self.is_cuda:
            self.laps[-1][1].synchronize()
        for (_, before), (part, after) in pairwise(self.laps):
            if part:
                took = before.elapsed_time(after) if self.is_cuda else (after - before) * 1e3
                totals[part] += took
        return totals


class Drafter:
    """The draft model over its own cache: slots [0, length) committed, then root, then nodes.

    The root stands at slot `length`, above it every node in the order it was run. Committed
    tokens the draft has not run yet are caught up in place, in one causal block with the root.
    """

    def __init__(
        self, model: GPTNeoX, cache: KVCache, n_ids: int, committed: list[int], watch: Stopwatch
    ):
        """n_ids: the target's vocabulary size. committed: the loop's `visible`, the root last."""
        self.model, self.cache, self.committed, self.watch = model, cache, committed, watch
        self.n_proposable = min(n_ids, model.config.vocab_size)
        self.max_append = cache.passes.n_rows if cache.passes else MAX_ROWS
        self.depth = 0  # of the level that ran last
        self.mask = torch.empty(0)  # [W, slots] bool, what that level's rows may attend

    def run(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """One level for draft_tree.grow: logits [W, ids that both models know]."""
        self.watch.lap("other_ms")
        logits = self._catch_up() if parents is None else self._run_level(tokens, parents)
        self.watch.lap("draft_ms")
        return logits[:, : self.n_proposable]

    def _catch_up(self) -> Tensor:
        n_ids, cache = self.model.config.vocab_size, self.cache
        # An id that the draft cannot embed is read as 0: a worse guess, never a wrong text.
        lacking = [i if i < n_ids else 0 for i in self.committed[cache.length :]]
        is_long = len(lacking) > self.max_append
        logits = (self.model.prefill if is_long else self.model.append)(lacking, cache)  # [V]
        cache.rewind(cache.length - 1)  # the root stays scratch until it is verified
        self.depth = 0
        self.mask = torch.ones(1, cache.length + 1, dtype=torch.bool, device=logits.device)
        return logits[None]

    def _run_level(self, tokens: Tensor, parents: Tensor) -> Tensor:
        device, start = self.mask.device, self.mask.shape[1]
        tokens = tokens.to(device, non_blocking=True)
        parents = parents.to(device, non_blocking=True)
        itself = torch.eye(len(tokens), dtype=torch.bool, device=tokens.device)
        seen = self.mask.index_select(0, parents)
        self.mask = torch.cat([seen, itself], dim=1)  # as the parent, and itself
        self.depth += 1
        positions = torch.full_like(tokens, self.cache.length + self.depth)
        return self.model.forward(tokens, positions, self.cache, self.mask, start)

    def commit(self, tree: Tree, rows: list[int]) -> None:
        """Keep the accepted nodes that were run; the rest of the path is caught up later."""
        slots = tree.draft_slots.tolist()
        self.cache.commit([slots[row] for row in rows if slots[row] >= 0])

    def drop(self, window: Window) -> None:
        """Drop what the target has just dropped, or all after the sinks if that is not there."""
        if self.cache.length >= window.sinks + window.slack:
            self.model.forget(self.cache, window.sinks, window.slack)
        else:
            self.cache.rewind(min(self.cache.length, window.sinks))


@dataclass(frozen=True, slots=True)
class Context:
    """One generation's models and what they have read, whatever the method makes of it."""

    target: GPTNeoX
    cache: KVCache
    drafter: Drafter | None
    visible: list[int]  # the ids in the target's cache, and the pending root
    window: Window
    watch: Stopwatch

    def capture(self) -> None:
        """On CUDA: the passes that are left to make, as graphs. It is set-up, so it has no time."""
        shortest = min(len(self.visible), self.window.size + self.window.sinks)
        capture(self.target, self.cache, shortest)
        if self.drafter:
            capture(self.drafter.model, self.drafter.cache, shortest)
        self.watch.lap(None)

    def commit(self, tree: Tree, rows: list[int], is_rebuilding: bool) -> None:
        """Keep the accepted rows; or, as the paper does, drop the tree and run them again."""
        if is_rebuilding:
            self.watch.lap("other_ms")
            self.target.append(tree.tokens[rows].tolist(), self.cache)
            self.watch.lap("verify_ms")
        else:
            self.cache.commit(rows)
        if self.drafter:
            self.drafter.commit(tree, rows)
        if self.window.drop(self.target, self.visible, self.cache) and self.drafter:
            self.drafter.drop(self.window)

    def close(self) -> None:
        self.target.pool.take_back(self.cache.storage)
        if self.drafter:
            self.drafter.model.pool.take_back(self.drafter.cache.storage)


def capture(model: GPTNeoX, cache: KVCache, shortest: int) -> None:
    lengths = range(shortest, cache.capacity + 1)
    model.pool.capture(cache.storage, lengths, cache.length, cache.min_rows)


@torch.inference_mode()
def generate(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    prompt: list[int],
    settings: Settings,
    max_new_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    commit: str = "keep",
    sampling: Sampling | None = None,
    window: Window = WHOLE_TEXT,
) -> Iterator[Step]:
    """Decode, one Step per commit: the target's own greedy ids, or samples of its distribution.

    draft may be None for ar. eos_ids end the text where they appear. commit: "keep" moves the
    accepted rows in the cache, "rebuild" runs them again (section 3.5): one more target pass, the
    same cache. window: what of the text the caches keep. Raises ValueError (arguments) and
    OutOfMemory at the first step, NonFiniteLogits.
    """
    rule = settings.rule()  # fresh: no generation learns from another
    if not prompt or max_new_tokens < 1 or commit not in COMMITS or (rule.max_depth and not draft):
        raise ValueError("needs a prompt, a limit of 1 or more, commit keep or rebuild, a draft")
    sampler = sampling.sampler(target.device) if sampling else None
    n_tokens = min(len(prompt) + max_new_tokens, window.full)
    context = _make_context(target, draft, rule, list(prompt), n_tokens, window)
    try:
        yield from _iterate(context, rule, sampler, max_new_tokens, eos_ids, commit == "rebuild")
    finally:
        context.close()


def _iterate(
    context: Context,
    rule: Rule,
    sampler: Sampler | None,
    left: int,
    eos_ids: Sequence[int],
    is_rebuilding: bool,
) -> Iterator[Step]:
    """The loop of generate: `left` tokens after the prompt, which is still to be read."""
    target, cache, drafter = context.target, context.cache, context.drafter
    visible, window, watch = context.visible, context.window, context.watch
    prompt_end = visible[-1:]
    read = rule.read if rule.is_reading else None
    logits = window.prefill(target, visible, cache, read)[None]  # [1, V]
    watch.lap("verify_ms")
    context.capture()
    _, first = accept(lone(torch.tensor(prompt_end)), logits, sampler)
    step = Step(cut(first, eos_ids, left), **watch.ms)
    while True:
        visible += step.tokens
        left -= len(step.tokens)
        yield step
        if not left or visible[-1] in eos_ids:
            return
        watch.restart()
        # 1 draft: a tree below the pending root, no deeper than the tokens still allowed
        root = torch.full((1,), visible[-1])
        room = min(left, window.room(cache))
        tree = grow(rule, root, drafter.run if drafter else None, room - 1, sampler)
        # 2 mask and positions
        tokens = tree.tokens.to(target.device, non_blocking=True)
        positions = tree_positions(tree.depths.to(target.device, non_blocking=True), cache.length)
        ancestors = tree.ancestors.to(target.device, non_blocking=True)
        mask = tree_mask(ancestors, cache.length) if tree.depth else None
        # 3 one target pass over the whole tree
        watch.lap("other_ms")
        logits = target.forward(tokens, positions, cache, mask)  # [N, V]
        watch.lap("verify_ms")
        # 4 accept: the path on which the target agrees, then the bonus token
        rows, new_tokens = accept(tree, logits, sampler)
        rule.read(tree.tokens, logits)  # now: a later pass may overwrite the logits
        # 5 commit
        context.commit(tree, rows, is_rebuilding)
        # 6 adapt
        watch.lap("other_ms")
        rule.adapt(tree, rows, sum(watch.ms.values()))
        new_ids = cut(new_tokens, eos_ids, left)
        watch.lap("other_ms")
        step = Step(new_ids, tree, rows, new_tokens[-1], n_drafted=len(tree) - 1, **watch.ms)


def _make_context(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    rule: Rule,
    visible: list[int],
    n_tokens: int,
    window: Window,
) -> Context:
    """Caches for n_tokens and a tree, if both fit; the time starts here."""
    watch = Stopwatch(target.device)
    capacity, draft_capacity = n_tokens + rule.max_rows, n_tokens + rule.max_drafted
    needs = [(target, capacity, rule.max_rows)]
    if rule.max_depth:
        needs.append((draft, draft_capacity, min(rule.max_drafted, MAX_ROWS)))
        require_caches([(model.pool, *sizes) for model, *sizes in needs])
    cache, *draft_cache = [model.new_cache(*sizes, rule.min_rows) for model, *sizes in needs]
    drafter = None
    if draft_cache:
        drafter = Drafter(draft, *draft_cache, target.config.vocab_size, visible, watch)
    watch.lap("other_ms")
    return Context(target, cache, drafter, visible, window, watch)


def accept(tree: Tree, logits: Tensor, sampler: Sampler | None) -> tuple[list[int], list[int]]:
    """The accepted rows, root first, and the id that the target puts after each, bonus last.

    logits: [N, V] of the tree's rows. Raises NonFiniteLogits if the root's are not finite; a path
    ends before any other row whose logits are not.
    """
    best, predictions = to_host(*logits.max(dim=-1))  # [N] each, by one read
    if sampler is None:
        path, tokens = accept_greedy(tree, predictions)
    else:
        path, tokens = accept_sampled(tree, sampler.warp(logits), sampler)
    best = best.tolist()
    new_tokens = next_ids([best[row] for row in path], tokens)
    return path[: len(new_tokens)], new_tokens


def next_ids(best: list[float], chosen: list[int]) -> list[int]:
    """The ids chosen after a path's rows, up to the first row whose logits are not finite.

    best: each row's largest logit; a row that holds inf or nan has it there. Raises NonFiniteLogits
    if it is the first row, so that an error takes back nothing that was right.
    """
    are_finite = [math.isfinite(value) for value in best]
    if not are_finite[0]:
        raise NonFiniteLogits(
            "the target's logits are not finite: some product overflows in this dtype (small "
            "Pythia models do in float16); try --dtype bfloat16"
        )
    n_finite = [*are_finite, False].index(False)
    return chosen[:n_finite]


def cut(tokens: list[int], eos_ids: Sequence[int], room: int) -> list[int]:
    """Newly committed ids up to the limit and up to the first EOS, which is kept."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in eos_ids]
    return tokens[: min([room, *ends])]


@dataclass(frozen=True)
class Metrics:
    """One generation in numbers; times in milliseconds, rates in tokens per second."""

    new_tokens: int
    throughput: float  # (new tokens - 1) / time from the first token to the last
    end_to_end: float  # new tokens / time from prompt in to last token out
    ttft_ms: float  # prompt in to first token out
    tpot_ms: float  # decode time per later token
    iterations: int  # verify passes
    tokens_per_iter: float  # accepted + bonus, before the EOS or limit cut
    path_length: float  # accepted drafted tokens per iteration
    draft_nodes: float  # drafted tokens sent to the target per iteration
    acceptance: float  # accepted / drafted tokens, 0 if none were drafted
    draft_ms: float  # per iteration, as the next two
    verify_ms: float
    other_ms: float
    repetition: float  # 1 - distinct 4-grams / 4-grams of the generated ids


def token_ids(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def measure(steps: Sequence[Step]) -> Metrics:
    """The metrics of one generation from its steps, in the one definition used everywhere."""
    ids = token_ids(steps)
    first, *later = steps

    def total(part: str) -> float:
        return sum(getattr(step, part) for step in later)

    def per_iteration(amount: float) -> float:
        return amount / len(later) if later else 0.0

    ttft = first.draft_ms + first.verify_ms + first.other_ms
    decode = total("draft_ms") + total("verify_ms") + total("other_ms")
    accepted = sum(len(step.path) - 1 for step in later)
    drafted = sum(step.n_drafted for step in later)
    grams = list(zip(*(ids[i:] for i in range(4)), strict=False))
    return Metrics(
        new_tokens=len(ids),
        throughput=(len(ids) - 1) / decode * 1e3 if later else 0.0,
        end_to_end=len(ids) / (ttft + decode) * 1e3,
        ttft_ms=ttft,
        tpot_ms=decode / (len(ids) - 1) if later else 0.0,
        iterations=len(later),
        tokens_per_iter=per_iteration(accepted + len(later)),
        path_length=per_iteration(accepted),
        draft_nodes=per_iteration(drafted),
        acceptance=accepted / drafted if drafted else 0.0,
        draft_ms=per_iteration(total("draft_ms")),
        verify_ms=per_iteration(total("verify_ms")),
        other_ms=per_iteration(total("other_ms")),
        repetition=1 - len(set(grams)) / len(grams) if grams else 0.0,
    )


def build_parser() -> Parser:
    parser = Parser(
        prog="dynatree.py",
        description="Write text with a GPT-NeoX target, sped up by a draft model's token trees.",
        epilog=describe(METHODS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    less = "a 16-bit --dtype, fewer --max-new-tokens, a --window, a smaller --target"
    parser.less_memory = less
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="the text to continue")
    add("--prompt-file", metavar="F", help="a UTF-8 file to continue; - is standard input")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="limit (default 128)")
    add("--method", default="dynatree", metavar="M", help=f"{', '.join(METHODS)} (dynatree)")
    add_sampling_options(parser)
    add("--window", type=int, metavar="N", help="keep the latest N tokens in the cache (all)")
    add("--sinks", type=int, metavar="N", help="and with a window the first N (4)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a method's setting")
    add("--commit", choices=COMMITS, default="keep", help="keep rows, or rebuild as the paper")
    add_model_options(parser)
    add("--ignore-eos", action="store_true", help="go on past end-of-text")
    add("--compare", action="store_true", help="also run ar: speedup, and are the ids equal?")
    add("--show-tree", action="store_true", help="draw every iteration's tree on stderr")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    return parser


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Request:
    """One prompt to continue, whatever the method."""

    pair: Pair
    prompt: list[int]
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    commit: str
    sampling: Sampling | None = None  # None is greedy
    window: Window = WHOLE_TEXT

    def decode(self, settings: Settings) -> Iterator[Step]:
        models, limit = (self.pair.target, self.pair.draft), self.max_new_tokens
        options = {"eos_ids": self.eos_ids, "commit": self.commit}
        options |= {"sampling": self.sampling, "window": self.window}
        return generate(*models, self.prompt, settings, limit, **options)

    def printable(self, ids: Iterable[int]) -> list[int]:
        """EOS is counted, not printed."""
        return [i for i in ids if i not in self.eos_ids]


def stream(
    request: Request, settings: Settings, args: argparse.Namespace
) -> tuple[list[Step], bool]:
    """Run one generation, printing as it goes: its steps, and whether Ctrl-C cut it short."""
    steps: list[Step] = []
    tokenizer, has_color, is_interrupted = request.pair.tokenizer, sys.stderr.isatty(), False
    text = TextStream(tokenizer)
    is_streaming = not args.json and not args.show_tree  # trees and text would interleave
    try:
        for step in request.decode(settings):
            steps.append(replace(step, tree=None))  # trees would fill the memory in a long text
            if is_streaming:
                print(text.push(request.printable(step.tokens)), end="", flush=True)
            if args.show_tree and step.tree:
                say(f"iteration {len(steps) - 1}: {summarise_step(step)}")
                say(draw_tree(step.tree, step.path, step.bonus, tokenizer, has_color))
    except KeyboardInterrupt:
        is_interrupted = True
    finally:  # an error, too, leaves the text so far on the screen
        if is_streaming and steps:
            print(text.finish(), flush=True)
        elif args.show_tree and not args.json and steps:
            print(tokenizer.decode(request.printable(token_ids(steps))), flush=True)
    return steps, is_interrupted


def summarise_step(step: Step) -> str:
    accepted, drafted = len(step.path) - 1, step.n_drafted
    ms = step.draft_ms + step.verify_ms + step.other_ms
    is_retrieved = step.tree.is_retrieved
    n_retrieved = 0 if is_retrieved is None else int(is_retrieved.sum())
    sources = f"{drafted - n_retrieved} drafted, {n_retrieved} retrieved +"
    return f"{accepted} of {drafted} accepted ({sources}), depth {step.tree.depth}, {ms:.1f} ms"


def summarise(metrics: Metrics) -> str:
    """The line that ends every run."""
    first = f"first token after {metrics.ttft_ms:.0f} ms"
    if not metrics.iterations:
        return f"1 token, {first}"
    rates = f"{metrics.throughput:.1f} tokens/s, {metrics.tokens_per_iter:.2f} tokens/iter"
    return f"{metrics.new_tokens} tokens, {rates}, {first}"


@dataclass(frozen=True)
class Comparison:
    """A method's run against ar's on the same prompt."""

    ar_throughput: float
    speedup: float
    exact: bool | None  # None if sampled: then no two texts need agree
    first_difference: int | None = None  # index into token_ids
    top2_gap: float | None = None  # the target's there, in float32; None if it does not fit
    control: dict | None = None  # in half precision: ar against itself at CONTROL_ROWS rows

    @property
    def is_tie(self) -> bool:
        return self.top2_gap is not None and self.top2_gap < TIE

    def line(self) -> str:
        start = f"ar: {self.ar_throughput:.1f} tokens/s, so {self.speedup:.2f}x; the ids "
        if self.exact is None:
            return f"{start}are sampled, not compared"
        if self.exact:
            return f"{start}are equal"
        start += f"differ from token {self.first_difference} on "
        if self.top2_gap is None:
            return f"{start}(no room for the float32 model that would tell the top-2 gap)"
        kind = "a tie" if self.is_tie else "not a tie"
        return f"{start}(top-2 gap {self.top2_gap:.1e} in float32: {kind})"

    def control_line(self) -> str:
        at = self.control["first_difference"]
        result = "the ids are equal" if at is None else f"the ids differ from token {at} on"
        return f"control: ar with {self.control['rows']} rows a pass, nothing drafted; {result}"


def compare(request: Request, steps: Sequence[Step]) -> Comparison:
    """Run ar and hold the given steps against it (metrics `speedup` and `exact`)."""
    reference = list(request.decode(Alone()))
    ours, theirs = token_ids(steps), token_ids(reference)
    ar = measure(reference).throughput
    speedup = measure(steps).throughput / ar if ar else 1.0
    if request.sampling:
        return Comparison(ar, speedup, exact=None)
    at, gap, control = first_difference(ours, theirs), None, None
    if request.pair.target.dtype != torch.float32:
        padded = token_ids(request.decode(Alone(rows=CONTROL_ROWS)))
        found = first_difference(padded, theirs)
        control = {"rows": CONTROL_ROWS, "first_difference": found}
    if at is not None:
        gap = top2_gap(request.pair, request.prompt + theirs[:at], request.window)
    return Comparison(ar, speedup, at is None, at, gap, control)


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The first index at which two texts part, the shorter one's end included; None if equal."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def top2_gap(pair: Pair, ids: list[int], window: Window = WHOLE_TEXT) -> float | None:
    """How far the target's best next token leads the second, in float32 whatever its dtype.

    None if there is no room for the float32 model.
    """
    try:
        target = pair.float32_target
        cache = target.new_cache(min(len(ids), window.full))
        best, second = window.prefill(target, list(ids), cache).topk(2).values.tolist()
        target.pool.take_back(cache.storage)
    except OutOfMemory:
        return None
    return best - second


def prepare(args: argparse.Namespace) -> tuple[Request, Settings, dict]:
    """Check everything that was asked for and load the models; also the settings to report."""
    if args.method not in METHODS:
        raise UsageError(f"unknown method {args.method!r}; there are {', '.join(METHODS)}")
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {args.max_new_tokens}: at least 1")
    settings = parse_settings(METHODS[args.method], args.set)
    sampling = choose_sampling(args.temperature, args.top_p, args.seed)
    text = read_prompt(args.prompt, args.prompt_file)
    is_drafting = settings.rule().max_depth > 0
    if args.draft and not is_drafting:
        say(f"note: --method {args.method} needs no draft; {args.draft} is not loaded")
    pair, models = open_pair(args, is_drafting, say)
    config = pair.target.config
    window = choose_window(args.window, args.sinks, settings.rule().max_rows, pair)
    prompt = encode(text, pair.tokenizer, config.vocab_size)
    if window is not WHOLE_TEXT:
        kept = f"{window.sinks} sinks and the latest {window.size} tokens or more"
        say(f"note: the caches keep {kept}; this is not the text of full attention")
    elif len(prompt) + args.max_new_tokens > config.max_positions:
        say(
            f"warning: {len(prompt)} prompt and {args.max_new_tokens} new tokens exceed the "
            f"{config.max_positions} positions the target was trained for"
        )
    eos_ids = () if args.ignore_eos else config.eos_ids
    reported = {"method": args.method, **asdict(settings), **models, "commit": args.commit}
    reported |= {"max_new_tokens": args.max_new_tokens, "prompt_tokens": len(prompt)}
    reported |= {"eos_ids": eos_ids, "sampling": asdict(sampling) if sampling else None}
    reported |= {"window": asdict(window) if args.window else None}
    request = Request(pair, prompt, args.max_new_tokens, eos_ids, args.commit, sampling, window)
    return request, settings, reported


def run(args: argparse.Namespace) -> int:
    """The command line, once parsed. Returns the exit status."""
    request, settings, reported = prepare(args)
    if args.compare:  # warm up, so that whichever runs first does not pay for it
        for warm_up in (settings, Alone()):
            list(islice(request.decode(warm_up), WARM_UP_STEPS))
    steps, is_interrupted = stream(request, settings, args)
    if not steps:
        return 130
    metrics, comparison = measure(steps), None
    say(summarise(metrics))
    n_graphs, capture_s = request.pair.captured()
    if n_graphs:
        say(f"captured {n_graphs} graphs in {capture_s:.1f} s, which no figure counts")
    if args.method != "ar" and metrics.iterations and not metrics.draft_nodes:
        say("note: nothing was drafted; if the draft overflows in float16, try --dtype bfloat16")
    try:
        if args.compare and not is_interrupted:
            comparison = compare(request, steps)
            say(comparison.line())
            if comparison.control:
                say(comparison.control_line())
    except KeyboardInterrupt:
        is_interrupted = True
    if args.json:
        ids = token_ids(steps)
        text = request.pair.tokenizer.decode(request.printable(ids))
        report = {"token_ids": ids, "text": text, "metrics": asdict(metrics)}
        report |= {"settings": reported, "versions": versions(), "interrupted": is_interrupted}
        report["graphs"] = {"n": n_graphs, "capture_s": capture_s}
        if comparison:
            report["compare"] = asdict(comparison)
        print(json.dumps(report))
    if is_interrupted:
        return 130
    is_wrong = comparison and comparison.exact is False and not comparison.is_tie
    return 1 if is_wrong and request.pair.target.dtype == torch.float32 else 0


def versions() -> dict[str, str]:
    """What a reported figure depends on."""
    libraries = {name: version(name) for name in ("torch", "tokenizers", "safetensors")}
    return {"python": platform.python_version(), "machine": platform.platform(), **libraries}


def run_command_line(
    run: Callable[[argparse.Namespace], int], parser: Parser, arguments: Sequence[str] | None
) -> int:
    """Parse and run; a mistake is one line on stderr and status 2. Returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a character the terminal lacks is no reason to stop
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stdout = None
        return 1
    except HubUnreachable as error:
        say(f"error: {error}; without a network: python {parser.prog} {WITHOUT_NETWORK}")
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        lower = f"; these lower it: {parser.less_memory}" if parser.less_memory else ""
        say(f"error: {first_line(error)}{lower}")
    except (UsageError, CheckpointError, NonFiniteLogits) as error:
        say(f"error: {' '.join(str(error).split())}")
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command_line(run, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
