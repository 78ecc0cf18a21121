"""How long attention and products take by their rows: of a pass, the kernels that matter.

    python tools/kernel_times.py models/enlarged/target --device cuda --dtype float16

On random tensors of a checkpoint's shapes, of which only config.json is read. On CUDA inside a
graph, so that nothing is launched between them, and over more memory than a cache holds, as in a
pass. Attention is timed two ways, as torch has it and as two products with a softmax between, each
with its largest error beside exact arithmetic; a product stands beside the least that it can take,
its weight read once at the bandwidth of a large copy.

Shapes: n rows, S cache slots, H heads, D head size.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":  # before torch, whose import takes a second
    from cli.start import guard_imports

    guard_imports()

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmark.report import text_table
from benchmark.step_times import copy_bandwidth, median_ms
from cli.errors import Parser, UsageError, run_command_line
from cli.models import choose_device, choose_dtype
from engine.checkpoint import Config, read_config
from engine.cuda_graphs import record
from engine.fused import attend
from engine.memory import memory_for, require_memory
from engine.passes import ROW_COUNTS

TREE_ROWS = (1, 8, 32)
SLOTS = (512, 2048)
N_ROUNDS = 3
CACHE_BYTES = 2 * 10**8  # past the largest cache of a GPU


def two_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """What `attend` gives of the same arguments, [H, n, D]."""
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v)


@dataclass(frozen=True)
class Bench:
    """Where things are timed, in what precision, and over how much memory."""

    device: torch.device
    dtype: torch.dtype
    max_copies: int

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def n_copies(self, n_elements: int) -> int:
        """Of something of this size, as many as no cache holds; where that is timed at all."""
        if self.device.type != "cuda":
            return 1
        n = CACHE_BYTES // (n_elements * self.dtype.itemsize)
        return min(max(n, 2), self.max_copies)

    def microseconds(self, calls: Sequence[Callable[[], Tensor]]) -> float:
        """The median time of one of these calls, which are made one after the other."""

        def run() -> None:
            for call in calls:
                call()

        graph = record(run, None, self.device).graph if self.device.type == "cuda" else None

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize(self.device)

        (ms,) = median_ms([replay if graph else run], N_ROUNDS)
        return ms * 1e3 / len(calls)


def attention_table(bench: Bench, config: Config) -> list[list[str]]:
    """Header and a line for each number of slots and rows: microseconds and error of both ways."""
    table = [["slots", "rows", "torch us", "error", "two products us", "error"]]
    for n_slots in SLOTS:
        for n in TREE_ROWS:
            cells = attention_cells(bench, config, n, n_slots)
            table.append([str(n_slots), str(n)] + cells)
    return table


def attention_cells(bench: Bench, config: Config, n: int, n_slots: int) -> list[str]:
    """For the last n of the slots as rows, each of which sees itself and what is before it."""
    q = bench.random(config.n_heads, n, config.head_size)
    seen = torch.ones(n, n_slots, dtype=torch.bool, device=bench.device).tril(n_slots - n)
    bias = q.new_full((n, n_slots), -torch.inf).masked_fill_(seen, 0.0)
    shape = (2, config.n_heads, n_slots, config.head_size)  # keys, then values
    n_layers = bench.n_copies(2 * n_slots * config.hidden_size)
    caches = [bench.random(*shape) for _ in range(n_layers)]
    cells = []
    for way in (attend, two_products):
        us = bench.microseconds([partial(way, q, kv[0], kv[1], bias) for kv in caches])
        cells += [f"{us:.1f}", f"{largest_error(way, q, caches[0], bias):.0e}"]
    return cells


def largest_error(way: Callable[..., Tensor], q: Tensor, kv: Tensor, bias: Tensor) -> float:
    """Of attention [H, n, D], as a share of its largest value."""
    scores = q.double() @ kv[0].double().transpose(1, 2) * q.shape[-1] ** -0.5 + bias.double()
    exact = scores.softmax(-1) @ kv[1].double()
    error = (way(q, kv[0], kv[1], bias).double() - exact).abs().max()
    return float(error / exact.abs().max())


def matrices_of(config: Config) -> dict[str, tuple[int, int]]:
    """Of a parallel layer, joined as engine/fused.py joins them, and the head: [out, in]."""
    hidden, inside = config.hidden_size, config.intermediate_size
    return {
        "into": (3 * hidden + inside, hidden),
        "out of": (hidden, hidden + inside),
        "head": (config.vocab_size, hidden),
    }


def require_room(bench: Bench, config: Config) -> None:
    """Raise OutOfMemory if the largest thing that is timed would not fit."""
    cache = 2 * max(SLOTS) * config.hidden_size
    sizes = [n_out * n_in for n_out, n_in in matrices_of(config).values()]
    largest = max(sizes + [cache])
    need = 4 * largest  # drawn in float32, then kept in dtype, as often as it takes
    need += largest * bench.n_copies(largest) * bench.dtype.itemsize
    require_memory(need, bench.device, f"a product or a cache of {largest:,} elements")


def product_table(bench: Bench, config: Config, gb_s: float) -> list[list[str]]:
    """Header and a line for each number of rows: microseconds and the share of that bandwidth."""
    table = [["rows"]] + [[str(n)] for n in ROW_COUNTS]
    for name, (n_out, n_in) in matrices_of(config).items():
        table[0] += [f"{name} {n_out} x {n_in} us", "of floor"]
        bias = bench.random(n_out)
        weights = [bench.random(n_out, n_in) for _ in range(bench.n_copies(n_out * n_in))]
        floor_us = weights[0].nbytes / gb_s / 1e3
        for n, line in zip(ROW_COUNTS, table[1:], strict=True):
            x = bench.random(n, n_in)
            us = bench.microseconds([partial(torch.addmm, bias, x, w.t()) for w in weights])
            line += [f"{us:.1f}", f"{floor_us / us:.0%}"]
    return table


@memory_for("what is timed")
@torch.inference_mode()
def execute(args: Namespace) -> int:
    if args.copies < 1:
        raise UsageError(f"--copies {args.copies}: at least 1")
    device = choose_device(args.device)
    bench = Bench(device, choose_dtype(args.dtype, device), args.copies)
    config = read_config(Path(args.folder))
    require_room(bench, config)
    gb_s = copy_bandwidth(device)
    print(f"{device}, {bench.dtype}, a large copy reads and writes {gb_s:,.1f} GB/s\n")
    for table in (attention_table(bench, config), product_table(bench, config, gb_s)):
        print(text_table(table[0], table[1:], width=100) + "\n", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/kernel_times.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", help="a checkpoint's, for its shapes")
    add("--device", help="as dynatree.py's")
    add("--dtype", help="as dynatree.py's")
    add("--copies", type=int, default=32, metavar="N", help="at most, to go past a cache (32)")
    return run_command_line(execute, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
