"""The metrics of one generation, in the one definition used everywhere.

    metrics = measure(steps)
    metrics.throughput  # tokens per second

The papers define acceptance in three ways. Each has a name of its own here:

acceptance_rate  accepted tokens / drafted tokens
top1_match       drafted tokens that are the target's best token after their own path, accepted or
                 not / drafted tokens (the definition in v2, 4.2)
code_acceptance  tokens per iteration / (depth in the settings + 2); for a chain, / K (computed by
                 the authors' code, printed in their table 3)
"""

import math
import platform
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

from draft_tree import DynaTree, Settings
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.rules import are_retrieved
from dynatree_lab.methods.static import Chain, Fixed

N_BINS = 20  # of probabilities from 0 to 1
PARTS = ("draft", "verify", "other")  # of a step's time


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
    depths: dict[str, list[int]]  # drafted `nodes` and `accepted` ones at depth 1, 2, ...


def token_ids(steps: Iterable[Step]) -> list[int]:
    """Return all generated ids."""
    return [token for step in steps for token in step.tokens]


def measure(steps: Sequence[Step]) -> Metrics:
    """Return the metrics of the steps of a generation, of which there must be at least one. The
    first one is the prompt's."""
    ids, first, later = token_ids(steps), steps[0], steps[1:]
    n_tokens, n_iterations = len(ids), len(later)
    n = max(n_iterations, 1)  # to divide by
    times = [sum(getattr(step, f"{part}_ms") for step in later) for part in PARTS]
    decode = sum(times)
    n_accepted = sum(len(step.path) - 1 for step in later)
    n_drafted = sum(len(step.tree) - 1 for step in later)  # 0 for transformers, which has no trees
    draft_ms, verify_ms, other_ms = (ms / n for ms in times)
    return Metrics(
        new_tokens=n_tokens,
        throughput=(n_tokens - 1) / decode * 1e3 if decode else 0.0,
        end_to_end=n_tokens / (first.ms + decode) * 1e3,
        wall_ms=(first.ms + decode) / n_tokens,
        ttft_ms=first.ms,
        tpot_ms=decode / (n_tokens - 1) if n_tokens > 1 else 0.0,
        iterations=n_iterations,
        tokens_per_iter=(n_accepted + n_iterations) / n,
        accepted_per_iter=n_accepted / n,
        drafted_per_iter=n_drafted / n,
        acceptance_rate=n_accepted / n_drafted if n_drafted else 0.0,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=other_ms,
        draft_passes=sum(len(step.draft_rows) for step in later) / n,
        repetition=repetition(ids),
        depths=count_depths(later),
    )


def count_depths(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return the numbers of drafted and of accepted nodes at each depth, over all trees."""
    nodes, accepted = Counter(), Counter()
    for step in steps:
        nodes.update(step.tree.depths[1:])
        accepted.update(range(1, len(step.path)))
    depths = range(1, max(nodes, default=0) + 1)
    return {name: [n[d] for d in depths] for name, n in (("nodes", nodes), ("accepted", accepted))}


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


def count_passes(steps: Sequence[Step], config: GenerationConfig) -> dict[str, dict[str, int]]:
    """Return how many passes of the target and of the draft had how many rows, after the target's
    pass over the prompt. The rows are those that the method asks for, without a model's padding."""
    verified = [len(step.tree) for step in steps[1:]]
    if config.commit == "rebuild":  # runs the accepted tokens again
        verified += [len(step.path) for step in steps[1:]]
    drafted = [n for step in steps[1:] for n in step.draft_rows]
    found, min_rows = {}, config.method.facts.min_rows
    for name, rows in (("target_rows", verified), ("draft_rows", drafted)):
        counts = Counter(max(n, min_rows) for n in rows)
        found[name] = {str(n): counts[n] for n in sorted(counts)}  # JSON's keys are strings
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


def count_calibration(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return the number of drafted nodes, and of those that are the target's best token after their
    parent, in N_BINS bins of their probability given the parent.

    This is the probability that the method uses: the draft's own or a calibrated one. If candidates
    are drawn, it is after temperature and top-p.
    """
    drafted = [0] * N_BINS
    matching = [0] * N_BINS
    for step in steps[1:]:
        tree, is_retrieved = step.tree, are_retrieved(step.tree)
        is_match = [False, *matches(step)]  # the root is no candidate
        for row in range(1, len(tree)):
            if not is_retrieved[row]:
                parent_logprob = tree.path_logprobs[tree.parents[row]]
                probability = math.exp(tree.path_logprobs[row] - parent_logprob)
                bin = min(int(probability * N_BINS), N_BINS - 1)
                drafted[bin] += 1
                matching[bin] += is_match[row]
    return {"drafted": drafted, "top1_match": matching}


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
