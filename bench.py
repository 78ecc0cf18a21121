"""The papers' tables, re-measured fairly: every method on the same prompts, in one process.

A table is a list of runs, each a method with its settings, and one loop measures them all. What
makes it fair stands here, in this order:

turns      all runs on a prompt before the next prompt, each time another one first
set-up     loading and warming up come before, are timed apart, and are in no speed
record     one for each text, by the one definition of every metric (cli/metrics.py)
exactness  every greedy text is held against ar's on the same prompt, token for token; a strict
           one, whose passes round otherwise than plain ar's, against that of strict ar

`ar`, the baseline, runs with the same cache and the same forward as everything else.

    python bench.py                                  # the main table, on our own prompts
    python bench.py --table ablation --dataset wikitext2
    python bench.py --methods "ar,linear K=8,dynatree tau=0.02" --repeats 3
    python bench.py --table v2-1                     # a paper's own, beside what it prints

The tables are in benchmark/tables.py, the papers' in benchmark/presets.py, the options in
benchmark/options.py.
"""

if __name__ == "__main__":  # before torch, whose import takes a second
    from cli.start import guard_imports

    guard_imports()

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from benchmark.columns import TIMES
from benchmark.counts import count_calibration, count_depths, count_passes, padded
from benchmark.memory import in_own_process, measure_memory, used_memory
from benchmark.options import (
    build_parser,
    is_about_files,
    open_share,
    open_table,
    restarted,
    show,
    show_files,
)
from benchmark.peers import PEERS, Peers
from benchmark.results import Results, Run
from benchmark.rows import settings_of, window_of
from benchmark.shard import Shard, answer_of, lead, require_alike, shares_cpu, sharing
from benchmark.step_times import StepTimes, measure_step_times
from cli.compare import TIE, first_difference, top2_gap
from cli.errors import UsageError, explain, run_command_line, say
from cli.interrupts import interrupts
from cli.main import WARM_UP_STEPS
from cli.metrics import measure, measure_acceptance, token_ids
from cli.models import Pair, Request, overflow_note
from cli.options import choose_sampling
from cli.ranks import on_ranks
from dynatree import Step
from engine.sampling import Sampling
from parallel.ranks import Ranks
from parallel.target import Mail

MANY = 10_000  # missing texts that are looked at, where some prompts are to be named
FEW = 5  # prompts that are


@dataclass(frozen=True)
class Turn:
    """One text to write: a run on a prompt, in one of the rounds over all prompts."""

    repeat: int
    prompt: int
    run: Run


def take_turns(
    runs: Sequence[Run], prompts: Mapping[str, Sequence], n_repeats: int
) -> Iterator[Turn]:
    """All runs on a prompt before the next, each time another one first; dataset by dataset."""
    for repeat in range(n_repeats):
        for dataset, own in prompts.items():
            order = [run for run in runs if run.dataset == dataset]
            for prompt in range(len(own)):
                first = (repeat * len(own) + prompt) % max(len(order), 1)
                for run in order[first:] + order[:first]:
                    yield Turn(repeat, prompt, run)


def prompt_of(turn: Turn) -> tuple[int, str, int]:
    """What the turns on one prompt, in one round, have in common."""
    return turn.repeat, turn.run.dataset, turn.prompt


class Bench:
    """The models, the prompts and the results of one table."""

    def __init__(
        self, results: Results, pair: Pair, prompts: dict[str, list[list[int]]], file: Path | None
    ):
        """prompts: by dataset. file: None on a rank that keeps none."""
        self.results = results
        self.pair = pair
        self.prompts = prompts
        self.datasets = {run.label: run.dataset for run in results.runs}
        self.file = file
        self.shard = Shard()
        self.peers: Peers | None = None
        self.has_graphs = not results.options.get("no_graphs")
        self.has_overflowed = False  # the draft, and it was said
        self.is_interrupted = False

    def measure_until_interrupted(self) -> None:
        """Measure what the results file lacks, or as much of it as there is time for."""
        try:
            with interrupts(raised=True):
                self.measure_all()
        except KeyboardInterrupt:
            self.is_interrupted = True
            say("interrupted")

    def measure_all(self) -> None:
        """Measure what the results file lacks, saving after each text."""
        records = self.results.records
        if not self.results.is_memory and (self.is_missing_some() or not records):
            self.set_up()
        n_missing = self.n_turns() - len(records)
        progress = {"total": n_missing, "disable": None, "leave": False, "unit": "text"}
        with tqdm(**progress) as bar:
            for turn in self.shard.own(self.missing(), prompt_of):
                bar.update(self.keep([self.measured(turn)]))
            while self.shard.is_awaiting():
                bar.update(self.keep([]))
            bar.update(self.keep([]))
        self.explain_differences()

    def keep(self, records: list[dict]) -> int:
        """Save these records and what other ranks have written; how many they are."""
        with interrupts(raised=False):
            n_kept = self.add(records + self.shard.records())
            if n_kept:
                self.results.save(self.file)
            return n_kept

    def add(self, records: list[dict]) -> int:
        """Put records where the turns have their texts; how many they are."""
        self.results.records += records
        self.results.records.sort(key=self.place_of)
        return len(records)

    def place_of(self, record: dict) -> tuple[int, int, int]:
        """Where the texts on a record's prompt stand among all: round, dataset, prompt."""
        dataset = self.datasets[record["run"]]
        return record["repeat"], list(self.prompts).index(dataset), record["prompt"]

    def missing(self) -> Iterator[Turn]:
        """The turns that the results file has no record of, in their order; told one by one, as a
        thousand million rounds are more than a list can hold."""
        done = {(r["repeat"], r["prompt"], r["run"]) for r in self.results.records}
        repeats = self.results.options["repeats"]
        for turn in take_turns(self.results.runs, self.prompts, repeats):
            if (turn.repeat, turn.prompt, turn.run.label) not in done:
                yield turn

    def lacking(self) -> str:
        """How many texts there are not, and on which prompts, the first of them."""
        n_texts = self.n_turns() - len(self.results.records)
        names = []
        for turn in islice(self.missing(), MANY):
            name = f"{turn.run.dataset} {turn.prompt}"
            if name not in names:
                names.append(name)
        if len(names) > FEW:
            names = names[:FEW] + ["..."]
        return f"{n_texts} texts are lacking ({', '.join(names)})"

    def is_missing_some(self) -> bool:
        return next(self.missing(), None) is not None

    def n_turns(self) -> int:
        """Of the whole table."""
        n_texts = sum(len(self.prompts[run.dataset]) for run in self.results.runs)
        return n_texts * self.results.options["repeats"]

    def set_up(self) -> None:
        """Load and warm up every run, and time single forwards: set-up, not speed."""
        load_peers_s = self.load_peers()
        for run in self.results.runs:
            start = time.perf_counter()
            self.decode(Turn(0, 0, run), n_steps=WARM_UP_STEPS)
            seconds = time.perf_counter() - start
            if run.method in PEERS:
                seconds += load_peers_s
            else:
                seconds += self.pair.load_s["target"]
                if settings_of(run).rule().max_depth > 0:
                    seconds += self.pair.load_s["draft"]
            if self.shard.has_times:
                self.results.setup_s[run.label] = seconds
        is_wanted = self.results.table == "steps" or "predicted" in self.results.columns
        if is_wanted and not self.results.step_times:
            self.time_steps()

    def load_peers(self) -> float:
        """Let transformers load the models if a run asks for it; the seconds it took."""
        start = time.perf_counter()
        if any(run.method in PEERS for run in self.results.runs):
            self.peers = Peers(self.pair)
        return time.perf_counter() - start

    def time_steps(self) -> None:
        """Time forwards alone in the middle of a text, where attention costs its mean."""
        sizes = self.results.sizes
        context = sizes["prompt_tokens"][0] + sizes["new_tokens"][0] // 2
        self.pair.use_graphs(self.has_graphs)
        times = measure_step_times(self.pair.target, self.pair.draft, context)
        self.results.step_times = asdict(times)

    def measured(self, turn: Turn) -> dict:
        """One record, of which rank it is, and without times where they say nothing."""
        record = self.measure(turn) | self.shard.mark
        if not self.shard.has_times:
            for name in TIMES:
                del record["metrics"][name]
        return record

    def measure(self, turn: Turn) -> dict:
        """One record: a run's metrics and ids on one prompt."""
        record = {"run": turn.run.label, "prompt": turn.prompt, "repeat": turn.repeat}
        if self.results.is_memory:
            return record | self.measure_memory(turn)
        steps = self.decode(turn)
        record["metrics"] = asdict(measure(steps))
        record["token_ids"] = token_ids(steps)
        if turn.run.method in PEERS:
            return record
        record["metrics"] |= measure_acceptance(steps, settings_of(turn.run))
        record["depths"] = count_depths(steps)
        record["calibration"] = count_calibration(steps)
        is_plain = not turn.run.is_strict and turn.run.window is None
        if self.results.step_times and is_plain:  # they are of plain passes over a whole text
            record["predicted_ms"] = self.predict_ms(turn, steps)
        return record

    def decode(self, turn: Turn, n_steps: int | None = None) -> list[Step]:
        """One text, or its first n_steps (of peers: tokens)."""
        run = turn.run
        if run.method in PEERS:
            n_tokens = min(n_steps or run.new_tokens, run.new_tokens)
            return self.peers.decode(run.method, self.prompt_ids(turn), n_tokens)
        options = {"max_new_tokens": run.new_tokens, "commit": run.commit}
        options["strict"] = run.is_strict
        options["sampling"] = self.sampling(turn)
        options["window"] = window_of(run, self.pair)
        request = Request(self.pair, self.prompt_ids(turn), options)
        self.pair.use_graphs(self.has_graphs and not run.is_eager)
        steps = list(islice(request.decode(settings_of(run)), n_steps))
        self.say_overflow(steps)
        return steps

    def say_overflow(self, steps: Sequence[Step]) -> None:
        """Say it the first time that nothing a draft said was finite."""
        if self.has_overflowed:
            return
        self.has_overflowed = any(step.tree and step.tree.has_overflowed for step in steps)
        if self.has_overflowed:
            say(overflow_note(self.pair.draft))

    def prompt_ids(self, turn: Turn) -> list[int]:
        return self.prompts[turn.run.dataset][turn.prompt][: turn.run.prompt_tokens]

    def sampling(self, turn: Turn) -> Sampling | None:
        """Another seed for every prompt and repeat, the same for every method."""
        options = self.results.options
        if not turn.run.temperature:
            return None
        n_prompts = len(self.prompts[turn.run.dataset])
        seed = (options["seed"] or 0) + turn.repeat * n_prompts + turn.prompt
        return choose_sampling(
            turn.run.temperature, options["top_p"], seed, turn.run.draft_temperature
        )

    def measure_memory(self, turn: Turn) -> dict:
        """Peak memory and ids, from a process that does nothing else."""
        used = used_memory(self.pair.target.device)
        arguments = (turn.run, self.prompt_ids(turn), self.sampling(turn), used)
        return in_own_process(measure_memory, self.results.options, *arguments)

    def predict_ms(self, turn: Turn, steps: Sequence[Step]) -> float:
        """What the forwards of these steps would take alone, by the measured step times."""
        min_rows = settings_of(turn.run).rule().min_rows
        drafts, verifies = count_passes(steps, turn.run.commit)
        drafts = padded(drafts, self.pair.draft.pool, min_rows)
        verifies = padded(verifies, self.pair.target.pool, min_rows)
        return StepTimes(**self.results.step_times).predict_ms(drafts, verifies)

    def explain_differences(self) -> None:
        """Find where texts leave their reference's, and by how little the target decided there."""
        for row in self.results.rows():
            for record, ar in row.differing():
                if "difference" in record:
                    continue
                at = first_difference(record["token_ids"], ar["token_ids"])
                prompt = self.prompt_ids(Turn(record["repeat"], record["prompt"], row.run))
                window = window_of(row.run, self.pair)
                gap = top2_gap(self.pair, prompt + ar["token_ids"][:at], window)
                is_tie = gap is not None and gap < TIE
                record["difference"] = {"at": at, "gap": gap, "is_tie": is_tie}

    def is_exact(self) -> bool:
        """Whether every text is its reference's that had to be: a strict one, and in float32 any
        but for near-ties."""
        is_float32 = self.pair.target.dtype == torch.float32
        for row in self.results.rows():
            for record, _ in row.differing():
                has_to_be = is_float32 and not record["difference"]["is_tie"]
                if row.run.is_strict or has_to_be:
                    return False
        return True

    def close(self, kind: str) -> str:
        """Save and show what was measured. What cannot be saved is shown, too, and the reason
        returned."""
        self.add(self.shard.records())
        if not self.results.is_begun:
            return ""
        problem = ""
        try:
            self.results.save(self.file)
        except UsageError as error:
            problem = str(error)
        show(self.results, kind)
        if not problem:
            self.say_where()
            problem = self.why_lacking()
        return problem

    def why_lacking(self) -> str:
        """Why a table that nobody interrupted is not whole; empty if it is."""
        if self.is_interrupted or not self.is_missing_some():
            return ""
        return "; ".join(self.shard.problems()) or "other ranks left texts out"

    def say_where(self) -> None:
        """The results file, and how to go on with it if it lacks something."""
        again = ""
        if self.is_missing_some():
            words = [*self.shard.launcher(), from_here(__file__), "--resume", from_here(self.file)]
            again = f"; {self.lacking()}; to go on: {shlex.join(words + self.shard.options())}"
        say(f"results in {from_here(self.file)}{again}")


def from_here(file: str | Path) -> str:
    """A file's name from the folder one stands in, or the whole name if that is shorter."""
    whole = os.path.abspath(file)
    try:
        near = os.path.relpath(file)
    except (OSError, ValueError):  # the folder has been removed; the file is on another drive
        return whole
    if near.startswith("-"):
        near = os.path.join(os.curdir, near)  # else it would be taken for an option
    return min(near, whole, key=len)


def execute(args: argparse.Namespace) -> int:
    """Carry out the command line, once parsed. Returns the exit status."""
    if args.shard is None or is_about_files(args):
        return on_ranks(measure_or_show, args)
    with sharing() as ranks:
        if ranks and ranks.index:
            return follow(args, ranks)
        return measure_or_show(restarted(args), None, ranks)


def measure_or_show(args: argparse.Namespace, mail: Mail | None, ranks: Ranks | None = None) -> int:
    """The same, with the other ranks if there are any: by mail they compute one target together,
    else ranks share the prompts."""
    if is_about_files(args):
        show_files(args)
        return 0
    try:
        with ExitStack() as held:  # the results file, from other runs
            bench = Bench(*open_table(args, held, mail))
            if ranks:
                bench.shard = lead(ranks, bench.results, bench.pair)
            return run_table(bench, args.format)
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def follow(args: argparse.Namespace, ranks: Ranks) -> int:
    """Write, on another rank, texts for rank 0, which alone says anything. Returns the exit status:
    that of a rank that fails is 0, as torchrun ends all others at once for any other."""
    shard = Shard(ranks.store, ranks.index)
    answer = {}
    ((options, done),) = ranks.hear()
    try:
        results, pair, prompts = open_share(args, options, done)
        shard.has_times = not shares_cpu(pair.target.device)
        answer = answer_of(ranks, results, pair)
    except Exception as error:  # whatever it is, rank 0 says it
        answer["problem"] = explain(error, build_parser())[0]
    require_alike(ranks.gather_objects(answer), shard.has_times)
    bench = Bench(results, pair, prompts, file=None)
    bench.shard = shard
    with shard.beating():
        try:
            if bench.is_missing_some():
                bench.set_up()
            for turn in shard.own(bench.missing(), prompt_of):
                shard.tell(bench.measured(turn))
            shard.end("")
        except KeyboardInterrupt:
            shard.end("interrupted")
            return 130
        except Exception as error:
            shard.end(explain(error, build_parser())[0])
    return 0


def run_table(bench: Bench, kind: str) -> int:
    """Measure and show a table. Returns the exit status."""
    with interrupts(raised=False):  # but while it measures: what it measured is not to be lost
        try:
            bench.measure_until_interrupted()
        finally:  # an error, too, leaves what was measured
            problem = bench.close(kind)
    if problem:
        say(f"error: {problem}")
    if bench.is_interrupted:
        return 130
    if problem:
        return 2
    return 0 if bench.is_exact() else 1


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command_line(execute, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
