"""Tests of the ids of a prompt, and of text that is printed or stopped while it is generated."""

import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from small import TINY, Captured, error_line
from test_program import write_first_token
from tokenizers import Tokenizer, decoders, models

import dynatree
import dynatree_lab.cli.main
from dynatree_lab.benchmark import measure
from dynatree_lab.benchmark.prompts import BUILTIN, encode_valid
from dynatree_lab.benchmark.results import load
from dynatree_lab.errors import UsageError
from dynatree_lab.pair import load_pair
from dynatree_lab.result import Session, write_text
from dynatree_lab.tokens import LONG, StopTexts, TextStream, load_tokenizer
from dynatree_lab.training.distil import read_ids
from gpt_neox import read_config

PROMPT = "The ship sailed at dawn"
TEXT = "naïve café — “quoted” 日本語 🚢🌊 ok"
WORDS = ("▁the", "▁sea", "▁", "é", "s", "\ufffd", "日", "<unk>")
EMBEDDED = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
SHIP = list("🚢".encode())  # four ids of a tokenizer whose first 256 ids are the bytes


# The ids of prompts


@pytest.fixture
def with_first_token(tmp_path: Path) -> Path:
    """Return a folder of the embedded draft whose tokenizer begins a sequence with token 7."""
    return write_first_token(tmp_path / "model")


def test_every_program_encodes_a_prompt_as_the_post_processor_says(
    with_first_token: Path, capsys: Captured
) -> None:
    """Compare with the text of dynatree.py, and check the ids of the benchmark."""
    folder = str(with_first_token)
    words = ["--prompt", PROMPT, "--method", "ar", "--max-new-tokens", "9", "--target", folder]
    texts = []
    for main in (dynatree.main, dynatree_lab.cli.main.main):
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    tokenizer = load_tokenizer(with_first_token)
    assert encode_valid([PROMPT], tokenizer, 4096) == [[7, *EMBEDDED.encode(PROMPT).ids]]


def test_nothing_is_added_inside_a_text(with_first_token: Path, tmp_path: Path) -> None:
    """Check the texts that a draft learns from, which are encoded in pieces."""
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    ids = read_ids([str(text)], with_first_token, read_config(with_first_token))
    assert ids.tolist() == [0, *EMBEDDED.encode(PROMPT).ids]  # 0 ends the text before


def test_a_prompt_of_only_an_added_token_is_empty(
    with_first_token: Path, capsys: Captured, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    models = ["--target", str(with_first_token), "--draft", str(with_first_token)]
    words = ["--prompt-file", str(tmp_path / "empty.txt"), *models]
    line = error_line(capsys, dynatree_lab.cli.main.main, words)
    assert line.endswith("empty: it has no tokens")
    assert not encode_valid([""], load_tokenizer(with_first_token), 4096)
    assert "error: prompt 1 of 1: the prompt is empty: it has no" in capsys.readouterr().err


def test_a_token_that_the_target_was_not_resized_for(capsys: Captured, tmp_path: Path) -> None:
    """Check that the line names prompt and token, in a text, in the benchmark and in training, and
    that the other prompts run."""
    folder, file = tmp_path / "model", tmp_path / "prompts.txt"
    shutil.copytree(TINY / "draft", folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    file.write_text(f"{PROMPT}\nA <new> text\nAnother one")
    line = "token '<new>' has id 4096, and the target has only 4096 ids; leave it out"
    words = ["--prompts", str(file), "--target", str(folder), "--max-new-tokens", "2"]
    assert dynatree_lab.cli.main.main([*words, "--method", "ar", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == captured.err.count(f"prompt 2 of 3: {line}\n") == 1
    assert ["error" in json.loads(each) for each in captured.out.splitlines()] == [0, 1, 0]
    results = tmp_path / "results.jsonl"
    assert measure.main([*words, "--methods", "ar", "--output", str(results)]) == 2
    assert f"error: prompt 2 of 3: {line}\n" in capsys.readouterr().err
    assert len(load(results).texts) == 2
    session = Session(load_pair(folder, None))
    session.write(PROMPT, "ar", 2)
    for write in (session.write, partial(write_text, session.pair)):
        with pytest.raises(UsageError, match="<new>"):
            write("A <new> text", "ar")
    with pytest.raises(UsageError, match="<new>"):
        read_ids([str(file)], folder, read_config(folder))


def test_the_ids_of_the_builtin_prompts_stay() -> None:
    """Check that no change of encoding changes what committed results measured."""
    ids = encode_valid(BUILTIN, load_tokenizer(TINY / "target"), 4096)
    assert hashlib.sha256(repr(ids).encode()).hexdigest()[:16] == "da718626592811cd"


# Text while it is generated


def tokenizer_of(decoder: decoders.Decoder, *tokens: str) -> Tokenizer:
    """Return a tokenizer of some tokens, WORDS and a special token."""
    vocabulary = {token: i for i, token in enumerate([*tokens, *WORDS])}
    found = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    found.decoder = decoder
    found.add_special_tokens(["<s>"])
    return found


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
STEPS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {  # a sentencepiece model saved as tokenizer.json has one of the first two decoders
    "byte fallback": tokenizer_of(decoders.Sequence([*STEPS, decoders.Strip(" ", 1, 0)]), *BYTES),
    "byte fallback, unstripped": tokenizer_of(decoders.Sequence(STEPS), *BYTES),
    "metaspace": tokenizer_of(decoders.Metaspace()),
    "byte level": EMBEDDED,
}


def streamed(parts: Sequence[list[int]], tokenizer: Tokenizer) -> str:
    """Return the text that is printed for ids in these parts."""
    stream = TextStream(tokenizer)
    return "".join([*map(stream.push, parts), stream.finish()])


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Return ids of which many are single bytes, some have no text, and one lacks a token."""
    n_ids = tokenizer.get_vocab_size() + 1
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    found: list[int] = []
    for _ in range(rng.randint(1, 60)):
        kind = rng.random()
        if kind < 0.3:
            found += tokenizer.encode(rng.choice(TEXT.split()), add_special_tokens=False).ids
        elif kind < 0.7:
            found.append(rng.randrange(min(256, n_ids)))
        elif kind < 0.8:
            found += rng.choices([*special, n_ids - 1], k=rng.randint(1, 9))
        else:
            found.append(rng.randrange(n_ids))
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_parts_of_a_text_are_its_decoded_ids(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    rng = random.Random(name)
    for _ in range(150):
        ids = random_ids(tokenizer, rng)
        rest, parts = list(ids), []
        while rest:
            n = rng.choice([1, 1, 2, 3, 7, len(rest)])
            parts.append(rest[:n])
            del rest[:n]
        assert streamed(parts, tokenizer) == tokenizer.decode(ids), parts


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([SHIP, [256], [257]], "🚢 the sea"),
        ([[i] for i in SHIP] + [[256, 257]], "🚢 the sea"),
        # One bad byte makes all bytes of a run bad, also those of a complete character before it
        ([SHIP, SHIP[:2], [260]], "\ufffd" * 6 + "s"),
    ],
)
def test_a_run_of_byte_tokens_is_decoded_as_one(parts: list[list[int]], expected: str) -> None:
    assert streamed(parts, TOKENIZERS["byte fallback"]) == expected


def test_text_is_shown_as_soon_as_it_is_final() -> None:
    ids = EMBEDDED.encode("one two naïve three").ids
    stream = TextStream(EMBEDDED)
    shown = [stream.push([i]) for i in ids]
    assert shown == ["one", " two", " n", "a", "", "ï", "ve", " three"]
    stream = TextStream(TOKENIZERS["byte fallback"])
    shown = [stream.push([i]) for i in [256, *SHIP, 257, 258, 257, 0xC3]]
    assert shown == ["the", "", "", "", "", "🚢 sea", "", "  sea", ""]
    assert stream.finish() == "\ufffd"


def test_a_long_text_takes_no_longer_per_token() -> None:
    """Check that few ids are decoded again with each new one."""
    stream = TextStream(EMBEDDED)
    for token in EMBEDDED.encode(TEXT * 20).ids:
        stream.push([token])
        assert len(stream.recent) < LONG + 9


STOPS = ["ab", "bcd", "a", "cab", "ccc"]


@pytest.mark.parametrize("stops", [STOPS[:2], STOPS[1:], STOPS[3:], []])
def test_a_stop_text_is_found_however_the_text_comes(stops: list[str]) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("abcd", k=12))
        expected = text
        for end in range(len(text), 0, -1):  # the shortest match is the last
            lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
            if lengths:
                expected = text[: end - max(lengths)]
        found, rest, reader = "", text, StopTexts(stops)
        while rest and not reader.has_ended:
            n = rng.randint(1, 5)
            found += reader.push(rest[:n])
            rest = rest[n:]
        assert found + reader.held == expected
