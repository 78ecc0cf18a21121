"""Tests of drawn trees."""

import io
import math

import pytest
from conftest import TINY, Captured
from tokenizers import Tokenizer

from cli.main import main
from cli.terminal import draw_tree, has_color
from draft_tree import Tree
from methods.rules import MixedTree


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))


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
