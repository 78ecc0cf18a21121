"""The papers' tables, re-measured fairly: every method on the same prompts, in one process.

A table is a list of runs, each a method with its settings, and one loop measures them all
(`Bench.write_texts`). What makes it fair:

turns      all runs on a prompt before the next prompt, each time another one first: what a machine
           does at one time and not at another, as when it gets warm, is nobody's in particular
set-up     loading and warming up come before, are timed apart, and are in no speed
record     one for each text, by the one definition of every metric (cli/metrics.py)
exactness  every greedy text is held against ar's on the same prompt, token for token; a strict
           one, whose passes round otherwise than plain ar's, against that of strict ar

`ar`, the baseline, runs with the same cache and the same forward as everything else.

    python bench.py                                  # the main table, on our own prompts
    python bench.py --table ablation --dataset wikitext2
    python bench.py --methods "ar,linear K=8,dynatree tau=0.02" --repeats 3
    python bench.py --table v2-1 --pair pythia       # a paper's own, beside what it prints

The tables are in benchmark/tables.toml, the options in benchmark/options.py.
"""

if __name__ == "__main__":
    import cli.start  # noqa: F401

import argparse
import os
import shlex
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from benchmark.counts import count_calibration, count_depths, predict_text_ms
from benchmark.memory import in_own_process, measure_memory, used_memory
from benchmark.options import (
    Prompts,
    build_parser,
    open_file,
    open_table,
    require_same,
    show,
    show_files,
)
from benchmark.peers import PEERS
from benchmark.results import Record, Results, key_of
from benchmark.rows import settings_of, window_of
from benchmark.step_times import measure_step_times
from benchmark.writer import Text, Writer
from cli.compare import TIE, first_difference, top2_gap
from cli.errors import run_command_line, say
from cli.metrics import measure, measure_acceptance, token_ids
from cli.models import Opened, Pair
from dynatree import Step
from parallel.led import on_ranks
from parallel.ranks import Ranks

LOG_S = 30.0  # between two words of how far a table is, where stderr is no terminal


class Bench:
    """The models, the prompts and the results of one table."""

    def __init__(self, results: Results, pair: Pair, prompts: Prompts, file: Path):
        self.results = results
        self.pair = pair
        self.prompts = prompts
        self.file = file
        self.writer = Writer(pair, prompts, results.options)
        n_texts = sum(len(prompts[run.dataset]) for run in results.runs)
        results.n_texts = n_texts * results.options.repeats

    def measure_all(self) -> None:
        """Measure what the results file lacks, and hold it against ar."""
        is_timed = self.results.table == "steps" or "predicted" in self.results.columns
        lacks_times = is_timed and not self.results.step_times
        texts = self.lacking()
        if not self.results.is_memory and (texts or lacks_times):
            self.set_up(lacks_times)
        pace = {} if sys.stderr.isatty() else {"mininterval": LOG_S, "delay": LOG_S}
        with tqdm(texts, leave=False, unit="text", **pace) as progress:
            for text in progress:
                self.results.records.append(self.measure(text))
                self.save()
        self.hold_against_ar()
        self.save()

    def lacking(self) -> list[Text]:
        """The texts that there are not yet: in each round prompt by prompt, and on a prompt every
        run in turn, each time another one first."""
        done = {key_of(record) for record in self.results.records}
        texts = []
        for repeat, dataset in product(range(self.results.options.repeats), self.prompts):
            n_prompts = len(self.prompts[dataset])
            for prompt in range(n_prompts):
                in_turn = deque(run for run in self.results.runs if run.dataset == dataset)
                in_turn.rotate(-(repeat * n_prompts + prompt))
                texts += [Text(run, prompt, repeat) for run in in_turn]
        return [text for text in texts if key_of(text.key()) not in done]

    def save(self) -> None:
        if self.results.is_begun:
            self.results.save(self.file)

    def set_up(self, with_times: bool) -> None:
        """Load and warm up every run, and time single forwards if asked to: set-up, not speed."""
        self.results.setup_s = self.writer.warm_up(self.results.runs)
        if with_times:  # in the middle of a text, where attention costs its mean
            sizes = self.results.sizes
            longest = max(len(prompt) for prompt in sum(self.prompts.values(), []))
            n_read = min(longest, sizes["prompt_tokens"][0])
            context = n_read + sizes["new_tokens"][0] // 2
            times = measure_step_times(self.pair.target, self.pair.draft, context)
            self.results.step_times = times

    def measure(self, text: Text) -> Record:
        """Write one text; its metrics and ids."""
        if not self.results.is_memory:
            steps = self.writer.generate(text)
            return self.describe(text, steps)
        used = used_memory(self.pair.target.device)
        how = (text.run, self.writer.prompt_ids(text), self.writer.sampling(text), used)
        # From a process that does nothing else
        return text.key() | in_own_process(measure_memory, self.results.options, *how)

    def describe(self, text: Text, steps: list[Step]) -> Record:
        """What is kept of a text."""
        run, record = text.run, text.key()
        record |= {"metrics": asdict(measure(steps)), "token_ids": token_ids(steps)}
        if run.method in PEERS:
            return record
        record["metrics"] |= measure_acceptance(steps, settings_of(run))
        record |= {"depths": count_depths(steps), "calibration": count_calibration(steps)}
        is_plain = not run.is_strict and run.window is None
        if self.results.step_times and is_plain:  # they are of plain passes over a whole text
            times = self.results.step_times
            record["predicted_ms"] = predict_text_ms(times, run, self.pair, steps)
        return record

    def hold_against_ar(self) -> None:
        """Find where texts leave their reference's, and by how little the target decided there: in
        float32, by a model that no timed text is to have beside it."""
        for row in self.results.rows():
            for record, ar in row.differing():
                if "difference" in record:
                    continue
                at = first_difference(record["token_ids"], ar["token_ids"])
                prompt = self.writer.prompt_ids(Text(row.run, record["prompt"], record["repeat"]))
                window = window_of(row.run, self.pair)
                gap = top2_gap(self.pair, prompt + ar["token_ids"][:at], window)
                is_tie = gap is not None and gap < TIE
                record["difference"] = {"at": at, "gap": gap, "is_tie": is_tie}

    def is_exact(self) -> bool:
        """Whether every text is its reference's that had to be: a strict one, and in float32 any
        but for near-ties."""
        is_float32 = self.pair.target.dtype == torch.float32
        return not any(
            row.run.is_strict or (is_float32 and not record["difference"]["is_tie"])
            for row in self.results.rows()
            for record, _ in row.differing()
        )

    def show(self, kind: str) -> None:
        """What was measured, and how to go on if something lacks."""
        if not self.results.is_begun:
            return
        show(self.results, kind)
        again = ""
        n_lacking = self.results.n_texts - len(self.results.records)
        if n_lacking:
            ranks = self.pair.ranks
            start = ["torchrun", "--nproc-per-node", str(ranks.count)] if ranks else ["python"]
            command = shlex.join([*start, os.path.relpath(__file__), f"--resume={self.file}"])
            again = f"; {n_lacking} texts are lacking; to go on: {command}"
        say(f"results in {self.file}{again}")


def run_table(bench: Bench, kind: str) -> int:
    """Measure and show a table, or as much of it as there is time for. Returns the exit status."""
    try:
        bench.measure_all()
    except KeyboardInterrupt:
        say("interrupted")
        bench.save()
        return 130
    finally:  # an error, too, leaves what was measured
        bench.show(kind)
    return 0 if bench.is_exact() else 1


def execute(
    args: argparse.Namespace, ranks: Ranks | None = None, opened: Opened | None = None
) -> int:
    """Carry out the command line, once parsed. Returns the exit status.

    ranks: with whom the target is computed. opened: what open_pair gave for these options, where
    that is done.
    """
    if show_files(args):
        return 0
    with ExitStack() as held:
        file, options, previous = open_file(args, held)  # held: from other runs
        now, pair, prompts = open_table(options, ranks, opened)
        if previous:
            require_same(previous, now)
        return run_table(Bench(previous or now, pair, prompts, file), args.format)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    return on_ranks(
        lambda ranks: run_command_line(partial(execute, ranks=ranks), parser, arguments)
    )


if __name__ == "__main__":
    sys.exit(main())
