"""The papers' tables, re-measured: every method on the same prompts, in turn, in one process.

A table is a list of runs and a list of columns; one loop serves them all. `ar`, the baseline, runs
with the same cache and the same forward as everything else, and every greedy text is held against
its ids. Metrics: `measure` in dynatree.py.

    python bench.py                                  # the main table, on our own prompts
    python bench.py --table ablation --dataset wikitext2
    python bench.py --methods "ar,linear K=8,dynatree tau=0.02" --repeats 3
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from benchmark.memory import in_own_process, measure_memory, used_memory
from benchmark.peers import PEERS, Peers, require_transformers
from benchmark.prompts import DATASETS, cut_prompts, load_prompts
from benchmark.results import COLUMNS, Results, Run, update_readme
from benchmark.step_times import StepTimes, count_passes, measure_step_times
from benchmark.tables import (
    TABLES,
    Table,
    at_every_size,
    choose_columns,
    choose_runs,
    interleave,
    parse_sizes,
    parse_temperatures,
)
from cli.compare import CONTROL_ROWS, TIE, first_difference, top2_gap
from cli.errors import Parser, UsageError, run_command_line, say
from cli.main import WARM_UP_STEPS
from cli.metrics import measure, token_ids, versions
from cli.models import Pair, Request, choose_device, choose_dtype, open_pair
from cli.options import add_model_options, choose_sampling, parse_settings
from draft_tree import Settings
from dynatree import Step
from engine.sampling import Sampling
from methods import METHODS

ROOT = Path(__file__).parent


def build_parser() -> Parser:
    titles = [f"  {name:<9} {table.title}" for name, table in TABLES.items()]
    tables = "\n".join(textwrap.fill(t, 80, subsequent_indent=" " * 12) for t in titles)
    columns = textwrap.fill(f"columns: {', '.join(COLUMNS)}", 80, subsequent_indent="  ")
    parser = Parser(
        prog="bench.py",
        description="Measure every method beside ar, prompt by prompt in turn.",
        epilog=f"tables:\n{tables}\n\n{columns}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.less_memory = "a 16-bit --dtype, fewer --new-tokens, a smaller --target"
    add = parser.add_argument
    add("--table", default="main", metavar="T", help=f"{', '.join(TABLES)} (main)")
    rows = 'rows, each "method NAME=VALUE ... [rebuild] [eager]"'
    add("--methods", metavar="M,...", help=rows)
    add("--columns", metavar="C,...", help="columns to show")
    add("--peers", action="store_true", help=f"also {', '.join(PEERS)}; needs transformers")
    add("--dataset", default=DATASETS[0], metavar="D", help=f"{', '.join(DATASETS)} (builtin)")
    add("--prompts", metavar="FILE", help='.jsonl with "prompt" fields, or text in paragraphs')
    add("--n-prompts", type=int, metavar="N", help="prompts, evenly spread over the dataset")
    add("--prompt-tokens", metavar="N,...", help="lengths to cut the prompts to")
    add("--new-tokens", metavar="N,...", help="tokens to generate")
    add("--temperature", metavar="X,...", help="0 is greedy (0)")
    add("--top-p", type=float, metavar="P", help="of the sampled runs (1)")
    add("--seed", type=int, metavar="N", help="of the sampled runs; each prompt has its own (0)")
    add("--repeats", type=int, default=1, metavar="N", help="rounds over all prompts (1)")
    add_model_options(parser)
    add("--output", metavar="FILE", help="results file (results/run_<time>_<table>.json)")
    add("--resume", metavar="FILE", help="go on with an interrupted run, its options included")
    add("--show", metavar="FILE", help="print a results file's table again; runs nothing")
    add("--format", choices=("text", "markdown"), default="text", help="of the table printed")
    add("--readme", nargs="+", metavar="FILE", help="write README's results from these files")
    return parser


class Bench:
    """The models, the prompts and the results of one table."""

    def __init__(self, results: Results, pair: Pair, prompts: list[list[int]], file: Path):
        self.results, self.pair, self.prompts, self.file = results, pair, prompts, file
        self.peers: Peers | None = None
        self.has_graphs = not results.options.get("no_graphs")

    def close(self, kind: str) -> None:
        """Show and save what was measured; leave no file if nothing was."""
        if not (self.results.records or self.results.step_times):
            self.file.unlink(missing_ok=True)
            return
        self.results.save(self.file)
        show(self.results, kind)
        where = os.path.relpath(self.file)
        again = f"; to go on: python bench.py --resume {where}" if self.missing() else ""
        say(f"results in {where}{again}")

    def missing(self) -> list[tuple]:
        """What the results file lacks: (repeat, prompt, run)."""
        done = {(r["repeat"], r["prompt"], r["run"]) for r in self.results.records}
        plan = interleave(self.results.runs, len(self.prompts), self.results.options["repeats"])
        return [task for task in plan if (*task[:2], task[2].label) not in done]

    def decode(
        self, run: Run, prompt: int, repeat: int = 0, n_steps: int | None = None
    ) -> list[Step]:
        """One text, or its first n_steps (of peers: tokens)."""
        ids = self.prompts[prompt][: run.prompt_tokens]
        if run.method in PEERS:
            n_tokens = min(n_steps or run.new_tokens, run.new_tokens)
            return self.peers.decode(run.method, ids, n_tokens)
        sampling = self.sampling(run, prompt, repeat)
        options = {"max_new_tokens": run.new_tokens, "commit": run.commit, "sampling": sampling}
        request = Request(self.pair, ids, options)
        self.pair.use_graphs(self.has_graphs and not run.is_eager)
        return list(islice(request.decode(settings_of(run)), n_steps))

    def sampling(self, run: Run, prompt: int, repeat: int) -> Sampling | None:
        """Another seed for every prompt and repeat, the same for every method."""
        if not run.temperature:
            return None
        seed = (self.results.options["seed"] or 0) + repeat * len(self.prompts) + prompt
        return choose_sampling(run.temperature, self.results.options["top_p"], seed)

    def measure(self, repeat: int, prompt: int, run: Run) -> dict:
        """One record: a method's metrics and ids on one prompt."""
        head = {"run": run.label, "prompt": prompt, "repeat": repeat}
        ids = self.prompts[prompt][: run.prompt_tokens]
        if self.results.table == "memory":
            sampling = self.sampling(run, prompt, repeat)
            used = used_memory(self.pair.target.device)
            arguments = self.results.options, run, ids, sampling, used
            return head | in_own_process(measure_memory, *arguments)
        steps = self.decode(run, prompt, repeat)
        record = head | {"metrics": asdict(measure(steps)), "token_ids": token_ids(steps)}
        if run.method in PEERS:
            return record
        record["depths"] = count_depths(steps)
        if self.results.step_times:
            times = StepTimes(**self.results.step_times)
            min_rows = settings_of(run).rule().min_rows
            padded = partial(self.pair.target.pool.padded, min_rows=min_rows)
            passes = count_passes(steps, len(ids), run.commit, padded)
            record["predicted_ms"] = times.predict_ms(*passes)
        return record

    def run_all(self) -> None:
        """Measure what the results file lacks, saving after each."""
        records, missing = self.results.records, self.missing()
        if self.results.table != "memory" and (missing or not records):
            self.set_up()
        for task in tqdm(missing, disable=None, leave=False, unit="run"):
            records.append(self.measure(*task))
            self.results.save(self.file)
        self.explain_differences()

    def set_up(self) -> None:
        """Load peers, warm every run up, time the steps; what it takes is set-up, not speed."""
        runs = self.results.runs
        if any(run.method in PEERS for run in runs):
            start = time.perf_counter()
            self.peers = Peers(self.pair)
            load_peers_s = time.perf_counter() - start
        for run in runs:
            start = time.perf_counter()
            self.decode(run, 0, n_steps=WARM_UP_STEPS)
            seconds = time.perf_counter() - start
            if run.method in PEERS:
                seconds += load_peers_s
            else:
                is_drafting = settings_of(run).rule().max_depth > 0
                roles = ("target", "draft") if is_drafting else ("target",)
                seconds += sum(self.pair.load_s[role] for role in roles)
            self.results.setup_s[run.label] = seconds
        if not self.results.step_times and needs_step_times(self.results):
            sizes = self.results.sizes  # in the middle of the text, where attention costs its mean
            context = sizes["prompt_tokens"][0] + sizes["new_tokens"][0] // 2
            self.pair.use_graphs(self.has_graphs)
            times = measure_step_times(self.pair.target, self.pair.draft, context)
            self.results.step_times = asdict(times)

    def explain_differences(self) -> None:
        """Find where texts leave ar's, and by how little the target decided there."""
        for row in self.results.rows():
            for record, is_equal in row.compared():
                if is_equal or "difference" in record:
                    continue
                ar = row.baseline[record["prompt"], record["repeat"]]["token_ids"]
                at = first_difference(record["token_ids"], ar)
                prompt = self.prompts[record["prompt"]][: row.run.prompt_tokens]
                gap = top2_gap(self.pair, prompt + ar[:at])
                is_tie = gap is not None and gap < TIE
                record["difference"] = {"at": at, "gap": gap, "is_tie": is_tie}


def settings_of(run: Run) -> Settings:
    return parse_settings(METHODS[run.method], run.settings)


def needs_step_times(results: Results) -> bool:
    return results.table == "steps" or "predicted" in results.columns


def count_depths(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Iterations whose tree reached depth 1, 2, ...; and whose accepted path did."""
    trees = [step for step in steps if step.tree]
    deepest = max((step.tree.depth for step in trees), default=0)
    depths = range(1, deepest + 1)
    return {
        "drafted": [sum(step.tree.depth >= d for step in trees) for d in depths],
        "accepted": [sum(len(step.path) > d for step in trees) for d in depths],
    }


def describe_machine(pair: Pair, models: dict, has_peers: bool) -> dict:
    """What a figure depends on besides the options."""
    device = pair.target.device
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        cpu_info = Path("/proc/cpuinfo")
        text = cpu_info.read_text() if cpu_info.exists() else ""
        processor = (re.findall("model name\\s*: (.*)", text) or [platform.machine()])[0]
    peers = {"transformers": version("transformers")} if has_peers else {}
    return {**versions(), **peers, **models, "processor": processor, "commit": git_commit()}


def git_commit() -> str:
    """The code's commit, marked if files differ from it; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + ("-modified" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def open_bench(args: argparse.Namespace) -> Bench:
    """Check the options, load models and prompts; continue a results file or begin one."""
    previous = Results.load(args.resume) if args.resume else None
    options = previous.options if previous else plain_options(args)
    args = argparse.Namespace(**(vars(args) | options))
    if args.table not in TABLES:
        raise UsageError(f"unknown table {args.table!r}; there are {', '.join(TABLES)}")
    device = choose_device(args.device)
    is_half = choose_dtype(args.dtype, device) != torch.float32
    table = with_controls(args.table, device.type == "cuda", not args.no_graphs, is_half)
    columns = choose_columns(args.columns, table.columns)
    sizes = {
        "prompt_tokens": parse_sizes(args.prompt_tokens, table.prompt_tokens, "--prompt-tokens"),
        "new_tokens": parse_sizes(args.new_tokens, table.new_tokens, "--new-tokens"),
        "temperature": parse_temperatures(args.temperature, table.temperature),
    }
    runs = at_every_size(choose_runs(table, args.methods, args.peers), sizes)
    check_options(args, sizes, runs)
    if device.type != "cuda" and any(run.is_eager for run in runs):
        raise UsageError(f'"eager" has no effect on {device}: only cuda has graphs')
    texts = load_prompts(args.dataset, args.prompts)
    file = choose_file(args)
    pair, models = open_pair(args, is_drafting=True, say=say)
    machine = describe_machine(pair, models, any(run.method in PEERS for run in runs))
    warn_of_positions(pair, sizes)
    prompts = choose_prompts(texts, pair, sizes, args, table)
    name = Path(args.prompts).name if args.prompts else args.dataset
    sha256 = hashlib.sha256(repr(prompts).encode()).hexdigest()
    described = {"dataset": name, "n": len(prompts), "sha256": sha256}
    if previous:
        require_same(previous.machine | {"prompts": previous.prompts}, machine, described)
        return Bench(previous, pair, prompts, file)
    results = Results(args.table, columns, options, machine, described, sizes, runs)
    results.save(file)  # now, so that a file that cannot be written costs no measurement
    return Bench(results, pair, prompts, file)


def with_controls(name: str, is_cuda: bool, has_graphs: bool, is_half: bool) -> Table:
    """A table, and what belongs beside it on this device and in this precision."""
    table = TABLES[name]
    methods, columns = list(table.methods), list(table.columns)
    if is_half and "exact" in columns:  # ar with more rows: what rounding alone changes
        methods.append(f"ar rows={CONTROL_ROWS}")
    if is_cuda and has_graphs and name == "main":
        methods.append("ar eager")
    if is_cuda and name == "memory":
        columns += ["pools", "context"]
    return replace(table, methods=tuple(methods), columns=columns)


def check_options(args: argparse.Namespace, sizes: dict, runs: Sequence[Run]) -> None:
    """Raise UsageError for options that are wrong together, or that nothing would use."""
    has_peers = any(run.method in PEERS for run in runs)
    hot = [value for value in sizes["temperature"] if value]
    if args.table == "steps" and (runs or hot or any(len(sizes[name]) > 1 for name in sizes)):
        raise UsageError("--table steps runs no methods, and at one length")
    if args.table == "memory" and has_peers:
        raise UsageError(f"--table memory does not measure {', '.join(PEERS)}")
    if hot and has_peers:
        raise UsageError(f"{', '.join(PEERS)} are measured at temperature 0 only")
    for value in hot or [0.0]:
        choose_sampling(value, args.top_p, args.seed)
    if args.prompts and args.dataset != DATASETS[0]:
        raise UsageError("give either --dataset or --prompts")
    if args.repeats < 1 or (args.n_prompts is not None and args.n_prompts < 1):
        raise UsageError("--n-prompts and --repeats are at least 1")
    if has_peers:
        require_transformers()


def choose_file(args: argparse.Namespace) -> Path:
    """Where results go. Raises UsageError rather than overwrite some."""
    if args.resume:
        return Path(args.resume)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    file = Path(args.output or ROOT / "results" / f"run_{stamp}_{args.table}.json")
    if file.exists():
        raise UsageError(f"{file} exists already; go on with it (--resume) or remove it")
    return file


def warn_of_positions(pair: Pair, sizes: dict[str, tuple[int, ...]]) -> None:
    longest = max(sizes["prompt_tokens"]) + max(sizes["new_tokens"])
    trained = pair.target.config.max_positions
    if longest > trained:
        say(f"warning: up to {longest} tokens, but the target was trained for {trained} positions")


def choose_prompts(
    texts: list[str], pair: Pair, sizes: dict, args: argparse.Namespace, table: Table
) -> list[list[int]]:
    """The prompts as ids, as long as the longest run wants them."""
    n_prompts = table.n_prompts if args.n_prompts is None else args.n_prompts
    longest, vocab_size = max(sizes["prompt_tokens"]), pair.target.config.vocab_size
    # Of several lengths each must be what it says; a single one is only the most.
    shortest = longest if len(sizes["prompt_tokens"]) > 1 else 1
    return cut_prompts(texts, pair.tokenizer, vocab_size, longest, n_prompts, shortest)


def plain_options(args: argparse.Namespace) -> dict:
    """What decides a run, for the results file; the rest is about this call alone."""
    about_the_call = ("output", "resume", "show", "format", "readme")
    return {name: value for name, value in vars(args).items() if name not in about_the_call}


def require_same(before: dict, machine: dict, prompts: dict) -> None:
    """Raise UsageError if an interrupted run would go on under other conditions."""
    now = machine | {"prompts": prompts}
    changed = [name for name in now if now[name] != before.get(name)]
    if changed:
        was = ", ".join(f"{name} was {before.get(name)}" for name in changed)
        raise UsageError(f"--resume would mix two conditions: {was}")


def run(args: argparse.Namespace) -> int:
    """The command line, once parsed. Returns the exit status."""
    if args.readme:
        require_alone(args, "--readme", ())
        update_readme(ROOT / "README.md", args.readme)
        return 0
    if args.show:
        require_alone(args, "--show", ("columns", "format"))
        results = Results.load(args.show)
        results.columns = choose_columns(args.columns, results.columns)
        show(results, args.format)
        return 0
    if args.resume:
        require_alone(args, "--resume", ("format",))
    bench, is_interrupted = open_bench(args), False
    try:
        bench.run_all()
    except KeyboardInterrupt:
        is_interrupted = True
    finally:  # an error, too, leaves what was measured
        bench.close(args.format)
    if is_interrupted:
        return 130
    found = [record.get("difference") for record in bench.results.records]
    is_wrong = any(difference and not difference["is_tie"] for difference in found)
    return 1 if is_wrong and bench.pair.target.dtype == torch.float32 else 0


def require_alone(args: argparse.Namespace, option: str, allowed: tuple[str, ...]) -> None:
    """Raise UsageError for options that would have no effect beside this one."""
    unused = build_parser().parse_args([])
    mine = (option.removeprefix("--"), *allowed)
    for name, value in vars(args).items():
        if name not in mine and value != getattr(unused, name):
            raise UsageError(f"--{name.replace('_', '-')} has no effect beside {option}")


def show(results: Results, kind: str) -> None:
    width = shutil.get_terminal_size().columns
    print(results.markdown() if kind == "markdown" else results.report(width), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command_line(run, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
