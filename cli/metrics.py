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
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from draft_tree import DynaTree, Settings
from dynatree import Step
from methods.static import Chain, Fixed


@dataclass(frozen=True)
class Metrics:
    """One generation in numbers; times in milliseconds, rates in tokens per second."""

    new_tokens: int
    throughput: float  # (new tokens - 1) / time from the first token to the last
    end_to_end: float  # new tokens / time from prompt in to last token out, as the papers have it
    wall_ms: float  # that time per new token: DEAGLE's wall time, DySpec's latency
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
    return [token for step in steps for token in step.tokens]


@dataclass(slots=True)
class Tally:
    """What the metrics need of a text's steps, added up as they come: however long the text, no
    more is kept than its ids."""

    ids: array = field(default_factory=lambda: array("i"))  # four bytes each
    n_steps: int = 0  # the first, prefill's token, included
    ttft_ms: float = 0.0  # of the first; all else is of the later ones
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    n_accepted: int = 0
    n_drafted: int = 0
    n_draft_passes: int = 0
    has_overflowed: bool = False  # the draft, in one of them at least

    def add(self, step: Step) -> None:
        """The ids last: Ctrl-C may come between any two lines, and what has ids can be measured."""
        if step.tree and step.tree.has_overflowed:
            self.has_overflowed = True
        if self.n_steps:
            self.draft_ms += step.draft_ms
            self.verify_ms += step.verify_ms
            self.other_ms += step.other_ms
            self.n_accepted += len(step.path) - 1
            self.n_drafted += step.n_drafted
            self.n_draft_passes += len(step.draft_rows)
        else:
            self.ttft_ms = step.draft_ms + step.verify_ms + step.other_ms
        self.n_steps += 1
        self.ids.extend(step.tokens)

    def metrics(self) -> Metrics:
        """Of one step or more."""
        n_tokens = len(self.ids)
        n_iterations = self.n_steps - 1
        n = max(n_iterations, 1)  # to divide by
        decode = self.draft_ms + self.verify_ms + self.other_ms
        return Metrics(
            new_tokens=n_tokens,
            throughput=(n_tokens - 1) / decode * 1e3 if decode else 0.0,
            end_to_end=n_tokens / (self.ttft_ms + decode) * 1e3,
            wall_ms=(self.ttft_ms + decode) / n_tokens,
            ttft_ms=self.ttft_ms,
            tpot_ms=decode / (n_tokens - 1) if n_tokens > 1 else 0.0,
            iterations=n_iterations,
            tokens_per_iter=(self.n_accepted + n_iterations) / n,
            path_length=self.n_accepted / n,
            draft_nodes=self.n_drafted / n,
            acceptance=self.n_accepted / self.n_drafted if self.n_drafted else 0.0,
            draft_ms=self.draft_ms / n,
            verify_ms=self.verify_ms / n,
            other_ms=self.other_ms / n,
            draft_passes=self.n_draft_passes / n,
            repetition=repetition(self.ids),
        )


def tally(steps: Iterable[Step]) -> Tally:
    """All steps of a text, added up; none is kept."""
    total = Tally()
    for step in steps:
        total.add(step)
    return total


def measure(steps: Iterable[Step]) -> Metrics:
    """The metrics of one generation from its steps, in the one definition used everywhere."""
    return tally(steps).metrics()


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
    found = [is_match for step in steps[1:] for is_match in matches(step)]
    return sum(found) / len(found) if found else 0.0


def matches(step: Step) -> list[bool]:
    """Which nodes of an iteration's tree, the root left out, hold the token that the target likes
    best after their own path, whether or not that path is accepted."""
    tree = step.tree
    liked = [step.predictions[parent] for parent in tree.parents[1:]]
    return [token == best for token, best in zip(tree.tokens[1:], liked, strict=True)]


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


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """1 - distinct n-grams / n-grams."""
    grams = list(zip(*[ids[i:] for i in range(n)], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def versions() -> dict[str, str]:
    """What a reported figure depends on."""
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "torch": str(torch.__version__),  # the package's may lack its build, as +cu130
        "tokenizers": version("tokenizers"),
        "safetensors": version("safetensors"),
    }
