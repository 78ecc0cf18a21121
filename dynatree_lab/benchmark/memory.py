"""Peak memory of one text, measured in a new process.

metrics, token_ids = measure_in_new_process(args, case, ids, seed=0)
peak_mb = metrics["peak_mb"]
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from dynatree_lab.benchmark.cases import Case
from dynatree_lab.cli.load import import_files
from dynatree_lab.cli.options import embedded_head, open_pair
from dynatree_lab.errors import UsageError
from dynatree_lab.metrics import token_ids
from dynatree_lab.request import Request

Measured = tuple[dict[str, float], list[int]]  # metrics, ids
COMMAND = [sys.executable, "-c", "from dynatree_lab.benchmark.memory import answer; answer()"]


def measure_in_new_process(
    args: argparse.Namespace, case: Case, prompt: list[int], seed: int
) -> Measured:
    """Return the peak memory and the ids of a text that a new process generates. Ctrl-C reaches
    only this process, which then kills the new one. Raises UsageError."""
    given = json.dumps({"args": vars(args), "case": asdict(case), "prompt": prompt, "seed": seed})
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    how = {"capture_output": True, "text": True, "env": variables, "start_new_session": True}
    done = subprocess.run(COMMAND, input=given, **how)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["it was killed, perhaps for lack of memory"])[-1]
        raise UsageError(f"{case.row}: the process that measures its memory failed: {reason}")
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def answer() -> None:
    """Print the result of measure_memory for the arguments on standard input."""
    given = json.load(sys.stdin)
    given["args"], given["case"] = argparse.Namespace(**given["args"]), Case(**given["case"])
    import_files(given["args"].load or ())
    print(json.dumps(measure_memory(**given)))


def measure_memory(args: argparse.Namespace, case: Case, prompt: list[int], seed: int) -> Measured:
    """Load the models of a case, generate a text, and return the peak memory and the ids. On CUDA
    it is the memory of all tensors, else the resident memory of this process."""
    config = case.generation_config(args.top_p, seed, not args.no_graphs)
    if case.uses_head:
        args.draft = args.head or embedded_head()
    pair = open_pair(args, config.method.needs_draft, lambda line: None)
    ids = token_ids(Request(pair, prompt, config, case.new_tokens).decode())
    device = pair.target.device
    is_cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else peak_memory()
    return {"peak_mb": peak / 1e6}, ids


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes, which only Linux has. The maximum
    of getrusage would begin with the size of the parent process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024
