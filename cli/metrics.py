"""The metrics of one generation, in the one definition used everywhere.

    metrics = measure(steps)
    metrics.throughput  # tokens per second

Acceptance has three definitions in the papers. Each has a name of its own here:

acceptance       the accepted path / the drafted tokens
matching         what the paper's text says (v2, 4.2): drafted tokens that are the target's own
                 choice after their own path, those off the accepted path included / drafted tokens
code_acceptance  what the authors' code computes and table 3 prints: tokens per iteration / (the
                 depth that the settings name + 2), of a chain / K
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from torch import Tensor

from draft_tree import DynaTree, Settings
from dynatree import Step
from methods.static import Chain, Fixed


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
    draft_passes: float  # forwards of the draft per iteration
    repetition: float  # 1 - distinct 4-grams / 4-grams of the generated ids


def token_ids(steps: Iterable[Step]) -> list[int]:
    """All generated ids."""
    ids = []
    for step in steps:
        ids += step.tokens
    return ids


def measure(steps: Sequence[Step]) -> Metrics:
    """The metrics of one generation from its steps, in the one definition used everywhere."""
    ids = token_ids(steps)
    first = steps[0]
    later = steps[1:]
    n = max(len(later), 1)  # of the iterations, to divide by
    draft = sum(step.draft_ms for step in later)
    verify = sum(step.verify_ms for step in later)
    other = sum(step.other_ms for step in later)
    ttft = first.draft_ms + first.verify_ms + first.other_ms
    decode = draft + verify + other
    accepted = sum(len(step.path) - 1 for step in later)
    drafted = sum(step.n_drafted for step in later)
    return Metrics(
        new_tokens=len(ids),
        throughput=(len(ids) - 1) / decode * 1e3 if later else 0.0,
        end_to_end=len(ids) / (ttft + decode) * 1e3,
        ttft_ms=ttft,
        tpot_ms=decode / (len(ids) - 1) if later else 0.0,
        iterations=len(later),
        tokens_per_iter=(accepted + len(later)) / n,
        path_length=accepted / n,
        draft_nodes=drafted / n,
        acceptance=accepted / drafted if drafted else 0.0,
        draft_ms=draft / n,
        verify_ms=verify / n,
        other_ms=other / n,
        draft_passes=sum(len(step.draft_rows) for step in later) / n,
        repetition=repetition(ids),
    )


def measure_acceptance(steps: Sequence[Step], settings: Settings) -> dict[str, float]:
    """The two other definitions of acceptance: `matching`, and `code_acceptance` if it has one.

    Of steps with their trees, which a peer's have not.
    """
    found = {"matching": matching(steps)}
    by_code = code_acceptance(settings, measure(steps).tokens_per_iter)
    if by_code is not None:
        found["code_acceptance"] = by_code
    return found


def matching(steps: Sequence[Step]) -> float:
    """Drafted tokens that match the target's choice / drafted tokens; 0 if none were drafted."""
    n_matching = 0
    n_drafted = 0
    for step in steps[1:]:
        n_matching += int(matches(step).sum())
        n_drafted += step.n_drafted
    if not n_drafted:
        return 0.0
    return n_matching / n_drafted


def matches(step: Step) -> Tensor:
    """Which nodes [N - 1] of an iteration's tree, the root left out, hold the token that the target
    likes best after their own path, whether or not that path is accepted."""
    tree = step.tree
    return tree.tokens[1:] == step.predictions[tree.parents[1:]]


def code_acceptance(settings: Settings, tokens_per_iter: float) -> float | None:
    """What table 3 prints as Accept. (v2); None for methods that the paper's code has not.

    It is no share of anything: the bonus token counts, and the depth is the one that was asked for,
    not the tree's. A chain of K gives up to K + 1 tokens, and a dynatree goes down to D_max while
    D0 divides; so it passes 1. tokens_per_iter: of one text. The mean over texts is table 3's, and
    is printed there as the path length, too: 7.15 / 7 is its 102.2 %.
    """
    if isinstance(settings, Chain) and settings.K:
        return tokens_per_iter / settings.K
    if isinstance(settings, Fixed):
        return tokens_per_iter / (settings.D + 2)
    if isinstance(settings, DynaTree):
        return tokens_per_iter / (settings.D0 + 2)
    return None


def repetition(ids: list[int], n: int = 4) -> float:
    """1 - distinct n-grams / n-grams."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def versions() -> dict[str, str]:
    """What a reported figure depends on."""
    libraries = {name: version(name) for name in ("torch", "tokenizers", "safetensors")}
    return {"python": platform.python_version(), "machine": platform.platform(), **libraries}
