"""Tests of docs/replay.md, as printed, and of recorded texts in the benchmark.

python -m pytest tests/lab/test_replaying.py
"""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from fast import override
from small import ROOT, TINY, Captured, error_line
from torch import Tensor

import dynatree_lab as lab
from dynatree_lab.benchmark.measure import main
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.metrics import token_ids
from dynatree_lab.replay.texts import ReplayError, read_texts

pytestmark = pytest.mark.slow  # 10 s: the page's commands run
PAGE = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:`(\w+\.py)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {name: code for name, _, code in BLOCK.findall(PAGE) if name}
PYTHON = [code for name, language, code in BLOCK.findall(PAGE) if language == "python" and not name]
COMMANDS = re.findall("^dynatree-bench (.*)$", PAGE, re.MULTILINE)
SHORT = ["--max-new-tokens", "12", "--n-prompts", "2"]
RECORD = ["--record", "texts.jsonl", "--candidates", "candidates.npz", *SHORT]
REPLAY = ["--replay", "texts.jsonl", "--candidates", "candidates.npz", "--methods"]
PROMPTS = "  The old king  \n" + "<|endoftext|>of" * 100 + "\n"
FOLDER = TINY / "target"
REFUSED = ["recycle", "graft", "linear strict", "linear window=64", "linear costs=learned"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, in which the page's files are."""
    monkeypatch.chdir(tmp_path)
    for name, code in FILES.items():
        Path(name).write_text(code)
    Path("prompts.txt").write_text(PROMPTS)
    return tmp_path


def run(command: str, *later: str) -> None:
    """Run one of the page's commands with short texts. The later options replace those of the same
    names."""
    words = [str(TINY / "draft") if word == "FOLDER" else word for word in shlex.split(command)]
    assert main(override(words, *SHORT, *later)) == 0, command


def test_the_first_commands_run(folder: Path, capsys: Captured) -> None:
    """Check what they print. Two rows take the place of the grid of table tune."""
    record, replay, tune, people, *_ = COMMANDS
    Path("book.txt").write_text(PROMPTS)
    run(record)
    for command, later, expected in [
        (replay, [], "x ar computed has the prices 0.92:0.08:0.32"),
        (tune, ["--methods", "dynatree,dynatree tau=0.1"], "best setting"),
        (people, ["--prompt-tokens", "9"], "people (book.txt), as if the target were to write"),
    ]:
        run(command, *later, "--output", f"{expected[:4]}.jsonl")
        assert expected in " ".join(capsys.readouterr().out.split())


def test_its_python_runs(folder: Path, capsys: Captured) -> None:
    """Run the blocks one after the other, and compare their trees."""
    main(RECORD)
    capsys.readouterr()
    names: dict[str, object] = {}
    for code in PYTHON:
        exec(code, names)
    first, second = capsys.readouterr().out.splitlines()
    result, steps, text = (names[name] for name in ("result", "steps", "text"))
    assert second == f"{len(text.ids) / len(steps)} True" and float(first) > 1
    assert [step.tokens for step in result.steps] == [step.tokens for step in steps]
    assert token_ids(steps) == text.ids and len(steps) < len(text.ids)


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


class Model:
    """A stand-in for a model of transformers, over the embedded target."""

    config = SimpleNamespace(vocab_size=4096)

    def __init__(self, folder: Path, dtype: str):
        assert dtype == "float32"
        self.model = FastGPTNeoX.from_pretrained(folder)
        self.generation_config = SimpleNamespace(eos_token_id=0)

    def to(self, device: str) -> "Model":
        return self

    def generate(self, ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> Tensor:
        assert attention_mask.all() and self.generation_config == {"pad_token_id": 0}
        ar = lab.GenerationConfig.parse("ar")
        found = token_ids(lab.generate(self.model, None, ids[0].tolist(), ar, max_new_tokens))
        return torch.cat([ids, torch.tensor([found])], dim=1)


def compare_with_ours(capsys: Captured, weights: str | None = None) -> None:
    """Compare texts.jsonl with the file that --record writes, and replay it.

    weights: the recorder's, if it names a revision.
    """
    assert main(["--record", "ours.jsonl", "--prompts", "prompts.txt"]) == 0
    texts, ours = read_texts("texts.jsonl"), read_texts("ours.jsonl")
    names = "prompt", "ids", "tokenizer", "vocab_size", "eos_ids", "dtype", "temperature"
    for text, own in zip(texts, ours, strict=True):
        assert all(getattr(text, name) == getattr(own, name) for name in names)
        assert text.weights == (weights or own.weights)
    assert max(len(text.prompt) for text in texts) == 150
    capsys.readouterr()
    assert main(["--replay", "texts.jsonl", "--methods", "linear", *SHORT]) == 0
    assert "linear" in capsys.readouterr().out


def test_the_recorder_writes_our_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Run it with a stand-in for transformers, on a name of the hub. It takes 3 s: it writes two
    texts of 128 tokens, and --record again."""
    found = folder / "snapshots" / "0123abc"
    found.parent.mkdir()
    found.symlink_to(FOLDER)
    of_model = SimpleNamespace(from_pretrained=Model)
    stand_in = SimpleNamespace(AutoModelForCausalLM=of_model, GenerationConfig=dict)
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(found))
    monkeypatch.setattr(sys, "argv", ["record.py", "some/model", "prompts.txt"])
    exec(FILES["record.py"], {})
    Path("texts.jsonl").write_text(capsys.readouterr().out)
    compare_with_ours(capsys, weights="0123abc")


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_the_recorder_runs_with_transformers(folder: Path, capsys: Captured) -> None:
    """Run it in a process of its own, on a folder. It takes 20 s, because it loads transformers."""
    words = [sys.executable, "record.py", str(FOLDER), "prompts.txt"]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert all(json.loads(line) for line in printed.splitlines())
    Path("texts.jsonl").write_text(printed)
    compare_with_ours(capsys)


def test_a_rule_is_a_line_of_table_rules(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # --load appends the file's folder
    run(COMMANDS[-1])
    printed = capsys.readouterr().out
    del lab.METHODS["mine"], sys.modules["mine"]
    assert {*re.findall(r"^(mine.*?)  ", printed, re.MULTILINE)} == {"mine", "mine p=0.3"}
