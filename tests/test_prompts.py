"""Tests of prompts: files and PG-19 (WikiText-2: test_hub.py). A mistake is one UsageError."""

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import TINY, Captured
from pytest import MonkeyPatch

from benchmark import pg19
from benchmark.prompts import cut_prompts, load_prompts, paragraphs, script_prompts
from cli.errors import UsageError
from cli.models import load_tokenizer

LONG = "word " * 50
WIKITEXT = f" \n = Title = \n \n {LONG}\n more of it \n \n = = Part = = \n \n short \n \n {LONG}\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.txt", "a"])
def test_lines_of_json(name: str, tmp_path: Path, capsys: Captured) -> None:
    """Check that content decides and not the name, and that only line feeds end a line: a JSON
    string may contain U+2028, U+0085 or U+001C."""
    texts = ["One.", "a\u2028b", "a\x85b", "\x1cc"]
    lines = [json.dumps({"prompt": text, "id": 3}, ensure_ascii=False) for text in texts]
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf\n" + "\r\n".join(lines).encode() + b"\n\n")
    assert load_prompts("builtin", str(file)) == texts
    note = f"note: {file} has 4 prompts, one per JSON object"
    assert capsys.readouterr().err == f"{note}\n"
    assert load_prompts("builtin", str(file), n_prompts=3) == texts
    assert capsys.readouterr().err == f"{note}; 3 of them are used\n"
    turns = {"question_id": 81, "turns": ["First.", ""], "reference": []}
    file.write_text(json.dumps(turns) + "\n" + json.dumps(turns | {"prompt": "Ours."}))
    assert load_prompts("builtin", str(file)) == ["First.", "Ours."]


QUESTIONS = [f"What is {n} plus {n}?" for n in range(20)]
CODE = "def f(x):\n    return x"


@pytest.mark.parametrize(
    ("text", "prompts", "unit"),
    [
        ("\n".join(QUESTIONS), QUESTIONS, "20 prompts, one per line; 12 of them are used"),
        ("\r\n".join(QUESTIONS[:2]) + "\r\n\r\n\n", QUESTIONS[:2], "2 prompts, one per line"),
        (
            f"Short.\n \n\n{CODE}\r\n\r\n{LONG}",
            ["Short.", CODE, LONG.rstrip()],
            "3 prompts, one per block",
        ),
        (f"{CODE}\n", CODE.split("\n"), "2 prompts, one per line"),
        ("[1] Name it.\n{x} is?", ["[1] Name it.", "{x} is?"], "2 prompts, one per line"),
        (WIKITEXT, [f"{LONG.strip()}\nmore of it", LONG.strip()], "one per paragraph of WikiText"),
    ],
)
def test_plain_text(
    text: str, prompts: list[str], unit: str, tmp_path: Path, capsys: Captured
) -> None:
    """Check blocks between empty lines, however short, and lines where there is a single block."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text.encode())
    assert load_prompts("builtin", str(file)) == prompts
    assert unit in capsys.readouterr().err


def test_paragraphs_are_joined_up_to_a_blank_line_or_a_heading() -> None:
    """Check also the prompts of DynaTree's own script: a short paragraph belongs to the next, and
    there are ten prompts of 800 characters."""
    assert paragraphs(WIKITEXT) == [f"{LONG.strip()}\nmore of it", LONG.strip()]
    assert script_prompts(WIKITEXT) == [f"{LONG}\n  more of it", f"short \n  {LONG.strip()}"]
    assert script_prompts(f" {'x' * 900} \n \n" * 12) == ["x" * 800] * 10


OBJECT = b'{"prompt": "x"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\n", "has no prompt: it is empty"),
        (b"\xe9" * 300, "is not UTF-8 text: "),
        (OBJECT + b"\nnot json\n", "line 3 is not JSON: "),
        (b'{"prompt": "x"\n' + OBJECT, "line 1 is not JSON: "),
        (OBJECT + b'"x"\n', "line 2 has no text as `prompt`"),
        (b'{"text": "x"}\n', "line 1 has no text as `prompt`"),
        (b'{"turns": []}\n', "line 1 has no text"),
        (b'{"prompt": 3}\n', "line 1 has no text"),
        (b'{"prompt": ""}\n', "line 1 has no text"),
        (b'["x"]', "is JSON; use one JSON object per line, or plain text"),
        (b'[\n {"prompt": "x"}\n]\n', "is JSON; use one JSON object per line"),
        (b'{\n "prompt": "x"\n}\n', "is JSON; use one JSON object per line"),
        (b"PAR1\x15\x04", "is Parquet; use one JSON object per line"),
        (b"\x1f\x8b\x08", "is gzip; use one JSON object per line"),
        (b"\n<!DOCTYPE html>\n", "is HTML; use one JSON object per line"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(f"{file}") + ".* " + re.escape(message)):
        load_prompts("builtin", str(file))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_prompts("builtin", str(tmp_path))


def test_cut_prompts_are_spread_over_the_dataset() -> None:
    tokenizer = load_tokenizer(TINY / "target")
    texts = [f"{word} and again {word}" * 3 for word in ("one", "two", "six", "ten")]
    whole = [tokenizer.encode(text).ids for text in texts]
    cut = cut_prompts(texts, tokenizer, n_tokens=5, n_prompts=2)
    assert cut == [whole[0][:5], whole[2][:5]]
    assert cut_prompts(texts, tokenizer, 999, 9) == whole, "all there are"
    long = max(whole, key=len)
    assert cut_prompts(texts, tokenizer, 999, 1, min_tokens=len(long)) == [long]


class Bucket(SimpleHTTPRequestHandler):
    """A stand-in for PG-19's host. It answers a request for a part with the whole file, as a host
    may."""

    requests: list[tuple[str, str | None]] = []  # path and range

    def log_message(self, *_: object) -> None:
        self.requests.append((self.path, self.headers["Range"]))


LISTING = "storage/v1/b/deepmind-gutenberg/o"
BOOKS = {"test/1.txt": b"One. " * 9, "test/2.txt": "ééé".encode(), "test/3.txt": b"Three."}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Path]:
    """Start the host and return the folder that it serves."""
    (tmp_path / LISTING).parent.mkdir(parents=True)
    (tmp_path / "deepmind-gutenberg" / "test").mkdir(parents=True)
    names = [{"name": name} for name in ("test/", *BOOKS)]
    (tmp_path / LISTING).write_text(json.dumps({"items": names}))
    for name, content in BOOKS.items():
        (tmp_path / "deepmind-gutenberg" / name).write_bytes(content)
    monkeypatch.setattr(Bucket, "requests", [])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    handler = partial(Bucket, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(pg19, "HOST", f"http://127.0.0.1:{server.server_port}")
        yield tmp_path
        server.shutdown()


def test_openings_of_books(bucket: Path, monkeypatch: MonkeyPatch) -> None:
    """Check that each has at most N_BYTES, no partial character, and n_prompts limits the books. An
    error has the address and the other datasets."""
    monkeypatch.setattr(pg19, "N_BYTES", 5)
    assert load_prompts("pg19", None) == ["One. ", "éé", "Three"]
    assert load_prompts("pg19", None, n_prompts=2) == ["One. ", "éé"]
    listing, *books = Bucket.requests[:4]
    assert listing == (f"/{LISTING}?prefix=test/", None)
    assert books == [(f"/deepmind-gutenberg/{name}", "bytes=0-4") for name in BOOKS]
    (bucket / "deepmind-gutenberg" / "test" / "2.txt").unlink()
    with pytest.raises(UsageError, match="2.txt cannot be fetched: HTTP Error 404.*--prompts FILE"):
        load_prompts("pg19", None)
