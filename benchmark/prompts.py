"""Prompts of the benchmark: twelve builtin ones, WikiText-2, PG-19, or a file of the user's.

A dataset that cannot be fetched is an error that names the alternatives.

    texts = load_prompts("wikitext2", None)
    texts = load_prompts("wikitext2-script", None)  # as the script of DynaTree's authors reads them
    prompts = cut_prompts(texts, tokenizer, vocab_size, n_tokens=150, n_prompts=8)

The builtin prompts are short. The target can extend them to a longer length:

    prompts = extend_prompts(prompts, pair, n_tokens=800)
"""

import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmark.pg19 import fetch_opening, list_books
from cli.errors import UsageError
from cli.metrics import token_ids
from cli.models import Pair, Request
from cli.tokens import encode_prompt
from engine.checkpoint import CheckpointError, InvalidFile, convert_hub_errors, read_text
from engine.generation_config import GenerationConfig
from methods.sampler import Sampling
from methods.static import PaddedAutoregressive

SCRIPT = "wikitext2-script"
DATASETS = ("builtin", "wikitext2", SCRIPT, "pg19")
WIKITEXT_REPOSITORY = "ggml-org/ci"
WIKITEXT_ZIP = "wikitext-2-raw-v1.zip"
WIKITEXT_FILE = "wikitext-2-raw/wiki.test.raw"  # the embedded pair was trained on wiki.valid.raw
SCRIPT_FILE = "wikitext-2-raw/wiki.valid.raw"
SCRIPT_CHARACTERS = 800  # to which the authors' script cuts a text
SCRIPT_TEXTS = 10
BROKEN_ARCHIVE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, ValueError)
MAX_BYTES = 2**24  # of a file of prompts; the tokenizer needs about 15 seconds for it
MIN_PARAGRAPH = 200  # characters; shorter paragraphs have too little context


def load_prompts(dataset: str, file: str | None, n_books: int = 12) -> list[str]:
    """Return the prompts of a dataset, or of a file if one is given.

    A .jsonl file has {"prompt": ...} or {"turns": [...]} in each line. Any other file is plain
    text, whose paragraphs of at least 200 characters are prompts. Only a line feed ends a line.
    Raises UsageError.

    n_books: number of PG-19's hundred books to fetch, evenly spaced, one request each.
    """
    if file is not None:
        return read_prompts(Path(file))
    if dataset == "builtin":
        return list(BUILTIN)
    if dataset == "wikitext2":
        return paragraphs(_fetch_wikitext(WIKITEXT_FILE))
    if dataset == SCRIPT:
        return script_prompts(_fetch_wikitext(SCRIPT_FILE))
    if dataset == "pg19":
        return [fetch_opening(book) for book in pick_evenly(list_books(), n_books)]
    raise UsageError(f"--dataset is {dataset!r}, it must be one of {', '.join(DATASETS)}")


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file. Raises UsageError."""
    try:
        text = read_text(file, MAX_BYTES)
        if file.suffix.lower() == ".json":
            raise UsageError(f"{file} is JSON; use .jsonl, with one object per line, or plain text")
        if file.suffix.lower() == ".jsonl":
            unit = "line"
            lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
            texts = [prompt_of(line, f"{file}, line {n}") for n, line in lines]
        else:
            unit = f"paragraph of {MIN_PARAGRAPH} characters or more"
            texts = paragraphs(text)
    except InvalidFile as error:
        raise UsageError(f"--prompts: {error}") from error
    if not texts:
        raise UsageError(f"{file} has no {unit} to use as a prompt")
    return texts


def prompt_of(line: str, where: str) -> str:
    """Return the prompt in a line of a .jsonl file: its "prompt" or, in the format of MT-bench and
    Spec-Bench, the first of its "turns". Raises InvalidFile."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{where} is not JSON: {error}") from error
    found = found if isinstance(found, dict) else {}
    turns = found.get("turns")
    prompt = found.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(prompt, str) or not prompt:
        raise InvalidFile(f"{where} has no text as `prompt` or as the first of its `turns`")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidFile(f"{where} has half of a surrogate pair, which is not text") from error
    return prompt


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text that are long enough. A paragraph ends at a blank line or a
    WikiText heading (" = Title = ")."""
    found = []
    lines = []
    for line in text.split("\n") + [""]:
        is_heading = line.startswith(" = ") and line.rstrip().endswith(" =")
        if line.strip() and not is_heading:
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


def _fetch_wikitext(file: str) -> str:
    """Return a raw split of WikiText-2, from the hub or its client's cache. Raises UsageError."""
    others = f"use --dataset {DATASETS[0]} or --prompts FILE"
    try:
        with convert_hub_errors("wikitext2"):
            from huggingface_hub import HfApi, hf_hub_download

            where = {"repo_id": WIKITEXT_REPOSITORY, "repo_type": "dataset"}
            commit = HfApi().resolve_revision(**where)  # fails fast if the hub is down
            name = hf_hub_download(filename=WIKITEXT_ZIP, revision=commit, **where)
    except CheckpointError as error:
        raise UsageError(f"{error}; {others}") from error
    try:
        with zipfile.ZipFile(name) as archive:
            return archive.read(file).decode("utf-8")
    except BROKEN_ARCHIVE as error:
        raise UsageError(f"{name} is not the WikiText-2 archive: {error}; {others}") from error


def cut_prompts(
    texts: list[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    n_tokens: int,
    n_prompts: int,
    min_tokens: int = 1,
) -> list[list[int]]:
    """Return the ids of n_prompts texts, or of all if there are fewer, each cut to n_tokens.

    They are evenly spaced among the texts of at least min_tokens. Raises UsageError if there is no
    such text.
    """
    encoded = [encode_prompt(text, tokenizer, vocab_size) for text in texts]
    usable = [ids[:n_tokens] for ids in encoded if len(ids) >= min_tokens]
    if not usable:
        raise UsageError(f"the dataset has no prompt of {min_tokens} tokens or more")
    return pick_evenly(usable, n_prompts)


def pick_evenly(items: Sequence, n: int) -> list:
    """Return n evenly spaced items, or all if there are fewer."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def extend_prompts(prompts: list[list[int]], pair: Pair, n_tokens: int) -> list[list[int]]:
    """Return the prompts cut or extended to n_tokens. The target generates the extensions.

    They are sampled at temperature 1 with seed 0, because greedy text repeats itself. A table with
    such prompts must say that a model wrote them.
    """
    found = []
    for prompt in prompts:
        ids = list(prompt)
        n_missing = n_tokens - len(prompt)
        if n_missing > 0:
            sampling = Sampling(temperature=1.0, seed=0)
            config = GenerationConfig(PaddedAutoregressive(), sampling=sampling)
            ids += token_ids(Request(pair, prompt, config, n_missing).decode())
        found.append(ids[:n_tokens])
    return found


# Twelve prompts: encyclopaedic, narrative, lists and code
BUILTIN = tuple(read_prompts(Path(__file__).with_name("prompts.jsonl")))
