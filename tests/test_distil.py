"""Tests of tools/distil.py: a draft model or a head learns, an interrupted run resumes exactly,
dynatree.py can use the result, and a mistake is one line and leaves no files."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    TINY,
    Captured,
    error_line,
    generate,
    override,
    predict_states,
    random_config,
    random_tensors,
    run,
)
from safetensors.torch import load_file, save
from test_enlarge import read_all
from tokenizers import Tokenizer

from benchmark.prompts import BUILTIN
from cli.main import main as dynatree
from engine.eagle_head import load_head
from engine.model import FastGPTNeoX, load_reference
from gpt_neox import GPTNeoX, read_config, rotary_table
from methods.eagle import ReferenceHead
from methods.static import PaddedAutoregressive
from tools import distil, draft_training, eagle_training, own_text, training
from tools.batches import run_layers

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
    found = draft_training.divergence(*models, rows)
    assert found.item() == pytest.approx(expected.item(), rel=0.05)  # it may be in bfloat16


def loss(draft: FastGPTNeoX, text: str) -> float:
    """Return the cross-entropy of the first 200 tokens of a file, in nats per token."""
    ids = Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(Path(text).read_text()).ids[:200]
    return torch.nn.functional.cross_entropy(run(draft, ids[:-1]), torch.tensor(ids[1:])).item()


def require_learned(folder: Path, text: str) -> None:
    """Fail unless the draft's loss is far below that of an untrained draft."""
    new = draft_training.new_draft(read_config(folder), torch.device("cpu"))
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
    save, saved = training.save_progress, []

    def save_and_end(*state: object) -> None:
        save(*state)
        saved.append(state)
        if len(saved) == n:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SAVE_S", 0.0)
        patch.setattr(training, "save_progress", save_and_end)
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
    """Check truncated and edited checkpoints."""
    options = arguments(text, tmp_path / "draft") + SHAPE
    interrupt_after(1, options)
    file = tmp_path / "draft.training"
    whole = file.read_bytes()
    edited = bytearray(whole)
    edited[len(whole) // 2] ^= 1
    for content in (b"", b"PK", whole[:100], whole[:-1], bytes(edited)):
        file.write_bytes(content)
        assert "is damaged: delete it" in error_line(capsys, distil.main, options)
        assert file.read_bytes() == content


def test_a_run_continues_only_with_what_it_began_with(
    text: str, tmp_path: Path, capsys: Captured
) -> None:
    """Replace the target, the text or an option, and check that the error names it. Once, a run
    went on with another target."""
    target, corpus = tmp_path / "target", tmp_path / "corpus.txt"
    shutil.copytree(TARGET, target)
    shutil.copy(text, corpus)
    options = arguments(str(corpus), tmp_path / "draft") + [*SHAPE, "--target", str(target)]
    interrupt_after(1, options)
    progress, file = (tmp_path / "draft.training").read_bytes(), target / "model.safetensors"

    def error_after(file: Path, content: bytes, *words: str) -> str:
        """Return the error of the run with another content of a file."""
        before = file.read_bytes()
        file.write_bytes(content)
        line = error_line(capsys, distil.main, [*options, *words])
        file.write_bytes(before)
        return line

    tensors = load_file(file)
    tensors["gpt_neox.embed_in.weight"][5, 5] += 1
    assert "another --target; use" in error_after(file, save(tensors, {"format": "pt"}))
    config = target / "config.json"
    other = config.read_bytes().replace(b"1e-05", b"1e-06")
    assert "another --target; use" in error_after(config, other)
    others = "\n\n".join(reversed(BUILTIN)).encode()
    assert "another --text; use" in error_after(corpus, others)
    line = error_after(corpus, others, "--steps", "9", "--hidden", "32")
    assert "another --text, --hidden 16, --steps 5; use" in line
    assert (tmp_path / "draft.training").read_bytes() == progress
    assert distil.main([*options, "--threads", "1", "--target", f"{target}/"]) == 0


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
    options = override(arguments(text, tmp_path / "draft") + SHAPE, *words)
    assert message in error_line(capsys, distil.main, options)
    assert read_all(tmp_path) == before


def test_a_loss_that_is_no_number_ends_the_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(draft_training, "divergence", lambda *_: torch.tensor(torch.nan))
    options = arguments(text, tmp_path / "draft") + SHAPE
    assert "--rate is too high" in error_line(capsys, distil.main, options)
    assert not read_all(tmp_path)


# EAGLE heads (tools/eagle_training.py).

EAGLE = ["--eagle", "--rate", "0.002"]


@pytest.fixture
def small_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target write only a few rows."""
    monkeypatch.setattr(own_text, "N_SEQUENCES", 16)
    monkeypatch.setattr(own_text, "MAX_BATCH", 4)
    monkeypatch.setattr(own_text, "N_PROMPT", 4)


def random_head() -> tuple[GPTNeoX, eagle_training.TrainableHead, torch.Tensor]:
    """Return a random target, a head as it is before training, and rows [B, T]."""
    config = random_config()
    target = GPTNeoX.from_tensors(config, random_tensors(config, 1))
    rows = torch.randint(96, (3, 9), generator=torch.Generator().manual_seed(0))
    head = eagle_training.TrainableHead(target, rows)
    torch.manual_seed(0)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    return target, head.requires_grad_(False), rows


def as_reference(target: GPTNeoX, head: eagle_training.TrainableHead) -> ReferenceHead:
    """Return the head that a checkpoint with these weights gives."""
    tensors = head.tensors()
    config = replace(target.config, num_hidden_layers=1)
    found = ReferenceHead.from_tensors(config, target.state_dict() | tensors)
    fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size)
    fc.load_state_dict({name: tensors[f"fc.{name}"] for name in ("weight", "bias")})
    found.add_state_input(fc.requires_grad_(False))
    return found


def test_the_passes_of_training_are_the_levels_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the prediction of each pass with plain runs of the head: on the target's states up to
    a token, then on its own, one state for each further pass."""
    monkeypatch.setattr(eagle_training, "N_PASSES", 3)
    target, head, rows = random_head()
    rotary = rotary_table(target.config, rows.shape[1], target.device)
    states = run_layers(target, rows, rotary)
    passes = eagle_training.run_passes(head, target.gpt_neox.embed_in(rows), states, rotary)
    plain, zeros = as_reference(target, head), torch.zeros(1, 32)
    for row, row_states in enumerate(states):
        tokens = rows[row].tolist()
        for end in range(3, len(tokens)):
            for depth, found in enumerate(passes):
                before = torch.cat([zeros, row_states[: end - depth]])
                for i in range(end - depth, end + 1):
                    predicted = predict_states(plain, tokens[: i + 1], before)
                    before = torch.cat([before, predicted[-1:]])
                torch.testing.assert_close(found[row, end], before[-1], atol=1e-3, rtol=1e-4)


def test_the_loss_of_a_head_is_the_cross_entropy() -> None:
    """Compare with torch's cross-entropy of the states of each pass."""
    target, head, rows = random_head()
    rotary = rotary_table(target.config, rows.shape[1], target.device)
    states = run_layers(target, rows, rotary)
    expected = []
    for predicted in eagle_training.run_passes(
        head, target.gpt_neox.embed_in(rows), states, rotary
    ):
        probs = target.embed_out(target.gpt_neox.final_layer_norm(states)).softmax(-1)
        logits = target.embed_out(target.gpt_neox.final_layer_norm(predicted))
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), probs.flatten(0, 1))
        distance = F.smooth_l1_loss(predicted, states)
        expected.append(cross_entropy + eagle_training.STATE_WEIGHT * distance)
    found = eagle_training.head_loss(head, target, rows)
    assert found.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)


def test_text_of_the_target_is_its_own() -> None:
    """Compare greedy rows of a batch with the text of the decoding loop."""
    target = load_reference(TARGET, torch.device("cpu"), torch.float32)
    prompts = torch.tensor([[5, 9, 200], [17, 4, 90]])
    rows = own_text.generate_batch(target, prompts, 20, temperature=0.0, seed=0)
    for prompt, row in zip(prompts.tolist(), rows.tolist(), strict=True):
        steps = generate(target, None, prompt, PaddedAutoregressive(), 17)
        assert row == prompt + [token for step in steps for token in step.tokens]
    sampled = own_text.generate_batch(target, prompts, 20, temperature=1.0, seed=0)
    assert not torch.equal(rows, sampled) and torch.equal(rows[:, :3], sampled[:, :3])


def head_cross_entropy(folder: Path, text: str) -> float:
    """Return the cross-entropy of a head's first 200 predictions from the target, in nats."""
    cpu = torch.device("cpu")
    target = load_reference(TARGET, cpu, torch.float32)
    head = load_head(folder, TARGET, cpu, torch.float32, is_reference=True)
    ids = Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(Path(text).read_text()).ids[:200]
    states = run_layers(target, torch.tensor([ids]), rotary_table(target.config, len(ids), cpu))[0]
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    logits = head.logits(predict_states(head, ids, before))
    return F.cross_entropy(logits, target.logits(states).softmax(-1)).item()


@pytest.mark.usefixtures("small_own_text")
def test_a_head_learns_and_the_text_stays_the_targets(
    text: str, tmp_path: Path, capsys: Captured
) -> None:
    """Compare a head after one step and after more, and then the text with ar's."""
    found = []
    for name, steps in (("new", 1), ("trained", 60)):
        folder = tmp_path / name
        assert distil.main(override(arguments(text, folder, steps), *EAGLE)) == 0
        assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
        found.append(head_cross_entropy(folder, text))
    assert found[1] < found[0] - 0.1
    ids = {}
    for method in ("ar", "linear"):
        capsys.readouterr()
        words = ["--target", str(TARGET), "--draft", str(folder), "--device", "cpu", "--json"]
        words += ["--prompt", "The ship", "--max-new-tokens", "60", "--method", method]
        assert dynatree(words) == 0
        ids[method] = json.loads(capsys.readouterr().out)["token_ids"]
    assert ids["ar"] == ids["linear"]


@pytest.mark.usefixtures("small_own_text")
def test_the_interrupted_training_of_a_head_resumes_exactly(
    text: str, tmp_path: Path, capsys: Captured
) -> None:
    assert distil.main(override(arguments(text, tmp_path / "whole", steps=6), *EAGLE)) == 0
    options = override(arguments(text, tmp_path / "ended", steps=6), *EAGLE)
    interrupt_after(4, options)  # the first one is before the first step
    assert distil.main(options) == 0
    assert "resuming at step 3" in capsys.readouterr().err
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "ended")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--eagle", "--layers", "1"], "--layers has no effect with --eagle"),
        (["--eagle", "--hidden", "8"], "--hidden has no effect with --eagle"),
        (["--eagle", "--context", "32"], "--context is 32, it must be above 32"),
        (["--eagle", "--batch", "0"], "--batch is 0, it must be at least 1"),
        (["--layers", "1"], "--hidden is missing; a draft model needs it"),
    ],
)
def test_sizes_belong_to_a_draft_model(
    words: list[str], message: str, text: str, tmp_path: Path, capsys: Captured
) -> None:
    assert message in error_line(
        capsys, distil.main, override(arguments(text, tmp_path / "x"), *words)
    )
    assert not read_all(tmp_path)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif("pretend_cuda" in sys.modules, reason="a pretended device has no gradients")
def test_a_draft_learns_on_a_gpu(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    options = arguments(text, folder, steps=40) + SHAPE
    assert distil.main(override(options, "--device", "cuda")) == 0
    require_learned(folder, text)
