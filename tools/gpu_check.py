"""All that only a GPU can tell about this project, in one call of a known length.

    bash tools/gpu_check.sh                       # the embedded pair at the shapes of Pythia
    bash tools/gpu_check.sh --seconds 300 --keep FOLDER
    bash tools/gpu_check.sh --dry                 # tiny shapes, the CPU if need be: does it run?

A list of parts, the most telling first (tools/gpu_facts.py has what they do), each with its share
of the seconds. Parts that can share a process do, and its models; no part's failure touches another
one: one that takes longer than its share and all that the earlier ones have left is cut off with
its process, one that crashes has the next begin in a new one, one that would not fit any more is
skipped. The end names them all.

What it measured lies in results/run_gpu_<time>, and is copied to --keep's folder as each part ends;
every method's table is also results/gpu_<device>.json, or gpu_<device>_2.json and so on: no file
that exists is touched. If a part fails or Ctrl-C ends it, the enlarged pair stays, 6 GB, as
bench.py --resume wants it. A dry run leaves nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

import os

if __name__ == "__main__":
    import cli.start  # noqa: F401

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells stderr what it does

import json
import multiprocessing
import re
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

import bench
from benchmark.machine import ROOT
from benchmark.memory import end_with_parent, start_quietly
from cli.errors import Parser, UsageError, run_command_line
from cli.models import choose_device, has_instructions
from engine.checkpoint import first_line
from methods import METHODS
from tools import enlarge, gpu_facts
from tools.gpu_facts import Lab, Record, Records, Setup, Wrong

SECONDS = 530
SMALL = 2**23  # bytes of a file that is copied out
SHAPES = {"target": (2560, 32, 50304), "draft": (512, 6, 50304)}  # hidden size, layers, ids
DRY_SHAPES = {"target": (256, 3, 4200), "draft": (256, 2, 4200)}
CONTROLS = ["ar rows=2", "ar rows=8", "ar rows=16", "ar rows=32", "dynatree rebuild"]
FEWER = ("--columns", "throughput,speedup,predicted,tokens_per_iter,draft,verify,other,exact")
WORKSPACE = ("CUBLASLT_WORKSPACE_SIZE", "32768")  # KiB; advised on Hopper


class Part(NamedTuple):
    """Something to ask, within so many seconds once its process is ready."""

    name: str
    seconds: int
    setup: Setup  # of the process that is asked
    ask: Callable[..., int | Records]  # of a Lab, and these:
    arguments: tuple = ()

    def cost(self, before: Setup | None) -> int:
        """Seconds, after a part in a process of that setup."""
        return self.seconds + (self.setup.seconds if self.setup != before else 0)


def schedule(setup: Setup, dtypes: Sequence[str], is_dry: bool, is_enlarged: bool) -> list[Part]:
    """All parts in order, the most telling first; those in one process stand together.

    setup: of the process that has the pair in the first of the dtypes.
    """
    one = ("-k", "test_two_generations_at_once") if is_dry else ()
    testing = alone(setup, "tests")
    parts = [
        Part("what is there", 5, testing, gpu_facts.versions),
        Part("tests marked cuda", 60, testing, gpu_facts.tests, one),
    ]
    if is_enlarged:
        making = alone(setup, "enlarging")
        parts.append(Part("enlarging the embedded pair", 30, making, enlarge_pair, (is_dry,)))
    return parts + of_the_pair(setup, is_dry) + of_others(setup, dtypes[1:], is_dry)


def alone(setup: Setup, name: str) -> Setup:
    """A process that shares no models."""
    return replace(setup, name=name, seconds=6)


def sizes(is_dry: bool, n_prompts: int, n_tokens: int) -> list[str]:
    """Of a table's texts."""
    n_read, n_written = (20, 12) if is_dry else (150, n_tokens)
    words = ["--n-prompts", "1" if is_dry else str(n_prompts)]
    return words + ["--prompt-tokens", str(n_read), "--new-tokens", str(n_written)]


def of_the_pair(setup: Setup, is_dry: bool) -> list[Part]:
    """What the process is asked that has the pair."""
    is_cuda = setup.device != "cpu"
    every = [*METHODS, *CONTROLS, *["ar eager", "dynatree eager"] * is_cuda]

    def table(name: str, seconds: int, methods: Sequence[str], *more: str) -> Part:
        asked = (name, "--methods", ",".join(methods), *sizes(is_dry, 4, 128), *more)
        return Part(f"table {name}", seconds, setup, gpu_facts.table, asked)

    parts = [
        Part("16 bits beside float32", 25, setup, gpu_facts.correctness),
        Part("attention", 8, setup, gpu_facts.attention),
        Part("products", 12, setup, gpu_facts.products),
        Part("launches", 6, setup, gpu_facts.launches),
        Part("times", 20, setup, gpu_facts.times),
        Part("variant: as it is", 4, setup, gpu_facts.variant),
        table("pair", 20, ["ar", "ar rows=2", "dynatree"], *FEWER),
        table("strict", 15, ["dynatree strict", "recycle strict"], *FEWER),
        table("every", 60, every),
    ]
    if is_cuda and find_spec("triton"):
        parts.append(table("kernels", 25, ["ar kernels", "dynatree kernels"], *FEWER))
    return parts


def of_others(setup: Setup, dtypes: Sequence[str], is_dry: bool) -> list[Part]:
    """What takes a process of its own: another environment or dtype, a profile, all its memory."""
    changed = replace(setup, environment=(WORKSPACE,))
    parts = [
        Part("kernels of rank", 5, alone(setup, "rank"), gpu_facts.kernels_of_rank),
        Part(f"variant: {'='.join(WORKSPACE)}", 4, changed, gpu_facts.variant),
    ]
    for dtype in dtypes:
        parts.append(Part(f"times, {dtype}", 20, replace(setup, dtype=dtype), gpu_facts.times))
    for method in ("ar", "dynatree"):
        profiled = replace(setup, name=f"profile of {method}")
        asked = (method, 256 if is_dry else 512)
        parts.append(Part(profiled.name, 8, profiled, gpu_facts.iterations, asked))
    words = ["--table", "memory", "--methods", "ar,dynatree", *sizes(is_dry, 1, 1856)]
    words += [*setup.words, "--output", str(setup.folder / "memory.json")]
    asked = (bench.main, *words)
    return [*parts, Part("memory", 60, alone(setup, "memory"), gpu_facts.command, asked)]


def enlarge_pair(lab: Lab, is_dry: bool) -> int:
    """The embedded pair at the shapes of Pythia, where the setup has the pair. Returns a status."""
    status = 0
    for role, folder in (("target", lab.setup.target), ("draft", lab.setup.draft)):
        hidden, layers, vocab = (DRY_SHAPES if is_dry else SHAPES)[role]
        source = "draft" if is_dry else role  # which is the smaller one
        sizes = ["--hidden", str(hidden), "--layers", str(layers), "--vocab", str(vocab)]
        status = status or enlarge.main([f"models/tiny/{source}", folder, *sizes])
    return status


# The process that is asked


def serve(asked: Connection, setup: Setup) -> None:
    """Carry out what is asked, and answer how it ended, until nobody asks any more."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(setup.environment)
    sys.stdout.reconfigure(line_buffering=True)
    lab = Lab(setup)
    with suppress(EOFError):
        while True:
            ask, arguments = asked.recv()
            asked.send(outcome_of(ask, lab, arguments))


def outcome_of(ask: Callable[..., int | Records], lab: Lab, arguments: tuple) -> tuple[str, bool]:
    """What went wrong, "" if nothing did; and whether the device is still to be trusted."""
    try:
        found = ask(lab, *arguments)
        if not isinstance(found, int):
            tell(found, lab.setup.folder / f"{ask.__name__}.json")
        elif found:
            return f"status {found}", True
    except Wrong as error:
        return str(error), True
    except Exception as error:  # whatever it is, the others are to go on
        traceback.print_exc()
        return f"{type(error).__name__}: {first_line(error)}", False
    return "", True


def tell(records: Iterator[Record], file: Path) -> None:
    """Print each as soon as it is measured, and add it to those in a file."""
    told = json.loads(file.read_text()) if file.exists() else []
    before: list[str] = []
    for record in records:
        if [*record] != before:
            before = [*record]
            print("  ".join(f"{name:>12}" for name in before))
        print("  ".join(f"{shown(record[name]):>{max(len(name), 12)}}" for name in before))
        told.append(record)
        file.write_text(json.dumps(told, indent=1) + "\n")


def shown(value: str | int | float | bool) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Worker:
    """The process from here; it ends with this one."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.is_idle = True
        spawn = multiprocessing.get_context("spawn")
        self.answers, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, setup))
        start_quietly(self.process)
        theirs.close()

    def ask(self, part: Part, limit: float) -> tuple[str, bool]:
        """As outcome_of has it, or that it took too long, or that the process has died."""
        self.is_idle = False
        try:
            self.answers.send((part.ask, part.arguments))
            if not self.answers.poll(limit):
                return f"cut off after {limit:.0f} s", False
            answer = self.answers.recv()
            self.is_idle = True
            return answer
        except (EOFError, OSError):
            self.process.join(5)
            return f"its process ended with {self.process.exitcode}", False

    def end(self) -> None:
        self.answers.close()
        if self.is_idle:
            self.process.join(5)  # by itself
        self.process.kill()
        self.process.join(10)  # one that hangs in a driver may not even end then


# All of it


def ask_all(parts: Sequence[Part], seconds: float, ended: Callable[[], None]) -> dict[str, str]:
    """Ask one after another; by name what went wrong, "" where nothing did. ended: called after
    each. A part may take its share, and what the earlier ones have left of theirs."""
    start = time.monotonic()
    outcomes: dict[str, str] = {}
    worker: Worker | None = None
    try:
        for i, part in enumerate(parts):
            left = seconds - (time.monotonic() - start)
            need = part.cost(worker and worker.setup)
            later = sum(parts[j].cost(parts[j - 1].setup) for j in range(i + 1, len(parts)))
            limit = max(need, left - later)
            if left < need:
                outcomes[part.name] = f"skipped: it may take {need} s, and {left:.0f} are left"
                print(f"\n== {part.name}: {outcomes[part.name]}", flush=True)
                continue
            print(f"\n== {part.name} ({limit:.0f} s at most, {left:.0f} s left)", flush=True)
            if worker and worker.setup != part.setup:
                worker.end()
                worker = None
            worker = worker or Worker(part.setup)
            outcomes[part.name], is_well = worker.ask(part, limit)
            if not is_well:
                worker.end()
                worker = None
            if outcomes[part.name]:
                print(f"FAILED: {outcomes[part.name]}", flush=True)
            ended()
    finally:
        if worker:
            worker.end()
    return outcomes


@contextmanager
def logged(file: Path) -> Iterator[None]:
    """All output, of other processes too, also goes to a file, until the end and past Ctrl-C."""
    resource_tracker.ensure_running()  # multiprocessing's, which would keep the pipe open
    tee = subprocess.Popen(["tee", "-ip", str(file)], stdin=subprocess.PIPE)
    own = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(tee.stdin.fileno(), number)
    tee.stdin.close()
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, before in enumerate(own, start=1):
            os.dup2(before, number)
            os.close(before)
        with suppress(subprocess.TimeoutExpired):  # if something hangs that writes to it
            tee.wait(5)


def copy_small(folder: Path, kept: Path) -> None:
    """The small files of a folder; what cannot be copied is told, as it must not end the rest."""
    try:
        for file in folder.iterdir():
            if file.is_file() and file.stat().st_size <= SMALL:
                shutil.copyfile(file, kept / file.name)
    except OSError as error:
        print(f"FAILED: {kept} cannot be written: {error.strerror}", flush=True)


def publish(table: Path, results: Path) -> None:
    """Every method's table under the device's name, beside earlier ones; all of it or nothing."""
    machine = json.loads(table.read_text())["machine"]
    name = re.sub("[^a-z0-9]+", "_", machine["processor"].lower()).removeprefix("nvidia_")
    n = 1
    while True:
        file = results / (f"gpu_{name}.json" if n == 1 else f"gpu_{name}_{n}.json")
        try:
            os.link(table, file)
            break
        except FileExistsError:
            n += 1
    print(f"every method's table is also {file}", flush=True)


def report(outcomes: dict[str, str], seconds: float) -> int:
    """What went wrong. Returns the exit status."""
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome}
    print(f"\n{len(outcomes) - len(wrong)} of {len(outcomes)} parts are done, in {seconds:.0f} s")
    for name, outcome in wrong.items():
        print(f"error: {name}: {outcome}")
    sys.stdout.flush()
    return 1 if wrong else 0


def execute(args: Namespace) -> int:
    start = time.monotonic()
    device = choose_device(None)
    if device.type == "cpu" and not args.dry:
        raise UsageError("torch sees no GPU: docs/gpu.md, Installing, has what it wants")
    folders = [checkpoint_folder(text) for text in args.folders]
    if len(folders) not in (0, 2):
        raise UsageError(f"there are two folders, TARGET and DRAFT, or none; given: {len(folders)}")
    if args.seconds < 1:
        raise UsageError(f"--seconds {args.seconds}: 1 or more")
    kept = Path(args.keep).absolute() if args.keep else None
    os.chdir(ROOT)
    folder = make_folders(args.dry, kept)
    dtypes = ["float32"]
    if device.type == "cuda":
        dtypes = ["float16", *["bfloat16"] * has_instructions(torch.bfloat16, device)]
    pair = folder / "pair"
    models = folders or [str(pair / "target"), str(pair / "draft")]
    setup = Setup("the pair", 20, folder, *models, str(device), dtypes[0])
    if args.dry:
        setup = replace(setup, rows=(1, 32), slots=(512,), n_replays=2)
    parts = schedule(setup, dtypes, args.dry, not folders)

    def keep() -> None:
        if kept:
            copy_small(folder, kept)

    status = 1
    try:
        with logged(folder / "log.txt"):
            outcomes = ask_all(parts, args.seconds - (time.monotonic() - start), keep)
            if (folder / "every.json").exists() and not args.dry:
                publish(folder / "every.json", ROOT / "results")
            status = report(outcomes, time.monotonic() - start)
    finally:
        keep()
        leave(folder, pair, args.dry, status)
    return status


def checkpoint_folder(text: str) -> str:
    """As it is named from anywhere. Raises UsageError."""
    if not (Path(text) / "config.json").is_file():
        raise UsageError(f"{text} is no checkpoint folder: it has no config.json")
    return str(Path(text).absolute())


def make_folders(is_dry: bool, kept: Path | None) -> Path:
    """A new one for the results, not one that a second run would share; and --keep's. Raises
    UsageError."""
    try:
        if kept:
            kept.mkdir(parents=True, exist_ok=True)
        if is_dry:
            return Path(tempfile.mkdtemp(prefix="gpu_check_"))
        folder = ROOT / "results" / f"run_gpu_{time.strftime('%Y%m%d-%H%M%S')}"
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be made: {error.strerror}") from error
    return folder


def leave(folder: Path, pair: Path, is_dry: bool, status: int) -> None:
    """Say where everything is; what is not needed any more goes."""
    if is_dry:
        shutil.rmtree(folder, ignore_errors=True)
        return
    print(f"what was measured is in {folder}", file=sys.stderr)
    if status == 0:
        shutil.rmtree(pair, ignore_errors=True)
    elif pair.exists():
        print(f"the enlarged pair stays, 6 GB, to go on with: rm -r {pair}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/gpu_check.sh", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folders", nargs="*", metavar="TARGET DRAFT", help="checkpoints (the enlarged pair)")
    add("--seconds", type=int, default=SECONDS, metavar="N", help=f"for all of it ({SECONDS})")
    add("--keep", metavar="FOLDER", help="where small files are copied as each part ends")
    add("--dry", action="store_true", help="tiny shapes, on the CPU if need be: does it run?")
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
