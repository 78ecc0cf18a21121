"""Tests of Llama: every method writes what the target alone writes."""

import pytest
import torch
from fast import generate

from dynatree_lab.methods import METHODS
from llama import Llama, LlamaConfig

CONFIG = LlamaConfig(64, 32, 2, 4, 48, num_key_value_heads=2, eos_ids=())


def make(seed: int, noise: float = 0.0) -> Llama:
    torch.manual_seed(seed)
    model = Llama(CONFIG).requires_grad_(False)
    for weight in model.parameters():
        weight += 0.3 * torch.randn_like(weight)
    torch.manual_seed(seed + 1)
    for weight in model.parameters():
        weight += noise * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_the_targets(method: str) -> None:
    target, draft = make(1), make(1, noise=0.03)
    text = [3, 14, 15]
    steps = list(generate(target, draft, text, METHODS[method](), 40))
    text += [token for step in steps for token in step.tokens]
    logits = target(torch.tensor(text), torch.arange(len(text)), target.new_cache(len(text)))
    assert text[3:] == logits.argmax(dim=-1)[2:-1].tolist()
    assert method == "ar" or max(len(step.path) for step in steps) > 1
