"""Tests of tools/distil.py: a draft learns, an interrupted run resumes exactly, dynatree.py can use
the draft, and a mistake is one line and leaves no files."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, Captured, error_line, random_config, random_tensors, run
from safetensors.torch import load_file
from test_enlarge import read_all
from tokenizers import Tokenizer

from benchmark.prompts import BUILTIN
from cli.files import locked
from cli.main import main as dynatree
from engine.model import FastGPTNeoX
from gpt_neox import GPTNeoX, read_config
from tools import distil

TARGET = TINY / "draft"  # the smaller one
SHAPE = ["--layers", "1", "--hidden", "16"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("\n\n".join(BUILTIN * 2))
    return str(file)


def arguments(text: str, out: Path, steps: int = 5) -> list[str]:
    options = ["--target", str(TARGET), "--text", text, "--out", str(out), "--steps", str(steps)]
    return options + ["--batch", "4", "--context", "16", "--rate", "0.01", "--device", "cpu"]


def test_the_loss_is_the_divergence_from_the_target() -> None:
    """Compare with the KL divergence of the logits that FastGPTNeoX gives each row alone."""
    rows = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(0))
    models, probs = [], []
    for seed in (1, 2):
        config = random_config()
        tensors = random_tensors(config, seed)
        models.append(GPTNeoX.from_tensors(config, tensors))
        fast = FastGPTNeoX.from_tensors(config, tensors)
        probs.append(torch.stack([run(fast, row.tolist()) for row in rows]).double().softmax(-1))
    draft_probs, target_probs = probs
    expected = (target_probs * (target_probs / draft_probs).log()).sum(-1).mean()
    found = distil.divergence(*models, rows)
    assert found.item() == pytest.approx(expected.item(), rel=0.05)  # it may be in bfloat16


def loss(draft: FastGPTNeoX, text: str) -> float:
    """Return the cross-entropy of the first 200 tokens of a file, in nats per token."""
    ids = Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(Path(text).read_text()).ids[:200]
    return torch.nn.functional.cross_entropy(run(draft, ids[:-1]), torch.tensor(ids[1:])).item()


def require_learned(folder: Path, text: str) -> None:
    """Fail unless the draft's loss is far below that of an untrained draft."""
    new = distil.new_draft(read_config(folder), torch.device("cpu"))
    untrained = FastGPTNeoX.from_tensors(new.config, dict(new.named_parameters()))
    assert loss(FastGPTNeoX.from_pretrained(folder), text) < loss(untrained, text) - 0.3


def test_a_draft_learns_and_the_text_stays_the_targets(
    text: str, tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "deep" / "draft"
    assert distil.main(arguments(text, folder, steps=40) + SHAPE) == 0
    require_learned(folder, text)
    assert [file.name for file in folder.parent.iterdir()] == ["draft"]  # no temporary files
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    ids = {}
    for method in ("ar", "linear", "dynatree"):
        capsys.readouterr()
        words = ["--target", str(TARGET), "--draft", str(folder), "--device", "cpu", "--json"]
        words += ["--prompt", "The ship", "--max-new-tokens", "60", "--method", method]
        assert dynatree(words) == 0
        ids[method] = json.loads(capsys.readouterr().out)["token_ids"]
    assert ids["ar"] == ids["linear"] == ids["dynatree"] and len(ids["ar"]) == 60


def interrupt_after(n: int, options: list[str]) -> None:
    """Run with a checkpoint after every step, and interrupt after the n-th one as Ctrl-C does."""
    save, saved = distil.save_state, []

    def save_and_end(*state: object) -> None:
        save(*state)
        saved.append(state)
        if len(saved) == n:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distil, "SAVE_S", 0.0)
        patch.setattr(distil, "save_state", save_and_end)
        assert distil.main(options) == 130


def test_an_interrupted_run_resumes_exactly(text: str, tmp_path: Path, capsys: Captured) -> None:
    assert distil.main(arguments(text, tmp_path / "whole", steps=8) + SHAPE) == 0
    options = arguments(text, tmp_path / "ended", steps=8) + SHAPE
    interrupt_after(4, options)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ended.training", "whole"]
    assert distil.main(options) == 0
    assert "resuming at step 4" in capsys.readouterr().err
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "ended")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_unusable_checkpoint_is_not_deleted(text: str, tmp_path: Path, capsys: Captured) -> None:
    """Check truncated and edited checkpoints, and one that another command has written."""
    options = arguments(text, tmp_path / "draft") + SHAPE
    interrupt_after(1, options)
    file = tmp_path / "draft.training"
    whole = file.read_bytes()
    assert "to another command" in error_line(capsys, distil.main, [*options, "--steps", "9"])
    edited = bytearray(whole)
    edited[len(whole) // 2] ^= 1
    for content in (b"", b"PK", whole[:100], whole[:-1], bytes(edited)):
        file.write_bytes(content)
        assert "is damaged: delete it" in error_line(capsys, distil.main, options)
        assert file.read_bytes() == content


def test_a_second_run_ends_before_it_learns(text: str, tmp_path: Path, capsys: Captured) -> None:
    with locked(tmp_path / "draft.training"):
        line = error_line(capsys, distil.main, arguments(text, tmp_path / "draft") + SHAPE)
    assert "is being written by another run" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--text", "SHORT"], "too short"),
        (["--text", "LATIN"], "is not UTF-8"),
        (["--out", "FULL"], "exists already"),
        (["--out", "SHORT/draft"], "SHORT"),
        (["--hidden", "100"], "gives 25 rotary dimensions"),
        (["--hidden", "10000000"], "needs"),
        (["--layers", "0"], "--layers"),
        (["--context", "4000"], "it must be at most 1024"),
        (["--rate", "nan"], "--rate is nan"),
    ],
)
def test_a_mistake_is_one_line(
    changes: list[str], message: str, text: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "SHORT").write_text("A short text.")
    (tmp_path / "LATIN").write_bytes(b"caf\xe9 " * 500)
    (tmp_path / "FULL").mkdir()
    before = read_all(tmp_path)
    words = [f"{tmp_path}/{word}" if word[0].isupper() else word for word in changes]
    options = arguments(text, tmp_path / "draft") + SHAPE + words
    assert message in error_line(capsys, distil.main, options)
    assert read_all(tmp_path) == before


def test_a_loss_that_is_no_number_ends_the_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(distil, "divergence", lambda *_: torch.tensor(torch.nan))
    options = arguments(text, tmp_path / "draft") + SHAPE
    assert "--rate is too high" in error_line(capsys, distil.main, options)
    assert not read_all(tmp_path)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif("pretend_cuda" in sys.modules, reason="a pretended device has no gradients")
def test_a_draft_learns_on_a_gpu(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    options = arguments(text, folder, steps=40) + SHAPE
    assert distil.main([*options, "--device", "cuda"]) == 0
    require_learned(folder, text)
