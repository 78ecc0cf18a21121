"""Prompts of the benchmark: twelve builtin ones, WikiText-2, PG-19, or a file of the user's.

A dataset that cannot be fetched is an error that names the alternatives.

    texts = load_prompts("wikitext2", None)
    texts = load_prompts("wikitext2-script", None)  # as the script of DynaTree's authors reads them
    ids = encode_valid(texts, tokenizer, n_ids=4096)
    prompts = cut_prompts(ids, n_tokens=150, n_prompts=8)
"""

import codecs
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

from tokenizers import Tokenizer

from dynatree_lab.cli.program import print_line
from dynatree_lab.cli.prompts import MIN_PARAGRAPH, paragraphs, read_prompts
from dynatree_lab.engine.checkpoint import CheckpointError, convert_hub_errors
from dynatree_lab.errors import UsageError
from dynatree_lab.tokens import encode_prompt

SCRIPT = "wikitext2-script"
DATASETS = ("builtin", "wikitext2", SCRIPT, "pg19")
WIKITEXT_REPOSITORY = "ggml-org/ci"
WIKITEXT_ZIP = "wikitext-2-raw-v1.zip"
WIKITEXT_FILE = "wikitext-2-raw/wiki.test.raw"  # the embedded pair was trained on wiki.valid.raw
SCRIPT_FILE = "wikitext-2-raw/wiki.valid.raw"
SCRIPT_CHARACTERS = 800  # to which the authors' script cuts a text
SCRIPT_TEXTS = 10
PG19_BUCKET = "deepmind-gutenberg"
PG19_HOST = "https://storage.googleapis.com"
PG19_BYTES = 40_000  # of each test book (Rae et al. 2019), about ten thousand tokens
TIMEOUT_S = 30.0  # without receiving a byte


def load_prompts(dataset: str, file: str | None, n_prompts: int = 12) -> list[str]:
    """Return the prompts of a dataset, or of a file if one is given, and print how many a file has.
    Raises UsageError.

    n_prompts: how many will be used; of PG-19's hundred books as many are fetched, evenly spaced.
    """
    if file is not None:
        found, unit = read_prompts(Path(file))
        texts = [prompt["prompt"] for prompt in found]
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


def list_books() -> list[str]:
    """Return the names of the test books, such as test/10146.txt. Raises UsageError."""
    listing = json.loads(fetch_url(f"{PG19_HOST}/storage/v1/b/{PG19_BUCKET}/o?prefix=test/"))
    names = [book["name"] for book in listing["items"]]
    return [name for name in names if name.endswith(".txt")]


def fetch_opening(name: str) -> str:
    """Return the complete characters in the first PG19_BYTES of a book. Raises UsageError."""
    beginning = {"Range": f"bytes=0-{PG19_BYTES - 1}"}
    content = fetch_url(f"{PG19_HOST}/{PG19_BUCKET}/{quote(name)}", beginning)
    text, _ = codecs.utf_8_decode(content[:PG19_BYTES])  # a host may send the whole file
    return text


def fetch_url(url: str, headers: dict[str, str] | None = None) -> bytes:
    """Return the content of a URL. Raises UsageError."""
    try:
        with urlopen(Request(url, headers=headers or {}), timeout=TIMEOUT_S) as response:
            return response.read()
    except OSError as error:
        others = "use --dataset builtin or wikitext2, or --prompts FILE"
        raise UsageError(f"pg19: {url} cannot be fetched: {error}; {others}") from error


def encode_valid(texts: Sequence[str], tokenizer: Tokenizer, n_ids: int) -> list[list[int]]:
    """Return the ids of the texts that are valid prompts. Print a line for each other one. n_ids:
    the target's V."""
    found = []
    for i, text in enumerate(texts, start=1):
        try:
            found.append(encode_prompt(text, tokenizer, n_ids))
        except UsageError as error:
            print_line(f"error: prompt {i} of {len(texts)}: {error}")
    return found


def cut_prompts(
    encoded: Sequence[list[int]], n_tokens: int, n_prompts: int, min_tokens: int = 1
) -> list[list[int]]:
    """Return the ids of n_prompts texts, or of all if there are fewer, each cut to n_tokens.

    They are evenly spaced among the texts of at least min_tokens. Raises UsageError if there is no
    such text.
    """
    usable = [ids[:n_tokens] for ids in encoded if len(ids) >= min_tokens]
    if not usable:
        raise UsageError(f"the dataset has no prompt of {min_tokens} tokens or more")
    return pick_evenly(usable, n_prompts)


def pick_evenly(items: Sequence, n: int) -> list:
    """Return n evenly spaced items, or all if there are fewer."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


# Twelve prompts: encyclopaedic, narrative, lists and code
FILE_OF_BUILTIN = Path(__file__).with_name("prompts.jsonl")
BUILTIN = tuple(prompt["prompt"] for prompt in read_prompts(FILE_OF_BUILTIN)[0])
