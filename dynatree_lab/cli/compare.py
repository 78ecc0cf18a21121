"""The comparison of a generation with ar on the same prompt (--compare).

    comparison = compare(request, steps)
    print(describe_comparison(comparison))

A comparison is a dict, which --json prints:

ar_throughput       tokens per second of ar; None after a single token, which has no rate
speedup             throughput of the method / throughput of ar; None if one of them has no rate
exact               whether the ids equal ar's; None for drawn candidates and an acceptance of the
                    user's in sampled text, whose ids are others
first_difference    index of the first different id in token_ids; None if all are equal
gap                 how far rounding had to reach there, as rounding_gap returns it; None if not
                    computed
is_strict           whether the generation is strict; ar is then strict with as many rows per pass
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dynatree_lab.engine.memory import OutOfMemory
from dynatree_lab.engine.passes import PassConfig, round_up_rows
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.generate import Step
from dynatree_lab.methods.static import PaddedAutoregressive
from dynatree_lab.metrics import measure, token_ids
from dynatree_lab.request import Request
from sampling import distance_to_interval

TIE = 1e-4  # rounding decides where the gap in float32 is smaller

Comparison = dict[str, float | bool | int | None]


def compare(request: Request, steps: Sequence[Step]) -> Comparison:
    """Run ar and compare the steps of a finished generation with it."""
    config, ours = request.config, token_ids(steps)
    if request.stop:  # ar stops there too, but perhaps some tokens earlier
        request = replace(request, max_new_tokens=len(ours))
    reference = list(reference_of(request).decode())
    speed, ar = measure(steps).throughput, measure(reference).throughput
    found: Comparison = {
        "ar_throughput": ar or None,
        "speedup": speed / ar if speed and ar else None,
        "exact": None,
        "first_difference": None,
        "gap": None,
        "is_strict": config.strict,
    }
    if not config.sampling.is_greedy and request.acceptance != "walk":
        return found
    theirs = token_ids(reference)
    at = first_difference(ours, theirs)
    found |= {"exact": at is None, "first_difference": at}
    if at is not None and not config.strict:
        found["gap"] = rounding_gap(request, ours, theirs)
    return found


def is_wrong(found: Comparison) -> bool:
    """Whether ids differ for another reason than rounding. Strict generations have no such
    excuse."""
    return found["exact"] is False and not is_tie(found["gap"])


def describe_comparison(found: Comparison) -> str:
    """Return the line that --compare prints."""
    ar = "strict ar" if found["is_strict"] else "ar"
    speed = "no speed of a single token"
    if found["speedup"]:
        speed = f"{found['ar_throughput']:.1f} tokens/s, so {found['speedup']:.2f}x"
    return f"{ar}: {speed}; the ids {describe_ids(found)}"


def describe_ids(found: Comparison) -> str:
    """Return the part about the ids."""
    if found["exact"] is None:
        return "are drawn, so they differ by chance"
    if found["exact"]:
        return "are equal"
    gap, ids = found["gap"], f"differ from token {found['first_difference']} on"
    if found["is_strict"]:
        return ids
    if gap is None:
        return f"{ids} (not enough memory for the float32 model that shows the gap)"
    kind = "a tie" if is_tie(gap) else "not a tie"
    return f"{ids} (gap {gap:.1e} in float32: {kind})"


def unknown_distribution(methods: Iterable[str]) -> str:
    """Return the note on sampled text of methods that are not the project's."""
    how = "lab.distribution_difference(settings, sampling) does (docs/python.md)"
    return f"{', '.join(methods)}: nobody has computed the distribution of this text; {how}"


# Options of drafting, which ar has not
OF_DRAFTING = {"acceptance": None, "calibrate": False, "costs": "off"}


def reference_of(request: Request) -> Request:
    """Return the ar request that a request is compared with."""
    config = request.config
    ar = strict_reference(config) if config.strict else PaddedAutoregressive()
    return replace(request, config=replace(config, settings=ar, **OF_DRAFTING))


def strict_reference(config: GenerationConfig) -> PaddedAutoregressive:
    """Return the settings of ar with as many rows per pass as a strict generation has."""
    return PaddedAutoregressive(rows=round_up_rows(config.method.n_verified))


def is_tie(gap: float | None) -> bool:
    """Whether a gap is so small that rounding decides. None is an unknown gap."""
    return gap is not None and gap < TIE


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """Return the first index at which two lists differ, or None if they are equal. It is the length
    of the shorter list if that begins the longer one."""
    if ours == theirs:
        return None
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return i
    return min(len(ours), len(theirs))


def rounding_gap(request: Request, ours: list[int], theirs: list[int]) -> float | None:
    """Return how far rounding had to reach where two texts of a request differ first, in float32.

    For greedy text it is the gap between the target's two largest logits. For sampled text it is
    how far the random number of this token is from the intervals of both tokens. None if memory
    does not suffice for the float32 model.
    """
    at, sampling = first_difference(ours, theirs), request.config.sampling
    ids, window = request.prompt + theirs[:at], request.config.window
    try:
        target = request.pair.float32_target
        cache = target.new_cache(min(len(ids), window.max_length), PassConfig(window=window))
        logits = target.prefill(ids, cache)
        target.release(cache)
    except OutOfMemory:
        return None
    if sampling.is_greedy:
        best, second = logits[0].topk(2).values.tolist()
        return best - second
    sampler = sampling.sampler(logits.device)
    *_, number = (sampler.random.random() for _ in range(at + 1))
    probs = sampler.target_distribution(logits)[0]
    return max(distance_to_interval(probs, each[at], number) for each in (ours, theirs))
