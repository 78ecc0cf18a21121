"""Tests of several ranks as one command: their collectives, and how they join."""

import multiprocessing
import os
import socket
from collections.abc import Callable

import pytest
import torch

from engine.driver import run_on_ranks
from engine.passes import PassConfig
from engine.ranks import (
    MESSAGE_BYTES,
    TORCHRUN_VARIABLES,
    Ranks,
    RanksError,
    is_launched,
    join_ranks,
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def join_and_work(index: int, count: int, port: int, work: Callable, arguments: tuple) -> object:
    """Join the other ranks, do the work and return its result. Runs in a process of its own."""
    values = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "MASTER_PORT": port}
    for name, value in values.items():
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    with join_ranks() as ranks:
        return work(ranks, *arguments)


def run_in_processes(count: int, work: Callable, *arguments: object) -> list:
    """Run work(ranks, *arguments) on `count` ranks and return their results. Raises its errors."""
    # The processes are forked from one that has imported torch once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "safetensors", "pytest"])
    tasks = []
    port = free_port()
    for index in range(count):
        tasks.append((index, count, port, work, arguments))
    # A process runs one task and ends, as a rank does, because only that surely closes connections
    with context.Pool(count, maxtasksperchild=1) as pool:
        return pool.starmap_async(join_and_work, tasks, chunksize=1).get(600)


def exchange(ranks: Ranks, values: list) -> tuple[list, list]:
    """Return some values, received from rank 0, and a number gathered from each rank."""
    received = [ranks.broadcast(None if ranks.rank else value) for value in values]
    return received, ranks.shard(torch.device("cpu")).gather_values(ranks.rank * 17)


def test_broadcasts_arrive_on_all_ranks() -> None:
    """Broadcast values that are short, that fill one message and that need two."""
    values = [
        ([0, 2], [5, 9]),
        "",
        "é" * MESSAGE_BYTES,
        b"x" * (10 * MESSAGE_BYTES),
        PassConfig(max_rows=7),
    ]
    values += [b"x" * n for n in range(MESSAGE_BYTES - 40, MESSAGE_BYTES)]
    assert run_in_processes(3, exchange, values) == [(values, [0, 17, 34])] * 3


def test_one_process_joins_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that torchrun with one process is like no torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join_ranks() as ranks:
        assert ranks is None and not is_launched()


def test_one_process_raises_its_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that it is not a KeyError for a variable that torchrun would set."""

    def fail(ranks: Ranks | None) -> int:
        raise ZeroDivisionError

    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ZeroDivisionError):
        run_on_ranks(fail)


@pytest.mark.parametrize("numbers", [("0", "two"), ("2", "2"), ("", "2"), ("-1", "2")])
def test_invalid_ranks_are_refused(
    numbers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check ranks that were started by hand, because torchrun sets valid numbers."""
    for name, value in zip(TORCHRUN_VARIABLES, (*numbers, "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(RanksError, match="not a valid rank; start the command with torchrun"):
        with join_ranks():
            pass
