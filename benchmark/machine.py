"""What a figure depends on besides the options: processor, versions, the code's commit, the load.

machine = describe_machine(pair, models, has_hf=False)
"""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from cli.metrics import versions
from cli.models import Pair

ROOT = Path(__file__).parent.parent


def describe_machine(pair: Pair, models: dict, has_hf: bool) -> dict[str, str | int | None]:
    """For the results file; models: what open_pair reports of them."""
    machine = versions() | models
    for role in ("target", "draft"):
        machine[role] = named_from_root(machine[role])
    if has_hf:
        machine["transformers"] = version("transformers")
    return machine | {"processor": processor(pair.target.device), "commit": revision()}


def named_from_root(model: str) -> str:
    """One name for a folder of models, whatever the working folder: within the project from its
    root, else whole; what is no folder, as on the hub, as it is."""
    if not os.path.exists(model):
        return model
    folder = os.path.abspath(model)
    inside = os.path.relpath(folder, ROOT)
    return folder if inside.startswith(os.pardir) else inside


def processor(device: torch.device) -> str:
    """The GPU's name or the CPU's, the latter only as its architecture where Linux is not."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    found = None
    if cpu_info.exists():
        found = re.search("model name\\s*: (.*)", cpu_info.read_text())
    return found[1] if found else platform.machine()


def one_minute_load() -> float | None:
    """How many processes have wanted a processor in the last minute, in the mean: what else ran as
    a benchmark began. None where that is not counted, as on Windows."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def revision() -> str:
    """The code's commit, marked if files differ from it; "unknown" outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=10"]
    try:
        done = subprocess.run([*command, "--dirty=-modified"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.decode().strip()
