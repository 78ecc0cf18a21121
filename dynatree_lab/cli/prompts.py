"""Prompts in a file of the user's: one (--prompt-file) or many (--prompts of both programs).

prompts, unit = read_prompts(prompts_file)  # unit: "one per JSON object"
print(prompts[0]["prompt"])
"""

import json
import re
import sys
from pathlib import Path

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

    The content decides, not the name. If it begins with a brace, each line has {"prompt": ...} or
    {"turns": [...]}. If all lines are JSON strings, each is a prompt. Other text has a prompt in
    each block between empty lines or, if it is a single block, in each line. A raw file of WikiText
    is cut like the dataset.
    """
    text = read_text(str(file)).replace("\r\n", "\n")
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"{file} has no prompt: it is empty")
    if re.match(r'\s*\[\s*["{]', text):
        raise UsageError(f"{file} is a JSON array; use one JSON object per line, or plain text")
    first = lines[0][1]
    has_objects = first.lstrip().startswith("{")
    if has_objects or all(is_json_string(line) for _, line in lines):
        found = [prompt_of(line, f"{file}, line {n}") for n, line in lines]
        return found, "one per JSON object" if has_objects else "one per JSON string"
    if is_heading(first):
        if not (found := paragraphs(text)):
            raise UsageError(f"{file} has no paragraph of at least {MIN_PARAGRAPH} characters")
        return as_prompts(found), "one per paragraph of WikiText"
    blocks = [block.rstrip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    if len(blocks) > 1:
        return as_prompts(blocks), "one per block"
    return as_prompts([line.rstrip() for _, line in lines]), "one per line"


def as_prompts(texts: list[str]) -> list[Prompt]:
    return [{"prompt": text} for text in texts]


def is_json_string(line: str) -> bool:
    """Whether a line is a JSON string. One that only begins with a quotation mark is not."""
    try:
        return isinstance(json.loads(line), str)
    except ValueError:
        return False


def prompt_of(line: str, where: str) -> Prompt:
    """Return the prompt in a line of JSON: the string, the "prompt" of an object or, in the format
    of MT-bench and Spec-Bench, the first of its "turns". Raises UsageError."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    match found:
        case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]} if prompt:
            return found | {"prompt": prompt}
        case str(prompt) if prompt:
            return {"prompt": prompt}
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
