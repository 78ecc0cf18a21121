"""The metrics of one generation, in the one definition used everywhere.

    metrics = measure(steps)
    metrics.throughput  # tokens per second

The papers define acceptance in three ways. Each has a name of its own here:

acceptance_rate  accepted tokens / drafted tokens
top1_match       drafted tokens that are the target's best token after their own path, accepted or
                 not / drafted tokens (the definition in v2, 4.2)
code_acceptance  tokens per iteration / (depth in the settings + 2); for a chain, / K (computed by
                 the authors' code, printed in their table 3)

Metrics.depths has four counts for each depth 1, 2, ... of the trees:

nodes     drafted nodes at the depth
drafted   trees that reach the depth
tried     accepted paths that reach the depth before, and have a child at this one
accepted  accepted paths that reach the depth
"""

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from draft_tree import DynaTree, Settings
from dynatree_lab.engine.generate import Step
from dynatree_lab.engine.scores import TokenLogprob
from dynatree_lab.methods.static import Chain, Fixed

COUNTS = ("nodes", "drafted", "tried", "accepted")  # of Metrics.depths


@dataclass(frozen=True)
class Metrics:
    """The numbers of one generation: times in milliseconds, rates in tokens per second."""

    new_tokens: int
    throughput: float  # (new tokens - 1) / time from the first token to the last
    end_to_end: float  # new tokens / time from the prompt to the last token, as in the papers
    wall_ms: float  # that time per new token: DEAGLE's wall time, DySpec's latency
    ttft_ms: float  # time to first token
    tpot_ms: float  # time per output token after the first
    iterations: int  # verification passes
    tokens_per_iter: float  # accepted + bonus, before EOS or the limit cuts any
    accepted_per_iter: float  # accepted drafted tokens per iteration
    drafted_per_iter: float  # drafted tokens sent to the target per iteration
    acceptance_rate: float  # accepted / drafted tokens, 0 if none were drafted
    draft_ms: float  # per iteration, like the next two
    verify_ms: float
    other_ms: float
    draft_passes: float  # draft passes per iteration
    repetition: float  # 1 - distinct 4-grams / 4-grams of the generated ids
    depths: dict[str, list[int]]  # counts at depth 1, 2, ... by name, see above


def token_ids(steps: Iterable[Step]) -> list[int]:
    """Return all generated ids."""
    return [token for step in steps for token in step.tokens]


@dataclass(slots=True)
class Tally:
    """The ids of a generation so far, and sums over its steps."""

    ids: list[int] = field(default_factory=list)
    n_steps: int = 0  # including the first, which is the prefill's
    ttft_ms: float = 0.0  # of the first step; all other sums are over the later steps
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    n_draft_passes: int = 0
    counts: dict[str, Counter[int]] = field(  # by name and depth
        default_factory=lambda: {name: Counter() for name in COUNTS}
    )
    draft_overflowed: bool = False  # in at least one step
    pieces: list[str] = field(default_factory=list)  # of the text, if it is decoded
    finish_reason: str | None = None  # "eos", "stop" or "length", once generation has ended
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the ids, if they are wanted

    def add(self, step: Step) -> None:
        """Add a step. Its ids come last, so Ctrl-C between two lines leaves a tally with sums."""
        self.draft_overflowed |= step.draft_overflowed
        if self.n_steps:
            self.draft_ms += step.draft_ms
            self.verify_ms += step.verify_ms
            self.other_ms += step.other_ms
            self.n_draft_passes += len(step.draft_rows)
            self.count_depths(step)
        else:
            self.ttft_ms = step.ms
        self.n_steps += 1
        self.logprobs.extend(step.logprobs)
        self.ids.extend(step.tokens)

    def count_depths(self, step: Step) -> None:
        """Add the nodes, the tree and the accepted path of an iteration to the counts."""
        n_accepted = len(step.path) - 1
        has_child = step.path[-1] in step.tree.parents
        deepest = {"drafted": max(step.tree.depths)}
        deepest |= {"tried": n_accepted + has_child, "accepted": n_accepted}
        for name, depth in deepest.items():
            self.counts[name].update(range(1, depth + 1))
        self.counts["nodes"].update(step.tree.depths[1:])

    def metrics(self) -> Metrics:
        """Return the metrics of the steps so far, of which there must be at least one."""
        n_tokens = len(self.ids)
        n_iterations = self.n_steps - 1
        n = max(n_iterations, 1)  # to divide by
        decode = self.draft_ms + self.verify_ms + self.other_ms
        n_accepted, n_drafted = self.counts["accepted"].total(), self.counts["nodes"].total()
        depths = range(1, max(self.counts["nodes"], default=0) + 1)
        return Metrics(
            new_tokens=n_tokens,
            throughput=(n_tokens - 1) / decode * 1e3 if decode else 0.0,
            end_to_end=n_tokens / (self.ttft_ms + decode) * 1e3,
            wall_ms=(self.ttft_ms + decode) / n_tokens,
            ttft_ms=self.ttft_ms,
            tpot_ms=decode / (n_tokens - 1) if n_tokens > 1 else 0.0,
            iterations=n_iterations,
            tokens_per_iter=(n_accepted + n_iterations) / n,
            accepted_per_iter=n_accepted / n,
            drafted_per_iter=n_drafted / n,
            acceptance_rate=n_accepted / n_drafted if n_drafted else 0.0,
            draft_ms=self.draft_ms / n,
            verify_ms=self.verify_ms / n,
            other_ms=self.other_ms / n,
            draft_passes=self.n_draft_passes / n,
            repetition=repetition(self.ids),
            depths={name: [n[depth] for depth in depths] for name, n in self.counts.items()},
        )


def tally(steps: Iterable[Step]) -> Tally:
    """Return the tally of all steps."""
    total = Tally()
    for step in steps:
        total.add(step)
    return total


def measure(steps: Iterable[Step]) -> Metrics:
    """Return the metrics of one generation."""
    return tally(steps).metrics()


def measure_acceptance(steps: Sequence[Step], settings: Settings) -> dict[str, float]:
    """Return `top1_match`, and `code_acceptance` for the methods that the authors' code has. The
    steps must have trees."""
    found = {"top1_match": top1_match(steps)}
    by_code = code_acceptance(settings, measure(steps).tokens_per_iter)
    if by_code is not None:
        found["code_acceptance"] = by_code
    return found


def top1_match(steps: Sequence[Step]) -> float:
    """Return the share of drafted tokens that are the target's best token after their own path; 0
    if none were drafted."""
    found = [is_match for step in steps[1:] for is_match in matches(step)]
    return sum(found) / len(found) if found else 0.0


def matches(step: Step) -> list[bool]:
    """Return for each drafted node whether its token is the target's best one after its parent's
    path, whether or not that path was accepted."""
    tree = step.tree
    best_tokens = [step.predictions[parent] for parent in tree.parents[1:]]
    return [token == best for token, best in zip(tree.tokens[1:], best_tokens, strict=True)]


def code_acceptance(settings: Settings, tokens_per_iter: float) -> float | None:
    """Return the column Accept. of v2's table 3, or None for methods that the authors lack.

    It may exceed 1, because the bonus token counts and because it divides by a depth of the
    settings: a chain of K gives up to K + 1 tokens, and dynatree's trees reach D_max while D0 + 2
    divides. tokens_per_iter is that of one generation. Its mean over generations is what table 3
    prints as path length: 7.15 / 7 is its 102.2 %.
    """
    if isinstance(settings, Chain) and settings.K:
        return tokens_per_iter / settings.K
    if isinstance(settings, Fixed):
        return tokens_per_iter / (settings.D + 2)
    if isinstance(settings, DynaTree):
        return tokens_per_iter / (settings.D0 + 2)
    return None


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Return 1 - distinct n-grams / n-grams."""
    grams = list(zip(*[ids[i:] for i in range(n)], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on."""
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "torch": str(torch.__version__),  # with the build, such as +cu130
        "tokenizers": version("tokenizers"),
        "safetensors": version("safetensors"),
    }
