"""Tests that an enlarged checkpoint computes the same, and that no other file changes."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, Captured, error_line, override, run
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.model import FastGPTNeoX
from tools import enlarge, folders

FITTING = ("--hidden", "256", "--layers", "2", "--vocab", "4096")  # for the small draft


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Make a copy of the embedded draft, because an error could overwrite it."""
    return shutil.copytree(TINY / "draft", tmp_path / "small")


def read_all(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a folder, by name; None for a folder or a link."""
    found = {}
    for place in sorted(folder.rglob("*")):
        is_file = place.is_file() and not place.is_symlink()
        found[str(place.relative_to(folder))] = place.read_bytes() if is_file else None
    return found


@pytest.mark.parametrize(("role", "hidden", "layers"), [("target", 640, 7), ("draft", 384, 2)])
def test_logits_stay(role: str, hidden: int, layers: int, tmp_path: Path) -> None:
    source, folder = TINY / role, tmp_path / "deep" / "large"
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
        ("deep/new", ["--hidden", "320"], "two or more times hidden size 128"),
        ("deep/new", ["--hidden", "128"], "two or more times hidden size 128"),
        ("deep/new", ["--layers", "1"], "no less than 2 layers"),
        ("deep/new", ["--vocab", "9"], "4096 ids"),
        ("deep/new", ["--hidden", "64000000"], "GB are free"),
        ("deep/new", ["--hidden", "12800000000"], "which GPT-NeoX cannot have"),
        ("small", [], "exists already"),
        ("link", [], "exists already"),
        ("killed", [], "belongs to another run"),
        ("small/config.json/new", [], "cannot be written"),
    ],
)
def test_a_mistake_changes_nothing(
    place: str, sizes: list[str], message: str, small: Path, capsys: Captured
) -> None:
    """Compare all files before and after. Once the source, or another model, was overwritten."""
    around = small.parent
    (around / "link").symlink_to("nowhere")
    (around / "killed.unfinished").mkdir()
    before = read_all(around)
    words = override([str(small), f"{around}/{place}", *FITTING], *sizes)
    assert message in error_line(capsys, enlarge.main, words)
    assert read_all(around) == before


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (SafetensorError("I/O error: No space left"), 2)],
)
def test_nothing_half_made_is_left(
    error: BaseException, status: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_all(small.parent)

    def write_half(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise error

    monkeypatch.setattr(folders, "save_file", write_half)
    assert enlarge.main([str(small), str(small.parent / "new"), *FITTING]) == status
    assert read_all(small.parent) == before


@pytest.mark.parametrize("part", ["embed_in.weight", "layers.0.mlp.dense_h_to_4h.weight"])
def test_weights_that_float16_cannot_hold_are_refused(
    part: str, small: Path, capsys: Captured
) -> None:
    """Check the error. Such weights were once written as infinity, with exit status 0."""
    file, name = small / "model.safetensors", f"gpt_neox.{part}"
    tensors = {key: half.float() for key, half in load_file(file).items()}
    tensors[name].view(-1)[3] = -4 * torch.finfo(torch.float16).max
    save_file(tensors, file)
    before = read_all(small.parent)
    place = str(small.parent / "new")
    assert name in error_line(capsys, enlarge.main, [str(small), place, *FITTING])
    assert read_all(small.parent) == before
