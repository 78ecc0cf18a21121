"""The processes of one command under torchrun: what they tell each other, and how they end.

torchrun starts the same command several times and gives each process a number, its rank. Rank 0 is
the command itself; the others are silent, hear what it tells and do the same. All is by
torch.distributed. What is told is JSON in one broadcast of a fixed size, over gloo, whatever the
device; what is computed together is in engine/shares.py.

Nobody may get out of step: a collective that one rank lacks is a process that waits for ever. So
what may go wrong on one rank alone (a file, memory) is agreed upon, Ctrl-C is held back while
something is computed together, and a rank that has gone closes its connections, which ends every
other one at once.

    torchrun --nproc-per-node 2 dynatree.py --prompt "The ship sailed at dawn"

    with joined() as ranks:  # None without torchrun
        if ranks and ranks.index:
            calls = ranks.hear()  # [["greet", 1]]
        elif ranks:
            ranks.tell([["greet", 1]])
        sizes = ranks.gather_objects(17)  # [17, 17], on every rank
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint import CheckpointError, first_line
from engine.cuda_graphs import destroy_graphs
from engine.memory import OutOfMemory
from engine.shares import Share

ROOT = Path(__file__).parent.parent
# A rank that has gone is noticed at once, by its connections. These are for one that is there and
# does nothing: in what all do at the same time, and beside a rank that may take as long as it
# likes, as rank 0 may between two passes, or one that has more prompts than another
PATIENCE = timedelta(minutes=30)  # more than the slowest disk needs for a share of a model
NO_HURRY = timedelta(days=30)
JOINING = timedelta(minutes=5)  # to import torch, on every machine
LETTER = 4096  # bytes of a broadcast: a tree's pass, with all that was done since the last one
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # of torchrun

Hold = Callable[[], AbstractContextManager]
Store = object  # of torch.distributed, as the groups: it is imported where there are ranks
Group = object


class RanksError(Exception):
    """Several processes cannot be one command; the message is one line for the user."""


AGREED = (CheckpointError, OutOfMemory, RanksError)  # what may go wrong on one rank alone


def is_launched() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return read_number("WORLD_SIZE", 1) >= 2


def is_silent() -> bool:
    """Whether this process is one of several, and not the one that speaks."""
    is_complete = all(name in os.environ for name in VARIABLES)  # else nobody would say what lacks
    return is_complete and os.environ["WORLD_SIZE"] != "1" and os.environ["RANK"] != "0"


def read_number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise RanksError(f"{variable} is {text!r} in the environment; torchrun sets a number")
    return int(text)


@dataclass(frozen=True)
class Ranks:
    """All processes of the command, seen from one of them."""

    index: int  # this one's rank
    count: int
    local_index: int  # among those on this machine
    store: Store  # what all can write to; torchrun's own, which outlives each of them
    prompt: Group  # in which everybody is soon there
    patient: Group  # in which one may wait for another as long as that takes
    hold: Hold  # keeps Ctrl-C back where something is computed together

    def together(self, collective: Callable, *arguments: object, **options: object) -> None:
        """A collective of torch.distributed. Raises RanksError if another rank has gone."""
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            raise RanksError(self.why_gone(error)) from error

    def gather_objects(self, value: object, is_patient: bool = False) -> list:
        """What every rank gives here, by rank, on every rank; what can be pickled.

        is_patient: some ranks may come to this long after others.
        """
        import torch.distributed as dist

        group = self.patient if is_patient else self.prompt
        found: list = [None] * self.count
        self.together(dist.all_gather_object, found, value, group=group)
        return found

    def agree(self, error: Exception | None) -> None:
        """Raise, on every rank, what went wrong on any, if something did.

        A rank's own error comes first and as it is; another's says whose it is.
        """
        errors = self.gather_objects(error)
        if error:
            raise error
        for index, other in enumerate(errors):
            if other:
                raise type(other)(f"rank {index}: {other}")

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Where something may go wrong on one rank alone: at the end of the block all agree."""
        problem = None
        try:
            yield
        except AGREED as error:
            problem = error
        self.agree(problem)

    def tell(self, calls: list[list]) -> None:
        """Rank 0: give all others what JSON can say, in one broadcast if it is short."""
        letter = json.dumps(calls, separators=(",", ":")).encode()
        first = len(letter).to_bytes(8, "little") + letter[: LETTER - 8]
        self.broadcast(torch.frombuffer(bytearray(first.ljust(LETTER)), dtype=torch.uint8))
        if len(letter) > LETTER - 8:
            rest = bytearray(letter[LETTER - 8 :])
            self.broadcast(torch.frombuffer(rest, dtype=torch.uint8))

    def hear(self) -> list[list]:
        """The others: what rank 0 tells next, however long that takes."""
        first = torch.empty(LETTER, dtype=torch.uint8)
        self.broadcast(first)
        found = first.numpy().tobytes()
        length = int.from_bytes(found[:8], "little")
        letter = found[8 : 8 + length]
        if length > len(letter):
            rest = torch.empty(length - len(letter), dtype=torch.uint8)
            self.broadcast(rest)
            letter += rest.numpy().tobytes()
        return json.loads(letter)

    def broadcast(self, buffer: Tensor) -> None:
        """From rank 0 to every other one."""
        import torch.distributed as dist

        self.together(dist.broadcast, buffer, src=0, group=self.patient)

    def own_device(self, device: torch.device) -> torch.device:
        """This rank's, of the same kind. Raises RanksError if there is none."""
        if device.type != "cuda":
            return device
        n_cuda = torch.cuda.device_count()
        if self.local_index >= n_cuda:
            raise RanksError(f"there are {n_cuda} CUDA devices, and each rank needs one of its own")
        return torch.device("cuda", self.local_index)

    def share(self, device: torch.device) -> Share:
        """What this rank has of a model on its device; all ranks call it at the same time."""
        import torch.distributed as dist

        group = self.prompt
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl", timeout=PATIENCE)

        def reduce(x: Tensor) -> None:
            self.together(dist.all_reduce, x, group=group)

        def collect(parts: list[Tensor], x: Tensor) -> None:
            self.together(dist.all_gather, parts, x, group=group)

        return Share(self.index, self.count, reduce, collect)

    def why_gone(self, error: RuntimeError) -> str:
        """What to say when a collective failed."""
        who = f"rank {1 - self.index}" if self.count == 2 else "another rank"
        if "timed out" in str(error).lower():
            return f"{who} has not answered for {PATIENCE.total_seconds() / 60:.0f} minutes"
        return self.last_words() or f"{who} has gone; torchrun says how that one ended"

    def why_ended(self) -> str:
        """What to say when torchrun ends the command."""
        return self.last_words() or "ended by SIGTERM (torchrun sends it if a rank has gone)"

    def leave_word(self, words: str) -> None:
        """Tell the others, when they notice, why this rank ends."""
        self.store.set(f"last words of {self.index}", words)

    def last_words(self) -> str:
        """Why a rank has ended, if one has that could say so."""
        for index in range(self.count):
            key = f"last words of {index}"
            try:
                if self.store.check([key]):
                    return f"rank {index}: {self.store.get(key).decode()}"
            except RuntimeError:  # whoever kept them has gone as well
                return ""
        return ""


@contextmanager
def joined(hold: Hold = nullcontext) -> Iterator[Ranks | None]:
    """All processes of this command, as long as the block runs; None if this is the only one.

    hold: keeps Ctrl-C back for the length of a block. Raises RanksError.
    """
    if not is_launched():
        yield None
        return
    import torch.distributed as dist

    ranks = join(hold)
    try:
        require_same_code(ranks)
        yield ranks
    finally:
        with suppress(RuntimeError):  # of a device that has failed, which was said
            destroy_graphs()  # nccl waits for every one that has a collective in it
        dist.destroy_process_group()


def join(hold: Hold) -> Ranks:
    """Meet the other processes. Raises RanksError if that fails."""
    import torch.distributed as dist

    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise RanksError(f"WORLD_SIZE is set, but not {', '.join(missing)}: start it with torchrun")
    index = read_number("RANK", 0)
    count = read_number("WORLD_SIZE", 1)
    if index >= count:
        raise RanksError(f"RANK is {index}, of a WORLD_SIZE of {count}: the first is 0")
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no handler runs while torch waits for others
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=JOINING))
        # torchrun that starts all again (--max-restarts) keeps its store, and what was in it
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=JOINING)
        prompt = dist.new_group(backend="gloo", timeout=PATIENCE)
        patient = dist.new_group(backend="gloo", timeout=NO_HURRY)
    except (RuntimeError, ValueError) as error:
        why = first_line(error)
        raise RanksError(f"the {count} ranks do not find each other: {why}") from error
    finally:
        signal.signal(signal.SIGINT, before)
    local_index = read_number("LOCAL_RANK", index)
    return Ranks(index, count, local_index, store, prompt, patient, hold)


def require_same_code(ranks: Ranks) -> None:
    """Raise RanksError unless every rank runs the same torch and the same files of this project."""
    found = ranks.gather_objects((str(torch.__version__), hash_of_code()))
    expected_torch, expected_code = found[0]
    for index, (version, code) in enumerate(found):
        if version != expected_torch:
            raise RanksError(f"rank {index} has torch {version}, rank 0 has {expected_torch}")
        if code != expected_code:
            raise RanksError(f"rank {index} runs other files of this project than rank 0")


def hash_of_code() -> str:
    """Of the project's own files."""
    digest = hashlib.sha256()
    for file in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()
