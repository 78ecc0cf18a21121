"""Tests of streamed text and of drawn trees."""

import io
import math
import random
from itertools import cycle

import pytest
from conftest import TINY, Captured
from tokenizers import Tokenizer

from cli.main import main
from cli.terminal import draw_tree, has_color
from cli.tokens import INCOMPLETE, TextStream
from draft_tree import Tree
from methods.rules import MixedTree

TEXT = "naïve café — “quoted” 日本語 🚢🌊 ok"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Return what a stream prints if the ids arrive in groups of these sizes, in turn."""
    stream = TextStream(tokenizer)
    shown = []
    rest = list(ids)
    for size in cycle(sizes):
        shown.append(stream.push(rest[:size]))
        del rest[:size]
        if not rest:
            return [*shown, stream.finish()]


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [5, 2, 1], [100]])
def test_streamed_text_equals_the_decoded_ids(tokenizer: Tokenizer, sizes: list[int]) -> None:
    """Check characters of two to four bytes, which span tokens and iterations. No replacement
    character may be printed."""
    ids = tokenizer.encode(TEXT).ids
    assert any(INCOMPLETE in tokenizer.decode([i]) for i in ids), "no character spans two tokens"
    shown = pieces(tokenizer, ids, sizes)
    assert "".join(shown) == tokenizer.decode(ids) == TEXT
    assert INCOMPLETE not in "".join(shown)


def test_text_is_shown_as_soon_as_it_is_final(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three").ids
    assert pieces(tokenizer, ids, [1]) == [tokenizer.decode([i]) for i in ids] + [""]


@pytest.mark.parametrize("seed", range(40))
def test_any_ids_add_up(tokenizer: Tokenizer, seed: int) -> None:
    """Check random ids, which are mostly invalid UTF-8: the printed text is the decoded one."""
    rng = random.Random(seed)
    n_ids = 257 if seed % 4 < 2 else tokenizer.get_vocab_size()  # the first ids are single bytes
    ids = rng.choices(range(n_ids), k=200)
    if seed % 2:  # every other text ends in half a character
        ids.append(tokenizer.token_to_id("Ã"))  # byte C3, in GPT-2's alphabet of bytes
    sizes = rng.choices(range(1, 7), k=10)
    assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@pytest.fixture
def example(tokenizer: Tokenizer) -> MixedTree:
    words = [" the", " cat", " dog", " sat", " ran", " ran"]
    return MixedTree(
        tokens=[tokenizer.encode(word).ids[0] for word in words],
        parents=[-1, 0, 0, 1, 1, 2],
        depths=[0, 1, 1, 2, 2, 2],
        path_logprobs=[math.log(p) for p in (1.0, 0.6, 0.3, 0.3, 0.18, 0.24)],
        draft_slots=[0, 1, 2, -1, -1, -1],
        are_retrieved=[False, False, True, False, True, False],
    )


def test_a_drawn_tree(tokenizer: Tokenizer, example: Tree) -> None:
    """Check one line per token, whatever characters it has, and the colours of accepted nodes."""
    bonus = tokenizer.encode("\n").ids[0]
    plain = draw_tree(example, [0, 1, 4], bonus, tokenizer, is_colored=False).splitlines()
    assert plain == [
        "' the' 1.00 *",
        "|-- ' cat' 0.60 *",
        "|   |-- ' sat' 0.30",
        "|   `-- ' ran' 0.18 * +",
        "`-- ' dog' 0.30 +",
        "    `-- ' ran' 0.24",
        r"bonus: '\n'",
    ]
    colored = draw_tree(example, [0, 1, 4], bonus, tokenizer, is_colored=True).splitlines()
    for line, same in zip(colored[:-1], plain, strict=False):
        assert ("\033[1;32m" in line) == ("*" in same)
        assert ("\033[2m" in line) == ("*" not in same)


def test_colours_can_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    assert not has_color(terminal)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for term, declined, is_wanted in (("xterm", "", 1), ("xterm", "1", 0), ("dumb", "", 0)):
        monkeypatch.setenv("NO_COLOR", declined)
        monkeypatch.setenv("TERM", term)
        assert has_color(terminal) == is_wanted


def test_the_marks_of_drawn_trees_are_explained_once(capsys: Captured) -> None:
    """Check the legend. Each tree once had "0 retrieved, marked +" and no line that explained * and
    the numbers."""
    text = ["--prompt", "the sea, the sea, the", "--max-new-tokens", "12", "--show-tree"]
    for method, is_retrieving in (("dynatree", False), ("lookup", True)):
        assert main([*text, "--method", method]) == 0
        output = capsys.readouterr().err
        assert output.count("* accepted, + retrieved") == 1
        assert (" retrieved)" in output) == is_retrieving
