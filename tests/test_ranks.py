"""Several processes as one command: what they tell each other, and that none is left waiting."""

import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable

import pytest
import torch

from engine.memory import OutOfMemory
from engine.passes import Use
from parallel.ranks import LETTER, VARIABLES, Ranks, RanksError, is_launched, joined


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def take_part(index: int, count: int, port: int, work: Callable, arguments: tuple, answers) -> None:
    """One process: join the others, do the work, answer with what it returns or raises."""
    values = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "MASTER_PORT": port}
    for name, value in values.items():
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    try:
        with joined() as ranks:
            answer = work(ranks, *arguments)
    except Exception as error:
        answer = error
    answers.put((index, pickle.dumps(answer)))  # tensors too, which torch has fetched from here


def on_ranks(count: int, work: Callable, *arguments: object, n_answers: int | None = None) -> list:
    """work(ranks, *arguments) in as many processes at the same time; what each returned or raised,
    None of those above n_answers."""
    # Children of a process that has imported torch once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "safetensors", "pytest"])
    answers = context.Queue()
    port = free_port()
    processes = []
    for index in range(count):
        own = (index, count, port, work, arguments, answers)
        processes.append(context.Process(target=take_part, args=own))
    for process in processes:
        process.start()
    found = [None] * count
    try:
        for _ in range(n_answers or count):
            index, answer = answers.get(timeout=600)
            found[index] = pickle.loads(answer)
    finally:
        for process in processes:
            process.join(120)
            assert not process.is_alive(), process.kill()
    return found


def exchange(ranks: Ranks, values: list) -> tuple[list, list]:
    """What was heard of some values, and what everybody is."""
    heard = [ranks.tell(None if ranks.index else value) for value in values]
    return heard, ranks.share(torch.device("cpu")).every(ranks.index * 17)


def test_what_one_tells_the_others_hear() -> None:
    """Values that are short, fill one broadcast or take two."""
    values = [([0, 2], [5, 9]), "", "é" * LETTER, b"x" * (10 * LETTER), Use(n_rows=7)]
    values += [b"x" * n for n in range(LETTER - 40, LETTER)]
    assert on_ranks(3, exchange, values) == [(values, [0, 17, 34])] * 3


def disagree(ranks: Ranks, failing: list[int]) -> str:
    try:
        with ranks.agreeing():
            if ranks.index in failing:
                raise OutOfMemory(f"no room for {ranks.index}")
    except OutOfMemory as error:
        return f"{error}; {ranks.gather_objects(1)}"  # and they are still in step
    return "well"


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ([], ["well"] * 2),
        ([1], ["rank 1: no room for 1; [1, 1]", "no room for 1; [1, 1]"]),
        ([0, 1], ["no room for 0; [1, 1]", "no room for 1; [1, 1]"]),
    ],
)
def test_what_goes_wrong_on_one_is_raised_on_all(failing: list[int], said: list[str]) -> None:
    assert on_ranks(2, disagree, failing) == said


def leave(ranks: Ranks) -> None:
    """Rank 1 is killed, while the others wait for it; then torchrun ends all."""
    if ranks.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.gather_objects(None)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("count", "who"), [(2, "rank 1"), (3, "another rank")])
def test_one_that_is_killed_ends_the_others(count: int, who: str) -> None:
    found = on_ranks(count, leave, n_answers=count - 1)
    for index in {0, count - 1} - {1}:
        assert isinstance(found[index], RanksError) and str(found[index]).startswith(f"{who} has")


def test_without_torchrun_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", None):
        if value:
            monkeypatch.setenv("WORLD_SIZE", value)
        else:
            monkeypatch.delenv("WORLD_SIZE")
        assert not is_launched()
        with joined() as ranks:
            assert ranks is None


@pytest.mark.parametrize("numbers", [("0", "two"), ("2", "2"), ("", "2"), ("-1", "2"), ("1", "1")])
def test_whoever_has_wrong_numbers_says_so(
    numbers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks started by hand; torchrun gives right ones."""
    values = (*numbers, "127.0.0.1", str(free_port()))
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    if numbers[1] != "1":
        with pytest.raises(RanksError, match="is no place among several processes"):
            with joined():
                pass


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun, which brings its own; only rank 0 opens it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = ("0", "2", "127.0.0.1", str(server.getsockname()[1]))
        for name, value in zip(VARIABLES, values, strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(RanksError, match="do not find each other: .*(in use|port)"):
            with joined():
                pass
