"""Prompts in a file of the user's: one (--prompt-file) or many (--prompts of both programs).

prompts, unit = read_prompts(prompts_file)  # unit: "one per JSON object"
print(prompts[0]["prompt"])
"""

import sys
from pathlib import Path

from bench import is_heading, split_prompts
from dynatree_lab.errors import UsageError

Prompt = dict[str, object]  # its text as "prompt", and the other keys of its line of JSON

MIN_PARAGRAPH = 200  # characters; shorter paragraphs of WikiText have too little context


def read_text(file: str) -> str:
    """Return what is in a file (- is standard input) without its byte order mark and its last line
    end, which editors and echo add. Raises UsageError for a file that cannot be read or is not
    UTF-8."""
    try:
        raw = read_stdin() if file == "-" else Path(file).read_bytes()
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        return text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error}") from error


def read_stdin() -> bytes | str:
    """Return standard input: bytes, or the text of a StringIO that a notebook has put there. Raises
    UsageError if it is closed."""
    if sys.stdin is None:
        raise UsageError("- is standard input, which is closed; use a file")
    return getattr(sys.stdin, "buffer", sys.stdin).read()


def read_prompts(file: Path) -> tuple[list[Prompt], str]:
    """Return the prompts of a file, and what is one of them. Raises UsageError.

    The content decides, not the name (bench.split_prompts). A raw file of WikiText is cut like
    the dataset.
    """
    text = read_text(str(file))
    try:
        if not is_heading(next(filter(str.strip, text.split("\n")), "")):
            return split_prompts(text, str(file))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not (found := paragraphs(text)):
        raise UsageError(f"{file} has no paragraph of at least {MIN_PARAGRAPH} characters")
    return [{"prompt": paragraph} for paragraph in found], "one per paragraph of WikiText"


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of WikiText that are long enough. A paragraph ends at a blank line or a
    heading."""
    found = []
    lines = []
    for line in text.split("\n") + [""]:
        if line.strip() and not is_heading(line):
            lines.append(line.strip())
            continue
        found.append("\n".join(lines))
        lines = []
    return [paragraph for paragraph in found if len(paragraph) >= MIN_PARAGRAPH]
