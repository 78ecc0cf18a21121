"""Results files: one JSON object per line, first the head, then a line for each text.

Lines are only appended. So an interrupted run is resumed by appending the missing lines, and
`pandas.read_json(file, lines=True)` reads a file. docs/results.md lists the content of the lines.

    results = load("results/regimes_embedded_cpu.jsonl")
    results.head["machine"]["processor"]
    [text["throughput"] for text in results.texts.values() if text["row"] == "dynatree"]
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from dynatree_lab.benchmark.cases import SYMBOLS, Case
from dynatree_lab.engine.ranks import rank
from dynatree_lab.errors import UsageError, writing

FORMAT = 6  # version of the file format; files of other versions are refused
CASE_KEYS = ("row", "dataset", *SYMBOLS)  # identify the case of a text
KEYS = (*CASE_KEYS, "prompt", "round")  # identify a text

Key = tuple[object, ...]  # the values of KEYS
Line = dict[str, object]


@dataclass
class Results:
    """The content of a results file."""

    head: Line  # the first line: table, title, columns, options, machine, prompts and cases
    texts: dict[Key, Line] = field(default_factory=dict)
    differences: dict[Key, Line] = field(default_factory=dict)  # with `at` and `gap`
    ids: dict[str, list[int]] = field(default_factory=dict)  # of greedy texts, by digest

    def __post_init__(self) -> None:
        self.cases = [Case(**case) for case in self.head["cases"]]
        self.baseline = self.head["options"].get("baseline", "ar")  # speed-ups are relative to it
        self.n_rounds = self.head["options"].get("repeats", 1)
        self.is_sorted = self.head.get("is_sorted", False)  # older files lack it

    @property
    def n_missing(self) -> int:
        """Number of texts that an unfinished table lacks."""
        n_prompts = self.head["n_prompts"]  # by dataset
        n_rounds = (1 if case.is_replayed else self.n_rounds for case in self.cases)
        pairs = zip(self.cases, n_rounds, strict=True)
        n_texts = sum(n * n_prompts[case.dataset] for case, n in pairs)
        return n_texts - len(self.texts)

    def add(self, line: Line) -> None:
        """Add the content of a line after the head."""
        if "difference" in line:
            self.differences[key_of(line["difference"])] = line["difference"]
        else:
            self.texts[key_of(line)] = line
            if "ids" in line:
                self.ids[line["ids_digest"]] = line["ids"]

    def ids_fields(self, ids: list[int]) -> Line:
        """Return the fields of a greedy text on its ids: their digest and, unless an earlier line
        has them, the ids."""
        digest = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
        return {"ids_digest": digest} | ({} if digest in self.ids else {"ids": ids})


def key_of(text: Line) -> Key:
    return tuple(text[name] for name in KEYS)


def load(file: str | Path) -> Results:
    """Return the content of a results file, without an incomplete last line. Raises UsageError."""
    try:
        first, *lines = Path(file).read_bytes().split(b"\n")
        head = json.loads(first)["head"]
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} is no results file: it does not begin with a head") from error
    if head["format"] != FORMAT:
        raise UsageError(f"{file} has format {head['format']}, it must be {FORMAT}")
    results = Results(head)
    for line in lines[:-1]:  # what follows the last line feed is incomplete
        results.add(json.loads(line))
    return results


def append(file: Path, line: Line) -> None:
    """Add a line to a file, which only rank 0 has. Raises UsageError."""
    content = json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
    if rank() == 0:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.write(content)


def drop_partial_line(file: Path) -> None:
    """Remove the incomplete last line that a full disk or a crash may have left."""
    if rank() == 0:
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
