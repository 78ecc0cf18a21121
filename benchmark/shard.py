"""A table under torchrun: one target for all ranks, or with --shard prompts a pair for each.

    torchrun --nproc-per-node 4 bench.py --shard prompts --output results/mine.json

Rank r of n takes the prompts r, r + n, ... and keeps what it writes in a file of its own beside the
results file; at the end all is gathered. A rank that is killed leaves its file, which --resume
takes up.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmark.columns import COLUMNS, RATES, TIMES
from benchmark.results import Options, Record, Results
from benchmark.tables import Table
from cli.errors import UsageError
from cli.models import choose_device
from parallel.ranks import Ranks


class Shard:
    """What one rank has of a table's work; there being but one, all of it."""

    def __init__(self, ranks: Ranks | None = None, is_shared: bool = False):
        """ranks: of the command, if there are several. is_shared: each has prompts of its own, else
        they compute one target together."""
        if is_shared and "WORLD_SIZE" not in os.environ:
            command = "torchrun --nproc-per-node N bench.py --shard prompts"
            raise UsageError(f"--shard is for several processes: {command}")
        self.ranks, self.is_shared = ranks, is_shared and ranks is not None
        self.index = ranks.index if ranks else 0
        self.mark: dict[str, int] = {}  # of this rank's records: which rank of `shared_by` it is
        self.has_times = True  # what it measures says something of speed

    def first(self, compute: Callable, *arguments: object) -> object:
        """What rank 0 computes, on every rank."""
        if not self.ranks:
            return compute(*arguments)
        return self.ranks.tell(None if self.index else compute(*arguments))

    def own_file(self, file: Path) -> Path | None:
        """Where this rank keeps what it measures; None if rank 0 keeps the same."""
        if self.index == 0:
            return file
        return beside(file, str(self.index)) if self.is_shared else None

    def takes(self, prompt: int) -> bool:
        """Whether a prompt is this rank's."""
        return not self.is_shared or prompt % self.ranks.count == self.index

    def record(self, describe: Callable, *arguments: object) -> Record:
        """A text as it is kept: as rank 0 describes it, on all; or this rank's own, which it names,
        and without times where they say nothing."""
        if not self.is_shared:
            return self.first(describe, *arguments)
        record = describe(*arguments)
        metrics = record["metrics"].items()
        if not self.has_times:
            metrics = [(name, value) for name, value in metrics if name not in RATES + TIMES]
        return record | {"metrics": dict(metrics)} | self.mark

    def require_sharable(self, options: Options, table: Table) -> None:
        """Raise UsageError for a table that several ranks cannot measure."""
        is_of_one = table.is_memory or (self.is_shared and options.table == "steps")
        if self.ranks and is_of_one:
            raise UsageError(f"--table {options.table} is measured by one process")
        if not self.is_shared:
            return
        if options.device is not None and ":" in options.device:
            one = f"--device {options.device}: with --shard each rank has a device of its own"
            raise UsageError(f"{one}; say cpu, cuda or nothing")
        timed = [name for name in table.columns if COLUMNS[name].is_timed]
        if timed and shares_cpu(choose_device(options.device)):
            why = f"ranks that share a CPU disturb each other's times ({', '.join(timed)})"
            raise UsageError(f"{why}; without times: --columns tokens_per_iter,acceptance,exact")

    def join(self, results: Results, now: Results) -> None:
        """Say in the results what each rank is, of which `now` tells this one; all come here.
        Raises UsageError unless all measure one table."""
        if not self.is_shared:
            return
        self.has_times = not shares_cpu(torch.device(now.machine["device"]))
        own = {"rank": self.index} | {name: now.machine[name] for name in ("device", "processor")}
        told = self.ranks.gather_objects((own, now.machine, now.prompts))
        for index, (described, machine, prompts) in enumerate(told):
            require_alike(index, machine | {"prompts": prompts}, told[0], self.has_times)
            if described not in results.shared_by:
                results.shared_by.append(described)
        self.mark = {"rank": results.shared_by.index(own)}

    def gather(self, results: Results) -> None:
        """Let every rank have all ranks' records."""
        if self.is_shared:
            for records in self.ranks.gather_objects(results.records):
                results.add(records)

    def end(self, file: Path | None) -> None:
        """All is in rank 0's file: no other rank needs its own."""
        if self.is_shared:
            self.ranks.gather_objects(None)
            if self.index:
                file.unlink(missing_ok=True)

    def command(self, words: list[str]) -> list[str]:
        """What starts bench.py with these words, as it was started."""
        if not self.ranks:
            return ["python", *words]
        n_here = os.environ.get("LOCAL_WORLD_SIZE", str(self.ranks.count))
        shard = ["--shard", "prompts"] if self.is_shared else []
        return ["torchrun", "--nproc-per-node", n_here, *words, *shard]


def beside(file: Path, rank: str) -> Path:
    """Where another rank than 0 keeps what it has measured; rank: its number, or a pattern."""
    return file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def left_behind(file: Path) -> list[Path]:
    """The files of ranks that did not come to the end."""
    return sorted(file.parent.glob(beside(file, "*").name))


def require_alike(index: int, said: dict, first: tuple, has_times: bool) -> None:
    """Raise UsageError unless what a rank measures goes into one table with what rank 0 does."""
    _, machine, prompts = first
    for name, value in (machine | {"prompts": prompts}).items():
        is_own = name == "device" or (name == "processor" and not has_times)
        if not is_own and said.get(name) != value:
            raise UsageError(f"rank {index} has {name} {said.get(name)}, rank 0 {value}")


def shares_cpu(device: torch.device) -> bool:
    """Whether several ranks of this machine compute on its CPU."""
    return device.type == "cpu" and os.environ.get("LOCAL_WORLD_SIZE") != "1"


def on_own_device(options: Options, ranks: Ranks) -> Options:
    """The options with the device of this rank."""
    device = ranks.own_device(choose_device(options.device))
    return replace(options, device=str(device)) if device.type == "cuda" else options
