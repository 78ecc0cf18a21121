"""A table's texts: in which order they are written, and which of them there are not yet.

All runs on a prompt come before the next prompt, each time another one first; so what a machine
does at one time and not at another, as when it gets warm, is nobody's in particular.

    turns = Turns(results, prompts)
    for turn in turns.missing():
        turns.add([measure(turn)])
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from benchmark.results import Results, Run

Prompts = dict[str, list[list[int]]]  # their ids, by dataset

MANY = 10_000  # missing texts that are looked at, where some prompts are to be named
FEW = 5  # prompts that are


@dataclass(frozen=True)
class Turn:
    """One text to write: a run on a prompt, in one of the rounds over all prompts."""

    repeat: int
    prompt: int
    run: Run


def take_turns(
    runs: Sequence[Run], prompts: Mapping[str, Sequence], n_repeats: int
) -> Iterator[Turn]:
    """All runs on a prompt before the next, each time another one first; dataset by dataset."""
    for repeat in range(n_repeats):
        for dataset, own in prompts.items():
            order = [run for run in runs if run.dataset == dataset]
            for prompt in range(len(own)):
                first = (repeat * len(own) + prompt) % max(len(order), 1)
                for run in order[first:] + order[:first]:
                    yield Turn(repeat, prompt, run)


def prompt_of(turn: Turn) -> tuple[int, str, int]:
    """What the turns on one prompt, in one round, have in common."""
    return turn.repeat, turn.run.dataset, turn.prompt


class Turns:
    """All turns of a table, and by its results' records which of them have been taken."""

    def __init__(self, results: Results, prompts: Mapping[str, Sequence]):
        """prompts: by dataset."""
        self.results = results
        self.prompts = prompts
        self.datasets = {run.label: run.dataset for run in results.runs}

    def missing(self) -> Iterator[Turn]:
        """Those without a record, in their order; told one by one, as a thousand million rounds are
        more than a list can hold."""
        done = {(r["repeat"], r["prompt"], r["run"]) for r in self.results.records}
        repeats = self.results.options["repeats"]
        for turn in take_turns(self.results.runs, self.prompts, repeats):
            if (turn.repeat, turn.prompt, turn.run.label) not in done:
                yield turn

    def is_missing_some(self) -> bool:
        return next(self.missing(), None) is not None

    def n_missing(self) -> int:
        n_texts = sum(len(self.prompts[run.dataset]) for run in self.results.runs)
        return n_texts * self.results.options["repeats"] - len(self.results.records)

    def lacking(self) -> str:
        """How many texts there are not, and on which prompts, the first of them."""
        names = []
        for turn in islice(self.missing(), MANY):
            name = f"{turn.run.dataset} {turn.prompt}"
            if name not in names:
                names.append(name)
        if len(names) > FEW:
            names = names[:FEW] + ["..."]
        return f"{self.n_missing()} texts are lacking ({', '.join(names)})"

    def add(self, records: list[dict]) -> None:
        """Put records where the turns have their texts."""
        self.results.records += records
        self.results.records.sort(key=self.place_of)

    def place_of(self, record: dict) -> tuple[int, int, int]:
        """Where the texts on a record's prompt stand among all: round, dataset, prompt."""
        dataset = self.datasets[record["run"]]
        return record["repeat"], list(self.prompts).index(dataset), record["prompt"]
