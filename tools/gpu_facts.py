"""What a GPU makes of this project's passes, as far as bench.py cannot tell it.

attention   the kernel that torch takes, which must be the one that is meant
products    each of a layer's, by rows: its time, and whether a row's bits depend on how many rows
            there are beside it, or on its place among them
launches    what little things take: a kernel, a replay, a read, an upload
passes      by rows: the captured graph alone, without the host

    python tools/gpu_facts.py --target my-target --draft my-target --output facts.json

Each record is printed and written as soon as it is measured. A device's times are those between two
events around what runs there.

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

from benchmark.step_times import forward_of, open_cache
from cli.errors import Parser, UsageError, run_command_line, say, writing
from cli.files import write_whole
from cli.models import open_pair
from cli.options import add_model_options
from engine.cuda_graphs import record, shape_of
from engine.model import FastGPTNeoX
from engine.passes import ROW_COUNTS, SLOT_STEP, additive_mask, causal_mask, slot_count

MEANT = SDPBackend.EFFICIENT_ATTENTION.name  # what engine.cuda_graphs.choose_kernels leaves
N_REPLAYS = 20  # between two events

Record = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Lab:
    """What is measured, and at which sizes."""

    models: dict[str, FastGPTNeoX]  # target and draft
    device: torch.device
    rows: tuple[int, ...] = ROW_COUNTS  # n
    slots: tuple[int, ...] = (512, 2304)  # S

    def replay_ms(self, replay: Callable[[], object]) -> float:
        """Milliseconds of one replay, of several in a row; one before pays for its upload."""
        replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(N_REPLAYS):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / N_REPLAYS

    def device_us(self, runs: Sequence[Callable[[], object]]) -> float:
        """Microseconds of one of these runs, all in one graph."""

        def run_all() -> None:
            for run in runs:
                run()

        run_all()  # kernels are chosen and loaded, which no capture may do
        replay = record(run_all, None, self.device)[0].replay
        return self.replay_ms(replay) * 1e3 / len(runs)


def attention(lab: Lab) -> Iterator[Record]:
    """What torch says it takes for a layer's n rows over S slots."""
    for name, model in lab.models.items():
        like, head_size = model.gpt_neox.embed_in.weight, model.config.head_size
        for n_slots in lab.slots:
            k = torch.randn(1, model.n_heads, n_slots, head_size).to(like)  # [1, H, S, D], as v
            for n in (1, 32):
                bias = additive_mask(causal_mask(n), n_slots - n, like)  # [n, S]
                kernel = SDPBackend(torch._fused_sdp_choice(k[:, :, :n], k, k, bias)).name
                yield {"model": name, "slots": n_slots, "rows": n, "kernel": kernel}


def products(lab: Lab) -> Iterator[Record]:
    """Those that a layer has, and the head's."""
    for name, model in lab.models.items():
        hidden, inner = model.config.hidden_size, model.config.intermediate_size
        sizes = dict.fromkeys(("qkv_and_inner", "qkv", "inner", "dense"), hidden)  # that each reads
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
    """Of x [n, in]; `group` has every layer's, taken in turn, as no cache of the device holds all
    their matrices."""
    first_rows: dict[int, Tensor] = {}  # what the first row gives, by n
    for n in lab.rows:
        y = group[0](x[:n])
        first_rows[n] = y[0]
        same = next(m for m, row in first_rows.items() if torch.equal(row, y[0]))
        is_moved = not torch.equal(group[0](x[:n].flip(0)).flip(0), y)
        us = lab.device_us([partial(product, x[:n]) for product in group])
        yield {"rows": n, "us": us, "bits_as_at_rows": same, "place_matters": is_moved}


def launches(lab: Lab) -> Iterator[Record]:
    """The first by events, the others by the host's clock."""
    x = torch.zeros(32, 2560, dtype=torch.bfloat16, device=lab.device)
    bump = partial(x.add_, 1)
    yield {"us": lab.device_us([bump] * 200), "what": "a small kernel after another in a graph"}
    replay = record(bump, None, lab.device)[0].replay
    staged = torch.zeros(2**14, dtype=torch.uint8, pin_memory=True)
    buffer = torch.zeros_like(staged, device=lab.device)

    def read() -> None:
        replay()
        x[0, :8].tolist()

    def upload() -> None:
        buffer.copy_(staged, non_blocking=True)
        read()

    runs = {"a replay of one kernel, for the host": replay}
    runs |= {"the same, and its result read": read, "the same, after 16 kB went up": upload}
    for what, run in runs.items():
        read()  # whatever was asked for is done
        start = time.perf_counter()
        for _ in range(100):
            run()
        yield {"us": (time.perf_counter() - start) * 1e4, "what": what}


def passes(lab: Lab) -> Iterator[Record]:
    """Of n rows over S slots."""
    for name, model in lab.models.items():
        for n_slots in lab.slots:
            with open_cache(model, n_slots - SLOT_STEP) as cache:
                for n in lab.rows:
                    forward_of(model, cache, n)()  # so that the graph reads this pass
                    shape = shape_of(n, slot_count(cache.length + n), cache.config)
                    ms = lab.replay_ms(cache.passes.captured[shape][0].replay)
                    yield {"model": name, "slots": n_slots, "rows": n, "device_ms": ms}


def execute(args: Namespace) -> int:
    pair, _ = open_pair(args, is_drafting=True, say=say)
    lab = Lab({"target": pair.target, "draft": pair.draft}, pair.target.device)
    if lab.device.type != "cuda":
        raise UsageError("these are facts of a GPU, and torch sees none")
    if args.dry:
        lab = Lab(lab.models, lab.device, rows=(1, 32), slots=(512,))
    kept: dict[str, list[Record]] = {}
    for ask in (attention, products, launches, passes):
        kept[ask.__name__] = []
        for found in ask(lab):
            print(ask.__name__, json.dumps(found), flush=True)
            kept[ask.__name__].append(found)
            with writing(args.output):
                write_whole(Path(args.output), json.dumps(kept, indent=1) + "\n")
    others = {found["kernel"] for found in kept["attention"]} - {MEANT}
    if others:
        say(f"error: attention is not {MEANT} everywhere, but {', '.join(sorted(others))}")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/gpu_facts.py", description=__doc__ and __doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="the records, as JSON")
    parser.add_argument("--dry", action="store_true", help="few sizes: does it run?")
    return run_command_line(execute, parser, arguments)
