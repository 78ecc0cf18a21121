"""Results files: one JSON object per line, first what is measured, then a line for each text.

Lines are only added. So an interrupted file is gone on with by adding what it lacks, and
`pandas.read_json(file, lines=True)` reads it. docs/results.md lists what the lines hold.

    results = load("results/main_cpu.jsonl")
    results.head.machine["processor"]
    [text["throughput"] for text in results.texts.values() if text["row"] == "dynatree"]

A file may come from anybody: `load` checks every line and raises UsageError with one line of text.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import NoReturn, TypeVar, get_args, get_origin, get_type_hints

from benchmark.cases import SYMBOLS, Case
from benchmark.step_times import StepTimes
from cli.errors import UsageError, writing
from engine.checkpoint import InvalidFile, read_bytes

FORMAT = 5  # of the files; others are refused
MAX_BYTES = 2**28  # of a file, some 400,000 texts
MAX_NUMBER = 10**12  # beyond any figure, and far below where sums of squares overflow
CASE = ("row", "dataset", *SYMBOLS)  # which case a text is of
KEY = (*CASE, "prompt", "round")  # which text it is
CAPTIONED = ("target", "draft", "dtype", "processor", "threads", "torch", "python", "commit")

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
Key = tuple[str | int | float, ...]  # the values of KEY
Text = dict[str, Json]  # a line of a text
COLUMNS = {  # the columns of a text and their types; every other column is a metric, a float
    "row": str,
    "dataset": str,
    "prompt_tokens": int,
    "new_tokens": int,
    "temperature": float,
    "prompt": int,  # index among its dataset's prompts
    "round": int,
    "ids": list[int],
    "ids_digest": str,
    "depths": dict[str, list[int]],
    "calibration": dict[str, list[int]],
    # of a difference from the reference
    "at": int,  # index of the first token that differs
    "gap": float | None,  # top-2 logit gap of the target there, in float32; None if out of memory
}
T = TypeVar("T")


@dataclass(frozen=True)
class Head:
    """The first line of a results file: what is measured, and on what."""

    format: int
    table: str
    title: str  # of a paper's table: which it is, and what is different here
    columns: list[str]
    options: dict[str, str | int | float | bool | list[int] | list[float]]  # of the command line
    unfetched: list[str]  # the table's datasets for which our own prompts stand in
    machine: dict[str, str | int | None]  # versions, processor, models, dtypes, threads, commit
    load_before: float | None  # mean number of running processes, in the minute before
    n_prompts: dict[str, int]  # by dataset
    prompts: str  # whose they are, in words
    prompts_sha256: str
    cases: list[Case]

    @property
    def baseline(self) -> str:
        """The row that speed-ups are over."""
        return str(self.options.get("baseline", "ar"))

    @property
    def n_rounds(self) -> int:
        return int(self.options.get("repeats", 1))

    @property
    def n_texts(self) -> int:
        """The number of texts of a finished table."""
        return self.n_rounds * sum(self.n_prompts[case.dataset] for case in self.cases)


@dataclass
class Results:
    """The content of a results file."""

    head: Head
    texts: dict[Key, Text] = field(default_factory=dict)
    differences: dict[Key, Text] = field(default_factory=dict)  # with `at` and `gap`
    step_times: StepTimes | None = None
    ids: dict[str, list[int]] = field(default_factory=dict)  # of greedy texts, by digest
    n_bytes: int = 0  # of the whole lines in the file
    n_cut: int = 0  # bytes of a last line that was cut off

    def __post_init__(self) -> None:
        self.case_keys = {case.key for case in self.head.cases}

    @property
    def is_begun(self) -> bool:
        """Whether anything was measured."""
        return bool(self.texts or self.step_times)

    @property
    def n_lacking(self) -> int:
        return self.head.n_texts - len(self.texts)

    def add(self, line: Json) -> None:
        """Add what a line after the head says. Raises ValueError if it says what it may not."""
        match line:
            case {"head": _}:
                raise ValueError("a second head, as if two files had been joined")
            case {"step_times": found}:
                require(self.step_times is None, "step_times stand twice")
                self.step_times = read_as(StepTimes, found, "step_times")
                self.step_times.require_sense()
            case {"difference": found}:
                check_columns(found, (*KEY, "at", "gap"))
                require(key_of(found) in self.texts, "the text of this difference is not above")
                self.differences[key_of(found)] = found
            case _:
                self.add_text(line)

    def add_text(self, text: Text) -> None:
        """Add a text. Raises ValueError if it is not one of the table's, or stands twice."""
        check_columns(text, KEY)
        row, dataset, *_, prompt, round_index = key = key_of(text)
        require(key[: len(CASE)] in self.case_keys, f"{row!r} at this size is no case of the head")
        n_prompts = self.head.n_prompts[dataset]
        require(prompt < n_prompts, f"prompt is {prompt}, and {dataset} has {n_prompts} prompts")
        require(round_index < self.head.n_rounds, f"round is {round_index} of {self.head.n_rounds}")
        require(key not in self.texts, f"the text of {row!r}, prompt {prompt} stands twice")
        if not text["temperature"]:
            require("ids_digest" in text, "a greedy text has no ids_digest")
        if "ids" in text:
            require(digest_of(text["ids"]) == text["ids_digest"], "ids_digest is of other ids")
            self.ids[text["ids_digest"]] = text["ids"]
        self.texts[key] = text

    def columns_of_ids(self, ids: list[int]) -> Text:
        """Return what the line of a greedy text says of its ids: a digest and, if no line above has
        them, the ids."""
        digest = digest_of(ids)
        return {"ids_digest": digest} | ({} if digest in self.ids else {"ids": ids})


def check_columns(line: Json, needed: Sequence[str]) -> None:
    """Raise ValueError unless a line is an object with these columns, and all are of their type."""
    require(isinstance(line, dict), "it is no JSON object")
    for name in needed:
        require(name in line, f"it has no {name}")
    for name, value in line.items():
        kind = COLUMNS.get(name, float)
        require(is_of(value, kind), f"{name} is {short(value)}, it must be {kind_words(kind)}")


def key_of(text: Text) -> Key:
    return tuple(text[name] for name in KEY)


def digest_of(ids: Sequence[int]) -> str:
    """Return 16 hexadecimal digits that tell these ids from others."""
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:16]


def load(file: str | Path) -> Results:
    """Return the content of a results file. A last line that was cut off is left out. Raises
    UsageError."""
    try:
        content = read_bytes(Path(file), MAX_BYTES)
    except InvalidFile as error:
        raise UsageError(f"not a results file: {error}") from error
    if content.startswith(b"{\n"):
        raise UsageError(f"{file} is of a format before {FORMAT}, which is not read: measure anew")
    whole, _, _ = content.rpartition(b"\n")
    if not whole:
        raise UsageError(f"{file} is not a results file: it has no whole line")
    results = None
    for n, line in enumerate(whole.split(b"\n"), start=1):
        try:
            found = json.loads(line, parse_constant=refuse_constant)
            if results is None:
                results = Results(read_head(found))
            else:
                results.add(found)
        except (ValueError, RecursionError) as error:
            what = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
            what = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else what
            hint = "" if results else f" (not a results file of format {FORMAT})"
            raise UsageError(f"{file}, line {n}: {what}{hint}") from error
    results.n_bytes = len(whole) + 1
    results.n_cut = len(content) - results.n_bytes
    return results


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no number")


def read_head(line: Json) -> Head:
    """Return the first line of a file. Raises ValueError."""
    found = line.get("head") if isinstance(line, dict) else None
    require(isinstance(found, dict), "it is no head")
    require(found.get("format") == FORMAT, f"format is {short(found.get('format'))}, not {FORMAT}")
    require(isinstance(found.get("cases"), list), "head has no list of cases")
    cases = [read_as(Case, case, "a case") for case in found["cases"]]
    head = read_as(Head, found | {"cases": cases}, "head")
    for name in CAPTIONED:
        require(name in head.machine, f"machine has no {name}")
    require(len({case.key for case in cases}) == len(cases), "a case stands twice")
    for case in cases:
        require(case.dataset in head.n_prompts, f"n_prompts has no {case.dataset!r}")
        if not case.is_hf:
            case.config()
    require(is_of(head.options.get("repeats", 1), int), "repeats is no whole number")
    return head


def read_as(kind: type[T], found: Json, what: str) -> T:
    """Return a dataclass with the values of a JSON object; other keys are left out. Raises
    ValueError naming the key that is missing or has another type."""
    require(isinstance(found, dict), f"{what} is no JSON object")
    types = get_type_hints(kind)
    for each in fields(kind):
        is_needed = each.default is MISSING and each.default_factory is MISSING
        require(each.name in found or not is_needed, f"{what} has no {each.name}")
        if each.name in found:
            value, expected = found[each.name], types[each.name]
            words = f"{short(value)}, it must be {kind_words(expected)}"
            require(is_of(value, expected), f"{each.name} of {what} is {words}")
    return kind(**{name: found[name] for name in types if name in found})


def is_of(value: object, kind: object) -> bool:
    """Whether a JSON value is of a type. Whole numbers are 0 or more, no number is beyond any
    figure."""
    inner = get_args(kind)
    if isinstance(kind, UnionType):
        return any(is_of(value, one) for one in inner)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(is_of(item, inner[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(is_of(item, inner[1]) for item in value.values())
    if kind in (int, float):
        is_number = isinstance(value, int if kind is int else int | float)
        least = 0 if kind is int else -MAX_NUMBER
        return is_number and not isinstance(value, bool) and least <= value <= MAX_NUMBER
    return isinstance(value, kind)


def kind_words(kind: object) -> str:
    words = {str: "text", int: "a whole number from 0 on", float: "a number"}
    return words.get(kind) or str(kind)


def short(value: object) -> str:
    """Return a value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def require(is_right: bool, message: str) -> None:
    if not is_right:
        raise ValueError(message)


@contextmanager
def new_file(file: Path) -> Iterator[None]:
    """Make a file, which must not exist, and its folder; remove the file if it is still empty at
    the end. Raises UsageError."""
    if os.path.lexists(file):
        raise UsageError(f"{file} exists already; name another, or go on with it (--resume)")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("x").close()  # which fails if another run has made it meanwhile
    try:
        yield
    finally:
        if file.exists() and not file.stat().st_size:
            file.unlink()


class Writer:
    """Adds lines to a results file, and to its content in memory.

    A run knows how long the file is, and ends with an error before its next line if another run has
    written to it.
    """

    def __init__(self, file: Path, results: Results):
        self.file, self.results = file, results

    def cut(self) -> None:
        """Remove a last line that was cut off. Raises UsageError if another run has written since
        the file was read."""
        if self.results.n_cut:
            self.require_unchanged()
            with writing(self.file):
                os.truncate(self.file, self.results.n_bytes)
            self.results.n_cut = 0

    def require_unchanged(self) -> None:
        """Raise UsageError if another run has written to the file."""
        with writing(self.file):
            size = self.file.stat().st_size
        if size != self.results.n_bytes + self.results.n_cut:
            raise UsageError(f"another run writes to {self.file}: let it end, then --resume")

    def add(self, line: Json) -> None:
        """Add a line; before the first one, the head. Raises UsageError."""
        if not self.results.n_bytes:
            self.append({"head": asdict(self.results.head)})
        self.append(line)
        self.results.add(line)

    def append(self, line: Json) -> None:
        """Write a line at the end of the file. Raises UsageError."""
        content = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self.require_unchanged()
        with writing(self.file), self.file.open("ab") as file:
            file.write(content)
        self.results.n_bytes += len(content)
