"""Measurements of a GPU that explain the speed of passes. They need no checkpoint.

launches    the time of a kernel, a graph replay, a read and an upload
passes      the captured graph of a pass without the host, by number of rows, and its floor: the
            time in which a copy would read the same weights
profile     the kernels of an eager pass, with their number and time
attention   the kernel that torch selects, and the time of other ways to compute the same
products    each linear layer, by number of rows: its time, and whether a row's bits depend on the
            number of rows or on the row's place among them

    python tools/gpu_facts.py --output facts.json

The models have random weights (tools/random_models.py). With CUBLASLT_WORKSPACE_SIZE=32768 in the
environment, products have a workspace of 32 MiB; `--only products` measures only these.

Each record is printed and written as soon as it is measured. Device times are between two CUDA
events: the least of three rounds, and their spread, (largest - least) / least.

Shapes: n rows, S cache slots, H heads, D head size.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    from cli.start import run_program

    run_program("tools.gpu_facts")

import json
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.step_times import (
    RANKINGS,
    capture_pass,
    copy_bandwidth,
    make_forward,
    open_cache,
    step_bytes,
)
from cli.errors import Parser, UsageError, print_line, run_command_line, writing
from cli.files import write_whole
from engine.cache import FastCache
from engine.checkpoint import first_line
from engine.cuda_graphs import capture_graph
from engine.layers import attend
from engine.model import FastGPTNeoX
from engine.passes import (
    ROW_COUNTS,
    SLOT_STEP,
    PassConfig,
    additive_mask,
    causal_mask,
)
from tools.random_models import (
    DTYPES,
    add_shape_options,
    describe_shapes,
    random_model,
    read_shapes,
    require_gpu,
)

EXPECTED_KERNEL = SDPBackend.EFFICIENT_ATTENTION.name  # as engine.cuda_graphs chooses
PASS_CONFIG = PassConfig()
# All fit into the last step of slots. A pass of one row runs as two in 16 bits
ROWS = tuple(n for n in ROW_COUNTS if 1 < n <= SLOT_STEP)
N_REPLAYS = 20  # between two events
N_ROUNDS = 3
SPIN_UP_S = 0.3  # an idle GPU lowers its clocks
N_KERNELS = 15  # of a profile, by time
COLD_BYTES = 2**27  # keys and values of all copies, more than a cache holds

Record = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Lab:
    """The models and sizes to measure."""

    models: dict[str, FastGPTNeoX]  # target and draft
    device: torch.device
    rows: tuple[int, ...] = ROWS  # n
    slots: tuple[int, ...] = (512, 2304)  # S
    spin_up_s: float = SPIN_UP_S
    cold_bytes: int = COLD_BYTES

    def open_cache(
        self, role: str, n_slots: int, max_rows: int, config: PassConfig = PASS_CONFIG
    ) -> FastCache:
        """Return a cache of a model whose passes of up to max_rows rows are over n_slots slots, and
        are not captured."""
        sizes = {"max_rows": max_rows, "n_scratch": max_rows}
        config = config._replace(ranking=RANKINGS[role], **sizes)
        return open_cache(self.models[role], n_slots - SLOT_STEP, config, graphs=False)

    def spin_up(self) -> None:
        """Keep the device busy, so that its clocks rise."""
        x = torch.ones(1024, 1024, device=self.device)
        end = time.perf_counter() + self.spin_up_s
        while time.perf_counter() < end:
            (x @ x)[0, 0].item()

    def replay_ms(self, replay: Callable[[], object]) -> tuple[float, float]:
        """Return the milliseconds of a replay, and their spread. One replay comes before, because
        the first one uploads the graph."""
        replay()
        rounds = []
        for _ in range(N_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(N_REPLAYS):
                replay()
            end.record()
            end.synchronize()
            rounds.append(begin.elapsed_time(end) / N_REPLAYS)
        return min(rounds), round(max(rounds) / min(rounds) - 1, 3)

    def device_us(self, runs: Sequence[Callable[[], object]]) -> Record:
        """Return the microseconds of these runs in one graph, a run's mean, and their spread."""

        def run_all() -> None:
            for run in runs:
                run()

        run_all()  # loads the kernels, which is not allowed during capture
        replay = capture_graph(run_all, None, self.device)[0].replay
        ms, spread = self.replay_ms(replay)
        return {"us": round(ms * 1e3 / len(runs), 3), "spread": spread}


def launches(lab: Lab) -> Iterator[Record]:
    """Yield the times of small operations: the first by events, the others by the host's clock."""
    x = torch.zeros(32, 2560, dtype=torch.bfloat16, device=lab.device)
    bump = partial(x.add_, 1)
    yield {"what": "a small kernel after another in a graph"} | lab.device_us([bump] * 200)
    replay = capture_graph(bump, None, lab.device)[0].replay
    staged = torch.zeros(2**14, dtype=torch.uint8, pin_memory=True)
    buffer = torch.zeros_like(staged, device=lab.device)

    def read() -> None:
        replay()
        x[0, :8].tolist()

    def upload() -> None:
        buffer.copy_(staged, non_blocking=True)
        read()

    runs = {"a replay of one kernel, host time": replay}
    runs |= {"a replay and a read": read, "a 16 kB upload, a replay and a read": upload}
    for what, run in runs.items():
        read()  # waits for all earlier work
        start = time.perf_counter()
        for _ in range(100):
            run()
        yield {"what": what, "us": round((time.perf_counter() - start) * 1e4, 3)}


def passes(lab: Lab) -> Iterator[Record]:
    """Yield the time of the captured graph of n rows over S slots."""
    copy_gb_s = copy_bandwidth(lab.device)
    yield {"copy_gb_s": round(copy_gb_s, 1)}
    for role, model in lab.models.items():
        for n_slots in lab.slots:
            floor_ms = step_bytes(model, n_slots - SLOT_STEP) / copy_gb_s / 1e6
            for found in replay_passes(lab, role, n_slots, lab.rows, PASS_CONFIG):
                yield found | {"floor_ms": round(floor_ms, 4)}


def replay_passes(
    lab: Lab, role: str, n_slots: int, rows: Sequence[int], config: PassConfig
) -> Iterator[Record]:
    """Yield the time of the captured graph of a pass, by number of rows."""
    model = lab.models[role]
    with lab.open_cache(role, n_slots, max(rows), config) as cache:
        for n in rows:
            make_forward(model, cache, n)()  # loads the kernels, and the graph reads its inputs
            ms, spread = lab.replay_ms(capture_pass(model, cache, n).replay)
            at = {"model": role, "slots": n_slots, "rows": n}
            yield at | {"device_ms": round(ms, 4), "spread": spread}


def profile(lab: Lab) -> Iterator[Record]:
    """Yield the kernels of eager passes that take most of the time, then all kernels together."""
    wanted = [("target", n, n_slots) for n_slots in lab.slots for n in lab.rows if n in (2, 32, 64)]
    for role, n, n_slots in [*wanted, ("draft", 8, lab.slots[0])]:
        with lab.open_cache(role, n_slots, n) as cache:
            forward = make_forward(lab.models[role], cache, n)
            forward()  # loads the kernels
            kernels = kernel_times(forward)
        at = {"model": role, "slots": n_slots, "rows": n}
        for name, count, us in kernels[:N_KERNELS]:
            yield at | {"kernel": name, "count": count, "us": round(us, 1)}
        total = round(sum(us for *_, us in kernels), 1)
        yield at | {"kernel": "all", "count": sum(count for _, count, _ in kernels), "us": total}


def kernel_times(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Return name, number and microseconds of each kernel of a run, the longest first. A torch
    without CUDA, in a dry run, gives its operators instead."""
    kind = DeviceType.CUDA if torch.version.cuda else DeviceType.CPU
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        run()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == kind:
            is_kernel = kind == DeviceType.CUDA
            us = event.time_range.elapsed_us() if is_kernel else event.self_cpu_time_total
            counts[event.name] += 1
            times[event.name] += us
    if not counts:
        raise RuntimeError("the profile has no kernels")
    return [(name, counts[name], us) for name, us in times.most_common()]


def attention(lab: Lab) -> Iterator[Record]:
    """Yield the kernel that torch selects for n rows over S slots, and the time of each way."""
    for role, model in lab.models.items():
        like = model.gpt_neox.embed_in.weight
        for n_slots in lab.slots:
            shape = (2, model.n_heads, n_slots, model.config.head_size)
            n_copies = max(1, lab.cold_bytes // (torch.Size(shape).numel() * like.element_size()))
            # [copies, 2, H, S, D]; several copies, so that they are read from memory
            kvs = torch.randn(n_copies, *shape, device=lab.device).to(like)
            for n in (n for n in lab.rows if n in (2, 32, 64)):
                bias = additive_mask(causal_mask(n), n_slots - n, like)  # [n, S]
                at = {"model": role, "slots": n_slots, "rows": n}
                q, k = kvs[0, :, None, :, :n], kvs[0, :1]  # [1, H, n, D] and [1, H, S, D]
                yield at | {"chosen": SDPBackend(torch._fused_sdp_choice(q[0], k, k, bias)).name}
                for way, run in WAYS.items():
                    runs = [partial(run, kv[1, :, :n], *kv, bias) for kv in kvs]
                    yield at | {"way": way} | time_runs(lab, runs)


def time_runs(lab: Lab, runs: Sequence[Callable]) -> Record:
    """Return the times of one way to compute attention, or its error, or that this build of torch
    lacks it."""
    try:
        with torch.inference_mode():
            return lab.device_us(runs)
    except (ImportError, NotImplementedError) as error:
        return {"missing": describe(error)}
    except Exception as error:  # the other ways are still to be timed
        return {"error": describe(error)}


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error):.100}"


def attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return attention [H, n, D] by cuDNN, which the engine switches off."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias)[0]


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return attention [H, n, D] by two products, with scores in float32."""
    scores = torch.bmm(q * q.shape[-1] ** -0.5, k.mT, out_dtype=torch.float32) + bias
    return torch.bmm(scores.softmax(-1).to(v.dtype), v)


def attend_without_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return attention [n, H, D] by torch's varlen_attn, which takes no mask: the part of a pass
    over all committed keys."""
    from torch.nn.attention.varlen import varlen_attn  # not in every build of torch

    options = {"dtype": torch.int32, "device": q.device}
    ends = [torch.arange(0, 2 * m, m, **options) for m in bias.shape]  # (0, n) and (0, S)
    rows = (x.transpose(0, 1) for x in (q, k, v))
    return varlen_attn(*rows, *ends, *bias.shape)


WAYS = {  # to compute attention
    "engine": attend,
    "cudnn": attend_by_cudnn,
    "two products": attend_by_products,
    "varlen, no mask": attend_without_mask,
}


def products(lab: Lab) -> Iterator[Record]:
    """Yield the measurements of each linear layer, by number of rows."""
    for role, model in lab.models.items():
        hidden, inner = model.config.hidden_size, model.config.intermediate_size
        sizes = dict.fromkeys(("qkv_and_inner", "qkv", "inner", "dense"), hidden)  # inputs of each
        sizes |= {"dense_and_out": hidden + inner, "out": inner}
        layers = model.gpt_neox.layers
        groups = {what: [getattr(layer, what, None) for layer in layers] for what in sizes}
        groups["head"] = [model.embed_out.linear]
        for what, group in groups.items():
            if group[0]:
                x = torch.randn(lab.rows[-1], sizes.get(what, hidden)).to(lab.device, model.dtype)
                for found in product_by_rows(lab, group, x):
                    yield {"model": role, "product": what} | found


def product_by_rows(lab: Lab, group: list[Callable], x: Tensor) -> Iterator[Record]:
    """Yield the measurements of one linear layer on rows of x [n, in]. group: this layer of every
    block, which run in turn so that the weights of a large model do not stay in the device's
    cache. Those of the draft model may stay there."""
    first_rows: dict[int, Tensor] = {}  # result of the first row, by n
    for n in (1, *lab.rows):
        y = group[0](x[:n])
        first_rows[n] = y[0]
        same = next(m for m, row in first_rows.items() if torch.equal(row, y[0]))
        is_moved = not torch.equal(group[0](x[:n].flip(0)).flip(0), y)
        found = lab.device_us([partial(product, x[:n]) for product in group])
        gb_s = round(group[0].nbytes / found["us"] / 1e3)
        yield {"rows": n, "gb_s": gb_s, "bits_as_at_rows": same, "place_matters": is_moved} | found


SECTIONS = {each.__name__: each for each in (launches, passes, profile, attention, products)}


def measure(lab: Lab, name: str) -> Iterator[Record]:
    """Yield the records of a section, and last its error if it has failed."""
    lab.spin_up()
    try:
        yield from SECTIONS[name](lab)
    except Exception as error:  # the other sections may explain more
        traceback.print_exc()
        yield {"error": describe(error)}


def find_problems(kept: Mapping[str, list[Record]]) -> list[str]:
    """Return a line for each section that failed, and for attention by another kernel. A
    way of attention that fails is no problem, because the engine does not use it."""
    lines = []
    for name, records in kept.items():
        for record in records:
            if "error" in record and "way" not in record:
                lines.append(f"{name}: {record['error']}")
    others = {found["chosen"] for found in kept.get("attention", []) if "chosen" in found}
    if others := others - {EXPECTED_KERNEL}:
        found = ", ".join(sorted(others))
        lines.append(f"attention uses {found}, it must use only {EXPECTED_KERNEL}")
    return lines


def execute(args: Namespace) -> int:
    device, shapes = require_gpu(), read_shapes(args)
    unknown = set(args.only) - SECTIONS.keys()
    if unknown:
        raise UsageError(
            f"--only: {', '.join(sorted(unknown))}: the sections are {', '.join(SECTIONS)}"
        )
    models = {role: random_model(shapes[role], device, DTYPES[role]) for role in shapes}
    lab = Lab(models, device)
    if args.dry:
        sizes = {"rows": (2, 8), "slots": (512,)}
        lab = replace(lab, spin_up_s=0.0, cold_bytes=0, **sizes)
    kept: dict[str, list[Record]] = {}
    for name in args.only or SECTIONS:
        kept[name] = []
        for found in measure(lab, name):
            print(name, json.dumps(found), flush=True)
            kept[name].append(found)
            written = {"shapes": describe_shapes(shapes)} | kept
            with writing(args.output):
                write_whole(Path(args.output), json.dumps(written, indent=1) + "\n")
    found_problems = find_problems(kept)
    for line in found_problems:
        print_line(f"error: {line}")
    return 1 if found_problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    summary = __doc__ and __doc__.splitlines()[0]
    parser = Parser(prog="tools/gpu_facts.py", description=summary)
    add_shape_options(parser)
    only = f"sections to measure, of {', '.join(SECTIONS)} (default all)"
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=only)
    return run_command_line(execute, parser, arguments)
