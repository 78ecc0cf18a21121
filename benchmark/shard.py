"""Prompts shared out over ranks: what one rank has of the work, and how rank 0 hears of the others.

Whoever has finished a prompt takes the next. Rank 0 alone keeps the results file and gets what the
others write, a record at a time. That goes through torch.distributed's store, which torchrun keeps:
nobody waits for a rank that computes, and one that dies takes nothing along but its text. How ranks
begin and end is in benchmark/sharing.py.

taken      how many prompts have been taken, by whomever
R/0 ...    the records that rank R has written, until rank 0 takes them
R/end      that it has come to its end, and why if it failed
R/beats    a number that rises for as long as it lives
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby

import torch
from torch.distributed import HashStore, Store

from benchmark.columns import TIMED, TIMES
from benchmark.tables import Table
from benchmark.turns import Turn, prompt_of
from cli.errors import UsageError
from cli.models import choose_device
from engine.checkpoint import first_line
from parallel.ranks import RanksError, read_number

POLL_S = 0.1  # between two looks into the store
BEAT_S = 1.0
LOST_S = 30.0  # without a beat, after which a rank is thought to be gone


class Other:
    """Another rank, as rank 0 sees it while both measure."""

    def __init__(self, store: Store, rank: int):
        self.store = store
        self.rank = rank
        self.n_heard = 0  # records
        self.n_beats = 0
        self.heard_at = time.monotonic()
        self.has_ended = False
        self.problem = ""  # why it ended before there was no more to do
        self.mark: dict = {}  # of its records

    def heard(self, key: str) -> object | None:
        """What it has said under this key, to be heard once; None if there is nothing yet."""
        key = f"{self.rank}/{key}"
        if not self.store.check([key]):
            return None
        said = json.loads(self.store.get(key))
        self.store.delete_key(key)
        return said

    def records(self) -> list[dict]:
        """Those that it has written since they were asked for."""
        found = []
        record = self.heard(str(self.n_heard))
        while record is not None:
            self.n_heard += 1
            found.append(record | self.mark)
            record = self.heard(str(self.n_heard))
        return found

    def is_awaited(self) -> bool:
        """Whether more may come of it."""
        if self.has_ended:
            return False
        end = self.heard("end")
        if end is None and not self.is_lost():
            return True
        self.has_ended = True
        self.problem = end if end is not None else f"not heard of for {LOST_S:.0f} s"
        return False

    def is_lost(self) -> bool:
        """Whether its beats have stopped."""
        now = time.monotonic()
        n_beats = self.store.add(f"{self.rank}/beats", 0)
        if n_beats != self.n_beats:
            self.n_beats = n_beats
            self.heard_at = now
        return now - self.heard_at > LOST_S


class Shard:
    """What one rank has of the work that all share; there being but one, all of it."""

    def __init__(self, store: Store | None = None, rank: int = 0, has_times: bool = True):
        """has_times: whether what this rank measures says anything of speed."""
        self.store = store or HashStore()
        self.rank = rank
        self.has_times = has_times
        self.n_told = 0  # records
        self.mark: dict = {}  # of rank 0's own
        self.others: list[Other] = []  # whom rank 0 hears

    def own(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        """Of turns that are the same on every rank, those on prompts that nobody else has taken; a
        prompt is taken when the one before is finished. Raises RanksError."""
        taken = self.take()
        for i, (_, on_prompt) in enumerate(groupby(turns, prompt_of)):
            if i == taken:
                yield from on_prompt
                taken = self.take()

    def take(self) -> int:
        """The number of the next prompt that nobody has."""
        with needed():
            return self.store.add("taken", 1) - 1

    def marked(self, record: dict) -> dict:
        """A record of this rank, which it names, and without times where they say nothing."""
        if not self.has_times:
            for name in TIMES:
                del record["metrics"][name]
        return record | self.mark

    def records(self) -> list[dict]:
        """Those that the others have written since they were asked for."""
        found = []
        with suppress(RuntimeError):  # the store has gone
            for other in self.others:
                found += other.records()
        return found

    def is_awaiting(self) -> bool:
        """Whether another rank is still at work; a moment later, so that it can be asked again."""
        awaited = [other for other in self.others if other.is_awaited()]
        if awaited:
            time.sleep(POLL_S)
        return bool(awaited)

    def problems(self) -> list[str]:
        """Which ranks ended too early, and why."""
        return [f"rank {other.rank}: {other.problem}" for other in self.others if other.problem]

    def command(self, words: list[str]) -> list[str]:
        """What starts bench.py with these words, as it was started."""
        if not self.others:
            return ["python", *words]
        n_here = read_number("LOCAL_WORLD_SIZE", 1 + len(self.others))
        return ["torchrun", "--nproc-per-node", str(n_here), *words, "--shard", "prompts"]

    def tell(self, record: dict) -> None:
        """Give rank 0 a record. Raises RanksError."""
        with needed():
            self.store.set(f"{self.rank}/{self.n_told}", json.dumps(record))
        self.n_told += 1

    def end(self, problem: str) -> None:
        """Tell rank 0 that nothing more comes, and why if there was more to do. Raises
        RanksError."""
        with needed():
            self.store.set(f"{self.rank}/end", json.dumps(problem))

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Let rank 0 see that this one lives."""
        is_over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # the store has gone, and rank 0 with it
                while not is_over.wait(BEAT_S):
                    self.store.add(f"{self.rank}/beats", 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


@contextmanager
def needed() -> Iterator[None]:
    """Where a rank cannot go on without the store. Raises RanksError."""
    try:
        yield
    except RuntimeError as error:
        raise RanksError(f"torchrun's store has gone: {first_line(error)}") from error


def require_sharable(args: argparse.Namespace, table: Table) -> None:
    """Raise UsageError for a table that several ranks cannot measure."""
    if args.table == "steps" or table.is_memory:
        raise UsageError(f"--table {args.table} is measured by one process: leave out --shard")
    if args.device is not None and ":" in args.device:
        one = f"--device {args.device}: with --shard each rank has a device of its own"
        raise UsageError(f"{one}; say cpu, cuda or nothing")
    timed = [name for name in table.columns if name in TIMED]
    if timed and shares_cpu(choose_device(args.device)):
        why = f"ranks that share a CPU disturb each other's times ({', '.join(timed)})"
        raise UsageError(f"{why}; without times: --columns tokens_per_iter,acceptance,exact")


def shares_cpu(device: torch.device) -> bool:
    """Whether several ranks of this machine compute on its CPU."""
    n_here = read_number("LOCAL_WORLD_SIZE", read_number("WORLD_SIZE", 1))
    return device.type == "cpu" and n_here > 1


def on_own_device(args: argparse.Namespace) -> argparse.Namespace:
    """The options with the device of this rank."""
    if args.shard is None or choose_device(args.device).type != "cuda":
        return args
    own = f"cuda:{read_number('LOCAL_RANK', 0)}"
    return argparse.Namespace(**(vars(args) | {"device": own}))
