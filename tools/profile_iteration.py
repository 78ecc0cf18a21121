"""What an iteration makes the device do, kernel by kernel, and what the host asks of it meanwhile.

    python tools/profile_iteration.py FOLDER --device cuda                # of dynatree
    python tools/profile_iteration.py FOLDER --method linear --set K=8

Takes the options of dynatree.py that name models. Prints torch's table of what took longest, over
all the iterations that it profiled, and leaves it in FOLDER, a new one, beside a trace that
https://ui.perfetto.dev draws.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    import cli.start  # noqa: F401

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells stderr what it does

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from benchmark.prompts import BUILTIN
from cli.errors import Parser, UsageError, run_command_line, say
from cli.models import Request, open_pair
from cli.options import add_model_options, parse_settings
from cli.tokens import encode
from dynatree import Step
from methods import METHODS
from tools.folders import new_folder

N_TOKENS = 512  # enough for any method's iterations here, few enough for one or two cache lengths
WARM_UP = 8  # iterations
N_NAMES = 40  # of the table


def take(steps: Iterator[Step], n: int) -> list[Step]:
    """The next n steps. Raises UsageError if the text ends before."""
    taken = list(islice(steps, n))
    if len(taken) < n:
        raise UsageError(f"{N_TOKENS} tokens are too few for so many --iterations")
    return taken


def profile_steps(steps: Iterator[Step], n: int) -> tuple[float, profile]:
    """Milliseconds of an iteration, the mean of n; and a profile of the next n of the same text."""
    take(steps, WARM_UP)
    plain = take(steps, n)
    ms = sum(step.draft_ms + step.verify_ms + step.other_ms for step in plain) / n
    kinds = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    cycle = schedule(wait=0, warmup=1, active=n, repeat=1)  # the first loads what it needs
    with profile(activities=kinds, schedule=cycle, acc_events=True) as found:
        for _ in range(n + 1):
            take(steps, 1)
            found.step()
    return ms, found


def execute(args: Namespace) -> int:
    if args.method not in METHODS:
        raise UsageError(f"unknown method {args.method!r}; there are {', '.join(METHODS)}")
    if args.iterations < 1:
        raise UsageError(f"--iterations {args.iterations}: at least 1")
    folder = new_folder(args.folder)
    settings = parse_settings(METHODS[args.method], args.set)
    pair, _ = open_pair(args, settings.rule().max_depth > 0, say)
    prompt = encode(BUILTIN[0], pair.tokenizer, pair.target.config.vocab_size)
    steps = Request(pair, prompt, settings, N_TOKENS).decode()
    ms, found = profile_steps(steps, args.iterations)
    clock = "self_device_time_total" if pair.target.device.type == "cuda" else "self_cpu_time_total"
    table = found.key_averages().table(clock, row_limit=N_NAMES, max_name_column_width=60)
    head = f"{args.method}: {ms:.2f} ms an iteration, the profiler off; of {args.iterations}, on:"
    try:
        folder.mkdir(parents=True)
        (folder / "table.txt").write_text(f"{head}\n{table}\n", encoding="utf-8")
        found.export_chrome_trace(str(folder / "trace.json.gz"))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    print(f"{head}\n{table}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/profile_iteration.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", help="where the table and the trace go: a new folder")
    add("--method", default="dynatree", metavar="M", help="as dynatree.py's (dynatree)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a method's setting")
    add("--iterations", type=int, default=8, metavar="N", help="to profile (8)")
    add_model_options(parser)
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
