"""PG-19's test books (Rae et al. 2019), as much of them as a prompt needs; kept in no file.

texts = [fetch_opening(book) for book in list_books()[:12]]
"""

import codecs
import json
from http.client import HTTPException, IncompleteRead
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from cli.errors import UsageError

BUCKET = "deepmind-gutenberg"
HOST = "https://storage.googleapis.com"
PREFIX = "test/"
N_BYTES = 40_000  # of each book, some ten thousand tokens
LISTING_BYTES = 2**22  # at most; it has a hundred names
TIMEOUT_S = 30.0  # without a byte


def list_books() -> list[str]:
    """Return the names of the books in the bucket, as test/10146.txt. Raises UsageError."""
    where = f"{HOST}/storage/v1/b/{BUCKET}/o?prefix={PREFIX}"
    try:
        names = [str(book["name"]) for book in json.loads(fetch(where, LISTING_BYTES))["items"]]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise failure(f"{where} is no listing of files: {error!r}") from error
    return [name for name in names if name.endswith(".txt")]


def fetch_opening(name: str) -> str:
    """The whole characters of a book's first N_BYTES."""
    where = f"{HOST}/{BUCKET}/{quote(name)}"
    content = fetch(where, N_BYTES, {"Range": f"bytes=0-{N_BYTES - 1}"})
    try:
        text, _ = codecs.utf_8_decode(content)
    except UnicodeDecodeError as error:
        raise failure(f"{where} is not UTF-8: {error}") from error
    return text


def fetch(where: str, limit: int, headers: dict[str, str] | None = None) -> bytes:
    """The first bytes of what lies at an address, `limit` at most. Raises UsageError."""
    try:
        with urlopen(Request(where, headers=headers or {}), timeout=TIMEOUT_S) as answer:
            content = answer.read(limit)  # a host may send more than it is asked for
            if answer.length and len(content) < limit:  # left when it went away
                raise IncompleteRead(content, answer.length)
            return content
    except (OSError, HTTPException, ValueError) as error:  # the last: of a proxy's address
        if isinstance(error, HTTPError):
            error.close()  # it is an answer, too
        raise failure(f"{where} cannot be fetched: {error}") from error


def failure(what: str) -> UsageError:
    return UsageError(f"pg19: {what}; use --dataset builtin or wikitext2, or --prompts FILE")
