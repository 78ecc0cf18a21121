"""Benchmark of every method against ar: the measurement loop, and the program.

A table is a list of cases (cases.py). A case is one row of it: a method with settings, such as
"linear K=8", a dataset, a prompt length, a number of new tokens and a temperature. A round is one
pass over all prompts. A text is what a case generates after one prompt in one round. For each text
the results file gets a line: case, prompt and round, metrics, and the ids of greedy text. All texts
come from one process, except in tables of peak memory, where each text has its own.

The comparison is fair for the reasons that bench.py gives, and the main metrics are its columns.
Every case runs 8 steps (Pair.warm_up_steps) before the first measured text. Prompts of equal number
in two datasets share a seed. The reference of a row with strict or a window, whose ids its texts
must have, is ar with strict or the same window. Sampled text with drawn candidates has other ids,
so it is not compared.

    python -m dynatree_lab.benchmark --methods "ar,linear K=8,dynatree tau=0.02" --repeats 3
"""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from dynatree_lab.benchmark.cases import Case
from dynatree_lab.benchmark.hf import UNREPORTED_METRICS, HuggingFace
from dynatree_lab.benchmark.memory import measure_in_new_process
from dynatree_lab.benchmark.plan import (
    Plan,
    build_parser,
    choose_columns,
    describe_tables,
    make_plan,
    read_options,
    require_alone,
    resolve_prices,
)
from dynatree_lab.benchmark.replaying import recorded_text, replayed_line, source_of, with_replay
from dynatree_lab.benchmark.report import is_exact, markdown_report, text_frame, text_report
from dynatree_lab.benchmark.results import KEYS, Key, Line, Results, append, drop_partial_line, load
from dynatree_lab.benchmark.tuning import METHODS_WITH_P, count_root_ranks, fit_draft
from dynatree_lab.cli.compare import first_difference, rounding_gap
from dynatree_lab.cli.load import digest_files, import_files
from dynatree_lab.cli.options import overflow_note
from dynatree_lab.cli.program import command_name, print_line, run_command_line
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.engine.ranks import from_rank_0, rank, run_on_ranks, world_size
from dynatree_lab.errors import UsageError, writing
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.eagle import EagleHead
from dynatree_lab.metrics import (
    code_acceptance,
    count_calibration,
    count_passes,
    measure,
    token_ids,
    top1_match,
)
from dynatree_lab.pair import Pair
from dynatree_lab.replay.candidates import record_candidates
from dynatree_lab.replay.texts import append_text
from dynatree_lab.request import Request

UNRECORDED = ("methods", "add", "columns", "hf", "baseline", "output", "prices")  # by --record
LOG_S = 30.0  # seconds between two progress lines where stderr is not a terminal


class Job(NamedTuple):
    """One text to generate: a case, one of its prompts, and the round."""

    case: Case
    prompt: int  # index among the dataset's prompts
    round: int  # one round covers all prompts

    @property
    def key(self) -> Key:
        """The key of the text in a results file, in the order of KEYS."""
        return *self.case.key, self.prompt, self.round


class TableRun:
    """The run of one table: its plan, and its results in memory and in a file."""

    def __init__(self, plan: Plan, results: Results, file: Path):
        self.plan, self.args, self.pair = plan, plan.args, plan.pair
        self.results, self.file = results, file
        self.hf: HuggingFace | None = None  # runs the hf- rows; made by warm_up
        self.setup_s: dict[Case, float] = {}

    def measure_all(self) -> None:
        """Generate the texts that the results file lacks, then compare them with ar's."""
        jobs = [job for job in self.all_jobs() if job.key not in self.results.texts]
        jobs.sort(key=lambda job: job.case.is_replayed)  # they need ar's texts, and no clock
        if not self.plan.is_memory_table:  # a memory table runs each text in a new process
            self.warm_up([job.case for job in jobs if not job.case.is_replayed])
        with progress_bar(jobs) as bar:
            for job in bar:
                self.add(self.measure_text(job))
        self.compare_with_references()

    def add(self, line: Line) -> None:
        """Add a line to the file, which begins with the head, and to the results."""
        if not self.file.exists():
            append(self.file, {"head": self.results.head})
        append(self.file, line)
        self.results.add(line)

    def all_jobs(self) -> Iterator[Job]:
        """Yield the jobs in order: by round, dataset, prompt and case. A different case comes first
        on each prompt."""
        for round_index, dataset in product(range(self.results.n_rounds), self.plan.prompts):
            cases = [
                case
                for case in self.results.cases
                if case.dataset == dataset and (round_index == 0 or not case.is_replayed)
            ]
            n_prompts = len(self.plan.prompts[dataset])
            for prompt in range(n_prompts):
                first = (round_index * n_prompts + prompt) % len(cases)
                for case in cases[first:] + cases[:first]:
                    yield Job(case, prompt, round_index)

    def warm_up(self, cases: Sequence[Case]) -> None:
        """Run the first steps of these cases, so that metrics do not include work that is done only
        once. Record their time, and that of loading the models, as the set-up time."""
        if any(case.is_hf for case in cases):
            self.hf = HuggingFace(self.pair)
        notes: list[str] = []  # of drafts that overflow
        for case in dict.fromkeys(cases):  # without repeats
            start = time.perf_counter()
            steps = self.generate(Job(case, prompt=0, round=0), self.pair.warm_up_steps)
            self.setup_s[case] = time.perf_counter() - start + self.load_seconds(case)
            if any(step.draft_overflowed for step in steps):  # its logits were not finite
                notes.append(overflow_note(self.pair_of(case).draft))
        for note in dict.fromkeys(notes):  # without repeats
            print_line(note)

    def load_seconds(self, case: Case) -> float:
        if case.is_hf:
            return self.hf.load_s
        load_s = self.pair_of(case).load_s
        return load_s["target"] + (load_s["draft"] if case.is_drafting else 0.0)

    def pair_of(self, case: Case) -> Pair:
        if case.is_replayed and not self.args.replay:
            return self.replayed_pair
        return self.plan.eagle_pair if case.uses_head else self.pair

    @cached_property
    def replayed_pair(self) -> Pair:
        """The pair whose target is the greedy texts of ar, which come first: of each prompt the
        longest one."""
        jobs = [
            job
            for job in self.all_jobs()
            if job.case.row == "ar" and not (job.case.temperature or job.round)
        ]
        jobs.sort(key=lambda job: job.case.new_tokens)  # a later text of a prompt replaces others
        longest = {tuple(self.prompt_ids(job)): job for job in jobs}
        source = source_of(self.pair)
        texts = [
            recorded_text(
                self.request_of(job),
                self.results.ids[self.results.texts[job.key]["ids_digest"]],
                source,
            )
            for job in longest.values()
        ]
        return with_replay(self.pair, texts)

    def generate(self, job: Job, n_steps: int | None = None) -> list[Step]:
        """Return the steps of a text, or only the first n_steps.

        A step has its new tokens and the wall-clock milliseconds that it took, including the work
        of the device. The metrics add up these times, without the time between steps.
        """
        if job.case.is_hf:
            arguments = job.case.method, self.prompt_ids(job), job.case.new_tokens, n_steps
            return self.hf.decode(*arguments)
        request = self.request_of(job)
        steps, draft = list(islice(request.decode(), n_steps)), request.pair.draft
        if all(step.is_complete for step in steps) or not draft.model:
            return steps
        # The recorded candidates lack some of a tree's. With the draft at hand, all trees are real
        return list(replace(request, pair=replace(request.pair, draft=draft.model)).decode())

    def request_of(self, job: Job) -> Request:
        """Return the request of a text. Without EOS ids, it generates all new tokens."""
        case, graphs = job.case, not self.args.no_graphs
        config = case.generation_config(self.args.top_p, self.seed_of(job), graphs)
        return Request(self.pair_of(case), self.prompt_ids(job), config, case.new_tokens)

    def prompt_ids(self, job: Job) -> list[int]:
        return self.plan.prompts[job.case.dataset][job.prompt][: job.case.prompt_tokens]

    def seed_of(self, job: Job) -> int:
        """Return the seed of a text: different for each prompt of a dataset and each round, equal
        for all cases. Prompts of equal number in two datasets share it."""
        n_prompts = len(self.plan.prompts[job.case.dataset])
        return (self.args.seed or 0) + job.round * n_prompts + job.prompt

    def measure_text(self, job: Job) -> Line:
        """Generate a text and return its line of the results file."""
        case, prompt_ids = job.case, self.prompt_ids(job)
        line = dict(zip(KEYS, job.key, strict=True))
        if self.plan.is_memory_table:
            metrics, ids = measure_in_new_process(self.args, case, prompt_ids, self.seed_of(job))
            line |= metrics
        elif case.is_replayed:
            return line | replayed_line(self.generate(job), case.generation_config())
        else:
            steps = self.generate(job)
            ids = token_ids(steps)
            line |= self.metrics_of(job, steps) | {"setup_s": self.setup_s[case]}
        if not case.writes_ar_ids:  # not compared, so the ids are not kept
            return line
        return line | self.results.ids_fields(ids)  # a digest, and the ids if they are new

    def metrics_of(self, job: Job, steps: Sequence[Step]) -> Line:
        """Return the metrics and counts of a text. `throughput` of measure() is tok/s in tables."""
        case = job.case
        found: Line = asdict(measure(steps))
        del found["new_tokens"], found["depths"]  # in the line's key; not shown in a table
        if case.is_hf:
            return {name: value for name, value in found.items() if name not in UNREPORTED_METRICS}
        config = case.generation_config()
        found["top1_match"] = top1_match(steps)
        found["code_acceptance"] = code_acceptance(config.settings, found["tokens_per_iter"])
        is_greedy, is_first = case.temperature == 0, job.round == 0
        if is_first and is_greedy:  # sampled text accepts other tokens than the best
            found["calibration"] = count_calibration(steps)
        if case.row == "ar" and self.results.is_sorted and self.pair.draft and is_first:
            found["draft_fit"] = fit_draft(self.pair.draft, self.prompt_ids(job), token_ids(steps))
        if case.row in METHODS_WITH_P and (is_first or not is_greedy):
            found["root_ranks"] = count_root_ranks(steps)
        if has_priced_passes(case):
            found |= count_passes(steps, config)
        return found

    def compare_with_references(self) -> None:
        """Record where texts differ from their reference: the first different token, and the gap
        there (compare.rounding_gap). A tiny gap means a tie and not a bug.

        The gap is computed in float32. The comparison comes last, so that a float32 copy of the
        target takes no memory while texts are measured.
        """
        jobs = {job.key: job for job in self.all_jobs()}
        texts = text_frame(self.results)  # pandas, with the columns key and is_different
        for key in texts[texts.is_different].key:
            if key in self.results.differences:
                continue
            job = jobs[key]
            reference = jobs[job.case.reference, *key[1:]]
            digests = (self.results.texts[each.key]["ids_digest"] for each in (job, reference))
            ids, reference_ids = map(self.results.ids.get, digests)
            # The reference's request, because rows that begin with hf- have none
            gap = rounding_gap(self.request_of(reference), ids, reference_ids)
            line = dict(zip(KEYS, key, strict=True))
            line |= {"at": first_difference(ids, reference_ids), "gap": gap}
            self.add({"difference": line})


def has_priced_passes(case: Case) -> bool:
    """Whether prices describe the passes of a case: those of target and draft model, without strict
    mode and window."""
    config = case.generation_config()
    return not config.strict and config.window == FULL_ATTENTION and not case.uses_head


def progress_bar(jobs: Sequence[Job]) -> tqdm:
    """Return an iterable over the jobs that shows progress on stderr: at once on a terminal, else
    every LOG_S seconds. At the end it clears a terminal's line, and ends the line of a log."""
    if sys.stderr.isatty():
        return tqdm(jobs, leave=False, unit="text")
    return tqdm(jobs, unit="text", mininterval=LOG_S, delay=LOG_S)


def run_table(run: TableRun) -> int:
    """Measure a table and print it, also if the run is interrupted or fails.

    Returns the exit status: 130 if interrupted; 2 if a prompt is invalid; 1 if a strict text
    differs from its reference, or a float32 text differs without a tie; else 0.
    """
    try:
        run.measure_all()
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130
    finally:
        if run.results.texts:
            print_table(run.results, run.results.head["columns"], run.args.format)
            print_line(f"results in {run.file}{resume_hint(run)}")
    if run.plan.has_invalid_prompts:
        return 2
    return 0 if is_exact(run.results) else 1


def resume_hint(run: TableRun) -> str:
    """Return the end of a message: how many texts are missing, and the command that measures them.
    It is empty if none is missing."""
    n_missing, n_ranks = run.results.n_missing, world_size()
    if not n_missing or run.args.replay:  # a replay takes seconds
        return ""
    start = command_name("dynatree_lab.benchmark")
    if n_ranks > 1:
        start = f"torchrun --nproc-per-node {n_ranks} -m dynatree_lab.benchmark"
    words = [f"--resume={run.file}"]
    words += [f"--prompts={run.args.prompts}"] if run.args.prompts else []
    resume = shlex.join(words)
    return f"; {n_missing} texts are missing; resume with: {start} {resume}"


def print_table(results: Results, columns: Sequence[str], table_format: str) -> None:
    """Print the table of a results file. table_format: text or markdown."""
    if table_format == "markdown":
        print(markdown_report(results, columns), flush=True)
    else:
        print(text_report(results, columns, shutil.get_terminal_size().columns), flush=True)


def execute(args: argparse.Namespace) -> int:
    if args.tables:
        require_alone(args, "--tables")  # raises UsageError for other options
        print(describe_tables())
        return 0
    if args.show is not None:
        require_alone(args, "--show", "--columns", "--format", "--prices")
        results = from_rank_0(load, args.show)
        import_unchanged(results)
        results.head["options"] |= resolve_prices(args.prices)
        print_table(results, choose_columns(args, results.head["columns"]), args.format)
        return 0
    if args.resume is not None:
        require_alone(args, "--resume", "--format", "--load", "--prompts")
        return resume_table(args)
    if args.record is not None:
        return record_table(args)
    return measure_table(args)


def measure_table(args: argparse.Namespace) -> int:
    """Measure a table into a new file, which the first text makes. Raises UsageError."""
    name = f"run_{datetime.now():%Y%m%d-%H%M%S}_{args.table}.jsonl"
    file = Path(args.output or Path("results", name))
    with writing(file):
        exists = from_rank_0(file.exists)
    if exists:
        raise UsageError(f"{file} exists already; use another name, or --resume to continue it")
    plan = make_plan(args)
    return run_table(TableRun(plan, Results(plan.head), file))


def record_table(args: argparse.Namespace) -> int:
    """Write the texts of ar after the table's prompts to a new file, and the draft's candidates.
    Raises UsageError."""
    given = [name for name in UNRECORDED if getattr(args, name)]
    given += ["repeats"] * (args.repeats > 1)
    if given:
        raise UsageError(f"{', '.join(f'--{name}' for name in given)}: no effect with --record")
    files = [Path(name) for name in (args.record, args.candidates) if name]
    for file in files:
        if from_rank_0(file.exists):
            raise UsageError(f"{file} exists already; use another name")
    plan = make_plan(argparse.Namespace(**(vars(args) | {"methods": ["ar"]})))
    run = TableRun(plan, Results(plan.head), files[0])
    if len(run.results.cases) > 1:
        sizes = "--prompt-tokens, --max-new-tokens and --temperature"
        raise UsageError(f"--record: table {args.table} has several sizes; choose one by {sizes}")
    if args.candidates and isinstance(plan.pair.draft, EagleHead):
        raise UsageError("--candidates needs a draft model, and --draft is an EAGLE head")
    jobs = list({tuple(run.prompt_ids(job)): job for job in run.all_jobs()}.values())
    if repeated := len(list(run.all_jobs())) - len(jobs):
        print_line(f"note: without {repeated} prompts that are equal to others")
    texts, source = [], source_of(plan.pair)
    with progress_bar(jobs) as bar:
        for job in bar:
            request = run.request_of(job)
            texts.append(recorded_text(request, token_ids(request.decode()), source))
            if rank() == 0:
                with writing(files[0]):
                    append_text(files[0], texts[-1])
    print_line(f"{len(texts)} texts in {files[0]}")
    if args.candidates and rank() == 0:
        print_line(f"recording the draft's candidates in {files[1]}")
        with writing(files[1]):
            record_candidates(plan.pair.draft, texts, files[1])
    return 2 if plan.has_invalid_prompts else 0


def resume_table(args: argparse.Namespace) -> int:
    """Measure the texts that a results file lacks, with the options that it was made with. --load
    and --prompts say where their files are now. Raises UsageError if prompts, models or machine are
    different now."""
    file = Path(args.resume)
    results = from_rank_0(load, file)
    options = read_options(results.head)
    if options.replay:
        raise UsageError(f"{file} is a replay, which takes seconds: use --replay again")
    options.format = args.format
    options.prompts = args.prompts or options.prompts
    options.load = args.load or options.load
    require_files(options)
    if not args.load:  # the parser has imported those
        import_files(options.load or ())
    plan = make_plan(options, results)
    drop_partial_line(file)
    return run_table(TableRun(plan, results, file))


def require_files(options: argparse.Namespace) -> None:
    """Raise UsageError if a file of a resumed run is not where it was."""
    named = {file: "--load" for file in options.load or ()}
    named |= {options.prompts: "--prompts"} if options.prompts else {}
    for file, option in named.items():
        if file != "-" and not Path(file).exists():
            raise UsageError(f"{file} is not there; use {option} to say where it is now")


def import_unchanged(results: Results) -> None:
    """Import the files of --load that are as they were. Print a note on each other one."""
    for file, digest in results.head["options"].get("load", {}).items():
        if Path(file).is_file() and digest_files([file]) == {file: digest}:
            import_files([file])
        else:
            print_line(f"note: {file} is not there as it was; the table is shown without it")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_on_ranks(partial(run_command_line, execute, build_parser(), arguments))
