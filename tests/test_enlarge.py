"""Enlarging a checkpoint changes its shape and nothing that it computes."""

from pathlib import Path

import pytest
from conftest import TINY, run

from gpt_neox import GPTNeoX
from tools import enlarge


def arguments(source: Path, folder: Path, hidden: int, layers: int, vocab: int) -> list[str]:
    sizes = ["--hidden", str(hidden), "--layers", str(layers), "--vocab", str(vocab)]
    return [str(source), str(folder)] + sizes


@pytest.mark.parametrize(("role", "hidden", "layers"), [("target", 640, 7), ("draft", 384, 2)])
def test_logits_stay(role: str, hidden: int, layers: int, tmp_path: Path) -> None:
    source = TINY / role
    folder = tmp_path / "large"
    assert enlarge.main(arguments(source, folder, hidden, layers, vocab=4200)) == 0
    small = GPTNeoX.from_pretrained(source)
    large = GPTNeoX.from_pretrained(folder)
    assert large.config.hidden_size == hidden and large.config.n_layers == layers
    assert large.config.head_size == small.config.head_size
    tokens = [5, 900, 31, 7, 7, 2048, 13]
    expected = run(small, tokens)
    logits = run(large, tokens)
    assert (logits[:, :4096] - expected).abs().max() < 0.05  # float16's rounding
    assert (logits[:, 4096:] < expected.amin()).all()


@pytest.mark.parametrize("change", [{"hidden": 500}, {"hidden": 320}, {"layers": 3}, {"vocab": 9}])
def test_a_shape_it_cannot_grow_to(
    change: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sizes = {"hidden": 640, "layers": 7, "vocab": 4200} | change
    assert enlarge.main(arguments(TINY / "target", tmp_path / "large", **sizes)) == 2
    assert "320" in capsys.readouterr().err and not list(tmp_path.iterdir())
