"""Peak memory of one method, measured in a process of its own.

peak_mb = in_own_process(measure_memory, options, run, prompt_ids)["metrics"]["peak_mb"]
"""

import argparse
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from dynatree import METHODS, Request, token_ids
from gpt_neox import weight_bytes
from inputs import UsageError, open_pair, parse_settings
from results import Run
from sampling import Sampling


def in_own_process(function: Callable[..., dict], *arguments: object) -> dict:
    """Call a function in a fresh interpreter, whose memory nothing else has touched."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def measure_memory(options: dict, run: Run, prompt: list[int], sampling: Sampling | None) -> dict:
    """Load what the run needs, run it, and tell this process's peak (on CUDA the device's)."""
    settings = parse_settings(METHODS[run.method], run.settings)
    is_drafting = settings.rule().max_depth > 0
    pair, _ = open_pair(argparse.Namespace(**options), is_drafting, lambda line: None)
    request = Request(pair, prompt, run.new_tokens, (), run.commit, sampling)
    steps = list(request.decode(settings))
    models = [pair.target, *([pair.draft] if pair.draft else [])]
    capacity = len(prompt) + run.new_tokens + settings.rule().max_rows
    floor = sum(
        weight_bytes(model.config, model.dtype) + model.cache_bytes(capacity) for model in models
    )
    device = pair.target.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()
    metrics = {"peak_mb": peak / 1e6, "floor_mb": floor / 1e6}
    return {"metrics": metrics, "token_ids": token_ids(steps)}


def peak_memory() -> int:
    """The most memory this process has held, in bytes. Raises UsageError where Linux is not."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError as error:
        raise UsageError("the memory table reads /proc, which only Linux has") from error
    # Not getrusage: its maximum starts from the parent's size, which a new process inherits.
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024
