"""Results files: one JSON object per line, first the head, then a line for each text.

Lines are only appended. So an interrupted run is resumed by appending the missing lines, and
`pandas.read_json(file, lines=True)` reads a file. docs/results.md lists the content of the lines.

    results = load("results/main_cpu.jsonl")
    results.head.machine["processor"]
    [text["throughput"] for text in results.texts.values() if text["row"] == "dynatree"]

Files are untrusted: `load` checks every line and raises UsageError with a message of one line.
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
from engine.ranks import rank

FORMAT = 5  # version of the file format; files of other versions are refused
MAX_NUMBER = 10**12  # above any real metric, and far below where sums of squares overflow
CASE_COLUMNS = ("row", "dataset", *SYMBOLS)  # identify the case of a text
KEY_COLUMNS = (*CASE_COLUMNS, "prompt", "round")  # identify a text
CAPTION_KEYS = ("target", "draft", "dtype", "processor", "threads", "torch", "python", "commit")

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
Key = tuple[str | int | float, ...]  # the values of KEY_COLUMNS
Line = dict[str, Json]  # the line of a text
FIELD_TYPES = {  # of a text or a difference; every other field is a metric, a float
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
    # Fields of a difference from the reference
    "at": int,  # index of the first token that differs
    "gap": float | None,  # top-2 logit gap of the target there, in float32; None if out of memory
}
T = TypeVar("T")


@dataclass(frozen=True)
class Head:
    """The first line of a results file: what is measured, and on what."""

    format: int
    table: str
    title: str  # for a paper's table: its number, and what is different here
    columns: list[str]
    options: dict[str, str | int | float | bool | list[int] | list[float]]  # of the command line
    unfetched: list[str]  # the table's datasets that builtin prompts replace
    machine: dict[str, str | int | None]  # versions, processor, models, dtypes, threads, commit
    load_before: float | None  # mean number of running processes, in the minute before
    n_prompts: dict[str, int]  # by dataset
    prompts: str  # their source, for the caption
    prompts_sha256: str
    cases: list[Case]

    @property
    def baseline(self) -> str:
        """The row that speed-ups are relative to."""
        return str(self.options.get("baseline", "ar"))

    @property
    def n_rounds(self) -> int:
        return int(self.options.get("repeats", 1))

    @property
    def n_texts(self) -> int:
        """Number of texts of a finished table."""
        return self.n_rounds * sum(self.n_prompts[case.dataset] for case in self.cases)


@dataclass
class Results:
    """The content of a results file."""

    head: Head
    texts: dict[Key, Line] = field(default_factory=dict)
    differences: dict[Key, Line] = field(default_factory=dict)  # with `at` and `gap`
    step_times: StepTimes | None = None
    ids: dict[str, list[int]] = field(default_factory=dict)  # of greedy texts, by digest
    n_bytes: int = 0  # of the complete lines in the file
    n_partial_bytes: int = 0  # of an incomplete last line

    def __post_init__(self) -> None:
        self.case_keys = {case.key for case in self.head.cases}

    @property
    def has_measurements(self) -> bool:
        """Whether the file has a text or step times."""
        return bool(self.texts or self.step_times)

    @property
    def n_missing(self) -> int:
        return self.head.n_texts - len(self.texts)

    def add(self, line: Json) -> None:
        """Add the content of a line after the head. Raises ValueError if the line is invalid."""
        match line:
            case {"head": _}:
                raise ValueError("a second head; the file may be two files joined together")
            case {"step_times": found}:
                require(self.step_times is None, "duplicate step_times")
                self.step_times = read_as(StepTimes, found, "step_times")
                self.step_times.require_valid()
            case {"difference": found}:
                check_fields(found, (*KEY_COLUMNS, "at", "gap"))
                key = key_of(found)
                require(key in self.texts, "difference of a text that no earlier line has")
                self.differences[key] = found
            case _:
                self.add_text(line)

    def add_text(self, text: Line) -> None:
        """Add a text. Raises ValueError if it is not in the table, or a duplicate."""
        check_fields(text, KEY_COLUMNS)
        row, dataset, *_, prompt, round_index = key = key_of(text)
        is_known = key[: len(CASE_COLUMNS)] in self.case_keys
        require(is_known, f"{row!r} at this size is not a case of the head")
        n_prompts = self.head.n_prompts[dataset]
        n_rounds = self.head.n_rounds
        require(prompt < n_prompts, f"prompt is {prompt}, it must be below {n_prompts}")
        require(round_index < n_rounds, f"round is {round_index}, it must be below {n_rounds}")
        require(key not in self.texts, f"duplicate text of {row!r}, prompt {prompt}")
        if not text["temperature"]:
            require("ids_digest" in text, "a greedy text has no ids_digest")
        if "ids" in text:
            require(digest_of(text["ids"]) == text["ids_digest"], "ids_digest does not match ids")
            self.ids[text["ids_digest"]] = text["ids"]
        self.texts[key] = text

    def ids_fields(self, ids: list[int]) -> Line:
        """Return the fields of a greedy text on its ids: their digest and, unless an earlier line
        has them, the ids."""
        digest = digest_of(ids)
        return {"ids_digest": digest} | ({} if digest in self.ids else {"ids": ids})


def check_fields(line: Json, needed: Sequence[str]) -> None:
    """Raise ValueError unless a line is an object with the needed fields, all of the right type."""
    require(isinstance(line, dict), "the line is not a JSON object")
    for name in needed:
        require(name in line, f"{name} is missing")
    for name, value in line.items():
        kind = FIELD_TYPES.get(name, float)
        expected = describe_type(kind)
        require(has_type(value, kind), f"{name} is {shorten(value)}, it must be {expected}")


def key_of(text: Line) -> Key:
    return tuple(text[name] for name in KEY_COLUMNS)


def digest_of(ids: Sequence[int]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the ids."""
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:16]


def load(file: str | Path) -> Results:
    """Return the content of a results file, without an incomplete last line. Raises UsageError."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"not a results file: {error}") from error
    if content.startswith(b"{\n"):
        raise UsageError(f"{file} has a format older than {FORMAT}; measure the table again")
    whole, _, _ = content.rpartition(b"\n")
    if not whole:
        raise UsageError(f"{file} is not a results file: it has no complete line")
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
    results.n_partial_bytes = len(content) - results.n_bytes
    return results


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and infinities, which Python reads although JSON has none."""
    raise ValueError(f"{name} is not a JSON number")


def read_head(line: Json) -> Head:
    """Return the head in the first line of a file. Raises ValueError."""
    found = line.get("head") if isinstance(line, dict) else None
    require(isinstance(found, dict), "the line has no head")
    version = found.get("format")
    require(version == FORMAT, f"format is {shorten(version)}, it must be {FORMAT}")
    require(isinstance(found.get("cases"), list), "head has no list of cases")
    cases = [read_as(Case, case, "a case") for case in found["cases"]]
    head = read_as(Head, found | {"cases": cases}, "head")
    for name in CAPTION_KEYS:
        require(name in head.machine, f"machine has no {name}")
    require(len({case.key for case in cases}) == len(cases), "duplicate case")
    for case in cases:
        require(case.dataset in head.n_prompts, f"n_prompts has no {case.dataset!r}")
        if not case.is_hf:
            case.generation_config()
    require(has_type(head.options.get("repeats", 1), int), "repeats is not a whole number")
    return head


def read_as(kind: type[T], found: Json, what: str) -> T:
    """Return a dataclass made from a JSON object, whose unknown keys are ignored. Raises ValueError
    with the name of a key that is missing or has the wrong type."""
    require(isinstance(found, dict), f"{what} is not a JSON object")
    types = get_type_hints(kind)
    for each in fields(kind):
        is_needed = each.default is MISSING and each.default_factory is MISSING
        require(each.name in found or not is_needed, f"{what} has no {each.name}")
        if each.name in found:
            value, expected = found[each.name], types[each.name]
            words = f"{shorten(value)}, it must be {describe_type(expected)}"
            require(has_type(value, expected), f"{each.name} of {what} is {words}")
    return kind(**{name: found[name] for name in types if name in found})


def has_type(value: object, kind: object) -> bool:
    """Whether a JSON value has a type. An int must be 0 or more, and no number may exceed
    MAX_NUMBER."""
    inner = get_args(kind)
    if isinstance(kind, UnionType):
        return any(has_type(value, one) for one in inner)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(has_type(item, inner[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(has_type(item, inner[1]) for item in value.values())
    if kind in (int, float):
        is_number = isinstance(value, int if kind is int else int | float)
        minimum = 0 if kind is int else -MAX_NUMBER
        return is_number and not isinstance(value, bool) and minimum <= value <= MAX_NUMBER
    return isinstance(value, kind)


def describe_type(kind: object) -> str:
    words = {str: "text", int: "a whole number of 0 or more", float: "a number"}
    return words.get(kind) or str(kind)


def shorten(value: object) -> str:
    """Return the repr of a value, cut to the length that an error message shows."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def require(is_right: bool, message: str) -> None:
    if not is_right:
        raise ValueError(message)


@contextmanager
def new_file(file: Path) -> Iterator[None]:
    """Create a file and its folder, and remove the file if it is still empty at the end. Raises
    UsageError, also if the file exists. Other ranks than 0 have no file."""
    if rank():
        yield
        return
    if os.path.lexists(file):
        raise UsageError(f"{file} exists already; use another name, or --resume to continue it")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("x").close()  # fails if another run has created it meanwhile
    try:
        yield
    finally:
        if file.exists() and not file.stat().st_size:
            file.unlink()


class Writer:
    """Appends lines to a results file, and to its content in memory.

    A writer knows the length of the file. If another run has written to the file, the next line
    raises UsageError.
    """

    def __init__(self, file: Path, results: Results):
        self.file, self.results = file, results

    def drop_partial_line(self) -> None:
        """Remove an incomplete last line from the file. Raises UsageError if another run has
        written since the file was read."""
        if self.results.n_partial_bytes and rank() == 0:
            self.require_unchanged()
            with writing(self.file):
                os.truncate(self.file, self.results.n_bytes)
            self.results.n_partial_bytes = 0

    def require_unchanged(self) -> None:
        """Raise UsageError if another run has written to the file."""
        with writing(self.file):
            size = self.file.stat().st_size
        if size != self.results.n_bytes + self.results.n_partial_bytes:
            raise UsageError(f"{self.file}: another run writes to it; use --resume when it ends")

    def add(self, line: Json) -> None:
        """Add a line to file and content, and the head before the first line. Other ranks than 0
        have no file. Raises UsageError."""
        if rank():
            self.results.add(line)
            return
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
