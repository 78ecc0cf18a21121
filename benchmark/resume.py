"""Whether a results file can be gone on with: what it says must be what would be measured now; how.

require_same(previous, now)
require_possible(previous, prompts, vocab_size)
say(f"to go on: {how_to_go_on(file, shard)}")
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmark.machine import ROOT
from benchmark.results import Results, Run
from benchmark.shard import Shard
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


def how_to_go_on(file: Path, shard: Shard) -> str:
    """The command that goes on with a results file, for a shell."""
    words = [from_here(ROOT / "bench.py"), "--resume", from_here(file)]
    return shlex.join(shard.command(words))


def from_here(file: Path) -> str:
    """A file's name from the folder one stands in, or the whole name if that is shorter."""
    whole = os.path.abspath(file)
    try:
        near = os.path.relpath(file)
    except (OSError, ValueError):  # the folder has been removed; the file is on another drive
        return whole
    if near.startswith("-"):
        near = os.path.join(os.curdir, near)  # else it would be taken for an option
    return min(near, whole, key=len)
