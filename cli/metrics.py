"""The metrics of one generation, in the one definition used everywhere.

metrics = measure(steps)
metrics.throughput  # tokens per second
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from dynatree import Step


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
        repetition=repetition(ids),
    )


def repetition(ids: list[int], n: int = 4) -> float:
    """1 - distinct n-grams / n-grams."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def versions() -> dict[str, str]:
    """What a reported figure depends on."""
    libraries = {name: version(name) for name in ("torch", "tokenizers", "safetensors")}
    return {"python": platform.python_version(), "machine": platform.platform(), **libraries}
