"""What is counted from a generation's steps: passes and their rows, depths, matches by confidence;
and the time that its passes alone would take.

    record = counted(record, steps, run, pair, step_times)
    drafts, verifies = count_passes(steps, commit="keep")
    depths = count_depths(steps)
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmark.results import Record, Results, Run
from benchmark.step_times import StepTimes, measure_step_times
from cli.errors import say
from cli.metrics import matches, measure_acceptance
from cli.models import Pair, overflow_note
from engine.caches import CachePool
from engine.decoding import Step
from engine.streaming import WHOLE_TEXT
from gpt_neox import Model
from methods.rules import are_retrieved

N_BINS = 20  # of a probability


def counted(
    record: Record, steps: Sequence[Step], run: Run, pair: Pair, times: StepTimes | None
) -> Record:
    """A text's record with what is counted from its steps; transformers' have no trees. times: of
    single forwards, if they were measured."""
    if run.is_peer:
        return record
    metrics = record["metrics"] | measure_acceptance(steps, run.way.settings)
    counts = {}
    if run.temperature or not record["repeat"]:  # figures have a greedy text's first round alone
        counts["depths"] = count_depths(steps)
    if not (run.temperature or record["repeat"]):  # what is sampled says nothing of calibration
        counts["calibration"] = count_calibration(steps)
    if times and not run.way.strict and run.way.window == WHOLE_TEXT:  # as the times are
        counts["predicted_ms"] = predict_text_ms(times, run, pair, steps)
    return record | {"metrics": metrics} | counts


def warn_of_overflow(steps: Sequence[Step], draft: Model | None) -> None:
    """Say so if in one of these steps no candidate of the draft was finite."""
    if any(step.draft_overflowed for step in steps):
        say(overflow_note(draft))


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


def time_forwards(results: Results, pair: Pair, prompts: Mapping[str, list]) -> StepTimes:
    """The times of single forwards in the middle of a table's first text, where attention costs
    its mean. prompts: their ids, by dataset. Raises OutOfMemory."""
    longest = max(len(prompt) for own in prompts.values() for prompt in own)
    n_read = min(longest, results.sizes["prompt_tokens"][0])
    context = n_read + results.sizes["new_tokens"][0] // 2
    return measure_step_times(pair.target, pair.draft, context, not results.options.no_graphs)


def predict_text_ms(times: StepTimes, run: Run, pair: Pair, steps: Sequence[Step]) -> float:
    """What the forwards of a run's text would take alone."""
    min_rows = run.way.rule().min_rows
    drafts, verifies = count_passes(steps, run.way.commit)
    drafts = padded(drafts, pair.draft.pool, min_rows)
    verifies = padded(verifies, pair.target.pool, min_rows)
    return times.predict_ms(drafts, verifies)


def count_depths(steps: Sequence[Step]) -> dict[str, list[int]]:
    """For depth 1, 2, ...: how many trees reached it (drafted), how many accepted paths came to a
    node with a child at it (tried), and how many went on to it (accepted)."""
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
    """Drafted nodes, and those of them that are the target's best token after their path, by N_BINS
    bins of the probability that their rule gave them after their parent.

    That is the draft's own, warped if they were drawn from it, or a counted chance.
    """
    drafted = [0] * N_BINS
    matching = [0] * N_BINS
    for step in steps[1:]:
        tree = step.tree
        are_matching = [False, *matches(step)]
        for row in range(1, len(tree)):
            if not are_retrieved(tree)[row]:
                above = tree.path_logprobs[tree.parents[row]]
                chance = math.exp(tree.path_logprobs[row] - above)
                bin = min(int(chance * N_BINS), N_BINS - 1)
                drafted[bin] += 1
                matching[bin] += are_matching[row]
    return {"drafted": drafted, "matching": matching}
