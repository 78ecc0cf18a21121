"""A draft learns from text and target, goes on exactly after whatever ended it, and dynatree.py
takes it; a mistake is one line and costs nothing."""

import gc
from pathlib import Path

import pytest
import torch
from conftest import assert_close, random_config, random_model, random_tensors, run

from benchmark.prompts import BUILTIN
from engine.checkpoint import EMBED_OUT, Config
from gpt_neox import GPTNeoX
from tools import corpus, training
from tools.trainable import Trainable, published_json
from tools.training import Plan, Training


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "N_WRITTEN", {"cpu": 4})
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a tenth of a second among all that pytest has


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text("\n\n".join(BUILTIN * 2))
    return str(file)


@pytest.mark.parametrize(
    "changes",
    [{}, {"is_parallel": False}, {"is_tied": True}, {"has_attention_bias": False}]
    + [{"activation": "gelu_new", "rotary_fraction": 1.0}],
)
def test_logits_are_gpt_neoxs(changes: dict) -> None:
    config = random_config(**changes)
    model = Trainable(config, random_tensors(config, seed=3))
    tokens = torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(0))
    expected = GPTNeoX(config, random_tensors(config, seed=3))
    with torch.no_grad():
        logits = model(tokens)
    for row in range(3):
        assert_close(logits[row], run(expected, tokens[row].tolist()))
    assert Config.from_json(published_json(config)) == config


def test_texts_written_at_once_are_those_of_one_at_a_time() -> None:
    config = random_config()
    model = Trainable(config, random_tensors(config, seed=3))
    oracle = random_model(seed=3)
    prompts = torch.randint(96, (3, 5), generator=torch.Generator().manual_seed(1))
    texts = model.write(prompts, 12, torch.zeros(3), torch.Generator(), n_ids=96)
    for row in range(3):
        text = prompts[row].tolist()
        for _ in range(12):
            text.append(int(run(oracle, text)[-1].argmax()))
        assert texts[row].tolist() == text


def test_what_is_sampled_has_the_targets_distribution() -> None:
    config = random_config(vocab_size=8)
    tensors = random_tensors(config, seed=3)
    model = Trainable(config, tensors)
    prompts = torch.tensor([[5, 2, 7]]).expand(4000, -1)
    for temperature in (0.5, 1.0):
        temperatures = torch.full((4000,), temperature)
        chance = torch.Generator().manual_seed(0)
        drawn = model.write(prompts, 1, temperatures, chance, n_ids=8)[:, -1]
        with torch.no_grad():
            probs = (model(prompts[:1])[0, -1] / temperature).softmax(-1)
        counts = drawn.bincount(minlength=8)
        possible = probs > 1e-3
        chi_square = ((counts - 4000 * probs) ** 2 / (4000 * probs))[possible].sum()
        assert chi_square < 24.3  # 0.1 % of samples, 7 degrees of freedom


def little_plan(**changes: object) -> Plan:
    values = {"steps": 9, "minutes": None, "batch": 4, "context": 16, "rate": 0.01, "ce": 0.2}
    values |= {"greedy": 0.25, "sampled": 0.25, "seed": 0}
    return Plan(**(values | changes))


def little_training(n_ids: int = 96, n_target_ids: int = 104, **changes: object) -> Training:
    """Of one model by another, one of which has a padded vocabulary."""
    models = []
    for seed, vocab_size in ((1, n_ids), (2, n_target_ids)):
        config = random_config(vocab_size=vocab_size)
        tensors = random_tensors(config, seed)
        tensors[EMBED_OUT][96:] *= 9  # what would most often be written
        models.append(Trainable(config, tensors))
    text = torch.randint(96, (200,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    teacher = models[1].requires_grad_(False)
    found = Training(little_plan(**changes), models[0], text, teacher)
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
        draft_probs = at_work.model(tokens)[..., :96].double().softmax(-1)
        target_probs = at_work.teacher(tokens)[..., :96].double().softmax(-1)
    next_token = -draft_probs.gather(-1, following).log().mean()
    divergence = (target_probs * (target_probs / draft_probs).log()).sum(-1).mean()
    assert abs(at_work.loss(rows).item() - (0.2 * next_token + 0.8 * divergence)) < 1e-4


def test_a_step_in_parts_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are learned from a few at a time, so that their logits fit."""
    whole = little_training()
    parts = little_training()
    losses = [whole.advance() for _ in range(3)]
    monkeypatch.setattr(training, "MAX_LOGITS", {"cpu": 1})
    assert losses == pytest.approx([parts.advance() for _ in range(3)], abs=1e-4)


def test_shares_of_rows_are_the_targets() -> None:
    """Rows that are no stretch of the text, as often as was asked for."""
    at_work = little_training(batch=400)
    stretches = {tuple(row.tolist()) for row in at_work.text.unfold(0, 17, 1)}
    is_text = [tuple(row.tolist()) in stretches for row in at_work.draw_rows()]
    assert 0.4 < sum(is_text) / 400 < 0.6
    assert at_work.written.max() < 96  # what the draft can read


def test_only_the_latest_of_the_targets_rows_are_kept() -> None:
    at_work = little_training(batch=400)  # so many that it writes before each step
    for step in range(training.N_KEPT + 3):
        at_work.step = step
        before = at_work.written
        at_work.draw_rows()
        assert len(at_work.written) == 4 * min(step + 1, training.N_KEPT)
        if step >= training.N_KEPT:
            n_changed = (at_work.written != before).any(dim=1).sum()
            assert n_changed == 4


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
