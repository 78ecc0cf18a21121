"""What a GPU makes of this project's passes: each function here is a part of tools/gpu_check.py.

A part is asked in a process that keeps the models, once they are loaded, for the parts after it. It
yields one record for each thing that it measures, so that what was measured before something failed
is there; or it returns an exit status. It raises Wrong for a finding that must not be.

    for record in times(Lab(setup)):
        print(record)

Device-only milliseconds are those between two events around replays of a graph, without the host.
Elsewhere than on CUDA, for a dry run, the same code is launched and timed by the host's clock.
Shapes: n rows, S cache slots, H heads, D head size, V vocabulary.
"""

import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

import bench
from benchmark.options import build_parser
from benchmark.prompts import BUILTIN
from benchmark.step_times import COPY_BYTES, forward_of, median_ms, open_cache, step_bytes
from cli.errors import say
from cli.models import Opened, Request, dtype_name, open_pair
from cli.tokens import encode
from draft_tree import lone
from engine.checkpoint import first_line
from engine.cuda_graphs import record, shape_of
from engine.fused import attend
from engine.model import FastCache, FastGPTNeoX
from engine.passes import ROW_COUNTS, SLOT_STEP, causal_mask, open_bias, slot_count
from engine.scores import Ranking, rank
from methods import METHODS
from verify import tree_pass

Record = dict[str, str | int | float | bool]
Records = Iterator[Record]

# Of a row's probability, how much a 16-bit pass may put elsewhere than float32 does. The embedded
# pair's stay under a fifth of it on a CPU's kernels; rows that stand one position off, are written
# one slot off or do not see their root are past it (tests/pretend_cuda/test_tables.py)
BOUNDS = {torch.float16: 0.05, torch.bfloat16: 0.3, torch.float32: 1e-3}
WIDTHS = ("into", "qkv", "inside", "dense", "out_of", "out")  # a layer's products
RANKINGS = [(1, Ranking()), (8, Ranking()), (32, Ranking())]  # rows of a pass, what is wanted
RANKINGS += [(n, Ranking(3, are_logprobs=True)) for n in (1, 8, 32)]
N_ITERATIONS = 8  # that are profiled


class Wrong(Exception):
    """A finding that must not be; the device is as well as before."""


@dataclass(frozen=True)
class Setup:
    """What a process has, and how much it measures."""

    name: str
    seconds: int  # in which it is ready
    folder: Path  # of the results
    target: str
    draft: str
    device: str
    dtype: str
    rows: tuple[int, ...] = ROW_COUNTS
    slots: tuple[int, ...] = (512, 2304)
    n_replays: int = 20
    environment: tuple[tuple[str, str], ...] = ()  # variables of its own, beside the caller's

    @property
    def words(self) -> list[str]:
        """The models as every command line takes them."""
        words = ["--target", self.target, "--draft", self.draft]
        return words + ["--device", self.device, "--dtype", self.dtype]


class Lab:
    """A process's models, loaded when a part first asks for them."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.device = torch.device(setup.device)

    @cached_property
    def loaded(self) -> Opened:
        args = build_parser().parse_args(self.setup.words)
        return open_pair(args, is_drafting=True, say=say)

    @cached_property
    def models(self) -> dict[str, FastGPTNeoX]:
        return {"target": self.loaded[0].target, "draft": self.loaded[0].draft}

    def prompt(self, n: int) -> list[int]:
        """So many ids of text."""
        tokenizer, n_ids = self.loaded[0].tokenizer, self.models["draft"].config.vocab_size
        ids = [i for text in BUILTIN for i in encode(text, tokenizer, n_ids)]
        return (ids * (1 + n // len(ids)))[:n]

    def replay_ms(self, replay: Callable[[], object]) -> float:
        """Milliseconds of one replay, of several in a row; one before pays the graph's upload."""
        n = self.setup.n_replays
        replay()
        if self.device.type != "cuda":
            return host_ms(replay, n)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(n):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / n

    def device_us(self, run: Callable[[], object], n: int = 20) -> float:
        """Microseconds of one run on the device, of n in a graph."""

        def run_all() -> None:
            for _ in range(n):
                run()

        run()  # kernels are chosen and loaded, and cuBLAS is opened, which no capture may do
        replay = run_all
        if self.device.type == "cuda":
            replay = record(run_all, None, self.device).graph.replay
        return self.replay_ms(replay) * 1e3 / n


def host_ms(run: Callable[[], object], n: int) -> float:
    """Milliseconds of one run, by the host's clock, of n after another."""
    start = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - start) * 1e3 / n


# What is there


def versions(lab: Lab) -> Records:
    """Of everything that a figure depends on."""
    yield {"what": "Python", "version": sys.version.split()[0]}
    yield {"what": "torch", "version": torch.__version__}
    yield {"what": "CUDA that torch was built for", "version": str(torch.version.cuda)}
    yield {"what": "cuDNN", "version": str(torch.backends.cudnn.version())}
    if lab.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(lab.device)
        yield {"what": "GPU", "version": gpu.name}
        yield {"what": "compute capability", "version": f"{gpu.major}.{gpu.minor}"}
        yield {"what": "multiprocessors", "version": str(gpu.multi_processor_count)}
        yield {"what": "memory", "version": f"{gpu.total_memory / 1e9:.1f} GB"}
    if not shutil.which("nvidia-smi"):
        yield {"what": "driver", "version": "not known: there is no nvidia-smi"}
        return
    asked = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,compute_mode"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=15)
    for line in (found.stdout or found.stderr).splitlines():
        yield {"what": asked, "version": line}


def tests(lab: Lab, *options: str) -> int:
    """Those marked cuda, by their file: no plugin is assumed, and nothing else imported."""
    import pytest

    plain = ["-q", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-m", "cuda"]
    return int(pytest.main([*plain, *options, "tests/test_cuda.py"]))


# Correctness


def correctness(lab: Lab) -> Records:
    """Passes over a tree at the shape that is measured, captured, beside float32's, which are not:
    the most of any row's probability that lies elsewhere, and how many rows' best ids differ."""
    exact = {"target": lab.loaded[0].float32_target}
    folder = lab.loaded[0].draft_folder
    exact["draft"] = FastGPTNeoX.from_pretrained(folder, lab.device, torch.float32)
    wrong = []
    for name, model in lab.models.items():
        if exact[name] is not model:
            exact[name].pool.has_graphs = False
        bound = BOUNDS[model.dtype]
        for n in (1, 32, 128):
            prompt = lab.prompt(SLOT_STEP)
            found, expected = (tree_logits(each, prompt, n) for each in (model, exact[name]))
            moved = float((found.softmax(-1) - expected.softmax(-1)).abs().sum(-1).max()) / 2
            if not moved <= bound:  # nor nan
                wrong.append(f"{name}, {n} rows: {moved:.3g} of {bound}")
            n_other = int((found.argmax(-1) != expected.argmax(-1)).sum())
            measured: Record = {"model": name, "dtype": dtype_name(model.dtype), "rows": n}
            yield measured | {"elsewhere": moved, "bound": bound, "other_best": n_other}
    if wrong:
        raise Wrong(f"a pass is not float32's: {'; '.join(wrong)}")


@torch.inference_mode()
def tree_logits(model: FastGPTNeoX, prompt: list[int], n: int) -> Tensor:
    """Of a pass over a random tree of n rows below a prompt, captured where there are graphs."""
    cache = model.new_cache(len(prompt) + ROW_COUNTS[-1])
    model.prefill(prompt, cache)
    model.capture(cache, len(prompt))
    rng = random.Random(n)
    tree = lone(prompt[0])
    for _ in range(n - 1):
        tree.add(rng.choice(prompt), rng.randrange(len(tree)), 0.0)
    tokens, positions, mask = tree_pass(tree, cache.length)
    logits = model.forward(tokens, positions, cache, mask).logits.clone()
    model.pool.take_back(cache.storage)
    return logits


# Which kernels, and what each costs


def attention(lab: Lab) -> Records:
    """Which kernel serves a pass, asked of torch; the time of its attention, and of torch's whole,
    which long caches are not read by; beside what cuDNN would take."""
    wrong = []
    for name, model in lab.models.items():
        for n_slots in lab.setup.slots:
            for n in (1, 32):
                run, whole, choice = attention_of(model, n, n_slots)
                found: Record = {"model": name, "slots": n_slots, "rows": n, "kernel": choice()}
                found |= {"us": lab.device_us(run), "whole_us": lab.device_us(whole)}
                if found["kernel"] != SDPBackend.EFFICIENT_ATTENTION.name:
                    wrong.append(f"{name}, {n} rows, {n_slots} slots: {found['kernel']}")
                yield found | with_cudnn(lab, whole, choice)
    if wrong and lab.device.type == "cuda":
        raise Wrong(f"not the kernel that is meant: {'; '.join(wrong)}")


def with_cudnn(lab: Lab, run: Callable[[], Tensor], choice: Callable[[], str]) -> Record:
    """The same where cuDNN's is allowed, which engine.cuda_graphs.settle_kernels does not."""
    was_allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        return {"with_cudnn": choice(), "its_us": lab.device_us(run)}
    except RuntimeError as error:
        return {"with_cudnn": first_line(error), "its_us": "none"}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_allowed)


def attention_of(
    model: FastGPTNeoX, n: int, n_slots: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], str]]:
    """A layer's attention of n rows over so many slots; torch's own, whole; and what tells the
    kernel that this takes."""
    like = model.gpt_neox.embed_in.weight
    size = model.config.head_size
    q = torch.randn(model.n_heads, n, size, device=like.device).to(like.dtype)
    k, v = torch.randn(2, model.n_heads, n_slots, size, device=like.device).to(like.dtype)
    bias = open_bias(causal_mask(n), n_slots - n, like)

    def choice() -> str:
        return SDPBackend(torch._fused_sdp_choice(q[None], k[None], v[None], bias)).name

    whole = partial(F.scaled_dot_product_attention, q[None], k[None], v[None], bias)
    return partial(attend, q, k, v, bias), whole, choice


def products(lab: Lab) -> Records:
    """A layer's products by rows: time, and whether a row's bits depend on how many rows there are
    beside it, or on its place among them. All layers in turn, as no cache holds them."""
    for name, model in lab.models.items():
        layers = model.gpt_neox.layers
        matrices = {what: [getattr(layer, what, None) for layer in layers] for what in WIDTHS}
        matrices["head"] = [model.embed_out.product]
        for what, group in matrices.items():
            if group[0]:
                yield from product_records(lab, name, what, model, group)


def product_records(
    lab: Lab, name: str, what: str, model: FastGPTNeoX, group: list[Callable]
) -> Records:
    """Of one of a layer's products; `group` has every layer's."""
    hidden, inside = model.config.hidden_size, model.config.intermediate_size
    width = {"out_of": hidden + inside, "out": inside}.get(what, hidden)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROW_COUNTS[-1], width, generator=generator).to(lab.device, model.dtype)
    first: dict[int, Tensor] = {}  # what the first row gives, by rows
    for n in lab.setup.rows:
        y = group[0](x[:n])
        first[n] = y[0]
        run = partial(run_all, group, x[:n])
        yield {
            "model": name,
            "product": what,
            "rows": n,
            "us": lab.device_us(run, 1) / len(group),
            "bits_as_at_rows": next(m for m in first if torch.equal(first[m], y[0])),
            "place_matters": not torch.equal(group[0](x[:n].flip(0)).flip(0), y),
        }


def run_all(group: list[Callable], x: Tensor) -> None:
    for product in group:
        product(x)


def launches(lab: Lab) -> Records:
    """What little things take: a small kernel, a replay, a read, an upload, ranking the logits."""
    is_cuda = lab.device.type == "cuda"
    x = torch.zeros(32, 2560, dtype=torch.bfloat16, device=lab.device)
    replay = bump = partial(x.add_, 1)
    yield {"what": "a small kernel after another, in a graph", "us": lab.device_us(bump, 200)}
    if is_cuda:
        replay = record(bump, None, lab.device).graph.replay
    staged = torch.zeros(2**14, dtype=torch.uint8, pin_memory=is_cuda)
    buffer = torch.zeros_like(staged, device=lab.device)

    def read() -> None:
        replay()
        x[0, :8].tolist()

    def upload() -> None:
        buffer.copy_(staged, non_blocking=True)
        read()

    for what, run in {
        "a replay of one kernel, for the host": replay,
        "the same, and its result read": read,
        "the same, after 16 kB were sent up": upload,
    }.items():
        read()  # whatever was asked for is done
        yield {"what": what, "us": host_ms(run, 100) * 1e3}
    n_ids = lab.models["target"].config.vocab_size
    for n, ranking in RANKINGS:
        logits = torch.randn(n, n_ids, device=lab.device)
        what = f"ranking {n} rows for {ranking.k} candidates"
        yield {"what": what, "us": lab.device_us(partial(rank, logits, ranking), 5)}


def kernels_of_rank(lab: Lab) -> Records:
    """What ranking launches, by name; in a process of its own, which captures nothing."""
    for n, ranking in RANKINGS:
        logits = torch.randn(n, 50304, device=lab.device)
        rank(logits, ranking)
        with profile(activities=[profiled_kind()]) as found:
            rank(logits, ranking)
        counted = kernels(found)
        for name, times in counted.items():
            yield {"rows": n, "k": ranking.k, "all": counted.total(), "n": times, "kernel": name}


def profiled_kind() -> ProfilerActivity:
    """Kernels, where torch can see any; else operations of the host."""
    kinds = supported_activities()
    return ProfilerActivity.CUDA if ProfilerActivity.CUDA in kinds else ProfilerActivity.CPU


def kernels(found: profile) -> Counter[str]:
    """How often each was launched. Raises Wrong if none was seen."""
    kind = profiled_kind().name
    names: Counter[str] = Counter()
    for event in found.key_averages():
        if event.device_type.name == kind and not event.is_user_annotation:
            names[event.key] += event.count
    if not names:
        raise Wrong("the profiler has seen no kernel")
    return names


# Times


def copy_gb_s(lab: Lab) -> float:
    """Gigabytes read and written per second by a copy that no cache holds, for the device alone."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=lab.device)
    copy = torch.empty_like(source)
    return 2 * COPY_BYTES / lab.replay_ms(partial(copy.copy_, source)) / 1e6


def times(lab: Lab) -> Records:
    """A pass by its rows: the graph alone, the whole forward with the host, the same launched
    kernel by kernel; beside what its bytes take at the speed of a copy."""
    speed = copy_gb_s(lab)
    for name, model in lab.models.items():
        for n_slots in lab.setup.slots:
            cache = open_cache(model, n_slots - SLOT_STEP)
            for n in lab.setup.rows:
                measured = {"model": name, "dtype": dtype_name(model.dtype), "slots": n_slots}
                measured |= {"rows": n} | pass_ms(lab, model, cache, n)
                yield measured | {"floor_ms": step_bytes(model, n_slots) / speed / 1e6}
            model.pool.take_back(cache.storage)
    yield {"what": "a copy", "gb_per_s": speed}


def pass_ms(lab: Lab, model: FastGPTNeoX, cache: FastCache, n: int) -> Record:
    """Of one pass of n rows, as `times` tells it."""
    forward = forward_of(model, cache, n)
    whole = median_ms([forward], lab.setup.n_replays // 4 or 1)[0]
    replay, launched = forward, whole
    passes = cache.passes
    if model.pool.is_shaped:  # it has what was uploaded last
        shape = shape_of(n, slot_count(cache.length + n), cache.use)
        replay = partial(passes.run_pass, shape)
        if passes.is_replaying:
            replay = passes.captured[shape].replay
        passes.is_replaying = False
        launched = median_ms([forward], 1)[0]
        passes.is_replaying = model.pool.has_graphs
    samples = [lab.replay_ms(replay) for _ in range(3)]
    return {"device_ms": statistics.median(samples), "whole_ms": whole, "launched_ms": launched}


def variant(lab: Lab) -> Records:
    """The target's passes alone, by rows, in this process's environment: a row of one table."""
    model = lab.models["target"]
    cache = open_cache(model, lab.setup.slots[0] - SLOT_STEP)
    words = [f"{name}={value}" for name, value in lab.setup.environment]
    found: Record = {"environment": " ".join(words) or "as it is"}
    for n in lab.setup.rows:
        found[f"ms_at_{n}"] = pass_ms(lab, model, cache, n)["device_ms"]
    model.pool.take_back(cache.storage)
    yield found


# Whole texts


def table(lab: Lab, name: str, *words: str) -> int:
    """A table of bench.py with the models that are here, kept as NAME.json."""
    output = ["--output", str(lab.setup.folder / f"{name}.json")]
    args = build_parser().parse_args([*lab.setup.words, *words, *output])
    return bench.execute(args, opened=lab.loaded)


def command(lab: Lab, main: Callable[[list[str]], int], *words: str) -> int:
    """A program's own main, in this process, which loads what it needs."""
    return main(list(words))


def iterations(lab: Lab, method: str, n_tokens: int) -> int:
    """Those of a method kernel by kernel: torch's table of what took longest, and a trace that
    https://ui.perfetto.dev draws. One session, after all captures, as kernels are lost to a second
    one."""
    n = N_ITERATIONS
    settings = METHODS[method]()
    steps = Request(lab.loaded[0], lab.prompt(100), settings, n_tokens).decode()
    plain = list(islice(steps, 2 * n))[n:]
    ms = sum(step.draft_ms + step.verify_ms + step.other_ms for step in plain) / n
    kinds = {ProfilerActivity.CPU, profiled_kind()}
    cycle = schedule(wait=0, warmup=1, active=n, repeat=1)  # the first loads what it needs
    with profile(activities=kinds, schedule=cycle, acc_events=True) as found:
        for _ in islice(steps, n + 1):
            found.step()
    folder = lab.setup.folder
    found.export_chrome_trace(str(folder / f"trace_{method}.json.gz"))
    is_cuda = profiled_kind() == ProfilerActivity.CUDA
    head = f"{method}: {ms:.2f} ms an iteration, the profiler off; of {n}, on:"
    clock = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    lines = found.key_averages().table(clock, row_limit=40, max_name_column_width=60)
    (folder / f"profile_{method}.txt").write_text(f"{head}\n{lines}\n", encoding="utf-8")
    print(f"{head}\n{lines}")
    what = "kernels" if is_cuda else "operations of the host"
    print(f"{kernels(found).total() / n:.0f} {what} an iteration")
    return 0
