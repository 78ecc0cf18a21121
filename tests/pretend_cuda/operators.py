"""The list of operators that ran on the pretended device, and a check that CUDA has them.

    PRETEND_CUDA_OPERATORS=FILE python tests/pretend_cuda -m pytest -m cuda
    python tests/pretend_cuda/operators.py FILE   # with a torch built for CUDA; needs no GPU

The first command appends a line to the file for each operator and the dtypes of its tensors. Each
process writes a line as soon as it needs it, so processes can share the file. Some lines repeat.
"""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

VARIABLE = "PRETEND_CUDA_OPERATORS"
KEYS = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
WRITTEN: set[tuple] = set()  # file, operator and dtypes of the lines of this process


def list_operator(name: str, tensors: Iterable[Tensor]) -> None:
    """Append an operator and the dtypes of its tensors to the file, if the variable names one."""
    file = os.environ.get(VARIABLE)
    if not file:
        return
    line = name, *dict.fromkeys(str(tensor.dtype) for tensor in tensors)
    if (file, line) not in WRITTEN:
        WRITTEN.add((file, line))
        with open(file, "a") as lines:
            lines.write(json.dumps(line) + "\n")


def has_kernel(name: str) -> bool:
    """Whether this torch can run an operator on CUDA."""
    try:
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in KEYS)
    except RuntimeError:  # this version of torch does not have the operator
        return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print listed operators without a CUDA kernel.")
    parser.add_argument("file", type=Path, help="list of operators")
    file = parser.parse_args(arguments).file
    if not file.is_file():
        parser.error(f"{file} is no file")
    found = sorted({tuple(json.loads(line)) for line in file.read_text().splitlines()})
    missing = [line for line in found if not has_kernel(line[0])]
    for line in missing:
        print(*line)
    n = len({name for name, *_ in found})
    n_missing = len({name for name, *_ in missing})
    version = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"{n_missing} of {n} operators have no kernel for CUDA ({version})")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
