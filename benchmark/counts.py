"""What is counted from a generation's steps: passes by their rows, depths, matches by probability;
and the time that the passes alone would take.

    drafts, verifies = count_passes(steps, commit="keep")
    predict_text_ms(step_times, config, pair, steps)
    count_depths(steps)["accepted"]  # paths accepted to depth 1, 2, ...
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
from engine.passes import ROW_COUNTS, row_count
from methods.rules import are_retrieved

N_BINS = 20  # of a probability


def count_passes(steps: Sequence[Step], commit: str) -> tuple[Counter, Counter]:
    """Return the number of passes after prefill by their rows: of the draft, of the target."""
    drafts: Counter[int] = Counter()
    verifies: Counter[int] = Counter()
    for step in steps[1:]:
        drafts.update(step.draft_rows)
        verifies[len(step.tree)] += 1
        if commit == "rebuild":
            verifies[len(step.path)] += 1
    return drafts, verifies


def padded(passes: Mapping[int, int], model: FastGPTNeoX, min_rows: int) -> Counter:
    """Return the number of passes by the rows that they have once they are padded."""
    found: Counter[int] = Counter()
    for n_rows, n in passes.items():
        found[rows_run(model, n_rows, min_rows)] += n
    return found


def rows_run(model: FastGPTNeoX, n: int, min_rows: int) -> int:
    """Return how many rows a pass of n rows really runs."""
    n = max(n, min_rows, model.min_rows)
    return row_count(n) if model.has_fixed_shapes and n <= ROW_COUNTS[-1] else n


def predict_text_ms(
    times: StepTimes, config: GenerationConfig, pair: Pair, steps: Sequence[Step]
) -> float:
    """Return what the passes of a text would take alone, in milliseconds."""
    min_rows = config.make_rule().min_rows
    drafts, verifies = count_passes(steps, config.commit)
    drafts = padded(drafts, pair.draft, min_rows)
    verifies = padded(verifies, pair.target, min_rows)
    return times.predict_ms(drafts, verifies)


def count_depths(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return three counts for depth 1, 2, ...: of the trees that reach it (drafted), of the
    accepted paths that end at it or have a child there (tried), of those that reach it
    (accepted)."""
    trees = [step for step in steps if step.tree]
    deepest = max((max(step.tree.depths) for step in trees), default=0)
    drafted = [0] * deepest
    tried = [0] * deepest
    accepted = [0] * deepest
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
    path, in N_BINS bins of their probability after their parent.

    That is the draft's own probability, warped if they were drawn from it, or a calibrated one.
    """
    drafted = [0] * N_BINS
    right = [0] * N_BINS
    for step in steps[1:]:
        tree = step.tree
        are_right = [False, *matches(step)]
        for row in range(1, len(tree)):
            if not are_retrieved(tree)[row]:
                above = tree.path_logprobs[tree.parents[row]]
                chance = math.exp(tree.path_logprobs[row] - above)
                bin = min(int(chance * N_BINS), N_BINS - 1)
                drafted[bin] += 1
                right[bin] += are_right[row]
    return {"drafted": drafted, "top1_match": right}
