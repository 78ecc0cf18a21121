"""How fast each method writes, measured fairly beside ar: the whole measurement is in this file.

A table is a list of cases (benchmark/cases.py): a row in words, on one dataset's prompts, at one
size. One process writes all their texts and adds a line to the results file for each text: which
one it is, its metrics, its ids. What makes the measurement fair:

turns     all cases on a prompt before the next prompt, each time another one first; so what slows
          the machine for a while slows all of them
set-up    every case is loaded and has written some steps before the first text that counts
seeds     sampled texts have another seed for each prompt and round, the same for every method
baseline  `ar`, the target alone, one token per pass, by the same forward, cache and loop

The metrics of a text; tables show their medians and quartiles over all prompts and rounds:

tok/s     (tokens - 1) / seconds from the first token to the last. The prompt's own pass, which
          gives the first token, is left out. An end-of-text token does not end a text
x ar      tok/s / ar's tok/s on the same prompt in the same round
exact     whether a greedy text has ar's ids on the same prompt. A strict row is compared with
          strict ar, a row over a window with ar over that window

    python bench.py --methods "ar,linear K=8,dynatree tau=0.02" --repeats 3

benchmark/ has the rest: tables, options, results files, reports, and what other columns show.
"""

if __name__ == "__main__":
    from cli.start import run_program

    run_program("bench")

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmark.cases import Case
from benchmark.counts import count_calibration, count_depths, predict_text_ms
from benchmark.hf import NOT_TOLD, HuggingFace
from benchmark.machine import ROOT
from benchmark.memory import measure_apart
from benchmark.opening import OpenTable, choose_columns, open_table
from benchmark.options import (
    build_parser,
    choose_file,
    describe_tables,
    read_options,
    require_alone,
)
from benchmark.report import is_exact, markdown_report, text_frame, text_report
from benchmark.results import KEY, Results, Text, Writer, load, new_file
from benchmark.step_times import measure_step_times
from cli.compare import first_difference, top2_gap
from cli.errors import UsageError, run_command_line, say
from cli.main import WARM_UP_STEPS
from cli.metrics import measure, measure_acceptance, token_ids
from cli.models import Request, overflow_note
from dynatree import Drafter
from engine.driver import on_ranks
from engine.generate import Step
from engine.passes import WHOLE_TEXT
from engine.ranks import Ranks

LOG_S = 30.0  # between two progress reports where stderr is no terminal


class Turn(NamedTuple):
    """One text to write: a case on one of its dataset's prompts, in one of the rounds over all."""

    case: Case
    prompt: int  # index
    round: int

    @property
    def key(self) -> tuple[str | int | float, ...]:
        """Which text it is, as results files have it."""
        return *self.case.key, self.prompt, self.round


class Bench:
    """A table that is being measured: its models, prompts and results."""

    def __init__(self, table: OpenTable, results: Results, file: Path):
        self.args, self.pair, self.is_memory = table.args, table.pair, table.is_memory
        self.prompts, self.step_context = table.prompts, table.step_context
        self.results, self.file = results, Writer(file, results)
        self.transformers: HuggingFace | None = None  # its models, if a case needs them
        self.setup_s: dict[Case, float] = {}

    def measure_all(self) -> None:
        """Write the texts that the results file lacks, then compare all greedy ones with ar's."""
        self.file.cut()
        turns = [turn for turn in self.in_turn() if turn.key not in self.results.texts]
        if not self.is_memory:
            self.warm_up([turn.case for turn in turns])
            self.time_passes()
        with progress(turns) as shown:
            for turn in shown:
                self.file.add(self.measure(turn))
        self.compare_with_references()

    def in_turn(self) -> Iterator[Turn]:
        """Yield a table's texts in order: in each round prompt by prompt, and on a prompt every
        case, each time another one first."""
        head = self.results.head
        for n, dataset in product(range(head.n_rounds), self.prompts):
            own = [case for case in head.cases if case.dataset == dataset]
            n_prompts = len(self.prompts[dataset])
            for prompt in range(n_prompts):
                first = n * n_prompts + prompt
                for i in range(len(own)):
                    yield Turn(own[(first + i) % len(own)], prompt, n)

    def warm_up(self, cases: Sequence[Case]) -> None:
        """Write the first steps of every case, so that what only first calls do is in no speed."""
        if any(case.is_hf for case in cases):
            self.transformers = HuggingFace(self.pair)
        steps = []
        for case in dict.fromkeys(cases):
            start = time.perf_counter()
            steps += self.write(Turn(case, 0, 0), WARM_UP_STEPS)
            self.setup_s[case] = time.perf_counter() - start + self.load_seconds(case)
        if any(step.draft_overflowed for step in steps):
            say(overflow_note(self.pair.draft))

    def load_seconds(self, case: Case) -> float:
        """Return how long it took to load what a case needs."""
        if case.is_hf:
            return self.transformers.load_s
        has_draft = case.config().make_rule().max_depth > 0
        return self.pair.load_s["target"] + (self.pair.load_s["draft"] if has_draft else 0.0)

    def time_passes(self) -> None:
        """Measure the times of single passes, if the table shows something that is made of them."""
        head = self.results.head
        is_shown = head.table == "steps" or "predicted" in head.columns
        has_passes = not isinstance(self.pair.draft, Drafter)
        if is_shown and has_passes and self.results.step_times is None:
            models = self.pair.target, self.pair.draft
            times = measure_step_times(*models, self.step_context, not self.args.no_graphs)
            self.file.add({"step_times": asdict(times)})

    def write(self, turn: Turn, n_steps: int | None = None) -> list[Step]:
        """Write a text, or its first n_steps. A step has its new tokens and the milliseconds that
        they took on the wall clock, the device's work included. What is done between two steps is
        in the time of neither."""
        case, prompt = turn.case, self.prompt_ids(turn)
        if case.is_hf:
            return self.transformers.decode(case.method, prompt, case.new_tokens, n_steps)
        config = case.config(self.args.top_p, self.seed(turn), not self.args.no_graphs)
        return list(islice(Request(self.pair, prompt, config, case.new_tokens).decode(), n_steps))

    def prompt_ids(self, turn: Turn) -> list[int]:
        return self.prompts[turn.case.dataset][turn.prompt][: turn.case.prompt_tokens]

    def seed(self, turn: Turn) -> int:
        """Return another seed for every prompt and round, the same for every method."""
        n_prompts = len(self.prompts[turn.case.dataset])
        return (self.args.seed or 0) + turn.round * n_prompts + turn.prompt

    def measure(self, turn: Turn) -> Text:
        """Write a text, and return its line of the results file."""
        case = turn.case
        text = dict(zip(KEY, turn.key, strict=True))
        if self.is_memory:  # without a speed: the process does nothing else
            how = case, self.prompt_ids(turn), self.seed(turn)
            metrics, ids = measure_apart(self.args, self.pair.target.device, *how)
            text |= metrics
        else:
            steps = self.write(turn)
            ids = token_ids(steps)
            text |= self.metrics_of(turn, steps) | {"setup_s": self.setup_s[case]}
        return text if case.temperature else text | self.results.columns_of_ids(ids)

    def metrics_of(self, turn: Turn, steps: Sequence[Step]) -> Text:
        """Return the metrics and counts of a text. Its tok/s is `throughput`: (tokens - 1) /
        seconds of all steps except the first, which is the prompt's."""
        case = turn.case
        found: Text = asdict(measure(steps))
        del found["new_tokens"]  # those of the case: nothing ends a text early
        if case.is_hf:
            return {name: value for name, value in found.items() if name not in NOT_TOLD}
        config = case.config()
        found |= measure_acceptance(steps, config.settings)
        if case.temperature or not turn.round:  # another round of a greedy text counts the same
            found["depths"] = count_depths(steps)
        if not (case.temperature or turn.round):  # sampled text says nothing of calibration
            found["calibration"] = count_calibration(steps)
        times = self.results.step_times
        if (
            times and not config.strict and config.window == WHOLE_TEXT
        ):  # as the passes that were timed
            found["predicted_ms"] = predict_text_ms(times, config, self.pair, steps)
        return found

    def compare_with_references(self) -> None:
        """Find where greedy texts differ from those of their reference, mostly ar's, and how
        narrowly the target decided there: in float32, by a model that no timed text is to have in
        memory beside it."""
        turns = {turn.key: turn for turn in self.in_turn()}
        texts = text_frame(self.results)
        for key in texts[texts.is_different].key:
            if key in self.results.differences:
                continue
            turn = turns[key]
            theirs = self.ids_of(turn._replace(case=replace(turn.case, row=turn.case.reference)))
            at = first_difference(self.ids_of(turn), theirs)
            window = WHOLE_TEXT if turn.case.is_hf else turn.case.config().window
            gap = top2_gap(self.pair, self.prompt_ids(turn) + theirs[:at], window)
            line = dict(zip(KEY, key, strict=True)) | {"at": at, "gap": gap}
            self.file.add({"difference": line})

    def ids_of(self, turn: Turn) -> list[int]:
        """Return the ids of a greedy text. Raises UsageError if a line of the file is missing."""
        digest = str(self.results.texts[turn.key]["ids_digest"])
        if digest not in self.results.ids:
            raise UsageError(f"{self.file.file} has no line with the ids of digest {digest}")
        return self.results.ids[digest]


def progress(turns: Sequence[Turn]) -> tqdm:
    """Return these, and report on stderr how far they are: on a terminal at once, else now and
    then."""
    pace = {} if sys.stderr.isatty() else {"mininterval": LOG_S, "delay": LOG_S}
    return tqdm(turns, leave=False, unit="text", **pace)


def run_table(bench: Bench, kind: str) -> int:
    """Measure and show a table, or as much of it as there is time for. Returns the exit status."""
    try:
        bench.measure_all()
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:  # an error, too, leaves what was measured
        if bench.results.is_begun:
            show(bench.results, kind)
            say(f"results in {bench.file.file}{how_to_go_on(bench)}")
    return 0 if is_exact(bench.results) else 1


def how_to_go_on(bench: Bench) -> str:
    """Return the command that measures the texts that are lacking, if any are."""
    n_lacking, ranks = bench.results.n_lacking, bench.pair.ranks
    if not n_lacking:
        return ""
    start = ["torchrun", "--nproc-per-node", str(ranks.world_size)] if ranks else ["python"]
    words = [*start, os.path.relpath(ROOT / "bench.py"), f"--resume={bench.file.file}"]
    return f"; {n_lacking} texts are lacking; to go on: {shlex.join(words)}"


def show(results: Results, kind: str) -> None:
    """Print a table. kind: text or markdown."""
    if kind == "markdown":
        print(markdown_report(results), flush=True)
    else:
        print(text_report(results, shutil.get_terminal_size().columns), flush=True)


def show_file(args: argparse.Namespace) -> None:
    """Print the table of a results file again. Raises UsageError."""
    results = load(args.show)
    columns = choose_columns(args.columns, results.head.columns)
    results.head = replace(results.head, columns=columns)
    show(results, args.format)


def execute(args: argparse.Namespace, ranks: Ranks | None = None) -> int:
    """Carry out the command line, once parsed. Returns the exit status. ranks: those that compute
    the target, if there are several."""
    if args.peers:
        raise UsageError("--peers is now --hf")
    if args.tables:
        require_alone(args, "--tables")
        print(describe_tables())
        return 0
    if args.show is not None:
        require_alone(args, "--show", "columns", "format")
        show_file(args)
        return 0
    previous, kind = None, args.format
    if args.resume is not None:
        require_alone(args, "--resume", "format")
        file, previous = Path(args.resume), load(args.resume)
        args = read_options(previous.head)
    else:
        file = choose_file(args)
    with nullcontext() if previous else new_file(file):
        table = open_table(args, previous, ranks)
        return run_table(Bench(table, previous or Results(table.head), file), kind)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    return on_ranks(
        lambda ranks: run_command_line(partial(execute, ranks=ranks), parser, arguments)
    )
