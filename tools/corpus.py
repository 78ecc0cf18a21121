"""Text to train on: files of any length, as ids; and a vocabulary, where there is none yet.

corpus = read_corpus([Path("a.txt"), Path("b.txt")], tokenizer, n_ids=4096, eos_ids=(0,))
corpus.train, corpus.held_out  # int32 ids; the second are the last twentieth of each file
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from cli.errors import UsageError
from cli.metrics import new_ids
from cli.models import encode
from engine.foreign import ForeignFile, read_text, require_file

MAX_BYTES = 2**30  # of a file
PIECE = 2**16  # characters; what the tokenizer makes of one takes 100 times as much
HELD_OUT = 20  # one part in so many of each file
END = "<|endoftext|>"  # of a vocabulary that is learned; its id is 0
SMALLEST = 257  # vocabulary: every byte, and END


@dataclass(frozen=True)
class Corpus:
    """Files as ids, each behind an end of text if there is such an id."""

    train: Tensor  # int32
    held_out: Tensor  # int32; nothing learns from it

    def require_rows(self, n_tokens: int) -> None:
        """Raise UsageError unless both have rows of so many tokens."""
        if min(len(self.held_out), len(self.train)) < n_tokens:
            what = f"--text is too short, {len(self.train) + len(self.held_out):,} tokens"
            raise UsageError(f"{what}: this --context needs some {n_tokens * HELD_OUT:,}")


def read_corpus(
    files: Sequence[Path], tokenizer: Tokenizer, n_ids: int, eos_ids: tuple[int, ...]
) -> Corpus:
    """The files as ids below n_ids. Raises UsageError."""
    train = new_ids()
    held_out = new_ids()
    for file in files:
        text = text_of(file)
        end = len(text) - len(text) // HELD_OUT
        for ids, part in ((train, text[:end]), (held_out, text[end:])):
            ids.extend(eos_ids[:1])
            for piece in pieces(part):
                try:
                    ids.extend(encode(piece, tokenizer, n_ids))
                except UsageError as error:
                    raise UsageError(f"{file}: {error}") from error
    return Corpus(as_tensor(train), as_tensor(held_out))


def as_tensor(ids: array) -> Tensor:
    """The same memory, [n] int32."""
    return torch.frombuffer(ids, dtype=torch.int32)


def require_texts(names: Sequence[str]) -> list[Path]:
    """Files of these names. Raises UsageError if one is no regular file, before any is read."""
    files = [Path(name) for name in names]
    try:
        for file in files:
            require_file(file)
    except ForeignFile as error:
        raise UsageError(f"--text: {error}") from error
    return files


def text_of(file: Path) -> str:
    """A file's text. Raises UsageError: no file, too large, not UTF-8, empty."""
    try:
        text = read_text(file, MAX_BYTES)
    except ForeignFile as error:
        raise UsageError(f"--text: {error}") from error
    if not text:
        raise UsageError(f"--text: {file} is empty")
    return text


def pieces(text: str) -> Iterator[str]:
    """A text in parts that end with a line, if no line is as long as a part."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE, start + 2 * PIECE) + 1
        if not end:
            end = start + 2 * PIECE
        yield text[start:end]
        start = end


def learn_tokenizer(files: Sequence[Path], n_ids: int) -> Tokenizer:
    """A byte-level BPE of n_ids, of what is not held out of the files. Raises UsageError."""

    def all_pieces() -> Iterator[str]:
        for file in files:
            text = text_of(file)
            yield from pieces(text[: len(text) - len(text) // HELD_OUT])

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_ids,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_pieces(), trainer)
    found = tokenizer.get_vocab_size()
    if found != n_ids:
        raise UsageError(f"--vocab {n_ids}: {SMALLEST} to what the text gives, {found}")
    return tokenizer
