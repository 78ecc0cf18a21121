"""Prompts of the benchmark: twelve builtin ones, WikiText-2, PG-19, or a file of the user's.

A dataset that cannot be fetched is an error that names the alternatives.

    texts = load_prompts("wikitext2", None)
    texts = load_prompts("wikitext2-script", None)  # as the script of DynaTree's authors reads them
    prompts = cut_prompts(texts, tokenizer, n_tokens=150, n_prompts=8)
"""

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dynatree_lab.benchmark.pg19 import fetch_opening, list_books
from dynatree_lab.cli.errors import UsageError, print_line
from dynatree_lab.cli.options import read_prompt
from dynatree_lab.cli.tokens import encode_prompt
from dynatree_lab.engine.checkpoint import CheckpointError, convert_hub_errors

SCRIPT = "wikitext2-script"
DATASETS = ("builtin", "wikitext2", SCRIPT, "pg19")
WIKITEXT_REPOSITORY = "ggml-org/ci"
WIKITEXT_ZIP = "wikitext-2-raw-v1.zip"
WIKITEXT_FILE = "wikitext-2-raw/wiki.test.raw"  # the embedded pair was trained on wiki.valid.raw
SCRIPT_FILE = "wikitext-2-raw/wiki.valid.raw"
SCRIPT_CHARACTERS = 800  # to which the authors' script cuts a text
SCRIPT_TEXTS = 10
MIN_PARAGRAPH = 200  # characters; shorter paragraphs of WikiText have too little context


def load_prompts(dataset: str, file: str | None, n_prompts: int = 12) -> list[str]:
    """Return the prompts of a dataset, or of a file if one is given, and print how many a file has.
    Raises UsageError.

    n_prompts: how many will be used; of PG-19's hundred books as many are fetched, evenly spaced.
    """
    if file is not None:
        texts, unit = read_prompts(Path(file))
        used = f"; {n_prompts} of them are used" if n_prompts < len(texts) else ""
        print_line(f"note: {file} has {len(texts)} prompts, {unit}{used}")
        return texts
    if dataset == "builtin":
        return list(BUILTIN)
    if dataset == "wikitext2":
        return paragraphs(fetch_wikitext(WIKITEXT_FILE))
    if dataset == SCRIPT:
        return script_prompts(fetch_wikitext(SCRIPT_FILE))
    if dataset == "pg19":
        return [fetch_opening(book) for book in pick_evenly(list_books(), n_prompts)]
    raise UsageError(f"--dataset is {dataset!r}, it must be one of {', '.join(DATASETS)}")


def read_prompts(file: Path) -> tuple[list[str], str]:
    """Return the prompts of a file, and what is one of them. Raises UsageError.

    The content decides, not the name. If it begins with a brace, each line has {"prompt": ...} or
    {"turns": [...]}. Other text has a prompt in each block between empty lines or, if it is a
    single block, in each line. A raw file of WikiText is cut like the dataset.
    """
    text = read_prompt(None, str(file)).removeprefix("\ufeff").replace("\r\n", "\n")
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"{file} has no prompt: it is empty")
    if re.match(r'\s*\[\s*["{]', text):
        raise UsageError(f"{file} is a JSON array; use one JSON object per line, or plain text")
    first = lines[0][1]
    if first.lstrip().startswith("{"):
        return [prompt_of(line, f"{file}, line {n}") for n, line in lines], "one per JSON object"
    if is_heading(first):
        return paragraphs(text), "one per paragraph of WikiText"
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


def script_prompts(text: str) -> list[str]:
    """Return the first SCRIPT_TEXTS prompts of WikiText-2 as the script of DynaTree's authors reads
    them: a paragraph that is too short is joined to the next, and prompts are cut by characters."""
    found = []
    joined = ""
    for line in text.split("\n") + [""]:
        if line.strip() and not line.startswith(" ="):
            joined += f" {line}\n"
        elif len(joined) >= MIN_PARAGRAPH:
            found.append(joined.strip()[:SCRIPT_CHARACTERS])
            joined = ""
    return found[:SCRIPT_TEXTS]


def fetch_wikitext(file: str) -> str:
    """Return a raw split of WikiText-2, from the hub or its client's cache. Raises UsageError."""
    try:
        with convert_hub_errors("wikitext2"):
            from huggingface_hub import HfApi, hf_hub_download

            where = {"repo_id": WIKITEXT_REPOSITORY, "repo_type": "dataset"}
            commit = HfApi().resolve_revision(**where)  # fails fast if the hub is down
            archive = hf_hub_download(filename=WIKITEXT_ZIP, revision=commit, **where)
    except CheckpointError as error:
        raise UsageError(f"{error}; use --dataset builtin or --prompts FILE") from error
    with zipfile.ZipFile(archive) as files:
        return files.read(file).decode("utf-8")


def cut_prompts(
    texts: list[str],
    tokenizer: Tokenizer,
    n_tokens: int,
    n_prompts: int,
    min_tokens: int = 1,
) -> list[list[int]]:
    """Return the ids of n_prompts texts, or of all if there are fewer, each cut to n_tokens.

    They are evenly spaced among the texts of at least min_tokens. Raises UsageError if there is no
    such text.
    """
    encoded = [encode_prompt(text, tokenizer) for text in texts]
    usable = [ids[:n_tokens] for ids in encoded if len(ids) >= min_tokens]
    if not usable:
        raise UsageError(f"the dataset has no prompt of {min_tokens} tokens or more")
    return pick_evenly(usable, n_prompts)


def pick_evenly(items: Sequence, n: int) -> list:
    """Return n evenly spaced items, or all if there are fewer."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


# Twelve prompts: encyclopaedic, narrative, lists and code
BUILTIN = tuple(read_prompts(Path(__file__).with_name("prompts.jsonl"))[0])
