"""Prompts: our own, files', PG-19's (WikiText-2: test_hub.py); each mistake is one UsageError."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from conftest import TINY, random_model
from pytest import MonkeyPatch

from benchmark import pg19
from benchmark.prompts import (
    BUILTIN,
    cut_prompts,
    lengthened,
    load_prompts,
    paragraphs,
    script_prompts,
    spread,
)
from cli.errors import UsageError
from cli.models import Pair, load_tokenizer

LONG = "word " * 50
WIKITEXT = f" \n = Title = \n \n {LONG}\n more of it \n \n = = Part = = \n \n short \n \n {LONG}\n"


def test_a_dozen_different_prompts_of_our_own() -> None:
    assert len(set(BUILTIN)) == 12 and min(map(len, BUILTIN)) >= 150
    assert load_prompts("builtin", None) == list(BUILTIN)


def test_files(tmp_path: Path) -> None:
    """Lines end at line feeds alone: U+2028, U+0085, a form feed may stand inside a JSON text."""
    texts = ["One.", "a\u2028b", "a\x85b", "\x1cc"]
    lines = [json.dumps({"prompt": text, "id": 3}, ensure_ascii=False) for text in texts]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n\n")
    assert load_prompts("builtin", str(file)) == texts
    text = tmp_path / "book.txt"
    text.write_text(f"Short.\n\n{LONG}\n\n{LONG}end\n")
    assert load_prompts("builtin", str(text)) == [LONG.strip(), f"{LONG}end"]


def test_paragraphs_are_joined_up_to_a_blank_line_or_a_heading() -> None:
    assert paragraphs(WIKITEXT) == [f"{LONG.strip()}\nmore of it", LONG.strip()]
    assert paragraphs("a\nb\n") == []
    assert paragraphs(f"{LONG}\u2028{LONG}\n") == [f"{LONG}\u2028{LONG}".strip()]


def test_texts_as_dynatrees_own_script_has_them() -> None:
    """A short one belongs to the next, 800 characters of each, ten of them."""
    assert script_prompts(WIKITEXT) == [f"{LONG}\n  more of it", f"short \n  {LONG.strip()}"]
    many = script_prompts(f" {'x' * 900} \n \n" * 12)
    assert many == ["x" * 800] * 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "no paragraph of 200 characters"),
        ("empty.jsonl", b"\n\n", "no line to use"),
        ("latin.txt", b"\xe9" * 300, "not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\nnot json\n', "a.jsonl, line 2"),
        ("b.jsonl", b"[1]\n", "b.jsonl, line 1: "),
        ("c.jsonl", b'{"text": "x"}\n', "line 1: .* field `prompt`"),
        ("d.JSONL", b'{"prompt": ""}\n', "line 1: "),
        ("g.jsonl", b'{"prompt": ' + b"[" * 100_000 + b"\n", "line 1: "),
        ("h.jsonl", b'{"prompt": "a\\ud800"}\n', "line 1"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_prompts("builtin", str(tmp_path / name))


def test_what_is_no_file_or_dataset(tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    large.touch()
    os.truncate(large, 2**24 + 1)
    with pytest.raises(UsageError, match="larger than 16.8 MB"):
        load_prompts("builtin", str(large))
    with pytest.raises(UsageError, match="unknown dataset 'c4'; there are builtin, wikitext2, "):
        load_prompts("c4", None)


def test_cut_prompts_are_spread_over_the_dataset() -> None:
    tokenizer = load_tokenizer(TINY / "target")
    texts = [f"{word} and again {word}" * 3 for word in ("one", "two", "six", "ten")]
    whole = [tokenizer.encode(text).ids for text in texts]
    cut = cut_prompts(texts, tokenizer, 4096, n_tokens=5, n_prompts=2)
    assert cut == [whole[0][:5], whole[2][:5]]
    assert cut_prompts(texts, tokenizer, 4096, 999, 9) == whole, "all there are"
    long = max(map(len, whole))
    longest = [ids for ids in whole if len(ids) == long]
    assert cut_prompts(texts, tokenizer, 4096, long, 4, shortest=long) == longest
    with pytest.raises(UsageError, match="the dataset has no prompt of 99 tokens or more"):
        cut_prompts(texts, tokenizer, 4096, 99, 1, shortest=99)
    assert spread("abcdefgh", 3) == ["a", "c", "f"] and spread("ab", 3) == ["a", "b"]


def test_a_short_prompt_goes_on_with_what_the_target_samples() -> None:
    pair = Pair(random_model(0), random_model(1), None, Path(), None, {})
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7]]
    short, long, other = lengthened(prompts, pair, 8)
    assert short[:3] == [3, 1, 4] and len(short) == 8
    assert long == [1, 5, 9, 2, 6, 5, 3, 5], "cut, as any prompt"
    assert other[:2] == [2, 7] and len(other) == 8
    assert lengthened(prompts, pair, 8) == [short, long, other], "the same every time"
    assert lengthened([[3, 1, 4]], pair, 20)[0][:8] == short, "a longer one begins as a shorter"


BOOKS = {"test/1.txt": b"One. " * 9, "test/2.txt": "ééé".encode(), "test/3.txt": b"Three."}


class Bucket(ThreadingHTTPServer):
    """As much of the host of PG-19 as is asked for, and its failures."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BucketHandler)
        self.answers: dict[str, bytes] = dict(BOOKS)  # by path; others are 404
        names = [{"name": name} for name in ("test/", *BOOKS)]
        self.answers["storage/v1/b/deepmind-gutenberg/o"] = json.dumps({"items": names}).encode()
        self.is_whole = False  # parts are not to be had
        self.n_lacking = 0  # bytes that every answer is short of


class BucketHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        bucket: Bucket = self.server
        url = urlsplit(self.path)
        body = bucket.answers.get(url.path.removeprefix("/").removeprefix("deepmind-gutenberg/"))
        if body is None:
            return self.send_error(404)
        if url.query:
            assert parse_qs(url.query) == {"prefix": ["test/"]}
        elif not bucket.is_whole:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            body = body[int(first) : int(last) + 1]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + bucket.n_lacking))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def bucket(monkeypatch: MonkeyPatch) -> Iterator[Bucket]:
    with Bucket() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(pg19, "HOST", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        server.shutdown()


@pytest.mark.parametrize("is_whole", [False, True])
def test_openings_of_books(bucket: Bucket, is_whole: bool, monkeypatch: MonkeyPatch) -> None:
    """So many bytes of each and no half character, also from a host that sends all the same."""
    bucket.is_whole = is_whole
    monkeypatch.setattr(pg19, "N_BYTES", 5)
    assert load_prompts("pg19", None) == ["One. ", "éé", "Three"]
    assert load_prompts("pg19", None, n_books=2) == ["One. ", "éé"]


def test_books_that_cannot_be_had(bucket: Bucket, monkeypatch: MonkeyPatch) -> None:
    """Each is one line that names where and the other datasets."""

    def error() -> str:
        with pytest.raises(UsageError) as found:
            load_prompts("pg19", None)
        line = str(found.value)
        assert line.startswith(f"pg19: {pg19.HOST}/") and "\n" not in line
        assert line.endswith("; use --dataset builtin or wikitext2, or --prompts FILE")
        return line

    bucket.n_lacking = 3
    assert "cannot be fetched: IncompleteRead" in error()
    bucket.n_lacking = 0
    bucket.answers["test/2.txt"] = b"\xe9\xe9\xe9\xe9"
    assert "/deepmind-gutenberg/test/2.txt is not UTF-8" in error()
    del bucket.answers["test/2.txt"]
    assert "test/2.txt cannot be fetched: HTTP Error 404" in error()
    for listing in (b"<html>sign in</html>", b"[]", b"\xff"):
        bucket.answers["storage/v1/b/deepmind-gutenberg/o"] = listing
        assert "prefix=test/" in error()
    monkeypatch.setattr(pg19, "HOST", "http://127.0.0.1:1")
    assert "Connection refused" in error()


def test_a_silent_host(monkeypatch: MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BucketHandler) as server:  # accepts, answers nothing
        monkeypatch.setattr(pg19, "HOST", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(pg19, "TIMEOUT_S", 0.05)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(UsageError, match="timed out; use --dataset builtin"):
            load_prompts("pg19", None)
