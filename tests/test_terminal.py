"""Streaming text and drawing trees."""

import io
import math
import random
from itertools import cycle

import pytest
from conftest import TINY
from tokenizers import Tokenizer

from cli.terminal import INCOMPLETE, TextStream, draw_tree, harmless, has_color
from draft_tree import Tree

TEXT = "naïve café — “quoted” 日本語 🚢🌊 ok"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What a stream prints when the ids arrive in groups of these sizes, in turn."""
    stream = TextStream(tokenizer)
    shown = []
    start = 0
    for size in cycle(sizes):
        if start >= len(ids):
            break
        shown.append(stream.push(ids[start : start + size]))
        start += size
    shown.append(stream.finish())
    return shown


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [5, 2, 1], [100]])
def test_streamed_text_equals_the_decoded_ids(tokenizer: Tokenizer, sizes: list[int]) -> None:
    """Characters of two to four bytes span tokens and iterations; no replacement flashes by."""
    ids = tokenizer.encode(TEXT).ids
    assert any(INCOMPLETE in tokenizer.decode([i]) for i in ids), "no character spans two tokens"
    shown = pieces(tokenizer, ids, sizes)
    assert "".join(shown) == tokenizer.decode(ids) == TEXT
    assert INCOMPLETE not in "".join(shown)


def test_text_is_shown_as_soon_as_it_is_final(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three").ids
    shown = pieces(tokenizer, ids, [1])
    assert shown[:-1] == [tokenizer.decode([i]) for i in ids]
    assert shown[-1] == ""


@pytest.mark.parametrize("seed", range(40))
def test_any_ids_add_up(tokenizer: Tokenizer, seed: int) -> None:
    """Random ids are mostly broken UTF-8; what is shown is still exactly what decoding gives."""
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(60)]
    if seed % 2:  # every other text ends in half a character
        ids.append(tokenizer.encode("é").ids[0])
    sizes = [rng.randint(1, 6) for _ in range(10)]
    assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@pytest.fixture
def example(tokenizer: Tokenizer) -> Tree:
    words = [" the", " cat", " dog", " sat", " ran", " ran"]
    return Tree(
        tokens=[tokenizer.encode(word).ids[0] for word in words],
        parents=[-1, 0, 0, 1, 1, 2],
        depths=[0, 1, 1, 2, 2, 2],
        path_logprobs=[math.log(p) for p in (1.0, 0.6, 0.3, 0.3, 0.18, 0.24)],
        draft_slots=[0, 1, 2, -1, -1, -1],
        are_retrieved=[False] * 6,
    )


def test_a_drawn_tree(tokenizer: Tokenizer, example: Tree) -> None:
    bonus = tokenizer.encode(" away").ids[0]
    assert draw_tree(example, [0, 1, 4], bonus, tokenizer, is_colored=False).splitlines() == [
        "' the' 1.00 *",
        "|-- ' cat' 0.60 *",
        "|   |-- ' sat' 0.30",
        "|   `-- ' ran' 0.18 *",
        "`-- ' dog' 0.30",
        "    `-- ' ran' 0.24",
        "bonus: ' away'",
    ]


def test_a_retrieved_node_is_marked(tokenizer: Tokenizer, example: Tree) -> None:
    example.are_retrieved[2] = example.are_retrieved[4] = True
    lines = draw_tree(example, [0, 1, 4], 1, tokenizer, is_colored=False).splitlines()
    assert [line for line in lines if line.endswith(" +")] == [
        "|   `-- ' ran' 0.18 * +",
        "`-- ' dog' 0.30 +",
    ]


def test_colour_tells_accepted_from_rejected(tokenizer: Tokenizer, example: Tree) -> None:
    lines = draw_tree(example, [0, 1, 4], 1, tokenizer, is_colored=True).splitlines()
    expected = [
        ("the", "green"),
        ("cat", "green"),
        ("sat", "dim"),
        ("ran", "green"),
        ("dog", "dim"),
        ("ran", "dim"),
        ("bonus", "plain"),
    ]
    for line, (word, color) in zip(lines, expected, strict=True):
        assert word in line
        assert ("\033[1;32m" in line) == (color == "green"), line
        assert ("\033[2m" in line) == (color == "dim"), line


def test_a_token_is_drawn_on_one_line(tokenizer: Tokenizer, example: Tree) -> None:
    newline = tokenizer.encode("\n").ids[0]
    lines = draw_tree(example, [0], newline, tokenizer, is_colored=False).splitlines()
    assert len(lines) == 7 and lines[-1] == r"bonus: '\n'"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [
        ({}, True),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_can_be_declined(
    variables: dict[str, str], is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_color(Terminal()) is is_wanted
    assert not has_color(io.StringIO())


def test_escapes_in_the_text_are_shown_on_a_terminal() -> None:
    assert harmless("a\x1b[2J\x9bb\r\n\tc\xa0é") == "a\\x1b[2J\\x9bb\\r\n\tc\xa0é"
