"""Tests of the enlarged pairs, and that a new checkpoint is written whole or not at all."""

from pathlib import Path

import pytest
from safetensors import SafetensorError
from small import TINY, Captured, error_line, run

from dynatree_lab import folders
from dynatree_lab.benchmark import enlarge as enlarging
from dynatree_lab.benchmark.enlarge import enlarge, enlarged_pair, main
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.errors import UsageError


def test_an_enlarged_pair_computes_the_same_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Check the logits, the files and their modes. A run that was killed has left a folder."""
    shapes = {"target": (640, 7, 4200), "draft": (384, 2, 4200)}
    monkeypatch.setattr(enlarging, "SHAPES", {"large": shapes})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "large" / "target.unfinished").mkdir(parents=True)
    pair = enlarged_pair("large")
    tokens = [5, 900, 31, 7, 7, 2048, 13]
    for role, folder in zip(("target", "draft"), map(Path, pair), strict=True):
        small, large = FastGPTNeoX.from_pretrained(TINY / role), FastGPTNeoX.from_pretrained(folder)
        config = large.config
        shape = config.hidden_size, config.num_hidden_layers, config.vocab_size
        assert shape == shapes[role]
        assert large.config.head_size == small.config.head_size
        expected, logits = run(small, tokens), run(large, tokens)
        assert (logits[:, :4096] - expected).abs().max() < 0.05  # float16's rounding
        assert (logits[:, 4096:] < expected.amin()).all()
        names = {file.name for file in folder.iterdir()}
        assert names == {file.name for file in (TINY / role).iterdir()}
        assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # all may read them
    assert {file.name for file in Path(pair[0]).parent.iterdir()} == {"target", "draft"}
    assert enlarged_pair("large") == pair and capsys.readouterr().err.count("making ") == 2


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SafetensorError("I/O error: No space left"), UsageError),
    ],
)
def test_nothing_half_made_is_left(
    error: BaseException, shown: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise error

    monkeypatch.setattr(folders, "save_file", write_half)
    with pytest.raises(shown):
        enlarge(TINY / "draft", tmp_path / "new", 256, 2, 4100)
    assert not list(tmp_path.iterdir())


def test_the_program_takes_any_larger_shape(tmp_path: Path, capsys: Captured) -> None:
    """Check a model with no more ids, and the line for a shape or a folder that cannot be."""
    words = [str(TINY / "draft"), str(tmp_path / "large"), "--layers", "2", "--vocab", "4096"]
    for hidden in ("128", "300"):
        line = error_line(capsys, main, [*words, "--hidden", hidden])
        assert "can be enlarged to two or more times hidden size 128" in line
    assert main([*words, "--hidden", "256"]) == 0
    small, large = map(FastGPTNeoX.from_pretrained, (TINY / "draft", tmp_path / "large"))
    assert (run(large, [5, 9]) - run(small, [5, 9])).abs().max() < 0.05  # float16's rounding
    assert "exists already" in error_line(capsys, main, [*words, "--hidden", "256"])
