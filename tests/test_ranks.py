"""Several processes as one command: what they tell each other, and that none is left waiting."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.memory import OutOfMemory
from parallel import ranks as found_ranks
from parallel.ranks import LETTER, VARIABLES, Ranks, RanksError, is_launched, is_silent, joined

ROOT = Path(__file__).parent.parent


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
    answers.put((index, answer))


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
            index, found[index] = answers.get(timeout=60)
    finally:
        for process in processes:
            process.join(10)
            assert not process.is_alive(), process.kill()
    return found


def exchange(ranks: Ranks, letters: list) -> tuple[list, list]:
    """What was heard of a few letters, and what everybody is."""
    heard = []
    for letter in letters:
        if ranks.index:
            heard.append(ranks.hear())
        else:
            ranks.tell(letter)
    return heard, ranks.gather_objects(ranks.index * 17)


def test_what_one_tells_the_others_hear() -> None:
    """Letters that fit one broadcast, fill it and are longer."""
    letters = [[["forward", 3, [1, 2], None]], [], [["x" * (LETTER - 14)]], [["é" * LETTER, 1]]]
    first, *others = on_ranks(3, exchange, letters)
    assert first == ([], [0, 17, 34])
    assert others == [(letters, [0, 17, 34])] * 2


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


def leave(ranks: Ranks, words: str) -> None:
    """Rank 1 goes, with some words or killed, while the others wait for it."""
    if ranks.index == 1:
        if not words:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.leave_word(words)
        return
    if ranks.index:
        ranks.hear()
    ranks.gather_objects(None, is_patient=True)


@pytest.mark.parametrize(("count", "who"), [(2, "rank 1"), (3, "another rank")])
def test_one_that_is_killed_ends_the_others(count: int, who: str) -> None:
    found = on_ranks(count, leave, "", n_answers=count - 1)
    for index in {0, count - 1} - {1}:
        assert isinstance(found[index], RanksError) and str(found[index]).startswith(f"{who} has")


def test_one_that_ends_can_say_why() -> None:
    found = on_ranks(2, leave, "no milk")
    assert isinstance(found[0], RanksError) and str(found[0]) == "rank 1: no milk"


def test_ranks_of_other_versions_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def gather_objects(self, own: tuple) -> list[tuple]:
            return [own, own, other]

    own = (str(torch.__version__), found_ranks.hash_of_code())
    other = ("2.0.0", own[1])
    with pytest.raises(RanksError, match="rank 2 has torch 2.0.0, rank 0 has"):
        found_ranks.require_same_code(Found())
    other = (own[0], "another hash")
    with pytest.raises(RanksError, match="rank 2 runs other files of this project"):
        found_ranks.require_same_code(Found())
    other = own
    found_ranks.require_same_code(Found())


def test_without_torchrun_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", None):
        if value:
            monkeypatch.setenv("WORLD_SIZE", value)
        else:
            monkeypatch.delenv("WORLD_SIZE")
        assert not is_launched()
        with joined() as ranks:
            assert ranks is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2"}, "not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start it with"),
        (dict.fromkeys(VARIABLES, "2"), "RANK is 2, of a WORLD_SIZE of 2: the first is 0"),
    ],
)
def test_an_environment_that_is_not_torchruns(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RanksError, match=said):
        with joined():
            pass


def test_a_rank_is_silent_where_another_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rest of torchrun's variables it ended with status 2 and not a word."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert not is_silent()
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert is_silent()
    monkeypatch.setenv("RANK", "0")
    assert not is_silent()


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun, which brings its own; only rank 0 opens it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.getsockname()[1]}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(RanksError, match="the 2 ranks do not find each other: .*(in use|port)"):
            with joined():
                pass
        assert signal.getsignal(signal.SIGINT) is before
