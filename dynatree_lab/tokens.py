"""Tokenizers: loading them, encoding prompts, and decoding text while it is generated.

tokenizer = load_tokenizer(Path("models/tiny/target"))
ids = encode_prompt("She opened the door", tokenizer, n_ids=4096)
print(TextStream(tokenizer).push(ids))
"""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from tokenizers import Tokenizer

import dynatree
from dynatree_lab.engine.checkpoint import CheckpointError, reading
from dynatree_lab.errors import UsageError

CONTEXT = 4  # earlier ids that the text of an id may depend on, such as the space between words
LONG = 32  # if nothing is held back, at most so many ids are decoded again with each new one


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder's tokenizer.json. Raises CheckpointError."""
    with reading(folder / "tokenizer.json"):
        return dynatree.load_tokenizer(folder)


def require_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise CheckpointError, which names the first difference, unless both give the same ids. One
    may have tokens that were added after the last id of the other."""
    what = "target and draft tokenizers differ"
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    added = target.get_added_tokens_decoder() | draft.get_added_tokens_decoder()
    last = min(max(ours, default=-1), max(theirs, default=-1))
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i) and (i <= last or i not in added):
            raise CheckpointError(f"{what}: id {i} is {ours.get(i)!r} and {theirs.get(i)!r}")
    ours, theirs = json.loads(target.to_str()), json.loads(draft.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        if ours[part] != theirs[part]:
            raise CheckpointError(f"{what}: the {part} is {ours[part]} and {theirs[part]}")
    merges = (each["model"].get("merges") for each in (ours, theirs))
    for i, (own, other) in enumerate(zip_longest(*merges)):
        if own != other:
            raise CheckpointError(f"{what}: merge {i} is {own} and {other}")


def encode_prompt(prompt: str, tokenizer: Tokenizer, n_ids: int) -> list[int]:
    """Return the ids of a text that begins a sequence, with the tokens that tokenizer.json's
    post_processor adds. n_ids: the target's V. Raises UsageError for a prompt without tokens of its
    own, and those of known_ids."""
    try:
        prompt.encode("utf-8")  # half a surrogate pair, which JSON can have, is no text
        ids = dynatree.encode_prompt(prompt, tokenizer)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return known_ids(ids, tokenizer, n_ids)


def known_ids(ids: list[int], tokenizer: Tokenizer, n_ids: int) -> list[int]:
    """Return ids of a text. Raises UsageError for a token that was added to the tokenizer and not
    to the target. n_ids: the target's V."""
    if unknown := [i for i in ids if i >= n_ids]:
        which = f"{tokenizer.id_to_token(unknown[0])!r} has id {unknown[0]}"
        raise UsageError(f"token {which}, and the target has only {n_ids} ids; leave it out")
    return ids


def ends_bytes(token: int, tokenizer: Tokenizer) -> bool:
    """Whether a token ends a run of byte tokens, such as <0xF0>, which is decoded as one. It then
    is no byte, and not one of the tokens that decoding skips."""
    name = tokenizer.id_to_token(token) or ""
    return not name.startswith("<0x") and tokenizer.decode([token]) != ""


def final_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of ids without its end that later ids may change: a run of bytes and an
    incomplete character, which is decoded as U+FFFD."""
    n = len(ids)
    while n and not ends_bytes(ids[n - 1], tokenizer):
        n -= 1
    return tokenizer.decode(ids[:n]).rstrip("\ufffd")


class TextStream:
    """Decodes ids step by step. Text that later ids may change is held back until they follow."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.recent: list[int] = []  # the latest ids, enough to decode the next ones in context
        self.n_shown = 0  # characters of their text that were returned

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete. All pieces and that of `finish` are the text."""
        self.recent += ids
        text = final_text(self.recent, self.tokenizer)
        new, self.n_shown = text[self.n_shown :], len(text)
        if len(self.recent) > LONG:
            self.shorten()
        return new

    def shorten(self) -> None:
        """Forget all but the latest ids, unless text is held back. Later text does not depend on
        the forgotten ones, because the character and the run of bytes at the end are complete."""
        is_complete = len(self.tokenizer.decode(self.recent)) == self.n_shown
        if is_complete and ends_bytes(self.recent[-1], self.tokenizer):
            self.recent = self.recent[-CONTEXT:]
            self.n_shown = len(self.tokenizer.decode(self.recent))

    def finish(self) -> str:
        """Return the text that was held back and never completed."""
        return self.tokenizer.decode(self.recent)[self.n_shown :]


class StopTexts:
    """Cuts a stream of text before the stop text that is completed first."""

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = stops
        self.held = ""  # possible beginning of a stop text
        self.has_ended = False

    def push(self, text: str) -> str:
        """Add a piece. Return the text that cannot belong to a stop text."""
        text = self.held + text
        found = []
        for stop in self.stops:
            at = text.find(stop)
            if at >= 0:
                found.append((at + len(stop), at))
        self.has_ended = bool(found)
        end = min(found)[1] if found else len(text) - self.n_open(text)
        self.held = "" if found else text[end:]
        return text[:end]

    def n_open(self, text: str) -> int:
        """Return how many characters at the end may begin a stop text."""
        longest = max(map(len, self.stops), default=0)
        for n in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self.stops):
                return n
        return 0
