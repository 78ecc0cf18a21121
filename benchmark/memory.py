"""Peak memory of one method, measured in a process of its own.

peak_mb = in_own_process(measure_memory, options, run, ids, None, 0)["metrics"]["peak_mb"]
"""

import argparse
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from benchmark.results import Run
from benchmark.rows import settings_of, window_of
from cli.errors import UsageError
from cli.metrics import token_ids
from cli.models import Request, open_pair
from engine.memory import OutOfMemory
from engine.sampling import Sampling
from gpt_neox import GPTNeoX, weight_bytes


def in_own_process(function: Callable[..., dict], *arguments: object) -> dict:
    """Call a function in a fresh interpreter, whose memory nothing else has touched.

    Raises what the function raises, and OutOfMemory if the process was killed.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    with running(spawn.Process(target=_answer, args=(sender, function, arguments))):
        sender.close()
        try:
            answer = receiver.recv()
        except EOFError as error:
            what = "the measured process was killed, as it is if memory runs out"
            raise OutOfMemory(what) from error
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextmanager
def running(process: BaseProcess) -> Iterator[None]:
    """A process that runs until the end of the block, whatever ends it; Ctrl-C is for us alone."""
    resource_tracker.ensure_running()  # else it is started below, and lets Ctrl-C through again
    try:
        with without_interrupts():
            process.start()
        yield
    finally:
        if process.pid is not None:
            process.kill()
            process.join()


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; for a process started in it, for good."""
    held: list[int] = []

    def hold(number: int, frame: object) -> None:
        held.append(number)

    handler = signal.signal(signal.SIGINT, hold)  # another thread may still be told of it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what a process inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _answer(sender: Connection, function: Callable[..., dict], arguments: tuple) -> None:
    try:
        sender.send(function(*arguments))
    except Exception as error:  # whatever it is, it is raised again where it is wanted
        sender.send(error)


def measure_memory(
    options: dict, run: Run, prompt: list[int], sampling: Sampling | None, used: int
) -> dict:
    """Load what the run needs, run it, and tell this process's peak (on CUDA the device's).

    used: bytes of the device that were in use before.
    """
    settings = settings_of(run)
    rule = settings.rule()
    pair, _ = open_pair(argparse.Namespace(**options), rule.max_depth > 0, lambda line: None)
    pair.use_graphs(not (run.is_eager or options.get("no_graphs")))
    window = window_of(run, pair)
    request = Request(
        pair,
        prompt,
        settings,
        run.new_tokens,
        sampling=sampling,
        window=window,
        commit=run.commit,
        strict=run.is_strict,
    )
    steps = list(request.decode())
    end = min(len(prompt) + run.new_tokens, window.full)
    floor = floor_bytes(pair.target, end + rule.max_rows)
    if pair.draft:
        floor += floor_bytes(pair.draft, end + rule.max_drafted)
    device = pair.target.device
    if device.type == "cuda":
        parts = cuda_memory(device, used)
    else:
        parts = {"peak": peak_memory()}
    parts["floor"] = floor
    metrics = {f"{name}_mb": size / 1e6 for name, size in parts.items()}
    return {"metrics": metrics, "token_ids": token_ids(steps)}


def floor_bytes(model: GPTNeoX, capacity: int) -> int:
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
