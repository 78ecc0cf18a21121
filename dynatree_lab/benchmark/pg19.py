"""Download of the beginnings of PG-19's test books (Rae et al. 2019), which no file stores.

texts = [fetch_opening(book) for book in list_books()[:12]]
"""

import codecs
import json
from urllib.parse import quote
from urllib.request import Request, urlopen

from dynatree_lab.cli.errors import UsageError

BUCKET = "deepmind-gutenberg"
HOST = "https://storage.googleapis.com"
N_BYTES = 40_000  # of each book, about ten thousand tokens
TIMEOUT_S = 30.0  # without receiving a byte


def list_books() -> list[str]:
    """Return the names of the test books, such as test/10146.txt. Raises UsageError."""
    listing = json.loads(fetch(f"{HOST}/storage/v1/b/{BUCKET}/o?prefix=test/"))
    names = [book["name"] for book in listing["items"]]
    return [name for name in names if name.endswith(".txt")]


def fetch_opening(name: str) -> str:
    """Return the complete characters in the first N_BYTES of a book. Raises UsageError."""
    content = fetch(f"{HOST}/{BUCKET}/{quote(name)}", {"Range": f"bytes=0-{N_BYTES - 1}"})
    text, _ = codecs.utf_8_decode(content[:N_BYTES])  # a host may send the whole file
    return text


def fetch(url: str, headers: dict[str, str] | None = None) -> bytes:
    """Return the content of a URL. Raises UsageError."""
    try:
        with urlopen(Request(url, headers=headers or {}), timeout=TIMEOUT_S) as response:
            return response.read()
    except OSError as error:
        others = "use --dataset builtin or wikitext2, or --prompts FILE"
        raise UsageError(f"pg19: {url} cannot be fetched: {error}; {others}") from error
