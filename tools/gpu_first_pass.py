"""The first pass on a GPU: does the CUDA code work? It needs no checkpoint.

For the shapes of target and draft, in float16 and bfloat16, with random weights:

make       the weights on the device, packed as the engine packs them
prefill    a prompt
load       a pass over a tree of n rows, which loads its kernels
eager      the same pass again, without a CUDA graph
capture    the CUDA graph of this pass
replay     all graphs in mixed order; their logits must equal the eager ones bit for bit

    python tools/gpu_first_pass.py --output first_pass.json

Each result is printed and written as soon as it is known. A step that fails stops only the steps
that need its result, until an error leaves the device unusable. The exit status is 1 if a step has
failed.

Shapes: n rows, V vocabulary.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, from anywhere

if __name__ == "__main__":
    from cli.start import run_program

    run_program("tools.gpu_first_pass")

import json
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmark.step_times import RANKINGS, capture_pass
from cli.errors import Parser, print_line, run_command_line, writing
from cli.files import write_whole
from engine.cache import FastCache
from engine.checkpoint import first_line
from engine.model import FastGPTNeoX
from engine.passes import PassConfig
from engine.scores import Ranking
from gpt_neox import Config
from tools.random_models import add_shape_options, random_model, read_shapes, require_gpu
from verify import ancestor_mask

ROWS = (1, 2, 8, 32, 64, 128, 256)  # 1 runs with a row of padding
DRY_ROWS = (1, 2, 8)
N_PROMPT = 200  # tokens; with 256 rows a pass needs 512 slots
DTYPES = (torch.float16, torch.bfloat16)

Record = dict[str, str | int | float]


class LogitsDiffer(Exception):
    """A replay gave other logits than the eager pass."""


class BrokenDevice(Exception):
    """An error after which the device refuses all work of this process."""


class Report:
    """The results so far. Each is printed and written at once."""

    def __init__(self, file: Path):
        self.file = file
        self.records: list[Record] = []
        self.errors: dict[str, list[str]] = {}  # the steps that failed with each error

    def attempt(self, step: str, place: Record, run: Callable[[], object]) -> object | None:
        """Run a step and add its milliseconds, or its error. Return its result, or None if it
        failed. Raises BrokenDevice."""
        result, record = None, {"step": step} | place
        began = time.perf_counter()
        try:
            result = run()
            torch.cuda.synchronize()
        except Exception as error:  # the other steps may tell more
            record["error"] = f"{type(error).__name__}: {first_line(error)}"
            if record["error"] not in self.errors:
                traceback.print_exc()
        self.add(record | {"ms": round((time.perf_counter() - began) * 1e3, 3)})
        if "error" not in record:
            return result
        try:
            torch.cuda.synchronize()
        except Exception as error:  # whatever it is, no further step can tell anything
            raise BrokenDevice(f"the device is unusable since {describe(record)}") from error
        return None

    def add(self, record: Record) -> None:
        self.records.append(record)
        what, error = describe(record), record.get("error")
        print(f"{what}: {error or record['ms']}{'' if error else ' ms'}", flush=True)
        if error:
            self.errors.setdefault(error, []).append(what)
        with writing(self.file):
            write_whole(self.file, json.dumps(self.records, indent=1) + "\n")

    def summary(self) -> list[str]:
        """Return a line for each different error."""
        lines = []
        for error, steps in self.errors.items():
            more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            lines.append(f"{steps[0]}{more}: {error}")
        return lines


def describe(record: Record) -> str:
    """Return the step of a record in words, as "draft float16 eager, 32 rows"."""
    rows = f", {record['rows']} rows" if "rows" in record else ""
    return f"{record['model']} {record['dtype']} {record['step']}{rows}"


def try_model(
    report: Report, role: str, config: Config, dtype: torch.dtype, rows: Sequence[int]
) -> None:
    """Try all steps of one model in one dtype. Raises BrokenDevice."""
    place = {"model": role, "dtype": str(dtype).removeprefix("torch.")}
    model = report.attempt("make", place, partial(random_model, config, require_gpu(), dtype))
    if model is None:
        return
    cache = report.attempt("prefill", place, partial(prefill, model, RANKINGS[role], rows[-1]))
    if cache is None:
        return
    expected: dict[int, Tensor] = {}  # eager logits [n, V], by n
    for n in rows:
        at, run = place | {"rows": n}, partial(run_tree, model, cache, n)
        if report.attempt("load", at, run) is None:
            continue
        logits = report.attempt("eager", at, run)
        if report.attempt("capture", at, partial(capture_pass, model, cache, n)) is not None:
            expected[n] = logits
    cache.passes.is_replaying = True
    for n in mix_order(expected):
        replay = partial(compare_replay, model, cache, expected[n])
        report.attempt("replay", place | {"rows": n}, replay)


@torch.inference_mode()
def prefill(model: FastGPTNeoX, ranking: Ranking, max_rows: int) -> FastCache:
    """Return a cache that has a prompt and room for passes of max_rows rows."""
    config = PassConfig(max_rows, n_scratch=max_rows, ranking=ranking)
    cache = model.new_cache(N_PROMPT + max_rows, config)
    tokens = [i % model.config.vocab_size for i in range(N_PROMPT)]
    require_finite(model.prefill(tokens, cache))
    return cache


@torch.inference_mode()
def run_tree(model: FastGPTNeoX, cache: FastCache, n: int) -> Tensor:
    """Return a copy of the logits [n, V] of a pass over a binary tree of n rows."""
    parents = [(row - 1) // 2 for row in range(n)]  # -1 for the root
    mask = torch.from_numpy(ancestor_mask(parents))
    positions = cache.length + mask.sum(dim=1) - 1
    tokens = torch.arange(n) % model.config.vocab_size
    return require_finite(model.forward(tokens, positions, cache, mask).clone())


def require_finite(logits: Tensor) -> Tensor:
    """Return the logits. Raises ValueError if they are not finite."""
    if not logits.isfinite().all():
        raise ValueError(f"{int((~logits.isfinite()).sum())} of {logits.numel()} logits not finite")
    return logits


def compare_replay(model: FastGPTNeoX, cache: FastCache, expected: Tensor) -> bool:
    """Return True if a replay gives exactly the expected logits [n, V]. Raises LogitsDiffer."""
    found = run_tree(model, cache, len(expected))
    is_different = found != expected
    if not is_different.any():
        return True
    row = int(is_different.any(dim=1).nonzero()[0])
    largest = float((found - expected).abs().max())
    raise LogitsDiffer(
        f"{int(is_different.sum())} of {found.numel()} logits differ from the eager pass, "
        f"first in row {row}, by at most {largest:.2e}"
    )


def mix_order(expected: dict[int, Tensor]) -> list[int]:
    """Return the row counts so that large and small ones alternate, and the first one again."""
    rows = sorted(expected)
    order = []
    while rows:
        order.append(rows.pop())
        rows.reverse()
    return order + order[:1]


def execute(args: Namespace) -> int:
    require_gpu()
    shapes, report = read_shapes(args), Report(Path(args.output))
    try:
        for role in ("draft", "target"):  # the small one first: it is fast and shows most errors
            for dtype in DTYPES:
                try_model(report, role, shapes[role], dtype, DRY_ROWS if args.dry else ROWS)
                torch.cuda.empty_cache()
    except BrokenDevice as error:
        print_line(f"error: {error}")
    for line in report.summary():
        print_line(f"error: {line}")
    return 1 if report.errors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    summary = __doc__ and __doc__.splitlines()[0]
    parser = Parser(prog="tools/gpu_first_pass.py", description=summary)
    add_shape_options(parser)
    return run_command_line(execute, parser, arguments)
