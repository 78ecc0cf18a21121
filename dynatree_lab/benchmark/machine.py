"""Description of the machine for a results file: processor, versions, commit and load.

machine = describe_machine(pair, models, has_hf=False)
"""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from dynatree_lab.metrics import versions
from dynatree_lab.pair import Pair

ROOT = Path(__file__).parents[2]


def describe_machine(pair: Pair, models: dict, has_hf: bool) -> dict[str, str | int | None]:
    """Return the processor, versions, models and commit. models: the pair's report."""
    machine = versions() | models
    if machine["draft"] is None:  # no case needs it
        del machine["draft"]
    for role in {"target", "draft", "head"} & machine.keys():
        machine[role] = path_from_root(machine[role])
    if has_hf:
        machine["transformers"] = version("transformers")
    return machine | {"processor": processor_name(pair.target.device), "commit": code_commit()}


def path_from_root(model: str) -> str:
    """Return the path of a model's folder, relative to the project's root if it is inside, else
    absolute. Return the name of a model on the hub unchanged."""
    if not os.path.exists(model):
        return model
    folder = Path(os.path.abspath(model))
    return str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder)


def processor_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU; outside Linux only the CPU's architecture is known."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    found = re.search("model name\\s*: (.*)", cpu_info.read_text()) if cpu_info.exists() else None
    return found[1] if found else platform.machine()


def one_minute_load() -> float | None:
    """Return the mean number of running processes in the last minute, or None on systems without a
    load average, such as Windows."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def code_commit() -> str:
    """Return the commit of the code, with "-modified" if files differ from it, or "unknown" outside
    a repository."""
    if not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=10"]
    done = subprocess.run([*command, "--dirty=-modified"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
