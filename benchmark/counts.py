"""Counts from the steps of a text: passes by number of rows, depths, matches by probability; and
the predicted time of its passes.

    drafts, verifies = count_passes(steps, commit="keep")
    predict_text_ms(step_times, config, pair, steps)
    count_depths(steps)["accepted"]  # accepted paths that reach depth 1, 2, ...
    count_calibration(steps)["top1_match"]
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmark.step_times import StepTimes
from cli.metrics import matches
from cli.models import Pair
from engine.generate import Step
from engine.generation_config import GenerationConfig
from engine.model import FastGPTNeoX
from engine.passes import ROW_COUNTS, round_up_rows
from methods.rules import are_retrieved

N_BINS = 20  # of probabilities from 0 to 1


def count_passes(steps: Sequence[Step], commit: str) -> tuple[Counter, Counter]:
    """Return the number of draft passes and of target passes after prefill, by number of rows."""
    drafts: Counter[int] = Counter()
    verifies: Counter[int] = Counter()
    for step in steps[1:]:
        drafts.update(step.draft_rows)
        verifies[len(step.tree)] += 1
        if commit == "rebuild":
            verifies[len(step.path)] += 1
    return drafts, verifies


def pad_passes(passes: Mapping[int, int], model: FastGPTNeoX, min_rows: int) -> Counter:
    """Return the number of passes by number of rows, after the rows are padded."""
    found: Counter[int] = Counter()
    for n_rows, n in passes.items():
        found[padded_rows(model, n_rows, min_rows)] += n
    return found


def padded_rows(model: FastGPTNeoX, n: int, min_rows: int) -> int:
    """Return the number of rows that a pass over n rows runs, padding included."""
    n = max(n, min_rows, model.min_rows)
    return round_up_rows(n) if model.has_fixed_shapes and n <= ROW_COUNTS[-1] else n


def predict_text_ms(
    times: StepTimes, config: GenerationConfig, pair: Pair, steps: Sequence[Step]
) -> float:
    """Return the milliseconds that the passes of a text take by themselves, without other work."""
    min_rows = config.make_rule().min_rows
    drafts, verifies = count_passes(steps, config.commit)
    drafts = pad_passes(drafts, pair.draft, min_rows)
    verifies = pad_passes(verifies, pair.target, min_rows)
    return times.predict_ms(drafts, verifies)


def count_depths(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return three counts for each depth 1, 2, ...

    drafted   trees that reach the depth
    tried     accepted paths that reach the depth before, and have a child at this one
    accepted  accepted paths that reach the depth
    """
    trees = steps[1:]
    max_depth = max((max(step.tree.depths) for step in trees), default=0)
    drafted = [0] * max_depth
    tried = [0] * max_depth
    accepted = [0] * max_depth
    for step in trees:
        n_accepted = len(step.path) - 1
        for i in range(max(step.tree.depths)):
            drafted[i] += 1
        for i in range(n_accepted):
            tried[i] += 1
            accepted[i] += 1
        if step.path[-1] in step.tree.parents:
            tried[n_accepted] += 1
    return {"drafted": drafted, "tried": tried, "accepted": accepted}


def count_calibration(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return the number of drafted nodes, and of those that are the target's best token after their
    parent, in N_BINS bins of their probability given the parent.

    This is the probability that the method uses: the draft's own, after temperature and top-p if
    candidates are drawn, or a calibrated one.
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
