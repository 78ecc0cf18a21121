"""Prompts to benchmark on: a dozen of our own, WikiText-2, PG-19, or a file of the user's.

No silent fallback: a dataset that cannot be had is an error that names the others.

    texts = load_prompts("wikitext2", None)
    texts = load_prompts("wikitext2-script", None)  # as DynaTree's own script has them
    prompts = cut_prompts(texts, tokenizer, vocab_size, n_tokens=150, n_prompts=8)

Our own are short. Where a length is asked for that they have not, the target can write them on:

    prompts = lengthened(prompts, pair, n_tokens=800)
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
from cli.models import Pair, Request, encode
from engine.checkpoint import CheckpointError, InvalidFile, hub_client, read_text
from engine.generation_config import GenerationConfig
from methods.sampler import Sampling
from methods.static import Alone

SCRIPT = "wikitext2-script"
DATASETS = ("builtin", "wikitext2", SCRIPT, "pg19")
WIKITEXT_REPOSITORY = "ggml-org/ci"
WIKITEXT_ZIP = "wikitext-2-raw-v1.zip"
WIKITEXT_FILE = "wikitext-2-raw/wiki.test.raw"  # the embedded pair has seen the validation split
SCRIPT_FILE = "wikitext-2-raw/wiki.valid.raw"
SCRIPT_CHARACTERS = 800  # that the script keeps of a text
SCRIPT_TEXTS = 10
BROKEN_ARCHIVE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, ValueError)
MAX_BYTES = 2**24  # of a file of prompts, which the tokenizer reads in some 15 seconds
SHORTEST = 200  # characters of a paragraph; shorter ones say too little to go on from


def load_prompts(dataset: str, file: str | None, n_books: int = 12) -> list[str]:
    """The texts of a dataset, or of a file if one is given.

    A .jsonl file has one {"prompt": ...} or {"turns": [...]} a line; any other is plain text, whose
    paragraphs of at least 200 characters count. Lines end at a line feed alone. n_books: how many
    of PG-19's are fetched, evenly spread over the hundred, each a request. Raises UsageError.
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
        return [fetch_opening(book) for book in spread(list_books(), n_books)]
    raise UsageError(f"unknown dataset {dataset!r}; there are {', '.join(DATASETS)}, or --prompts")


def read_prompts(file: Path) -> list[str]:
    """A file's prompts. Raises UsageError."""
    try:
        text = read_text(file, MAX_BYTES)
        if file.suffix.lower() == ".json":
            raise UsageError(f"{file} is JSON; use .jsonl, an object a line, or plain text")
        if file.suffix.lower() == ".jsonl":
            what = "line"
            lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
            texts = [prompt_of(line, f"{file}, line {n}") for n, line in lines]
        else:
            what = f"paragraph of {SHORTEST} characters or more"
            texts = paragraphs(text)
    except InvalidFile as error:
        raise UsageError(f"--prompts: {error}") from error
    if not texts:
        raise UsageError(f"{file} has no {what} to use as a prompt")
    return texts


def prompt_of(line: str, where: str) -> str:
    """Return the prompt in a line of a .jsonl file: its "prompt" or, as MT-bench and Spec-Bench
    have it, the first of its "turns". Raises InvalidFile."""
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
        raise InvalidFile(f"{where} has half of a surrogate pair, which is no text") from error
    return prompt


def paragraphs(text: str) -> list[str]:
    """Lines joined up to a blank line or a WikiText heading (" = Title = "), if long enough."""
    found = []
    lines = []
    for line in text.split("\n") + [""]:
        is_heading = line.startswith(" = ") and line.rstrip().endswith(" =")
        if line.strip() and not is_heading:
            lines.append(line.strip())
            continue
        found.append("\n".join(lines))
        lines = []
    return [paragraph for paragraph in found if len(paragraph) >= SHORTEST]


def script_prompts(text: str) -> list[str]:
    """The first SCRIPT_TEXTS of WikiText-2 as DynaTree's authors read it: what is too short is part
    of the next text, and characters are cut."""
    found = []
    joined = ""
    for line in text.split("\n") + [""]:
        if line.strip() and not line.startswith(" ="):
            joined += f" {line}\n"
        elif len(joined) >= SHORTEST:
            found.append(joined.strip()[:SCRIPT_CHARACTERS])
            joined = ""
    return found[:SCRIPT_TEXTS]


def _fetch_wikitext(file: str) -> str:
    """One of WikiText-2's raw texts, from the hub or the hub client's cache. Raises UsageError."""
    others = f"use --dataset {DATASETS[0]} or --prompts FILE"
    try:
        with hub_client("wikitext2"):
            from huggingface_hub import HfApi, hf_hub_download

            where = {"repo_id": WIKITEXT_REPOSITORY, "repo_type": "dataset"}
            commit = HfApi().resolve_revision(**where)  # a hub that is down says so at once
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
    shortest: int = 1,
) -> list[list[int]]:
    """n_prompts of the texts, evenly spread over them, as ids, each cut to n_tokens; as many as
    there are if they are fewer.

    shortest: texts of fewer tokens are left out first. Raises UsageError if none is left.
    """
    encoded = [encode(text, tokenizer, vocab_size) for text in texts]
    usable = [ids[:n_tokens] for ids in encoded if len(ids) >= shortest]
    if not usable:
        raise UsageError(f"the dataset has no prompt of {shortest} tokens or more")
    return spread(usable, n_prompts)


def spread(items: Sequence, n: int) -> list:
    """n of the items, evenly spread over them; all if they are fewer."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def lengthened(prompts: list[list[int]], pair: Pair, n_tokens: int) -> list[list[int]]:
    """Prompts of n_tokens: the shorter ones go on with what the target itself writes, sampled at
    temperature 1 from seed 0, so that they do not loop as its greedy text does.

    It is a model's text and no person's: a table made of it has to say so.
    """
    found = []
    for prompt in prompts:
        text = list(prompt)
        n_lacking = n_tokens - len(prompt)
        if n_lacking > 0:
            config = GenerationConfig(Alone(), sampling=Sampling(temperature=1.0, seed=0))
            text += token_ids(Request(pair, prompt, config, n_lacking).decode())
        found.append(text[:n_tokens])
    return found


# A dozen: encyclopaedic, narrative, list-like, code-like
BUILTIN = tuple(read_prompts(Path(__file__).with_name("prompts.jsonl")))
