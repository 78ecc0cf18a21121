"""Prompts shared out over ranks, each with a whole pair on a device of its own.

    torchrun --nproc-per-node 4 bench.py --shard prompts

Whoever has finished a prompt takes the next. Rank 0 alone keeps the results file and gets what the
others write, a record at a time. That goes through torch.distributed's store, which torchrun keeps:
nobody waits for a rank that computes, and one that dies takes nothing along but its text.

taken      how many prompts have been taken, by whomever
R/0 ...    the records that rank R has written, until rank 0 takes them
R/end      that it has come to its end, and why if it failed
R/beats    a number that rises for as long as it lives
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby

import torch
from torch.distributed import HashStore, Store

from benchmark.columns import TIMED
from benchmark.machine import processor
from benchmark.results import Results
from benchmark.tables import Table
from cli.errors import UsageError
from cli.interrupts import heed_termination
from cli.models import Pair, choose_device
from engine.checkpoint import first_line
from parallel.ranks import Ranks, RanksError, joined, read_number

POLL_S = 0.1  # between two looks into the store
BEAT_S = 1.0
LOST_S = 30.0  # without a beat, after which a rank is thought to be gone
KEY = ("repeat", "prompt", "run")  # of a record: which text it is of


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

    def own(self, turns: Iterator, prompt_of: Callable) -> Iterator:
        """Of turns that are the same on every rank, those on prompts that nobody else has taken; a
        prompt is taken when the one before is finished."""
        taken = self.take()
        for i, (_, on_prompt) in enumerate(groupby(turns, prompt_of)):
            if i == taken:
                yield from on_prompt
                taken = self.take()

    def take(self) -> int:
        """The number of the next prompt that nobody has. Raises RanksError."""
        try:
            return self.store.add("taken", 1) - 1
        except RuntimeError as error:
            raise RanksError(f"torchrun's store has gone: {first_line(error)}") from error

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

    def launcher(self) -> list[str]:
        """What starts bench.py, as it was started."""
        if not self.others:
            return ["python"]
        n_here = read_number("LOCAL_WORLD_SIZE", 1 + len(self.others))
        return ["torchrun", "--nproc-per-node", str(n_here)]

    def options(self) -> list[str]:
        """What asks for as many ranks again."""
        return ["--shard", "prompts"] if self.others else []

    def tell(self, record: dict) -> None:
        """Give rank 0 a record."""
        self.store.set(f"{self.rank}/{self.n_told}", json.dumps(record))
        self.n_told += 1

    def end(self, problem: str) -> None:
        """Tell rank 0 that nothing more comes, and why if there was more to do."""
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
def sharing() -> Iterator[Ranks | None]:
    """The ranks that share what there is to do, as long as the block runs; None if there is but
    this one. Raises UsageError and RanksError."""
    if "WORLD_SIZE" not in os.environ:
        command = "torchrun --nproc-per-node N bench.py --shard prompts"
        raise UsageError(f"--shard is for several processes, as torchrun starts them: {command}")
    with joined() as ranks:
        heed_termination()
        yield ranks


def lead(ranks: Ranks, results: Results, pair: Pair) -> Shard:
    """Rank 0's part: tell the others what is to be measured, and see that they can. Raises
    UsageError."""
    done = [{name: record[name] for name in KEY} for record in results.records]
    ranks.tell([[results.options, done]])
    shard = Shard(ranks.store, 0, not shares_cpu(pair.target.device))
    answers = ranks.gather_objects(answer_of(ranks, results, pair))
    require_alike(answers, shard.has_times)
    for index, answer in enumerate(answers):
        if answer["described"] not in results.shared_by:
            results.shared_by.append(answer["described"])
        mark = {"rank": results.shared_by.index(answer["described"])}
        if index == 0:
            shard.mark = mark
        else:
            other = Other(ranks.store, index)
            other.mark = mark
            shard.others.append(other)
    return shard


def answer_of(ranks: Ranks, results: Results, pair: Pair) -> dict:
    """What a rank is, and what it would measure."""
    device = pair.target.device
    described = {"rank": ranks.index, "node": read_number("GROUP_RANK", 0), "device": str(device)}
    described["processor"] = processor(device)
    return {"described": described, "machine": results.machine, "prompts": results.prompts}


def require_alike(answers: list[dict], has_times: bool) -> None:
    """Raise UsageError unless every rank can measure, and what all measure goes into one table."""
    first = answers[0]
    for index, answer in enumerate(answers):
        if "problem" in answer:
            raise UsageError(f"rank {index}: {answer['problem']}")
        for name, value in answer["machine"].items():
            is_own = name == "device" or (name == "processor" and not has_times)
            if not is_own and value != first["machine"].get(name):
                raise UsageError(
                    f"rank {index} has {name} {value}, rank 0 {first['machine'].get(name)}: "
                    "that is not one table"
                )
        if answer["prompts"] != first["prompts"]:
            raise UsageError(f"rank {index} has other prompts than rank 0")


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
