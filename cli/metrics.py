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


def versions() -> dict[str, str]:
    """What a reported figure depends on."""
    libraries = {name: version(name) for name in ("torch", "tokenizers", "safetensors")}
    return {"python": platform.python_version(), "machine": platform.platform(), **libraries}
