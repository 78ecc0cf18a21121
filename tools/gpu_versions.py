"""The versions and options that the results of a GPU depend on.

    python tools/gpu_versions.py versions.json

It imports nothing of the project, and each fact is looked up on its own, so that it tells what is
wrong on a machine where the other steps of tools/gpu_check.sh cannot start.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Environment variables that may change a result
VARIABLES = re.compile("CUDNN|TF32|ALLOC|BLOCKING|VISIBLE|NUM_THREADS")
WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


def look_up_fact(look_up: Callable[[], object]) -> str:
    """Return a fact, or the error with which its look-up ended."""
    try:
        return str(look_up())
    except Exception as error:  # the other facts still help
        return f"{type(error).__name__}: {error}"


def required_packages() -> list[str]:
    """Return the packages of requirements.txt, pytest, and triton, which torch.compile needs."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return [*re.findall(r"^[\w-]+", text, re.MULTILINE), "pytest", "triton"]


def torch_facts() -> dict[str, str]:
    """Return what torch tells of the device, among it the result of one small kernel."""
    import torch

    cuda, blas = torch.cuda, torch.backends.cuda
    look_ups: dict[str, Callable[[], object]] = {
        "built for CUDA": lambda: torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version,
        "device": cuda.get_device_name,
        "capability": cuda.get_device_capability,
        "free and total bytes": cuda.mem_get_info,
        "TF32": lambda: torch.get_float32_matmul_precision(),
        "preferred BLAS": blas.preferred_blas_library,
        "1 + 1": lambda: int(torch.ones(1, device="cuda").add_(1).item()),
    }
    return {name: look_up_fact(look_up) for name, look_up in look_ups.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the facts and write them to a file. Return 0 if the kernel ran, else 1."""
    facts = {"python": platform.python_version(), "machine": platform.platform()}
    for name in required_packages():
        facts[name] = look_up_fact(lambda name=name: version(name))
    facts |= {name: os.environ.get(name, "not set") for name in WORKSPACES}
    facts |= {name: os.environ[name] for name in sorted(os.environ) if VARIABLES.search(name)}
    try:
        facts |= torch_facts()
    except Exception as error:  # a broken installation may raise anything
        facts["import torch"] = f"{type(error).__name__}: {error}"
    for name, value in facts.items():
        print(f"{name:20} {value}")
    file = (sys.argv[1:] if arguments is None else arguments)[0]
    Path(file).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0 if facts.get("1 + 1") == "2" else 1


if __name__ == "__main__":
    sys.exit(main())
