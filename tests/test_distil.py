"""A draft learns from text and target, goes on exactly after whatever ended it, and dynatree.py
takes it; a mistake is one line and costs nothing."""

import pytest
import torch
from conftest import assert_close, random_config, random_model, random_tensors, run

from engine.checkpoint import Config
from gpt_neox import GPTNeoX
from tools.trainable import Trainable, published_json


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
