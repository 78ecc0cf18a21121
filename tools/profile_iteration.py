"""What an iteration makes the device do, kernel by kernel, and what the host asks of it meanwhile.

    python tools/profile_iteration.py FOLDER --device cuda   # of ar and dynatree
    python tools/profile_iteration.py FOLDER --methods "auto,dynatree eager"

Takes the options of dynatree.py that name models. Prints a table for each method and leaves it in
FOLDER, beside a trace that https://ui.perfetto.dev draws. Those of an earlier profile stay: another
one wants another folder.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":  # before torch, whose import takes a second
    from cli.start import guard_imports

    guard_imports()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells stderr what it does

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from tempfile import TemporaryDirectory

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmark.peers import PEERS
from benchmark.prompts import DATASETS, load_prompts
from benchmark.results import Run
from benchmark.rows import parse_run, settings_of, window_of
from benchmark.tables import split_list
from cli.errors import Parser, UsageError, run_command_line, say
from cli.main import WARM_UP_STEPS
from cli.models import Pair, Request, encode, open_pair
from cli.options import add_model_options
from dynatree import Step
from engine.memory import memory_for

N_TOKENS = 512  # enough for any method's iterations here, few enough for one or two cache lengths
N_NAMES = 25  # of a list, those that take longest
WIDTH = 90  # of a name: a kernel's goes on for lines


def profile_run(pair: Pair, run: Run, n: int) -> tuple[float, profile]:
    """Milliseconds of an iteration, the mean of n; and a profile of the next n of the same text."""
    pair.use_graphs(not run.is_eager)
    prompt = encode(
        load_prompts(DATASETS[0], None)[0], pair.tokenizer, pair.target.config.vocab_size
    )
    options = {"max_new_tokens": N_TOKENS, "strict": run.is_strict, "commit": run.commit}
    options["window"] = window_of(run, pair)
    steps = Request(pair, prompt, options).decode(settings_of(run))
    take(steps, WARM_UP_STEPS)
    plain = take(steps, n)
    ms = sum(step.draft_ms + step.verify_ms + step.other_ms for step in plain) / n
    kinds = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    asked = {"activities": kinds, "acc_events": True}  # there is one cycle; else torch 2.11 warns
    with profile(**asked):  # the first time it loads what it needs
        take(steps, 1)
    with profile(**asked) as found:
        take(steps, n)
    steps.close()
    return ms, found


def take(steps: Iterator[Step], n: int) -> list[Step]:
    """The next n steps. Raises UsageError if the text ends before."""
    taken = list(islice(steps, min(n, N_TOKENS)))
    if len(taken) < n:
        raise UsageError(f"{N_TOKENS} tokens are too few for so many --iterations")
    return taken


def describe(events: Sequence[FunctionEventAvg], n: int) -> str:
    """What n iterations consisted of, by name: how often in one, and for how many microseconds."""
    kernels: list[FunctionEventAvg] = []
    asked: list[FunctionEventAvg] = []  # of the CUDA runtime
    computed: list[FunctionEventAvg] = []
    for event in events:
        if event.device_type != DeviceType.CPU:
            kernels.append(event)
        elif event.key.startswith("cu"):
            asked.append(event)
        else:
            computed.append(event)
    parts = [
        section("on the device", kernels, n, "self_device_time_total"),
        section("asked of the device", asked, n, "self_cpu_time_total"),
        section("on the host", computed, n, "self_cpu_time_total"),
    ]
    return "\n\n".join(part for part in parts if part)


def section(title: str, events: list[FunctionEventAvg], n: int, clock: str) -> str:
    """One line a name, those first that took longest by this field; nothing if there are none."""
    if not events:
        return ""
    lines = [f"{'times':>8} {'us':>10}  {title}"]
    events = sorted(events, key=lambda event: getattr(event, clock), reverse=True)
    total_count = 0
    total_us = 0.0
    for event in events:
        us = getattr(event, clock)
        total_count += event.count
        total_us += us
        if len(lines) <= N_NAMES:
            lines.append(f"{event.count / n:8.1f} {us / n:10.1f}  {event.key[:WIDTH]}")
    lines.append(f"{total_count / n:8.1f} {total_us / n:10.1f}  all {len(events)}")
    return "\n".join(lines)


def choose_runs(methods: str) -> list[Run]:
    """Rows as bench.py's. Raises UsageError for one that cannot be profiled, or is there twice."""
    runs = []
    for text in split_list(methods, "--methods"):
        run = parse_run(text)
        if run.method in PEERS:
            raise UsageError(f"{run.method} has no iterations that could be profiled")
        if run in runs:
            raise UsageError(f"--methods names a row twice: {run.label!r}")
        runs.append(run)
    return runs


def choose_files(text: str, runs: Sequence[Run]) -> list[Path]:
    """Each run's table; its trace goes beside it. Raises UsageError rather than overwrite some."""
    folder = Path(text)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    tables = [folder / (run.label.replace(" ", "_") + ".txt") for run in runs]
    for table in tables:
        require_new(table)
    return tables


def require_new(table: Path) -> None:
    """Raise UsageError if the table or its trace is there."""
    for file in (table, trace_of(table)):
        if os.path.lexists(file):
            raise UsageError(f"{file} exists already; name another folder")


def trace_of(table: Path) -> Path:
    return table.with_name(table.name.removesuffix(".txt") + ".json.gz")


def write(table: Path, text: str, found: profile) -> None:
    """Both files, each whole or not at all. Raises UsageError."""
    folder = table.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=folder) as part:
            unfinished = Path(part) / "table.txt"
            unfinished.write_text(text, encoding="utf-8")
            found.export_chrome_trace(str(trace_of(unfinished)))
            require_new(table)  # another profile may have been made meanwhile
            unfinished.rename(table)
            trace_of(unfinished).rename(trace_of(table))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


@memory_for("a profile")
def execute(args: Namespace) -> int:
    if args.iterations < 1:
        raise UsageError(f"--iterations {args.iterations}: at least 1")
    runs = choose_runs(args.methods)
    tables = choose_files(args.folder, runs)
    is_drafting = any(settings_of(run).rule().max_depth for run in runs)
    pair, _ = open_pair(args, is_drafting, say)
    for run, table in zip(runs, tables, strict=True):
        ms, found = profile_run(pair, run, args.iterations)
        head = f"{run.label}: {ms:.2f} ms an iteration, the profiler off; of one, the profiler on:"
        text = f"{head}\n\n{describe(found.key_averages(), args.iterations)}\n"
        try:
            print(text, flush=True)  # first: a full disk does not take it
        finally:
            write(table, text, found)  # nor does a reader that has gone
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/profile_iteration.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", help="where the tables and traces go")
    add("--methods", default="ar,dynatree", metavar="M,...", help="as bench.py's (ar,dynatree)")
    add("--iterations", type=int, default=8, metavar="N", help="to take the mean of (8)")
    add_model_options(parser)
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
