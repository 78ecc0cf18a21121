"""How fast each method writes, measured fairly beside ar: the whole measurement is in this file.

A table is a list of runs: a method with its settings, on one dataset's prompts, at one length. One
process writes all their texts, and keeps of each its times, of a greedy one its ids, too. What
makes it fair:

turns     all runs on a prompt before the next prompt, each time another one first: what a machine
          does at one time and not at another, as when it gets warm, is nobody's in particular
set-up    every run is loaded and has written some steps before the first text that counts
seeds     sampled texts have another one for each prompt and round, the same for every method
baseline  `ar`, the target alone, one token a pass, by the same forward, cache and loop as the rest

What the figures are of a text; tables have their medians over all prompts and rounds:

tok/s     (tokens - 1) / seconds from the first token to the last: the prompt's own pass, which
          gives the first one, is not in it. An end-of-text token ends no text
x ar      tok/s / ar's tok/s on the same prompt in the same round (Row.speedups)
exact     whether its ids are ar's on the same prompt, token for token. A strict run, whose passes
          round otherwise, is held against strict ar, a run over a window against ar over that

    python bench.py --methods "ar,linear K=8,dynatree tau=0.02" --repeats 3

benchmark/ has the rest: tables, options, results files, reports, and what other columns show.
"""

if __name__ == "__main__":
    from cli.start import run_program

    run_program("bench")

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from benchmark.counts import counted, time_forwards, warn_of_overflow
from benchmark.memory import measure_apart
from benchmark.opening import Prompts, open_table
from benchmark.options import build_parser, open_file, progress, show_files, show_table
from benchmark.peers import Peers
from benchmark.results import Record, Results, Run, key_of
from benchmark.rows import load_seconds, way_of
from cli.compare import first_difference, is_tie, top2_gap
from cli.errors import run_command_line, say
from cli.main import WARM_UP_STEPS
from cli.metrics import measure, token_ids
from cli.models import Pair, Request
from dynatree import Drafter
from engine.decoding import Step
from engine.streaming import WHOLE_TEXT
from parallel.driver import on_ranks
from parallel.ranks import Ranks


class Text(NamedTuple):
    """One text to write: a run on one of its dataset's prompts, in one of the rounds over all."""

    run: Run
    prompt: int  # index
    repeat: int  # the round

    def key(self) -> dict[str, str | int]:
        """Which text it is, as a record says it."""
        return {"run": self.run.label, "prompt": self.prompt, "repeat": self.repeat}


def in_turn(runs: Sequence[Run], prompts: Prompts, repeats: int) -> Iterator[Text]:
    """The order of a table's texts: in each round prompt by prompt, and on a prompt every run in
    turn, each time another one first."""
    for repeat, dataset in product(range(repeats), prompts):
        own = [run for run in runs if run.dataset == dataset]
        n_prompts = len(prompts[dataset])
        for prompt in range(n_prompts):
            first = repeat * n_prompts + prompt
            for i in range(len(own)):
                yield Text(own[(first + i) % len(own)], prompt, repeat)


class Bench:
    """The models, the prompts and the results of one table."""

    def __init__(self, results: Results, pair: Pair, prompts: Prompts, file: Path):
        self.results = results
        self.options = results.options
        self.pair = pair
        self.prompts = prompts  # their ids, by dataset
        self.file = file
        self.peers: Peers | None = None  # transformers' models, if a run is by it

    def measure_all(self) -> None:
        """Write the texts that the results file lacks, and hold all of them against ar's."""
        done = {key_of(record) for record in self.results.records}
        order = in_turn(self.results.runs, self.prompts, self.options.repeats)
        lacking = [text for text in order if key_of(text.key()) not in done]
        if lacking and not self.results.is_memory:
            self.warm_up()
        # Of single forwards, for the column "predicted"; a Drafter has none
        if self.results.lacks_step_times and not isinstance(self.pair.draft, Drafter):
            self.results.step_times = time_forwards(self.results, self.pair, self.prompts)
        with progress(lacking) as texts:
            for text in texts:
                self.results.records.append(self.measure(text))
                self.save()
        self.hold_against_ar()
        self.save()

    def save(self) -> None:
        if self.results.is_begun:
            self.results.save(self.file)

    def warm_up(self) -> None:
        """Write every run's first steps: what only first calls have to do is in no speed."""
        if any(run.is_peer for run in self.results.runs):
            self.peers = Peers(self.pair)
        steps = []
        for run in self.results.runs:
            start = time.perf_counter()
            steps += self.write(Text(run, 0, 0), WARM_UP_STEPS)
            seconds = time.perf_counter() - start
            self.results.setup_s[run.label] = seconds + load_seconds(run, self.pair, self.peers)
        warn_of_overflow(steps, self.pair.draft)

    def write(self, text: Text, n_steps: int | None = None) -> list[Step]:
        """A text, or its first n_steps: each has its new tokens, and their milliseconds on the wall
        clock, a device's work included (dynatree.Clock). What is done between steps is in none."""
        run, prompt = text.run, self.prompt_ids(text)
        if run.is_peer:
            return self.peers.decode(run.method, prompt, run.new_tokens, n_steps)
        way = way_of(run, self.options, self.seed(text))
        return list(islice(Request(self.pair, prompt, way, run.new_tokens).decode(), n_steps))

    def prompt_ids(self, text: Text) -> list[int]:
        return self.prompts[text.run.dataset][text.prompt][: text.run.prompt_tokens]

    def seed(self, text: Text) -> int:
        """Of a sampled text: another one for every prompt and round, the same for every method."""
        n_prompts = len(self.prompts[text.run.dataset])
        return (self.options.seed or 0) + text.repeat * n_prompts + text.prompt

    def measure(self, text: Text) -> Record:
        """Write one text: its figures, and where its ids stand."""
        if self.results.is_memory:  # and no speed: from a process that does nothing else
            how = text.run, self.prompt_ids(text), self.seed(text)
            found = measure_apart(self.options, self.pair.target.device, *how)
            return self.record(text, found["metrics"], found["token_ids"])
        steps = self.write(text)
        # Its tok/s is `throughput`: (tokens - 1) / seconds of all steps but the first, the prompt's
        record = self.record(text, asdict(measure(steps)), token_ids(steps))
        return counted(record, steps, text.run, self.pair, self.results.step_times)

    def record(self, text: Text, metrics: dict[str, float], ids: list[int]) -> Record:
        """What is kept of a text; of a sampled one no ids, as they are held against no others."""
        kept = [] if text.run.temperature else ids
        return text.key() | {"metrics": metrics, "ids_at": self.results.place_of(kept)}

    def hold_against_ar(self) -> None:
        """Find where greedy texts leave ar's, and by how little the target decided there: in
        float32, by a model that no timed text is to have beside it."""
        ids = self.results.token_ids
        for row in self.results.rows():
            for record, ar in row.compared():  # on the same prompt, in the same round
                at = first_difference(ids[record["ids_at"]], ids[ar["ids_at"]])
                if at is None or "difference" in record:
                    continue
                prompt = self.prompt_ids(Text(row.run, record["prompt"], record["repeat"]))
                text = prompt + ids[ar["ids_at"]][:at]
                window = WHOLE_TEXT if row.run.is_peer else row.run.way.window
                gap = top2_gap(self.pair, text, window)
                record["difference"] = {"at": at, "gap": gap, "is_tie": is_tie(gap)}


def run_table(bench: Bench, kind: str) -> int:
    """Measure and show a table, or as much of it as there is time for. Returns the exit status."""
    try:
        bench.measure_all()
    except KeyboardInterrupt:
        say("interrupted")
        bench.save()
        return 130
    finally:  # an error, too, leaves what was measured
        show_table(bench.results, kind, bench.file, bench.pair.ranks)
    return 0 if bench.results.is_exact else 1


def execute(args: argparse.Namespace, ranks: Ranks | None = None) -> int:
    """Carry out the command line, once parsed. Returns the exit status. ranks: with whom the target
    is computed."""
    if show_files(args):
        return 0
    with open_file(args) as (file, options, previous):
        table = open_table(options, previous, ranks)
        return run_table(Bench(*table, file), args.format)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    return on_ranks(
        lambda ranks: run_command_line(partial(execute, ranks=ranks), parser, arguments)
    )
