"""What a figure depends on besides the options: processor, versions, the code's commit.

machine = describe_machine(pair, models, has_peers=False)
"""

import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from cli.metrics import versions
from cli.models import Pair

ROOT = Path(__file__).parent.parent


def describe_machine(pair: Pair, models: dict, has_peers: bool) -> dict:
    """For the results file; models: what open_pair reports of them."""
    machine = versions()
    if has_peers:
        machine["transformers"] = version("transformers")
    machine |= models
    machine["processor"] = processor(pair.target.device)
    machine["commit"] = revision()
    return machine


def processor(device: torch.device) -> str:
    """The GPU's name or the CPU's, the latter only as its architecture where Linux is not."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        found = re.search("model name\\s*: (.*)", cpu_info.read_text())
        if found:
            return found[1]
    return platform.machine()


def revision() -> str:
    """The code's commit, marked if files differ from it; "unknown" outside a repository."""
    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        if git("status", "--porcelain", "--untracked-files=no"):
            commit += "-modified"
        return commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT)] + list(arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
