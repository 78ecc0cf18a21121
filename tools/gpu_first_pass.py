"""The first passes on a GPU: do captured passes compute what the same passes do without graphs?

Models with the shapes of Pythia-70M and 2.8B and random weights run a prompt, then trees of several
sizes: first without CUDA graphs, then captured, then replayed in mixed order. The logits must be
equal bit for bit. No checkpoint is needed.

    python -m tools.gpu_first_pass

The first error ends it. With CUDA_LAUNCH_BLOCKING=1 the traceback of an error without graphs ends
at the kernel that raised it.

Shapes: n rows, V vocabulary.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dynatree_lab.engine.cache import FastCache
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.engine.passes import PassConfig
from dynatree_lab.engine.scores import Ranking
from gpt_neox import Config, GPTNeoX
from verify import ancestor_mask

SHAPES = {  # the small one first, because it is fast and shows most errors
    "Pythia-70M": Config(50304, 512, 6, 8, 2048),
    "Pythia-2.8B": Config(50304, 2560, 32, 32, 10240),
}
DRY_SHAPES = {"a tiny model": Config(384, 128, 2, 2, 512)}
# A single row runs with one of padding. Replays alternate between large and small passes. The
# pass of 256 rows is captured when it first runs, so it runs again
ROWS = (256, 1, 128, 2, 64, 8, 32, 256)
DRY_ROWS = (4, 1, 2, 4)
N_PROMPT = 200  # tokens; with 256 rows a pass needs two steps of slots
DEVIATION = 0.02  # of random matrices and biases; keys and logits then stay small


class RandomTensors(Mapping[str, Tensor]):
    """Random weights by their published names. Each lookup makes a tensor on the device."""

    def __init__(self, config: Config, dtype: torch.dtype):
        with torch.device("meta"):
            parameters = GPTNeoX(config).named_parameters()
        self.shapes = {name: parameter.shape for name, parameter in parameters}
        self.options = {"device": "cuda", "dtype": dtype}
        self.generator = torch.Generator("cuda").manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        if "norm" in name and name.endswith("weight"):
            return torch.ones(self.shapes[name], **self.options)
        random = torch.randn(self.shapes[name], generator=self.generator, **self.options)
        return random.mul_(DEVIATION)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@torch.inference_mode()
def open_cache(model: FastGPTNeoX, max_rows: int) -> FastCache:
    """Return a cache that holds a prompt and has room for a pass of max_rows rows."""
    ranking = Ranking(3, are_logprobs=True)
    config = PassConfig(max_rows, n_scratch=max_rows, ranking=ranking)
    cache = model.new_cache(N_PROMPT + max_rows, config)
    model.prefill(list(range(N_PROMPT)), cache)
    return cache


@torch.inference_mode()
def run_tree(model: FastGPTNeoX, cache: FastCache, n: int) -> Tensor:
    """Return a copy of the logits [n, V] of a pass over a binary tree of n rows."""
    parents = [(row - 1) // 2 for row in range(n)]  # -1 for the root
    mask = torch.from_numpy(ancestor_mask(parents))
    positions = cache.length + mask.sum(dim=1) - 1
    return model.forward(torch.arange(n), positions, cache, mask).clone()


def check_model(config: Config, dtype: torch.dtype, rows: Sequence[int]) -> str:
    """Run passes of these numbers of rows. Return a summary. Raises ValueError if logits differ."""
    model = FastGPTNeoX.from_tensors(config, RandomTensors(config, dtype))
    cache = open_cache(model, max(rows))
    expected = {n: run_tree(model, cache, n) for n in sorted(set(rows))}
    if not all(logits.isfinite().all() for logits in expected.values()):
        raise ValueError("a pass without graphs gives logits that are not finite")
    model.capture(cache, cache.length)
    for n in rows:
        found = run_tree(model, cache, n)
        is_different = (found != expected[n]).any(dim=1)  # [n]
        if is_different.any():
            first = int(is_different.nonzero()[0])
            largest = float((found - expected[n]).abs().max())
            where = f"first in row {first}, by at most {largest:.2e}"
            raise ValueError(f"a replay of {n} rows gives other logits, {where}")
    return f"{model.n_graphs} graphs, captured in {model.capture_s:.1f} s; all replays are equal"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="run a tiny model only")
    is_dry = parser.parse_args(arguments).dry
    shapes, rows = (DRY_SHAPES, DRY_ROWS) if is_dry else (SHAPES, ROWS)
    for name, config in shapes.items():
        for dtype in (torch.float16, torch.bfloat16):
            began = time.perf_counter()
            print(f"{name} in {dtype}: {check_model(config, dtype, rows)}", end="; ")
            print(f"{time.perf_counter() - began:.1f} s", flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
