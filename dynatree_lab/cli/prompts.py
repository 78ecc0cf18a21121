"""Prompts in a file of the user's: one (--prompt-file) or many (--prompts of both programs).

texts, unit = read_prompts(prompts_file)  # unit: "one per JSON object"
"""

import json
import re
import sys
from pathlib import Path

from dynatree_lab.errors import UsageError

MIN_PARAGRAPH = 200  # characters; shorter paragraphs of WikiText have too little context


def read_text(file: str) -> str:
    """Return what is in a file (- is standard input) without the last line end, which editors and
    echo add. Raises UsageError if the file cannot be read or is not UTF-8."""
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error}") from error


def read_prompts(file: Path) -> tuple[list[str], str]:
    """Return the prompts of a file, and what is one of them. Raises UsageError.

    The content decides, not the name. If it begins with a brace, each line has {"prompt": ...} or
    {"turns": [...]}. Other text has a prompt in each block between empty lines or, if it is a
    single block, in each line. A raw file of WikiText is cut like the dataset.
    """
    text = read_text(str(file)).removeprefix("\ufeff").replace("\r\n", "\n")
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"{file} has no prompt: it is empty")
    if re.match(r'\s*\[\s*["{]', text):
        raise UsageError(f"{file} is a JSON array; use one JSON object per line, or plain text")
    first = lines[0][1]
    if first.lstrip().startswith("{"):
        return [prompt_of(line, f"{file}, line {n}") for n, line in lines], "one per JSON object"
    if is_heading(first):
        if not (found := paragraphs(text)):
            raise UsageError(f"{file} has no paragraph of at least {MIN_PARAGRAPH} characters")
        return found, "one per paragraph of WikiText"
    blocks = [block.rstrip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    if len(blocks) > 1:
        return blocks, "one per block"
    return [line.rstrip() for _, line in lines], "one per line"


def prompt_of(line: str, where: str) -> str:
    """Return the prompt in a line of JSON: its "prompt" or, in the format of MT-bench and
    Spec-Bench, the first of its "turns". Raises UsageError."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    match found:
        case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]} if prompt:
            return prompt
    raise UsageError(f"{where} has no text as `prompt` or as the first of its `turns`")


def is_heading(line: str) -> bool:
    """Whether a line is a heading of WikiText, such as " = Title = "."""
    return line.startswith(" = ") and line.rstrip().endswith(" =")


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
