"""Tests that an enlarged checkpoint computes the same, and that no other file changes."""

from pathlib import Path

import pytest
from conftest import TINY, Captured, error_line, override, run
from safetensors import SafetensorError

from engine.model import FastGPTNeoX
from tools import enlarge, folders

SMALL = str(TINY / "draft")
FITTING = ("--hidden", "256", "--layers", "2", "--vocab", "4096")


def read_all(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a folder, by name; None for a folder."""
    return {
        str(place.relative_to(folder)): place.read_bytes() if place.is_file() else None
        for place in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(("role", "hidden", "layers"), [("target", 640, 7), ("draft", 384, 2)])
def test_logits_stay(role: str, hidden: int, layers: int, tmp_path: Path) -> None:
    """Write over what a run that was killed has left."""
    source, folder = TINY / role, tmp_path / "deep" / "large"
    (tmp_path / "deep" / "large.unfinished").mkdir(parents=True)
    sizes = ["--hidden", str(hidden), "--layers", str(layers), "--vocab", "4200"]
    assert enlarge.main([str(source), str(folder), *sizes]) == 0
    small, large = FastGPTNeoX.from_pretrained(source), FastGPTNeoX.from_pretrained(folder)
    assert large.config.hidden_size == hidden and large.config.num_hidden_layers == layers
    assert large.config.head_size == small.config.head_size
    tokens = [5, 900, 31, 7, 7, 2048, 13]
    expected = run(small, tokens)
    logits = run(large, tokens)
    assert (logits[:, :4096] - expected).abs().max() < 0.05  # float16's rounding
    assert (logits[:, 4096:] < expected.amin()).all()
    assert {file.name for file in folder.iterdir()} == {file.name for file in source.iterdir()}
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # all may read the weights
    assert [file.name for file in folder.parent.iterdir()] == ["large"]


@pytest.mark.parametrize(
    ("place", "sizes", "message"),
    [
        ("new", ["--hidden", "320"], "two or more times hidden size 128"),
        ("new", ["--hidden", "128"], "two or more times hidden size 128"),
        ("new", ["--layers", "1"], "no less than 2 layers"),
        ("new", ["--vocab", "9"], "4096 ids"),
        ("model", [], "exists already"),
        ("model/config.json/new", [], "cannot be written"),
    ],
)
def test_a_mistake_changes_nothing(
    place: str, sizes: list[str], message: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    before = read_all(tmp_path)
    words = override([SMALL, f"{tmp_path}/{place}", *FITTING], *sizes)
    assert message in error_line(capsys, enlarge.main, words)
    assert read_all(tmp_path) == before


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (SafetensorError("I/O error: No space left"), 2)],
)
def test_nothing_half_made_is_left(
    error: BaseException, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise error

    monkeypatch.setattr(folders, "save_file", write_half)
    assert enlarge.main([SMALL, str(tmp_path / "new"), *FITTING]) == status
    assert not read_all(tmp_path)
