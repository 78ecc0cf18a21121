"""Settings of sequoia for a pair and a machine: chances of acceptance by rank, and the best tree.

    python tools/calibrate.py                  # the default pair, on the benchmark's own prompts
    python tools/calibrate.py --target FOLDER --draft FOLDER --prompts FILE --temperature 0.6

First texts are decoded with trees of one level, eight children wide: how often a child is the one
accepted is the chance of its rank. Then passes of both models are timed, by their rows. The tree is
the one that promises the most tokens for the time of its passes, those of the draft and one of the
target; what an iteration does beside them is not counted.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    import cli.start  # noqa: F401

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmark.prompts import DATASETS, cut_prompts, load_prompts
from benchmark.step_times import StepTimes, measure_step_times
from cli.errors import Parser, UsageError, run_command_line, say
from cli.models import Request, open_pair
from cli.options import add_model_options, add_sampling_options, choose_sampling
from draft_tree import MAX_ROWS
from dynatree import Step
from methods.sequoia import Chances, Shape, plan
from methods.static import SpecInfer

N_RANKS = 8
MAX_DEPTH = 16


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
        raise UsageError("the draft's logits are not finite; try --draft-dtype float32")
    return tuple([round(counts[rank] / n_trees, 3) for rank in range(N_RANKS)])


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
    sampling = choose_sampling(
        args.temperature, args.top_p, args.seed, args.draft_temperature, args.guesses
    )
    texts = load_prompts(DATASETS[0], args.prompts)  # a mistake is told before models are loaded
    pair, _ = open_pair(args, True, say)
    n_ids = pair.target.config.vocab_size
    prompts = cut_prompts(texts, pair.tokenizer, n_ids, args.prompt_tokens, args.n_prompts)
    settings = SpecInfer(str(N_RANKS))
    counts: Counter[int] = Counter()
    for prompt in prompts:
        request = Request(pair, prompt, settings, args.new_tokens, sampling=sampling)
        counts += count_ranks(request.decode())
    chances = chances_of(counts)
    p = ":".join([f"{chance:g}" for chance in chances])
    print(f"chances of acceptance by rank, of {counts.total()} trees: {p}", flush=True)
    longest = max(len(prompt) for prompt in prompts)  # not what they would be cut to
    context = longest + args.new_tokens // 2
    times = measure_step_times(pair.target, pair.draft, context)
    best, alone = choose_tree(chances, times, pair.target.pool.padded)
    print(f"ar: {alone.describe()}")
    print(f"sequoia: {best.describe()}")
    print(f"--set N={best.n_rows} --set D_max={best.depth} --set p={p}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/calibrate.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="as bench.py's (the benchmark's own dozen)")
    add("--n-prompts", type=int, default=12, metavar="N", help="of them, evenly spread (12)")
    add("--prompt-tokens", type=int, default=150, metavar="N", help="to cut them to (150)")
    add("--new-tokens", type=int, default=150, metavar="N", help="to decode after each (150)")
    add_model_options(parser)
    add_sampling_options(parser)
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
