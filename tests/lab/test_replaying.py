"""Tests of recorded texts in the benchmark.

python -m pytest tests/lab/test_replaying.py
"""

from pathlib import Path

import pytest
from small import Captured, error_line

import dynatree_lab as lab
from dynatree_lab.benchmark.measure import main
from dynatree_lab.replay.texts import ReplayError

SHORT = ["--max-new-tokens", "12", "--n-prompts", "2"]
RECORD = ["--record", "texts.jsonl", "--candidates", "candidates.npz", *SHORT]
REPLAY = ["--replay", "texts.jsonl", "--candidates", "candidates.npz", "--methods"]
REFUSED = ["recycle", "graft", "linear strict", "linear window=64", "linear costs=learned"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_replay_refuses_what_reads_more(folder: Path, capsys: Captured) -> None:
    main(RECORD)
    capsys.readouterr()
    pair = lab.load_pair(replay="texts.jsonl")
    prompt = pair.tokenizer.decode(pair.target.texts[0].prompt)
    for row in REFUSED:
        line = error_line(capsys, main, [*REPLAY, row])
        assert "a replay cannot have" in line and "has only the target's tokens" in line
        with pytest.raises(ReplayError, match="a replay cannot have"):
            lab.write_text(pair, prompt, row, max_new_tokens=12)


def test_some_of_the_texts_have_candidates(folder: Path, capsys: Captured) -> None:
    """Check --n-prompts with candidates that were recorded for all texts."""
    main(RECORD)
    capsys.readouterr()
    assert main([*REPLAY, "linear", "--n-prompts", "1"]) == 0
    assert "main: 1 prompt (texts.jsonl)" in capsys.readouterr().out
