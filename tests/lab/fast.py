"""Random fast models and heads, the engine's generate over them, and stand-ins for a GPU."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import small
import tape
import torch
from safetensors.torch import save_file
from small import random_config, write_checkpoint
from torch import Tensor, nn

import dynatree_lab.generation.generate
from draft_tree import Settings
from dynatree_lab.engine import cuda_graphs
from dynatree_lab.engine.checkpoint import INDEX, SINGLE, published_shapes
from dynatree_lab.engine.eagle_head import FastHead
from dynatree_lab.engine.model import FastGPTNeoX
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.generation.step import Step
from dynatree_lab.methods.eagle import EagleHead, StateTransformer, predicted_states, with_states
from gpt_neox import Config, GPTNeoX, KVCache

# As in small.py, but fast models if no other `kind` is given
random_model = partial(small.random_model, kind=FastGPTNeoX)
noisy_pair = partial(small.noisy_pair, kind=FastGPTNeoX)


def pretend_one_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Report one GPU of this compute capability. Nothing can be computed on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended GPU")


def pretend_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record and replay passes of fixed shapes on the CPU, as CUDA graphs do on a GPU."""
    monkeypatch.setattr(cuda_graphs, "capture_graph", tape.record)


def make_head(
    tensors: dict[str, Tensor],
    seed: int,
    kind: type[EagleHead] = FastHead,
    scale: float = 0.3,
    **changes: object,
) -> EagleHead:
    """Return a head for the target with these weights, which random_config(**changes) describes.

    It runs the target's first layer over the embeddings plus noise. The noise has this standard
    deviation, relative to the embeddings and to the states.
    """
    config = random_config(**changes | {"num_hidden_layers": 1})
    weights = {name: tensors[name].clone() for name in published_shapes(config)}
    head = kind.from_tensors(config, weights)
    n = config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, 2 * n, generator=generator) * scale * n**-0.5
    bias = torch.randn(n, generator=generator) * scale * n**-0.5
    dtype = tensors["embed_out.weight"].dtype
    fc = nn.Linear(2 * n, n, dtype=dtype)
    fc.weight.data, fc.bias.data = (torch.eye(n, 2 * n) + noise).to(dtype), bias.to(dtype)
    head.add_state_input(fc.requires_grad_(False))
    return head


def predict_states(head: EagleHead, tokens: list[int], states: Tensor) -> Tensor:
    """Return the states [n, hidden] that a head predicts at the n tokens of a text, by one pass.
    states: [n, hidden], before each token."""
    cache = head.new_cache(len(tokens))
    cache.next_states = states
    head.prefill(tokens, cache)
    return predicted_states(cache, list(range(len(tokens))))


class PlainStateTransformer(StateTransformer):
    """The state input of gpt_neox.Transformer."""

    def written_slots(self, n: int, mask: Tensor) -> Tensor:
        return torch.arange(mask.shape[1] - n, mask.shape[1])


class ReferenceHead(EagleHead, GPTNeoX):
    """A head on the model of gpt_neox.py, whose every pass is a call of `hidden`: the oracle."""

    transformer_class = PlainStateTransformer

    def new_cache(self, capacity: int) -> KVCache:
        cache = super().new_cache(capacity)
        cache.kv = with_states(cache.kv)
        return cache

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        self.take_states(cache, len(tokens))
        return super().hidden(tokens, positions, cache, mask)


class Stub(GPTNeoX):
    """A reference model whose logits depend only on a row's own token and position."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor], vocab_size: int):
        """logits: maps tokens [n] and positions [n] to logits [n, V]."""
        super().__init__(random_config(vocab_size=vocab_size, num_hidden_layers=1))
        self.logits_of = logits

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None = None
    ) -> Tensor:
        return self.logits_of(tokens, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Only:
    """A model that has exactly the members of gpt_neox.Model."""

    def __init__(self, model: GPTNeoX):
        for name in ("config", "device", "new_cache", "prefill", "forward"):
            setattr(self, name, getattr(model, name))


def count_rows(model: GPTNeoX) -> list[int]:
    """Return a list that gets the number of rows of each pass, unless it is replayed."""
    rows: list[int] = []
    model.gpt_neox.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    return rows


GENERATE_ARGUMENTS = ("accept", "eos_ids", "drafter", "logprobs", "inspect", "is_recorded", "kept")


def generate(
    target: GPTNeoX,
    draft: GPTNeoX | None,
    prompt: list[int],
    settings: Settings,
    max_new_tokens: int,
    **options: object,
) -> Iterator[Step]:
    """Run the engine's generate. `options`: its arguments and the fields of GenerationConfig."""
    rest = {name: options.pop(name) for name in GENERATE_ARGUMENTS if name in options}
    config = GenerationConfig(settings, **options)
    return dynatree_lab.generation.generate.generate(
        target, draft, prompt, config, max_new_tokens, **rest
    )


def fix_shapes(*models: FastGPTNeoX) -> None:
    """Give passes a few fixed shapes, as on CUDA. After pretend_capture they are replayed."""
    for model in models:
        model.has_fixed_shapes = True


def append(model: GPTNeoX, tokens: list[int], cache: KVCache) -> Tensor:
    """Append tokens to the cache in one pass and return the logits [1, V] after the last one."""
    positions = torch.arange(cache.length, cache.length + len(tokens))
    logits = model.forward(torch.tensor(tokens), positions, cache)
    cache.commit(range(len(tokens)))
    return logits[-1:]


def write_shards(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint as three shards and their index, each layer spread over all of them."""
    write_checkpoint(folder, config, {})
    (folder / SINGLE).unlink()
    weight_map = {}
    for i in range(3):
        names = list(tensors)[i::3]
        save_file({name: tensors[name] for name in names}, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{i}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def override(words: Sequence[str], *later: str) -> list[str]:
    """Return a command line in which the later options replace those of the same names."""
    named = {word.partition("=")[0] for word in later if word.startswith("--")}
    kept, is_replaced = [], False
    for word in words:
        if word.startswith("--"):
            is_replaced = word in named
        if not is_replaced:
            kept.append(word)
    return [*kept, *later]
