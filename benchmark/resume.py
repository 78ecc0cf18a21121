"""Whether a results file can be gone on with: what it says must be what would be measured now.

require_same(previous, now)
require_possible(previous, prompts, vocab_size)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmark.results import Results, Run
from cli.errors import UsageError

PLAN = ("table", "columns", "sizes", "is_memory", "prompts")  # of a results file


def require_same(previous: Results, now: Results) -> None:
    """Raise UsageError if an interrupted table would go on under other conditions."""
    changed = []
    for name in [*now.machine, "ranks"]:  # which are said where there are some
        before = previous.machine.get(name)
        if before != now.machine.get(name):
            changed.append(f"{name} was {before}")
    for name in PLAN:
        before = getattr(previous, name)
        if before != getattr(now, name):
            changed.append(f"{name} was {before}")
    if measured(previous.runs) != measured(now.runs):
        changed.append("the rows were others")
    if changed:
        raise UsageError(f"--resume would mix two conditions: {', '.join(changed)}")


def measured(runs: Sequence[Run]) -> list[Run]:
    """The runs without what they are shown beside, which older files do not say."""
    return [replace(run, baseline="", reference="", published={}) for run in runs]


def require_possible(
    previous: Results, prompts: Mapping[str, Sequence[list[int]]], vocab_size: int
) -> None:
    """Raise UsageError for records that no run of this table can have left; prompts: by dataset."""
    datasets = {run.label: run.dataset for run in previous.runs}
    for i, record in enumerate(previous.records):
        n_prompts = len(prompts[datasets[record["run"]]])
        is_in_plan = record["prompt"] < n_prompts
        is_in_plan &= record["repeat"] < previous.options["repeats"]
        if not is_in_plan or max(record["token_ids"], default=0) >= vocab_size:
            raise UsageError(f"--resume: record {i} is of another table")
