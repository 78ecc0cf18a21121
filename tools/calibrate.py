"""Settings of sequoia or graft for a pair: chances by rank; the best tree, or the best checkpoints.

    python tools/calibrate.py                  # the default pair, on the benchmark's own prompts
    python tools/calibrate.py --target FOLDER --draft FOLDER --prompts FILE --temperature 0.6
    python tools/calibrate.py --draft-temperature 0.6 --guesses drawn
    python tools/calibrate.py --method graft --base beam

First texts are decoded with trees of one level, eight children wide: how often a child is the one
accepted is the chance of its rank. sequoia's children are the draft's; graft's are the successors
of the root in the table, whose chances are recycle's, too.

sequoia: then passes of both models are timed, by their rows. The tree is the one that promises the
most tokens for the time of its passes, those of the draft and one of the target; what an iteration
does beside them is not counted.

graft: then the texts are decoded by its base alone. At a checkpoint drafting stops if the best path
is unlikely, and it should if nothing deeper will be accepted. The gain of a threshold at a depth is
the share that it stops of the trees where it should, less that of the others (Youden's index). Each
depth has its best threshold, and the three depths of the highest gains are the checkpoints: those
at which confidence tells most (Graft, 3.1). No time enters.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    import cli.start  # noqa: F401

import math
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmark.prompts import DATASETS, cut_prompts, load_prompts
from benchmark.step_times import StepTimes, measure_step_times
from cli.errors import Parser, UsageError, run_command_line, say
from cli.models import Request, open_pair
from cli.options import (
    add_model_options,
    add_sampling_options,
    choose_sampling,
    require_temperature,
)
from draft_tree import MAX_ROWS, Settings
from dynatree import Step
from methods.retrieval import Graft, Recycle, parse_base
from methods.sequoia import Chances, Shape, plan
from methods.static import SpecInfer

N_RANKS = 8
MAX_DEPTH = 16
N_CHECKPOINTS = 3
MIN_TREES = 30  # drafted beyond a depth, for a threshold there


def count_ranks(steps: Iterable[Step]) -> Counter[int]:
    """How often the child of each rank was accepted, of trees of one level; N_RANKS: none was."""
    counts: Counter[int] = Counter()
    for step in steps:
        if step.tree and step.tree.depth:  # neither prefill's nor the last one
            counts[step.path[1] - 1 if len(step.path) > 1 else N_RANKS] += 1  # row 0 is the root
    return counts


def chances_of(counts: Counter[int]) -> Chances:
    """Each rank's share of the trees, to three digits. Raises UsageError if there is no tree."""
    n_trees = counts.total()
    if not n_trees:
        why = "the texts are too short, or the draft's logits not finite (--draft-dtype float32?)"
        raise UsageError(f"no tree of one level was verified: {why}")
    return tuple([round(counts[rank] / n_trees, 3) for rank in range(N_RANKS)])


def falling(chances: Chances) -> Chances:
    """As graft's have to be: none above the one before, and none 0. Raises UsageError if none is
    left."""
    found = tuple([chance for chance in accumulate(chances, min) if chance])
    if not found:
        raise UsageError("no likeliest successor was accepted: more --n-prompts or --new-tokens")
    return found


def look_deeper(steps: Iterable[Step]) -> dict[int, list[tuple[float, bool]]]:
    """By depth: the probability of the best path of each tree that was drafted deeper than that,
    and whether more was accepted."""
    found: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for step in steps:
        tree = step.tree
        for depth in range(1, tree.depth if tree else 0):
            at = zip(tree.depths, tree.path_logprobs, strict=True)
            best = max(logprob for d, logprob in at if d == depth)
            found[depth].append((math.exp(best), len(step.path) - 1 > depth))
    return found


def best_threshold(seen: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """The gain of the best threshold, and the threshold, to two digits: a tree of less is stopped.
    0 for both if all trees are of one kind."""
    good = [p for p, is_deeper in seen if is_deeper]
    bad = [p for p, is_deeper in seen if not is_deeper]
    best = (0.0, 0.0)
    if good and bad:
        for threshold in (percent / 100 for percent in range(1, 100)):
            stopped = sum(p < threshold for p in bad) / len(bad)
            lost = sum(p < threshold for p in good) / len(good)
            best = max(best, (stopped - lost, threshold), key=lambda pair: pair[0])
    return best


def choose_checkpoints(found: Mapping[int, Sequence[tuple[float, bool]]]) -> str:
    """The depths of the highest gains with their thresholds, as graft's setting has them; off if
    there is none. Of a depth that few trees reach nothing is known."""
    gains = {d: best_threshold(seen) for d, seen in found.items() if len(seen) >= MIN_TREES}
    depths = sorted(gains, key=gains.get, reverse=True)[:N_CHECKPOINTS]
    chosen = [f"{depth}@{gains[depth][1]:g}" for depth in sorted(depths) if gains[depth][0] > 0]
    return ":".join(chosen) or "off"


@dataclass(frozen=True)
class Choice:
    """A tree, and what an iteration with it is expected to give and to take."""

    n_rows: int
    depth: int
    tokens: float
    ms: float

    def describe(self) -> str:
        rate = self.tokens / self.ms * 1e3
        return f"{self.tokens:.2f} tokens in {self.ms:.2f} ms, {rate:.1f} tokens/s"


def draft_passes(shape: Shape, padded: Callable[[int], int]) -> Counter[int]:
    """The draft's passes over a tree of this shape, by their rows: nodes that have children."""
    passes: Counter[int] = Counter()
    level = [0]
    while level:
        parents = [node for node in level if shape[node]]
        if parents:
            passes[padded(len(parents))] += 1
        level = [child for node in parents for child in shape[node]]
    return passes


def choose_tree(
    chances: Chances, times: StepTimes, padded: Callable[[int], int] = int
) -> tuple[Choice, Choice]:
    """The tree of the most tokens for its time, and ar beside it, which may be the same."""
    alone = Choice(1, 1, 1.0, times.predict_ms({}, {padded(1): 1}))
    best = alone
    found = plan(MAX_ROWS - 1, MAX_DEPTH, chances)
    for n_rows in range(2, MAX_ROWS + 1):
        for depth in range(1, MAX_DEPTH + 1):
            shape = found.shape(n_rows - 1, depth)
            tokens = 1 + float(found.lengths[depth, 0, n_rows - 1])
            ms = times.predict_ms(draft_passes(shape, padded), {padded(n_rows): 1})
            if tokens / ms > best.tokens / best.ms:
                best = Choice(n_rows, depth, tokens, ms)
    return best, alone


def execute(args: Namespace) -> int:
    if min(args.n_prompts, args.prompt_tokens) < 1 or args.new_tokens < 3:
        raise UsageError("--n-prompts and --prompt-tokens are at least 1, --new-tokens 3")
    settings, base = choose_settings(args)
    sampling = choose_sampling(
        args.temperature, args.top_p, args.seed, args.draft_temperature, args.guesses
    )
    if args.draft_temperature is not None:
        require_temperature("a calibration", (base or settings).rule(), sampling.draws)
    texts = load_prompts(DATASETS[0], args.prompts)  # a mistake is told before models are loaded
    pair, _ = open_pair(args, True, say)
    n_ids = pair.target.config.vocab_size
    prompts = cut_prompts(texts, pair.tokenizer, n_ids, args.prompt_tokens, args.n_prompts)

    def decode(settings: Settings) -> Iterator[Step]:
        for prompt in prompts:
            request = Request(pair, prompt, settings, args.new_tokens, sampling=sampling)
            yield from request.decode()

    counts = count_ranks(decode(settings))
    chances = chances_of(counts)
    if base:
        chances = falling(chances)
    p = ":".join([f"{chance:g}" for chance in chances])
    print(f"chances of acceptance by rank, of {counts.total()} trees: {p}", flush=True)
    if base:
        checkpoints = choose_checkpoints(look_deeper(decode(base)))
        print(f"--set base={args.base} --set checkpoints={checkpoints} --set p={p}")
        return 0
    longest = max(len(prompt) for prompt in prompts)  # not what they would be cut to
    context = longest + args.new_tokens // 2
    times = measure_step_times(pair.target, pair.draft, context)
    best, alone = choose_tree(chances, times, pair.target.pool.padded)
    print(f"ar: {alone.describe()}")
    print(f"sequoia: {best.describe()}")
    print(f"--set N={best.n_rows} --set D_max={best.depth} --set p={p}")
    return 0


def choose_settings(args: Namespace) -> tuple[Settings, Settings | None]:
    """A method whose trees have one level, of eight children in the order of their ranks; and
    graft's base. Raises UsageError."""
    if args.method == "graft":
        try:
            return Recycle(N=N_RANKS + 1, D_max=1), parse_base(args.base)
        except ValueError as error:
            raise UsageError(f"--base {args.base}: {error}") from error
    if args.base != Graft().base:
        raise UsageError("--base is of --method graft")
    return SpecInfer(str(N_RANKS)), None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/calibrate.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--method", choices=("sequoia", "graft"), default="sequoia", help="whose (sequoia)")
    base = Graft().base
    add("--base", default=base, metavar="RULE", help=f"graft's, as its setting has it ({base})")
    add("--prompts", metavar="FILE", help="as bench.py's (the benchmark's own dozen)")
    add("--n-prompts", type=int, default=12, metavar="N", help="of them, evenly spread (12)")
    add("--prompt-tokens", type=int, default=150, metavar="N", help="to cut them to (150)")
    add("--new-tokens", type=int, default=150, metavar="N", help="to decode after each (150)")
    add_model_options(parser)
    add_sampling_options(parser)
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
