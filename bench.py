"""The papers' tables, re-measured fairly: every method on the same prompts, in one process.

A table is a list of runs, each a method with its settings, and one loop measures them all. What
makes it fair:

turns      all runs on a prompt before the next prompt, each time another one first, as
           benchmark/turns.py says
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

if __name__ == "__main__":
    import cli.start  # noqa: F401

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from benchmark.counts import count_calibration, count_depths
from benchmark.memory import in_own_process, measure_memory, used_memory
from benchmark.options import build_parser, is_about_files, open_table, show, show_files
from benchmark.peers import PEERS, Peers
from benchmark.results import Results
from benchmark.resume import from_here, how_to_go_on
from benchmark.rows import settings_of, window_of
from benchmark.shard import Shard
from benchmark.sharing import lead, on_shards
from benchmark.step_times import StepTimes, measure_step_times, predict_text_ms
from benchmark.turns import Prompts, Turn, Turns
from cli.compare import TIE, first_difference, top2_gap
from cli.errors import UsageError, run_command_line, say
from cli.main import WARM_UP_STEPS
from cli.metrics import measure, measure_acceptance, token_ids
from cli.models import Pair, Request, overflow_note
from cli.options import choose_sampling
from cli.ranks import on_ranks
from dynatree import Step
from engine.sampling import Sampling
from parallel.ranks import Ranks
from parallel.target import Mail


class Bench:
    """The models, the prompts and the results of one table."""

    def __init__(self, results: Results, pair: Pair, prompts: Prompts, file: Path | None):
        """file: None on a rank that keeps none."""
        self.results = results
        self.pair = pair
        self.prompts = prompts
        self.turns = Turns(results, prompts)
        self.file = file
        self.shard = Shard()
        self.peers: Peers | None = None
        self.has_graphs = not results.options.get("no_graphs")
        self.has_overflowed = False  # the draft, and it was said
        self.is_interrupted = False

    def measure_until_interrupted(self) -> None:
        """Measure what the results file lacks, or as much of it as there is time for."""
        try:
            self.measure_all()
        except KeyboardInterrupt:
            self.is_interrupted = True
            say("interrupted")

    def measure_all(self) -> None:
        """Measure what the results file lacks, saving after each text."""
        is_new = not self.results.records
        if not self.results.is_memory and (self.turns.is_missing_some() or is_new):
            self.set_up()
        n_missing = self.turns.n_missing()
        progress = {"total": n_missing, "disable": None, "leave": False, "unit": "text"}
        with tqdm(**progress) as bar:
            for turn in self.shard.own(self.turns.missing()):
                record = self.shard.marked(self.measure(turn))
                bar.update(self.keep([record]))
            while self.shard.is_awaiting():
                bar.update(self.keep([]))
            bar.update(self.keep([]))
        self.explain_differences()

    def keep(self, records: list[dict]) -> int:
        """Save these records and what other ranks have written; how many they are."""
        records = records + self.shard.records()
        if records:
            self.turns.add(records)
            self.results.save(self.file)
        return len(records)

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
            times = StepTimes(**self.results.step_times)
            record["predicted_ms"] = predict_text_ms(times, turn.run, self.pair, steps)
        return record

    def decode(self, turn: Turn, n_steps: int | None = None) -> list[Step]:
        """One text, or its first n_steps (of peers: tokens)."""
        run = turn.run
        if run.method in PEERS:
            n_tokens = min(n_steps or run.new_tokens, run.new_tokens)
            return self.peers.decode(run.method, self.prompt_ids(turn), n_tokens)
        request = Request(
            self.pair,
            self.prompt_ids(turn),
            settings_of(run),
            run.new_tokens,
            sampling=self.sampling(turn),
            window=window_of(run, self.pair),
            commit=run.commit,
            strict=run.is_strict,
        )
        self.pair.use_graphs(self.has_graphs and not run.is_eager)
        steps = list(islice(request.decode(), n_steps))
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
        self.turns.add(self.shard.records())
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
        if self.is_interrupted or not self.turns.is_missing_some():
            return ""
        return "; ".join(self.shard.problems()) or "other ranks left texts out"

    def say_where(self) -> None:
        """The results file, and how to go on with it if it lacks something."""
        again = ""
        if self.turns.is_missing_some():
            again = f"; {self.turns.lacking()}; to go on: {how_to_go_on(self.file, self.shard)}"
        say(f"results in {from_here(self.file)}{again}")


def execute(args: argparse.Namespace) -> int:
    """Carry out the command line, once parsed. Returns the exit status."""
    if args.shard is None or is_about_files(args):
        with on_ranks() as mail:
            return measure_or_show(args, mail)
    return on_shards(measure_or_show, measure_share, args)


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


def measure_share(results: Results, pair: Pair, prompts: Prompts, shard: Shard) -> None:
    """Measure what of a table another rank than 0 takes: rank 0 gets it."""
    bench = Bench(results, pair, prompts, file=None)
    bench.shard = shard
    if bench.turns.is_missing_some():
        bench.set_up()
    for turn in shard.own(bench.turns.missing()):
        shard.tell(shard.marked(bench.measure(turn)))


def run_table(bench: Bench, kind: str) -> int:
    """Measure and show a table. Returns the exit status."""
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
