"""Recorded texts: all that a replay needs of a target (models.py).

A file has a text per line, as a JSON object with the fields of RecordedText and the version of the
format. `dynatree-bench --record` writes such files. docs/replay.md has a recorder for transformers.

    append_text(Path("texts.jsonl"), my_text)
    my_texts = read_texts("texts.jsonl")

A text of people, such as a book or source code, can take the place of the target's: human_texts.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from tokenizers import Tokenizer

from dynatree_lab.engine.checkpoint import weight_files

FORMAT = 1  # version of the file format; files of other versions are refused
SUFFIX = ".jsonl"  # of files of recorded texts; every other file is a text of people
SIZES = 12, 150, 128  # of human_texts
KINDS = {int: int, float: (int, float), str: str, list[int]: list}  # of JSON, by annotation


class ReplayError(ValueError):
    """Recorded texts or candidates that cannot be used. The message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class RecordedText:
    """A text of a target, as ar writes it. Raises ValueError for fields that no text has."""

    prompt: list[int]  # ids
    ids: list[int]  # the new ones
    model: str  # the target's hub name or folder
    weights: str  # its revision on the hub, or the sha256 of its weights
    dtype: str  # such as float16
    vocab_size: int  # the target's V, from its config.json
    eos_ids: list[int]
    tokenizer: str  # tokenizer_digest
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    program: str = ""  # that wrote the text, with its version

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, KINDS[f.type]) or isinstance(value, bool):
                kind = f.type.__name__
                raise ValueError(f"{f.name} is {value!r:.80}, it must be of type {kind}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, it must be 0 or more and finite")
        for name in ("prompt", "ids"):
            ids = getattr(self, name)
            known = range(self.vocab_size)
            if not ids or not all(type(token) is int and token in known for token in ids):
                last = self.vocab_size - 1
                raise ValueError(f"{name} must have at least one id, and all from 0 to {last}")
        if not all(type(token) is int for token in self.eos_ids):
            raise ValueError(f"eos_ids is {self.eos_ids!r:.80}, it must have only ids")


def read_texts(file: str | Path) -> list[RecordedText]:
    """Return the texts of a file, of which there is at least one and no two have one prompt. Raises
    ReplayError, which names the line."""
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ReplayError(f"{file} cannot be read: {error.strerror}") from error
    found: dict[tuple[int, ...], RecordedText] = {}
    for number, line in enumerate(lines, start=1):
        try:
            text = parse_text(line)
        except ValueError as error:
            raise ReplayError(f"{file}, line {number}: {error}") from error
        if tuple(text.prompt) in found:
            raise ReplayError(f"{file}, line {number}: an earlier line has this prompt")
        found[tuple(text.prompt)] = text
    if not found:
        raise ReplayError(f"{file} has no texts")
    return list(found.values())


def parse_text(line: bytes) -> RecordedText:
    """Return the text of a line. Raises ValueError."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError("it is cut or no JSON, so it is no recorded text") from error
    version = values.pop("format", None) if isinstance(values, dict) else None
    if version is None:
        raise ValueError("it is no recorded text, because it has no format")
    if version != FORMAT:
        raise ValueError(f"format is {version!r:.80}, it must be {FORMAT}")
    required = [f.name for f in fields(RecordedText) if f.default is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"the text has no {', '.join(missing)}")
    known = {f.name for f in fields(RecordedText)}  # others are a recorder's own
    return RecordedText(**{name: value for name, value in values.items() if name in known})


def append_text(file: Path, text: RecordedText) -> None:
    """Add a text to a file."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"format": FORMAT} | asdict(text)) + "\n")


def read_replay(
    file: str | Path,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    sizes: tuple[int, int, int] = SIZES,
) -> list[RecordedText]:
    """Return the recorded texts of a .jsonl file; of any other file, human_texts. Raises
    ReplayError."""
    if Path(file).suffix == SUFFIX:
        return read_texts(file)
    if tokenizer is None:
        raise ReplayError(f"{file} is no {SUFFIX} file, so it is a text of people: add --draft")
    return human_texts(file, tokenizer, vocab_size, sizes)


def human_texts(
    file: str | Path, tokenizer: Tokenizer, vocab_size: int, sizes: tuple[int, int, int]
) -> list[RecordedText]:
    """Return pieces of a text file as if a target with this vocabulary were to write them.

    sizes: the number of pieces, which are evenly spaced, and the ids of each one's prompt and of
    the rest. Raises ReplayError.
    """
    n_pieces, n_prompt, n_new = sizes
    try:
        ids = tokenizer.encode(Path(file).read_text("utf-8"), add_special_tokens=False).ids
    except OSError as error:
        raise ReplayError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReplayError(f"{file} is no text in UTF-8; recorded texts end in {SUFFIX}") from error
    n_pieces = min(n_pieces, len(ids) // (n_prompt + n_new))
    if not n_pieces:
        need = f"{n_prompt} of a prompt and {n_new} new ones"
        raise ReplayError(f"{file} has {len(ids)} tokens, it must have {need}")
    starts = [i * len(ids) // n_pieces for i in range(n_pieces)]
    return [
        RecordedText(
            prompt=ids[start : start + n_prompt],
            ids=ids[start + n_prompt : start + n_prompt + n_new],
            model=f"people ({Path(file).name}), as if the target were to write this",
            weights="",
            dtype="",
            vocab_size=vocab_size,
            eos_ids=[],
            tokenizer=tokenizer_digest(tokenizer),
        )
        for start in starts
    ]


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the sha256 of a tokenizer's vocabulary, as JSON with sorted keys. The digest is that
    of two files which differ only in spaces or in the order of keys."""
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def weights_name(folder: Path) -> str:
    """Return the revision of a folder in the hub's cache, or the sha256 of a folder's weights."""
    if folder.parent.name == "snapshots":
        return folder.name
    digest = hashlib.sha256()
    for file in weight_files(folder):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def require_same_vocabulary(texts: Sequence[RecordedText], tokenizer: Tokenizer) -> None:
    """Raise ReplayError unless all texts are of this tokenizer, which is the draft's."""
    digest = tokenizer_digest(tokenizer)
    for number, text in enumerate(texts, start=1):
        if text.tokenizer != digest:
            what = f"text {number}, of {text.model}, is of another tokenizer than the draft's"
            raise ReplayError(f"{what}; use a draft of this target")
