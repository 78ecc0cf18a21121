"""Enlarging a checkpoint changes its shape and nothing that it computes."""

from pathlib import Path

import pytest
from conftest import TINY, run

from gpt_neox import GPTNeoX
from tools import enlarge


@pytest.mark.parametrize(("role", "hidden", "layers"), [("target", 640, 7), ("draft", 384, 2)])
def test_logits_stay(role: str, hidden: int, layers: int, tmp_path: Path) -> None:
    sizes = ["--hidden", str(hidden), "--layers", str(layers), "--vocab", "4200"]
    assert enlarge.main([str(TINY / role), str(tmp_path / "large"), *sizes]) == 0
    small, large = GPTNeoX.from_pretrained(TINY / role), GPTNeoX.from_pretrained(tmp_path / "large")
    assert large.config.hidden_size == hidden and large.config.n_layers == layers
    assert large.config.head_size == small.config.head_size
    tokens = [5, 900, 31, 7, 7, 2048, 13]
    ours, theirs = run(large, tokens), run(small, tokens)
    assert (ours[:, :4096] - theirs).abs().max() < 0.05  # float16's rounding
    assert (ours[:, 4096:] < theirs.amin()).all()


@pytest.mark.parametrize("change", [{"hidden": 500}, {"hidden": 320}, {"layers": 3}, {"vocab": 9}])
def test_a_shape_it_cannot_grow_to(
    change: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sizes = {"hidden": 640, "layers": 7, "vocab": 4200} | change
    options = [text for name, n in sizes.items() for text in (f"--{name}", str(n))]
    assert enlarge.main([str(TINY / "target"), str(tmp_path / "large"), *options]) == 2
    assert "320" in capsys.readouterr().err and not list(tmp_path.iterdir())
