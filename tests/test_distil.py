"""A draft learns from text and target, goes on exactly after whatever ended it, and dynatree.py
takes it; a mistake is one line and costs nothing."""

import json
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import TINY, assert_close, random_config, random_tensors, run
from safetensors.torch import load_file, save, save_file
from test_enlarge import contents
from tokenizers import Tokenizer
from torch import Tensor

from benchmark.prompts import BUILTIN
from cli.errors import UsageError
from cli.main import main as dynatree
from engine.checkpoint import EMBED_OUT, read_config
from engine.files import locked
from engine.model import FastGPTNeoX
from gpt_neox import GPTNeoX
from tools import distil, folders
from tools.distil import Training, read_rows, write_rows

ROOT = TINY.parent.parent
TARGET = str(TINY / "draft")  # the smaller one
Captured = pytest.CaptureFixture[str]
SHAPE = ["--layers", "1", "--hidden", "16"]
SMALL = ["--batch", "4", "--context", "16", "--rate", "0.01", "--device", "cpu"]
QUICK = {"N_PROMPTS": 2, "PROMPT_TOKENS": 8, "NEW_TOKENS": 8, "N_WRITTEN": {"cpu": 4}}


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK.items():
        monkeypatch.setattr(distil, name, value)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("\n\n".join(BUILTIN * 2))
    return str(file)


def arguments(text: str, out: Path, steps: int = 5) -> list[str]:
    return ["--target", TARGET, "--text", text, "--out", str(out), "--steps", str(steps)] + SMALL


def figures(folder: Path) -> dict[str, tuple[float, float]]:
    """Of a card: before and after."""
    card = (folder / "README.md").read_text()
    rows = re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \|$", card, re.M)
    return {name: (float(before), float(after)) for name, before, after in rows}


def a_training(n_ids: int = 96, n_target_ids: int = 104, **changes: object) -> Training:
    """Of one random model by another, one of which has a padded vocabulary."""
    models = []
    for seed, vocab_size in ((1, n_ids), (2, n_target_ids)):
        config = random_config(vocab_size=vocab_size)
        tensors = random_tensors(config, seed)
        tensors[EMBED_OUT][96:] *= 9  # what would most often be written
        models.append(GPTNeoX.from_tensors(config, tensors))
    text = torch.randint(96, (200,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    plan = {"steps": 9, "batch": 4, "context": 16, "rate": 0.01, "ce": 0.2}
    plan |= {"greedy": 0.25, "sampled": 0.25, "seed": 0, "command": "distil"}
    found = Training(Namespace(**(plan | changes)), models[0].requires_grad_(True), text, 96)
    found.teacher = models[1]
    found.dtype = torch.float32
    return found


@pytest.mark.parametrize(("n_ids", "n_target_ids"), [(96, 104), (104, 96)])
def test_the_loss_is_next_token_and_divergence(n_ids: int, n_target_ids: int) -> None:
    """By hand, of the ids that both know, each row read by itself as dynatree.py would."""
    at_work = a_training(n_ids, n_target_ids)
    rows = at_work.draw_rows()
    following = rows[:, 1:, None].long()
    probs = []
    for model in (at_work.model, at_work.teacher):
        fast = FastGPTNeoX.from_tensors(model.config, dict(model.named_parameters()))
        logits = torch.stack([run(fast, row[:-1].tolist()) for row in rows])
        probs.append(logits[..., :96].double().softmax(-1))
    draft_probs, target_probs = probs
    next_token = -draft_probs.gather(-1, following).log().mean()
    divergence = (target_probs * (target_probs / draft_probs).log()).sum(-1).mean()
    assert abs(at_work.loss(rows).item() - (0.2 * next_token + 0.8 * divergence)) < 1e-4


def test_rows_written_at_once_are_those_of_one_at_a_time() -> None:
    config = random_config(is_parallel=False)
    tensors = random_tensors(config, seed=3)
    oracle = FastGPTNeoX.from_tensors(config, tensors)
    model = GPTNeoX.from_tensors(config, tensors)
    prompts = torch.randint(96, (3, 5), generator=torch.Generator().manual_seed(1))
    rows = write_rows(model, prompts, 12, torch.zeros(3), torch.Generator(), n_ids=96)
    for prompt, row in zip(prompts.tolist(), rows.tolist(), strict=True):
        for _ in range(12):
            prompt.append(int(run(oracle, prompt)[-1].argmax()))
        assert row == prompt
        assert_close(read_rows(model, torch.tensor([row]))[0], run(oracle, row))


def test_what_is_sampled_has_the_targets_distribution() -> None:
    config = random_config(vocab_size=8)
    model = GPTNeoX.from_tensors(config, random_tensors(config, seed=3))
    prompts = torch.tensor([[5, 2, 7]]).expand(4000, -1)
    for temperature in (0.5, 1.0):
        temperatures = torch.full((4000,), temperature)
        chance = torch.Generator().manual_seed(0)
        drawn = write_rows(model, prompts, 1, temperatures, chance, n_ids=8)[:, -1]
        probs = (read_rows(model, prompts[:1])[0, -1] / temperature).softmax(-1)
        counts = drawn.bincount(minlength=8)
        possible = probs > 1e-3
        chi_square = ((counts - 4000 * probs) ** 2 / (4000 * probs))[possible].sum()
        assert chi_square < 24.3  # 0.1 % of samples, 7 degrees of freedom


def test_a_step_in_parts_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are learned from a few at a time, so that their logits fit."""
    whole, parts = a_training(), a_training()
    losses = [whole.advance() for _ in range(3)]
    monkeypatch.setattr(distil, "MAX_LOGITS", {"cpu": 1})
    assert losses == pytest.approx([parts.advance() for _ in range(3)], abs=1e-4)


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    at_work = a_training()
    at_work.model.embed_out.weight.data.fill_(torch.nan)
    with pytest.raises(UsageError, match="--rate is too high"):
        at_work.advance()


def test_shares_of_rows_are_the_targets() -> None:
    """Rows that are no stretch of the text, as often as was asked for, and not all ever written."""
    at_work = a_training(batch=400)  # so many that it writes before each step
    stretches = {tuple(row.tolist()) for row in at_work.text.unfold(0, 17, 1)}
    is_text = [tuple(row.tolist()) in stretches for row in at_work.draw_rows()]
    assert 0.4 < sum(is_text) / 400 < 0.6
    assert at_work.written.max() < 96  # what the draft can read
    prompts = at_work.written[:, :2].long()  # an eighth of 16
    greedy = write_rows(at_work.teacher, prompts, 15, torch.zeros(4), torch.Generator(), 96)
    is_greedy = (at_work.written == greedy).all(dim=1)
    assert is_greedy[:2].all() and not is_greedy[2:].all()
    for at_work.step in range(1, distil.N_KEPT + 3):
        before = at_work.written
        at_work.draw_rows()
    assert len(before) == len(at_work.written) == 4 * distil.N_KEPT
    assert (at_work.written != before).any(dim=1).sum() == 4


def loss(draft: FastGPTNeoX, text: str) -> float:
    """Of what follows each token of a text's beginning, in nats."""
    ids = Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(Path(text).read_text()).ids[:200]
    return torch.nn.functional.cross_entropy(run(draft, ids[:-1]), torch.tensor(ids[1:])).item()


def test_a_draft_learns_and_is_taken_at_once(text: str, tmp_path: Path, capsys: Captured) -> None:
    assert distil.main(arguments(text, tmp_path / "draft", steps=40) + SHAPE) == 0
    config = read_config(tmp_path / "draft")
    new = FastGPTNeoX.from_tensors(config, distil.draw_weights(config, seed=0))
    assert loss(FastGPTNeoX.from_pretrained(tmp_path / "draft"), text) < loss(new, text) - 0.3
    assert figures(tmp_path / "draft").keys() == distil.METHODS.keys()
    names = {file.name for file in (tmp_path / "draft").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert [file.name for file in tmp_path.iterdir()] == ["draft"]  # nothing beside it is left
    models = ["--target", TARGET, "--draft", str(tmp_path / "draft"), "--device", "cpu"]
    capsys.readouterr()
    assert dynatree(models + ["--prompt", "The ship", "--max-new-tokens", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_draft_goes_on_learning(is_tied: bool, text: str, tmp_path: Path) -> None:
    """A tied embedding is learned and saved once."""
    folder = random_checkpoint(tmp_path / "random", is_tied)
    options = arguments(text, tmp_path / "draft", steps=2) + ["--target", str(folder)]
    assert distil.main(options + ["--init", str(folder)]) == 0
    assert read_config(tmp_path / "draft") == read_config(folder)
    assert figures(tmp_path / "draft")["linear K=5"][0] == 3.5  # it is the target: 6, then 1
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "draft" / "model.safetensors")
    assert after.keys() == before.keys() and (EMBED_OUT in after) != is_tied
    assert not any(torch.equal(after[name], before[name]) for name in after)


def random_checkpoint(folder: Path, is_tied: bool) -> Path:
    """Of a small random model that has the embedded pair's tokenizer."""
    folder.mkdir()
    shutil.copy(TINY / "draft" / "tokenizer.json", folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    raw = json.loads((TINY / "draft" / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": is_tied}))
    tensors = random_tensors(read_config(folder), seed=1)
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_a_killed_run_has_it(text: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of a run that was ended in its step 3, where it saves after every one."""
    with monkeypatch.context() as patch:
        patch.setattr(distil, "SAVE_S", 0.0)
        end_in_step(3, "loss", RuntimeError, patch)
        assert distil.main(arguments(text, out) + SHAPE) == 70
    return out.with_name(f"{out.name}.training")


def end_in_step(
    step: int, place: str, end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a training end in this step, once one of its methods has done what it does."""
    original = getattr(Training, place)

    def ended(self: Training, *rest: Tensor) -> object:
        found = original(self, *rest)
        if self.step == step:
            raise end
        return found

    monkeypatch.setattr(Training, place, ended)


def test_an_interrupted_run_goes_on_exactly(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """From its last checkpoint, of step 4, before which the target has written rows."""
    for name, value in (("N_USES", 1), ("N_KEPT", 2), ("SAVE_S", 0.0)):
        monkeypatch.setattr(distil, name, value)
    assert distil.main(arguments(text, tmp_path / "whole", steps=8) + SHAPE) == 0
    options = arguments(text, tmp_path / "ended", steps=8) + SHAPE
    with monkeypatch.context() as patch:
        end_in_step(4, "rate", KeyboardInterrupt, patch)
        assert distil.main(options) == 130
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ended.training", "whole"]
    assert distil.main(options) == 0
    assert "going on from step 4" in capsys.readouterr().err
    require_equal(tmp_path / "whole", tmp_path / "ended")
    assert figures(tmp_path / "ended") == figures(tmp_path / "whole")


def require_equal(folder: Path, other: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    weights = load_file(other / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_run_that_is_killed_goes_on_exactly(text: str, tmp_path: Path) -> None:
    """By SIGKILL, wherever that meets it."""
    quick = f"for name, value in {QUICK | {'SAVE_S': 0.0}}.items(): setattr(distil, name, value)"
    script = f"import sys\nfrom tools import distil\n{quick}\ndistil.main(sys.argv[1:])"
    options = ["--threads", "1"] + SHAPE  # as conftest.py has it
    ended = arguments(text, tmp_path / "ended", steps=100) + options
    command = [sys.executable, "-c", script, *ended]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (tmp_path / "ended.training").exists():
            time.sleep(0.01)
        process.kill()
    if not (tmp_path / "ended").exists():  # or this process did not get its turn
        assert distil.main(ended) == 0
    assert distil.main(arguments(text, tmp_path / "whole", steps=100) + options) == 0
    require_equal(tmp_path / "whole", tmp_path / "ended")


@pytest.mark.parametrize(("place", "name"), [(distil, "write_whole"), (folders, "save_file")])
def test_a_full_disk_loses_nothing(
    place: object,
    name: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """A checkpoint does not fit, or the folder."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoint = as_a_killed_run_has_it(text, tmp_path / "draft", monkeypatch)
    options = arguments(text, tmp_path / "draft") + SHAPE
    with monkeypatch.context() as patch:
        patch.setattr(place, name, full)
        assert distil.main(options) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and "No space left on device" in line
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.name]
    assert distil.main(options) == 0
    assert "going on from step" in capsys.readouterr().err and (tmp_path / "draft").exists()


def test_another_runs_checkpoint_stays(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    checkpoint = as_a_killed_run_has_it(text, tmp_path / "draft", monkeypatch)
    before = contents(tmp_path)
    options = arguments(text, tmp_path / "draft") + SHAPE
    assert distil.main(options + ["--seed", "1"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "is of another command" in line and line.endswith(" ".join(SHAPE))
    with locked(checkpoint):
        assert distil.main(options) == 2
        assert "another run" in capsys.readouterr().err.splitlines()[-1]
    assert contents(tmp_path) == before


def test_a_damaged_checkpoint_is_one_line(text: str, tmp_path: Path, capsys: Captured) -> None:
    """It was status 70, and torch's advice to load it unsafely."""
    file = tmp_path / "draft.training"
    at_work = a_training()
    at_work.advance()
    distil.save_state(file, at_work, {"loss": 1.0})
    whole = file.read_bytes()
    assert distil.restore(file, a_training()) == {"loss": 1.0}
    n_header = int.from_bytes(whole[:8], "little") + 8
    damaged = [b"", b"PK", whole[:100], whole[:-1], (2**40).to_bytes(8, "little") + whole[8:]]
    damaged += [whole[:at] + b"\0" + whole[at + 1 :] for at in range(8, n_header, n_header // 40)]
    damaged.append(save(load_file(file)))
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(UsageError, match="is damaged: delete it"):
            distil.restore(file, a_training())
    file.write_bytes(whole[:-1])
    assert distil.main(arguments(text, tmp_path / "draft") + SHAPE) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and "is damaged: delete it to begin anew" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--text", "/dev/zero"], "/dev/zero is a device"),
        (["--text", "SHORT"], "too short"),
        (["--text", "LATIN"], "is not UTF-8"),
        (["--text", "."], "is a folder"),
        (["--text", "nowhere.txt"], "nowhere.txt is not there"),
        (["--out", "FULL"], "exists already"),
        (["--out", TARGET], "exists already"),
        (["--out", "KILLED"], "KILLED.unfinished is another run's"),
        (["--out", "SHORT/draft"], "cannot be written"),
        (["--hidden", "100"], "25 rotary dims of 100 cannot be rotated in pairs"),
        (["--hidden", "10000000"], "would take"),
        (["--hidden", "1000000000"], "no tensor has such sizes"),
        (["--layers", "1000000"], "num_hidden_layers"),
        (["--layers", "0"], "--layers"),
        (["--init", TARGET], "give --layers and --hidden of a new draft, or --init"),
        (["--minutes", "3"], "not allowed with"),
        (["--context", "4000"], "there are 2048 positions"),
        (["--greedy", "0.7", "--sampled", "0.4"], "together"),
        (["--ce", "nan"], "nan is outside 0 to 1"),
        (["--rate", "1e30"], "1e30 is outside"),
        (["--batch", "many"], "invalid int value"),
        (["--target", "nowhere/model"], "nowhere/model"),
    ],
)
def test_a_mistake_is_one_line(
    changes: list[str], message: str, text: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "SHORT").write_text("A short text.")
    (tmp_path / "LATIN").write_bytes(b"caf\xe9 " * 500)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "KILLED.unfinished").mkdir()
    before = contents(tmp_path)
    places = ("SHORT", "LATIN", "FULL", "KILLED")
    words = [f"{tmp_path}/{w}" if w.partition("/")[0] in places else w for w in changes]
    assert distil.main(arguments(text, tmp_path / "draft") + SHAPE + words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and message in line
    assert contents(tmp_path) == before


def test_tokenizers_that_differ(text: str, tmp_path: Path, capsys: Captured) -> None:
    folder = random_checkpoint(tmp_path / "random", is_tied=False)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert distil.main(arguments(text, tmp_path / "draft") + ["--init", str(folder)]) == 2
    assert "tokenizers differ: merges" in capsys.readouterr().err


def test_a_text_in_pieces_is_the_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil, "PIECE", 100)
    whole = Path(text).read_text()
    parts = list(distil.pieces(whole))
    assert "".join(parts) == whole and len(parts) > 20
    tokenizer = Tokenizer.from_file(str(TINY / "draft" / "tokenizer.json"))
    train, held_out = distil.read_corpus([text] * 2, tokenizer, 4096, (0,))
    ends = [tokenizer.decode(ids[: len(ids) // 2].tolist()) for ids in (train, held_out)]
    assert "".join(ends) == whole and 15 < len(train) / len(held_out) < 20
    for ids in (train.tolist(), held_out.tolist()):
        assert ids[: len(ids) // 2] * 2 == ids and ids.count(0) == 2 and ids[0] == 0


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
gpu = pytest.mark.skipif("pretend_cuda" in sys.modules, reason="a pretended one has no gradients")


@pytest.mark.cuda
@cuda
@gpu
def test_a_draft_learns_on_a_gpu(text: str, tmp_path: Path) -> None:
    options = arguments(text, tmp_path / "draft", steps=40) + SHAPE
    assert distil.main(options + ["--device", "cuda"]) == 0
    config = read_config(tmp_path / "draft")
    new = FastGPTNeoX.from_tensors(config, distil.draw_weights(config, seed=0))
    assert loss(FastGPTNeoX.from_pretrained(tmp_path / "draft"), text) < loss(new, text) - 0.3
