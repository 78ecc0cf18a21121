"""Tests of prompts: files and PG-19 (WikiText-2: test_hub.py). A mistake is one UsageError."""

import json
import re
from collections.abc import Callable
from email.message import Message
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import TextIO
from urllib.error import HTTPError
from urllib.request import Request

import pytest
from pytest import MonkeyPatch
from small import TINY, Captured

from dynatree_lab.benchmark import prompts
from dynatree_lab.benchmark.prompts import cut_prompts, load_prompts, script_prompts
from dynatree_lab.cli.prompts import read_prompts, read_text
from dynatree_lab.errors import UsageError
from dynatree_lab.tokens import load_tokenizer

LONG = "word " * 50
WIKITEXT = f" \n = Title = \n \n {LONG}\n more of it \n \n = = Part = = \n \n short \n \n {LONG}\n"


OBJECTS = ["One.", "a\u2028b", "a\x85b", "\x1cc"]  # a JSON string may have what ends a line
TURNS = {"question_id": 81, "turns": ["First.", ""], "reference": []}
QUESTIONS = [f"What is {n} plus {n}?" for n in range(20)]
CODE = "def f(x):\n    return x"


def json_lines(*objects: object, end: str = "\n") -> str:
    return end.join(json.dumps(each, ensure_ascii=False) for each in objects)


@pytest.mark.parametrize(
    ("text", "prompts", "unit"),
    [
        (
            "\ufeff\n" + json_lines(*({"prompt": text} for text in OBJECTS), end="\r\n") + "\n\n",
            OBJECTS,
            "4 prompts, one per JSON object\n",
        ),
        (json_lines(TURNS, TURNS | {"prompt": "Ours."}), ["First.", "Ours."], "2 prompts, one per"),
        ("\n".join(QUESTIONS), QUESTIONS, "20 prompts, one per line; 12 of them are used"),
        ("\r\n".join(QUESTIONS[:2]) + "\r\n\r\n\n", QUESTIONS[:2], "2 prompts, one per line"),
        (
            f"Short.\n \n\n{CODE}\r\n\r\n{LONG}",
            ["Short.", CODE, LONG.rstrip()],
            "3 prompts, one per block",
        ),
        (f"{CODE}\n", CODE.split("\n"), "2 prompts, one per line"),
        ("[1] Name it.\n{x} is?", ["[1] Name it.", "{x} is?"], "2 prompts, one per line"),
        ('"Hm."\n\n"a\\nb"\n', ["Hm.", "a\nb"], "2 prompts, one per JSON string"),
        ('"Hm," he\n"Hm."\n', ['"Hm," he', '"Hm."'], "2 prompts, one per line"),
        ("\ufeffOne.\nTwo.", ["One.", "Two."], "2 prompts, one per line"),
        (WIKITEXT, [f"{LONG.strip()}\nmore of it", LONG.strip()], "one per paragraph of WikiText"),
    ],
)
def test_files(text: str, prompts: list[str], unit: str, tmp_path: Path, capsys: Captured) -> None:
    """Check lines of JSON, blocks between empty lines, however short, and lines where there is a
    single block."""
    file = tmp_path / "prompts"
    file.write_bytes(text.encode())
    assert load_prompts("builtin", str(file)) == prompts
    assert unit in capsys.readouterr().err


def test_prompts_of_the_authors_script() -> None:
    """Check that a short paragraph belongs to the next, and that there are ten prompts of 800
    characters."""
    assert script_prompts(WIKITEXT) == [f"{LONG}\n  more of it", f"short \n  {LONG.strip()}"]
    assert script_prompts(f" {'x' * 900} \n \n" * 12) == ["x" * 800] * 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\n", "has no prompt: it is empty"),
        (b" = Title = \n\nshort\n", "has no paragraph of at least 200 characters"),
        (b"\xe9" * 300, "is not UTF-8: "),
        (b'{"prompt": "x"}\n\nnot json\n', "line 3 is not JSON: "),
        (b'{"prompt": "x"\n', "line 1 is not JSON: "),
        (b'{"prompt": "x"}\n7\n', "line 2 has no text as `prompt`"),
        (b'"x"\n""\n', "line 2 has no text"),
        (b'{"turns": []}\n', "line 1 has no text"),
        (b'{"prompt": ""}\n', "line 1 has no text"),
        (b'[\n {"prompt": "x"}\n]\n', "is a JSON array; use one JSON object per line"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(f"{file}") + ".* " + re.escape(message)):
        load_prompts("builtin", str(file))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_prompts("builtin", str(tmp_path))


@pytest.mark.parametrize("stdin", [StringIO, lambda text: TextIOWrapper(BytesIO(text.encode()))])
def test_standard_input_of_a_terminal_and_of_a_notebook(
    stdin: Callable[[str], TextIO], monkeypatch: MonkeyPatch
) -> None:
    """Check a StringIO, which has no bytes, and that both drop a byte order mark."""
    monkeypatch.setattr("sys.stdin", stdin("\ufeffÉté\r\n"))
    assert read_text("-") == "Été"
    monkeypatch.setattr("sys.stdin", stdin("\ufeffÉté\nTwo\n"))
    assert read_prompts(Path("-"))[0] == [{"prompt": "Été"}, {"prompt": "Two"}]
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="- is standard input, which is closed; use a file"):
        read_text("-")


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("The ship\n", encoding="utf-8-sig")
    assert read_text(str(tmp_path / "prompt")) == "The ship"


def test_cut_prompts_are_spread_over_the_dataset() -> None:
    tokenizer = load_tokenizer(TINY / "target")
    texts = [f"{word} and again {word}" * 3 for word in ("one", "two", "six", "ten")]
    whole = [tokenizer.encode(text).ids for text in texts]
    cut = cut_prompts(whole, n_tokens=5, n_prompts=2)
    assert cut == [whole[0][:5], whole[2][:5]]
    assert cut_prompts(whole, 999, 9) == whole, "all there are"
    long = max(whole, key=len)
    assert cut_prompts(whole, 999, 1, min_tokens=len(long)) == [long]


def test_openings_of_books(monkeypatch: MonkeyPatch) -> None:
    """Check that each has at most PG19_BYTES, even if the host sends the whole file, and no partial
    character. n_prompts limits the books. An error has the address and the other datasets."""
    books = {"1.txt": b"One. " * 9, "2.txt": "ééé".encode(), "3.txt": b"Three."}
    names = [{"name": f"test/{name}"} for name in ("", *books)]
    pages = {f"{prompts.PG19_HOST}/deepmind-gutenberg/test/{name}": books[name] for name in books}
    listing = f"{prompts.PG19_HOST}/storage/v1/b/deepmind-gutenberg/o?prefix=test/"
    pages[listing] = json.dumps({"items": names}).encode()
    requests = []

    def urlopen(request: Request, timeout: float) -> BytesIO:
        requests.append((request.full_url, request.get_header("Range")))
        if request.full_url not in pages:
            raise HTTPError(request.full_url, 404, "Not Found", Message(), None)
        return BytesIO(pages[request.full_url])

    monkeypatch.setattr(prompts, "urlopen", urlopen)
    monkeypatch.setattr(prompts, "PG19_BYTES", 5)
    assert load_prompts("pg19", None) == ["One. ", "éé", "Three"]
    assert load_prompts("pg19", None, n_prompts=2) == ["One. ", "éé"]
    assert requests[:4] == [(listing, None), *((page, "bytes=0-4") for page in [*pages][:3])]
    del pages[requests[2][0]]
    with pytest.raises(UsageError, match="2.txt cannot be fetched: HTTP Error 404.*--prompts FILE"):
        load_prompts("pg19", None)
