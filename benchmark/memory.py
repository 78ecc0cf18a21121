"""Peak memory of one method, measured in a process of its own.

found = measure_apart(options, pair.target.device, run, ids, seed=0)
peak_mb = found["metrics"]["peak_mb"]
"""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from benchmark.results import Options, Run
from benchmark.rows import way_of
from cli.errors import UsageError
from cli.metrics import token_ids
from cli.models import Request, open_pair
from engine.memory import OutOfMemory
from engine.model import FastGPTNeoX, weight_bytes


def measure_apart(
    options: Options, device: torch.device, run: Run, prompt: list[int], seed: int
) -> dict:
    """The metrics and ids of a text from a process that does nothing else. Raises OutOfMemory, and
    UsageError where Linux is not."""
    used = used_memory(device)
    return in_own_process(measure_memory, options, run, prompt, seed, used)


def in_own_process(function: Callable[..., dict], *arguments: object) -> dict:
    """Call a function in a fresh interpreter, whose memory nothing else has touched; it ends with
    this process, whatever ends that.

    Raises what the function raises, and OutOfMemory if the process was killed.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_answer, args=(sender, function, arguments))
    start_quietly(process)
    try:
        sender.close()
        answer = receiver.recv()
    except EOFError as error:
        what = "the measured process was killed, as it is if memory runs out"
        raise OutOfMemory(what) from error
    finally:
        process.kill()
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def start_quietly(process: BaseProcess) -> None:
    """Start a process that a terminal's Ctrl-C does not reach: it is for this one alone."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a new process inherits
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, handler)


def _answer(sender: Connection, function: Callable[..., dict], arguments: tuple) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        sender.send(function(*arguments))
    except Exception as error:  # whatever it is, it is raised again where it is wanted
        sender.send(error)


def end_with_parent() -> None:
    """A parent that was killed can end nobody."""
    multiprocessing.parent_process().join()
    os._exit(1)


def measure_memory(options: Options, run: Run, prompt: list[int], seed: int, used: int) -> dict:
    """Load what the run needs, run it, and tell this process's peak (on CUDA the device's).

    used: bytes of the device that were in use before.
    """
    way = way_of(run, options, seed)
    rule = way.rule()
    pair, _ = open_pair(options, rule.max_depth > 0, lambda line: None)
    steps = list(Request(pair, prompt, way, run.new_tokens).decode())
    end = min(len(prompt) + run.new_tokens, way.window.full)
    floor = floor_bytes(pair.target, end + rule.max_rows)
    if pair.draft:
        floor += floor_bytes(pair.draft, end + rule.max_drafted)
    device = pair.target.device
    parts = cuda_memory(device, used) if device.type == "cuda" else {"peak": peak_memory()}
    metrics = {f"{name}_mb": size / 1e6 for name, size in (parts | {"floor": floor}).items()}
    return {"metrics": metrics, "token_ids": token_ids(steps)}


def floor_bytes(model: FastGPTNeoX, capacity: int) -> int:
    """What a model takes: its weights, and a cache for `capacity` tokens."""
    return weight_bytes(model.config, model.dtype) + model.pool.bytes(capacity)


def used_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that any process uses; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def cuda_memory(device: torch.device, used: int) -> dict[str, int]:
    """Bytes: the most that tensors took, what graphs keep for theirs, and all beside torch.

    The last is the CUDA context; `used` is what other processes had before.
    """
    segments = torch.cuda.memory_snapshot()
    graph_segments = [s for s in segments if s["segment_pool_id"] != (0, 0)]
    return {
        "peak": torch.cuda.max_memory_allocated(device),
        "pools": sum(segment["total_size"] for segment in graph_segments),
        "context": used_memory(device) - used - torch.cuda.memory_reserved(device),
    }


def peak_memory() -> int:
    """The most memory this process has held, in bytes. Raises UsageError where Linux is not."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError as error:
        raise UsageError("the memory table reads /proc, which only Linux has") from error
    # Not getrusage: its maximum starts from the parent's size, which a new process inherits.
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024
