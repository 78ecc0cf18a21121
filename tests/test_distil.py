"""A draft learns from text and target, goes on exactly after whatever ended it, and dynatree.py
takes it; a mistake is one line and costs nothing."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, assert_close, random_config, random_model, random_tensors, run
from safetensors.torch import load_file
from test_enlarge import contents
from torch import Tensor

from benchmark.prompts import BUILTIN
from cli.main import main as dynatree
from engine.checkpoint import EMBED_OUT, Config, read_config
from engine.files import locked
from gpt_neox import GPTNeoX
from tools import corpus, distil, folders, outcome, resume
from tools.batch import read_texts, write_texts
from tools.distil import Training
from tools.folders import published_json
from tools.job import ALONE, Job, Plan, Source

Captured = pytest.CaptureFixture[str]
SHAPE = ["--layers", "1", "--hidden", "16"]
SMALL = ["--batch", "4", "--context", "16", "--rate", "0.01", "--device", "cpu"]


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "N_WINDOWS", 4)
    monkeypatch.setattr(outcome, "N_PROMPTS", 1)
    monkeypatch.setattr(outcome, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(outcome, "NEW_TOKENS", 8)
    monkeypatch.setattr(distil, "N_WRITTEN", {"cpu": 4})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("\n\n".join(BUILTIN * 2))
    return str(file)


@pytest.fixture(scope="module")
def target(text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that this tool has made itself."""
    folder = str(tmp_path_factory.mktemp("models") / "target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome, "N_WINDOWS", 1)
        options = ["--text", text, "--out", folder, "--vocab", "400", "--steps", "30"]
        assert distil.main(options + SHAPE + SMALL) == 0
    return folder


def arguments(target: str, text: str, out: Path, steps: int = 5) -> list[str]:
    return ["--target", target, "--text", text, "--out", str(out), "--steps", str(steps)] + SMALL


def figures(folder: Path) -> dict[str, tuple[float, float]]:
    """Of a card: before and after."""
    rows = re.findall(
        r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \|$", (folder / "README.md").read_text(), re.M
    )
    return {name: (float(before), float(after)) for name, before, after in rows}


def plain_model(seed: int, **changes: object) -> GPTNeoX:
    """As it is trained, without gradients; random_model(seed, **changes) has the same weights."""
    config = random_config(**changes)
    return GPTNeoX.from_tensors(config, random_tensors(config, seed), fuse=False)


@pytest.mark.parametrize(
    "changes",
    [{}, {"is_parallel": False}, {"is_tied": True}, {"has_attention_bias": False}]
    + [{"activation": "gelu_new", "rotary_fraction": 1.0}],
)
def test_logits_of_a_batch_are_those_of_one_text_at_a_time(changes: dict) -> None:
    config = random_config(**changes)
    tokens = torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(0))
    logits = read_texts(plain_model(seed=3, **changes), tokens)
    expected = random_model(seed=3, **changes)
    for row in range(3):
        assert_close(logits[row], run(expected, tokens[row].tolist()))
    assert Config.from_json(published_json(config)) == config


@pytest.mark.parametrize(("eos_ids", "written"), [((), None), ((7,), 7), ((7, 3), [7, 3])])
def test_one_end_of_text_is_written_as_pythias(eos_ids: tuple[int, ...], written: object) -> None:
    """What else reads the folder may want a number."""
    raw = published_json(random_config(eos_ids=eos_ids))
    assert raw["eos_token_id"] == written and Config.from_json(raw).eos_ids == eos_ids


def test_texts_written_at_once_are_those_of_one_at_a_time() -> None:
    model = plain_model(seed=3)
    oracle = random_model(seed=3)
    prompts = torch.randint(96, (3, 5), generator=torch.Generator().manual_seed(1))
    texts = write_texts(model, prompts, 12, torch.zeros(3), torch.Generator(), n_ids=96)
    for row in range(3):
        text = prompts[row].tolist()
        for _ in range(12):
            text.append(int(run(oracle, text)[-1].argmax()))
        assert texts[row].tolist() == text


def test_what_is_sampled_has_the_targets_distribution() -> None:
    model = plain_model(seed=3, vocab_size=8)
    prompts = torch.tensor([[5, 2, 7]]).expand(4000, -1)
    for temperature in (0.5, 1.0):
        temperatures = torch.full((4000,), temperature)
        chance = torch.Generator().manual_seed(0)
        drawn = write_texts(model, prompts, 1, temperatures, chance, n_ids=8)[:, -1]
        probs = (read_texts(model, prompts[:1])[0, -1] / temperature).softmax(-1)
        counts = drawn.bincount(minlength=8)
        possible = probs > 1e-3
        chi_square = ((counts - 4000 * probs) ** 2 / (4000 * probs))[possible].sum()
        assert chi_square < 24.3  # 0.1 % of samples, 7 degrees of freedom


def little_plan(**changes: object) -> Plan:
    values = {"steps": 9, "batch": 4, "context": 16, "rate": 0.01, "ce": 0.2}
    values |= {"greedy": 0.25, "sampled": 0.25, "seed": 0}
    return Plan(**(values | changes))


def little_training(n_ids: int = 96, n_target_ids: int = 104, **changes: object) -> Training:
    """Of one model by another, one of which has a padded vocabulary."""
    models = []
    for seed, vocab_size in ((1, n_ids), (2, n_target_ids)):
        config = random_config(vocab_size=vocab_size)
        tensors = random_tensors(config, seed)
        tensors[EMBED_OUT][96:] *= 9  # what would most often be written
        models.append(GPTNeoX.from_tensors(config, tensors, fuse=False))
    text = torch.randint(96, (200,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    found = Training(little_plan(**changes), models[0].requires_grad_(True), text, models[1])
    found.dtype = torch.float32
    return found


@pytest.mark.parametrize(("n_ids", "n_target_ids"), [(96, 104), (104, 96)])
def test_the_loss_is_next_token_and_divergence(n_ids: int, n_target_ids: int) -> None:
    """By hand, of the ids that both know."""
    at_work = little_training(n_ids, n_target_ids)
    rows = at_work.draw_rows()
    tokens = rows[:, :-1].long()
    following = rows[:, 1:, None].long()
    with torch.no_grad():
        draft_probs = read_texts(at_work.model, tokens)[..., :96].double().softmax(-1)
        target_probs = read_texts(at_work.teacher, tokens)[..., :96].double().softmax(-1)
    next_token = -draft_probs.gather(-1, following).log().mean()
    divergence = (target_probs * (target_probs / draft_probs).log()).sum(-1).mean()
    assert abs(at_work.loss(rows).item() - (0.2 * next_token + 0.8 * divergence)) < 1e-4


def test_a_step_in_parts_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are learned from a few at a time, so that their logits fit."""
    whole = little_training()
    parts = little_training()
    losses = [whole.advance() for _ in range(3)]
    monkeypatch.setattr(distil, "MAX_LOGITS", {"cpu": 1})
    assert losses == pytest.approx([parts.advance() for _ in range(3)], abs=1e-4)


def test_a_tied_embedding_is_learned_and_saved_once() -> None:
    text = torch.randint(96, (200,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    both = []
    for seed in (1, 2):
        model = plain_model(seed, is_tied=True).requires_grad_(True)
        both.append(Training(little_plan(**ALONE), model, text, None))
    both[0].advance()
    both[1].restore(both[0].state())
    assert both[1].advance() == both[0].advance()
    model = both[1].model
    assert model.embed_out.weight is model.gpt_neox.embed_in.weight
    tensors = {name: half.float() for name, half in outcome.saved_tensors(model).items()}
    assert EMBED_OUT not in tensors
    tokens = torch.arange(9)
    with torch.no_grad():
        logits = read_texts(model, tokens[None])[0]
    saved = GPTNeoX.from_tensors(model.config, tensors)
    assert (run(saved, tokens.tolist()) - logits).abs().max() < 0.05  # float16's rounding


def test_shares_of_rows_are_the_targets() -> None:
    """Rows that are no stretch of the text, as often as was asked for."""
    at_work = little_training(batch=400)
    stretches = {tuple(row.tolist()) for row in at_work.text.unfold(0, 17, 1)}
    is_text = [tuple(row.tolist()) in stretches for row in at_work.draw_rows()]
    assert 0.4 < sum(is_text) / 400 < 0.6
    assert at_work.written.max() < 96  # what the draft can read


def test_only_the_latest_of_the_targets_rows_are_kept() -> None:
    at_work = little_training(batch=400)  # so many that it writes before each step
    for step in range(distil.N_KEPT + 3):
        at_work.step = step
        before = at_work.written
        at_work.draw_rows()
        assert len(at_work.written) == 4 * min(step + 1, distil.N_KEPT)
        if step >= distil.N_KEPT:
            n_changed = (at_work.written != before).any(dim=1).sum()
            assert n_changed == 4


def test_a_draft_learns_and_is_taken_at_once(
    target: str, text: str, tmp_path: Path, capsys: Captured
) -> None:
    assert distil.main(arguments(target, text, tmp_path / "draft", steps=40) + SHAPE) == 0
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "steps 40" in card and "minutes 30" not in card  # which would say nothing
    found = figures(tmp_path / "draft")
    assert found[outcome.LOSS][1] < found[outcome.LOSS][0] - 0.3
    assert found[outcome.AGREEMENT][1] > found[outcome.AGREEMENT][0] + 0.1
    assert {name.split()[0] for name in found} >= {"tokens/iter,"} and len(found) == 4
    names = {file.name for file in (tmp_path / "draft").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert [file.name for file in tmp_path.iterdir()] == ["draft"]  # nothing hidden is left
    models = ["--target", target, "--draft", str(tmp_path / "draft"), "--device", "cpu"]
    capsys.readouterr()
    assert dynatree(models + ["--prompt", "The ship", "--max-new-tokens", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4


class Killed(Exception):
    """Stands for what no program can catch."""


@pytest.mark.parametrize(
    ("place", "end", "status", "save_s"),
    [
        ("loss", Killed, 70, 0.0),
        ("let_target_write", KeyboardInterrupt, 130, 1000.0),
        ("loss", SystemExit, 130, 1000.0),
    ],
)
def test_an_ended_run_goes_on_exactly(
    place: str,
    end: type[BaseException],
    status: int,
    save_s: float,
    target: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """In step 4, before which the target has written rows; then all of that is done again. A
    SystemExit stands for SIGTERM, which was not heeded."""
    for module, name, value in (
        (distil, "N_USES", 1),
        (distil, "N_KEPT", 2),
        (distil, "SAVE_S", save_s),
    ):
        monkeypatch.setattr(module, name, value)
    assert distil.main(arguments(target, text, tmp_path / "whole", steps=8) + SHAPE) == 0
    options = arguments(target, text, tmp_path / "ended", steps=8) + SHAPE
    original = getattr(Training, place)

    def end_in_step_4(self: Training, *rest: Tensor) -> Tensor | None:
        found = original(self, *rest)
        if self.step == 4 and end is SystemExit:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.step == 4:
            raise end
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Training, place, end_in_step_4)
        assert distil.main(options) == status
    assert [file.name for file in tmp_path.glob("*ended*")] == [".ended.training"]
    if end is not Killed:
        assert "after step 4; the same command goes on" in capsys.readouterr().err
    assert distil.main(options) == 0
    assert "going on from step 4" in capsys.readouterr().err
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    weights = load_file(tmp_path / "ended" / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert figures(tmp_path / "ended") == figures(tmp_path / "whole")


def test_ctrl_c_leaves_the_checkpoint_or_the_folder(
    target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """It came when the folder had been written, and was told to go on with the same command."""
    original = distil.write_outcome

    def write(*rest: object) -> None:
        original(*rest)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(distil, "write_outcome", write)
    assert distil.main(arguments(target, text, tmp_path / "draft") + SHAPE) == 130
    assert "goes on" not in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["draft"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_figures_are_a_cpus(target: str, text: str) -> None:
    """Of windows that are one pass each: the next window's once took the place of all others'."""
    source = Source.open(target)
    held_out = corpus.read_corpus([Path(text)], source.tokenizer, 400, (0,)).held_out
    found = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        model = GPTNeoX.from_pretrained(target, device, fuse=False)
        text_ids = corpus.Corpus(held_out, held_out)
        plan = Plan(context=16)
        job = Job(Path(), device, source, None, source.config, text_ids, plan, {}, "")
        found.append(outcome.measure_held_out(job, model))
    assert found[1] == pytest.approx(found[0], abs=0.02)


def test_a_full_disk_loses_nothing(
    target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """First a checkpoint does not fit, then the folder."""
    monkeypatch.setattr(distil, "SAVE_S", 0.0)
    options = arguments(target, text, tmp_path / "draft") + SHAPE

    def fails_from(n: int, original: Callable) -> Callable:
        calls = []

        def write(*rest: object, **named: object) -> None:
            calls.append(rest)
            if len(calls) >= n:
                raise OSError(28, "No space left on device")
            original(*rest, **named)

        return write

    for module, name, n in ((resume, "write_whole", 4), (folders, "save_file", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails_from(n, getattr(module, name)))
            assert distil.main(options) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ") and "No space left on device" in line
        assert not (tmp_path / "draft").exists()
    assert distil.main(options) == 0
    assert "going on from step 5" in capsys.readouterr().err and (tmp_path / "draft").exists()


def test_another_runs_checkpoint_stays(
    target: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    options = arguments(target, text, tmp_path / "draft") + SHAPE
    with monkeypatch.context() as patch:
        patch.setattr(distil, "write_outcome", lambda *_: 1 / 0)
        assert distil.main(options) == 70
    before = contents(tmp_path)
    assert distil.main(options + ["--seed", "1", "--ce", "0.3"]) == 2
    assert "differs in ce, seed" in capsys.readouterr().err.splitlines()[-1]
    with locked(tmp_path / ".draft.training" / "state.pt"):
        assert distil.main(options) == 2
        assert "another run" in capsys.readouterr().err.splitlines()[-1]
    assert contents(tmp_path) == before
    (tmp_path / ".draft.training" / "state.pt").write_bytes(b"PK")
    assert distil.main(options) == 2
    assert "state.pt is no checkpoint" in capsys.readouterr().err.splitlines()[-1]


def test_a_draft_goes_on_learning(target: str, text: str, tmp_path: Path) -> None:
    options = arguments(target, text, tmp_path / "draft", steps=1)
    assert distil.main(options + ["--init", target]) == 0
    assert read_config(tmp_path / "draft") == read_config(Path(target))
    agreement = figures(tmp_path / "draft")[outcome.AGREEMENT]
    assert agreement[0] == 1.0  # it is the target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--text", "/dev/zero"], "/dev/zero is a device"),
        (["--text", "SHORT"], "too short"),
        (["--text", "LATIN"], "is not UTF-8"),
        (["--text", "."], "is a folder"),
        (["--text", "nowhere.txt"], "nowhere.txt is not there"),
        (["--out", "FULL"], "is not empty"),
        (["--out", "TARGET/draft"], "within it"),
        (["--out", "SHORT/draft"], "cannot be written to"),
        (["--out", "/proc/draft"], "0.0 MB are free"),
        (["--hidden", "100", "--heads", "3"], "100 is not a multiple of 3 heads"),
        (["--hidden", "100000000"], "would take"),
        (["--hidden", "1000000000"], "no tensor has such sizes"),
        (["--layers", "1000000"], "num_hidden_layers"),
        (["--init", str(TINY / "draft")], "--layers has no effect"),
        (["--minutes", "3"], "not allowed with"),
        (["--vocab", "300"], "--vocab has no effect"),
        (["--context", "4000"], "there are 2048 positions"),
        (["--greedy", "0.7", "--sampled", "0.4"], "together"),
        (["--ce", "nan"], "--ce=nan is outside 0.0 to 1.0"),
        (["--rate", "1e30"], "--rate=1e+30 is outside"),
        (["--target", "nowhere/model"], "nowhere/model"),
    ],
)
def test_a_mistake_is_one_line(
    changes: list[str], message: str, target: str, text: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "SHORT").write_text("A short text.")
    (tmp_path / "LATIN").write_bytes(b"caf\xe9 " * 500)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "mine").write_text("mine")
    before = contents(tmp_path)
    words = []
    for word in changes:
        word = word.replace("TARGET", target)
        if word.partition("/")[0] in ("SHORT", "LATIN", "FULL"):
            word = str(tmp_path / word)
        words.append(word)
    options = arguments(target, text, tmp_path / "deep" / "draft") + SHAPE
    assert distil.main(options + words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert contents(tmp_path) == before


def test_mistakes_without_a_target(text: str, tmp_path: Path, capsys: Captured) -> None:
    options = ["--text", text, "--out", str(tmp_path / "model"), "--steps", "1"] + SMALL
    for changes, message in (
        ([], "give --layers and --hidden"),
        (SHAPE + ["--greedy", "0.1"], "--greedy has no effect"),
        (SHAPE + ["--vocab", "9000"], "--vocab 9000: 257 to what the text gives"),
        (SHAPE + ["--vocab", "200"], "--vocab 200: 257 to"),
        (SHAPE + ["--vocab", str(10**12)], "--vocab 1000000000000: 257 to 1000000"),
    ):
        assert distil.main(options + changes) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir())


def test_tokenizers_that_differ(target: str, text: str, tmp_path: Path, capsys: Captured) -> None:
    options = arguments(target, text, tmp_path / "draft")
    assert distil.main(options + ["--init", str(TINY / "draft")]) == 2
    assert "tokenizers differ: vocabulary, merges" in capsys.readouterr().err


def test_a_text_in_pieces_is_the_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 100)
    whole = Path(text).read_text()
    parts = list(corpus.pieces(whole))
    assert "".join(parts) == whole and len(parts) > 20
    tokenizer = corpus.learn_tokenizer([Path(text)], 400)
    found = corpus.read_corpus([Path(text)] * 2, tokenizer, 400, (0,))
    end = len(whole) - len(whole) // corpus.HELD_OUT
    for ids, part in ((found.train, whole[:end]), (found.held_out, whole[end:])):
        assert tokenizer.decode(ids.tolist()) == part * 2
        assert ids.tolist().count(0) == 2 and ids[0] == 0
