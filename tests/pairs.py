"""Pairs for tests of exactness: targets of varied greedy text, and drafts from equal to adverse."""

import functools

import torch
from small import random_config, random_tensors
from torch import Tensor

from gpt_neox import GPTNeoX

VOCAB = 96
DRAFTS = ("equal", "noise0.02", "half0.1", "noise0.3", "adversary", "small", "vocab48", "vocab112")
TARGET_SEEDS = (1, 3, 4, 5, 6, 7, 11)  # their greedy text has at least 10 distinct ids in 48

Tensors = dict[str, Tensor]  # a model's weights
Changes = dict[str, object]  # fields of Config that differ from small.random_config's


def build_model(tensors: Tensors, kind: type[GPTNeoX] = GPTNeoX, **changes: object) -> GPTNeoX:
    """Build a model from a copy of the weights, because a fork's model may consume its weights."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return kind.from_tensors(random_config(**changes), copies)


def argmax_no_tie(logits: Tensor) -> int:
    """Return the likeliest id by logits [V]. Fails if rounding could change it."""
    first, second = logits.topk(2).values.tolist()
    assert first - second > 3e-5, "a tie, which a tree may decide differently"
    return int(logits.argmax())


def generate_greedy(target: GPTNeoX, prompt: list[int], n: int) -> list[int]:
    """Return n greedy tokens. This oracle prefills the whole sequence for each, without a tree."""
    ids = list(prompt)
    for _ in range(n):
        logits = target.prefill(ids, target.new_cache(len(ids)))[0]  # [V]
        ids.append(argmax_no_tie(logits))
    return ids[len(prompt) :]


@functools.cache
def target_weights(number: int) -> tuple[Tensors, Changes]:
    """Return the weights of a random target, and its config's difference to the usual one."""
    seed = TARGET_SEEDS[number % len(TARGET_SEEDS)]
    changes: Changes = {"use_parallel_residual": seed % 3 > 0, "max_position_embeddings": 128}
    if seed % 2:
        changes["max_position_embeddings"] = 24  # most texts run past the trained range
    return random_tensors(random_config(**changes), seed), changes


def make_draft(
    kind: str,
    tensors: Tensors,
    changes: Changes,
    seed: int,
    model: type[GPTNeoX] = GPTNeoX,
) -> GPTNeoX:
    """Return a draft for this target: an equal model, a noisy one (also in half precision), an
    adversarial one, one with another padded vocabulary, or a smaller random one."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "small":
        changes = changes | {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        tensors = random_tensors(random_config(**changes), seed)
    elif kind == "adversary":  # its best candidates are the target's worst
        tensors = tensors | {"embed_out.weight": -tensors["embed_out.weight"]}
    elif kind.startswith("vocab"):  # cut to this size, or padded with large random rows
        size = int(kind.removeprefix("vocab"))
        changes = changes | {"vocab_size": size}
        extra = 3 * torch.randn(max(size - VOCAB, 0), 32, generator=generator)
        longer = {n: torch.cat([t, extra])[:size] for n, t in tensors.items() if "embed" in n}
        tensors = tensors | longer
    elif kind != "equal":  # noise relative to each tensor's standard deviation
        scale = float(kind.removeprefix("half").removeprefix("noise"))
        noise = {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        tensors = {n: t + scale * t.std() * noise[n] for n, t in tensors.items()}
    if kind.startswith("half"):
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        tensors = {n: t.to(dtype) for n, t in tensors.items()}
    return build_model(tensors, model, **changes)
