"""Counts of launches, waits and copies per iteration of each method, and the code they come from.

    python tests/pretend_cuda -m pretend_cuda.counts [METHOD ...]

The models are the embedded pair. Counting starts after the passes are captured and the draft has
prefilled the prompt. Prints the totals of each method and its most frequent lines of code.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from itertools import islice

from conftest import TINY, generate, random_config, random_tensors
from tokenizers import Tokenizer

from draft_tree import Settings
from engine.cuda_graphs import make_shape
from engine.model import FastGPTNeoX
from engine.passes import SLOT_STEP, PassConfig
from engine.scores import Ranking
from methods import METHODS

from .timeline import timeline

TEXT = "The harbour lay quiet under the morning fog, and the boats that had gone out at dawn"
N_TOKENS = 60
N_SET_UP = 2  # steps: prefill and capture, then the first tree, before which the draft prefills
KINDS = ("kernel", "replay", "sync", "h2d", "event", "replayed")  # replayed: kernels in graphs


@dataclass(frozen=True)
class Counts:
    """The counts of all iterations of one text."""

    n_iterations: int
    sites: Counter[tuple[str, str, str]]  # by kind, what and line

    def per_iteration(self, kind: str) -> float:
        """Return the mean count of an iteration."""
        return sum(n for site, n in self.sites.items() if site[0] == kind) / self.n_iterations

    def format_sites(self) -> str:
        """Return the 25 most frequent sites, a line each, with their counts per iteration."""
        most = self.sites.most_common(25)
        return "\n".join(f"{n / self.n_iterations:8.1f} {' '.join(site)}" for site, n in most)


def load_pair(device: str) -> tuple[FastGPTNeoX, FastGPTNeoX, list[int]]:
    """Return the embedded target and draft, and a prompt."""
    target = FastGPTNeoX.from_pretrained(TINY / "target", device)
    draft = FastGPTNeoX.from_pretrained(TINY / "draft", device)
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    return target, draft, tokenizer.encode(TEXT).ids


def make_settings(method: str) -> Settings:
    """Return a method's default settings; for auto with given costs, so that no clock decides."""
    return METHODS[method](**({"costs": "0.3:0.04:0.2:0.4"} if method == "auto" else {}))


def count_iterations(pair: tuple[FastGPTNeoX, FastGPTNeoX, list[int]], method: str) -> Counts:
    """Generate one text, and count from its second tree on."""
    target, draft, prompt = pair
    steps = generate(target, draft, prompt, make_settings(method), N_TOKENS)
    list(islice(steps, N_SET_UP))
    with timeline.traced() as sites:
        n_iterations = len(list(steps))
    return Counts(n_iterations, sites)


def count_pass_kernels(n_layers: int, n_rows: int, ranking: Ranking) -> int:
    """Return the kernels of a captured float16 pass, including those that rank its logits."""
    found = []
    for n in (2, 3):  # every further layer adds the same number
        config = random_config(num_hidden_layers=n)
        tensors = {name: t.cuda().half() for name, t in random_tensors(config, 0).items()}
        model = FastGPTNeoX.from_tensors(config, tensors)
        cache = model.new_cache(100, PassConfig(ranking=ranking))
        cache.capture(50)
        shape = make_shape(max(n_rows, cache.config.min_rows), SLOT_STEP, cache.config)
        found.append(cache.passes.captured[shape][0].nodes.total())
    return found[0] + (found[1] - found[0]) * (n_layers - 2)


def count_pythia_kernels() -> dict[str, int]:
    """Return the kernels of the default pair's passes and of an iteration. Its tree has 32 rows and
    takes six draft passes, of which the first runs only the root."""
    likeliest = Ranking(3, are_logprobs=True)
    target = count_pass_kernels(32, 32, Ranking())
    level, root = (count_pass_kernels(6, n_rows, likeliest) for n_rows in (8, 1))
    iteration = target + 5 * level + root
    ar = count_pass_kernels(32, 1, Ranking())
    return {"target, 32 rows": target, "draft level": level, "iteration": iteration, "ar": ar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=list(METHODS), metavar="METHOD")
    args = parser.parse_args()
    pair = load_pair("cuda")
    print(f"kernels of Pythia-2.8B and 70M in float16: {count_pythia_kernels()}")
    for method in args.methods:
        counts = count_iterations(pair, method)
        cells = ", ".join(f"{kind} {counts.per_iteration(kind):.1f}" for kind in KINDS)
        print(f"{method}, an iteration: {cells}\n{counts.format_sites()}")


if __name__ == "__main__":
    main()
