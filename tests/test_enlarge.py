"""Enlarging a checkpoint changes its shape and nothing that it computes, nor anything else."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import TINY, run
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine import memory
from gpt_neox import GPTNeoX
from tools import enlarge, folders


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


FITTING = ("--hidden", "256", "--layers", "2", "--vocab", "4096")  # for the small draft


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A copy of the small draft, to be careful with."""
    return shutil.copytree(TINY / "draft", tmp_path / "small")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, by name; links are not followed."""
    found = {}
    for place in sorted(folder.rglob("*")):
        is_file = place.is_file() and not place.is_symlink()
        found[str(place.relative_to(folder))] = place.read_bytes() if is_file else None
    return found


@pytest.mark.parametrize(
    "place",
    ["small", "small/.", "other/../small", "link", "link/large", "small/large", "SOURCE", "other"]
    + ["other/config.json", "other/config.json/large", "loop", "loop/large", "n" * 300, ""],
)
def test_what_is_there_stays(place: str, small: Path, capsys: pytest.CaptureFixture) -> None:
    """It once wrote onto its own source, which was then nothing any more, and onto other models."""
    around = small.parent
    shutil.copytree(small, around / "other")
    (around / "link").symlink_to("small")
    (around / "loop").symlink_to("loop")
    before = contents(around)
    source = small
    if place == "SOURCE":  # which is told by a link, its folder by its name
        source = around / "link"
        place = "small"
    folder = ""
    if place:
        folder = f"{around}/{place}"
    assert enlarge.main([str(source), folder, *FITTING]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and contents(around) == before


@pytest.mark.parametrize("place", ["new", "deep/new", "empty", "link", "ahead"])
def test_a_new_or_empty_folder_is_filled(place: str, small: Path) -> None:
    around = small.parent
    (around / "empty").mkdir()
    (around / "link").symlink_to("empty")
    (around / "ahead").symlink_to("not/yet")
    number = (around / "empty").stat().st_ino
    assert enlarge.main([str(small), str(around / place), *FITTING]) == 0
    names = {file.name for file in (around / place).iterdir()}
    assert names == {file.name for file in small.iterdir()}
    assert (around / "empty").stat().st_ino == number  # it may be a disk, or stood in
    assert not list(around.rglob(".*"))
    modes = {file.stat().st_mode for file in (around / place).iterdir()}
    assert len(modes) == 1  # safetensors would let nobody else read the weights
    assert load_file(around / place / "model.safetensors")


@pytest.mark.parametrize("place", ["deep/new", "empty"])
@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (SafetensorError("I/O error: No space left"), 2)],
)
def test_nothing_half_made_is_left(
    error: BaseException, status: int, place: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small.parent / "empty").mkdir()
    before = contents(small.parent)

    def write_half(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise error

    monkeypatch.setattr(folders, "save_file", write_half)
    assert enlarge.main([str(small), str(small.parent / place), *FITTING]) == status
    assert contents(small.parent) == before


@pytest.mark.parametrize("place", ["deep/new", "empty"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_half_made_is_left_by_kill(
    number: int, place: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was gigabytes, under a name that no list shows."""
    (small.parent / "empty").mkdir()
    before = contents(small.parent)

    def write_half(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        signal.raise_signal(number)

    monkeypatch.setattr(folders, "save_file", write_half)
    own = signal.signal(number, lambda *_: pytest.fail("as if there were nothing to remove"))
    try:
        with pytest.raises(SystemExit) as caught:
            enlarge.main(arguments(small, small.parent / place, 256, 2, 4096))
        assert caught.value.code == 128 + number and contents(small.parent) == before
        signal.signal(number, signal.SIG_IGN)  # as nohup leaves it
        assert enlarge.main(arguments(small, small.parent / place, 256, 2, 4096)) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, own)


def test_an_interrupted_move_is_undone(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small.parent / "empty").mkdir()
    before = contents(small.parent)
    moved = []

    def move(place: Path, target: Path) -> None:
        os.rename(place, target)
        moved.append(target)
        if len(moved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", move)
    assert enlarge.main(arguments(small, small.parent / "empty", 256, 2, 4096)) == 130
    assert len(moved) == 2 and contents(small.parent) == before


@pytest.mark.parametrize(("left", "place"), [("empty", "empty"), ("", "new"), ("deep", "deep/new")])
def test_what_a_killed_run_has_left_is_told_and_stays(
    left: str, place: str, small: Path, capsys: pytest.CaptureFixture
) -> None:
    """An empty folder was then no empty one, for something that no list shows. It may be of a run
    that goes on."""
    part = small.parent / left / f"{folders.PART}0123"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"half")
    assert enlarge.main([str(small), str(small.parent / place), *FITTING]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {part} is another run's")
    assert (part / "model.safetensors").read_bytes() == b"half"
    assert GPTNeoX.from_pretrained(small.parent / place)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden", str(128 * 10**6), " GB on disk"),
        ("hidden", str(128 * 10**10), "no tensor has such sizes"),
        ("layers", str(10**12), ""),
        ("vocab", str(10**12), " GB on disk"),
        ("vocab", str(10**30), "--vocab"),
        ("layers", "-2", "--layers"),
        ("hidden", "256.0", "--hidden"),
    ],
)
def test_sizes_that_nothing_holds(
    name: str, value: str, message: str, small: Path, capsys: pytest.CaptureFixture
) -> None:
    """They were the allocator's RuntimeError, after minutes."""
    before = contents(small.parent)
    sizes = [*FITTING, f"--{name}={value}"]
    assert enlarge.main([str(small), str(small.parent / "deep" / "new"), *sizes]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and len(line) < 200
    assert contents(small.parent) == before


def test_more_than_the_memory_is_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6)
    assert enlarge.main([str(small), str(small.parent / "new"), *FITTING]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "1.0 MB are free" in line and not (small.parent / "new").exists()


@pytest.mark.parametrize(
    "name",
    ["gpt_neox.final_layer_norm.bias", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"]
    + ["gpt_neox.embed_in.weight"],
)
def test_weights_that_float16_cannot_hold_are_refused(
    name: str, small: Path, capsys: pytest.CaptureFixture
) -> None:
    """They were written as infinite, at status 0."""
    tensors = load_file(small / "model.safetensors")
    tensors = {key: tensor.float() for key, tensor in tensors.items()}
    tensors[name].view(-1)[3] = -torch.finfo(torch.float16).max * 4
    save_file(tensors, small / "model.safetensors")
    before = contents(small.parent)
    assert enlarge.main([str(small), str(small.parent / "new"), *FITTING]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and "65504" in line and contents(small.parent) == before
