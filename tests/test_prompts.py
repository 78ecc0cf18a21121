"""Prompts: our own and of files (WikiText-2: test_hub.py); every mistake is one UsageError."""

import json
from pathlib import Path

import pytest
from conftest import TINY

from benchmark.prompts import BUILTIN, cut_prompts, load_prompts, paragraphs
from cli.errors import UsageError
from cli.models import load_tokenizer

LONG = "word " * 50
WIKITEXT = f" \n = Title = \n \n {LONG}\n more of it \n \n = = Part = = \n \n short \n \n {LONG}\n"


def test_a_dozen_different_prompts_of_our_own() -> None:
    assert len(set(BUILTIN)) == 12 and min(map(len, BUILTIN)) >= 150
    assert load_prompts("builtin", None) == list(BUILTIN)


def test_paragraphs_are_joined_up_to_a_blank_line_or_a_heading() -> None:
    assert paragraphs(WIKITEXT) == [f"{LONG.strip()}\nmore of it", LONG.strip()]
    assert paragraphs("a\nb\n") == []


def test_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "One.", "id": 3}) + "\n\n" + '{"prompt": "Two."}\n')
    assert load_prompts("builtin", str(lines)) == ["One.", "Two."]
    text = tmp_path / "book.txt"
    text.write_text(f"Short.\n\n{LONG}\n\n{LONG}end\n")
    assert load_prompts("builtin", str(text)) == [LONG.strip(), f"{LONG}end"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "no paragraph of 200 characters"),
        ("empty.jsonl", b"\n\n", "no line to use"),
        ("latin.txt", b"\xe9" * 300, "not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}\nnot json\n', "line 2: not a JSON object"),
        ("b.jsonl", b"[1]\n", "line 1: not a JSON object"),
        ("c.jsonl", b'{"text": "x"}\n', "line 1: not a JSON object with"),
        ("d.jsonl", b'{"prompt": ""}\n', "is not a text, or empty"),
        ("e.jsonl", b'{"prompt": 3}\n', "is not a text, or empty"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_prompts("builtin", str(tmp_path / name))


def test_no_such_file_or_dataset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_prompts("builtin", str(tmp_path / "none.txt"))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_prompts("builtin", str(tmp_path))
    with pytest.raises(UsageError, match="unknown dataset 'pg19'; there are builtin, wikitext2"):
        load_prompts("pg19", None)


def test_cut_prompts_are_spread_over_the_dataset() -> None:
    tokenizer = load_tokenizer(TINY / "target")
    texts = [f"{word} and again {word}" * 3 for word in ("one", "two", "six", "ten")]
    whole = [tokenizer.encode(text).ids for text in texts]
    cut = cut_prompts(texts, tokenizer, 4096, n_tokens=5, n_prompts=2)
    assert cut == [whole[0][:5], whole[2][:5]]
    assert cut_prompts(texts, tokenizer, 4096, 999, 4) == whole
    with pytest.raises(UsageError, match="5 prompts are needed, the dataset has 4"):
        cut_prompts(texts, tokenizer, 4096, 5, 5)
    with pytest.raises(UsageError, match="1 prompts of 99 or more tokens are needed"):
        cut_prompts(texts, tokenizer, 4096, 99, 1, shortest=99)
