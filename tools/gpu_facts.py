"""Measurements of a GPU that bench.py does not make.

attention   the attention kernel that torch selects
products    each linear layer, by number of rows: its time, and whether a row's bits depend on the
            number of rows or on the row's place among them
launches    the time of a kernel, a graph replay, a read and an upload
passes      the captured graph of a pass without the host, by number of rows

    python tools/gpu_facts.py --target my-target --draft my-target --output facts.json

Each record is printed and written as soon as it is measured. Device times are the times between two
CUDA events.

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
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmark.step_times import make_forward, open_cache
from cli.errors import Parser, UsageError, print_line, run_command_line, writing
from cli.files import write_whole
from cli.models import open_pair
from cli.options import add_model_options
from engine.cuda_graphs import capture_graph, make_shape
from engine.model import FastGPTNeoX
from engine.passes import ROW_COUNTS, SLOT_STEP, additive_mask, causal_mask, round_up_slots

EXPECTED_KERNEL = SDPBackend.EFFICIENT_ATTENTION.name  # as engine.cuda_graphs chooses
N_REPLAYS = 20  # between two events

Record = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Lab:
    """The models and sizes to measure."""

    models: dict[str, FastGPTNeoX]  # target and draft
    device: torch.device
    rows: tuple[int, ...] = tuple(n for n in ROW_COUNTS if n <= SLOT_STEP)  # n, in the last step
    slots: tuple[int, ...] = (512, 2304)  # S

    def replay_ms(self, replay: Callable[[], object]) -> float:
        """Return the mean milliseconds of a replay, after one that uploads the graph."""
        replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(N_REPLAYS):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / N_REPLAYS

    def device_us(self, runs: Sequence[Callable[[], object]]) -> float:
        """Return the mean microseconds of these runs in one graph."""

        def run_all() -> None:
            for run in runs:
                run()

        run_all()  # loads the kernels, which is not allowed during capture
        replay = capture_graph(run_all, None, self.device)[0].replay
        return self.replay_ms(replay) * 1e3 / len(runs)


def attention(lab: Lab) -> Iterator[Record]:
    """Yield the kernel that torch selects for n rows over S slots."""
    for name, model in lab.models.items():
        like, head_size = model.gpt_neox.embed_in.weight, model.config.head_size
        for n_slots in lab.slots:
            k = torch.randn(1, model.n_heads, n_slots, head_size).to(like)  # [1, H, S, D], as v
            for n in (1, 32):
                bias = additive_mask(causal_mask(n), n_slots - n, like)  # [n, S]
                kernel = SDPBackend(torch._fused_sdp_choice(k[:, :, :n], k, k, bias)).name
                yield {"model": name, "slots": n_slots, "rows": n, "kernel": kernel}


def products(lab: Lab) -> Iterator[Record]:
    """Yield the measurements of each linear layer, by number of rows."""
    for name, model in lab.models.items():
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
                    yield {"model": name, "product": what} | found


def product_by_rows(lab: Lab, group: list[Callable], x: Tensor) -> Iterator[Record]:
    """Yield the measurements of one linear layer on rows of x [n, in]. group: this layer of every
    block, which run in turn so that the weights do not stay in the device's cache."""
    first_rows: dict[int, Tensor] = {}  # result of the first row, by n
    for n in lab.rows:
        y = group[0](x[:n])
        first_rows[n] = y[0]
        same = next(m for m, row in first_rows.items() if torch.equal(row, y[0]))
        is_moved = not torch.equal(group[0](x[:n].flip(0)).flip(0), y)
        us = lab.device_us([partial(product, x[:n]) for product in group])
        yield {"rows": n, "us": us, "bits_as_at_rows": same, "place_matters": is_moved}


def launches(lab: Lab) -> Iterator[Record]:
    """Yield the times of small operations: the first by events, the others by the host's clock."""
    x = torch.zeros(32, 2560, dtype=torch.bfloat16, device=lab.device)
    bump = partial(x.add_, 1)
    yield {"us": lab.device_us([bump] * 200), "what": "a small kernel after another in a graph"}
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
        yield {"us": (time.perf_counter() - start) * 1e4, "what": what}


def passes(lab: Lab) -> Iterator[Record]:
    """Yield the time of the captured graph of n rows over S slots."""
    for name, model in lab.models.items():
        for n_slots in lab.slots:
            with open_cache(model, n_slots - SLOT_STEP, lab.rows[-1]) as cache:
                for n in lab.rows:
                    make_forward(model, cache, n)()  # so that the graph reads this pass
                    n_run = max(n, cache.config.min_rows)  # with padding
                    shape = make_shape(n_run, round_up_slots(cache.length + n), cache.config)
                    ms = lab.replay_ms(cache.passes.captured[shape][0].replay)
                    yield {"model": name, "slots": n_slots, "rows": n, "device_ms": ms}


def execute(args: Namespace) -> int:
    pair, _ = open_pair(args, is_drafting=True, announce=print_line)
    lab = Lab({"target": pair.target, "draft": pair.draft}, pair.target.device)
    if lab.device.type != "cuda":
        raise UsageError("torch finds no CUDA device, and these facts need one")
    if args.dry:
        lab = Lab(lab.models, lab.device, rows=(1, 32), slots=(512,))
    kept: dict[str, list[Record]] = {}
    for measure in (attention, products, launches, passes):
        kept[measure.__name__] = []
        for found in measure(lab):
            print(measure.__name__, json.dumps(found), flush=True)
            kept[measure.__name__].append(found)
            with writing(args.output):
                write_whole(Path(args.output), json.dumps(kept, indent=1) + "\n")
    others = {found["kernel"] for found in kept["attention"]} - {EXPECTED_KERNEL}
    if others:
        found = ", ".join(sorted(others))
        print_line(f"error: attention uses {found}, it must use only {EXPECTED_KERNEL}")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/gpu_facts.py", description=__doc__ and __doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON file of the records")
    parser.add_argument("--dry", action="store_true", help="measure only a few sizes")
    return run_command_line(execute, parser, arguments)
