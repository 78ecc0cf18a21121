"""Tests of training/distil.py: a draft model or a head learns, an interrupted run resumes exactly,
dynatree.py can use the result, and a mistake is one line and leaves no files."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fast import ReferenceHead, override, predict_states
from safetensors.torch import load_file, save
from small import TINY, Captured, error_line, random_config, random_tensors, run
from tokenizers import Tokenizer

from dynatree_lab.benchmark.prompts import BUILTIN
from dynatree_lab.cli.main import main as dynatree
from dynatree_lab.engine.eagle_head import load_head
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.training import distil, draft_training, eagle_training, loop, own_text
from dynatree_lab.training.batches import run_layers
from gpt_neox import GPTNeoX, read_config, rotary_table

TARGET = TINY / "draft"  # the smaller one
DRAFT = ["--rate", "0.01", "--layers", "1", "--hidden", "16"]
HEAD = ["--rate", "0.002", "--eagle"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("\n\n".join(BUILTIN * 2))
    return str(file)


@pytest.fixture(autouse=True)
def small_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target write only a few rows."""
    monkeypatch.setattr(own_text, "N_SEQUENCES", 16)
    monkeypatch.setattr(own_text, "MAX_BATCH", 4)
    monkeypatch.setattr(own_text, "N_PROMPT", 4)


def arguments(text: str, out: Path, steps: int = 5) -> list[str]:
    options = ["--target", str(TARGET), "--text", text, "--out", str(out), "--steps", str(steps)]
    return options + ["--batch", "4", "--context", "16", "--device", "cpu"]


def first_ids(text: str) -> list[int]:
    """Return the first 200 ids of a file."""
    return Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(Path(text).read_text()).ids[:200]


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


def require_learned(folder: Path, text: str) -> None:
    """Fail unless the draft's loss on a text is far below that of an untrained draft."""
    config, ids, losses = read_config(folder), first_ids(text), []
    new = dict(draft_training.new_draft(config).named_parameters())
    for draft in (FastGPTNeoX.from_pretrained(folder), FastGPTNeoX.from_tensors(config, new)):
        losses.append(F.cross_entropy(run(draft, ids[:-1]), torch.tensor(ids[1:])).item())
    assert losses[0] < losses[1] - 0.3


def test_a_draft_learns_and_can_be_used(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "draft"
    assert distil.main(arguments(text, folder, steps=40) + DRAFT) == 0
    require_learned(folder, text)
    assert [file.name for file in folder.parent.iterdir()] == ["draft"]  # no temporary files
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    words = ["--target", str(TARGET), "--draft", str(folder), "--prompt", "The ship"]
    assert dynatree([*words, "--max-new-tokens", "4", "--device", "cpu"]) == 0


def interrupt_after(n: int, options: list[str]) -> None:
    """Run with a checkpoint after every step, and interrupt after the n-th one as Ctrl-C does. The
    first one is before the first step."""
    save, saved = loop.Progress.save, []

    def save_and_end(*state: object) -> None:
        save(*state)
        saved.append(state)
        if len(saved) == n:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAVE_S", 0.0)
        patch.setattr(loop.Progress, "save", save_and_end)
        assert distil.main(options) == 130


@pytest.mark.parametrize("kind", [DRAFT, HEAD], ids=["draft", "head"])
def test_an_interrupted_run_resumes_exactly(
    kind: list[str], text: str, tmp_path: Path, capsys: Captured
) -> None:
    assert distil.main(arguments(text, tmp_path / "whole") + kind) == 0
    options = arguments(text, tmp_path / "ended") + kind
    interrupt_after(4, options)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ended.training", "whole"]
    assert distil.main(options) == 0
    assert "resuming at step 3" in capsys.readouterr().err
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "ended")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_continues_only_with_what_it_began_with(
    text: str, tmp_path: Path, capsys: Captured
) -> None:
    """Replace the target, the text or an option, and check that the error names it. Once, a run
    went on with another target."""
    target, corpus = tmp_path / "target", tmp_path / "corpus.txt"
    shutil.copytree(TARGET, target)
    shutil.copy(text, corpus)
    options = [*arguments(str(corpus), tmp_path / "draft"), *DRAFT]
    options = override(options, "--target", str(target))
    interrupt_after(1, options)
    progress, file = (tmp_path / "draft.training").read_bytes(), target / "model.safetensors"

    def error_after(file: Path, content: bytes, *words: str) -> str:
        """Return the error of the run with another content of a file."""
        before = file.read_bytes()
        file.write_bytes(content)
        line = error_line(capsys, distil.main, override(options, *words))
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
    assert distil.main(override(options, "--threads", "1", "--target", f"{target}/")) == 0


def test_ctrl_c_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loop.Progress(tmp_path / "a", {}).save(model, optimizer, 1)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        loop.Progress(tmp_path / "a", {}).save(model, optimizer, 2)
    assert loop.Progress(tmp_path / "a", {}).restore(model, optimizer) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--text", "SHORT"], "too short"),
        (["--text", "LATIN"], "LATIN cannot be read: 'utf-8' codec"),
        (["--out", "FULL"], "exists already"),
        (["--out", "SHORT/draft"], "cannot be written"),
        (["--hidden", "100"], "--hidden 100, --layers 1: hidden_size 100, 1 heads"),
        (["--batch", "0"], "--batch is 0, it must be above 0"),
        (["--eagle"], "--layers and --hidden have no effect with --eagle"),
    ],
)
def test_a_mistake_is_one_line(
    changes: list[str], message: str, text: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "SHORT").write_text("A short text.")
    (tmp_path / "LATIN").write_bytes(b"caf\xe9 " * 500)
    (tmp_path / "FULL").mkdir()
    before = sorted(tmp_path.rglob("*"))
    words = [f"{tmp_path}/{word}" if word[0].isupper() else word for word in changes]
    options = override([*arguments(text, tmp_path / "draft"), *DRAFT], *words)
    assert message in error_line(capsys, distil.main, options)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_draft_model_needs_sizes(text: str, tmp_path: Path, capsys: Captured) -> None:
    line = error_line(capsys, distil.main, arguments(text, tmp_path / "draft"))
    assert "a draft model needs --layers and --hidden" in line


def test_a_loss_that_is_no_number_ends_the_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(draft_training, "divergence", lambda *_: torch.tensor(torch.nan))
    options = arguments(text, tmp_path / "draft") + DRAFT
    line = error_line(capsys, distil.main, options)
    assert "the loss of step 0 is nan: lower --rate, and delete " in line


# EAGLE heads (dynatree_lab/training/eagle_training.py).


def random_head() -> tuple[GPTNeoX, eagle_training.TrainableHead, torch.Tensor, torch.Tensor]:
    """Return a random target, a head as it is before training, rows [B, T] and their states."""
    config = random_config()
    target = GPTNeoX.from_tensors(config, random_tensors(config, 1))
    rows = torch.randint(96, (3, 9), generator=torch.Generator().manual_seed(0))
    head = eagle_training.TrainableHead(target, rows)
    torch.manual_seed(0)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    states = run_layers(target, rows, rotary_table(config, rows.shape[1], CPU))
    return target, head.requires_grad_(False), rows, states


def run_passes(
    target: GPTNeoX, head: eagle_training.TrainableHead, rows: torch.Tensor, states: torch.Tensor
) -> list[torch.Tensor]:
    rotary = rotary_table(target.config, rows.shape[1], CPU)
    return eagle_training.run_passes(head, target.gpt_neox.embed_in(rows), states, rotary)


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
    target, head, rows, states = random_head()
    passes = run_passes(target, head, rows, states)
    plain, zeros = as_reference(target, head), torch.zeros(1, 32)
    for row, row_states in enumerate(states):
        tokens = rows[row].tolist()
        for end in range(3, len(tokens)):
            for depth, found in enumerate(passes):
                before = torch.cat([zeros, row_states[: end - depth]])
                for i in range(end - depth, end + 1):
                    last = predict_states(plain, tokens[: i + 1], before)[-1:]
                    before = torch.cat([before, last])
                torch.testing.assert_close(found[row, end], before[-1], atol=1e-3, rtol=1e-4)


def test_the_loss_of_a_head_is_the_cross_entropy() -> None:
    """Compare with torch's cross-entropy of the states of each pass."""
    target, head, rows, states = random_head()
    probs = target.logits(states).softmax(-1).flatten(0, 1)
    expected = []
    for predicted in run_passes(target, head, rows, states):
        cross_entropy = F.cross_entropy(target.logits(predicted).flatten(0, 1), probs)
        distance = F.smooth_l1_loss(predicted, states)
        expected.append(cross_entropy + eagle_training.STATE_WEIGHT * distance)
    found = eagle_training.head_loss(head, target, rows)
    assert found.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)


def test_text_of_the_target_is_its_own() -> None:
    """Compare greedy rows of a batch with the target's best token after each of their tokens."""
    target = GPTNeoX.from_pretrained(TARGET)
    prompts = torch.tensor([[5, 9, 200], [17, 4, 90]])
    rows = own_text.generate_batch(target, prompts, 20, temperature=0.0, seed=0)
    for prompt, row in zip(prompts.tolist(), rows.tolist(), strict=True):
        best = run(target, row[:-1]).argmax(-1).tolist()
        assert row == prompt + best[2:]
    sampled = own_text.generate_batch(target, prompts, 20, temperature=1.0, seed=0)
    assert not torch.equal(rows, sampled) and torch.equal(rows[:, :3], sampled[:, :3])


def test_a_head_learns(text: str, tmp_path: Path) -> None:
    """Compare the cross-entropy of a written head's predictions with that of a new head."""
    target, ids = GPTNeoX.from_pretrained(TARGET), first_ids(text)
    states = run_layers(target, torch.tensor([ids]), rotary_table(target.config, len(ids), CPU))[0]
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    new = eagle_training.TrainableHead(target, torch.tensor([ids])).requires_grad_(False)
    folder = tmp_path / "head"
    assert distil.main(arguments(text, folder, steps=30) + HEAD) == 0
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    losses = []
    for head in (load_head(folder, TARGET, CPU, torch.float32), as_reference(target, new)):
        logits = target.logits(predict_states(head, ids, before))
        losses.append(F.cross_entropy(logits, target.logits(states).softmax(-1)).item())
    assert losses[0] < losses[1] - 0.1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif("pretend_cuda" in sys.modules, reason="a pretended device has no gradients")
def test_a_draft_learns_on_a_gpu(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    options = [*arguments(text, folder, steps=40), *DRAFT]
    assert distil.main(override(options, "--device", "cuda")) == 0
    require_learned(folder, text)
