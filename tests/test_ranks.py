"""Several processes as one command: what they tell each other, and who they are."""

import multiprocessing
import os
import socket
from collections.abc import Callable

import pytest
import torch

from engine.driver import on_ranks as run_on_ranks
from engine.passes import PassConfig
from engine.ranks import MESSAGE_BYTES, VARIABLES, Ranks, RanksError, is_launched, joined


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def take_part(index: int, count: int, port: int, work: Callable, arguments: tuple) -> object:
    """One process: join the others and do the work."""
    values = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "MASTER_PORT": port}
    for name, value in values.items():
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    with joined() as ranks:
        return work(ranks, *arguments)


def on_ranks(count: int, work: Callable, *arguments: object) -> list:
    """What work(ranks, *arguments) returns in each of so many processes; raises what it raises."""
    # Children of a process that has imported torch once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "safetensors", "pytest"])
    tasks = []
    port = free_port()
    for index in range(count):
        tasks.append((index, count, port, work, arguments))
    # One that is done ends, as a rank does: only that closes its connections for sure
    with context.Pool(count, maxtasksperchild=1) as pool:
        return pool.starmap_async(take_part, tasks, chunksize=1).get(600)


def exchange(ranks: Ranks, values: list) -> tuple[list, list]:
    """What was heard of some values, and what everybody is."""
    heard = [ranks.broadcast(None if ranks.rank else value) for value in values]
    return heard, ranks.shard(torch.device("cpu")).every(ranks.rank * 17)


def test_what_one_tells_the_others_hear() -> None:
    """Values that are short, fill one broadcast or take two."""
    values = [
        ([0, 2], [5, 9]),
        "",
        "é" * MESSAGE_BYTES,
        b"x" * (10 * MESSAGE_BYTES),
        PassConfig(max_rows=7),
    ]
    values += [b"x" * n for n in range(MESSAGE_BYTES - 40, MESSAGE_BYTES)]
    assert on_ranks(3, exchange, values) == [(values, [0, 17, 34])] * 3


def test_one_process_is_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined() as ranks:
        assert ranks is None and not is_launched()


def test_a_program_alone_raises_its_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not KeyError for a variable that torchrun sets."""

    def fail(ranks: Ranks | None) -> int:
        raise ZeroDivisionError

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ZeroDivisionError):
        run_on_ranks(fail)


@pytest.mark.parametrize("numbers", [("0", "two"), ("2", "2"), ("", "2"), ("-1", "2")])
def test_whoever_has_wrong_numbers_says_so(
    numbers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks started by hand; torchrun gives right ones."""
    for name, value in zip(VARIABLES, (*numbers, "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(RanksError, match="not a valid rank; start the command with torchrun"):
        with joined():
            pass
