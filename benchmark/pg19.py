"""Download of the beginnings of PG-19's test books (Rae et al. 2019), which no file stores.

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
N_BYTES = 40_000  # of each book, about ten thousand tokens
MAX_LISTING_BYTES = 2**22  # of the listing, which has a hundred names
TIMEOUT_S = 30.0  # without receiving a byte


def list_books() -> list[str]:
    """Return the names of the books in the bucket, such as test/10146.txt. Raises UsageError."""
    url = f"{HOST}/storage/v1/b/{BUCKET}/o?prefix={PREFIX}"
    try:
        names = [str(book["name"]) for book in json.loads(fetch(url, MAX_LISTING_BYTES))["items"]]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise fetch_error(f"{url} is not a listing of files: {error!r}") from error
    return [name for name in names if name.endswith(".txt")]


def fetch_opening(name: str) -> str:
    """Return the complete characters in the first N_BYTES of a book. Raises UsageError."""
    url = f"{HOST}/{BUCKET}/{quote(name)}"
    content = fetch(url, N_BYTES, {"Range": f"bytes=0-{N_BYTES - 1}"})
    try:
        text, _ = codecs.utf_8_decode(content)
    except UnicodeDecodeError as error:
        raise fetch_error(f"{url} is not UTF-8: {error}") from error
    return text


def fetch(url: str, max_bytes: int, headers: dict[str, str] | None = None) -> bytes:
    """Return the first bytes of a URL's content, at most max_bytes. Raises UsageError."""
    try:
        with urlopen(Request(url, headers=headers or {}), timeout=TIMEOUT_S) as response:
            content = response.read(max_bytes)  # a host may send more than the range of the headers
            if response.length and len(content) < max_bytes:  # the connection was lost
                raise IncompleteRead(content, response.length)
            return content
    except (OSError, HTTPException, ValueError) as error:  # ValueError for an invalid proxy address
        if isinstance(error, HTTPError):
            error.close()  # an HTTPError is a response, too
        raise fetch_error(f"{url} cannot be fetched: {error}") from error


def fetch_error(reason: str) -> UsageError:
    return UsageError(f"pg19: {reason}; use --dataset builtin or wikitext2, or --prompts FILE")
