"""What is counted from a generation's steps: passes and their rows, depths, matches by confidence.

drafts, verifies = count_passes(steps, commit="keep")
predicted_ms = predict_text_ms(times, run, pair, steps)
depths = count_depths(steps)
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmark.results import Run
from benchmark.rows import settings_of
from benchmark.step_times import StepTimes
from cli.metrics import matches
from cli.models import Pair
from dynatree import Step
from engine.caches import CachePool

N_BINS = 20  # of a probability


def count_passes(steps: Sequence[Step], commit: str) -> tuple[Counter, Counter]:
    """Forwards after prefill by their rows: the draft's, the target's."""
    drafts: Counter[int] = Counter()
    verifies: Counter[int] = Counter()
    for step in steps[1:]:
        drafts.update(step.draft_rows)
        verifies[len(step.tree)] += 1
        if commit == "rebuild":
            verifies[len(step.path)] += 1
    return drafts, verifies


def padded(passes: Mapping[int, int], pool: CachePool, min_rows: int) -> Counter:
    """The same by the rows that a model's passes really have."""
    found: Counter[int] = Counter()
    for n_rows, n in passes.items():
        found[pool.padded(n_rows, min_rows)] += n
    return found


def predict_text_ms(times: StepTimes, run: Run, pair: Pair, steps: Sequence[Step]) -> float:
    """What the forwards of a run's text would take alone."""
    min_rows = settings_of(run).rule().min_rows
    drafts, verifies = count_passes(steps, run.commit)
    drafts = padded(drafts, pair.draft.pool, min_rows)
    verifies = padded(verifies, pair.target.pool, min_rows)
    return times.predict_ms(drafts, verifies)


def count_depths(steps: Sequence[Step]) -> dict[str, list[int]]:
    """For depth 1, 2, ...: how many trees reached it (drafted), how many accepted paths came to a
    node with a child at it (tried), and how many went on to it (accepted)."""
    trees = [step for step in steps if step.tree]
    deepest = max((step.tree.depth for step in trees), default=0)
    drafted = [0] * deepest
    tried = [0] * deepest
    accepted = [0] * deepest
    for step in trees:
        n_accepted = len(step.path) - 1
        for i in range(step.tree.depth):
            drafted[i] += 1
        for i in range(n_accepted):
            tried[i] += 1
            accepted[i] += 1
        if step.path[-1] in step.tree.parents:
            tried[n_accepted] += 1
    return {"drafted": drafted, "tried": tried, "accepted": accepted}


def count_calibration(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Drafted nodes, and those of them that are the target's best token after their path, by N_BINS
    bins of the probability that their rule gave them after their parent.

    That is the draft's own, warped if they were drawn from it; auto's is its counted chance.
    """
    drafted = [0] * N_BINS
    matching = [0] * N_BINS
    for step in steps[1:]:
        tree = step.tree
        are_matching = [False, *matches(step)]
        for row in range(1, len(tree)):
            if not tree.are_retrieved[row]:
                above = tree.path_logprobs[tree.parents[row]]
                chance = math.exp(tree.path_logprobs[row] - above)
                bin = min(int(chance * N_BINS), N_BINS - 1)
                drafted[bin] += 1
                matching[bin] += are_matching[row]
    return {"drafted": drafted, "matching": matching}
