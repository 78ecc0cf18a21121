"""Prompts shared out over ranks, each with a whole pair on a device of its own: how they do it.

    torchrun --nproc-per-node 4 bench.py --shard prompts

Rank 0 tells the others which table it is and which texts there are, and every rank says what it is:
what all measure goes into one file. From then on each works by itself (benchmark/shard.py), so one
that fails costs what it has not finished, and no more.

    on_shards(measure, measure_share, args)  # measure calls lead if there are ranks
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmark.machine import processor
from benchmark.options import build_parser, open_share, restarted
from benchmark.results import Results
from benchmark.shard import Other, Shard, shares_cpu
from benchmark.turns import Prompts
from cli.errors import UsageError, explain
from cli.models import Pair
from parallel.ranks import Ranks, RanksError, joined, read_number

KEY = ("repeat", "prompt", "run")  # of a record: which text it is of


def on_shards(
    measure: Callable[[argparse.Namespace, None, Ranks | None], int],
    measure_share: Callable[[Results, Pair, Prompts, Shard], None],
    args: argparse.Namespace,
) -> int:
    """Carry out a command line, once parsed: rank 0 measures, and the others their share. Returns
    the exit status. Raises UsageError and RanksError."""
    if "WORLD_SIZE" not in os.environ:
        command = "torchrun --nproc-per-node N bench.py --shard prompts"
        raise UsageError(f"--shard is for several processes, as torchrun starts them: {command}")
    with joined() as ranks:
        if ranks:
            heed_termination(ranks)
        if ranks and ranks.index:
            return follow(args, ranks, measure_share)
        return measure(restarted(args), None, ranks)


def heed_termination(ranks: Ranks) -> None:
    """SIGTERM, as torchrun sends it when a rank has gone, is an error that says so."""

    def end(number: int, frame: object) -> None:
        raise RanksError(ranks.why_ended())

    signal.signal(signal.SIGTERM, end)


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


def follow(
    args: argparse.Namespace,
    ranks: Ranks,
    measure_share: Callable[[Results, Pair, Prompts, Shard], None],
) -> int:
    """The others' part: open what rank 0 tells, and measure for it, which alone says anything.

    Returns the exit status: 0 even if measuring failed, as torchrun ends all ranks at once for any
    other. Raises UsageError unless all ranks can measure, and RanksError.
    """
    shard = Shard(ranks.store, ranks.index)
    ((options, done),) = ranks.hear()
    answer = {}
    problems: list[str] = []
    with noting(problems):
        results, pair, prompts = open_share(args, options, done)
        shard.has_times = not shares_cpu(pair.target.device)
        answer = answer_of(ranks, results, pair)
    if problems:
        answer["problem"] = problems[0]
    require_alike(ranks.gather_objects(answer), shard.has_times)
    try:
        with shard.beating(), noting(problems):
            measure_share(results, pair, prompts, shard)
    finally:
        shard.end("; ".join(problems))
    return 0


@contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """What ends the block before its time, for rank 0 to say; only Ctrl-C, which all get, goes on
    to end this rank."""
    try:
        yield
    except KeyboardInterrupt:
        problems.append("interrupted")
        raise
    except Exception as error:  # whatever it is: this rank is silent
        problems.append(explain(error, build_parser())[0])


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
